"""`torchring.data.Sampler`: each sample of an epoch once, wherever training stops, and with any number of ranks."""

from __future__ import annotations

import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from torch.utils.data import Sampler as TorchSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torchdata.stateful_dataloader import StatefulDataLoader

from torchring.data import Sampler
from torchring.observe.recorder import process


def permutation(length: int, seed: int, epoch: int) -> list[int]:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


class ByLength(TorchSampler[list[int]]):
    """Batches of samples of like length, in an order that depends on the epoch. Sample n has length 7n mod 5."""

    def __init__(self, length: int, batch_size: int) -> None:
        self.length, self.batch_size, self.epoch = length, batch_size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        samples = sorted(permutation(self.length, 3, self.epoch), key=lambda n: 7 * n % 5)
        batches = [samples[n : n + self.batch_size] for n in range(0, self.length, self.batch_size)]
        return iter(random.Random(self.epoch).sample(batches, len(batches)))


def order_of(kind: str, length: int, bucket: int, epoch: int) -> list[int]:
    """The order of an epoch, whatever the ranks."""
    if kind != "by length":
        return permutation(length, 5, epoch)
    batches = ByLength(length, bucket)
    batches.set_epoch(epoch)
    return [sample for batch in batches for sample in batch]


class World:
    """Ranks that train in lockstep, each with its own sampler and loader: the state is all that they know of before."""

    def __init__(self, kind: str, length: int, size: int, batch_size: int, bucket: int, state: Any) -> None:
        self.kind = kind
        batches = {"batch_sampler": ByLength(length, bucket)} if kind == "by length" else {}
        self.samplers = [Sampler(range(length), seed=5, rank=r, size=size, **batches) for r in range(size)]  # type: ignore[arg-type]
        loader: type[DataLoader[int]] = StatefulDataLoader if kind == "stateful" else DataLoader
        self.loaders = []
        for sampler in self.samplers:
            how = {"batch_sampler": sampler} if batches else {"batch_size": batch_size, "sampler": sampler}
            self.loaders.append(loader(range(length), collate_fn=list, **how))  # type: ignore[arg-type]
        for each in self.loaders if kind == "stateful" else self.samplers:
            if state is not None:
                each.load_state_dict(state)  # type: ignore[union-attr]

    def steps(self) -> Iterator[list[int]]:
        """The samples that count of each global batch, over one iteration."""
        for batches in zip(*self.loaders, strict=True):
            weights = [sampler.weight() for sampler in self.samplers]
            assert all(weight in (len(batch), 0) for weight, batch in zip(weights, batches, strict=True))
            yield [sample for batch, weight in zip(batches, weights, strict=True) for sample in batch[:weight]]

    def state(self) -> Any:
        states = [sampler.state_dict() for sampler in self.samplers]
        assert all(state == states[0] for state in states)
        return self.loaders[-1].state_dict() if self.kind == "stateful" else states[0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["plain", "stateful", "by length"])
@pytest.mark.parametrize("calls_set_epoch", [True, False])
def test_100_schedules_of_kill_resume_and_resize(
    kind: str, calls_set_epoch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchring.data.sampler._AT_ONCE", 3)
    num_killed = 0
    for seed in range(100 if kind == "plain" else 40):
        choose = random.Random(seed)
        length, bucket = choose.randint(1, 60), choose.randint(1, 5)
        num_epochs, epoch, state = 3, 0, None
        trained: list[list[int]] = [[] for _ in range(num_epochs)]  # since the last state that was saved, too
        saved: tuple[Any, int, list[list[int]]] = (None, 0, [[] for _ in range(num_epochs)])
        while epoch < num_epochs:  # a launch
            world = World(kind, length, choose.randint(1, 5), choose.randint(1, 6), bucket, state)
            left = choose.randint(0, 25)  # steps until the ranks are killed
            while epoch < num_epochs and left >= 0:
                if calls_set_epoch:
                    for sampler in world.samplers:
                        sampler.set_epoch(epoch)
                for samples in world.steps():
                    left -= 1
                    if left < 0:
                        break
                    begin, end = len(trained[epoch]), len(trained[epoch]) + len(samples)
                    assert sorted(samples) == sorted(order_of(kind, length, bucket, epoch)[begin:end])
                    trained[epoch] += samples
                    assert {sampler.epoch for sampler in world.samplers} == {epoch}
                    if choose.random() < 0.4:
                        saved = world.state(), epoch, [[*each] for each in trained]
                else:
                    epoch += 1
            if left < 0:
                num_killed += 1
                state, epoch, trained = saved[0], saved[1], [[*each] for each in saved[2]]
        assert [Counter(each) for each in trained] == [Counter(range(length))] * num_epochs
    assert num_killed > 30


@pytest.mark.parametrize("batch_size", [4, None])
def test_workers_that_draw_ahead(batch_size: int | None) -> None:
    """What they have drawn is not in the state; the workers stay from one epoch to the next."""
    sampler = Sampler(range(22), batch_size=None if batch_size else 4, rank=1, size=2)
    loader = DataLoader(range(22), batch_size, sampler=sampler, num_workers=2, persistent_workers=True)  # type: ignore[arg-type]
    for epoch in range(2):
        seen, per_step = [], (batch_size or 1)
        for number, batch in enumerate(loader):
            seen += batch.tolist() if batch_size else [batch]
            assert sampler.state_dict()["position"] == min(2 * per_step * (number + 1), 22)
            assert sampler.state_dict()["epoch"] == epoch
            if batch_size:
                assert sampler.weight() == len(batch)
        assert seen == permutation(22, 0, epoch)[1::2]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stateful_data_loader(num_workers: int) -> None:
    """Its state goes on at another world size. Saved at the end of an epoch, it goes on with the next."""

    def loader_of(rank: int, size: int, batch_size: int) -> StatefulDataLoader[int]:
        sampler = Sampler(range(30), rank=rank, size=size)
        return StatefulDataLoader(range(30), batch_size, sampler=sampler, num_workers=num_workers)  # type: ignore[arg-type]

    order, loader = permutation(30, 0, 0), loader_of(1, 2, 3)
    batches = iter(loader)
    first = [next(batches).tolist() for _ in range(2)]
    assert first == [order[1:6:2], order[7:12:2]]
    state = loader.state_dict()
    resumed = loader_of(2, 3, 2)
    resumed.load_state_dict(state)
    rest = [batch.tolist() for batch in resumed]
    assert rest == [order[14:18:3], order[20:24:3], order[26:30:3]]
    finished = loader_of(0, 1, 30)
    finished.load_state_dict(resumed.state_dict())
    assert [batch.tolist() for batch in finished] == [permutation(30, 0, 1)]
    again = loader_of(0, 2, 15)
    again.load_state_dict(loader_of(0, 2, 15).state_dict())  # of before the first batch
    assert [batch.tolist() for batch in again] == [order[::2]]


@pytest.mark.platforms
@pytest.mark.parametrize("is_stateful", [True, False])
def test_accelerate(is_stateful: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate shares batches out to its processes, and takes one batch ahead of the loop. torchring looks on."""
    from accelerate.data_loader import prepare_data_loader, skip_first_batches  # takes seconds

    monkeypatch.setattr(DataLoader, "__iter__", process._timed_begin)
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", process._timed_load)
    order = permutation(48, 0, 0)

    def prepared(state: Any = None, epoch: int = 0) -> tuple[list[Sampler], list[Any]]:
        samplers = [Sampler(range(48)) for _ in range(2)]
        loaders = [
            prepare_data_loader(
                DataLoader(range(48), 4, sampler=sampler),  # type: ignore[arg-type]
                torch.device("cpu"),
                num_processes=2,
                process_index=rank,
                use_stateful_dataloader=is_stateful,
            )
            for rank, sampler in enumerate(samplers)
        ]
        for sampler, loader in zip(samplers, loaders, strict=True):
            loader.set_epoch(epoch)
            if state is not None:
                (loader if is_stateful else sampler).load_state_dict(state)
        return samplers, loaders

    samplers, loaders = prepared()
    for number, batches in enumerate(zip(*loaders, strict=True)):
        assert [batch.tolist() for batch in batches] == [order[8 * number :][:4], order[8 * number + 4 :][:4]]
        assert [sampler.position for sampler in samplers] == [8 * (number + 1)] * 2
        if number == 2:
            state = (loaders[0] if is_stateful else samplers[0]).state_dict()
            break
    samplers, loaders = prepared(state)
    assert [[b.tolist() for b in batches] for batches in zip(*loaders, strict=True)] == [
        [order[n : n + 4], order[n + 4 : n + 8]] for n in (24, 32, 40)
    ]
    assert {sampler.position for sampler in samplers} == {48}
    assert [b.tolist() for b in loaders[0]] == [permutation(48, 0, 1)[n : n + 4] for n in range(0, 48, 8)]
    if not is_stateful:
        samplers, loaders = prepared()
        rest = skip_first_batches(loaders[1], 4)
        assert [(b.tolist(), samplers[1].position) for b in rest] == [(order[36:40], 40), (order[44:48], 48)]


@pytest.mark.platforms
def test_skipped_batches_count() -> None:
    from accelerate.data_loader import skip_first_batches

    sampler = Sampler(range(12), shuffle=False)
    loader = skip_first_batches(DataLoader(range(12), 3, sampler=sampler), 2)  # type: ignore[arg-type]
    assert [(batch.tolist(), sampler.position) for batch in loader] == [([6, 7, 8], 9), ([9, 10, 11], 12)]


def test_epochs_and_lengths() -> None:
    sampler = Sampler(range(10), rank=0, size=2)
    loader = DataLoader(range(10), 2, sampler=sampler)  # type: ignore[arg-type]
    first = next(iter(loader)).tolist()  # a look at the front, which is no training
    assert (next(iter(loader)).tolist(), sampler.position) == (first, 4)
    epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
    assert [epochs[0][0], sampler.epoch] == [first, 1]
    assert epochs == [[permutation(10, 0, e)[n : n + 4 : 2] for n in (0, 4, 8)] for e in range(2)]
    sampler.set_epoch(1)  # once more, as for a validation
    assert [batch.tolist() for batch in loader] == epochs[1]
    sampler.load_state_dict({**sampler.state_dict(), "position": 4})
    assert len(loader) == 2
    for number, _ in enumerate(loader):
        assert (len(loader), sampler.position) == (2, (8, 10)[number])
    assert len(loader) == 3  # of the next epoch
    state = sampler.state_dict()
    sampler.load_state_dict(state)
    sampler.set_epoch(1)
    assert list(loader) == []
    assert len(list(loader)) == 3


def test_state_of_torchrings_world() -> None:
    assert list(Sampler(range(3), shuffle=False, batch_size=2)) == [0, 1, 2]


class Pooled(BatchSampler):
    """Sorts ten samples at a time."""

    def __iter__(self) -> Iterator[list[int]]:
        samples = iter(self.sampler)
        while pool := sorted(n for n, _ in zip(samples, range(10), strict=False)):
            yield from (pool[n : n + self.batch_size] for n in range(0, len(pool), self.batch_size))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_sampler_that_holds_samples_back(num_workers: int) -> None:
    sampler = Sampler(range(22))
    loader = DataLoader(range(22), batch_sampler=Pooled(sampler, 4, False), num_workers=num_workers)  # type: ignore[arg-type]
    batches = iter(loader)
    next(batches)
    with pytest.raises(ValueError, match=r"holds samples back.*Sampler\(dataset, batch_sampler="):
        sampler.state_dict()
    list(batches)
    assert sampler.position == 22


class Changing:
    def __init__(self) -> None:
        self.length = 4

    def __len__(self) -> int:
        return self.length


def test_a_dataset_that_changes() -> None:
    dataset = Changing()
    sampler = Sampler(dataset, batch_size=1)
    list(sampler)
    dataset.length = 6
    with pytest.raises(ValueError, match="had 4 samples when its sampler was made, but has 6 in epoch 1"):
        list(sampler)


def test_both_states_loaded() -> None:
    """torchdata forwards a batch sampler that has no state by itself."""

    def pair() -> tuple[Sampler, StatefulDataLoader[int]]:
        sampler = Sampler(range(12))
        return sampler, StatefulDataLoader(range(12), batch_sampler=BatchSampler(sampler, 2, False))  # type: ignore[arg-type]

    sampler, loader = pair()
    next(iter(loader))
    states = sampler.state_dict(), loader.state_dict()
    sampler, loader = pair()
    loader.load_state_dict(states[1])
    assert (next(iter(loader)).tolist(), sampler.position) == (permutation(12, 0, 0)[2:4], 4)
    sampler.load_state_dict(states[0])
    loader.load_state_dict(states[1])
    with pytest.raises(ValueError, match="leaves out another 1 batches: load the state of one"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sampler(iter([1])), "needs a dataset with a length, got list_iterator; .* torchring.data.shard"),  # type: ignore[arg-type]
        (lambda: Sampler([1], batch_size=0), "batch_size must be at least 1, got 0"),
        (lambda: Sampler([1], rank=1), "pass both rank and size, .* got rank=1, size=None"),
        (lambda: Sampler([1], rank=2, size=2), "got rank=2, size=2"),
        (lambda: Sampler([1], batch_size=1, batch_sampler=[[0]]), "leave out batch_size=1"),
        (lambda: list(Sampler([1])), r"Sampler\(dataset, batch_sampler=...\)"),
        (lambda: list(BatchSampler(Sampler([1]), 1, True)), "leave drop_last=False"),
        (lambda: list(BatchSampler(Sampler([1], batch_sampler=[[0]]), 1, False)), r"DataLoader\(batch_sampler=sampler"),
        (lambda: Sampler([1]).weight(), "no batch has been handed out"),
        (lambda: Sampler([1]).load_state_dict(Sampler([1, 2]).state_dict()), "of 2 samples, but this one has 1"),
    ],
)
def test_bad_input(make: Callable[[], Iterable[Any]], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_a_batch_sampler_that_yields_other_batches_than_were_saved() -> None:
    sampler = Sampler(range(6), batch_sampler=[[0, 1], [2, 3], [4, 5]])
    sampler.load_state_dict({**sampler.state_dict(), "position": 3})
    with pytest.raises(ValueError, match="no batch begins after 3 samples of epoch 0"):
        list(sampler)


class Around(DistributedSampler[Any]):
    """What Lightning puts around a sampler."""

    def __init__(self, sampler: Sampler, asks: bool) -> None:
        super().__init__([*sampler] if asks else range(4), num_replicas=2, rank=0)
        self.inner = sampler

    def __iter__(self) -> Iterator[Any]:
        return iter([*self.inner][self.rank :: 2])


def test_a_sampler_around_it() -> None:
    for asks in (True, False):
        with pytest.raises(ValueError, match=r"shares the sampler's samples out again.*use_distributed_sampler=False"):
            list(Around(Sampler(range(4), batch_size=1), asks))


class _Loss:
    """Weak references see when it goes."""


class Script:
    def train(self, loader: DataLoader[int], other: DataLoader[int]) -> list[weakref.ref[_Loss]]:
        seen = []
        for _ in loader:
            loss = _Loss()
            seen.append(weakref.ref(loss))
            len(other)
            next(iter(other))
            del loss
            assert seen[-1]() is None
        return seen


def test_what_a_loop_lets_go_goes() -> None:
    """Before Python 3.13, to look at a frame's variables keeps them."""
    loader, other = (DataLoader(range(4), 2, sampler=Sampler(range(4))) for _ in range(2))  # type: ignore[arg-type]
    assert len(Script().train(loader, other)) == 2
