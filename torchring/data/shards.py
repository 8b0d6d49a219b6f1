"""`shard`: an iterable dataset of which each rank, and each worker of its `DataLoader`, reads another part."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as loader_worker

from torchring.data.epoch import rank_and_size


def shard(dataset: Iterable[Any], *, rank: int | None = None, size: int | None = None) -> IterableDataset[Any]:
    """An iterable dataset that yields this rank's part of `dataset`, for a `DataLoader` with any number of workers.

        loader = DataLoader(torchring.data.shard(lines), batch_size=32, num_workers=2)

    Element k goes to rank k mod size, where the workers take turns. So each worker reads the whole dataset, and leaves
    out what others yield. A streaming dataset of Hugging Face is split by its own `split_dataset_by_node`: a rank opens
    only its own files, if ranks can have equally many.

    Ranks get parts that differ in length, and different numbers of batches: put the loop into a `torchring.join` block,
    or training hangs at the end of the epoch.

    `set_epoch` is passed on to `dataset`, to workers that stay (`persistent_workers=True`), too. torchdata's
    `StatefulDataLoader` can stop and go on: with as many ranks and workers as before, or, if it has no workers, with
    any number of ranks that have taken equally many elements.

    Args:
        dataset: starts anew with each `iter()`, and yields the same on every rank and in every worker. It is not told
            that it runs in a worker, so what splits its data by `get_worker_info()` yields all of it.
        rank: this process. By default that of torchring when an iteration begins.
        size: number of processes that share the samples. By default that of torchring when an iteration begins.

    Raises:
        TypeError: not an iterable, or one that can be read only once, such as a generator.
    """
    if isinstance(dataset, Iterator) or not hasattr(dataset, "__iter__"):
        raise TypeError(
            f"shard() takes an iterable that starts anew with each iter(), got {type(dataset).__name__}; write an "
            "IterableDataset whose __iter__ opens the data. For a dataset with a length and __getitem__, use "
            "torchring.data.Sampler"
        )
    found = ShardedDataset(dataset, rank, size)
    if "datasets" in sys.modules and isinstance(dataset, sys.modules["datasets"].IterableDataset):
        from datasets.distributed import split_dataset_by_node

        split: IterableDataset[Any] = split_dataset_by_node(dataset, *found.part()[:2])
        return split
    return found


def shared_number(value: int) -> torch.Tensor:
    """An int64 tensor that the workers of a DataLoader see change."""
    number: torch.Tensor = torch.tensor(value, device="cpu").share_memory_()  # type: ignore[no-untyped-call]
    return number


class SplitDataset(IterableDataset[Any]):
    """Of which each worker of each rank yields another part."""

    def __init__(self, rank: int | None, size: int | None) -> None:
        self._rank_and_size = rank_and_size(rank, size)
        self._shared_epoch = shared_number(-1)

    @property
    def epoch(self) -> int:
        """The newest that was set; 0 before."""
        return max(0, int(self._shared_epoch))

    def set_epoch(self, epoch: int) -> None:
        """The next iteration belongs to this epoch, in workers that stay, too."""
        self._shared_epoch.fill_(epoch)

    def part(self) -> tuple[int, int, int, int]:
        """Rank and size, number of this worker and how many there are: 0 and 1 without workers."""
        info = get_worker_info()
        return *self._rank_and_size(), 0 if info is None else info.id, 1 if info is None else info.num_workers

    def __getstate__(self) -> dict[str, Any]:
        """For workers that are not forked, and may not know their rank."""
        return {**vars(self), "_rank_and_size": rank_and_size(*self._rank_and_size())}


class ShardedDataset(SplitDataset):
    """What `shard` returns."""

    def __init__(self, dataset: Iterable[Any], rank: int | None, size: int | None) -> None:
        super().__init__(rank, size)
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return _Elements(self)


class _Elements(Iterator[Any]):
    """One iteration, in one worker. It begins with its first element."""

    def __init__(self, shard: ShardedDataset) -> None:
        self._shard = shard
        self._start = 0  # elements at the front that were used before
        self._num_taken = 0  # of the others, by this worker
        self._elements: Iterator[Any] | None = None

    def state_dict(self) -> dict[str, int]:
        """The position, and how many workers of how many ranks have come as far."""
        _, size, _, num_workers = self._shard.part()
        return {"start": self._start, "taken": self._num_taken, "size": size, "num_workers": num_workers}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Go on there. Raises ValueError where it is not known how far other workers have come."""
        self._start, self._num_taken = state_dict["start"], state_dict["taken"]
        if not is_of_as_many(state_dict, self._shard.part()):
            self._start += self._num_taken * state_dict["size"]
            self._num_taken = 0

    def __next__(self) -> Any:
        info, part = get_worker_info(), self._shard.part() if self._elements is None else None
        loader_worker._worker_info = None  # else the dataset may yield a part only
        try:
            if self._elements is None and part is not None:
                self._elements = self._open(*part)
            assert self._elements is not None
            element = next(self._elements)
        finally:
            loader_worker._worker_info = info
        self._num_taken += 1
        return element

    def _open(self, rank: int, size: int, worker: int, num_workers: int) -> Iterator[Any]:
        shard = self._shard
        if shard._shared_epoch >= 0 and (set_epoch := getattr(shard.dataset, "set_epoch", None)) is not None:
            set_epoch(shard.epoch)
        stride = size * num_workers
        first = self._start + rank + size * worker + self._num_taken * stride
        return itertools.islice(iter(shard.dataset), first, None, stride)


def is_of_as_many(state_dict: Mapping[str, int], part: tuple[int, int, int, int]) -> bool:
    """Whether the state of an iteration is of as many ranks and workers as there are now.

    Raises:
        ValueError: it is not, and it is that of one of several workers. Others may have come further.
    """
    _, size, _, num_workers = part
    if (state_dict["size"], state_dict["num_workers"]) == (size, num_workers):
        return True
    if state_dict["num_workers"] > 1:
        raise ValueError(
            f"the state is of {state_dict['size']} ranks with {state_dict['num_workers']} workers each, but there are "
            f"{size} ranks with {num_workers} now: go on with as many as before, or save without workers"
        )
    return False
