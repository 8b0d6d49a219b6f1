"""Opens movers, and decides what algorithm="auto" and overlap="auto" mean."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar, get_args

import torch
from torch.distributed import PrefixStore

from torchring.accelerators import Accelerator, Backend
from torchring.allreduce.contract import Mover
from torchring.allreduce.cost import seconds_together
from torchring.allreduce.device.engines import BackendEngine, HierarchicalEngine, SharedMemoryEngine, abort, all_reduce
from torchring.allreduce.device.stream import Engine, OnStream
from torchring.allreduce.direct import DirectAllReduce
from torchring.allreduce.hierarchical import HierarchicalAllReduce, column_members, num_columns
from torchring.allreduce.native import NativeAllReduce
from torchring.allreduce.ring import RingAllReduce
from torchring.allreduce.threaded import ThreadedMover
from torchring.collectives.service import internal_collectives_of
from torchring.errors import RingError, TopologyError, in_step
from torchring.memory.channel import POLL_SECONDS
from torchring.transport.open import open_transport
from torchring.world import World

Algorithm = Literal["auto", "direct", "ring", "hierarchical", "native", "nvls"]
ALGORITHMS: Final = get_args(Algorithm)
Overlap = Literal["auto", "inline", "thread"]
OVERLAPS: Final = get_args(Overlap)
_T = TypeVar("_T")

NUM_LANES: Final = 2  # buckets that cross the network at a time

_SAMPLE_BYTES: Final = 2 << 20  # of each wire that is measured, at most
_NUM_SAMPLES: Final = 3  # wires at a time
_NUM_ROUNDS: Final = 3
_PATIENCE_SECONDS: Final = 1.0  # for all rounds; a slow network is recognised in the first round
# The backend's own all-reduce works in C++, and leaves more of the cores to backward. The measurement does not show
# that, because nothing computes meanwhile: at 10 Gbit/s a ring that was 1.18 times as fast by itself made steps 1.1
# times as long.
_LEAST_ADVANTAGE: Final = 1.3

# On GPUs. Among two or three of one host, direct is at least as fast as NCCL for any bucket, by what others have
# measured: vLLM uses direct's two shots there (vllm-project/vllm#42324).
FEWEST_MEASURED: Final = 4
_LONGEST_SAMPLE_BYTES: Final = 32 << 20  # what is faster for this size is faster for all larger ones
_NUM_REPEATS: Final = 4  # of each wire in a turn, so that it counts little that ranks begin at different times
_NUM_WARM_UPS: Final = 2  # kernels are compiled and NCCL connects in the first
_NUM_TURNS: Final = 5


@dataclass(frozen=True)
class Choice:
    """What "auto" stands for in a world, for certain wires.

    Attributes:
        algorithm: "direct", "ring", "hierarchical", "native" or "nvls".
        reason: why, in a sentence.
        seconds: what each candidate took for the sample; empty if there was one candidate.
    """

    algorithm: str
    reason: str
    seconds: dict[str, float] = field(default_factory=dict)


def choose(world: World, specs: Sequence[tuple[int, torch.dtype]]) -> Choice:
    """Collective: what "auto" means for wires of these (elements, dtype), the same on all ranks.

    "auto" is "direct" where all ranks share memory. Elsewhere torchring measures "native" against "hierarchical", or
    against "ring" where every host has one rank, for wires of this size. "native" is not considered for 16-bit wires.
    """
    choice, movers = _try(world, specs)
    for mover in movers.values():
        mover.close()
    return choice


def open_chosen(
    world: World, overlap: str, specs: Sequence[tuple[int, torch.dtype]], narrow: torch.dtype | None = None
) -> tuple[Mover[Any], Choice]:
    """Collective: the mover for algorithm="auto", and why this mover was chosen.

    Args:
        narrow: the 16-bit dtype in which wider wires may travel later.
    """
    choice, movers = _try(world, specs, narrow)
    kept = None if overlap == "inline" else movers.pop(choice.algorithm, None)
    for mover in movers.values():
        mover.close()
    return kept or open_mover(world, choice.algorithm, overlap), choice


def _try(
    world: World, specs: Sequence[tuple[int, torch.dtype]], narrow: torch.dtype | None = None
) -> tuple[Choice, dict[str, Mover[Any]]]:
    """The choice, and the movers that were measured for it, open."""
    if world.shares_memory:
        return Choice("direct", "all ranks share memory"), {}
    if max(map(len, world.hosts)) > 1:
        ours, why = "hierarchical", "ranks share memory within hosts"
    else:
        ours, why = "ring", "every host has one rank"
    if any(dtype.itemsize == 2 for _, dtype in specs):
        why += ", and it adds 16-bit values in fp32, which the backend's own all-reduce does not"
        return Choice(ours, why), {}
    sample = _sample(specs)
    if not sample:
        return Choice(ours, why), {}
    movers = {name: open_mover(world, name, "thread") for name in (ours, "native")}
    try:
        seconds = _measure(world, movers, sample)
        if narrow is not None:
            # Only ours adds 16-bit values in fp32. Where ours is the faster one in 16 bits alone, the network is the
            # limit. Then both take about as long for wider values, if 16 bits turn out not to pay.
            half = [(numel, narrow) for numel, _ in sample]
            seconds[f"{ours} in 16 bits"] = _measure(world, {ours: movers[ours]}, half)[ours]
    except BaseException:
        for mover in movers.values():
            mover.close()
        raise
    fastest = min(taken for name, taken in seconds.items() if name != "native")
    best = ours if fastest * _LEAST_ADVANTAGE < seconds["native"] else "native"
    mib = sum(numel * dtype.itemsize for numel, dtype in sample) / 2**20
    return Choice(best, f"{why}; measured for {mib:.3g} MiB: {_in_words(seconds)}", seconds), movers


def open_mover(world: World, algorithm: str, overlap: str) -> Mover[Any]:
    """Collective: the mover for an algorithm other than "auto".

    With overlap="auto", direct reductions proceed in calls of the thread that runs backward if ranks times threads fill
    the cores: a second thread would only take turns with that thread. Other reductions proceed in lanes: while a lane
    waits for the network, backward has the core. Raises TopologyError for "direct" across hosts, and for "nvls".
    """
    if algorithm == "nvls":
        text = "algorithm='nvls' takes gradients on GPUs, and these are on the CPU; use algorithm='auto'"
        raise in_step(TopologyError(text, rank=world.rank))
    host = world.host
    assert host is not None
    fills_the_cores = world.local_size * torch.get_num_threads() >= world.num_cores
    in_background = overlap == "thread" or (overlap == "auto" and not (algorithm == "direct" and fills_the_cores))
    if algorithm == "direct":
        _check_one_host(world, "algorithm='direct' takes one host")
        # A lane must not poll: it would take turns with the thread that computes.
        direct = DirectAllReduce(host, poll_seconds=0.0 if in_background else POLL_SECONDS)
        return ThreadedMover(direct) if in_background else direct
    transports = [open_transport(world) for _ in range(NUM_LANES if in_background else 1)]
    if algorithm == "hierarchical":
        members = column_members(world.hosts, world.rank)
        ring = None if members is None else RingAllReduce(transports, members)
        if ring is None:  # transports are opened by all ranks together
            for transport in transports:
                transport.close()
        return HierarchicalAllReduce(host, num_columns(world.hosts), ring, in_background=in_background)
    if algorithm == "ring":
        return ThreadedMover(RingAllReduce(transports), in_background=in_background)
    return ThreadedMover(NativeAllReduce(transports), in_background=in_background)


def open_on_device(
    world: World, algorithm: str, overlap: str, specs: Sequence[tuple[int, torch.dtype]], accelerator: Accelerator
) -> tuple[OnStream, Choice]:
    """Collective: the mover for buckets on a device that works in streams, and why this mover was chosen.

    "auto" is "native" where every host has one rank, or GPUs of a host do not reach each other's memory. On one host it
    is "direct" for up to 3 GPUs. For more GPUs, torchring measures "direct" against "native", and "nvls" where that is
    to be had; on several hosts with several GPUs each, "hierarchical" against "native". It measures wires of the sizes
    in `specs`, and leaves out "native" if some have 16 bits. With overlap="inline" the stream that computes waits for
    each bucket. Raises TopologyError, on all ranks, where the GPUs of some cannot do what `algorithm` takes.
    """
    if algorithm != "auto":
        return _open_engine(world, algorithm, overlap, accelerator), Choice(algorithm, "asked for")
    if world.size == len(world.hosts) > 1:
        why = "every host has one rank, and the backend's own all-reduce knows the network"
        return _open_engine(world, "native", overlap, accelerator), Choice("native", why)
    ours = "direct" if len(world.hosts) == 1 else "hierarchical"
    try:
        mover = _open_engine(world, ours, overlap, accelerator)
    except TopologyError as error:  # on all ranks
        why = f"{ours} is not to be had: {error.message}"
        return _open_engine(world, "native", overlap, accelerator), Choice("native", why)
    why = "the GPUs of all ranks reach each other's memory" if ours == "direct" else "ranks share memory within hosts"
    sample = _sample_on_device(specs)
    if (ours == "direct" and world.size < FEWEST_MEASURED) or not sample:
        return mover, Choice(ours, why)
    is_narrow = any(numel and dtype.itemsize == 2 for numel, dtype in specs)
    if is_narrow:
        why += ", where 16-bit values are added in fp32 (the backend's own all-reduce adds them in 16 bits)"
    movers = {ours: mover, **_rivals(world, mover, overlap, accelerator, with_native=not is_narrow)}
    if len(movers) == 1:
        return mover, Choice(ours, why if is_narrow else f"{why}, and the backend does not connect")
    seconds = _measure_on_device(world, movers, sample, accelerator)
    best = min(movers, key=lambda name: seconds[name])
    for name, other in movers.items():
        if name != best:
            other.close()
    sizes = ", ".join(dict.fromkeys(f"{numel * dtype.itemsize / 2**20:.3g}" for numel, dtype in sample))
    measured = f"measured for buckets of {sizes} MiB: {_in_words(seconds)}"
    if best == "native":  # whose own default is larger than that of direct
        measured += ", all with the same buckets"
    return movers[best], Choice(best, f"{why}; {measured}", seconds)


def _rivals(
    world: World, mover: OnStream, overlap: str, accelerator: Accelerator, *, with_native: bool
) -> dict[str, OnStream]:
    """Collective: what else could reduce what `mover` reduces. The same on all ranks."""
    rivals = {}
    engine = mover.engine
    if isinstance(engine, SharedMemoryEngine) and engine.can_multicast:
        with contextlib.suppress(TopologyError):
            nvls = _together(world, lambda: SharedMemoryEngine("nvls", engine.group, accelerator))
            rivals["nvls"] = _on_stream(world, nvls, overlap, accelerator)
    if with_native:
        with contextlib.suppress(TopologyError):  # NCCL does not connect ranks that share a GPU
            rivals["native"] = _open_engine(world, "native", overlap, accelerator)
    return rivals


def _open_engine(world: World, algorithm: str, overlap: str, accelerator: Accelerator) -> OnStream:
    """Collective."""
    if algorithm in ("direct", "nvls"):
        _check_one_host(world, f"algorithm={algorithm!r} takes one host")
    elif algorithm == "ring":
        _check_one_host(world, "algorithm='ring' on GPUs takes one host", also="'native'")
    return _on_stream(world, _engine(world, algorithm, accelerator), overlap, accelerator)


def _on_stream(world: World, engine: Engine, overlap: str, accelerator: Accelerator) -> OnStream:
    return OnStream(
        engine,
        accelerator,
        in_background=overlap != "inline",
        host=world.host,
        timeout_seconds=world.timeout_seconds,
    )


def _engine(world: World, algorithm: str, accelerator: Accelerator) -> Engine:
    """Collective. Raises TopologyError on all ranks if a rank cannot open the engine."""
    if algorithm in ("direct", "ring", "nvls", "hierarchical"):
        num_slices = num_columns(world.hosts) if algorithm == "hierarchical" else None

        def share() -> SharedMemoryEngine:
            group = accelerator.share(world.host, world.rendezvous)
            return SharedMemoryEngine(algorithm, group, accelerator, num_slices)

        shared = _together(world, share)
        if algorithm != "hierarchical":
            return shared
        return HierarchicalEngine(shared, _backend(world, column_members(world.hosts, world.rank), accelerator))
    backend = _backend(world, tuple(range(world.size)), accelerator)
    assert backend is not None
    return BackendEngine(backend, accelerator)


def _backend(world: World, members: tuple[int, ...] | None, accelerator: Accelerator) -> Backend | None:
    """Collective among all ranks: a backend between `members`, one of which is this rank; None if `members` is None.

    Raises TopologyError on all ranks if a rank's backend cannot be had, or does not connect.
    """
    opened: list[Backend] = []

    def open_it() -> None:
        if members is None:
            return
        assert world.rendezvous is not None
        store = PrefixStore(f"backend/{name}/{members[0]}", world.rendezvous.store)
        try:
            rank = members.index(world.rank)
            opened.append(accelerator.open_backend(store, rank, len(members), world.timeout_seconds))
        except AttributeError as error:  # PyTorch was built without NCCL
            raise TopologyError(str(error)) from error

    def connect() -> None:  # now, not in a backward
        for backend in opened:
            all_reduce(backend, torch.zeros(1, device=accelerator.device))
            accelerator.synchronize()

    name = world.next_channel_name()
    try:
        _together(world, open_it, "torch.distributed's backend cannot be opened: ")
        # A rank without a backend would leave the others waiting on their devices, for ever.
        _together(world, connect, "torch.distributed's backend does not connect: ")
    except BaseException:
        for backend in opened:
            abort(backend)
            with contextlib.suppress(RuntimeError):
                backend.shutdown()
        raise
    return opened[0] if opened else None


def _together(world: World, open_it: Callable[[], _T], problem: str = "") -> _T:
    """Collective: what `open_it` returns. If `open_it` fails on a rank, all ranks raise a TopologyError with one text.

    Args:
        problem: begins the text.
    """
    text, cause, opened = "", None, list[_T]()
    try:
        opened.append(open_it())
    except RuntimeError as error:
        if isinstance(error, RingError) and not isinstance(error, TopologyError):  # ranks cannot agree any more
            raise
        text = problem + (error.message if isinstance(error, TopologyError) else str(error) or repr(error))
        cause = error
    texts = [data.decode() for data in internal_collectives_of(world).all_gather_bytes(text.encode())]
    if failed := [rank for rank, text in enumerate(texts) if text]:
        where = "" if len(failed) == world.size else f" (rank {failed[0]} says so)"
        raise in_step(TopologyError(texts[failed[0]] + where, rank=world.rank)) from cause
    return opened[0]


def _check_one_host(world: World, problem: str, also: str = "'hierarchical'") -> None:
    if len(world.hosts) > 1:
        text = f"{problem}, but ranks share memory only within {list(world.hosts)}; use algorithm='auto' or {also}"
        raise in_step(TopologyError(text, rank=world.rank))


def _in_words(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {taken * 1e3:.3g} ms" for name, taken in seconds.items())


def _sample(specs: Sequence[tuple[int, torch.dtype]]) -> list[tuple[int, torch.dtype]]:
    """The largest wires, cut to a length that suffices to measure the network."""
    largest = sorted(specs, key=lambda spec: spec[0] * spec[1].itemsize, reverse=True)[:_NUM_SAMPLES]
    return [(min(numel, _SAMPLE_BYTES // dtype.itemsize), dtype) for numel, dtype in largest if numel]


def _measure(
    world: World, movers: Mapping[str, Mover[Any]], sample: Sequence[tuple[int, torch.dtype]]
) -> dict[str, float]:
    """Collective: seconds that each mover takes for the sample, of which all wires are started at once.

    Movers take turns. The time of a turn is that of the slowest rank, and the result is the median of turns: the same
    numbers on all ranks, so that all ranks decide alike.
    """
    wires = {name: mover.open_wires(sample) for name, mover in movers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in movers}
    for turn in range(_NUM_ROUNDS + 1):  # the first is a warm-up, unless the network is so slow that one turn suffices
        for name, mover in movers.items():
            slowest = seconds_together(world, mover, wires[name])
            if turn or slowest > _PATIENCE_SECONDS / 4:
                seconds[name].append(slowest)
        if sum(map(sum, seconds.values())) > _PATIENCE_SECONDS and all(seconds.values()):
            break
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def _sample_on_device(specs: Sequence[tuple[int, torch.dtype]]) -> list[tuple[int, torch.dtype]]:
    """Wires that stand for all others: in order of size, those that hold the bytes at 1/6, 1/2 and 5/6 of all bytes.

    Their sizes count: kernels of torchring's own are the faster ones for small wires, NCCL for large ones.
    """
    ordered = sorted(specs, key=lambda spec: spec[0] * spec[1].itemsize)
    total = sum(numel * dtype.itemsize for numel, dtype in ordered)
    sample: list[tuple[int, torch.dtype]] = []
    passed = 0
    for numel, dtype in ordered:
        passed += numel * dtype.itemsize
        while len(sample) < _NUM_SAMPLES and 0 < (2 * len(sample) + 1) * total <= 2 * _NUM_SAMPLES * passed:
            sample.append((min(numel, _LONGEST_SAMPLE_BYTES // dtype.itemsize), dtype))
    return sample


def _measure_on_device(
    world: World,
    movers: Mapping[str, OnStream],
    sample: Sequence[tuple[int, torch.dtype]],
    accelerator: Accelerator,
) -> dict[str, float]:
    """Collective: as `_measure`, with all wires started several times in a turn."""
    seconds: dict[str, list[float]] = {name: [] for name in movers}
    try:
        wires = {name: [*mover.open_wires(sample)] * _NUM_REPEATS for name, mover in movers.items()}
        for turn in range(_NUM_WARM_UPS + _NUM_TURNS):
            for name, mover in movers.items():
                slowest = seconds_together(world, mover, wires[name], accelerator.synchronize)
                if turn >= _NUM_WARM_UPS:
                    seconds[name].append(slowest / _NUM_REPEATS)
    except BaseException:
        for mover in movers.values():
            mover.close()
        raise
    for mover in movers.values():
        mover.settle()
    return {name: statistics.median(taken) for name, taken in seconds.items()}
