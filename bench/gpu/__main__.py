"""All-reduce between ranks of one host, by size, on its GPUs.

    torchring bench gpu --json results.jsonl

Ranks reduce by direct and ring; if each rank has a GPU, also by NCCL and by PyTorch's two_shot_all_reduce_ and
multimem_all_reduce_. Each way runs in processes of its own, for a limited time, so that none can spoil or stop another.
Ranks that share one GPU take turns in slices of milliseconds: such times show that all-reduce works, and say nothing
about NVLink. The row of a measurement that fails has a "problem".

`python -m qa.gpu.check` has the figures of one GPU: kernels, the host's time, steps.
"""

import contextlib
import faulthandler
import sys
from functools import cache
from typing import Any, Final

import torch

import torchring
from torchring.bench import measure
from torchring.bench.gpu.allreduce import RIVALS, all_reduces
from torchring.bench.gpu.timing import Row, measured, text_of
from torchring.bench.options import parser
from torchring.devices.symmetric_memory import OVERLAPPING_DEVICES

_SECONDS: Final = 45
_REPORTED: Final = 3  # exit code of a process whose rows say what failed
_PEER_SECONDS: Final = 20.0  # how long a rank waits for another rank


def main() -> int:
    options = parser("gpu").parse_args()
    if options.worker:
        return work(options.worker, options.json)
    if not torch.cuda.is_available():
        print("torchring bench gpu needs a CUDA GPU", file=sys.stderr)
        return 2
    num_gpus = torch.cuda.device_count()
    has_failed = False
    for ranks in (2, 4, 8)[: 3 if num_gpus >= 8 else 2]:
        for algorithm in RIVALS:
            if algorithm in ("direct", "ring") or ranks <= num_gpus:
                has_failed |= run(ranks, algorithm, options.json) != 0
    return int(has_failed)


def run(ranks: int, algorithm: str, file: str | None) -> int:
    """Run in processes. Returns an exit code; if it is not 0, a row has a "problem"."""
    arguments = ["--worker", algorithm, *(["--json", file] if file else [])]
    launcher = measure.Launcher(environment={OVERLAPPING_DEVICES: "1"})
    code = measure.run_together(measure.rank_commands(__file__, ranks, arguments, launcher))
    if code not in (0, _REPORTED):
        problem = f"ended with exit code {code}, see the log"
        _report({"ranks": ranks, "algorithm": algorithm, "problem": problem}, file)
    return code


def work(algorithm: str, file: str | None) -> int:
    """Run as one rank. Rank 0 reports each row as it comes."""
    faulthandler.dump_traceback_later(_SECONDS, exit=True)
    torchring.init(timeout_seconds=_PEER_SECONDS)
    torch.cuda.set_device(torchring.device())
    has_failed = False
    for row in measured(all_reduces(algorithm)):
        has_failed |= "problem" in row
        if torchring.rank() == 0:
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
