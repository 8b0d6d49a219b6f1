"""The steps of a job for other programs: as a trace for Chrome and Perfetto, and as a table.

The format of the trace: "Trace Event Format", Google. https://ui.perfetto.dev opens it.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from torchring.observe.recorder.records import StepRecord
from torchring.report.model.lanes import spans_of
from torchring.report.model.merge import Job
from torchring.report.verdict.findings import Analysis
from torchring.report.words import NAMES
from torchring.safe_files import replacing

_COMPUTE: Final = 0  # number of the lane; those of buckets follow


def write_trace_json(analysis: Analysis, path: Path) -> None:
    """One process for each rank, a lane for what it computes, and lanes for its buckets. Raises OSError.

    An arrow leads from where the last gradient of a bucket is ready to the bucket.
    """
    with replacing(path, "w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for i, event in enumerate(_events(analysis)):
            file.write((",\n" if i else "") + json.dumps(event))
        file.write("\n]}\n")


def write_csv(analysis: Analysis, path: Path) -> None:
    """One row for each step and rank. Raises OSError."""
    rows = [_row(analysis, i, j) for i, row in enumerate(analysis.job.steps) for j in range(len(row))]
    with replacing(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def _row(analysis: Analysis, i: int, j: int) -> dict[str, Any]:
    timing, critical, step = analysis.timing, analysis.critical, analysis.job.steps[i][j]
    host = analysis.job.traces[j].run_info.host
    phases = {f"{name.replace(' ', '_')}_ms": critical.phases[i, j, phase] for phase, name in NAMES.items()}
    own = {
        "step": step.number,
        "rank": timing.ranks[j],
        "host": f"'{host}" if host.startswith(("=", "+", "-", "@")) else host,  # no formula of a spreadsheet
        "is_in_statistics": int(timing.counts[i]),
        "begin_ms": timing.begin[i, j],
        "step_ms": (step.end - step.begin) / 1e6,
        **phases,
        "waits_for_rank": timing.ranks[critical.awaited[i, j]] if critical.waiting[i, j] > 0 else "",
        "stall_ms": step.stall_ns / 1e6,
        "packing_ms": step.packing_ns / 1e6,
        "num_samples": step.num_samples,
        "num_bytes": step.num_bytes,
    }
    return {name: f"{value:.6f}" if name.endswith("_ms") else value for name, value in own.items()}  # a nanosecond


def _events(analysis: Analysis) -> Iterator[dict[str, Any]]:
    job = analysis.job
    base = min(step.begin for step in job.steps[0])
    num_lanes = [0] * len(job.traces)
    arrows = itertools.count()
    for i, row in enumerate(job.steps):
        last = _last_launches(job, row)
        for j, (trace, step) in enumerate(zip(job.traces, row, strict=True)):
            rank = trace.run_info.rank
            yield _span(f"step {step.number}", "step", rank, _COMPUTE, step.begin - base, step.end - base)
            for phase, begin, end in spans_of(step, float(analysis.critical.waiting[i, j])):
                yield _span(NAMES[phase], "phase", rank, _COMPUTE, begin - base, end - base)
            lanes = _in_lanes(step)
            num_lanes[j] = max([num_lanes[j], *lanes.values()])
            for k, bucket in enumerate(step.buckets):
                lane, (at, late) = lanes[k], last[k]
                facts = {"step": step.number, "bytes": bucket.num_bytes}
                begin, end = bucket.launched - base, bucket.reduced - base
                yield _span(f"bucket {bucket.index}", "bucket", rank, lane, begin, end, facts)
                if late != rank and begin < (until := min(at - base, end)):
                    yield _span(f"waiting for rank {late}", "waiting", rank, lane, begin, until)
                arrow = {"name": f"bucket {bucket.index}", "cat": "bucket", "id": next(arrows), "pid": rank}
                yield {**arrow, "ph": "s", "tid": _COMPUTE, "ts": (bucket.ready - base) / 1e3}
                yield {**arrow, "ph": "f", "bp": "e", "tid": lane, "ts": begin / 1e3}
    for trace, count in zip(job.traces, num_lanes, strict=True):
        run_info = trace.run_info
        name = f"rank {run_info.rank} ({run_info.host}, {run_info.device})"
        yield _name("process_name", run_info.rank, _COMPUTE, name)
        yield {"name": "process_sort_index", "ph": "M", "pid": run_info.rank, "args": {"sort_index": run_info.rank}}
        yield _name("thread_name", run_info.rank, _COMPUTE, "compute")
        for lane in range(1, count + 1):
            yield _name("thread_name", run_info.rank, lane, "buckets" if lane == 1 else f"buckets ({lane})")


def _last_launches(job: Job, row: tuple[StepRecord, ...]) -> dict[int, tuple[int, int]]:
    """For each bucket of a step, by position: time of the last launch, and the rank that launched last."""
    last: dict[int, tuple[int, int]] = {}
    for trace, step in zip(job.traces, row, strict=True):
        for k, bucket in enumerate(step.buckets):
            last[k] = max(last.get(k, (-1, -1)), (bucket.launched, trace.run_info.rank))
    return last


def _in_lanes(step: StepRecord) -> dict[int, int]:
    """The lane of each bucket, by position: spans of one lane do not overlap."""
    ends: list[int] = []
    lanes = {}
    for k in sorted(range(len(step.buckets)), key=lambda k: step.buckets[k].launched):
        bucket = step.buckets[k]
        free = next((lane for lane, end in enumerate(ends) if end <= bucket.launched), len(ends))
        ends[free : free + 1] = [max(bucket.reduced, bucket.launched)]
        lanes[k] = free + 1
    return lanes


def _span(
    name: str, kind: str, rank: int, lane: int, begin_ns: int, end_ns: int, facts: dict[str, int] | None = None
) -> dict[str, Any]:
    """Times of the format are microseconds. `kind`: to show or to hide all spans of that kind."""
    place = {"name": name, "cat": kind, "ph": "X", "pid": rank, "tid": lane}
    span = {**place, "ts": begin_ns / 1e3, "dur": (end_ns - begin_ns) / 1e3}
    return span | ({"args": facts} if facts else {})


def _name(kind: str, rank: int, lane: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": lane, "args": {"name": name}}
