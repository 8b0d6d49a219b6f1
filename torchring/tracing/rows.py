"""Steps and buckets as rows of integers. A thousand steps in this form take no time of the garbage collector.

A step: eight integers of its own, then two for each part (which, begin), then seven for each bucket. Their order is
that of the constants below, and of the attributes of `StepRecord` and `BucketRecord`. Times are nanoseconds of
time.perf_counter_ns.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

STEP_LENGTH: Final = 8  # without parts and buckets
NUMBER, BEGIN, END, NUM_SAMPLES, STALL_NS, PACKING_NS, NUM_PARTS, NUM_BUCKETS = range(STEP_LENGTH)

PART_LENGTH: Final = 2

BUCKET_LENGTH: Final = 7
INDEX, NUM_BYTES, READY, PACKED, LAUNCHED, STARTED, REDUCED = range(BUCKET_LENGTH)


def step_row(
    number: int,
    begin: int,
    end: int,
    num_samples: int,
    stall_ns: int,
    packing_ns: int,
    parts: Sequence[int],
    buckets: Sequence[int],
) -> array[int]:
    """A step; `parts` and `buckets` are rows one after the other."""
    counts = len(parts) // PART_LENGTH, len(buckets) // BUCKET_LENGTH
    row = array("q", (number, begin, end, num_samples, stall_ns, packing_ns, *counts))
    row.extend(parts)
    row.extend(buckets)
    return row


def part_begin(part: int) -> int:
    """Where the begin of a step's n-th part stands."""
    return STEP_LENGTH + PART_LENGTH * part + 1


def bucket_start(num_parts: int, bucket: int) -> int:
    """Where a step's n-th bucket begins."""
    return STEP_LENGTH + PART_LENGTH * num_parts + BUCKET_LENGTH * bucket
