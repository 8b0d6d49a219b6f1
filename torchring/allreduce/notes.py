"""What the ranks of one host write down of a reduction, for the others to read: what it is of, and what was found."""

from __future__ import annotations

from typing import Final

from torchring.allreduce.mover import NonFinite, tag_mismatch
from torchring.memory.host import HostGroup, as_words

MAX_IN_FLIGHT: Final = 512
_NOBODY: Final = -1  # the sum overflowed, no input is to blame


class Notes:
    """A record per rank and flight: its tag; 1 + the rank that a non-finite value came from (0: none), and the element.

    A rank starts a flight when it has landed the one that had the same record, which no peer needs by then.
    """

    def __init__(self, group: HostGroup) -> None:
        self._group = group
        self._block = group.allocate(MAX_IN_FLIGHT * 24)
        self._records = [as_words(part) for part in self._block.parts]
        self._own = self._records[group.index]

    def write_tag(self, number: int, tag: int) -> None:
        """What this rank's n-th flight reduces."""
        self._own[number % MAX_IN_FLIGHT * 3] = tag

    def check_tags(self, number: int, tag: int) -> None:
        """Raise PlanMismatchError, here and on the peers, if another rank's n-th flight reduces something else."""
        at, group = number % MAX_IN_FLIGHT * 3, self._group
        for rank, record in zip(group.ranks, self._records, strict=True):
            if record[at] != tag:
                error = tag_mismatch(group.rank, tag, rank, record[at])
                group.report_failure(error)
                raise error

    def write(self, number: int, found: NonFinite | None) -> None:
        """What was found in this rank's slice; before its "done"."""
        at = number % MAX_IN_FLIGHT * 3
        self._own[at + 1] = 0 if found is None else _NOBODY if found.rank is None else found.rank + 1
        self._own[at + 2] = 0 if found is None else found.element

    def read(self, number: int) -> NonFinite | None:
        """What was found in anybody's slice; after everybody's "done"."""
        at = number % MAX_IN_FLIGHT * 3
        for record in self._records:
            if record[at + 1]:
                return NonFinite(None if record[at + 1] == _NOBODY else record[at + 1] - 1, record[at + 2])
        return None
