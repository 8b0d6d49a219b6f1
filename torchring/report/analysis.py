"""From traces to what the report says. The data classes are in `findings.py`."""

from __future__ import annotations

from torchring.report.findings import Analysis, Network
from torchring.report.merge import Job

__all__ = ["Analysis", "analyse"]


def analyse(job: Job, given: Network | None = None) -> Analysis:
    """Say what bounds the job, and what would help.

    Args:
        given: use this network in predictions, in place of the one that the trace shows.

    Raises TraceError if no step is left that all ranks have.
    """
    raise NotImplementedError
