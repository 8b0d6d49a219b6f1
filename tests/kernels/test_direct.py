from typing import Any

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
    launch_direct,
    places_of_one_process,
    rounds_of_rank,
    rounds_on_streams,
    run_direct,
    words,
)
from tests.support.kernels import F16, F32, NAN, PTX, needs_interpreter, sum_in_order, where_ranks_signal
from torchring.kernels import reference
from torchring.kernels.direct import prepare_direct
from torchring.kernels.finite import NOT_FOUND
from torchring.kernels.launching import num_blocks
from torchring.kernels.signals import signal_bytes

ROUNDS_OF_DIRECT = [
    *ROUNDS,
    Round(5000, F32, seed=3, max_blocks=2, num_slices=2),
    Round(1000, F16, seed=5, num_slices=1, apart=True),
    Round(5000, F32, scale=0.5, seed=6, apart=True),
]


def sum_of_direct(todo: Round, num_ranks: int) -> torch.Tensor:
    total = sum_in_order([todo.input(rank) for rank in range(num_ranks)], todo.dtype, todo.scale)
    return total * 2 if todo.apart else total


@needs_interpreter
# Atomic operations: test_on_device.py, with 2 ranks.
@grid("device, num_ranks", [PTX, "cpu"], [1, 2, 3, 5], keep=lambda *point: point == (PTX, 3))
def test_every_round_between_processes(device: str, num_ranks: int) -> None:
    rounds = ROUNDS_OF_DIRECT if num_ranks < 5 else ROUNDS_OF_DIRECT[1::3]
    check_outcomes(run_ranks(rounds_of_rank, num_ranks, run_direct, rounds, device), rounds, sum_of_direct)


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_every_round_between_streams(num_ranks: int) -> None:
    check_outcomes(rounds_on_streams(num_ranks, run_direct, ROUNDS_OF_DIRECT), ROUNDS_OF_DIRECT, sum_of_direct)


@where_ranks_signal
def test_worked_example(device: str) -> None:
    # One after the other: each finds the other's signals already there.
    places = places_of_one_process(2, device)
    for factor, place in zip((1, 10), places, strict=True):
        place.wire(32).copy_(torch.arange(1.0, 33.0) * factor)
    before = [place.wire(32).clone() for place in places]
    for place in places:
        come_early(place)
        run_direct(place, Round(32, scale=0.5))
    assert places[0].wire(16).tolist() == [5.5 * n for n in range(1, 17)]
    assert places[0].wire(32)[16:].tolist() == [5.5 * n for n in range(17, 33)]
    assert_bitwise(places[1].wire(32), places[0].wire(32))
    out = torch.empty_like(before[0])
    reference.accumulate(before, out, scale=0.5)
    assert_bitwise(places[0].wire(32), out)


@where_ranks_signal
@pytest.mark.parametrize(("gather", "spread"), [(True, True), (True, False), (False, True)])
def test_counts_that_it_sends_and_waits_for(gather: bool, spread: bool, device: str) -> None:
    place = places_of_one_process(3, device)[1]
    pads = words(place)
    meetings = gather + spread
    pads[1][:7, 1] = 40  # for seven blocks: meetings that there have been
    pads[1][:7, 0], pads[1][:7, 2] = 40 + meetings, 41 + meetings  # rank 2 is one meeting ahead
    expected = [pad.clone() for pad in pads]
    for pad in expected:
        pad[:7, 1] = 40 + meetings
    launch_direct(place, Round(40_011), gather=gather, spread=spread)
    for pad, what in zip(pads, expected, strict=True):
        assert pad.tolist() == what.tolist()


@where_ranks_signal
@pytest.mark.parametrize("peer_comes_once", [False, True])
def test_abort_ends_the_wait_and_poisons(peer_comes_once: bool, device: str) -> None:
    place = places_of_one_process(2, device)[0]
    words(place)[0][:, 1] = peer_comes_once
    check_abort(place, run_direct)


@where_ranks_signal
@pytest.mark.parametrize(("num_ranks", "half"), [(1, {"spread": False}), (1, {}), (2, {"gather": False})])
def test_what_follows_another_library_looks_for_an_abort_first(num_ranks: int, half: Any, device: str) -> None:
    """That library may have left half a sum, in numbers that look like any others."""
    place = places_of_one_process(num_ranks, device)[0]
    come_early(place)  # no wait, in which it would look anyway
    wire = place.wire(5000).fill_(7.0)
    place.abort.fill_(1)
    launch_direct(place, Round(5000), **half)
    assert bool(wire.isnan().all())


@where_ranks_signal
def test_abort_spoils_nothing_that_is_there(device: str) -> None:
    place = places_of_one_process(2, device)[0]
    come_early(place)
    place.abort.fill_(1)
    place.fill(Round(100))
    run_direct(place, Round(100))
    result, _ = place.outcome(Round(100))
    assert_bitwise(result, Round(100).input(0))  # rank 1's wire is 0


@where_ranks_signal
def test_prepared_once_and_launched_often(device: str) -> None:
    place = places_of_one_process(1, device)[0]
    wire = place.wire(100).fill_(8.0)
    launch = prepare_direct(
        place.wires, place.signals, wire, rank=0, num_ranks=1, begin=0, end=50, scale=0.5, abort=place.abort
    )
    assert wire.tolist() == [8.0] * 100
    launch()
    launch()
    assert wire.tolist() == [2.0] * 50 + [8.0] * 50
    assert not place.pads[0].any(), "a single rank has nobody to meet"


@where_ranks_signal
def test_found_is_lowered_never_raised(device: str) -> None:
    place = places_of_one_process(1, device)[0]
    todo = Round(100, by_hand={(0, 60): NAN})
    for before, after in [(NOT_FOUND, 60), (61, 60), (60, 60), (5, 5)]:
        place.fill(todo)
        place.found.fill_(before)
        run_direct(place, todo)
        assert place.found.item() == after


def test_blocks_depend_on_nothing_in_which_ranks_may_differ() -> None:
    assert [num_blocks(numel, 4, 2, 4096, 24) for numel in (0, 1, 8192, 8193, 10**9)] == [1, 1, 1, 2, 24]
    sizes = (2**18 - 1, 2**18, 2**20 - 1, 2**20)  # around 1 MiB and 4 MiB
    assert [num_blocks(numel, 4, 8, 1024, 24) for numel in sizes] == [8, 16, 16, 24]
    assert num_blocks(2**18 - 1, 4, 8, 1024, 6) == 6
    assert num_blocks(2**18 - 1, 4, 1, 1024, 200) == 200  # a single rank waits for nobody
    assert [signal_bytes(num_ranks, 24) for num_ranks in (2, 29, 30)] == [24 * 128, 24 * 128, 24 * 256]
