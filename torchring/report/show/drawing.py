"""The colour of each phase, and the ranks and buckets that the page shows."""

from __future__ import annotations

from typing import Final

from torchring.report.model.buckets import BucketSummary
from torchring.report.model.phases import Phase
from torchring.report.model.ranks import RankSummary
from torchring.report.verdict.findings import Analysis

# By Okabe and Ito (2008), told apart by people with any kind of colour vision, on white and on black.
COLORS: Final = {
    Phase.INPUT: "#e69f00",
    Phase.FORWARD: "#56b4e9",
    Phase.BACKWARD: "#0072b2",
    Phase.WAITING: "#cc79a7",
    Phase.COMMUNICATION: "#d55e00",
    Phase.BETWEEN: "#999999",
    Phase.OPTIMIZER: "#009e73",
}
OTHER_COLOR: Final = "#64748b"  # of several phases together
MAX_RANKS: Final = 64  # of more ranks, those are shown that the others wait for most
MAX_BUCKETS: Final = 64


def shown_ranks(analysis: Analysis) -> list[RankSummary]:
    """The ranks that figures show, by rank."""
    by_blame = sorted(analysis.ranks, key=lambda rank: -rank.is_last_share)
    return sorted(by_blame[:MAX_RANKS], key=lambda rank: rank.rank)


def shown_buckets(analysis: Analysis, at_most: int = MAX_BUCKETS) -> list[BucketSummary]:
    """The buckets with most exposed communication, in plan order."""
    by_exposed = sorted(analysis.buckets, key=lambda bucket: (-bucket.exposed.median, -bucket.num_bytes))
    return sorted(by_exposed[:at_most], key=lambda bucket: bucket.index)


def default_rank(analysis: Analysis) -> int:
    """The rank that is shown first: the one to blame, or else the one that the others wait for most."""
    ranks = shown_ranks(analysis)
    blamed = [rank.rank for rank in ranks if rank.rank == analysis.verdict.rank]
    return blamed[0] if blamed else max(ranks, key=lambda rank: rank.is_last_share).rank
