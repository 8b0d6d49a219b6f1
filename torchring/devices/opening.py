"""Opens all-reduces for gradients on GPUs, and decides what algorithm="auto" means there.

See `allreduce/select.py` for gradients on the CPU.
"""

import contextlib
import gc
import statistics
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Final, TypeAlias, TypeVar

import torch

from torchring.allreduce.hierarchical import column_ranks, num_columns
from torchring.allreduce.select import Choice, check_one_host
from torchring.collectives import operations
from torchring.collectives.service import Collectives, internal_collectives_of
from torchring.devices.cuda import Backend, CudaAccelerator
from torchring.devices.engines import DeviceWire, Engine, abort, all_reduce, shut_down
from torchring.devices.stream import OnStream
from torchring.devices.symmetric_memory import LonelyGroup
from torchring.errors import PeerTimeoutError, RingError, TopologyError, in_step
from torchring.rendezvous.rendezvous import within
from torchring.rendezvous.signed import unsigned
from torchring.world import World

_T = TypeVar("_T")
Exchange: TypeAlias = Callable[[bytes], list[bytes]]
"""Collective: gives all ranks what each says, in rank order."""
Specs: TypeAlias = Sequence[tuple[int, torch.dtype]]
Kind: TypeAlias = Callable[..., OnStream]

_LONGEST_SAMPLE_BYTES: Final = 32 << 20  # what is faster for this size is faster for all larger ones
_NUM_REPEATS: Final = 12  # of a wire in a turn, so that it counts little that ranks begin at different times
_NUM_WARM_UPS: Final = 2  # kernels are compiled and NCCL connects in the first
_NUM_TURNS: Final = 5
_NUM_PRODUCTS: Final = 8  # in each turn, of matrices of this many rows: 1.6 ms on an H100
_PRODUCT_SIDE: Final = 4096
_TRIAL_NUMEL: Final = 1024
_LOOK_SECONDS: Final = 0.1
_TRIAL_SECONDS: Final = 10.0  # kernels are compiled before, and take some microseconds


def open_on_device(
    world: World, algorithm: str, overlap: str, specs: Specs, accelerator: CudaAccelerator, kind: Kind = OnStream
) -> tuple[OnStream, Choice]:
    """Collective: the all-reduce for buckets on a device that works in streams, and why this all-reduce was chosen.

    "auto" is "native" where every host has one rank, or GPUs of a host do not reach each other's memory. On one host,
    torchring measures "direct" against "native"; on several hosts with several GPUs each, "hierarchical" against
    "native". It measures wires of the sizes in `specs`, beside matrix products: alone, what takes more processors would
    always win. "native" is no candidate if it adds 16-bit values of these wires in 16 bits. Nothing is measured between
    ranks that share a GPU, which NCCL refuses, or in PyTorch's deterministic mode, where a run must not differ from the
    last one. With overlap="inline" the stream that computes waits for each bucket.
    Raises TopologyError, on all ranks, where the GPUs of some cannot do what `algorithm` takes.
    """

    def opened(name: str) -> OnStream:
        return _tried_on_stream(world, _engine(world, name, accelerator), overlap, kind)

    gc.collect()  # memory of dead ranks, which errors of an earlier world still refer to
    if algorithm != "auto":
        return _chosen(opened(algorithm), "asked for")
    if world.size == len(world.hosts) > 1:
        return _chosen(opened("native"), "every host has one rank, and the backend's own all-reduce knows the network")
    ours = "direct" if len(world.hosts) == 1 else "hierarchical"
    try:
        all_reduce = opened(ours)
    except TopologyError as error:  # on all ranks
        try:
            native = opened("native")
        except TopologyError as second:
            raise in_step(TopologyError(f"{error.message}; and {second.message}", rank=world.rank)) from error
        return _chosen(native, f"{ours} is not to be had: {error.message}")
    why = "the GPUs of all ranks reach each other's memory" if ours == "direct" else "ranks share memory within hosts"
    if ours == "direct" and all_reduce.engine.group.shares_devices:
        return _chosen(all_reduce, f"{why}; not measured, because ranks share a GPU")
    if world.size == 1 or not any(numel for numel, _ in specs):
        return _chosen(all_reduce, why)
    if internal_collectives_of(world).any_rank(torch.are_deterministic_algorithms_enabled()):
        asks = "torch.use_deterministic_algorithms(True) asks for the same bits in each run"
        return _chosen(all_reduce, f"{why}; not measured, because {asks}")
    try:
        all_reduces = {ours: all_reduce, "native": opened("native")}
    except TopologyError:
        return _chosen(all_reduce, f"{why}, and the backend does not connect")
    seconds = _measure(world, all_reduces, specs)
    best = min(seconds, key=lambda name: seconds[name])
    for name, other in all_reduces.items():
        if name != best:
            other.close()
    if len(seconds) == 1:
        return _chosen(all_reduce, f"{why}, and the backend's own all-reduce adds 16-bit values in 16 bits")
    numel, dtype = _sample(specs)
    times = ", ".join(f"{name} {taken * 1e3:.3g} ms" for name, taken in seconds.items())
    measured = f"measured beside matrix products for buckets of {numel * dtype.itemsize / 2**20:.3g} MiB: {times}"
    if best == "native":  # whose own default is larger than that of direct
        measured += ", all with the same buckets"
    return _chosen(all_reduces[best], f"{why}; {measured}")


def _chosen(all_reduce: OnStream, why: str) -> tuple[OnStream, Choice]:
    return all_reduce, Choice(all_reduce.algorithm, why + all_reduce.engine.group.note)


def _tried_on_stream(world: World, engine: Engine, overlap: str, kind: Kind) -> OnStream:
    """Collective: an all-reduce for `engine`, which has reduced some numbers between all ranks.

    GPUs announce access to each other's memory, and may then lose what they write there, or never see it (PCIe behind
    an IOMMU, virtual machines). Kernels may not compile. Better to find out here, where there is a way out, than in a
    backward. Raises TopologyError on all ranks if a rank finds fault.
    """
    lost_afar = internal_collectives_of(world).lost_peer
    all_reduce = kind(engine, world, in_background=overlap != "inline", lost_afar=lost_afar)
    inputs = [((torch.arange(_TRIAL_NUMEL, device="cpu") + 7 * rank) % 61).float() for rank in range(world.size)]

    def launch_all() -> None:
        engine.launch(wire)
        if (guard := engine.guard([wire])) is not None:
            guard()

    def launch() -> None:
        wire.buffer.copy_(inputs[world.rank])
        all_reduce.stream.follow()
        with _alarm(world, world.timeout_seconds / 2, engine.abort):  # for CUDA_LAUNCH_BLOCKING=1
            all_reduce.stream.run(launch_all)

    def compare() -> None:
        seconds = min(_TRIAL_SECONDS, world.timeout_seconds / 2)
        with _alarm(world, seconds, engine.abort) as has_rung:
            engine.accelerator.synchronize()
        if has_rung.is_set():
            raise TopologyError(f"{engine.algorithm}, tried out, did not come to an end within {seconds:g} s")
        if not torch.equal(wire.buffer.cpu(), torch.stack(inputs).sum(0)):
            raise TopologyError(f"{engine.algorithm}, tried out, gave a wrong sum: GPUs lose data of each other")
        engine.release([wire])

    try:
        (wire,) = _together(world, lambda: all_reduce.open_wires([(_TRIAL_NUMEL, torch.float32)]))
        needs = "kernels cannot be compiled or launched (Triton needs a C compiler, and the headers of Python): "
        _together(world, launch, needs)
        _together(world, compare)
    except BaseException:
        engine.abort()  # kernels of this rank may wait for one that has failed
        all_reduce.close()
        raise
    return all_reduce


def _engine(world: World, algorithm: str, accelerator: CudaAccelerator) -> Engine:
    """Collective. Raises TopologyError on all ranks if a rank cannot open the engine."""
    if algorithm == "direct":
        check_one_host(world, "algorithm='direct' takes one host")
    elif algorithm == "ring":
        check_one_host(world, "algorithm='ring' on GPUs takes one host", also="'native'")
    elif algorithm == "native":
        backend = _backend(world, tuple(range(world.size)), accelerator, world.next_channel_name())
        assert backend is not None
        return Engine(algorithm, _memory_of(world, backend, accelerator), accelerator, 1, backend)
    num_slices = num_columns(world.hosts) if algorithm == "hierarchical" else None

    def share() -> Engine:
        return Engine(algorithm, accelerator.share(world.host, world.rendezvous), accelerator, num_slices)

    engine = _together(world, share)
    if algorithm == "hierarchical":
        columns = column_ranks(world.hosts, world.rank)
        engine.backend = _backend(world, columns, accelerator, world.next_channel_name())
    return engine


def open_collectives(collectives: Collectives, name: str, accelerator: CudaAccelerator) -> OnStream:
    """Collective, in an operation of `collectives`: what runs the backend's collectives on a device, for them alone.

    Raises TopologyError on all ranks if a rank's backend cannot be had.
    """
    world = collectives.world
    exchange = partial(operations.exchange, collectives.opened())  # another thread may use torchring's own collectives
    backend = _backend(world, tuple(range(world.size)), accelerator, name, exchange)
    engine = Engine("native", LonelyGroup(world.rank, accelerator.device), accelerator, 1, backend)
    return OnStream(engine, world, in_background=True, lost_afar=collectives.lost_peer)


def _backend(
    world: World, ranks: Sequence[int] | None, accelerator: CudaAccelerator, name: str, exchange: Exchange | None = None
) -> Backend | None:
    """Collective among all ranks: a backend between `ranks`, one of which is this rank; None if `ranks` is None.

    Raises TopologyError on all ranks if a rank's backend cannot be had, or does not connect. `name` is used once.
    """
    opened: list[Backend] = []

    def open_it() -> None:
        if ranks is None:
            return
        assert world.rendezvous is not None
        store = unsigned(within(world.rendezvous.store, f"backend/{name}/{ranks[0]}"))
        rank = ranks.index(world.rank)
        opened.append(accelerator.open_backend(store, rank, len(ranks), world.timeout_seconds))

    def connect() -> None:  # now, not in a backward
        for backend in opened:
            seconds = world.timeout_seconds / 2  # ranks that are through wait for the others
            with _alarm(world, seconds, lambda backend=backend: abort(backend)) as has_rung:  # type: ignore[misc]
                all_reduce(backend, torch.zeros(1, device=accelerator.device))
                accelerator.synchronize()
            if has_rung.is_set():
                raise TopologyError(f"no answer within {seconds:g} s (NCCL_SOCKET_IFNAME chooses the network)")

    try:
        _together(world, open_it, "torch.distributed's backend cannot be opened: ", exchange)
        # A rank without a backend would leave the others waiting on their devices, for ever.
        _together(world, connect, "torch.distributed's backend does not connect: ", exchange)
    except BaseException:
        for backend in opened:
            abort(backend)
            shut_down(backend)
        raise
    return opened[0] if opened else None


def _memory_of(world: World, backend: Backend, accelerator: CudaAccelerator) -> LonelyGroup:
    """Collective: memory that `backend` knows, or plain memory."""

    def register() -> LonelyGroup:
        with _alarm(world, world.timeout_seconds / 2, lambda: abort(backend)):
            group = accelerator.register(world.rank, backend)
            group.release(group.allocate(1))
        return group

    try:
        return _together(world, register)
    except TopologyError as error:
        group = LonelyGroup(world.rank, accelerator.device)
        group.note = f"; its buckets are not registered with the backend: {error.message}"
        return group


@contextlib.contextmanager
def _alarm(world: World, seconds: float, ring: Callable[[], object]) -> Iterator[threading.Event]:
    """Call `ring` on another thread if the context lasts for longer, or a rank of this host dies meanwhile.

    Gives an event that is then set.
    """
    has_rung, is_over = threading.Event(), threading.Event()
    end = time.monotonic() + seconds

    def watch() -> None:
        while time.monotonic() < end and world.failure is None and not _has_lost_peer(world):
            if is_over.wait(_LOOK_SECONDS):
                return
        has_rung.set()
        ring()

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield has_rung
    finally:
        is_over.set()


def _has_lost_peer(world: World) -> bool:
    try:
        if world.host is not None:
            world.host.check_peers(world.host.ranks)
    except RingError:
        return True
    return False


def _together(world: World, open_it: Callable[[], _T], problem: str = "", exchange: Exchange | None = None) -> _T:
    """Collective: the result of `open_it`. If it fails on a rank, all ranks raise a TopologyError with the same text.

    `problem` begins the text. By default, ranks tell each other by the collectives that torchring itself calls.
    """
    text, cause, opened = "", None, list[_T]()
    try:
        opened.append(open_it())
    except Exception as error:  # Triton's are of many kinds; AttributeError if PyTorch was built without NCCL
        if isinstance(error, RingError) and not isinstance(error, TopologyError):  # ranks cannot agree any more
            raise
        text = problem + (error.message if isinstance(error, TopologyError) else str(error) or repr(error))
        cause = error
    exchange = exchange or internal_collectives_of(world).all_gather_bytes
    texts = [data.decode() for data in exchange(text.encode())]
    if failed := [rank for rank, text in enumerate(texts) if text]:
        where = "" if len(failed) == world.size else f" (rank {failed[0]} says so)"
        raise in_step(TopologyError(texts[failed[0]] + where, rank=world.rank)) from cause
    return opened[0]


def _sample(specs: Specs) -> tuple[int, torch.dtype]:
    """The wire that stands for all others: in order of size, the one that holds the middle one of all bytes.

    Its size counts: kernels of torchring's own are the faster ones for small wires, NCCL for large ones.
    """
    ordered = sorted(specs, key=lambda spec: spec[0] * spec[1].itemsize)
    ends = list(accumulate(numel * dtype.itemsize for numel, dtype in ordered))
    numel, dtype = ordered[bisect_left(ends, ends[-1] / 2)]
    return min(numel, _LONGEST_SAMPLE_BYTES // dtype.itemsize), dtype


def _measure(world: World, all_reduces: Mapping[str, OnStream], specs: Specs) -> dict[str, float]:
    """Collective: seconds that each all-reduce takes for the sample. Closes the all-reduces if it fails.

    They take turns. The result is the median of turns, with the same numbers on all ranks, so that all decide alike.
    "native" is missing, and then nothing is measured, if it adds 16-bit values in 16 bits.
    """
    limit = world.timeout_seconds / 2
    native = all_reduces["native"]
    seconds: dict[str, list[float]] = {name: [] for name in all_reduces}

    def give_up() -> None:
        text = "measuring did not come to an end on the device; choose one yourself, such as algorithm='native'"
        for all_reduce in all_reduces.values():
            all_reduce.fail(PeerTimeoutError(text, rank=world.rank, seconds=limit))

    try:
        with _alarm(world, limit, give_up):
            if not _adds_in_fp32(world, native, specs):
                return {name: 0.0 for name in all_reduces if name != "native"}
            wires = {name: all_reduce.open_wires([_sample(specs)]) for name, all_reduce in all_reduces.items()}
            factor = torch.ones(_PRODUCT_SIDE, _PRODUCT_SIDE, dtype=torch.bfloat16, device=native.accelerator.device)
            multiply = partial(torch.mm, factor, factor, out=torch.empty_like(factor))
            for _ in range(_NUM_WARM_UPS + _NUM_TURNS):
                for name, all_reduce in all_reduces.items():
                    seconds[name].append(_seconds_together(world, all_reduce, [*wires[name]] * _NUM_REPEATS, multiply))
        for name, all_reduce in all_reduces.items():
            all_reduce.check()
            all_reduce.settle()
            all_reduce.engine.release(wires[name])
    except BaseException:
        for all_reduce in all_reduces.values():
            all_reduce.close()
        raise
    return {name: statistics.median(taken[_NUM_WARM_UPS:]) / _NUM_REPEATS for name, taken in seconds.items()}


def _seconds_together(
    world: World, all_reduce: OnStream, wires: Sequence[DeviceWire], multiply: Callable[[], object]
) -> float:
    """Collective: seconds to reduce all these wires beside matrix products, started at once, on the slowest rank."""
    collectives = internal_collectives_of(world)
    collectives.barrier()
    started = time.perf_counter()
    for _ in range(_NUM_PRODUCTS):
        multiply()
    for wire in wires:
        all_reduce.start(wire)
    all_reduce.wait()
    all_reduce.accelerator.synchronize()
    taken = torch.tensor(time.perf_counter() - started, dtype=torch.float64, device="cpu")
    return float(collectives.all_reduce(taken, "max"))


def _adds_in_fp32(world: World, native: OnStream, specs: Specs) -> bool:
    """Collective: whether NCCL rounds sums of 16-bit values once, for a wire of each binary order of size in `specs`.

    It chooses by size, link and release how it adds, and does not tell. Its symmetric kernels and switches add in fp32,
    its rings and trees in 16 bits. There a large value loses the ones that are added to it one by one. In some elements
    the large value comes first, in whatever order the ranks' values are added.
    """
    is_right = True
    chosen = {(dtype, numel.bit_length()): numel for numel, dtype in specs if numel and dtype.itemsize == 2}
    for (dtype, _), numel in chosen.items():
        (wire,) = native.open_wires([(numel, dtype)])
        large = 2 / torch.finfo(dtype).eps
        wire.buffer.fill_(1)[world.rank :: world.size] = large
        native.stream.follow()
        native.start(wire).wait()
        is_right &= torch.equal(wire.buffer, torch.full_like(wire.buffer, large + world.size - 1))
        native.check()
        native.engine.release([wire])
    native.settle()
    return not internal_collectives_of(world).any_rank(not is_right)
