"""One GPU: kernels against a copy, host time per bucket, all-reduce by size, training steps.

    torchring bench gpu --json results.jsonl           all sections, in the order of the list below
    torchring bench gpu --sections step bucket

Each section runs in processes of its own, for a limited time, so that no section can spoil or stop another:

    step       a training step of one rank: the plain optimizer, torchring, and DDP over NCCL; and the memory that each
               takes at its peak
    bucket     the host's time for packing, reducing and unpacking a bucket
    kernels    pack and unpack as a share of a copy of the same bytes, and torch._foreach_copy_
    allreduce  direct and ring between ranks; if each rank has a GPU, NCCL and PyTorch's two_shot_all_reduce_ and
               multimem_all_reduce_. Ranks that share one GPU take turns in slices of milliseconds: such times show
               that all-reduce works, and say nothing about NVLink

bench/README.md says what the rows mean. Rates count bytes that are read and bytes that are written. The row of a
measurement that fails has a "problem".
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Final

import torch

import torchring
from torchring.bench import measure
from torchring.bench.gpu import buckets, kernels, training
from torchring.bench.gpu.timing import Case, Row, measured, text_of
from torchring.bench.measure import Command
from torchring.devices.symmetric_memory import OVERLAPPING_DEVICES

_CASES: Final[dict[str, Callable[[], Iterable[Case]]]] = {
    "step": training.steps,
    "bucket": buckets.host_times,
    "kernels": kernels.kernels,
}
_SECONDS: Final = {"step": 120, "bucket": 40, "kernels": 85, "allreduce": 45}
_REPORTED: Final = 3  # exit code of a process whose rows say what failed
_PEER_SECONDS: Final = 20.0  # how long a rank waits for another rank


def main() -> int:
    parser = measure.parser("gpu", __doc__ or "")
    parser.add_argument("--sections", nargs="+", choices=list(_SECONDS), default=list(_SECONDS))
    options = parser.parse_args()
    if options.worker:
        section, algorithm = options.worker.split(",")
        return work(section, algorithm, options.json)
    if not torch.cuda.is_available():
        print("torchring bench gpu needs a CUDA GPU", file=sys.stderr)
        return 2
    num_gpus = torch.cuda.device_count()
    has_failed = False
    for section in options.sections:
        numbers = (2, 4, 8)[: 3 if num_gpus >= 8 else 2]
        ways = [(ranks, algorithm) for ranks in numbers for algorithm in buckets.RIVALS]
        for ranks, algorithm in ways if section == "allreduce" else [(1, "none")]:
            if algorithm not in ("direct", "ring") and ranks > num_gpus:
                continue
            has_failed |= run(section, ranks, algorithm, options.json) != 0
    return int(has_failed)


def run(section: str, ranks: int, algorithm: str, file: str | None) -> int:
    """Run a section in processes of its own. Returns an exit code; if it is not 0, a row has a "problem"."""
    arguments = ["--worker", f"{section},{algorithm}", *(["--json", file] if file else [])]
    if ranks == 1:
        environment = measure.search_path()
        commands = [Command(section, [sys.executable, __file__, *arguments], environment)]
    else:
        commands = measure.rank_commands(
            __file__, ranks, arguments, measure.Launcher(environment={OVERLAPPING_DEVICES: "1"})
        )
    code = measure.run_together(commands)
    if code not in (0, _REPORTED):
        problem = f"ended with exit code {code}, see the log"
        _report({"section": section, "ranks": ranks, "algorithm": algorithm, "problem": problem}, file)
    return code


def work(section: str, algorithm: str, file: str | None) -> int:
    """Run as one rank of a section. Rank 0 reports each row as it comes."""
    faulthandler.dump_traceback_later(_SECONDS[section], exit=True)
    if section == "allreduce":
        torchring.init(timeout_seconds=_PEER_SECONDS)
    torch.cuda.set_device(torchring.device() if section == "allreduce" else 0)
    has_failed = False
    for row in measured(section, buckets.all_reduces(algorithm) if section == "allreduce" else _CASES[section]()):
        has_failed |= "problem" in row
        if os.environ.get("RANK", "0") == "0":
            _report(row, file)
    return _REPORTED if has_failed else 0


def _report(row: Row, file: str | None) -> None:
    print(text_of(row), flush=True)
    measure.write_rows(file, [row], _about())


@cache
def _about() -> dict[str, Any]:
    return measure.provenance() | {"script": "gpu", "gpu": facts()}


def facts() -> dict[str, Any]:
    """The GPU, and the version of NCCL."""
    found = {"name": torch.cuda.get_device_name(0), "count": torch.cuda.device_count(), "nccl": None}
    with contextlib.suppress(RuntimeError, AttributeError, ImportError):
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


if __name__ == "__main__":
    sys.exit(main())
