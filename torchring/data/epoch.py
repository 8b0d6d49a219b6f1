"""What samplers have in common: an epoch is a permutation, of which the ranks draw their shares of each global batch.

A *global batch* is the next B samples. With 10 samples in order:

    two ranks, batches of 2       rank 0: 0 2     rank 1: 1 3           the first global batch, 0 to 3, is used
    then three ranks, B = 4       rank 0: 4 7     rank 1: 5     rank 2: 6
                                  rank 0: 8       rank 1: 9     rank 2: 8, with weight 0: nothing is left for it
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import Sampler

from torchring import default_world
from torchring.data.loader import Asking, who_asks


@dataclass(eq=False)
class Pass:
    """One iteration over what is left of an epoch.

    Attributes:
        start: position at which it began.
        length: number of samples of the epoch.
        rank, size: this process and its world, which shares the pass.
        unit: number of samples of a global batch. The last one may be smaller.
        is_exhausted: the `DataLoader` has said that there are no more batches.
    """

    start: int
    length: int
    rank: int
    size: int
    unit: int
    is_exhausted: bool = False

    @property
    def num_batches(self) -> int:
        return -(-(self.length - self.start) // self.unit)

    def bounds(self, batch: int) -> tuple[int, int]:
        """The samples of a global batch, as positions in the epoch."""
        begin = self.start + batch * self.unit
        return begin, min(begin + self.unit, self.length)

    def share(self, batch: int) -> range:
        """Positions in the epoch of the samples that this rank draws of a global batch."""
        begin, end = self.bounds(batch)
        own = range(begin + self.rank, end, self.size)
        if own:
            return own
        return range(begin, begin + 1)

    def weight(self, batch: int) -> int:
        begin, end = self.bounds(batch)
        return len(range(begin + self.rank, end, self.size))

    @property
    def num_samples(self) -> int:
        """Number of samples that this rank draws in the whole pass, padding included."""
        if self.num_batches == 0:
            return 0
        return (self.num_batches - 1) * len(self.share(0)) + len(self.share(self.num_batches - 1))


def share_of(global_batch: int, rank: int, size: int) -> int:
    """Number of samples that a rank draws of a global batch. A rank without a share draws one, with weight 0."""
    return max(1, len(range(rank, global_batch, size)))


class EpochSampler(Sampler[Any]):
    """Draws this rank's shares of an epoch. Its state is the same on all ranks."""

    def __init__(self, dataset: Sized, shuffle: bool, seed: int, batch_size: int | None) -> None:
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        try:
            self._length = len(dataset)
        except TypeError as error:
            raise TypeError(
                f"a sampler needs a dataset with a length, got {type(dataset).__name__}; for an iterable dataset, use "
                "torchring.data.shard(dataset)"
            ) from error
        self._dataset = dataset
        self._shuffle = shuffle
        self._seed = seed
        self._own_batch_size = batch_size
        self._epoch = 0
        self._start = 0  # position at which the newest pass began, or the next one begins

    @property
    def epoch(self) -> int:
        """The epoch under way, from 0."""
        return self._epoch

    @property
    @abstractmethod
    def position(self) -> int:
        """Number of samples of the epoch that have been used, on all ranks together."""

    def state_dict(self) -> dict[str, int | bool]:
        """The position in the epoch, for a checkpoint. Holds no tensor, and nothing that depends on rank or size."""
        return self._state(self._epoch, self.position)

    def load_state_dict(self, state_dict: Mapping[str, int | bool]) -> None:
        """Go on where `state_dict` says, from the next iteration on, in its order: seed and `shuffle` are its.

        Raises:
            ValueError: the state is of a dataset of another length.
        """
        length, position = int(state_dict["length"]), int(state_dict["position"])
        if length != self._length:
            raise ValueError(
                f"the sampler's state is of a dataset of {length} samples, but this one has {self._length}; to train "
                "on another dataset, begin with a new sampler"
            )
        if not 0 <= position <= length:
            raise ValueError(f"the sampler's state says that {position} of {length} samples have been used")
        self._seed = int(state_dict["seed"])
        self._shuffle = bool(state_dict["shuffle"])
        self._resume(int(state_dict["epoch"]), position)

    @abstractmethod
    def _resume(self, epoch: int, position: int) -> None:
        """The next iteration goes on at this position."""

    def _state(self, epoch: int, position: int) -> dict[str, int | bool]:
        return {
            "epoch": epoch,
            "position": position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "length": self._length,
        }

    def _order(self, epoch: int) -> Sequence[Any] | torch.Tensor:
        """The samples of an epoch.

        Raises:
            ValueError: the dataset has changed.
        """
        if (length := len(self._dataset)) != self._length:
            raise ValueError(
                f"the dataset had {self._length} samples when its sampler was made, but has {length} in epoch "
                f"{epoch}; make a new sampler for the changed dataset"
            )
        if not self._shuffle:
            return range(self._length)
        return torch.randperm(self._length, generator=torch.Generator().manual_seed(self._seed + epoch))

    def _ask(self) -> Asking:
        asking = who_asks(self)
        if asking.shares_again:
            raise ValueError(
                f"{asking.shares_again} shares the sampler's samples out again, and most would be left out: pass "
                "Trainer(use_distributed_sampler=False) to Lightning, and no dispatch_batches=True to Accelerate"
            )
        if not getattr(asking.loader, "_in_order", True):
            raise ValueError("in_order=False would mix up the batches of an epoch: leave in_order=True")
        return asking


def batch_size_of(asking: Asking, own: int | None = None) -> int | None:
    """The batch size of whoever draws from a sampler, or else the sampler's own.

    Raises:
        ValueError: samples would be left out, or both have a batch size, and these differ.
    """
    if asking.batches is None:
        return own
    if getattr(asking.batches, "drop_last", False):
        raise ValueError(
            "drop_last=True would leave samples out, and other batches on some ranks than on others: leave "
            "drop_last=False, and the last batch is shared out evenly"
        )
    batch_size: int = asking.batches.batch_size
    if own not in (None, batch_size):
        raise ValueError(
            f"the DataLoader's batch_size is {batch_size}, but the Sampler's {own}: leave out the Sampler's"
        )
    return batch_size


class Place(NamedTuple):
    """This process and its world, as a script gives them, or else torchring when it is asked."""

    rank: int | None
    size: int | None

    def __call__(self) -> tuple[int, int]:
        if self.rank is None or self.size is None:
            return default_world.rank(), default_world.size()
        return self.rank, self.size


def rank_and_size(rank: int | None, size: int | None) -> Place:
    """Raises ValueError: no such place."""
    if (rank is None) != (size is None) or (rank is not None and size is not None and not 0 <= rank < size):
        raise ValueError(f"pass both rank and size, with rank in [0, size), or none; got rank={rank}, size={size}")
    return Place(rank, size)


def drawn(order: Sequence[Any] | torch.Tensor, share: range) -> Sequence[Any]:
    """The samples of a share."""
    part = order[share.start : share.stop : share.step]
    return part.tolist() if isinstance(part, torch.Tensor) else part
