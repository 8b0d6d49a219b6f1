"""Ranks for `direct` and `ring`: real processes if the kernels are interpreted, streams of one GPU on CUDA."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

import torchring
from tests.support.checks import assert_bitwise, assert_same_on_all_ranks
from tests.support.kernels import B16, F16, F32, F64, INF, NAN, PTX
from tests.support.ptx import InlinePtx, ptx_in_kernels
from torchring.allreduce.slices import slice_bounds
from torchring.kernels.direct import prepare_direct
from torchring.kernels.ring import prepare_ring
from torchring.kernels.signals import MAX_BLOCKS, block_words, signal_bytes

GUARD = 16  # elements behind a wire that nobody may touch
NUM_BYTES = 4 * (40_011 + GUARD)


@dataclass(frozen=True)
class Round:
    """One all-reduce, and what is put into the wires for it."""

    numel: int
    dtype: torch.dtype = F32
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


# For `direct` as for the ring.
ROUNDS = [
    *(Round(numel, dtype, seed=numel) for numel in (0, 1, 63, 5000) for dtype in (F32, F16, B16)),
    Round(40_011, F32, seed=1),  # several blocks
    Round(5000, F64, seed=4),
    Round(1000, F32, seed=7, by_hand={(0, 777): INF, (0, 999): NAN}),
    Round(1000, F16, seed=8, by_hand={(0, 3): 60_000.0, (1, 3): 60_000.0}),  # finite, but their sum is not
    Round(40_011, F32, seed=9, by_hand={(0, 40_010): NAN}, max_blocks=1),  # several turns
    Round(40_011, F32, seed=10),  # blocks that the last launch left out
]


@dataclass
class Place:
    rank: int
    num_ranks: int
    parts: list[torch.Tensor]  # all ranks' memory for wires, uint8
    pads: list[torch.Tensor]  # all ranks' signal pads, uint8
    ptx: bool = False  # on a CPU: signals by inline PTX, not by Triton's atomic operations

    def __post_init__(self) -> None:
        device = self.parts[0].device
        self.wires = torch.tensor([part.data_ptr() for part in self.parts], device=device)
        self.signals = torch.tensor([pad.data_ptr() for pad in self.pads], device=device)
        self.abort = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")

    def instructions(self) -> AbstractContextManager[Any]:
        """For the time of a launch."""
        return ptx_in_kernels(InlinePtx([self.signals, *self.pads, self.abort])) if self.ptx else nullcontext()

    def wire(self, numel: int, dtype: torch.dtype = F32) -> torch.Tensor:
        """The first elements of the own memory."""
        return self.parts[self.rank][: numel * dtype.itemsize].view(dtype)

    def arguments(self, todo: Round) -> dict[str, Any]:
        own = {"wire": self.wire(todo.numel, todo.dtype), "abort": self.abort, "max_blocks": todo.max_blocks}
        return {"wires": self.wires, "signals": self.signals, "rank": self.rank, "num_ranks": self.num_ranks, **own}

    def fill(self, todo: Round) -> None:
        guarded = self.wire(todo.numel + GUARD, todo.dtype)
        guarded[: todo.numel] = todo.input(self.rank)
        guarded[todo.numel :] = 7.0

    def outcome(self, todo: Round) -> torch.Tensor:
        guarded = self.wire(todo.numel + GUARD, todo.dtype).cpu().clone()
        assert guarded[todo.numel :].tolist() == [7.0] * GUARD
        return guarded[: todo.numel]


Runner = Callable[[Place, Round], None]
Outcomes = list[list[torch.Tensor]]  # [rank][round]: the wire


def places_of_one_process(num_ranks: int, device: str) -> list[Place]:
    device, ptx = ("cpu", True) if device == PTX else (device, False)
    parts = list(torch.zeros(num_ranks, -(-NUM_BYTES // 64) * 64, dtype=torch.uint8, device=device))
    pads = list(torch.zeros(num_ranks, signal_bytes(num_ranks), dtype=torch.uint8, device=device))
    return [Place(rank, num_ranks, parts, pads, ptx) for rank in range(num_ranks)]


def words(place: Place) -> list[torch.Tensor]:
    """Everybody's pads as [block, word]."""
    return [pad.view(torch.int32).view(MAX_BLOCKS, block_words(place.num_ranks)) for pad in place.pads]


def begin_counts(place: Place) -> None:
    """As if there had been many rounds: block 0 is about to pass 2**31, and block 1 to pass 2**32."""
    own = words(place)[place.rank]
    own[0::2] = 2**31 - 9
    own[1::2] = -1


def counts_of(place: Place) -> list[list[int]]:
    """Of each block: meetings of every rank, and steps of the left, of the right and of this rank."""
    return words(place)[place.rank][:, : place.num_ranks + 3].tolist()


def come_early(place: Place) -> None:
    """All other ranks have come to the next meetings of this rank, and through the next rounds of its ring."""
    own, num_ranks = words(place)[place.rank], place.num_ranks
    own[:, :num_ranks] = torch.where(
        torch.arange(num_ranks, device=own.device) == place.rank, own[:, :num_ranks], own[:, place.rank, None] + 100
    )
    own[:, num_ranks : num_ranks + 2] = own[:, num_ranks + 2, None] + 100


def rounds_of_rank(
    rank: int, num_ranks: int, runner: Runner, rounds: list[Round], device: str = "cpu"
) -> list[torch.Tensor]:
    """All rounds with nothing between them but the kernel's own signals, and each time another rank late."""
    group = torchring.init().host
    pads = list(group.allocate(signal_bytes(num_ranks)).parts)
    begin_counts(Place(rank, num_ranks, pads, pads))
    parts = list(group.allocate(NUM_BYTES).parts)  # waits for all ranks
    place = Place(rank, num_ranks, parts, pads, device == PTX)
    outcomes = []
    for number, todo in enumerate(rounds):
        if number % num_ranks == rank and num_ranks > 1:
            time.sleep(0.05)
        place.fill(todo)
        runner(place, todo)
        outcomes.append(place.outcome(todo))
    for first, *others, left, right, own in counts_of(place):
        assert others == [first] * (num_ranks - 1), "ranks have been to different numbers of meetings"
        assert left == right == own, "neighbours have gone different numbers of steps"
    return outcomes


def check_outcomes(outcomes: Outcomes, rounds: list[Round], expect: Callable[[Round, int], torch.Tensor]) -> None:
    """expect(round, number of ranks) is the wire that all ranks should have; which NaN it holds is no matter."""
    for number, todo in enumerate(rounds):
        of_ranks = [of_rank[number] for of_rank in outcomes]
        assert_same_on_all_ranks(of_ranks)
        result, expected = of_ranks[0], expect(todo, len(outcomes))
        for kind in (torch.isnan, torch.isinf):
            assert kind(result).tolist() == kind(expected).tolist(), todo
        assert_bitwise(result.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0), f"round {number}, {todo}")


def check_abort(place: Place, runner: Runner) -> None:
    """The runner waits for signals that nobody sends."""
    todo = Round(100)
    place.fill(todo)
    timer = threading.Timer(0.2, place.abort.fill_, [1])
    started = time.monotonic()
    timer.start()
    runner(place, todo)
    result = place.outcome(todo)  # on CUDA this waits for the kernel
    assert time.monotonic() - started >= 0.2, "it did not wait"
    timer.join()
    assert result.isnan().all()


def slice_of(place: Place, todo: Round) -> tuple[int, int]:
    num_slices = min(todo.num_slices, place.num_ranks)
    return [*slice_bounds(todo.numel, num_slices, todo.dtype.itemsize), *[(0, 0)] * place.num_ranks][place.rank]


def launch_direct(place: Place, todo: Round, *, gather: bool = True, spread: bool = True) -> None:
    begin, end = slice_of(place, todo)
    with place.instructions():
        prepare_direct(**place.arguments(todo), begin=begin, end=end, gather=gather, spread=spread)()


def run_direct(place: Place, todo: Round) -> None:
    if not todo.apart:
        launch_direct(place, todo)
        return
    begin, end = slice_of(place, todo)
    launch_direct(place, todo, spread=False)
    place.wire(todo.numel, todo.dtype)[begin:end] *= 2  # as a reduction between hosts would
    launch_direct(place, todo, gather=False)


def run_ring(place: Place, todo: Round) -> None:
    with place.instructions():
        prepare_ring(**place.arguments(todo))()
