"""The steps of a job for other programs: as a trace for Chrome and Perfetto, and as a table.

The format of the trace: "Trace Event Format", Google. https://ui.perfetto.dev opens it.
"""

import csv
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from torchring.observer import Phase
from torchring.report.model.timing import spans_of
from torchring.report.verdict.findings import Analysis
from torchring.report.words import NAMES
from torchring.safe_files import replacing

_WAITING: Final = NAMES[Phase.WAITING]


def write_trace_json(analysis: Analysis, path: Path) -> None:
    """One process for each rank, with spans of what it does, and asynchronous events of its buckets. Raises OSError.

    Times of the format are microseconds. A span of waiting has the rank that is awaited.
    """
    with replacing(path, "w") as file:
        json.dump({"displayTimeUnit": "ms", "traceEvents": list(_events(analysis))}, file)


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
    job, timing = analysis.job, analysis.timing
    base = min(step.begin for step in job.steps[0])
    numbers = itertools.count()
    for trace in job.traces:
        run_info = trace.run_info
        name = f"rank {run_info.rank} ({run_info.host}, {run_info.device})"
        yield {"name": "process_name", "ph": "M", "pid": run_info.rank, "args": {"name": name}}
        yield {"name": "process_sort_index", "ph": "M", "pid": run_info.rank, "args": {"sort_index": run_info.rank}}
    for i, row in enumerate(job.steps):
        for j, (trace, step) in enumerate(zip(job.traces, row, strict=True)):
            place = {"pid": trace.run_info.rank, "tid": 0}
            spans = [(f"step {step.number}", "step", step.begin, step.end)]
            phases = spans_of(step, float(analysis.critical.waiting[i, j]))
            for name, kind, begin, end in spans + [(NAMES[phase], "phase", a, b) for phase, a, b in phases]:
                times = {"ts": (begin - base) / 1e3, "dur": (end - begin) / 1e3}
                last = {"args": {"rank": timing.ranks[analysis.critical.awaited[i, j]]}} if name == _WAITING else {}
                yield {"name": name, "cat": kind, "ph": "X", **place, **times, **last}
            for bucket in step.buckets:
                event = {"name": f"bucket {bucket.index}", "cat": "bucket", "id": next(numbers), **place}
                args = {"step": step.number, "bytes": bucket.num_bytes}
                yield {**event, "ph": "b", "ts": (bucket.launched - base) / 1e3, "args": args}
                yield {**event, "ph": "e", "ts": (bucket.reduced - base) / 1e3}
