"""A device that is none: CPU tensors, and a communication stream that is as late as it is allowed to be.

    with FakeAccelerator().installed() as it: torchring.wrap(...)      under TRITON_INTERPRET=1, see run_ranks(env=)

What Python does in `Stream.run` is done at once, as on a GPU; the work that it calls for (kernels, in-place operations,
the backend's collectives) is queued, and done when somebody waits for it. So whoever reads a result without waiting
reads what was there before, and whoever gives memory back too soon has it overwritten.

What the compute stream does is noted, byte range by byte range. A queued piece of work that touches what the compute
stream wrote (or writes what it read) since the communication stream followed it last is a race, as it would be on a
GPU: a `follow` or a `hold_current` is missing, or memory was used again. It raises `Race`, and stays in `races`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from torchring.accelerators import ACCELERATORS, _open
from torchring.devices import packing
from torchring.devices.symmetric_memory import LonelyGroup
from torchring.errors import TopologyError
from torchring.kernels import lazy, reference
from torchring.kernels.chunks import ChunkTable
from torchring.kernels.lazy import Kernel
from torchring.memory.host import HostGroup
from torchring.rendezvous.rendezvous import Rendezvous

COMPUTE = "compute"  # what current_stream() says unless a test says otherwise

# Tensor arguments of kernels that are written, and those that belong to a protocol of their own.
_SHARED = {"wires", "signals", "abort", "addresses"}


class Race(AssertionError):  # noqa: N818 - it says what happened
    """Two streams touched the same memory, one of them wrote, and nothing says in which order."""


class Access(NamedTuple):
    begin: int
    end: int
    writes: bool


class _Noted(NamedTuple):
    clock: int
    stream: object
    access: Access
    what: str


@dataclass
class _Task:
    run: Callable[[], object]
    accesses: Callable[[], list[Access]]
    what: str
    seen: dict[object, int] = field(default_factory=dict)


class FakeMark:
    """See `torchring.devices.cuda.CudaMark`."""

    def __init__(self, stream: FakeStream | None, accelerator: FakeAccelerator) -> None:
        self._stream = stream
        self._accelerator = accelerator
        self.seen = accelerator.seen_from_current() if stream is None else dict(stream.seen)
        self.reached = False
        self._at = 0.0

    def reach(self) -> None:
        self._at = time.perf_counter()
        self.reached = True

    def is_reached(self) -> bool:
        return self.reached

    def hold_current(self) -> None:
        if self._stream is not None:
            self._accelerator.hold(self._stream, self)
        elif isinstance(self._accelerator.current, FakeStream):
            self._accelerator.current.follow_until(self.seen)

    def milliseconds_since(self, earlier: Any) -> float:
        assert all((self.reached, earlier.reached)), "a mark that is not reached has no time"
        return float((self._at - earlier._at) * 1e3)


class FakeStream:
    """See `torchring.devices.cuda.CudaStream`."""

    def __init__(self, accelerator: FakeAccelerator) -> None:
        self.accelerator = accelerator
        self.queue: deque[_Task] = deque()
        self.seen: dict[object, int] = {}  # by stream: its clock when this one followed it last

    def follow(self) -> None:
        current = self.accelerator.current
        if not isinstance(current, FakeStream):
            self.follow_until(self.accelerator.seen_from_current())
        elif current is not self:
            self.accelerator.hold(current, current.mark(), waiting=self)

    def follow_until(self, seen: dict[object, int]) -> None:
        if self.accelerator._holds:
            self.call(self.accelerator.wait_for_holds, list, "follow")
        self.seen |= seen
        self.accelerator.forget_before(min([self.seen[COMPUTE], *(task.seen.get(COMPUTE, 0) for task in self.queue)]))

    def run(self, work: Callable[[], None]) -> None:
        with self.accelerator.on_stream(self), self.accelerator.watching():
            work()

    def mark(self) -> FakeMark:
        mark = FakeMark(self, self.accelerator)
        self.call(mark.reach, list, "mark")
        return mark

    def call(self, run: Callable[[], object], accesses: Callable[[], list[Access]], what: str) -> None:
        """Put work here."""
        task = _Task(run, accesses, what, dict(self.seen))
        if self.accelerator.mode == "eager":
            self._do(task)
        else:
            self.queue.append(task)

    def do_until(self, mark: FakeMark) -> None:
        while not mark.reached:
            self._do(self.queue.popleft())

    def do_all(self) -> None:
        while self.queue:
            self._do(self.queue.popleft())

    def _do(self, task: _Task) -> None:
        if self.accelerator.mode in ("late", "eager"):
            self.accelerator.check_order(task)
        with self.accelerator.executing():
            task.run()


class _OfThread(threading.local):
    current: object = COMPUTE
    is_executing = False
    is_watched = False


@dataclass(eq=False)
class FakeAccelerator:
    """See `torchring.devices.cuda.CudaAccelerator`."""

    # "late"; "eager", in which work is done when it is called for, so that backward waits for peers; or "lazy": not
    # even `hold_current` does it, but whoever touches a wire afterwards, so that the host goes on while the device
    # waits for peers. Races are looked for in the first two.
    mode: str = "late"
    problem: str = ""  # why memory cannot be shared, if it cannot
    # "shared"; "apart", where ranks never see what others write to their memory, so that kernels never meet; or
    # "lossy", where signals arrive and wires do not.
    memory: str = "shared"
    own_devices: bool = False  # each rank has its own, so that all-reduces are measured
    unregistered: str = ""  # why the backend registers no memory, if it does not

    def __post_init__(self) -> None:
        assert self.mode in ("late", "eager", "lazy"), self.mode
        self.device = torch.device("cpu")
        self.registered: list[int] = []
        self.capturing = False
        self.fault = ""
        self.calls: Counter[str] = Counter()  # of methods; of `hold_current` by who computes
        self.races: list[str] = []
        self.host_words: list[torch.Tensor] = []
        self._of_thread = _OfThread()
        self.clock = 0
        self.streams: list[FakeStream] = []
        self._noted: list[_Noted] = []
        self._joined: dict[object, dict[object, int]] = {}  # by stream that computes: what it has waited for
        self._holds: list[Callable[[], object]] = []  # mode "lazy": waits of the compute stream, and kernels behind
        self._wires: set[tuple[int, int]] = set()  # where results come
        self._pointed_at: Sequence[torch.Tensor] = ()  # by the last column of addresses

    @property
    def current(self) -> object:
        return self._of_thread.current

    @current.setter
    def current(self, stream: object) -> None:
        self._of_thread.current = stream

    @property
    def is_executing(self) -> bool:
        return self._of_thread.is_executing

    # What torchring asks of it

    def open_stream(self) -> Any:
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    def current_stream(self) -> object:
        return self.current

    def mark_current(self) -> FakeMark:
        if isinstance(self.current, FakeStream):
            return self.current.mark()
        mark = FakeMark(None, self)
        mark.reach()
        return mark

    def join(self, streams: Iterable[object], tensors: Iterable[torch.Tensor]) -> None:
        self.calls["join"] += 1
        for stream in streams:
            self._joined.setdefault(self.current, {})[stream] = self.clock

    def seen_from_current(self) -> dict[object, int]:
        """Up to when work of each stream that computes comes before what the current stream does next."""
        return {**self._joined.get(self.current, {}), self.current: self.clock}

    def is_capturing(self) -> bool:
        return self.capturing

    def fetch(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        with self.executing():
            assert into is None or -1 not in into
            copy = torch.full_like(tensor, -1) if into is None else into.fill_(-1)
        self._call(lambda: copy.copy_(tensor), lambda: [_access(tensor, writes=False)], "fetch")
        return copy

    def host_word(self) -> torch.Tensor:
        with self.executing():
            self.host_words.append(torch.zeros(1, dtype=torch.int32, device="cpu"))
        return self.host_words[-1]

    def is_host_word(self, tensor: torch.Tensor) -> bool:
        """Whether the host and the device use it at the same time, on purpose and without any order."""
        return any(tensor.data_ptr() == word.data_ptr() for word in self.host_words)

    def synchronize(self) -> None:
        self.calls["synchronize"] += 1
        self._wires.clear()  # their memory may be used for something else from now on
        for stream in self.streams:
            stream.do_all()
            stream.seen = dict.fromkeys({COMPUTE, *(noted.stream for noted in self._noted)}, self.clock)

    def find_fault(self) -> str:
        return self.fault

    def share(self, host: HostGroup | None, rendezvous: Rendezvous | None) -> Any:
        if self.problem:
            raise TopologyError(self.problem)
        if host is None or host.size == 1:
            return LonelyGroup(0 if host is None else host.rank, self.device)
        return _Group(host, self.memory, shares_devices=not self.own_devices)

    def open_backend(self, store: dist.Store, rank: int, size: int, timeout_seconds: float) -> Any:
        group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_seconds))
        return FakeBackend(self, group)

    def register(self, rank: int, backend: Any) -> Any:
        if self.unregistered:
            raise RuntimeError(self.unregistered)
        return _RegisteredGroup(rank, self, backend)

    # Scenery

    @contextlib.contextmanager
    def installed(self) -> Iterator[FakeAccelerator]:
        """The accelerator of torch.device("cpu"), in this thread, for what is opened in here."""
        launch, point_at = Kernel.launch, ChunkTable.point_at
        in_torch = mock.patch.multiple(packing, prepare_pack=_pack_in_torch, prepare_unpack=_unpack_in_torch)
        accelerator = self

        def launch_later(kernel: Kernel, programs: int, *args: Any, **options: Any) -> None:
            kept = accelerator._pointed_at if accelerator.mode == "lazy" else None

            def run(kept: object = kept) -> None:
                with accelerator.executing():
                    launch(kernel, programs, *args, **options)

            if kernel.fn.__name__ != "_pack_kernel":
                accelerator.results_come_to(*(arg for arg in args if isinstance(arg, torch.Tensor)))
            accelerator._call(run, lambda: _accesses_of(kernel, args, options), kernel.fn.__name__)

        def point_at_noted(table: ChunkTable, tensors: Sequence[torch.Tensor]) -> None:
            if accelerator.mode == "lazy":
                accelerator._pointed_at = tensors
            point_at(table, tensors)

        with (
            mock.patch.dict(_open, clear=True),
            mock.patch.dict(ACCELERATORS, {"cpu": lambda device: self}),
            mock.patch.object(Kernel, "launch", launch_later),
            mock.patch.object(ChunkTable, "point_at", point_at_noted),
            contextlib.nullcontext() if lazy.INTERPRETED else in_torch,
            self.watching(),
        ):
            yield self

    def on_stream(self, stream: object) -> AbstractContextManager[None]:
        """With another stream the current one. Streams that are no `FakeStream` compute at once."""
        return self._with("current", stream)

    def executing(self) -> AbstractContextManager[None]:
        """What is done in here is done, and not noted."""
        return self._with("is_executing", True)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """What this thread asks of torch in here is noted, or queued."""
        if self._of_thread.is_watched:
            yield
            return
        with self._with("is_watched", True), _Watch(self):
            yield

    @contextlib.contextmanager
    def _with(self, name: str, value: object) -> Iterator[None]:
        before = getattr(self._of_thread, name)
        setattr(self._of_thread, name, value)
        try:
            yield
        finally:
            setattr(self._of_thread, name, before)

    def _call(self, run: Callable[[], object], accesses: Callable[[], list[Access]], what: str) -> None:
        if not self.is_executing and isinstance(self.current, FakeStream):
            self.current.call(run, accesses, what)
            return
        if not self.is_executing and self._holds:
            self._holds.append(run)
            return
        if not self.is_executing:
            self.check_order(_Task(run, accesses, what, self.seen_from_current()))
            self.note(accesses(), what)
        run()

    # Mode "lazy"

    def hold(self, stream: FakeStream, mark: FakeMark, waiting: object = None) -> None:
        waiting = waiting or self.current
        if isinstance(waiting, FakeStream):  # a stream waits for a stream: later, and then for what that one has seen
            if waiting is not stream:
                waiting.call(lambda: stream.do_until(mark), list, "hold")
                seen = mark.seen, waiting.seen
                waiting.seen = {key: max(each.get(key, 0) for each in seen) for key in seen[0] | seen[1]}
            return
        self.calls["hold_current"] += 1
        if self.mode == "lazy":
            self._holds.append(functools.partial(stream.do_until, mark))
        else:
            stream.do_until(mark)

    def results_come_to(self, *tensors: torch.Tensor) -> None:
        self._wires |= {_access(tensor, writes=True)[:2] for tensor in tensors if not self.is_host_word(tensor)}

    def wait_for_holds(self, touched: Iterable[Access] | None = None) -> None:
        """If somebody is about to touch a wire; without `touched`, anyhow."""
        if self._holds and (touched is None or any(a.begin < e and b < a.end for a in touched for b, e in self._wires)):
            holds, self._holds = self._holds, []
            for hold in holds:
                hold()

    # Who may touch what

    def note(self, accesses: Iterable[Access], what: str) -> None:
        self.clock += 1
        self._noted.extend(_Noted(self.clock, self.current, a, what) for a in accesses if a.end > a.begin)

    def forget_before(self, clock: int) -> None:
        self._noted = [noted for noted in self._noted if noted.clock > clock or noted.stream != COMPUTE]

    def check_order(self, task: _Task) -> None:
        mine = task.accesses()
        for clock, stream, theirs, what in self._noted:
            if clock <= task.seen.get(stream, 0):
                continue
            for access in mine:
                overlap = access.begin < theirs.end and theirs.begin < access.end
                if overlap and (access.writes or theirs.writes):
                    verbs = ["writes" if touch.writes else "reads" for touch in (access, theirs)]
                    self.races.append(f"{task.what} {verbs[0]} what {what} {verbs[1]} on {stream}, in no order")
                    raise Race(self.races[-1])


class _Group:
    """The ranks of this host and their memory. See `torchring.devices.symmetric_memory.CudaGroup`."""

    num_processors = 144
    is_mapped = True
    note = ""

    def __init__(self, host: HostGroup, memory: str, *, shares_devices: bool) -> None:
        self.shares_devices = shares_devices
        self.ranks, self.index, self.size = host.ranks, host.index, host.size
        self._host = host
        self._memory = memory

    def allocate(self, num_bytes: int) -> Any:
        block = self._host.allocate(num_bytes)
        memory, self._memory = self._memory, self._memory.replace("lossy", "apart")  # the pads come first
        if memory != "apart":
            return block
        parts = [part if part is block.own else torch.zeros_like(part) for part in block.parts]
        return replace(block, parts=tuple(parts))

    def release(self, block: Any) -> None:
        pass


class _RegisteredGroup(LonelyGroup):
    """See `torchring.devices.nccl.RegisteredGroup`."""

    is_mapped = True

    def __init__(self, rank: int, accelerator: FakeAccelerator, backend: FakeBackend) -> None:
        super().__init__(rank, accelerator.device)
        self._accelerator = accelerator
        self._backend = backend

    def allocate(self, num_bytes: int) -> Any:
        block = super().allocate(num_bytes)
        self._accelerator.registered.append(num_bytes)
        return block

    def release(self, block: Any) -> None:
        assert self._backend.is_open
        self._accelerator.registered.remove(block.parts[0].nbytes)


class FakeBackend:
    """Gloo, on whichever stream is current, and as unkind as NCCL.

    A collective does not end if a peer is gone, but when somebody aborts it, and
    then leaves numbers that look like any others.
    """

    def __init__(self, accelerator: FakeAccelerator, group: Any) -> None:
        self._accelerator = accelerator
        self._group = group
        self._aborted = threading.Event()
        self.is_open = True

    def rank(self) -> int:
        return int(self._group.rank())

    def size(self) -> int:
        return int(self._group.size())

    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any) -> None:
        self._call(self._group.allreduce, tensors[0], list(tensors), options)

    def broadcast(self, tensors: Sequence[torch.Tensor], options: Any) -> None:
        self._call(self._group.broadcast, tensors[0], list(tensors), options)

    def _allgather_base(self, output: torch.Tensor, own: torch.Tensor, options: Any) -> None:
        self._call(self._group._allgather_base, output, output, own, options)

    def alltoall_base(self, output: torch.Tensor, *args: Any) -> None:
        self._call(self._group.alltoall_base, output, output, *args)

    def abort(self) -> None:
        self._accelerator.calls["abort"] += 1
        self._aborted.set()
        self.is_open = False

    def shutdown(self) -> None:
        self._group.shutdown()
        self.is_open = False

    def _call(self, start: Callable[..., Any], written: torch.Tensor, *args: Any) -> None:
        assert not args[-1].asyncOp

        def run() -> None:
            work = None
            with contextlib.suppress(RuntimeError):
                work = start(*args)
            while work is not None and not work.is_completed() and not self._aborted.is_set():
                time.sleep(2e-4)
            if work is None or not work.is_completed() or not work.is_success():
                assert self._aborted.wait(60), "nobody has told the backend to stop"
                written.random_(100)

        self._accelerator.results_come_to(written)
        accesses = [_access(written, writes=True)]
        self._accelerator._call(run, lambda: accesses, "backend")


class _Watch(TorchDispatchMode):
    """Every operation of torch: noted if it is the compute stream's, queued if it writes and is the other's."""

    def __init__(self, accelerator: FakeAccelerator) -> None:
        super().__init__()
        self._accelerator = accelerator
        self._thread = threading.get_ident()  # Gloo's threads copy under the modes of whoever called it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, accelerator = kwargs or {}, self._accelerator
        if accelerator.is_executing or threading.get_ident() != self._thread:
            return func(*args, **kwargs)
        read, written = _operands(func, args, kwargs)
        if any(map(accelerator.is_host_word, written)) or func.overloadpacket is torch.ops.aten.set_:
            return func(*args, **kwargs)
        if isinstance(accelerator.current, FakeStream):
            if not written:
                result = func(*args, **kwargs)
                if read and (new := _new(func, result)):  # else on the host, such as addresses before they are sent
                    accelerator.current.call(
                        lambda: [
                            old.copy_(now) for old, now in zip(new, _new(func, func(*args, **kwargs)), strict=True)
                        ],
                        lambda: [_access(tensor, writes=True) for tensor in new],
                        str(func),
                    )
                return result
            accelerator.results_come_to(*written)
            accesses = [_access(tensor, writes=True) for tensor in written]
            accelerator.current.call(lambda: func(*args, **kwargs), lambda: accesses, str(func))
            return args[0] if func._schema.returns else None
        touched = [_access(tensor, writes=False) for tensor in read]
        touched += [_access(tensor, writes=True) for tensor in written]
        accelerator.wait_for_holds(touched)
        result = func(*args, **kwargs)
        accelerator.note([*touched, *(_access(tensor, writes=True) for tensor in _new(func, result))], str(func))
        return result


def _operands(func: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tensors that an operation reads, and those that it writes in place."""
    read: list[torch.Tensor] = []
    written: list[torch.Tensor] = []
    if "_like." in str(func):  # reads nothing but the size
        return read, written
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        tensors = [t for t in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(t, torch.Tensor)]
        if argument.alias_info is None:
            read += tensors
        elif argument.alias_info.is_write:
            written += tensors
    return read, written


def _new(func: Any, result: Any) -> list[torch.Tensor]:
    """Results that are no views."""
    results = result if isinstance(result, (list, tuple)) else [result]
    if len(results) != len(func._schema.returns):  # one list of tensors
        return []
    pairs = zip(results, func._schema.returns, strict=True)
    return [value for value, kind in pairs if isinstance(value, torch.Tensor) and kind.alias_info is None]


def _access(tensor: torch.Tensor, *, writes: bool) -> Access:
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return Access(0, 0, writes)
    length = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    begin = tensor.data_ptr()
    return Access(begin, begin + length * tensor.element_size(), writes)


def _accesses_of(kernel: Kernel, args: Sequence[Any], options: dict[str, Any]) -> list[Access]:
    """What a launch touches, in its tensors and behind its column of addresses."""
    names = inspect.signature(kernel.fn).parameters
    known = {name: value for name, value in options.items() if name in names}
    bound = inspect.signature(kernel.fn).bind_partial(*args, **known).arguments
    packs = bound.get("PACK")
    written = {True: {"wire", "found"}, False: set(), None: names}[packs]
    accesses = [
        _access(value, writes=name in written)
        for name, value in bound.items()
        if isinstance(value, torch.Tensor) and name not in _SHARED
    ]
    if packs is not None:
        itemsize = bound["GRADIENT"].primitive_bitwidth // 8
        for address, count in zip(bound["address"].tolist(), bound["numel"].tolist(), strict=True):
            accesses.append(Access(address, address + count * itemsize, not packs))
    return accesses


def _pack_in_torch(wire: torch.Tensor, table: ChunkTable, *_: Any, scale: float, **__: Any) -> Any:
    """Where nothing interprets kernels. Looks for nothing that is not finite."""

    def pack(tensors: Sequence[torch.Tensor]) -> None:
        table.point_at(tensors)
        reference.pack(tensors, _views_like(tensors, wire, table), scale=scale)

    return pack


def _unpack_in_torch(wire: torch.Tensor, table: ChunkTable, *_: Any) -> Any:
    def unpack(tensors: Sequence[torch.Tensor]) -> None:
        table.point_at(tensors)
        reference.unpack(_views_like(tensors, wire, table), tensors)

    return unpack


def _views_like(tensors: Sequence[torch.Tensor], wire: torch.Tensor, table: ChunkTable) -> list[torch.Tensor]:
    """The place in the wire of each tensor, laid out as it is."""
    firsts = {i: table.wire_offset[row] for row, i in reversed([*enumerate(table.tensor_index.tolist())])}
    base = wire.storage_offset()
    return [wire.as_strided(t.size(), t.stride(), base + int(firsts.get(i, 0))) for i, t in enumerate(tensors)]
