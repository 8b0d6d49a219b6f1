"""A model that was changed on one rank only is noticed, and who changed it is named."""

from __future__ import annotations

import pytest
import torch
from checks import assert_same_on_all_ranks, digest, exact_inputs
from harness import run_ranks

import torchring
from torchring import replicas
from torchring.errors import GradientError


def model_and_optimizer(**options: object) -> tuple[torch.nn.Module, torchring.DistributedOptimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.5), model, **options)  # type: ignore[arg-type]
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torchring.DistributedOptimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    model(exact_inputs(6, torch.float32, rank + 7 * step).view(2, 3)).sum().backward()
    optimizer.step()


def check_named(error: GradientError, name: str, rank: int) -> None:
    assert (error.parameters, error.peers) == ((name,), (rank,))
    text = str(error)
    assert text.startswith(f"{name} is not the same on all ranks: rank {rank} differ")
    assert "broadcast_parameters" in text


def _in_place(rank: int, world_size: int, when: str, overlap: str) -> None:
    model, optimizer = model_and_optimizer(overlap=overlap)
    culprit = world_size - 1

    def change() -> None:
        if rank == culprit:
            with torch.no_grad():
                model[2].weight[1, 3] += 2**-20  # type: ignore[index,union-attr]

    for step in range(5):
        train(model, optimizer, rank, step)
    optimizer.zero_grad()
    if when == "before backward":
        change()
    model(torch.ones(2, 3)).sum().backward()
    if when == "after backward":
        change()
        optimizer.step()  # this one's alarm can travel with the next backward only
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
    elif when == "after step":
        optimizer.step()
        change()
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
    before = digest(model.parameters())
    with pytest.raises(GradientError) as caught:
        optimizer.step()
    check_named(caught.value, "2.weight", culprit)
    assert caught.value.rank == rank
    assert digest(model.parameters()) == before  # it has not stepped


@pytest.mark.parametrize("when", ["before backward", "after backward", "after step"])
@pytest.mark.parametrize(("world_size", "overlap"), [(2, "inline"), (3, "thread")])
def test_changed_in_place_on_one_rank(world_size: int, overlap: str, when: str) -> None:
    run_ranks(_in_place, world_size, when, overlap)


def _before_the_first_step(rank: int, world_size: int) -> None:
    model, optimizer = model_and_optimizer()
    if rank == 1:
        model[0].bias.data += 1  # type: ignore[union-attr,operator]
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(GradientError) as caught:
        optimizer.step()
    check_named(caught.value, "0.bias", 1)


def test_changed_before_the_first_step() -> None:
    run_ranks(_before_the_first_step, 2)


def _not_synchronised_at_first(rank: int, world_size: int) -> None:
    model, optimizer = model_and_optimizer(sync_initial_state=False)  # ranks are seeded differently
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(GradientError) as caught:
        optimizer.step()
    check_named(caught.value, "0.weight", 1)


def test_ranks_that_start_from_different_parameters() -> None:
    run_ranks(_not_synchronised_at_first, 2)


def _loaded_on_one_rank(rank: int, world_size: int) -> None:
    model, optimizer = model_and_optimizer()
    train(model, optimizer, rank, 0)
    if rank == 0:
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(GradientError) as caught:
        optimizer.step()
    check_named(caught.value, "0.weight", 1)  # rank 0 is what the others are compared with


def test_a_checkpoint_loaded_on_rank_0_only() -> None:
    run_ranks(_loaded_on_one_rank, 2)


def _mended(rank: int, world_size: int) -> str:
    model, optimizer = model_and_optimizer()
    train(model, optimizer, rank, 0)
    if rank == 1:
        with torch.no_grad():
            model[0].weight.zero_()  # type: ignore[union-attr,operator]
    torchring.broadcast_parameters(model)
    for step in range(1, 4):
        train(model, optimizer, rank, step)
    return digest(model.parameters())


def test_broadcast_parameters_mends_it() -> None:
    assert_same_on_all_ranks(run_ranks(_mended, 2))


def _without_a_trace(rank: int, world_size: int, how: str) -> int:
    replicas.STEPS_BETWEEN_CHECKS = 4  # type: ignore[misc]
    model, optimizer = model_and_optimizer()
    for step in range(5):
        train(model, optimizer, rank, step)
    if rank == 1:
        weight = model[2].weight  # type: ignore[union-attr]
        if how == "add":
            weight.data[1, 3] += 1  # type: ignore[index,operator]
        else:
            weight.data = weight.data * 2  # type: ignore[operator]
    for step in range(5, 8):
        train(model, optimizer, rank, step)
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(GradientError) as caught:
        optimizer.step()
    return len(caught.value.parameters)


@pytest.mark.parametrize("how", ["add", "replaced"])
def test_changed_without_a_trace_is_found_by_the_rhythm(how: str) -> None:
    assert run_ranks(_without_a_trace, 2, how) == [1, 1]


def _first_check_after(rank: int, world_size: int, how: str) -> None:
    """The change is the only difference when the check comes: no step lies between."""
    replicas.STEPS_BETWEEN_CHECKS = 1  # type: ignore[misc]
    model, optimizer = model_and_optimizer()
    train(model, optimizer, rank, 0)
    if rank == 1:
        data = model[2].weight.data  # type: ignore[union-attr]
        if how == "sign":
            data[1, 3] *= -1  # type: ignore[index,operator]
        elif how == "signs":
            data.neg_()  # type: ignore[operator]
        elif how == "rows":
            data.copy_(data.flip(0))  # type: ignore[operator]
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(GradientError) as caught:
        optimizer.step()
    check_named(caught.value, "2.weight", 1)


@pytest.mark.parametrize("how", ["sign", "signs", "rows"])
def test_what_kind_of_change_is_found(how: str) -> None:
    run_ranks(_first_check_after, 2, how)


def _same_everywhere(rank: int, world_size: int) -> str:
    replicas.STEPS_BETWEEN_CHECKS = 3  # type: ignore[misc]
    model, optimizer = model_and_optimizer()
    for step in range(12):
        train(model, optimizer, rank, step)
        with torch.no_grad():  # weight clipping, in every step
            for parameter in model.parameters():
                parameter.clamp_(-0.5, 0.5)
        if step == 5:
            for parameter in model.parameters():
                parameter.data = parameter.data * 0.5
        if step == 7:
            model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    return digest(model.parameters())


def test_the_same_change_on_all_ranks_is_no_error() -> None:
    assert_same_on_all_ranks(run_ranks(_same_everywhere, 2))


def _hidden_among_the_same(rank: int, world_size: int) -> int:
    """All decay in every step; rank 1 also does something else, once. Returns how many steps later it is found."""
    replicas.STEPS_BETWEEN_CHECKS = 20  # type: ignore[misc]
    model, optimizer = model_and_optimizer()
    for step in range(40):
        if rank == 1 and step == 3:
            with torch.no_grad():
                model[0].bias[2] += 0.25  # type: ignore[index,union-attr]
        try:
            train(model, optimizer, rank, step)
        except GradientError:
            return step - 3
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)
    return 1000


def test_a_change_hidden_among_legitimate_ones_is_found_in_the_end() -> None:
    first, second = run_ranks(_hidden_among_the_same, 2)
    assert first == second
    assert first <= 20


def _with_closures(rank: int, world_size: int) -> int:
    """step(closure) evaluates the model itself. Returns how many steps after the change it is found."""
    model, optimizer = model_and_optimizer()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).sum()
        loss.backward()
        return loss

    for step in range(8):
        if rank == 1 and step == 3:
            with torch.no_grad():
                model[0].bias[2] += 0.25  # type: ignore[index,union-attr]
        try:
            optimizer.step(closure)
        except GradientError as error:
            check_named(error, "0.bias", 1)
            return step - 3
    return 1000


def test_changed_in_place_where_steps_take_a_closure() -> None:
    first, second = run_ranks(_with_closures, 2)
    assert first == second
    assert first <= 1


def _sparse_only(rank: int, world_size: int) -> int:
    """No bucket that the alarm could travel with."""
    table = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = torchring.wrap(torch.optim.SGD(table.parameters(), lr=0.5), table)
    for step in range(8):
        if rank == 1 and step == 3:
            with torch.no_grad():
                table.weight[4] += 1
        optimizer.zero_grad()
        table(torch.tensor([0, 1])).sum().backward()
        try:
            optimizer.step()
        except GradientError:
            return step - 3
    return 1000


def test_changed_in_place_where_everything_is_sparse() -> None:
    first, second = run_ranks(_sparse_only, 2)
    assert first == second
    assert first <= 1


def _a_frozen_one(rank: int, world_size: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    model[0].requires_grad_(False)
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.5), model)
    train(model, optimizer, rank, 0)
    if rank == 1:
        with torch.no_grad():
            model[0].weight[0, 0] += 1  # type: ignore[index,union-attr]
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(GradientError) as caught:
        optimizer.step()
    check_named(caught.value, "0.weight", 1)


def test_a_frozen_parameter_is_watched_too() -> None:
    run_ranks(_a_frozen_one, 2)


# The digest


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_any_flipped_bit_changes_the_digest(dtype: torch.dtype) -> None:
    unnoticed = []
    for numel in (1, 2, 3, 4, 5, 9):
        value = torch.linspace(-1.0, 2.0, numel, dtype=torch.float64).to(dtype)
        before = replicas._digest(value)
        assert replicas._digest(value.clone()) == before
        integers = value.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
        for element in range(numel):
            for bit in range(8 * dtype.itemsize):
                changed = integers.clone()
                changed[element] ^= torch.ones((), dtype=integers.dtype) << bit
                if replicas._digest(changed.view(dtype)) == before:
                    unnoticed.append((numel, element, bit))
    assert unnoticed == []


def test_digest_sees_values_not_their_layout() -> None:
    value = torch.arange(12.0).view(3, 4)
    assert replicas._digest(value.t().contiguous().t()) == replicas._digest(value)
    assert replicas._digest(torch.arange(13.0)[1:]) == replicas._digest(torch.arange(1.0, 13.0))
    assert replicas._digest(torch.arange(13.0)[1:]) != replicas._digest(torch.arange(12.0))
    assert isinstance(replicas._digest(torch.tensor(3.0)), int)
    assert replicas._digest(torch.empty(0)) == replicas._digest(torch.empty(0, 3))


def test_digest_of_a_single_element_with_any_stride() -> None:
    assert replicas._digest(torch.arange(6.0)[4:].as_strided((1, 1), (1, 2))) == replicas._digest(torch.tensor([4.0]))
