"""Records of each bucket that the ranks of one host write for each other: its tag, and any NaN found."""

from __future__ import annotations

from typing import Final

from torchring.allreduce.contract import NonFinite, aborted, tag_mismatch
from torchring.memory.host import HostGroup, as_words

MAX_PENDING: Final = 512  # buckets of one all-reduce at a time
ABORTED: Final = -1  # the tag of a bucket in a reduction that the rank has aborted
_NOBODY: Final = -1  # the sum overflowed, no input is to blame


class BucketRecords:
    """A record of three words per rank and bucket, in shared memory: the tag; 1 + the rank that a non-finite value
    came from, 0 for none; the element that holds the value.

    The n-th bucket and the (n + MAX_PENDING)-th use the same record. A rank starts the later bucket when the
    earlier one has ended on it, and then no peer needs the record any more.
    """

    def __init__(self, group: HostGroup) -> None:
        self._group = group
        self._block = group.allocate(MAX_PENDING * 24)
        self._records = [as_words(part) for part in self._block.parts]
        self._own = self._records[group.index]
        self._num_begun = 0

    def begin(self, tag: int) -> int:
        """Say which bucket this rank reduces next, before "packed" is announced. Returns the number of its record."""
        number = self._num_begun
        self._own[number % MAX_PENDING * 3] = tag
        self._num_begun += 1
        return number

    def check_tags(self, number: int, tag: int) -> None:
        """Raise PlanMismatchError, here and on the peers, if another rank's n-th bucket has another tag."""
        at, group = number % MAX_PENDING * 3, self._group
        for rank, record in zip(group.ranks, self._records, strict=True):
            if record[at] != tag:
                if ABORTED in (tag, record[at]):
                    error = aborted(group.rank, group.rank if tag == ABORTED else rank)
                else:
                    error = tag_mismatch(group.rank, tag, rank, record[at])
                group.report_failure(error)
                raise error

    def write(self, number: int, found: NonFinite | None) -> None:
        """Say what was found in this rank's slice. Call before "done" is announced."""
        at = number % MAX_PENDING * 3
        self._own[at + 1] = 0 if found is None else _NOBODY if found.rank is None else found.rank + 1
        self._own[at + 2] = 0 if found is None else found.element

    def read(self, number: int) -> NonFinite | None:
        """The first NaN or infinity in the slice of any rank. Call when all ranks have announced "done"."""
        at = number % MAX_PENDING * 3
        for record in self._records:
            if record[at + 1]:
                return NonFinite(None if record[at + 1] == _NOBODY else record[at + 1] - 1, record[at + 2])
        return None
