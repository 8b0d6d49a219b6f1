"""`torchring.data.shard`: each element on one rank and in one worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from torchring.data import shard


class Numbers(IterableDataset[int]):
    """0 to n - 1, and 1000 more for each epoch. In workers, it would leave out what others yield."""

    def __init__(self, n: int) -> None:
        self.n, self.epoch = n, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        numbers = range(self.n) if info is None else range(info.id, self.n, info.num_workers)
        return iter([1000 * self.epoch + n for n in numbers])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_element_once(num_workers: int) -> None:
    parts = [shard(Numbers(17), rank=rank, size=3) for rank in range(3)]
    loaders = [DataLoader(p, None, num_workers=num_workers, persistent_workers=num_workers > 0) for p in parts]
    for epoch in range(2):
        for part in parts:
            part.set_epoch(epoch)  # type: ignore[attr-defined]
        found = [sorted(loader) for loader in loaders]
        assert found == [[1000 * epoch + n for n in range(rank, 17, 3)] for rank in range(3)]


def test_other_ways_to_start_workers() -> None:
    """They know the rank, though they have not been told."""
    part = shard([*range(9)], rank=1, size=2)
    assert sorted(DataLoader(part, None, num_workers=2, multiprocessing_context="forkserver")) == [1, 3, 5, 7]


def test_state() -> None:
    def loaders(num_workers: int) -> list[StatefulDataLoader[int]]:
        parts = [shard([*range(20)], rank=rank, size=2) for rank in range(2)]
        return [StatefulDataLoader(part, 2, num_workers=num_workers) for part in parts]

    for num_workers in (0, 2):
        seen: list[int] = []
        for loader, other in zip(loaders(num_workers), loaders(num_workers), strict=True):
            seen += next(iter(loader)).tolist()
            other.load_state_dict(loader.state_dict())
            seen += [n for batch in other for n in batch.tolist()]
        assert sorted(seen) == [*range(20)]


@pytest.mark.parametrize("dataset", [iter([1]), (n for n in range(3)), 3])
def test_bad_input(dataset: Any) -> None:
    with pytest.raises(TypeError, match=r"takes an iterable that starts anew with each iter\(\), got"):
        shard(dataset)
