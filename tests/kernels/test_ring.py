import pytest
import torch

from tests.support.checks import assert_bitwise
from tests.support.grids import grid
from tests.support.harness import run_ranks
from tests.support.kernel_ranks import (
    ROUNDS,
    Round,
    check_abort,
    check_outcomes,
    come_early,
    places_of_one_process,
    rounds_of_rank,
    rounds_on_streams,
    run_ring,
    words,
)
from tests.support.kernels import F16, PTX, cast, needs_interpreter, where_ranks_signal
from torchring.allreduce.slices import slice_bounds
from torchring.kernels import reference


def sum_of_ring(todo: Round, num_ranks: int) -> torch.Tensor:
    """Slice k begins with rank k, goes through the others in turn, and is rounded on its way at each."""
    compute = reference.compute_dtype(todo.dtype, todo.dtype)
    inputs = [todo.input(rank).to(compute) for rank in range(num_ranks)]
    result = torch.empty(todo.numel, dtype=todo.dtype)
    for k, (begin, end) in enumerate(slice_bounds(todo.numel, num_ranks, todo.dtype.itemsize)):
        total = inputs[k][begin:end]
        for i in range(1, num_ranks):
            total = cast(total + inputs[(k + i) % num_ranks][begin:end], todo.dtype).to(compute)
        result[begin:end] = cast(total, todo.dtype)
    return result


@needs_interpreter
# Atomic operations: test_on_device.py, with 2 ranks.
@grid("device, num_ranks", [PTX, "cpu"], [2, 3, 5], keep=lambda *point: point == (PTX, 3))
def test_every_round_between_processes(device: str, num_ranks: int) -> None:
    rounds = ROUNDS if num_ranks < 5 else ROUNDS[1::3]
    check_outcomes(run_ranks(rounds_of_rank, num_ranks, run_ring, rounds, device), rounds, sum_of_ring)


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_every_round_between_streams(num_ranks: int) -> None:
    check_outcomes(rounds_on_streams(num_ranks, run_ring, ROUNDS), ROUNDS, sum_of_ring)


def test_the_order_of_addition_shows() -> None:
    todo, as_direct = Round(1000, F16, seed=3), Round(1000, F16, seed=3)
    total = sum(as_direct.input(rank).float() for rank in range(5))
    assert not torch.equal(sum_of_ring(todo, 5), cast(total, F16))


def example_of_rank(rank: int, num_ranks: int) -> list[float]:
    by_hand = {(r, n): (n + 1.0) * 10**r for r in range(2) for n in range(32)}
    (wire,) = rounds_of_rank(rank, num_ranks, run_ring, [Round(32, by_hand=by_hand)])
    return wire.tolist()


@needs_interpreter
def test_worked_example() -> None:
    assert run_ranks(example_of_rank, 2) == [[11.0 * n for n in range(1, 33)]] * 2
    assert 11 * 17 == 187


@where_ranks_signal
def test_counts_that_it_sends_and_waits_for(device: str) -> None:
    place = places_of_one_process(3, device)[1]
    pads = words(place)
    # For four blocks: 40 steps that there have been, and the 4 of this round.
    pads[1][:4, 3], pads[1][:4, 4], pads[1][:4, 5] = 45, 44, 40  # the left is in its next round already
    expected = [pad.clone() for pad in pads]
    expected[2][:4, 3] = 44  # the right's left
    expected[0][:4, 4] = 44  # the left's right
    expected[1][:4, 5] = 44
    run_ring(place, Round(40_011))
    for pad, what in zip(pads, expected, strict=True):
        assert pad.tolist() == what.tolist()


@where_ranks_signal
@pytest.mark.parametrize("num_steps", [0, 1, 2])  # that the left neighbour comes along
def test_abort_ends_the_wait_and_poisons(num_steps: int, device: str) -> None:
    place = places_of_one_process(2, device)[0]
    words(place)[0][:, 2] = num_steps
    check_abort(place, run_ring)


@where_ranks_signal
def test_abort_spoils_nothing_that_is_there(device: str) -> None:
    place = places_of_one_process(2, device)[0]
    come_early(place)
    place.abort.fill_(1)
    todo = Round(100)
    place.fill(todo)
    run_ring(place, todo)
    result = place.outcome(todo)
    assert_bitwise(result[64:], todo.input(0)[64:])  # rank 1's wire is 0
    assert result[:64].tolist() == [0.0] * 64  # and so is what it calls the sum of slice 0
