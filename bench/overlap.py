"""Overlap of communication with backward on a GPU, in one profiled training step.

    torchring bench overlap --trace step.json                     one rank, which runs all kernels nevertheless
    torchring run -np 8 bench/overlap.py --model gpt2-bf16        eight ranks with a GPU each

After some steps that warm up, profiles a step with torch.profiler, and prints how much of the time of communication
kernels overlaps with kernels of streams without communication. While buckets are reduced, those are the kernels of
backward. Communication kernels are NCCL's and torchring's, except `unpack`, which runs on the stream that computes.
`--trace` writes a Chrome trace (for Perfetto).
"""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity

import torchring
from torchring.allreduce.select import ALGORITHMS, Algorithm
from torchring.bench import measure
from torchring.bench.gpu.training import CONFIGS, Training, connected

Interval = tuple[float, float]
Kernel = tuple[str, int, Interval]  # name, stream, begin and end in microseconds

_COMMUNICATION: Final = re.compile(r"^_(pack|direct|ring)_kernel|nccl", re.IGNORECASE)
_NUM_WARMUPS: Final = 6


def main() -> int:
    parser = measure.parser("overlap", __doc__ or "")
    parser.add_argument("--model", choices=list(CONFIGS), default=next(iter(CONFIGS)))
    parser.add_argument(
        "--algorithm", choices=ALGORITHMS, help="as in torchring.wrap (default: ring on one rank, else auto)"
    )
    parser.add_argument("--trace", type=measure.writable, metavar="FILE", help="where to write the Chrome trace")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("torchring bench overlap needs a CUDA GPU", file=sys.stderr)
        return 2
    torchring.init()
    torch.cuda.set_device(torchring.device())
    algorithm: Algorithm = options.algorithm or ("ring" if torchring.size() == 1 else "auto")
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        kernels, stats = profile_step(options.model, algorithm, options.trace or file.name)
    if torchring.rank() > 0:
        return 0
    row = {"model": options.model, "ranks": torchring.size(), "algorithm": stats.algorithm, **overlap_of(kernels)}
    print("  ".join(f"{key}={value}" for key, value in row.items()))
    about = measure.provenance() | {"script": Path(__file__).name, "gpu": torch.cuda.get_device_name()}
    measure.write_rows(options.json, [row | {"stats": vars(stats)}], about)
    return int(not row["num_kernels"])


def profile_step(model: str, algorithm: Algorithm, trace: str) -> tuple[list[Kernel], Any]:
    """Collective: all ranks train. Rank 0 profiles the last step, and writes it to the file `trace`.

    Returns the kernels of rank 0, and `stats()`.
    """
    training = Training(CONFIGS[model], lambda module: connected(module, algorithm), 100 * torchring.rank())
    for _ in range(_NUM_WARMUPS):
        training.step()
    torch.cuda.synchronize()
    torchring.barrier()
    kernels = []
    if torchring.rank() == 0:
        with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            training.step()
            torch.cuda.synchronize()
        profiler.export_chrome_trace(trace)
        events = json.loads(Path(trace).read_text())["traceEvents"]
        kernels = [
            (event["name"], event["args"]["stream"], (event["ts"], event["ts"] + event["dur"]))
            for event in events
            if event.get("cat") == "kernel"
        ]
    else:
        training.step()
        torch.cuda.synchronize()
    stats = training.optimizer.stats()
    torchring.barrier()
    training.optimizer.close()
    return kernels, stats


def overlap_of(kernels: Sequence[Kernel]) -> dict[str, Any]:
    """How long communication kernels ran, and how much of that kernels of streams without communication ran, too."""
    communicates = [kernel for kernel in kernels if _COMMUNICATION.search(kernel[0])]
    streams = {stream for _, stream, _ in communicates}
    computing = merged(span for _, stream, span in kernels if stream not in streams)
    busy = merged(span for *_, span in communicates)
    both = length(computing) + length(busy) - length(merged([*computing, *busy]))
    return {
        "num_kernels": len(communicates),
        "communication_ms": length(busy) / 1e3,
        "hidden_ms": both / 1e3,
        "compute_ms": length(computing) / 1e3,
        "share": both / length(busy) if busy else math.nan,
    }


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, as disjoint intervals in ascending order.

    Example: (5, 6), (0, 2), (1, 3), (3, 4) -> (0, 4), (5, 6).
    """
    union: list[Interval] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((begin, end))
    return union


def length(union: Iterable[Interval]) -> float:
    return math.fsum(end - begin for begin, end in union)


if __name__ == "__main__":
    sys.exit(main())
