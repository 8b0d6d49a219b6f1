"""Opens movers for gradients on GPUs, and decides what algorithm="auto" means there.

See `allreduce/select.py` for gradients on the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

import torch
from torch.distributed import PrefixStore

from torchring.accelerators import Accelerator, Backend
from torchring.allreduce.choice import Choice, check_one_host, in_words, measure_in_turns
from torchring.allreduce.device.engines import BackendEngine, HierarchicalEngine, SharedMemoryEngine, abort, all_reduce
from torchring.allreduce.device.stream import Engine, OnStream
from torchring.allreduce.hierarchical import column_members, num_columns
from torchring.collectives.service import internal_collectives_of
from torchring.errors import RingError, TopologyError, in_step
from torchring.world import World

_T = TypeVar("_T")

# Among two or three of one host, direct is at least as fast as NCCL for any bucket, by what others have measured: vLLM
# uses direct's two shots there (vllm-project/vllm#42324).
FEWEST_MEASURED: Final = 4
_NUM_SAMPLES: Final = 3  # wires at a time
_LONGEST_SAMPLE_BYTES: Final = 32 << 20  # what is faster for this size is faster for all larger ones
_NUM_REPEATS: Final = 4  # of each wire in a turn, so that it counts little that ranks begin at different times
_NUM_WARM_UPS: Final = 2  # kernels are compiled and NCCL connects in the first
_NUM_TURNS: Final = 5


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
    sample = _sample(specs)
    if (ours == "direct" and world.size < FEWEST_MEASURED) or not sample:
        return mover, Choice(ours, why)
    is_narrow = any(numel and dtype.itemsize == 2 for numel, dtype in specs)
    if is_narrow:
        why += ", where 16-bit values are added in fp32 (the backend's own all-reduce adds them in 16 bits)"
    movers = {ours: mover, **_rivals(world, mover, overlap, accelerator, with_native=not is_narrow)}
    if len(movers) == 1:
        return mover, Choice(ours, why if is_narrow else f"{why}, and the backend does not connect")
    seconds = _measure(world, movers, sample, accelerator)
    best = min(movers, key=lambda name: seconds[name])
    for name, other in movers.items():
        if name != best:
            other.close()
    sizes = ", ".join(dict.fromkeys(f"{numel * dtype.itemsize / 2**20:.3g}" for numel, dtype in sample))
    measured = f"measured for buckets of {sizes} MiB: {in_words(seconds)}"
    if best == "native":  # whose own default is larger than that of direct
        measured += ", all with the same buckets"
    return movers[best], Choice(best, f"{why}; {measured}", seconds)


def _rivals(
    world: World, mover: OnStream, overlap: str, accelerator: Accelerator, *, with_native: bool
) -> dict[str, OnStream]:
    """Collective: other movers that could take the place of `mover`. The same on all ranks."""
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
        check_one_host(world, f"algorithm={algorithm!r} takes one host")
    elif algorithm == "ring":
        check_one_host(world, "algorithm='ring' on GPUs takes one host", also="'native'")
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
    """Collective: the result of `open_it`. If it fails on a rank, all ranks raise a TopologyError with the same text.

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


def _sample(specs: Sequence[tuple[int, torch.dtype]]) -> list[tuple[int, torch.dtype]]:
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


def _measure(
    world: World, movers: Mapping[str, OnStream], sample: Sequence[tuple[int, torch.dtype]], accelerator: Accelerator
) -> dict[str, float]:
    """Collective: seconds that each mover takes for the sample. Closes the movers if it fails."""
    try:
        wires = {name: [*mover.open_wires(sample)] * _NUM_REPEATS for name, mover in movers.items()}
        seconds = measure_in_turns(
            world,
            movers,
            wires,
            num_warm_ups=_NUM_WARM_UPS,
            num_turns=_NUM_TURNS,
            synchronize=accelerator.synchronize,
        )
    except BaseException:
        for mover in movers.values():
            mover.close()
        raise
    for mover in movers.values():
        mover.settle()
    return {name: taken / _NUM_REPEATS for name, taken in seconds.items()}
