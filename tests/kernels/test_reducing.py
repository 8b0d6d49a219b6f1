"""`direct` and `ring`: sums, signals and aborts."""

from collections.abc import Callable

import pytest
import torch

from tests.support.checks import assert_bitwise
from tests.support.grids import grid
from tests.support.harness import run_ranks
from tests.support.kernel_ranks import (
    ROUNDS,
    Place,
    Round,
    check_abort,
    check_outcomes,
    come_early,
    launch_direct,
    places_of_one_process,
    rounds_of_rank,
    run_direct,
    run_ring,
    words,
)
from tests.support.kernels import (
    F16,
    F32,
    PTX,
    cast,
    needs_interpreter,
    sum_in_order,
    where_ranks_signal,
    where_triton_runs,
)
from torchring.allreduce.slices import slice_bounds
from torchring.kernels import reference
from torchring.kernels.direct import prepare_direct
from torchring.kernels.guard import prepare_guard
from torchring.kernels.launching import num_blocks
from torchring.kernels.signals import signal_bytes

ROUNDS_OF_DIRECT = [
    *ROUNDS,
    Round(5000, F32, seed=3, max_blocks=2, num_slices=2),
    Round(1000, F16, seed=5, num_slices=1, apart=True),
    Round(5000, F32, seed=6, apart=True),
]


def sum_of_direct(todo: Round, num_ranks: int) -> torch.Tensor:
    total = sum_in_order([todo.input(rank) for rank in range(num_ranks)], todo.dtype, 1.0)
    return total * 2 if todo.apart else total


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


_WAYS = {"direct": (run_direct, ROUNDS_OF_DIRECT, sum_of_direct), "ring": (run_ring, ROUNDS, sum_of_ring)}
of_both = pytest.mark.parametrize("way", _WAYS)


@needs_interpreter
@of_both
# Atomic operations: test_on_device.py, with 2 ranks.
@grid("device, num_ranks", [PTX, "cpu"], [2, 3, 5], keep=lambda *point: point == (PTX, 3))
def test_every_round_between_processes(device: str, num_ranks: int, way: str) -> None:
    runner, rounds, expect = _WAYS[way]
    rounds = rounds if num_ranks < 5 else rounds[1::3]
    check_outcomes(run_ranks(rounds_of_rank, num_ranks, runner, rounds, device), rounds, expect)


def test_the_order_of_addition_shows() -> None:
    todo, as_direct = Round(1000, F16, seed=3), Round(1000, F16, seed=3)
    total = sum(as_direct.input(rank).float() for rank in range(5))
    assert not torch.equal(sum_of_ring(todo, 5), cast(total, F16))


@where_triton_runs
@pytest.mark.parametrize(
    ("run", "word", "come"),
    [(run_direct, 1, 0), (run_direct, 1, 1), (run_ring, 2, 0), (run_ring, 2, 1), (run_ring, 2, 2)],
)
def test_abort_ends_waits_and_poisons(run: Callable[[Place, Round], None], word: int, come: int, device: str) -> None:
    """After as many meetings, or steps that the left neighbour comes along."""
    place = places_of_one_process(2, device)[0]
    words(place)[0][:, word] = come
    check_abort(place, run)


@needs_interpreter
def test_abort_ends_the_wait_in_ptx() -> None:
    check_abort(places_of_one_process(2, PTX)[0], run_direct)


@where_ranks_signal
def test_what_follows_another_library_looks_for_an_abort_first(device: str) -> None:
    """That library may have left half a sum, in numbers that look like any others."""
    place = places_of_one_process(2, device)[0]
    come_early(place)  # no wait, in which it would look anyway
    wire = place.wire(5000).fill_(7.0)
    place.abort.fill_(1)
    launch_direct(place, Round(5000), gather=False)
    assert bool(wire.isnan().all())


@where_ranks_signal
@of_both
def test_abort_spoils_nothing_that_is_there(way: str, device: str) -> None:
    place, todo = places_of_one_process(2, device)[0], Round(100)
    come_early(place)
    place.abort.fill_(1)
    place.fill(todo)
    _WAYS[way][0](place, todo)
    expected = todo.input(0)
    if way == "ring":
        expected[:64] = 0.0  # what it calls the sum of slice 0 is rank 1's wire
    assert_bitwise(place.outcome(todo), expected)


@where_ranks_signal
def test_prepared_once_and_launched_often(device: str) -> None:
    place, other = places_of_one_process(2, device)
    wire, _ = place.wire(100).fill_(8.0), other.wire(100).fill_(3.0)
    come_early(place)
    with place.instructions():
        launch = prepare_direct(
            place.wires, place.signals, wire, rank=0, num_ranks=2, begin=0, end=48, abort=place.abort
        )
        assert wire.tolist() == [8.0] * 100
        launch()
        launch()
    assert wire.tolist() == [22.0] * 48 + [8.0] * 52


@where_ranks_signal
def test_an_abort_is_found_behind_another_library(device: str) -> None:
    """Whatever the dtype and the number of elements; and what nobody has aborted stays."""
    place = places_of_one_process(2, device)[0]
    dtypes = (F16, torch.bfloat16, F32, torch.float64)
    wires = [
        torch.full((9 + numel,), 7.0, dtype=dtype, device=place.wires.device)
        for numel, dtype in zip((0, 1, 9001, 64), dtypes, strict=True)
    ]
    with place.instructions():
        launch = prepare_guard([wire[:-9] for wire in wires], place.abort)
        launch()
        assert all(bool((wire == 7.0).all()) for wire in wires)
        place.abort.fill_(1)
        launch()
    for wire in wires:
        assert bool(wire[:-9].isnan().all())
        assert wire[-9:].tolist() == [7.0] * 9


def test_blocks_depend_on_nothing_in_which_ranks_may_differ() -> None:
    assert [num_blocks(numel, 4, 2, 4096, 24) for numel in (0, 1, 8192, 8193, 10**9)] == [1, 1, 1, 2, 24]
    sizes = (2**18 - 1, 2**18, 2**20 - 1, 2**20)  # around 1 MiB and 4 MiB
    assert [num_blocks(numel, 4, 8, 1024, 24) for numel in sizes] == [8, 16, 16, 24]
    assert num_blocks(2**18 - 1, 4, 8, 1024, 6) == 6
    assert [signal_bytes(num_ranks, 24) for num_ranks in (2, 29, 30)] == [24 * 128, 24 * 128, 24 * 256]
