"""Puts the traces of all ranks together: on one clock, with the steps that all of them have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchring.tracing.records import RankTrace, StepRecord


@dataclass(frozen=True)
class Job:
    """The traces of a job.

    Attributes:
        traces: of the ranks that have one, by rank. Times are on rank 0's clock.
        steps: steps that all these ranks have; steps[i][j] is the i-th such step of `traces[j]`.
        clock_error_ms: by how much times of different hosts may differ, at most; 0 on one host, None if unknown.
        problems: what is missing or strange, sentences.
    """

    traces: tuple[RankTrace, ...]
    steps: tuple[tuple[StepRecord, ...], ...]
    clock_error_ms: float | None
    problems: tuple[str, ...]


def load(folder: Path) -> Job:
    """Read a folder of traces. Raises TraceError if nothing in it can be read."""
    raise NotImplementedError
