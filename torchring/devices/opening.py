"""Opens all-reduces for gradients on GPUs, and decides what algorithm="auto" means there.

See `allreduce/select.py` for gradients on the CPU.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

import torch

from torchring.allreduce.hierarchical import column_ranks, num_columns
from torchring.allreduce.select import Choice, check_one_host
from torchring.collectives.service import internal_collectives_of
from torchring.devices.cuda import Backend, CudaAccelerator
from torchring.devices.engines import DeviceWire, Engine, abort, all_reduce, shut_down
from torchring.devices.stream import OnStream
from torchring.devices.symmetric_memory import LonelyGroup
from torchring.errors import PeerTimeoutError, RingError, TopologyError, in_step
from torchring.rendezvous.rendezvous import within
from torchring.rendezvous.signed import unsigned
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
_TRIAL_NUMEL: Final = 1024
_TRIAL_SECONDS: Final = 10.0  # kernels are compiled before, and take some microseconds


def open_on_device(
    world: World, algorithm: str, overlap: str, specs: Sequence[tuple[int, torch.dtype]], accelerator: CudaAccelerator
) -> tuple[OnStream, Choice]:
    """Collective: the all-reduce for buckets on a device that works in streams, and why this all-reduce was chosen.

    "auto" is "native" where every host has one rank, or GPUs of a host do not reach each other's memory. On one host it
    is "direct" for up to 3 GPUs. For more GPUs, torchring measures "direct" against "native"; on several hosts with
    several GPUs each, "hierarchical" against "native". It measures wires of the sizes in `specs`, and nothing if some
    have 16 bits, or in PyTorch's deterministic mode, where a run must not differ from the last one. With
    overlap="inline" the stream that computes waits for each bucket.
    Raises TopologyError, on all ranks, where the GPUs of some cannot do what `algorithm` takes.
    """
    if algorithm != "auto":
        return _open_engine(world, algorithm, overlap, accelerator), Choice(algorithm, "asked for")
    if world.size == len(world.hosts) > 1:
        why = "every host has one rank, and the backend's own all-reduce knows the network"
        return _open_engine(world, "native", overlap, accelerator), Choice("native", why)
    ours = "direct" if len(world.hosts) == 1 else "hierarchical"
    sample = _sample(specs)
    measures = bool(sample) and (ours == "hierarchical" or world.size >= FEWEST_MEASURED)
    is_deterministic = measures and internal_collectives_of(world).any_rank(
        torch.are_deterministic_algorithms_enabled()
    )
    measures = measures and not is_deterministic
    try:
        all_reduce = _open_engine(world, ours, overlap, accelerator)
    except TopologyError as error:  # on all ranks
        try:
            native = _open_engine(world, "native", overlap, accelerator)
        except TopologyError as second:
            raise in_step(TopologyError(f"{error.message}; and {second.message}", rank=world.rank)) from error
        return native, Choice("native", f"{ours} is not to be had: {error.message}")
    why = "the GPUs of all ranks reach each other's memory" if ours == "direct" else "ranks share memory within hosts"
    if is_deterministic:
        why += "; not measured, because torch.use_deterministic_algorithms(True) asks for the same bits in each run"
    if not measures:
        return all_reduce, Choice(ours, why)
    is_narrow = any(numel and dtype.itemsize == 2 for numel, dtype in specs)
    if is_narrow:
        why += ", where 16-bit values are added in fp32 (the backend's own all-reduce adds them in 16 bits)"
        return all_reduce, Choice(ours, why)
    try:
        all_reduces = {ours: all_reduce, "native": _open_engine(world, "native", overlap, accelerator)}
    except TopologyError:  # NCCL does not connect ranks that share a GPU
        return all_reduce, Choice(ours, f"{why}, and the backend does not connect")
    seconds = _measure(world, all_reduces, sample)
    best = min(all_reduces, key=lambda name: seconds[name])
    for name, other in all_reduces.items():
        if name != best:
            other.close()
    sizes = ", ".join(dict.fromkeys(f"{numel * dtype.itemsize / 2**20:.3g}" for numel, dtype in sample))
    times = ", ".join(f"{name} {taken * 1e3:.3g} ms" for name, taken in seconds.items())
    measured = f"measured for buckets of {sizes} MiB: {times}"
    if best == "native":  # whose own default is larger than that of direct
        measured += ", all with the same buckets"
    return all_reduces[best], Choice(best, f"{why}; {measured}")


def _open_engine(world: World, algorithm: str, overlap: str, accelerator: CudaAccelerator) -> OnStream:
    """Collective."""
    if algorithm == "direct":
        check_one_host(world, "algorithm='direct' takes one host")
    elif algorithm == "ring":
        check_one_host(world, "algorithm='ring' on GPUs takes one host", also="'native'")
    engine = _engine(world, algorithm, accelerator)
    return _tried_on_stream(world, engine, overlap)


def _tried_on_stream(world: World, engine: Engine, overlap: str) -> OnStream:
    """Collective: an all-reduce for `engine`, which has reduced some numbers between all ranks.

    GPUs announce access to each other's memory, and may then lose what they write there, or never see it (PCIe behind
    an IOMMU, virtual machines). Kernels may not compile. Better to find out here, where there is a way out, than in a
    backward. Raises TopologyError on all ranks if a rank finds fault.
    """
    all_reduce = OnStream(
        engine,
        in_background=overlap != "inline",
        host=world.host,
        timeout_seconds=world.timeout_seconds,
        lost_afar=internal_collectives_of(world).lost_peer,
    )
    inputs = [((torch.arange(_TRIAL_NUMEL, device="cpu") + 7 * rank) % 61).float() for rank in range(world.size)]

    def launch_all() -> None:
        engine.launch(wire)
        if (guard := engine.guard([wire])) is not None:
            guard()

    def launch() -> None:
        wire.buffer.copy_(inputs[world.rank])
        all_reduce.stream.follow()
        with _alarm(world.timeout_seconds / 2, engine.abort):  # for CUDA_LAUNCH_BLOCKING=1
            all_reduce.stream.run(launch_all)

    def compare() -> None:
        seconds = min(_TRIAL_SECONDS, world.timeout_seconds / 2)
        with _alarm(seconds, engine.abort) as has_rung:
            engine.accelerator.synchronize()
        if has_rung.is_set():
            raise TopologyError(f"{engine.algorithm}, tried out, did not come to an end within {seconds:g} s")
        if not torch.equal(wire.buffer.cpu(), torch.stack(inputs).sum(0)):
            raise TopologyError(f"{engine.algorithm}, tried out, gave a wrong sum: GPUs lose data of each other")

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
    if algorithm == "native":
        backend = _backend(world, tuple(range(world.size)), accelerator)
        return Engine(algorithm, LonelyGroup(world.rank, accelerator.device), accelerator, 1, backend)
    num_slices = num_columns(world.hosts) if algorithm == "hierarchical" else None

    def share() -> Engine:
        return Engine(algorithm, accelerator.share(world.host, world.rendezvous), accelerator, num_slices)

    engine = _together(world, share)
    if algorithm == "hierarchical":
        engine.backend = _backend(world, column_ranks(world.hosts, world.rank), accelerator)
    return engine


def _backend(world: World, ranks: tuple[int, ...] | None, accelerator: CudaAccelerator) -> Backend | None:
    """Collective among all ranks: a backend between `ranks`, one of which is this rank; None if `ranks` is None.

    Raises TopologyError on all ranks if a rank's backend cannot be had, or does not connect.
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
            with _alarm(seconds, lambda backend=backend: abort(backend)) as has_rung:  # type: ignore[misc]
                all_reduce(backend, torch.zeros(1, device=accelerator.device))
                accelerator.synchronize()
            if has_rung.is_set():
                raise TopologyError(f"no answer within {seconds:g} s (NCCL_SOCKET_IFNAME chooses the network)")

    name = world.next_channel_name()
    try:
        _together(world, open_it, "torch.distributed's backend cannot be opened: ")
        # A rank without a backend would leave the others waiting on their devices, for ever.
        _together(world, connect, "torch.distributed's backend does not connect: ")
    except BaseException:
        for backend in opened:
            abort(backend)
            shut_down(backend)
        raise
    return opened[0] if opened else None


@contextlib.contextmanager
def _alarm(seconds: float, ring: Callable[[], object]) -> Iterator[threading.Event]:
    """Call `ring` on another thread if the context lasts for longer. Gives an event that is then set."""
    has_rung = threading.Event()

    def run() -> None:
        has_rung.set()
        ring()

    timer = threading.Timer(seconds, run)
    timer.daemon = True
    timer.start()
    try:
        yield has_rung
    finally:
        timer.cancel()


def _together(world: World, open_it: Callable[[], _T], problem: str = "") -> _T:
    """Collective: the result of `open_it`. If it fails on a rank, all ranks raise a TopologyError with the same text.

    Args:
        problem: begins the text.
    """
    text, cause, opened = "", None, list[_T]()
    try:
        opened.append(open_it())
    except Exception as error:  # Triton's are of many kinds; AttributeError if PyTorch was built without NCCL
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
    world: World,
    all_reduces: Mapping[str, OnStream],
    sample: Sequence[tuple[int, torch.dtype]],
) -> dict[str, float]:
    """Collective: seconds that each all-reduce takes for the sample. Closes the all-reduces if it fails.

    They take turns. The result is the median of turns, with the same numbers on all ranks, so that all decide alike.
    """
    limit = world.timeout_seconds / 2
    seconds: dict[str, list[float]] = {name: [] for name in all_reduces}

    def give_up() -> None:
        text = "measuring did not come to an end on the device; choose one yourself, such as algorithm='native'"
        for all_reduce in all_reduces.values():
            all_reduce.fail(PeerTimeoutError(text, rank=world.rank, seconds=limit))

    try:
        wires = {name: [*all_reduce.open_wires(sample)] * _NUM_REPEATS for name, all_reduce in all_reduces.items()}
        with _alarm(limit, give_up):
            for _ in range(_NUM_WARM_UPS + _NUM_TURNS):
                for name, all_reduce in all_reduces.items():
                    seconds[name].append(_seconds_together(world, all_reduce, wires[name]))
        for all_reduce in all_reduces.values():
            all_reduce.check()
    except BaseException:
        for all_reduce in all_reduces.values():
            all_reduce.close()
        raise
    for all_reduce in all_reduces.values():
        all_reduce.settle()
    return {name: statistics.median(taken[_NUM_WARM_UPS:]) / _NUM_REPEATS for name, taken in seconds.items()}


def _seconds_together(world: World, all_reduce: OnStream, wires: Sequence[DeviceWire]) -> float:
    """Collective: seconds to reduce all these wires, started at once, on the slowest rank."""
    collectives = internal_collectives_of(world)
    collectives.barrier()
    started = time.perf_counter()
    for wire in wires:
        all_reduce.start(wire)
    all_reduce.wait()
    all_reduce.accelerator.synchronize()
    taken = torch.tensor(time.perf_counter() - started, dtype=torch.float64, device="cpu")
    return float(collectives.all_reduce(taken, "max"))
