"""A model that was changed on one rank only is noticed, and who changed it is named."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from unittest import mock

import pytest
import torch

import torchring
from tests.support.checks import assert_same_on_all_ranks, digest, exact_inputs, logged
from tests.support.harness import run_pooled, run_ranks
from torchring import world
from torchring.collectives import digests
from torchring.errors import GradientError
from torchring.gradients.participants import replicas


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
    else:
        model(torch.ones(2, 3)).sum().backward()
        if when == "after backward":
            change()  # the alarm can travel with the next backward only
        optimizer.step()
        if when == "after step":
            change()
        optimizer.zero_grad()
    before = digest(model.parameters())
    loss = model(torch.ones(2, 3)).sum()
    with pytest.raises(GradientError) as caught:
        loss.backward()
    check_named(caught.value, "2.weight", culprit)
    assert caught.value.rank == rank
    assert digest(model.parameters()) == before  # it comes before anything is stepped


@pytest.mark.parametrize("when", ["before backward", "after backward", "after step"])
@pytest.mark.parametrize(("world_size", "overlap"), [(2, "inline"), (3, "thread")])
def test_changed_in_place_on_one_rank(world_size: int, overlap: str, when: str) -> None:
    run_pooled(_in_place, world_size, when, overlap)


def _before_the_first_step(rank: int, world_size: int) -> None:
    model, _optimizer = model_and_optimizer()
    if rank == 1:
        model[0].bias.data += 1  # type: ignore[union-attr,operator]
    with pytest.raises(GradientError) as caught:
        model(torch.ones(2, 3)).sum().backward()
    check_named(caught.value, "0.bias", 1)


def test_changed_before_the_first_step() -> None:
    run_pooled(_before_the_first_step, 2)


def _not_synchronised_at_first(rank: int, world_size: int) -> None:
    model, _optimizer = model_and_optimizer(sync_initial_state=False)  # ranks are seeded differently
    with pytest.raises(GradientError) as caught:
        model(torch.ones(2, 3)).sum().backward()
    check_named(caught.value, "0.weight", 1)


def test_ranks_that_start_from_different_parameters() -> None:
    run_pooled(_not_synchronised_at_first, 2)


def _loaded_on_one_rank(rank: int, world_size: int) -> None:
    model, optimizer = model_and_optimizer()
    train(model, optimizer, rank, 0)
    if rank == 0:
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    with pytest.raises(GradientError) as caught:
        model(torch.ones(2, 3)).sum().backward()
    check_named(caught.value, "0.weight", 1)  # rank 0 is what the others are compared with


def test_a_checkpoint_loaded_on_rank_0_only() -> None:
    run_pooled(_loaded_on_one_rank, 2)


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
    assert_same_on_all_ranks(run_pooled(_mended, 2))


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
    with pytest.raises(GradientError) as caught:
        model(torch.ones(2, 3)).sum().backward()
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
    with pytest.raises(GradientError) as caught:
        model(torch.ones(2, 3)).sum().backward()
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
    first, second = run_pooled(_with_closures, 2)
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
        try:
            table(torch.tensor([0, 1])).sum().backward()
        except GradientError:
            return step - 3
        optimizer.step()
    return 1000


def test_changed_in_place_where_everything_is_sparse() -> None:
    first, second = run_pooled(_sparse_only, 2)
    assert first == second
    assert first <= 1


def first_error(train_step: Callable[[int], None]) -> GradientError:
    """What the first of a few steps raises that raises something."""
    for step in range(8):
        try:
            train_step(step)
        except GradientError as error:
            return error
    raise AssertionError("no step raised GradientError")


def _of_two_kinds(rank: int, world_size: int) -> tuple[str, list[str], str]:
    """On rank 1 the last bits differ, and in the end a number does."""
    machine = {"architecture": "x86_64", "torch": ["2.13.0", "2.12.1"][rank]}
    with (
        mock.patch.object(world, "_machine", return_value=machine),
        mock.patch.object(replicas, "STEPS_BETWEEN_CHECKS", 4),
        logged() as texts,
    ):
        model, optimizer = model_and_optimizer()
        for step in range(9):
            if rank == 1 and step:
                for parameter in model.parameters():
                    parameter.data.mul_(1 + 2**-22)
            train(model, optimizer, rank, step)
        settled = digest(model.parameters())
        if rank == 1:
            model[2].weight.data[1, 3] += 2**-8  # type: ignore[index,union-attr]
        error = first_error(lambda step: train(model, optimizer, rank, step))
    assert (error.parameters, error.peers) == (("2.weight",), (1,))
    return settled, texts, str(error)


def test_machines_of_two_kinds_may_differ_by_rounding() -> None:
    results = run_pooled(_of_two_kinds, 2)
    assert_same_on_all_ranks([settled for settled, *_ in results])
    differ = "torch is 2.12.1 on rank 1, 2.13.0 on rank 0"
    ((text,), nothing) = (texts for _, texts, _ in results)
    assert text.startswith(f"the ranks do not compute alike: {differ}.")
    assert nothing == []
    for *_, error in results:
        assert error.partition(" [")[0].endswith(differ)


def _explained(rank: int, world_size: int) -> list[str]:
    def renormalise(step: int) -> None:
        model(torch.tensor([rank, 2 + rank])).sum().backward()
        optimizer.step()

    def schedule(step: int) -> None:
        train(model, optimizer, rank, step)
        scheduler.step(float(step if rank == 1 else -step))

    with mock.patch.object(replicas, "STEPS_BETWEEN_CHECKS", 2):
        model, optimizer = model_and_optimizer()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, cooldown=9)
        found = [str(first_error(schedule))]
        optimizer.close()
        model = torch.nn.Embedding(8, 3, max_norm=0.1)
        optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.5), model)
        return [*found, str(first_error(renormalise))]


def test_what_changes_a_replica_is_named() -> None:
    for lr, max_norm in run_pooled(_explained, 2):
        assert "lr of param_groups[0] is 0.05 on rank 1, 0.5 on rank 0. A scheduler that decides by a loss" in lr
        assert "weight of an Embedding with max_norm" in max_norm
        assert "Leave max_norm out" in max_norm


def _a_frozen_one(rank: int, world_size: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    model[0].requires_grad_(False)
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.5), model)
    train(model, optimizer, rank, 0)
    if rank == 1:
        with torch.no_grad():
            model[0].weight[0, 0] += 1  # type: ignore[index,union-attr]
    with pytest.raises(GradientError) as caught:
        model(torch.ones(2, 3)).sum().backward()
    check_named(caught.value, "0.weight", 1)


def test_a_frozen_parameter_is_watched_too() -> None:
    run_pooled(_a_frozen_one, 2)


def _stepped_on_one(rank: int, world_size: int, culprit: int, what: str) -> tuple[int, tuple[int, ...], str]:
    """Returns how many backwards after the uneven step it is found, who is named, and the error."""
    model, optimizer = model_and_optimizer()
    for step in range(8):
        optimizer.zero_grad()
        try:
            model(exact_inputs(6, torch.float32, rank + 7 * step).view(2, 3)).sum().backward()
        except GradientError as error:
            return step - 3, error.peers, str(error)
        if step == 3 and rank == culprit:
            if what == "skipped":
                continue
            optimizer.step()
        optimizer.step()
    return 1000, (), ""


@pytest.mark.parametrize("what", ["skipped", "stepped twice"])
@pytest.mark.parametrize(("world_size", "culprit"), [(2, 0), (2, 1), (3, 0), (3, 2)])
def test_a_step_more_or_less_on_one_rank_is_found_in_the_next_backward(
    world_size: int, culprit: int, what: str
) -> None:
    named = (culprit,) if culprit else tuple(range(1, world_size))  # rank 0 is what the others are compared with
    odd = 3 if what == "skipped" else 5
    steps, other = (odd, 4) if culprit == 0 else (4, odd), 1 if culprit == 0 else culprit
    for delay, peers, text in run_pooled(_stepped_on_one, world_size, culprit, what):
        assert (delay, peers) == (1, named)
        told = f"rank 0 has called optimizer.step() {steps[0]} times, rank {other} {steps[1]} times"
        assert f"In 5 reductions {told}" in text
        assert "inside optimizer.no_sync()" in text


def _skipped_alike(rank: int, world_size: int) -> str:
    """What a GradScaler does, and what accumulating without `accumulate` looks like. No check is needed for it."""
    model, optimizer = model_and_optimizer()
    checks = count_checks()
    for step in range(9):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        if step % 3:
            optimizer.step()
    assert len(checks) == 1  # the first round's
    return digest(model.parameters())


def test_a_step_left_out_on_all_ranks_is_no_error() -> None:
    assert_same_on_all_ranks(run_ranks(_skipped_alike, 2))


def count_checks() -> list[int]:
    """Grows by one with every comparison from now on."""
    checks: list[int] = []
    compare = replicas.ReplicaCheck.compare

    def counted(self: replicas.ReplicaCheck) -> None:
        checks.append(1)
        compare(self)

    replicas.ReplicaCheck.compare = counted  # type: ignore[method-assign]
    return checks


def _undisturbed(rank: int, world_size: int) -> list[int]:
    replicas.STEPS_BETWEEN_CHECKS = 5  # type: ignore[misc]
    model, optimizer = model_and_optimizer()
    checks = count_checks()
    seen = []
    for step in range(12):
        before = len(checks)
        train(model, optimizer, rank, step)
        if len(checks) > before:
            seen.append(step)
    return seen


def test_training_that_nobody_disturbs_is_checked_by_the_rhythm_only() -> None:
    assert run_ranks(_undisturbed, 2) == [[0, 5, 10]] * 2


def _with_optimizer_group(rank: int, world_size: int) -> int:
    """Two optimizers of one world, of which each watches its own."""
    (first, g), (second, d) = model_and_optimizer(), model_and_optimizer()
    for step in range(8):
        if rank == 1 and step == 3:
            with torch.no_grad():
                second[2].bias[0] += 1  # type: ignore[index,union-attr]
        for optimizer in (g, d):
            optimizer.zero_grad()
        try:
            (first(torch.ones(2, 3)).sum() + second(torch.ones(2, 3)).sum()).backward()
        except GradientError as error:
            check_named(error, "2.bias", 1)
            return step - 3
        g.step()
        d.step()
    return 1000


def test_changed_in_place_beside_another_optimizer() -> None:
    assert run_pooled(_with_optimizer_group, 2) == [0, 0]


# What is watched


class CountingCheck(replicas.ReplicaCheck):
    """Of parameters in this process; comparisons are counted instead of made."""

    def __init__(self, num_parameters: int) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(num_parameters)]
        super().__init__(None, {p: f"p{i}" for i, p in enumerate(self.parameters)})  # type: ignore[arg-type]
        self.num_checks = 0

    def compare(self) -> None:
        self.num_checks += 1

    def write(self, *indices: int) -> None:
        with torch.no_grad():
            for index in indices:
                self.parameters[index].add_(1)


def test_has_changed_since_accept() -> None:
    check = CountingCheck(3)
    assert not check.has_changed()
    check.write(0)
    assert not check.has_changed()  # nothing is watched before the first step: the first round compares anyway
    check.accept()
    assert not check.has_changed()
    check.write(2)
    assert check.has_changed()
    assert check.has_changed()


def step(check: CountingCheck) -> None:
    """What DistributedOptimizer.step() does: it asks, writes to all parameters, and accepts."""
    check.has_changed()
    check.write(*range(len(check.parameters)))
    check.accept()


def test_a_step_writes_too_and_that_is_no_change() -> None:
    check = CountingCheck(3)
    for _ in range(4):
        step(check)
        assert not check.has_changed()


def test_a_change_is_remembered_until_all_ranks_were_told() -> None:
    """Between the round that could not tell and the next one lies a step, which accepts what parameters are."""
    check = CountingCheck(3)
    check.accept()
    check.write(1)
    step(check)
    assert check.has_changed()
    check.after_round(False)  # a round whose control bits were sent before
    assert check.has_changed()
    check.after_round(True)
    assert not check.has_changed()
    check.write(1)
    assert check.has_changed()


def test_an_alarm_from_elsewhere_leaves_nothing_behind_here() -> None:
    check = CountingCheck(3)
    check.accept()
    check.after_round(True)
    assert not check.has_changed()
    check.write(0)
    assert check.has_changed()


def test_of_many_parameters_some_are_watched_all_over_the_model() -> None:
    for count in (1, replicas._WATCHED, replicas._WATCHED + 1, 100, 2 * replicas._WATCHED, 1000):
        check = CountingCheck(count)
        check.accept()
        place = {id(parameter): i for i, parameter in enumerate(check.parameters)}
        watched = [place[id(parameter)] for parameter, _ in check._watched]
        assert 0 < len(watched) <= replicas._WATCHED
        gaps = [b - a for a, b in itertools.pairwise([*watched, count])]
        assert max(gaps) <= 1 + count // replicas._WATCHED
        for index in range(count):
            check._changed = False
            check.write(index)
            assert check.has_changed() is (index in watched)
            check._watched = [(p, p._version) for p, _ in check._watched]


def test_alarms_are_followed_up_ever_more_rarely_and_the_rhythm_goes_on() -> None:
    check = CountingCheck(1)
    due = []
    for round_ in range(2 * replicas.STEPS_BETWEEN_CHECKS + 1):
        before = check.num_checks
        check.after_round(round_ > 0)
        if check.num_checks > before:
            due.append(round_)
    assert due == [0, 1, 2, 4, 8, 16, 32, 64, 100, 128, 200]


def test_without_alarms_there_is_the_rhythm() -> None:
    check = CountingCheck(1)
    for _ in range(2 * replicas.STEPS_BETWEEN_CHECKS + 1):
        check.after_round(False)
    assert check.num_checks == 3


# The digest

Digest = Callable[[torch.Tensor], tuple[int, int]]


def digest_on_device(value: torch.Tensor) -> tuple[int, int]:
    total, order = digests._digest_on_device(value).tolist()
    return total, order


on_host_and_device = pytest.mark.parametrize("digest_of", [digests._digest, digest_on_device], ids=["host", "device"])


@on_host_and_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_any_flipped_bit_changes_the_digest(dtype: torch.dtype, digest_of: Digest) -> None:
    unnoticed = []
    for numel in (1, 2, 3, 4, 5, 9):
        value = torch.linspace(-1.0, 2.0, numel, dtype=torch.float64).to(dtype)
        before = digest_of(value)
        assert digest_of(value.clone()) == before
        integers = value.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
        for element in range(numel):
            for bit in range(8 * dtype.itemsize):
                changed = integers.clone()
                changed[element] ^= torch.ones((), dtype=integers.dtype) << bit
                if digest_of(changed.view(dtype)) == before:
                    unnoticed.append((numel, element, bit))
    assert unnoticed == []


@on_host_and_device
def test_digest_sees_values_not_their_layout(digest_of: Digest) -> None:
    value = torch.arange(12.0).view(3, 4)
    assert digest_of(value.t().contiguous().t()) == digest_of(value)
    assert digest_of(torch.arange(13.0)[1:]) == digest_of(torch.arange(1.0, 13.0))
    assert digest_of(torch.arange(13.0)[1:]) != digest_of(torch.arange(12.0))
    assert [type(part) for part in digest_of(torch.tensor(3.0))] == [int, int]
    assert digest_of(torch.empty(0)) == digest_of(torch.empty(0, 3))


def test_the_device_takes_large_parameters_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.randn(1001)
    whole = digest_on_device(value)
    monkeypatch.setattr(digests, "_PIECE_WORDS", 64)
    assert digest_on_device(value) == whole


def test_digest_fits_64_bits() -> None:
    """They travel as an int64 tensor."""
    for value in (
        torch.full((1000,), -1.0),
        torch.full((1001,), float("nan")),
        torch.full((3,), -1e300, dtype=torch.float64),
    ):
        assert torch.tensor(digests._digest(value)).dtype == torch.int64


def test_either_half_of_the_digest_sees_what_the_other_does_not() -> None:
    value = torch.arange(1.0, 9.0, dtype=torch.float64)
    swapped = value[[1, 0, *range(2, 8)]]
    for digest_of in (digests._digest, digest_on_device):
        (total, order), (same_total, other_order) = digest_of(value), digest_of(swapped)
        assert total == same_total
        assert order != other_order
    # A byte that becomes 251 less, and its neighbours that make up for it: the same Adler-32.
    raw = torch.zeros(16, dtype=torch.uint8)
    raw[:3] = torch.tensor([1, 0, 1], dtype=torch.uint8)
    other = torch.zeros(16, dtype=torch.uint8)
    other[1] = 2
    (total, order), (other_total, same_order) = (digests._digest(r.view(torch.float64)) for r in (raw, other))
    assert order == same_order
    assert total != other_total


def test_digest_of_a_single_element_with_any_stride() -> None:
    assert digests._digest(torch.arange(6.0)[4:].as_strided((1, 1), (1, 2))) == digests._digest(torch.tensor([4.0]))
