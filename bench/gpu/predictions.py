"""What was expected of GPUs before the code had run on one, beside what was measured.

The predictions were made on 2026-11-22 from compiled kernels (SASS for sm_90) and from published measurements: of NCCL
and of PyTorch's all-reduce kernels on 8 H100 (vllm-project/vllm#42324), and of NCCL with NVLS (NVIDIA/nccl-tests#212).
They are for an H100 or H200. They are not aims: where a prediction is wrong, something is not understood.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

Row = dict[str, Any]

_MIB: Final = 1 << 20
# Microseconds of a meeting by number of ranks. Signals to all peers leave at once now; before, they left one by one.
_MEETINGS: Final = {2: "2 to 3 us; one by one 3 us", 4: "2 to 3 us; one by one 7 us", 8: "2 to 3 us; one by one 14 us"}
_GEMMS: Final = {8: "about +6 %", 16: "about +12 %", 24: "+18 to +25 %", 32: "about +24 % or more"}  # of 132 processors
# Milliseconds on 8 GPUs that NVLink connects, by MiB, as published: NCCL, PyTorch with NVLS, and PyTorch's two-shot
# all-reduce, whose algorithm is that of "direct".
_PUBLISHED: Final = {
    1: {"native": 0.025, "nvls": 0.014, "direct": 0.017},
    8: {"native": 0.076, "nvls": 0.046, "direct": 0.065},
    16: {"native": 0.121, "nvls": 0.087, "direct": 0.125},
    32: {"native": 0.195, "nvls": 0.165, "direct": 0.242},
    128: {"native": 0.561, "nvls": 0.631, "direct": 0.923},
}
_NUM_GPUS_PUBLISHED: Final = 8


def compare(rows: Sequence[Row]) -> list[list[str]]:
    """(what, measured, predicted) for each prediction of which something was measured."""
    fine = [row for row in rows if "problem" not in row]
    return [*_of_streams(fine), *_of_buckets(fine), *_of_packing(fine), *_of_all_reduces(fine)]


def _of_streams(rows: Sequence[Row]) -> Iterator[list[str]]:
    for row in _in_section(rows, "streams"):
        blocks = f"{row.get('blocks')} blocks"
        if row["kind"] == "meeting" and row["op"] == "direct" and row["ranks"] in _MEETINGS:
            measured = f"{row['us_of_a_meeting']['p50']:.1f} us"
            yield [f"meeting of {row['ranks']} ranks, {blocks}", measured, _MEETINGS[row["ranks"]]]
        if row["kind"] == "gemm" and row["blocks"] in _GEMMS:
            yield [
                f"matrix multiplication beside {blocks} that wait",
                f"{row['slower_by']:+.1%}",
                _GEMMS[row["blocks"]],
            ]


def _of_buckets(rows: Sequence[Row]) -> Iterator[list[str]]:
    for row in _in_section(rows, "bucket"):
        if not row["addresses_change"]:
            what = f"host time of a bucket, {row['load']}, {row['algorithm']}, {row['compression'] or 'fp32'}"
            total = f"{1e3 * row['ms']['total']['p50']:.0f} us"
            yield [what, total, "65 to 90 us with Triton's launches, less with prepared ones"]


def _of_packing(rows: Sequence[Row]) -> Iterator[list[str]]:
    for row in _in_section(rows, "kernels"):
        if row["op"] == "pack" and row["load"] in ("resnet50", "gpt2") and "torchring" in row["of_copy"]:
            what = f"pack {row['load']}, {row['source']} to {row['target']}"
            yield [what, f"{row['of_copy']['torchring']['p50']:.0%} of a copy", "at least 90 %"]


def _of_all_reduces(rows: Sequence[Row]) -> Iterator[list[str]]:
    for row in _in_section(rows, "allreduce"):
        published = _PUBLISHED.get(row["size"] // _MIB, {}) if row["size"] % _MIB == 0 else {}
        is_alike = row["ranks"] == _NUM_GPUS_PUBLISHED and not row["shares_one_gpu"]
        if is_alike and row["algorithm"] in published:
            what = f"{row['algorithm']}, {row['ranks']} ranks, {row['size'] // _MIB} MiB"
            predicted = published[row["algorithm"]]
            yield [what, f"{row['ms']['p50']:.3f} ms", f"{predicted:.3f} ms"]


def _in_section(rows: Sequence[Row], section: str) -> list[Row]:
    return [row for row in rows if row["section"] == section]
