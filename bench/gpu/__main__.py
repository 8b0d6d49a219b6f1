"""One GPU: kernels against a copy, host time per bucket, all-reduce by size, training steps.

    torchring bench gpu --json results.jsonl           all sections, in the order of the list below
    torchring bench gpu --sections step bucket copy

Each section runs in processes of its own, for a limited time, so that no section can spoil or stop another:

    streams    2, 4 and 8 ranks as streams of one process: order, meetings, waiting blocks, aborts; see streams.py
    step       a training step of one rank: the plain optimizer, torchring with the algorithms ring and direct, and DDP
               over NCCL; and the memory that each takes at its peak
    bucket     host time for packing, reducing and unpacking one bucket, and the number of launches and CUDA calls
    copy       device-to-device copies by size: the rate that the memory reaches
    kernels    pack, unpack and accumulate as a share of a copy of the same bytes, and torch's ways to do the same
    allreduce  direct and ring between ranks, and NCCL and nvls if each rank has a GPU. Ranks that share one GPU take
               turns in slices of milliseconds: such times show that all-reduce works, and say nothing about NVLink

Which rows answer which question:

    is direct, nvls or NCCL faster, by size of the wire?       allreduce, 1 to 128 MiB
    how long does a meeting take?                              streams, meeting; allreduce, 1 KiB
    are loads of 8 ranks in flight at once?                    streams, sum, 8 ranks
    what do gradients take beside the wires?                   step, peak
    what does the pass after NCCL cost?                        streams, alone; allreduce, native
    does an abort end a kernel that waits?                     streams, abort
    what do waiting blocks cost backward, by their number?     streams, gemm
    what does a bucket cost the host?                          bucket

Rates count bytes that are read and bytes that are written. The row of a measurement that fails has a "problem".
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import torch

import torchring
from torchring.allreduce.select import ALGORITHMS
from torchring.bench import measure
from torchring.bench.gpu import buckets, kernels, streams, training
from torchring.bench.gpu.timing import Case, Row, measured
from torchring.bench.measure import Command
from torchring.memory.cuda import OVERLAPPING_DEVICES

_CASES: Final[dict[str, Callable[[], Iterable[Case]]]] = {
    "streams": streams.ranks_as_streams,
    "step": training.steps,
    "bucket": buckets.host_times,
    "copy": kernels.copies,
    "kernels": kernels.kernels,
}
_SECONDS: Final = {"streams": 120, "step": 150, "bucket": 60, "copy": 60, "kernels": 150, "allreduce": 60}
_PEER_SECONDS: Final = 20.0  # how long a rank waits for another rank


def main() -> int:
    parser = measure.parser("gpu", __doc__ or "")
    parser.add_argument("--sections", nargs="+", choices=list(_SECONDS), default=list(_SECONDS))
    parser.add_argument("--ranks", type=measure.several, nargs="+", help="of allreduce: 2, 4 and, on 8 GPUs, 8")
    options = parser.parse_args()
    if options.worker:
        return work(*options.worker.split(","))
    if not torch.cuda.is_available():
        print("torchring bench gpu needs a CUDA GPU", file=sys.stderr)
        return 2
    about = measure.provenance() | {"script": "gpu", "gpu": facts()}
    num_gpus = torch.cuda.device_count()
    has_failed = False
    for section in options.sections:
        rows = []
        if section != "allreduce":
            rows += run(section, 1, "none")
        for ranks in options.ranks or [2, 4, *([8] if num_gpus >= 8 else [])] if section == "allreduce" else []:
            of_gpus = ["native", *(["nvls"] if about["gpu"]["multicast"] and "nvls" in ALGORITHMS else [])]
            for algorithm in ["direct", "ring", *(of_gpus if ranks <= num_gpus else [])]:
                rows += run(section, ranks, algorithm)
        has_failed |= any("problem" in row for row in rows)
        measure.write_rows(options.json, rows, about | {"section": section})
    return int(has_failed)


def run(section: str, ranks: int, algorithm: str) -> list[Row]:
    """Run a section in processes of its own, and print its rows. If a process fails, the last row has a "problem"."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        arguments = ["--worker", f"{section},{algorithm},{file.name}"]
        if ranks == 1:
            environment = measure.search_path() | streams.ENVIRONMENT
            commands = [Command(section, [sys.executable, __file__, *arguments], environment)]
        else:
            commands = measure.rank_commands(__file__, ranks, arguments, environment={OVERLAPPING_DEVICES: "1"})
        code = measure.run_together(commands)
        rows: list[Row] = [json.loads(line) for line in Path(file.name).read_text().splitlines()]
    if code:
        problem = f"ended with exit code {code}" + (", at its limit" if code == 128 + signal.SIGALRM else "")
        rows.append({"section": section, "ranks": ranks, "algorithm": algorithm, "problem": problem})
        print(rows[-1])
    return rows


def work(section: str, algorithm: str, file: str) -> int:
    """Run as one rank of a section. Rank 0 prints the rows, and writes them to the file for the first process."""
    signal.alarm(_SECONDS[section])  # ends this process
    rank = int(os.environ.get("RANK", "0"))
    if section == "allreduce":
        torchring.init(timeout_seconds=_PEER_SECONDS)
    torch.cuda.set_device(torchring.device() if section == "allreduce" else 0)
    cases = buckets.all_reduces(algorithm) if section == "allreduce" else _CASES[section]()
    try:
        for row in measured(section, cases):
            if rank == 0:
                print(text_of(row), flush=True)
                with open(file, "a") as rows:
                    rows.write(json.dumps(row) + "\n")
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def text_of(row: Row) -> str:
    """A row as a line: p50 (p20-p80) for quantiles."""

    def text(value: Any) -> str:
        if not isinstance(value, dict):
            return f"{value:.4g}" if isinstance(value, float) else str(value)
        if "p50" in value:
            return f"{value['p50']:.4g} ({value['p20']:.4g}-{value['p80']:.4g})"
        return "{" + ", ".join(f"{key} {text(each)}" for key, each in value.items()) + "}"

    hidden = ("stats", "api_calls", "on_device", "reason")
    return "  ".join(f"{key}={text(value)}" for key, value in row.items() if key not in hidden)


def facts() -> dict[str, Any]:
    """The GPU, and the versions of CUDA and NCCL."""
    properties = torch.cuda.get_device_properties(0)
    found = {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "processors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "cache_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda,
        "nccl": None,
        "multicast": False,
    }
    with contextlib.suppress(RuntimeError, AttributeError, ImportError):
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    with contextlib.suppress(RuntimeError, AttributeError):
        memory, kind = torch._C._distributed_c10d._SymmetricMemory, torch._C._autograd.DeviceType.CUDA
        found["multicast"] = memory.has_multicast_support(kind, 0)
    return found


if __name__ == "__main__":
    sys.exit(main())
