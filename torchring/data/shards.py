"""`shard`: an iterable dataset of which each rank, and each worker of its `DataLoader`, reads another part."""

import contextlib
import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as loader_worker

from torchring.data.epoch import Place
from torchring.world import Group


def shard(
    dataset: Iterable[Any], *, rank: int | None = None, size: int | None = None, group: Group | None = None
) -> IterableDataset[Any]:
    """An iterable dataset that yields this rank's part of `dataset`, for a `DataLoader` with any number of workers.

        loader = DataLoader(torchring.data.shard(lines), batch_size=32, num_workers=2)

    Element k goes to rank k mod size, where the workers take turns. So each worker reads the whole dataset, and leaves
    out what others yield. A streaming dataset of Hugging Face is split by its own `split_dataset_by_node`: a rank opens
    only its own files, if ranks can have equally many.

    Ranks get parts that differ in length, and different numbers of batches: put the loop into a `torchring.join` block,
    or training hangs at the end of the epoch.

    `set_epoch` is passed on to `dataset`, to workers that stay (`persistent_workers=True`), too. torchdata's
    `StatefulDataLoader` can stop and go on with as many ranks and workers as before. It then reads again what was used.

    Args:
        dataset: starts anew with each `iter()`, and yields the same on every rank and in every worker. It is not told
            that it runs in a worker, so what splits its data by `get_worker_info()` yields all of it.
        rank: this process. By default that of torchring when an iteration begins.
        size: number of processes that share the samples. By default that of torchring when an iteration begins.
        group: the ranks that share the samples, in place of `rank` and `size`. See `Sampler`.

    Raises:
        TypeError: not an iterable, or one that can be read only once, such as a generator.
    """
    if isinstance(dataset, Iterator) or not hasattr(dataset, "__iter__"):
        raise TypeError(
            f"shard() takes an iterable that starts anew with each iter(), got {type(dataset).__name__}; write an "
            "IterableDataset whose __iter__ opens the data. For a dataset with a length and __getitem__, use "
            "torchring.data.Sampler"
        )
    found = ShardedDataset(dataset, Place(rank, size, group))
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

    def __init__(self, place: Place) -> None:
        self._place = place
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
        return *self._place(), 0 if info is None else info.id, 1 if info is None else info.num_workers

    def __getstate__(self) -> dict[str, Any]:
        """For workers that are not forked, and may not know their rank."""
        return {**vars(self), "_place": Place(*self._place())}


class ShardedDataset(SplitDataset):
    """What `shard` returns."""

    def __init__(self, dataset: Iterable[Any], place: Place) -> None:
        super().__init__(place)
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        rank, size, worker, num_workers = self.part()
        if self._shared_epoch >= 0 and (set_epoch := getattr(self.dataset, "set_epoch", None)) is not None:
            set_epoch(self.epoch)
        with _outside_of_workers():
            elements = itertools.islice(iter(self.dataset), rank + size * worker, None, size * num_workers)
        while True:
            with _outside_of_workers():
                try:
                    element = next(elements)
                except StopIteration:
                    return
            yield element


@contextlib.contextmanager
def _outside_of_workers() -> Iterator[None]:
    """Inside, a dataset does not know that it runs in a worker: it might yield a part only."""
    info, loader_worker._worker_info = get_worker_info(), None
    try:
        yield
    finally:
        loader_worker._worker_info = info
