"""Overlap of communication with backward on a GPU, in one profiled training step.

    torchring bench overlap --trace step.json                     one rank, which runs all kernels nevertheless
    torchring run -np 8 bench/overlap.py --model gpt2-bf16        eight ranks with a GPU each
    torchring bench overlap --from-trace step.json                analyse a trace, also from another machine

After some steps that warm up, profiles a step with torch.profiler, and writes a Chrome trace (for Perfetto). Prints how
much of the time of communication kernels overlaps with kernels of other streams. While buckets are reduced, the kernels
of other streams are those of backward. Communication kernels are NCCL's, and all kernels that are launched inside the
ranges torchring.pack, torchring.direct, torchring.ring and so on, except torchring.unpack. A table has a line for each
range.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity

import torchring
from torchring.allreduce.select import ALGORITHMS, Algorithm
from torchring.bench import measure
from torchring.bench.gpu import training

Interval = tuple[float, float]
Track = tuple[str, str]  # (process, thread) on the host, (device, stream) on a GPU

_OURS: Final = "torchring."
_UNPACK: Final = "torchring.unpack"  # runs on the stream that computes
_COMMUNICATION: Final = re.compile(r"^_(pack|direct|ring)_kernel|nccl", re.IGNORECASE)  # for kernels outside all ranges
_LAUNCHES: Final = ("cuda_runtime", "cuda_driver")


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, as disjoint intervals in ascending order. Empty intervals are dropped.

    Example: (5, 6), (0, 2), (1, 3), (3, 4) -> (0, 4), (5, 6).
    """
    union: list[Interval] = []
    for begin, end in sorted(intervals):
        if begin >= end:
            continue
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((begin, end))
    return union


def length(intervals: Iterable[Interval]) -> float:
    """The length of the union of intervals."""
    return math.fsum(end - begin for begin, end in merged(intervals))


def common(first: Iterable[Interval], second: Iterable[Interval]) -> float:
    """The length of the intersection of two unions of intervals.

    Example: (0, 4), (5, 6) and (1, 2), (3, 8) -> 1 + 1 + 1 = 3.
    """
    a, b = merged(first), merged(second)
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


@dataclass(frozen=True)
class Kernel:
    """A kernel that ran on the device; times in microseconds. `correlation` is the key of its launch in a `Trace`."""

    name: str
    stream: Track
    span: Interval
    correlation: int | None


@dataclass(frozen=True)
class Range:
    """A range with a name of torchring's, on a thread of the host; times in microseconds."""

    name: str
    thread: Track
    span: Interval


@dataclass(frozen=True)
class Trace:
    """The content of a Chrome trace of torch.profiler. `launches`: thread and time of each launch, by correlation."""

    kernels: list[Kernel]
    ranges: list[Range]
    launches: dict[int, tuple[Track, float]]


@dataclass(frozen=True)
class RangeOverlap:
    """The kernels that were launched inside one range; times in milliseconds.

    Attributes:
        begin_ms: when the first of them began, counted from the first kernel of the step.
        busy_ms: how long at least one of them ran.
        hidden_ms: how long kernels of streams without communication ran at the same time.
    """

    name: str
    begin_ms: float
    busy_ms: float
    hidden_ms: float


@dataclass(frozen=True)
class Overlap:
    """How much communication overlaps with computation in a step; times in milliseconds.

    Attributes:
        num_kernels: number of communication kernels.
        communication_ms: how long at least one of them ran.
        hidden_ms: how long kernels of streams without communication ran at the same time.
        compute_ms: how long kernels of streams without communication ran in all.
        lines: the same for each range, in the order in which their kernels began.
    """

    num_kernels: int
    communication_ms: float
    hidden_ms: float
    compute_ms: float
    lines: list[RangeOverlap]

    @property
    def share(self) -> float:
        """The share of communication that is hidden, 0 to 1; NaN if there was no communication."""
        return self.hidden_ms / self.communication_ms if self.communication_ms else math.nan


def read_trace(file: str | Path) -> Trace:
    """Read a file, gzipped or not. Raises ValueError if the file is not a Chrome trace."""
    data = Path(file).read_bytes()
    content = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise ValueError(f"{file} is not a Chrome trace: it has no list of events")
    kernels: list[Kernel] = []
    ranges: list[Range] = []
    launches: dict[int, tuple[Track, float]] = {}
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        begin, arguments = float(event["ts"]), event.get("args", {})
        span, category = (begin, begin + float(event.get("dur", 0))), event.get("cat")
        thread = (str(event.get("pid")), str(event.get("tid")))
        correlation = arguments.get("correlation")
        if category == "kernel":
            stream = (str(arguments.get("device", event.get("pid"))), str(arguments.get("stream", event.get("tid"))))
            kernels.append(Kernel(event["name"], stream, span, correlation))
        elif category == "user_annotation" and event["name"].startswith(_OURS):
            ranges.append(Range(event["name"], thread, span))
        elif category in _LAUNCHES and correlation is not None:
            launches[correlation] = (thread, begin)
    return Trace(kernels, ranges, launches)


def analyse(trace: Trace) -> Overlap:
    """Compute how much communication overlaps with the kernels of streams without communication."""
    inside = {named: _launched_in(named, trace) for named in trace.ranges}
    known = {kernel for named, found in inside.items() if not named.name.startswith(_UNPACK) for kernel in found}
    communicates = [kernel for kernel in trace.kernels if kernel in known or _COMMUNICATION.search(kernel.name)]
    streams = {kernel.stream for kernel in communicates}
    computing = merged(kernel.span for kernel in trace.kernels if kernel.stream not in streams)
    busy = merged(kernel.span for kernel in communicates)
    origin = min((kernel.span[0] for kernel in trace.kernels), default=0.0)
    lines = []
    for named, found in inside.items():
        if found:
            spans = [kernel.span for kernel in found]
            under = common(spans, computing) if found[0].stream in streams else 0.0
            lines.append(RangeOverlap(named.name, (min(spans)[0] - origin) / 1e3, length(spans) / 1e3, under / 1e3))
    return Overlap(
        num_kernels=len(communicates),
        communication_ms=length(busy) / 1e3,
        hidden_ms=common(busy, computing) / 1e3,
        compute_ms=length(computing) / 1e3,
        lines=sorted(lines, key=lambda line: line.begin_ms),
    )


def _launched_in(named: Range, trace: Trace) -> list[Kernel]:
    found = []
    for kernel in trace.kernels:
        thread, moment = trace.launches.get(-1 if kernel.correlation is None else kernel.correlation, (None, 0.0))
        if thread == named.thread and named.span[0] <= moment <= named.span[1]:
            found.append(kernel)
    return found


def main() -> int:
    parser = measure.parser("overlap", __doc__ or "")
    models = {config.name: config for config in training.training_configs(is_dry=False)}
    parser.add_argument("--model", choices=list(models), default=next(iter(models)))
    parser.add_argument(
        "--algorithm", choices=ALGORITHMS, help="as in torchring.wrap (default: ring on one rank, else auto)"
    )
    parser.add_argument("--warmup", type=measure.positive, default=6, help="number of steps before the profiled step")
    parser.add_argument("--trace", type=measure.writable, metavar="FILE", help="where to write the Chrome trace")
    parser.add_argument("--from-trace", metavar="FILE", help="analyse this trace instead of profiling a step")
    options = parser.parse_args()
    about = measure.provenance() | {"script": Path(__file__).name}
    if options.from_trace:
        try:
            trace = read_trace(options.from_trace)
        except (OSError, ValueError, KeyError, EOFError) as error:
            print(f"cannot read {options.from_trace}: {error}", file=sys.stderr)
            return 2
        return report(analyse(trace), {"trace": options.from_trace}, about, options.json)
    if not torch.cuda.is_available():
        print("torchring bench overlap needs a CUDA GPU, or a trace made with one: --from-trace FILE", file=sys.stderr)
        return 2
    torchring.init()
    device = torchring.device()
    torch.cuda.set_device(device)
    algorithm: Algorithm = options.algorithm or ("ring" if torchring.size() == 1 else "auto")
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        target = options.trace or file.name
        row = profile_step(models[options.model], algorithm, device, options.warmup, target)
        code = 0
        if torchring.rank() == 0:
            code = report(analyse(read_trace(target)), row, about | {"gpu": torch.cuda.get_device_name()}, options.json)
        torchring.barrier()
    return code


def profile_step(
    config: training.TrainingConfig, algorithm: Algorithm, device: torch.device, num_warmups: int, file: str
) -> dict[str, Any]:
    """Collective: all ranks train for some steps. Rank 0 profiles the last step, and writes the trace to `file`."""
    activities, synchronize = [ProfilerActivity.CPU], _nothing
    if device.type == "cuda":
        activities, synchronize = [*activities, ProfilerActivity.CUDA], torch.cuda.synchronize
    trainer, workload, batches = training.start_training(config, algorithm, device)
    for _ in range(num_warmups):
        trainer.step(workload, batches)
    synchronize()
    torchring.barrier()
    if torchring.rank() == 0:
        with torch.profiler.profile(activities=activities) as profiler:
            trainer.step(workload, batches)
            synchronize()
        profiler.export_chrome_trace(file)
    else:
        trainer.step(workload, batches)
        synchronize()
    stats = trainer.optimizer.stats()
    torchring.barrier()
    trainer.optimizer.close()
    return {"model": config.name, "ranks": torchring.size(), "algorithm": stats.algorithm, "stats": vars(stats)}


def report(overlap: Overlap, row: dict[str, Any], about: dict[str, Any], json_file: str | None) -> int:
    """Print the tables. Returns the exit code: 1 if the trace has no communication kernel, else 0."""
    table = [
        [line.name, f"{line.begin_ms:.3f}", f"{line.busy_ms:.3f}", f"{line.hidden_ms:.3f}", _share(line)]
        for line in overlap.lines
    ]
    columns = ["range", "begins at ms", "kernels ms", "under others ms", "share"]
    subject = ", ".join(str(row[key]) for key in ("trace", "model", "ranks", "algorithm") if key in row)
    measure.print_table(f"Ranges of {subject} {measure.origin(about)}", columns, table)
    if not overlap.num_kernels:
        print("\nThere is no communication kernel in this trace.")
    else:
        print(
            f"\n{overlap.hidden_ms:.3f} of {overlap.communication_ms:.3f} ms of communication, {overlap.share:.0%}, "
            f"overlap with kernels of other streams, which ran for {overlap.compute_ms:.3f} ms."
        )
    lines = [vars(line) for line in overlap.lines]
    share = overlap.share if overlap.num_kernels else None
    measure.write_rows(json_file, [row | vars(overlap) | {"lines": lines, "share": share}], about)
    return 0 if overlap.num_kernels else 1


def _nothing() -> None: ...


def _share(line: RangeOverlap) -> str:
    return f"{line.hidden_ms / line.busy_ms:.0%}" if line.busy_ms else ""


if __name__ == "__main__":
    sys.exit(main())
