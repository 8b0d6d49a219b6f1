"""Steps and buckets as rows of integers. A thousand steps in this form take no time of the garbage collector.

A step: fourteen integers of its own, then two for each part (which, begin), then seven for each bucket. Their order is
that of the constants below, and of the attributes of `StepRecord` and `BucketRecord`. Times are nanoseconds of
time.perf_counter_ns.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

STEP_LENGTH: Final = 14  # without parts and buckets
NUMBER, BEGIN, END, NUM_SAMPLES, STALL_NS, PACKING_NS, LOADING_NS = range(7)
LOADING_CPU_NS, NUM_WORKERS, QUEUED_NS, EXPOSED_QUEUED_NS, COLLECTING_NS, NUM_PARTS, NUM_BUCKETS = range(7, STEP_LENGTH)

PART_LENGTH: Final = 2

BUCKET_LENGTH: Final = 7
INDEX, NUM_BYTES, READY, PACKED, LAUNCHED, STARTED, REDUCED = range(BUCKET_LENGTH)


def step_row(own: Sequence[int], parts: Sequence[int], buckets: Sequence[int]) -> array[int]:
    """A step; `own` is what comes before NUM_PARTS, `parts` and `buckets` are rows one after the other."""
    row = array("q", (*own, len(parts) // PART_LENGTH, len(buckets) // BUCKET_LENGTH))
    row.extend(parts)
    row.extend(buckets)
    return row


def part_begin(part: int) -> int:
    """Where the begin of a step's n-th part stands."""
    return STEP_LENGTH + PART_LENGTH * part + 1


def bucket_start(num_parts: int, bucket: int) -> int:
    """Where a step's n-th bucket begins."""
    return STEP_LENGTH + PART_LENGTH * num_parts + BUCKET_LENGTH * bucket
