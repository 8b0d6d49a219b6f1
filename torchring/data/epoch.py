"""How ranks share an epoch: an epoch is a permutation, of which the ranks draw their shares of each global batch.

A *global batch* is the next B samples. With 10 samples in order:

    two ranks, batches of 2       rank 0: 0 2     rank 1: 1 3           the first global batch, 0 to 3, is used
    then three ranks, B = 4       rank 0: 4 7     rank 1: 5     rank 2: 6
                                  rank 0: 8       rank 1: 9     rank 2: 8, with weight 0: nothing is left for it
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torchring import default_world
from torchring.world import Group


@dataclass(eq=False)
class Pass:
    """One iteration over what is left of an epoch."""

    epoch: int
    length: int  # number of samples of the epoch
    start: int  # number of samples that were used when the pass began
    rank: int  # of this process in its group, which shares the pass
    size: int
    unit: int  # number of samples of a global batch. The last one may be smaller.
    # Draws the batches. Gone when the loop is over, unless workers of the `DataLoader` stay
    iterator: Callable[[], Iterator[Any] | None] = lambda: None
    num_drawn: int = 0  # number of batches that have been drawn. Workers of a `DataLoader` draw ahead of the loop.
    num_asked: int = 0  # number of batches up to the last one whose weight was asked for
    num_ahead: int = 0  # number of batches that had been drawn and not asked for when a weight was asked for first
    num_used: int = 0  # number of batches that finished steps have used, where steps are counted
    is_exhausted: bool = False  # there was nothing more to draw

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

    def has_equal_shares(self, ranks: Iterable[int]) -> bool:
        """Whether these ranks have equally many samples in each batch."""
        ranks, num_left = list(ranks), self.length - self.start
        sizes = {self.unit} if num_left > self.unit else set[int]()
        sizes.add(num_left % self.unit or min(num_left, self.unit))
        return all(len({rank < num % self.size for rank in ranks}) == 1 for num in sizes)


class Place:
    """This process and its group, as a script gives them, or else torchring when it is asked. Raises ValueError."""

    def __init__(self, rank: int | None = None, size: int | None = None, group: Group | None = None) -> None:
        if (rank is None) != (size is None) or (rank is not None and size is not None and not 0 <= rank < size):
            raise ValueError(f"pass both rank and size, with rank in [0, size), or none; got rank={rank}, size={size}")
        if rank is not None and group is not None:
            raise ValueError("a group says what rank and size are; leave out these, or group")
        self._given = None if rank is None or size is None else (rank, size)
        # Lists of ranks, which are those of this rank's group in any process; None if all ranks share
        self.group = None if group is None else [default_world.members_of(group)]

    def __call__(self) -> tuple[int, int]:
        return self._given or (default_world.rank(self.group), default_world.size(self.group))
