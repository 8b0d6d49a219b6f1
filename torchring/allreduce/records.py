"""A record of each bucket that the ranks of one host write for each other: which one it is."""

from __future__ import annotations

from typing import Final

from torchring.allreduce.contract import aborted
from torchring.memory.host import HostGroup, as_words

MAX_PENDING: Final = 512  # buckets of one all-reduce at a time
ABORTED: Final = -1  # in place of the wire's index: the rank has aborted the reduction


class BucketRecords:
    """A word per rank and bucket, in shared memory: the index of the wire.

    The n-th bucket and the (n + MAX_PENDING)-th use the same record. A rank starts the later bucket when the
    earlier one has ended on it, and then no peer needs the record any more.
    """

    def __init__(self, group: HostGroup) -> None:
        self._group = group
        self._block = group.allocate(MAX_PENDING * 8)
        self._records = [as_words(part) for part in self._block.parts]
        self._own = self._records[group.index]
        self._num_begun = 0

    def begin(self, index: int) -> int:
        """Say which bucket this rank reduces next, before "packed" is announced. Returns the number of its record."""
        number = self._num_begun
        self._own[number % MAX_PENDING] = index
        self._num_begun += 1
        return number

    def check(self, number: int) -> None:
        """Raise PlanMismatchError, here and on the peers, if ranks reduce different buckets.

        Buckets leave in order: a rank that is back at an earlier one has begun another reduction.
        """
        group = self._group
        indices = [record[number % MAX_PENDING] for record in self._records]
        if min(indices) != max(indices):
            error = aborted(group.rank, group.ranks[indices.index(min(indices))])
            group.report_failure(error)
            raise error
