"""Each sample of an epoch is used once, over all changes of ranks, to the unit of a global batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from torchring.elastic.worker.sampler import Sampler


class _World:
    """What `elastic.run` does with one sampler per rank, and a training loop that draws with a `BatchSampler`."""

    def __init__(
        self, length: int, size: int, batch_size: int, global_batch: int | None = None, **options: int
    ) -> None:
        self.length, self.options = length, options
        self.state: dict[str, int | bool] | None = None
        self.change(size, batch_size, global_batch)

    def change(self, size: int, batch_size: int, global_batch: int | None) -> None:
        """Another world, of new processes: all that they know is a survivor's state."""
        self.samplers = [Sampler(range(self.length), **self.options) for _ in range(size)]
        for rank, sampler in enumerate(self.samplers):
            if self.state is not None:
                sampler.load_state_dict(self.state)
            sampler.share_out(rank, size, global_batch)
        self.batch_sizes = [batch_size if global_batch is None else sampler.batch_size for sampler in self.samplers]

    def batches(self) -> Iterator[list[list[int]]]:
        """The batches of all ranks, step by step. Lets all ranks draw ahead by one, as a `DataLoader` worker does."""
        drawn = [iter(BatchSampler(s, b, False)) for s, b in zip(self.samplers, self.batch_sizes, strict=True)]
        ahead = [next(it, None) for it in drawn]
        while any(batch is not None for batch in ahead):
            assert None not in ahead, "some ranks have a batch, and others none"
            now, ahead = ahead, [next(it, None) for it in drawn]
            yield [batch for batch in now if batch is not None]

    def counted(self, batches: list[list[int]], number: int) -> list[int]:
        """The samples of a global batch that count."""
        weights = [sampler.weight(number) for sampler in self.samplers]
        if None in weights:
            assert set(weights) == {None}
            assert len({len(batch) for batch in batches}) == 1
            return [sample for batch in batches for sample in batch]
        for batch, weight in zip(batches, weights, strict=True):
            assert weight == len(batch) or (weight == 0 and len(batch) == 1)
        return [sample for batch, weight in zip(batches, weights, strict=True) for sample in batch[:weight]]

    def record(self, num_batches: int = 1) -> None:
        for sampler in self.samplers:
            sampler.record(num_batches)
        states = [sampler.state_dict() for sampler in self.samplers]
        assert all(state == states[0] for state in states)
        self.state = states[0]


_CHANGES = st.lists(
    st.tuples(
        st.integers(0, 9),  # steps until the change
        st.booleans(),  # one more batch is drawn, and its step is lost
        st.integers(1, 5),  # size
        st.integers(1, 4),  # batch size
        st.none() | st.integers(1, 11),  # global batch
    ),
    max_size=8,
)


@pytest.mark.parametrize("calls_set_epoch", [True, False])
@settings(max_examples=150, deadline=None)
@given(length=st.integers(1, 40), shuffle=st.booleans(), seed=st.integers(0, 99), changes=_CHANGES)
def test_each_sample_is_used_once(
    calls_set_epoch: bool, length: int, shuffle: bool, seed: int, changes: list[tuple[int, bool, int, int, int | None]]
) -> None:
    num_epochs = 3
    world = _World(length, 2, 3, shuffle=shuffle, seed=seed)
    used: list[Counter[int]] = [Counter() for _ in range(num_epochs)]
    epoch = 0  # the script's, which a survivor passes on

    def train(steps: int | None, loses_one: bool) -> None:
        """The training function, until it ends or `steps` are done."""
        nonlocal epoch
        for epoch in range(epoch, num_epochs):  # noqa: B020
            if calls_set_epoch:
                for sampler in world.samplers:
                    sampler.set_epoch(epoch)
            for number, batches in enumerate(world.batches()):
                if steps == 0 and loses_one:
                    return
                samples = world.counted(batches, number)
                assert world.samplers[0].epoch == epoch
                assert world.samplers[0].recorded == number
                world.record()
                used[epoch].update(samples)
                assert world.samplers[0].position == used[epoch].total()
                steps = None if steps is None else steps - 1
                if steps == 0 and not loses_one:
                    return

    for steps, loses_one, size, batch_size, global_batch in changes:
        train(max(steps, 0 if loses_one else 1), loses_one)
        if not calls_set_epoch:  # with it, the state of the last step will do, though the script is in the next epoch
            world.state = world.samplers[0].state_dict()
        world.change(size, batch_size, global_batch)
    train(None, False)
    assert used == [Counter(range(length))] * num_epochs


@pytest.mark.parametrize("num_workers", [0, 2])
def test_data_loader_draws_the_global_batches_in_order(num_workers: int) -> None:
    dataset = torch.arange(23)
    samplers = [Sampler(dataset, seed=5) for _ in range(3)]
    for rank, sampler in enumerate(samplers):
        sampler.share_out(rank, 3, global_batch=7)
    assert [sampler.batch_size for sampler in samplers] == [3, 2, 2]
    loaders = [DataLoader(dataset, s.batch_size, sampler=s, num_workers=num_workers) for s in samplers]
    assert [len(loader) for loader in loaders] == [4, 4, 4]
    seen: list[list[int]] = []
    for number, batches in enumerate(zip(*loaders, strict=True)):
        weights = [sampler.weight(number) for sampler in samplers]
        seen.append([int(x) for batch, weight in zip(batches, weights, strict=True) for x in batch[:weight]])
        for sampler in samplers:
            sampler.record()
    assert [len(samples) for samples in seen] == [7, 7, 7, 2]
    order = torch.randperm(23, generator=torch.Generator().manual_seed(5)).tolist()
    assert [sorted(samples) for samples in seen] == [sorted(order[n : n + 7]) for n in range(0, 23, 7)]


def test_example_of_the_docstring() -> None:
    world = _World(10, 2, 2, shuffle=False)
    assert next(world.batches()) == [[0, 2], [1, 3]]
    world.record()
    world.change(3, 0, 4)
    steps = list(world.batches())
    assert steps == [[[4, 7], [5], [6]], [[8], [9], [8]]]
    assert [sampler.weight(1) for sampler in world.samplers] == [1, 1, 0]


def test_epochs_begin_by_themselves_and_differ() -> None:
    sampler = Sampler(range(12), batch_size=4)
    orders = []
    for epoch in range(3):
        orders.append(list(sampler))
        assert sampler.epoch == epoch
        sampler.record(3)
    assert len({tuple(order) for order in orders}) == 3
    sampler.set_epoch(2)
    assert list(sampler) == []  # all its samples have been used
    sampler.set_epoch(1)
    assert list(sampler) == orders[1]
    assert list(Sampler(range(12), seed=1, batch_size=4)) == orders[1]  # seed + epoch


def test_equal_shares_need_no_weights() -> None:
    """The last global batch, of 2 samples on 2 ranks, is smaller but equal."""
    sampler = Sampler(range(10), batch_size=2)
    sampler.share_out(1, 2)
    assert len(list(sampler)) == 5
    assert [sampler.weight(number) for number in range(3)] == [None] * 3
    with pytest.raises(ValueError, match="no batch 3"):
        sampler.weight(3)


def test_more_ranks_than_the_global_batch_has_samples() -> None:
    sampler = Sampler(range(4), shuffle=False)
    sampler.share_out(2, 3, global_batch=2)
    assert sampler.batch_size == 1
    assert list(BatchSampler(sampler, 1, False)) == [[0], [2]]
    assert [sampler.weight(0), sampler.weight(1)] == [0, 0]


def test_a_loop_that_is_left_early_goes_on() -> None:
    """So does one that only looked at a batch, even if workers have drawn the whole epoch."""
    sampler = Sampler(range(4), shuffle=False, batch_size=1)
    assert list(sampler) == [0, 1, 2, 3]
    assert next(iter(sampler)) == 0
    sampler.record()
    assert list(sampler) == [1, 2, 3]
    assert (sampler.epoch, sampler.recorded) == (0, 0)
    sampler.set_epoch(1)  # gives up the others
    assert list(sampler) == [0, 1, 2, 3]
    assert sampler.recorded == 0


@pytest.mark.parametrize("calls_set_epoch", [True, False])
def test_a_step_may_use_batches_of_two_epochs(calls_set_epoch: bool) -> None:
    """With accumulate=3, a step uses the last batch of the first epoch and two of the second."""
    sampler = Sampler(range(4), shuffle=False, batch_size=1)
    list(sampler)
    sampler.record(3)
    if calls_set_epoch:
        sampler.set_epoch(1)
    drawn = iter(sampler)
    assert [next(drawn), next(drawn)] == [0, 1]
    assert (sampler.epoch, sampler.position, sampler.recorded) == (1, 0, -1)
    assert next(iter(sampler)) == 0  # another look at the front: the batch of the first epoch is still open
    sampler.record(3)
    assert (sampler.epoch, sampler.position, sampler.recorded) == (1, 2, 2)
    sampler.set_epoch(2)
    next(iter(sampler))
    assert sampler.recorded == 0


def test_a_step_of_two_epochs_that_is_lost() -> None:
    sampler = Sampler(range(4), shuffle=False, batch_size=1)
    list(sampler)
    sampler.record(3)
    sampler.set_epoch(1)
    sampler.share_out(0, 1)
    list(sampler)
    sampler.record(3)
    assert (sampler.position, sampler.recorded) == (3, 3)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_that_a_loop_holds_ahead_are_not_used(num_workers: int) -> None:
    """Whether the model gets what the DataLoader gave, a part of it, or something else."""
    for prepare in (lambda batch: batch, lambda batch: batch[:1], lambda batch: batch + 1):
        sampler = Sampler(range(10), shuffle=False)
        sampler.share_out(0, 2, global_batch=4)
        loader = iter(DataLoader(torch.arange(10.0), 2, sampler=sampler, num_workers=num_workers))  # type: ignore[arg-type]
        held, positions = [prepare(next(loader))], []
        for _ in range(3):
            held += [prepare(batch) for batch in (next(loader, None),) if batch is not None]
            sampler.see_forward(held.pop(0))
            sampler.record_step(1)
            positions.append(sampler.position)
        assert positions == [4, 8, 10]


def test_what_several_batches_have_in_common_shows_no_batch() -> None:
    mask = torch.ones(2)
    sampler = Sampler(range(8), shuffle=False)
    loader = DataLoader(range(8), 2, sampler=sampler, collate_fn=lambda rows: {"x": torch.tensor(rows), "mask": mask})  # type: ignore[arg-type]
    batches = iter(loader)
    held = [next(batches), next(batches)]
    sampler.see_forward(held[0])
    sampler.record_step(1)
    assert sampler.position == 2


def test_a_batch_that_is_left_out_at_the_end_is_used() -> None:
    """The next iteration belongs to the next epoch. Other iterations without a step leave the epoch as it is."""
    sampler = Sampler(range(6), shuffle=False)
    loader = DataLoader(torch.arange(6.0), 2, sampler=sampler)  # type: ignore[arg-type]
    assert len(list(loader)) == 3
    for i, _ in enumerate(loader):
        if i < 2:
            sampler.record_step(1)
    assert (sampler.epoch, sampler.position) == (0, 4)
    assert len(list(loader)) == 3
    assert sampler.epoch == 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_that_the_loop_batches_itself(num_workers: int) -> None:
    sampler = Sampler(range(10), shuffle=False, batch_size=4)
    samples = iter(DataLoader(torch.arange(10.0), None, sampler=sampler, num_workers=num_workers))  # type: ignore[arg-type]
    positions = []
    while len([sample for _, sample in zip(range(4), samples, strict=False)]) > 0:
        sampler.record_step(1)
        positions.append(sampler.position)
    assert positions == [4, 8, 10]


class _OutOfOrder(_BaseDataLoaderIter):
    """As of `DataLoader(in_order=False)` with workers."""

    _in_order = False

    def __init__(self, batches: BatchSampler) -> None:
        next(iter(batches))


def test_a_data_loader_that_changes_the_order() -> None:
    with pytest.raises(ValueError, match="leave in_order=True"):
        _OutOfOrder(BatchSampler(Sampler(range(4)), 1, False))


def test_length_stays_while_a_pass_is_under_way() -> None:
    sampler = Sampler(range(10))
    sampler.share_out(0, 2)
    loader = DataLoader(range(10), 2, sampler=sampler)  # type: ignore[arg-type]
    assert len(loader) == 3
    for _ in loader:
        sampler.record()
        assert len(loader) == 3
    sampler.share_out(0, 2)
    assert len(loader) == 0  # nothing of this epoch is left
    sampler.set_epoch(1)
    assert len(loader) == 3


class _Bucketing(BatchSampler):
    """A `BatchSampler` of the user's, and below it a sampler that extends ours."""


class _Logging(Sampler):
    def __iter__(self) -> Iterator[int]:
        return super().__iter__()


def test_batch_size_is_that_of_the_batch_sampler() -> None:
    sampler = _Logging(range(10), shuffle=False)
    sampler.share_out(1, 2)
    assert list(_Bucketing(sampler, 3, False)) == [[1, 3, 5], [7, 9]]
    sampler.record(2)
    assert sampler.position == 10


def test_batch_size_that_nobody_says() -> None:
    sampler = Sampler(range(10))
    for question in (list, len, lambda s: s.batch_size):
        with pytest.raises(ValueError, match=r"DataLoader\(batch_size=\.\.\.\), or set Sampler\(batch_size="):
            question(sampler)


@pytest.mark.parametrize("drawing", [list, len])
def test_data_loader_that_does_not_fit(drawing: type[list[int]]) -> None:
    sampler = Sampler(range(10))
    with pytest.raises(ValueError, match="leave drop_last=False"):
        drawing(BatchSampler(sampler, 2, True))
    sampler.share_out(1, 3, global_batch=8)
    with pytest.raises(ValueError, match="batch_size is 4, but rank 1 of 3 has 3 samples of a global batch of 8"):
        drawing(BatchSampler(sampler, 4, False))
    with pytest.raises(ValueError, match="batch_size is 4, but the Sampler's 2"):
        drawing(BatchSampler(Sampler(range(10), batch_size=2), 4, False))


def test_more_steps_than_batches() -> None:
    sampler = Sampler(range(10), batch_size=4)
    with pytest.raises(ValueError, match="without a batch of the sampler"):
        sampler.record()
    list(sampler)
    sampler.record(2)
    with pytest.raises(ValueError, match="used 2 batches, but epoch 0 has only 1 left"):
        sampler.record(2)
    assert sampler.position == 8


def test_state_of_another_dataset() -> None:
    state = Sampler(range(10)).state_dict()
    with pytest.raises(ValueError, match="a dataset of 10 samples, but this one has 11"):
        Sampler(range(11)).load_state_dict(state)
    with pytest.raises(ValueError, match="11 of 10 samples"):
        Sampler(range(10)).load_state_dict({**state, "position": 11})


def test_order_comes_from_the_state() -> None:
    """Else the samples after `position` would not be those that are left."""
    saved = Sampler(range(10), seed=3, batch_size=2)
    order = list(saved)
    saved.record(2)
    other = Sampler(range(10), shuffle=False, seed=4, batch_size=2)
    other.load_state_dict(saved.state_dict())
    assert list(other) == order[4:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((2, 2), "rank must be in"), ((0, 0), "rank must be in"), ((0, 1, 0), "global_batch must be at least 1")],
)
def test_world_that_cannot_be(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampler(range(3)).share_out(*arguments)
