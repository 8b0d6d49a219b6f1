"""How ranks share an epoch: an epoch is a permutation, of which the ranks draw their shares of each global batch.

A *global batch* is the next B samples. With 10 samples in order:

    two ranks, batches of 2       rank 0: 0 2     rank 1: 1 3           the first global batch, 0 to 3, is used
    then three ranks, B = 4       rank 0: 4 7     rank 1: 5     rank 2: 6
                                  rank 0: 8       rank 1: 9     rank 2: 8, with weight 0: nothing is left for it
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torchring import default_world


@dataclass(eq=False)
class Pass:
    """One iteration over what is left of an epoch.

    Attributes:
        epoch: its number.
        length: number of samples of the epoch.
        start: number of samples that were used when the pass began.
        rank, size: this process and its world, which shares the pass.
        unit: number of samples of a global batch. The last one may be smaller.
        iterator: draws the batches. Gone when the loop is over, unless workers of the `DataLoader` stay.
        num_drawn: number of batches that have been drawn. Workers of a `DataLoader` draw ahead of the loop.
        num_asked: number of batches up to the last one whose weight was asked for.
        num_ahead: number of batches that had been drawn and not asked for when a weight was asked for first.
        num_used: number of batches that finished steps have used, where steps are counted.
        is_exhausted: there was nothing more to draw.
    """

    epoch: int
    length: int
    start: int
    rank: int
    size: int
    unit: int
    iterator: Callable[[], Iterator[Any] | None] = lambda: None
    num_drawn: int = 0
    num_asked: int = 0
    num_ahead: int = 0
    num_used: int = 0
    is_exhausted: bool = False

    @property
    def num_batches(self) -> int:
        return -(-(self.length - self.start) // self.unit)

    def is_under_way(self) -> bool:
        is_over = self.num_asked == self.num_batches or (self.is_exhausted and not self.num_asked)
        return self.iterator() is not None and not is_over

    def position(self, num_batches: int) -> int:
        """Number of samples at the front of the epoch, once as many batches of this pass have been used."""
        return min(self.start + num_batches * self.unit, self.length)

    def share(self, batch: int) -> range:
        """Positions in the epoch of what this rank draws of a global batch. A rank without a share draws one, too."""
        begin, end = self.position(batch), self.position(batch + 1)
        return range(begin + self.rank, end, self.size) or range(begin, begin + 1)

    def weight(self, batch: int) -> int:
        """Number of samples that count of this rank's share."""
        return len(range(self.position(batch) + self.rank, self.position(batch + 1), self.size))

    def has_equal_shares(self) -> bool:
        """Whether all ranks have equally many samples in each batch."""
        num_left = self.length - self.start
        sizes = {self.unit} if num_left > self.unit else set[int]()
        return all(num % self.size == 0 for num in {*sizes, num_left % self.unit or min(num_left, self.unit)})


def _place(rank: int | None, size: int | None) -> tuple[int, int]:
    return (default_world.rank(), default_world.size()) if rank is None or size is None else (rank, size)


def rank_and_size(rank: int | None, size: int | None) -> Callable[[], tuple[int, int]]:
    """This process and its world, as a script gives them, or else torchring when it is asked. Raises ValueError."""
    if (rank is None) != (size is None) or (rank is not None and size is not None and not 0 <= rank < size):
        raise ValueError(f"pass both rank and size, with rank in [0, size), or none; got rank={rank}, size={size}")
    return functools.partial(_place, rank, size)
