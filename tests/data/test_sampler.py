"""`torchring.data.Sampler` and `shard`: each sample of an epoch once, wherever training stops and on any ranks."""

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from torchring.data import Sampler, shard


def permutation(length: int, seed: int, epoch: int) -> list[int]:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


class World:
    """Ranks that train in lockstep, each with its own sampler and loader: the state is all that they know of before.

    kind: "plain", "stateful" (a loader of torchdata), or "steps": samplers count steps, as in a State.
    """

    def __init__(self, kind: str, length: int, size: int, batch: dict[str, Any], state: Any) -> None:
        where = [{} if kind == "steps" else {"rank": rank, "size": size} for rank in range(size)]
        self.samplers = [Sampler(range(length), seed=5, **batch, **each) for each in where]  # type: ignore[arg-type]
        loader: type[DataLoader[int]] = StatefulDataLoader if kind == "stateful" else DataLoader
        self.loaders = [loader(range(length), collate_fn=list, batch_sampler=each) for each in self.samplers]  # type: ignore[arg-type]
        self.stateful: list[Any] = [*(self.loaders if kind == "stateful" else self.samplers)]
        for each in self.stateful if state is not None else ():
            each.load_state_dict(state)
        for rank, sampler in enumerate(self.samplers if kind == "steps" else ()):
            sampler.count_steps()
            sampler.share_out(rank, size)

    def steps(self) -> Iterator[list[int]]:
        """The samples that count of each global batch, over one iteration."""
        for batches in zip(*self.loaders, strict=True):
            weights = [sampler.weight() for sampler in self.samplers]
            assert all(weight in (len(batch), 0) for weight, batch in zip(weights, batches, strict=True))
            yield [sample for batch, weight in zip(batches, weights, strict=True) for sample in batch[:weight]]

    def state(self) -> Any:
        states = [sampler.state_dict() for sampler in self.samplers]
        assert states == states[:1] * len(states)
        return self.stateful[-1].state_dict()


@pytest.mark.parametrize("kind", ["plain", "stateful", "steps"])
@pytest.mark.parametrize("calls_set_epoch", [True, False])
def test_100_schedules_of_kill_resume_and_resize(kind: str, calls_set_epoch: bool) -> None:
    """In each, ranks are killed in the middle of steps, and other ranks go on, with batches of other sizes."""
    num_killed = 0
    for seed in range(40 if kind == "stateful" else 100):
        choose = random.Random(seed)
        length = choose.randint(1, 60)
        num_epochs, epoch, state = 3, 0, None
        trained: list[list[int]] = [[] for _ in range(num_epochs)]  # since the last state that was saved, too
        saved: tuple[Any, int, list[list[int]]] = (None, 0, [[] for _ in range(num_epochs)])
        while epoch < num_epochs:  # a launch
            batch: dict[str, Any] = {choose.choice(["batch_size", "global_batch"]): choose.randint(1, 6)}
            world = World(kind, length, choose.randint(1, 5), batch, state)
            left = choose.randint(0, 25)  # steps until the ranks are killed
            while epoch < num_epochs and left >= 0:
                looks = choose.random() < 0.2 and kind != "stateful"  # which is no training
                for loader in world.loaders if looks else ():
                    next(iter(loader), None)
                for sampler in world.samplers if looks or calls_set_epoch else ():
                    sampler.set_epoch(epoch)
                for samples in world.steps():
                    left -= 1
                    if left < 0:
                        break
                    begin, end = len(trained[epoch]), len(trained[epoch]) + len(samples)
                    assert sorted(samples) == sorted(permutation(length, 5, epoch)[begin:end])
                    trained[epoch] += samples
                    for sampler in world.samplers if kind == "steps" else ():
                        assert sampler.position == begin
                        sampler.record()
                    assert {(sampler.epoch, sampler.position) for sampler in world.samplers} == {(epoch, end)}
                    if choose.random() < 0.4:
                        saved = world.state(), epoch, [[*each] for each in trained]
                else:
                    epoch += 1
            if left < 0:
                num_killed += 1
                state, epoch, trained = saved[0], saved[1], [[*each] for each in saved[2]]
        assert [Counter(each) for each in trained] == [Counter(range(length))] * num_epochs
    assert num_killed > 30


@pytest.mark.parametrize("loader_type", [DataLoader, StatefulDataLoader])
def test_workers_that_draw_ahead_and_stay(loader_type: type[DataLoader[int]]) -> None:
    """What they have drawn is not in the state."""
    sampler = Sampler(range(22), batch_size=4, rank=1, size=2)
    loader = loader_type(range(22), batch_sampler=sampler, num_workers=2, persistent_workers=True)  # type: ignore[arg-type]
    for epoch in range(2):
        seen = []
        for number, batch in enumerate(loader):
            seen += batch.tolist()
            assert sampler.weight() == len(batch)
            assert sampler.state_dict()["position"] == min(8 * (number + 1), 22)
            assert sampler.state_dict()["epoch"] == epoch
        assert seen == permutation(22, 0, epoch)[1::2]


def test_stateful_data_loader_with_workers() -> None:
    """Its state goes on at another world size. Saved at the end of an epoch, it goes on with the next."""

    def loader_of(rank: int, size: int, batch_size: int) -> StatefulDataLoader[int]:
        sampler = Sampler(range(30), batch_size=batch_size, rank=rank, size=size)
        return StatefulDataLoader(range(30), batch_sampler=sampler, num_workers=2)  # type: ignore[arg-type]

    def take(loader: Any, num: int = 99) -> list[list[int]]:
        return [(batch.tolist(), loader.batch_sampler.weight())[0] for batch in itertools.islice(loader, num)]

    order, loader = permutation(30, 0, 0), loader_of(1, 2, 3)
    assert take(loader, 2) == [order[1:6:2], order[7:12:2]]
    resumed = loader_of(2, 3, 2)
    resumed.load_state_dict(loader.state_dict())
    assert take(resumed) == [order[14:18:3], order[20:24:3], order[26:30:3]]
    finished = loader_of(0, 1, 30)
    finished.load_state_dict(resumed.state_dict())
    assert take(finished) == [permutation(30, 0, 1)]


def test_epochs_and_lengths() -> None:
    sampler = Sampler(range(10), rank=0, size=2, batch_size=2)
    loader = DataLoader(range(10), batch_sampler=sampler)  # type: ignore[arg-type]
    epochs = [[batch.tolist() for batch in loader] for _ in range(2)]  # no weights, as in a validation
    assert epochs == [[permutation(10, 0, e)[n : n + 4 : 2] for n in (0, 4, 8)] for e in range(2)]
    sampler.set_epoch(1)
    assert [batch.tolist() for batch in loader] == epochs[1]
    with pytest.raises(ValueError, match=r"used is not known: call optimizer.weigh\(sampler.weight\(\)\) once"):
        sampler.state_dict()
    sampler.load_state_dict({**sampler._state(1, 4), "position": 4})
    assert len(loader) == 2
    for number, _ in enumerate(loader):
        sampler.weight()
        assert (len(loader), sampler.position) == (2, (8, 10)[number])
    assert len(loader) == 3  # of the next epoch
    sampler.load_state_dict(sampler.state_dict())
    sampler.set_epoch(1)
    assert list(loader) == []
    assert len(list(loader)) == 3
    assert sampler.epoch == 2


def test_a_look_inside_a_loop_changes_nothing() -> None:
    sampler = Sampler(range(12), shuffle=False, batch_size=2)
    loader = DataLoader(range(12), batch_sampler=sampler)  # type: ignore[arg-type]
    for number, batch in enumerate(loader):
        next(iter(loader))
        assert (sampler.weight(), sampler.position) == (2, 2 * number + 2)
        assert batch.tolist() == [2 * number, 2 * number + 1]
        if number == 2:
            break
    assert [batch.tolist() for batch in loader] == [[6, 7], [8, 9], [10, 11]]  # the rest
    sampler = Sampler(range(5), shuffle=False, global_batch=3, rank=2, size=3)
    batches = list(sampler)
    assert batches == [[2], [3]]
    assert [sampler.weight(), sampler.weight()] == [1, 0]
    assert sampler.position == 5
    with pytest.raises(ValueError, match="for batch 2, counted from 0, of an iteration that has drawn 2"):
        sampler.weight()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_that_is_left_out_without_its_weight(num_workers: int) -> None:
    sampler = Sampler(range(23), batch_size=2)
    batches = iter(DataLoader(range(23), batch_sampler=sampler, num_workers=num_workers))  # type: ignore[arg-type]
    assert [(len(next(batches)), sampler.weight()) for _ in range(3)] == [(2, 2)] * 3
    next(batches), next(batches)
    with pytest.raises(ValueError, match="for batch 3, counted from 0, but the loop has taken a later one"):
        sampler.weight()


def test_used_as_torchs_distributed_sampler() -> None:
    """Yields samples, equally many on all ranks. A position within an epoch there is not."""
    samplers = [Sampler(range(7), shuffle=False, rank=rank, size=2) for rank in range(2)]
    loaders = [DataLoader(range(7), 3, sampler=sampler) for sampler in samplers]  # type: ignore[arg-type]
    assert [len(loader) for loader in loaders] == [2, 2]
    assert [[b.tolist() for b in loader] for loader in loaders] == [[[0, 2, 4], [6]], [[1, 3, 5], [6]]]
    samplers[0].set_epoch(1)
    assert samplers[0].state_dict()["position"] == 0
    next(iter(loaders[0]))
    makes = r"the DataLoader makes the batches.* batch_sampler=torchring.data.Sampler"
    for ask in (samplers[0].weight, samplers[0].state_dict, samplers[0].count_steps):
        with pytest.raises(ValueError, match=makes):
            ask()
    assert list(Sampler(range(3), shuffle=False)) == [0, 1, 2]  # in torchring's world


def test_steps_in_which_no_batch_is_counted() -> None:
    sampler = Sampler(range(6), batch_size=2)
    sampler.count_steps()
    sampler.share_out(0, 1)
    sampler.record()  # of other data
    next(iter(sampler))
    sampler.record()
    loop = iter(sampler)
    next(loop)
    with pytest.raises(ValueError, match=r"no batch was counted: call optimizer.weigh\(sampler.weight\(\)\)"):
        sampler.record()


def test_bad_input() -> None:
    grows, one = [0] * 4, [1]
    growing = Sampler(grows, batch_size=1)
    list(growing)
    grows += [0, 0]
    longer = Sampler([1, 2]).state_dict()
    for make, message in (
        (lambda: Sampler(iter(one)), "needs a dataset with a length, got list_iterator; .* torchring.data.shard"),
        (lambda: Sampler(one, batch_size=0), "batch_size must be at least 1, got 0"),
        (lambda: Sampler(one, rank=1), "pass both rank and size, .* got rank=1, size=None"),
        (lambda: Sampler(one, rank=2, size=2), "got rank=2, size=2"),
        (lambda: Sampler(one, global_batch=0), "global_batch must be at least 1, got 0"),
        (lambda: Sampler(one, batch_size=1, global_batch=2), "batch_size and global_batch both say"),
        (lambda: Sampler(one, batch_size=1).weight(), "the sampler has drawn none"),
        (lambda: Sampler(one).load_state_dict(longer), "of 2 samples, but this one has 1"),
        (lambda: list(growing), "had 4 samples when its sampler was made, but has 6 in epoch 1"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            make()


# ---- shards of an iterable


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
def test_a_shard_has_each_element_once(num_workers: int) -> None:
    parts = [shard(Numbers(17), rank=rank, size=3) for rank in range(3)]
    loaders = [DataLoader(p, None, num_workers=num_workers, persistent_workers=num_workers > 0) for p in parts]
    for epoch in range(2):
        for part in parts:
            part.set_epoch(epoch)  # type: ignore[attr-defined]
        found = [sorted(loader) for loader in loaders]
        assert found == [[1000 * epoch + n for n in range(rank, 17, 3)] for rank in range(3)]


def test_workers_of_a_shard_that_are_started_in_another_way() -> None:
    """They know the rank, though they have not been told."""
    part = shard([*range(9)], rank=1, size=2)
    assert sorted(DataLoader(part, None, num_workers=2, multiprocessing_context="forkserver")) == [1, 3, 5, 7]


def test_state_of_a_shard() -> None:
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
def test_what_has_no_shards(dataset: Any) -> None:
    with pytest.raises(TypeError, match=r"takes an iterable that starts anew with each iter\(\), got"):
        shard(dataset)
