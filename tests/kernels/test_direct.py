"""Direct, and what is needed to run it and `ring` between ranks: real processes if interpreted, streams on CUDA."""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist

from tests.kernels.test_accumulate import sum_in_order
from tests.kernels.test_interpreter import TRITON_DEVICES, needs_interpreter
from tests.support.checks import assert_bitwise, assert_same_on_all_ranks
from tests.support.grids import grid
from tests.support.harness import run_ranks
from torchring.allreduce.slices import slice_bounds
from torchring.kernels import direct, lazy, prepare_direct, reference
from torchring.kernels.finite import NOT_FOUND
from torchring.kernels.launching import num_blocks
from torchring.kernels.signals import MAX_BLOCKS, block_words, signal_bytes
from torchring.memory.host import connect
from torchring.rendezvous.rendezvous import Rendezvous

F32, F16, B16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
INF, NAN = float("inf"), float("nan")
GUARD = 16  # elements behind a wire that nobody may touch
NUM_BYTES = 4 * (40_011 + GUARD)


@dataclass(frozen=True)
class Round:
    """One all-reduce, and what is put into the wires for it."""

    numel: int
    dtype: torch.dtype = F32
    scale: float = 1.0
    num_slices: int = 5  # at most; ranks without a slice take part all the same
    max_blocks: int = MAX_BLOCKS
    apart: bool = False  # gather and spread in two launches
    seed: int = 0
    by_hand: dict[tuple[int, int], float] = field(default_factory=dict)  # {(rank, element): value}

    def input(self, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * rank + self.seed)
        values = torch.randn(self.numel, generator=generator).to(self.dtype)
        for (which, index), value in self.by_hand.items():
            if which == rank:
                values[index] = value
        return values


ROUNDS = [
    *(Round(numel, dtype, scale=1 / 3, seed=numel) for numel in (0, 1, 63, 1000, 5000) for dtype in (F32, F16, B16)),
    Round(40_011, F32, seed=1),  # several blocks
    Round(40_011, F32, seed=2, max_blocks=1),  # several turns
    Round(5000, F32, seed=3, max_blocks=2, num_slices=2),
    Round(5000, F64, scale=0.1, seed=4),
    Round(1000, F16, seed=5, num_slices=1, apart=True),
    Round(5000, F32, scale=0.5, seed=6, apart=True),
    Round(1000, F32, seed=7, by_hand={(0, 777): INF, (0, 999): NAN}),
    Round(1000, F16, seed=8, by_hand={(0, 3): 60_000.0}, scale=2.0),  # finite, but twice that is not
    Round(40_011, F32, seed=9, by_hand={(0, 40_010): NAN}, max_blocks=1),
    Round(40_011, F32, seed=10),  # blocks that the last launch left out
]


@dataclass
class Place:
    """What one rank has at hand."""

    rank: int
    num_ranks: int
    parts: list[torch.Tensor]  # all ranks' memory for wires, uint8
    pads: list[torch.Tensor]  # all ranks' signal pads, uint8

    def __post_init__(self) -> None:
        device = self.parts[0].device
        self.wires = torch.tensor([part.data_ptr() for part in self.parts], device=device)
        self.signals = torch.tensor([pad.data_ptr() for pad in self.pads], device=device)
        self.abort = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.found = torch.zeros(1, dtype=torch.int32, device=device)

    def wire(self, numel: int, dtype: torch.dtype = F32) -> torch.Tensor:
        """The first elements of the own memory."""
        return self.parts[self.rank][: numel * dtype.itemsize].view(dtype)

    def fill(self, todo: Round) -> None:
        guarded = self.wire(todo.numel + GUARD, todo.dtype)
        guarded[: todo.numel] = todo.input(self.rank)
        guarded[todo.numel :] = 7.0
        self.found.fill_(NOT_FOUND)

    def outcome(self, todo: Round) -> tuple[torch.Tensor, int]:
        guarded = self.wire(todo.numel + GUARD, todo.dtype).cpu().clone()
        assert guarded[todo.numel :].tolist() == [7.0] * GUARD
        return guarded[: todo.numel], int(self.found)


Runner = Callable[[Place, Round], None]
Outcomes = list[list[tuple[torch.Tensor, int]]]  # [rank][round]: the wire, and what was found


def places_of_one_process(num_ranks: int, device: str) -> list[Place]:
    parts = list(torch.zeros(num_ranks, -(-NUM_BYTES // 64) * 64, dtype=torch.uint8, device=device))
    pads = list(torch.zeros(num_ranks, signal_bytes(num_ranks), dtype=torch.uint8, device=device))
    return [Place(rank, num_ranks, parts, pads) for rank in range(num_ranks)]


def words(place: Place) -> list[torch.Tensor]:
    """Everybody's pads as [block, word]."""
    return [pad.view(torch.int32).view(MAX_BLOCKS, block_words(place.num_ranks)) for pad in place.pads]


def begin_counts(place: Place) -> None:
    """As if there had been many rounds: block 0 is about to pass 2**31, and block 1 to pass 2**32."""
    own = words(place)[place.rank]
    own[0::2] = 2**31 - 9
    own[1::2] = -1


def counts_of(own: torch.Tensor, num_ranks: int) -> list[list[int]]:
    """Of each block: meetings of every rank, and steps of the left, of the right and of this rank."""
    return own[:, : num_ranks + 3].tolist()


def come_early(place: Place) -> None:
    """All other ranks have come to the next meetings of this rank, and through the next rounds of its ring."""
    own, num_ranks = words(place)[place.rank], place.num_ranks
    own[:, :num_ranks] = torch.where(
        torch.arange(num_ranks, device=own.device) == place.rank, own[:, :num_ranks], own[:, place.rank, None] + 100
    )
    own[:, num_ranks : num_ranks + 2] = own[:, num_ranks + 2, None] + 100


def rounds_of_rank(rank: int, num_ranks: int, runner: Runner, rounds: list[Round]) -> list[tuple[torch.Tensor, int]]:
    """All rounds with nothing between them but the kernel's own signals, and each time another rank late."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    group = connect(Rendezvous(store, rank, num_ranks, 30.0))
    try:
        pads = list(group.allocate(signal_bytes(num_ranks)).parts)
        begin_counts(Place(rank, num_ranks, pads, pads))
        place = Place(rank, num_ranks, list(group.allocate(NUM_BYTES).parts), pads)  # waits for all ranks
        outcomes = []
        for number, todo in enumerate(rounds):
            if number % num_ranks == rank and num_ranks > 1:
                time.sleep(0.05)
            place.fill(todo)
            runner(place, todo)
            outcomes.append(place.outcome(todo))
        for first, *others, left, right, own in counts_of(words(place)[rank], num_ranks):
            assert others == [first] * (num_ranks - 1), "ranks have been to different numbers of meetings"
            assert left == right == own, "neighbours have gone different numbers of steps"
        return outcomes
    finally:
        group.close()


def aborter(place: Place) -> Callable[[], None]:
    """Sets the abort word from outside, as the host does: without the device."""
    return lambda: place.abort.fill_(1)  # type: ignore[return-value]


def rounds_on_streams(num_ranks: int, runner: Runner, rounds: list[Round]) -> Outcomes:
    """All ranks on one GPU, each on a stream of its own."""
    places = places_of_one_process(num_ranks, "cuda")
    for place in places:
        begin_counts(place)
    streams = [torch.cuda.Stream() for _ in places]
    aborts = [aborter(place) for place in places]
    watchdog = threading.Timer(60.0, lambda: [abort() for abort in aborts])
    watchdog.daemon = True
    watchdog.start()
    outcomes: Outcomes = [[] for _ in places]
    for todo in rounds:
        # One by one first, with all signals there: to load a kernel while another one waits may be to wait for that.
        before = [pad.clone() for pad in places[0].pads]
        for place in places:
            place.fill(todo)
            come_early(place)
            runner(place, todo)
            torch.cuda.synchronize()
        for place, pad in zip(places, before, strict=True):
            place.pads[place.rank].copy_(pad)
            place.fill(todo)
        torch.cuda.synchronize()
        for place, stream in zip(places, streams, strict=True):
            with torch.cuda.stream(stream):
                runner(place, todo)
        torch.cuda.synchronize()
        for place in places:
            outcomes[place.rank].append(place.outcome(todo))
    for pads in zip(*(counts_of(words(place)[place.rank], num_ranks) for place in places), strict=True):
        assert all(pad == pads[0] for pad in pads), "ranks have counted differently"
    watchdog.cancel()
    return outcomes


def check_outcomes(outcomes: Outcomes, rounds: list[Round], expect: Callable[[Round, int], torch.Tensor]) -> None:
    """expect(round, number of ranks) is the wire that all ranks should have; which NaN it holds is no matter."""
    for number, todo in enumerate(rounds):
        of_ranks = [of_rank[number] for of_rank in outcomes]
        assert_same_on_all_ranks([wire for wire, _ in of_ranks])
        result, expected = of_ranks[0][0], expect(todo, len(outcomes))
        for kind in (torch.isnan, torch.isinf):
            assert kind(result).tolist() == kind(expected).tolist(), todo
        assert_bitwise(result.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0), f"round {number}, {todo}")
        # Each rank reports from what it has made, so the lowest of all is the first of all.
        bad = (~expected.isfinite()).nonzero().flatten().tolist()
        assert min(found for _, found in of_ranks) == (bad[0] if bad else NOT_FOUND), todo


# ---- direct


def slice_of(place: Place, todo: Round) -> tuple[int, int]:
    num_slices = min(todo.num_slices, place.num_ranks)
    return [*slice_bounds(todo.numel, num_slices, todo.dtype.itemsize), *[(0, 0)] * place.num_ranks][place.rank]


def run_direct(place: Place, todo: Round) -> None:
    begin, end = slice_of(place, todo)
    wire = place.wire(todo.numel, todo.dtype)
    for gather, spread in [(True, False), (False, True)] if todo.apart else [(True, True)]:
        direct(
            place.wires,
            place.signals,
            wire,
            rank=place.rank,
            num_ranks=place.num_ranks,
            begin=begin,
            end=end,
            scale=todo.scale,
            abort=place.abort,
            found=place.found if gather else None,
            gather=gather,
            spread=spread,
            max_blocks=todo.max_blocks,
        )
        if not spread:
            wire[begin:end] *= 2  # as a reduction between hosts would


def sum_of_direct(todo: Round, num_ranks: int) -> torch.Tensor:
    total = sum_in_order([todo.input(rank) for rank in range(num_ranks)], todo.dtype, todo.scale)
    return total * 2 if todo.apart else total


@needs_interpreter
@grid("num_ranks", [1, 2, 3, 5], keep=lambda num_ranks: num_ranks == 3)  # 2: test_on_device.py
def test_every_round_between_processes(num_ranks: int) -> None:
    rounds = ROUNDS if num_ranks < 5 else ROUNDS[1::3]
    check_outcomes(run_ranks(rounds_of_rank, num_ranks, run_direct, rounds), rounds, sum_of_direct)


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_every_round_between_streams(num_ranks: int) -> None:
    check_outcomes(rounds_on_streams(num_ranks, run_direct, ROUNDS), ROUNDS, sum_of_direct)


@pytest.mark.parametrize("device", TRITON_DEVICES)
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
    out = torch.empty(32, device=device)
    reference.accumulate(before, out, scale=0.5)
    assert_bitwise(places[0].wire(32), out)


@pytest.mark.parametrize("device", TRITON_DEVICES)
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
    direct(
        place.wires,
        place.signals,
        place.wire(40_011),
        rank=1,
        num_ranks=3,
        begin=16,
        end=48,
        abort=place.abort,
        gather=gather,
        spread=spread,
    )
    for pad, what in zip(pads, expected, strict=True):
        assert pad.tolist() == what.tolist()


def check_abort(place: Place, runner: Runner) -> None:
    """The runner waits for signals that nobody sends."""
    todo = Round(5000, max_blocks=2)
    place.fill(todo)
    timer = threading.Timer(0.2, aborter(place))
    started = time.monotonic()
    timer.start()
    runner(place, todo)
    result, _ = place.outcome(todo)  # on CUDA this waits for the kernel
    assert time.monotonic() - started >= 0.2, "it did not wait"
    timer.join()
    assert result.isnan().all()


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("peer_comes_once", [False, True])
def test_abort_ends_the_wait_and_poisons(peer_comes_once: bool, device: str) -> None:
    place = places_of_one_process(2, device)[0]
    words(place)[0][:, 1] = peer_comes_once
    check_abort(place, run_direct)


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_abort_spoils_nothing_that_is_there(device: str) -> None:
    place = places_of_one_process(2, device)[0]
    come_early(place)
    place.abort.fill_(1)
    place.fill(Round(100))
    run_direct(place, Round(100))
    result, _ = place.outcome(Round(100))
    assert_bitwise(result, Round(100).input(0))  # rank 1's wire is 0


@pytest.mark.parametrize("device", TRITON_DEVICES)
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


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_found_is_lowered_never_raised(device: str) -> None:
    place = places_of_one_process(1, device)[0]
    todo = Round(100, by_hand={(0, 60): NAN})
    for before, after in [(NOT_FOUND, 60), (61, 60), (60, 60), (5, 5)]:
        place.fill(todo)
        place.found.fill_(before)
        run_direct(place, todo)
        assert place.found.item() == after


def test_without_cuda_or_interpreter_it_says_so() -> None:
    place = places_of_one_process(1, "cpu")[0]
    if lazy.INTERPRETED:
        run_direct(place, Round(4))
    else:
        with pytest.raises(ValueError, match=r"direct runs on CUDA, or on CPU tensors under TRITON_INTERPRET=1; got"):
            run_direct(place, Round(4))


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_refused(device: str) -> None:
    place = places_of_one_process(2, device)[0]
    good = {
        "wires": place.wires,
        "signals": place.signals,
        "wire": place.wire(64),
        "rank": 0,
        "num_ranks": 2,
        "begin": 16,
        "end": 60,
        "abort": place.abort,
        "found": place.found,
    }
    refused = [
        (TypeError, r"got a wire of torch\.int32", {"wire": place.wire(64).view(torch.int32)}),
        (ValueError, r"start at a multiple of 64 bytes", {"wire": place.wire(64)[1:]}),
        (ValueError, r"with strides \(2,\)", {"wire": place.wire(64)[::2]}),
        (ValueError, r"rank must be one of 2, got 2", {"rank": 2}),
        (ValueError, r"max_blocks must be at least 1, got 0", {"max_blocks": 0}),
        (
            ValueError,
            r"wires must be contiguous, torch.int64 \[2\] .* got torch.int64 \[1\]",
            {"wires": place.wires[:1]},
        ),
        (ValueError, r"signals must be .* got torch.int32", {"signals": place.signals.int()}),
        (ValueError, r"num_ranks must be 1 to 256, got 257", {"num_ranks": 257}),
        (ValueError, r"abort must be contiguous, torch.int32 \[1\] on cpu", {"abort": place.found.long()}),
        (ValueError, r"found must be contiguous, torch.int32 \[1\]", {"found": place.wires}),
        (ValueError, r"slice \[16, 65\) must lie within the wire's 64", {"end": 65}),
        (ValueError, r"begin at a multiple of 64 bytes, got 8 elements of 4 bytes", {"begin": 8}),
        (ValueError, r"gather and spread are both False", {"gather": False, "spread": False}),
    ]
    if device == "cpu":
        refused.append((ValueError, r"multicast needs an NVIDIA GPU \(multimem.* on cpu", {"multicast": 64}))
    else:
        refused.append((ValueError, r"abort must be in pinned host memory", {"abort": place.abort.clone()}))
    for error, message, change in refused:
        with pytest.raises(error, match=message):
            direct(**{**good, **change})


def test_blocks_depend_on_nothing_in_which_ranks_may_differ() -> None:
    assert [num_blocks(numel, 4, 2, 4096, 24) for numel in (0, 1, 8192, 8193, 10**9)] == [1, 1, 1, 2, 24]
    sizes = (2**18 - 1, 2**18, 2**20 - 1, 2**20)  # around 1 MiB and 4 MiB
    assert [num_blocks(numel, 4, 8, 1024, 24) for numel in sizes] == [8, 16, 16, 24]
    assert num_blocks(2**18 - 1, 4, 8, 1024, 6) == 6
    assert num_blocks(2**18 - 1, 4, 1, 1024, 200) == 200  # a single rank waits for nobody
    assert [signal_bytes(num_ranks, 24) for num_ranks in (2, 29, 30)] == [24 * 128, 24 * 128, 24 * 256]
