"""The pieces of the device path by themselves: accelerators, packing, reductions, symmetric memory's arrangements."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.fake_device import COMPUTE, FakeAccelerator, FakeStream, Race
from torchring.accelerators import ACCELERATORS, accelerator_of
from torchring.devices import agreement as agreement_module
from torchring.devices import cuda, engines, symmetric_memory, watchdog
from torchring.devices.agreement import DeviceAgreement, _first_finding
from torchring.devices.cuda import CudaAccelerator, span
from torchring.devices.engines import BackendEngine, HierarchicalEngine, SharedMemoryEngine
from torchring.devices.handover import describe_handover, why_no_handover
from torchring.devices.opening import open_on_device
from torchring.devices.packing import DevicePacking, slots_of
from torchring.devices.stream import Dated, DeviceWire, OnStream
from torchring.devices.symmetric_memory import (
    CudaBlock,
    CudaGroup,
    ExchangeStore,
    LonelyGroup,
    find_problem,
    register_group,
    share_memory,
)
from torchring.errors import PeerLostError, PeerTimeoutError, TopologyError
from torchring.gradients.agreement import Timing
from torchring.gradients.message import Said
from torchring.gradients.plan import ParameterSpec, build_plan
from torchring.gradients.reduction import Reduction
from torchring.kernels.chunks import ChunkTable
from torchring.kernels.pack import NOT_FOUND
from torchring.kernels.signals import signal_bytes
from torchring.rendezvous.rendezvous import Rendezvous
from torchring.world import World

CPU = torch.device("cpu")


@pytest.fixture
def accelerator() -> Iterator[FakeAccelerator]:
    with FakeAccelerator().installed() as accelerator:
        yield accelerator


# Accelerators


def test_a_cpu_is_no_device_that_works_in_streams() -> None:
    assert accelerator_of(CPU) is None
    assert accelerator_of(torch.device("meta")) is None
    assert list(ACCELERATORS) == ["cuda"]
    with FakeAccelerator().installed() as accelerator:
        assert accelerator_of(CPU) is accelerator
    assert accelerator_of(CPU) is None


def test_ranges_are_there_while_a_profiler_looks() -> None:
    with span("torchring.unseen"):
        pass
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, span("torchring.seen"):
        pass
    names = {event.name for event in profile.events() or ()}
    assert "torchring.seen" in names
    assert "torchring.unseen" not in names


# The fake itself


def test_work_is_done_when_somebody_waits_and_in_order(accelerator: FakeAccelerator) -> None:
    stream = accelerator.open_stream()
    value = torch.zeros(8)
    stream.follow()
    stream.run(lambda: value.fill_(1.0))
    first = stream.mark()
    stream.run(lambda: value.mul_(3.0))
    last = stream.mark()
    assert not first.is_reached()
    first.hold_current()
    assert first.is_reached()
    assert not last.is_reached()
    last.hold_current()
    assert value.tolist() == [3.0] * 8
    assert last.milliseconds_since(first) >= 0
    assert accelerator.races == []


def test_what_was_fetched_is_not_there_before_its_time(accelerator: FakeAccelerator) -> None:
    stream = accelerator.open_stream()
    value, fetched = torch.full((4,), 7, dtype=torch.int32), []
    stream.follow()
    stream.run(lambda: fetched.append(accelerator.fetch(value)))
    assert fetched[0].tolist() == [-1] * 4
    accelerator.synchronize()
    assert fetched[0].tolist() == [7] * 4


@pytest.mark.parametrize("mode", ["late", "eager"])
def test_an_order_that_nothing_says_is_a_race(mode: str) -> None:
    with FakeAccelerator(mode).installed() as accelerator:
        stream = accelerator.open_stream()
        value = torch.zeros(8)

        def write() -> None:
            stream.run(lambda: value.fill_(1.0))
            stream.mark().hold_current()

        with pytest.raises(Race, match=r"writes what .* writes on compute, in no order"):
            write()
        assert len(accelerator.races) == 1


def test_a_result_that_was_not_waited_for_is_a_race(accelerator: FakeAccelerator) -> None:
    stream = accelerator.open_stream()
    value = torch.zeros(8)
    stream.follow()
    stream.run(lambda: value.fill_(1.0))
    assert value.sum() == 0  # too early
    with pytest.raises(Race, match=r"writes what aten\.sum\.default reads on compute"):
        stream.mark().hold_current()


def test_other_streams_have_to_be_joined_by_name(accelerator: FakeAccelerator) -> None:
    stream = accelerator.open_stream()
    value = torch.zeros(8)
    for streams in ((), ("another",)):
        accelerator.synchronize()
        with accelerator.on_stream("another"):
            value.fill_(5.0)
        accelerator.join(streams, ())
        stream.follow()
        stream.run(lambda: value.fill_(6.0))
        mark = stream.mark()
        if streams:
            mark.hold_current()
        else:
            with pytest.raises(Race, match="on another, in no order"):
                mark.hold_current()
    assert accelerator.current == COMPUTE


# Packing


def _packing(
    accelerator: FakeAccelerator, *, compression: str | None = None, shapes: Any = ((40,), (3, 5), (2,))
) -> Any:
    specs = [ParameterSpec(f"p{i}", s, torch.empty(s).stride(), torch.float32, CPU) for i, s in enumerate(shapes)]
    [plan] = build_plan(specs, bucket_bytes=1 << 20, compression=compression, order=range(len(specs))).buckets
    wire = torch.zeros(plan.numel, dtype=plan.wire_dtype)
    found = torch.full((2,), NOT_FOUND, dtype=torch.int32)
    stream = accelerator.open_stream()
    all_reduce: Any = SimpleNamespace(accelerator=accelerator, stream=stream, hold_for_earlier=lambda: None)
    packing = DevicePacking(0.5, plan, wire, found, 2, all_reduce, set())
    views = [wire[slot.offset : slot.offset + slot.numel].view(shapes[slot.parameter]) for slot in plan.slots]
    return SimpleNamespace(packing=packing, plan=plan, wire=wire, found=found, stream=stream, views=views)


def test_gradients_laid_out_otherwise_are_copied_by_index(accelerator: FakeAccelerator) -> None:
    here = _packing(accelerator, shapes=((3, 5), (4,), (2, 2)))
    transposed, expanded, plain = (
        torch.arange(15.0).view(5, 3).t(), torch.tensor(2.0).expand(4), torch.arange(4.0).view(2, 2)
    )  # fmt: skip
    here.packing.pack([0, 1, 2], [transposed, expanded, plain], here.views)
    accelerator.synchronize()
    for view, gradient in zip(here.views, (transposed, expanded, plain), strict=True):
        assert torch.equal(view, gradient * 0.5)
    assert here.found.tolist() == [NOT_FOUND] * 2
    here.packing.pack([0, 1, 2], [transposed * 1e38, expanded, plain], here.views)
    accelerator.synchronize()
    assert here.found.tolist() == [0, 0], "copies are looked at, too"
    results = [torch.zeros(5, 3).t(), torch.zeros(4), torch.zeros(2, 2)]
    here.packing.unpack([0, 1, 2], here.views, results)
    for result, view in zip(results, here.views, strict=True):
        assert torch.equal(result, view)


def test_a_table_for_each_set_of_parameters_and_not_ever_more(accelerator: FakeAccelerator) -> None:
    here = _packing(accelerator, shapes=tuple((1,) for _ in range(6)))
    for mask in range(1, 64):
        slots = [i for i in range(6) if mask >> i & 1]
        here.packing.pack(slots, [torch.full((1,), float(mask)) for _ in slots], [here.views[i] for i in slots])
        accelerator.synchronize()
        assert {float(here.views[i]) for i in slots} == {mask / 2}
        assert len(here.packing._tables) <= 16
    assert len(here.packing.take_packed()) == 63
    assert here.packing.take_packed() == []


def test_the_slots_of_a_chunk() -> None:
    table = ChunkTable([5000, 3], [0, 5008], wire_dtype=torch.float32, device="cpu")
    assert [slots_of([([7, 9], table)], chunk) for chunk in range(3)] == [[7], [7], [9]]
    small = ChunkTable([3], [0], wire_dtype=torch.float32, device="cpu")
    assert slots_of([([7, 9], table), ([2], small)], 0) == [7, 2]
    assert slots_of([([7, 9], table), ([2], small)], 1) == [7]


# Reductions


class _Mark:
    def __init__(self, milliseconds: float) -> None:
        self.milliseconds = milliseconds

    def is_reached(self) -> bool:
        return True

    def hold_current(self) -> None: ...

    def milliseconds_since(self, earlier: Any) -> float:
        return self.milliseconds - float(earlier.milliseconds)


@pytest.mark.parametrize(
    ("flights", "backward_end", "expected"),
    [
        ([(10, 14), (20, 30)], 26, (14, 4)),  # the last 4 ms of it stuck out
        ([(10, 14), (20, 30)], 35, (14, 0)),  # all hidden
        ([(40, 44), (44, 45)], 10, (5, 5)),  # begun long after backward: no more is exposed than there was
        ([], 10, None),
    ],
)
def test_how_long_a_reduction_took_and_how_much_of_it_showed(
    flights: list[tuple[float, float]], backward_end: float, expected: tuple[float, float] | None
) -> None:
    accelerator = SimpleNamespace(
        mark_current=lambda: _Mark(backward_end), current_stream=lambda: COMPUTE, synchronize=lambda: None
    )
    all_reduce: Any = SimpleNamespace(
        in_background=True,
        accelerator=accelerator,
        stream=SimpleNamespace(run=lambda work: work(), follow=lambda: None),
        take_dated=lambda: [Dated(_Mark(begin), _Mark(end)) for begin, end in flights],
        take_fetched=list,
        give_back=lambda fetched: None,
        check=lambda: None,
        is_dated=True,
    )
    world = World(None, 0, 1)
    timing = Timing()
    agreement = DeviceAgreement(world, all_reduce, timing, [], [])
    agreement.backward_is_over()
    current = Reduction(0, said=Said({"non_finite": [0], "overflowed": [0]}))
    agreement.agree(current, [])
    assert current.non_finite is None
    agreement.poll()
    world.close()
    assert timing.num_timed == (-1 if expected is None else 0)
    assert (timing.last_busy_ms, timing.last_exposed_ms) == pytest.approx(expected or (0, 0))


def test_who_is_named_when_several_have_found_something() -> None:
    assert _first_finding([0, 0], [0, 0]) is None
    assert _first_finding([0, 0], [5, 0]) == (None, 4)
    assert _first_finding([0, 4, 10], [5, 0, 0]) == (1, 3)


def test_what_a_reduction_found_is_found_again() -> None:
    """What is not finite goes before what may overflow, and is not so now; rows are those of the wires."""
    specs = [ParameterSpec(f"p{i}", (20,), (1,), torch.float32, CPU) for i in range(4)]
    plans = build_plan(specs, bucket_bytes=160, first_bucket_bytes=160, order=range(4)).buckets
    report = torch.full((2, 2), NOT_FOUND, dtype=torch.int32)
    nowhere = torch.zeros(1)
    wires = [DeviceWire(nowhere, nowhere, nowhere, (0, 0), report, row) for row in range(2)]
    tables = [
        ChunkTable([20, 20], [s.offset for s in plan.slots], wire_dtype=torch.float32, device="cpu") for plan in plans
    ]
    packed = [[((0, 1), table)] for table in tables]
    opened = [(plan, wire, None, 0) for plan, wire in zip(plans, wires, strict=True)]

    parameters = [torch.nn.Parameter(torch.zeros(20)) for _ in specs]

    def found(*values: list[int], bad: int | None = None) -> tuple[str, int] | None:
        reports = [torch.tensor(values, dtype=torch.int32)]
        finished: Any = SimpleNamespace(opened=opened, packed=packed, reports=reports)
        for index, parameter in enumerate(parameters):
            parameter.grad = torch.full((20,), torch.inf) if index == bad else None
        return agreement_module._find(finished, parameters)

    no = NOT_FOUND
    assert found([no, no], [no, no], bad=0) is None
    assert found([no, no], [1, 1]) == ("non_finite", 3)
    assert found([no, 0], [no, no]) is None
    assert found([no, 0], [no, no], bad=0) == ("overflowed", 0)
    assert found([no, 0], [no, no], bad=1) == ("overflowed", 1)
    assert found([no, 0], [no, no], bad=2) is None
    assert found([no, 0], [0, 0], bad=1) == ("non_finite", 2)


# Engines


def test_an_engine_of_one_rank_on_a_backend(accelerator: FakeAccelerator) -> None:
    """Has nobody to send to; an empty buffer needs no kernel."""
    backend = accelerator.open_backend(dist.HashStore(), 0, 1, 10.0)
    engine = BackendEngine(backend, accelerator)
    first, second = engine.open_wires([(5, torch.float32), (0, torch.float16)])
    assert (first.row, second.row, first.bounds) == (0, 1, (0, 5))
    assert first.report is second.report
    assert first.tensor.data_ptr() == first.buffer.data_ptr()
    first.buffer.fill_(4.0)
    assert first.tensor._version == 0  # not the engine's writes
    engine.launch(second)
    engine.close()


@pytest.mark.parametrize(("algorithm", "also"), [("ring", "'native'"), ("direct", "'hierarchical'")])
def test_kernels_that_share_memory_take_one_host(accelerator: FakeAccelerator, algorithm: str, also: str) -> None:
    world: Any = SimpleNamespace(hosts=((0,), (1,)), rank=0)
    with pytest.raises(TopologyError, match=f"algorithm='{algorithm}'.* takes one host.*{also}"):
        open_on_device(world, algorithm, "auto", [], accelerator)


class _Backend:
    """NCCL's, as far as one rank sees it."""

    def __init__(self, told: list[str], word: torch.Tensor | None = None) -> None:
        self._told, self._word = told, word

    def rank(self) -> int:
        return 0

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        assert not options.asyncOp
        self._told.append("all-reduce")

    def abort(self) -> None:
        self._told.append("abort")
        raise RuntimeError("ProcessGroup abort timed out")

    def shutdown(self) -> None:
        self._told.append("shutdown")
        raise RuntimeError("NCCL communicator was aborted")


def test_a_backend_whose_work_is_in_the_stream_has_nothing_to_wait_for() -> None:
    told: list[str] = []
    engines.all_reduce(_Backend(told), torch.zeros(1))  # type: ignore[arg-type]
    assert told == ["all-reduce"]


def test_kernels_know_of_an_abort_before_the_backend_leaves_half_a_sum(accelerator: FakeAccelerator) -> None:
    """The host may have launched all that follows."""
    told: list[str] = []
    backend: Any = _Backend(told)
    engine = BackendEngine(backend, accelerator)
    words: list[int] = []
    abort = backend.abort
    backend.abort = lambda: (words.extend(int(word) for word in accelerator.host_words), abort())
    engine.abort()
    engine.close()
    assert words == [1]
    assert told == ["abort", "shutdown"], "errors of a backend that is on its way out say nothing"


def test_nccl_is_opened_without_threads_that_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}

    def opened(*_: Any) -> None:
        seen.update(os.environ)

    opened.Options = lambda **_: SimpleNamespace()  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "ProcessGroupNCCL", opened, raising=False)
    object.__new__(CudaAccelerator).open_backend(dist.HashStore(), 0, 1, 10.0)
    assert seen["TORCH_NCCL_BLOCKING_WAIT"] == "1"
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ


def test_the_device_that_is_asked_for_a_capture_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the script's current device is another one."""
    current = [0]

    @contextlib.contextmanager
    def on(device: torch.device) -> Iterator[None]:
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[0] == 1)
    accelerator = object.__new__(CudaAccelerator)
    accelerator.device = torch.device("cuda", 1)
    assert accelerator.is_capturing()


def test_engines_abort_what_they_have() -> None:
    calls: list[str] = []
    column: Any = SimpleNamespace(abort=lambda: calls.append("column"), shutdown=lambda: calls.append("down"))
    shared: Any = SimpleNamespace(abort=lambda: calls.append("shared"), close=lambda: calls.append("closed"))
    for engine in (HierarchicalEngine(shared, column), HierarchicalEngine(shared, None)):
        engine.abort()
        engine.close()
    assert calls == ["shared", "column", "closed", "down", "shared", "closed"]


def test_the_word_that_stops_kernels_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that look at it may be queued for longer than their engine lives."""
    zeros = torch.zeros

    def zeros_not_pinned(*size: int, pin_memory: bool, **options: Any) -> torch.Tensor:
        assert pin_memory
        return zeros(*size, **options)

    monkeypatch.setattr(cuda, "_host_words", [])
    monkeypatch.setattr(torch, "zeros", zeros_not_pinned)
    accelerator = object.__new__(CudaAccelerator)
    word = accelerator.host_word().fill_(1)
    kept = weakref.ref(word)
    del word
    assert kept() is not None
    assert accelerator.host_word() == 0


@pytest.mark.parametrize("mode", ["late", "lazy"])
def test_a_device_that_is_stuck_is_told_to_stop_without_asking_it(mode: str) -> None:
    """Kernels look at a word in the host's memory."""
    with FakeAccelerator(mode).installed() as accelerator:
        engine = SharedMemoryEngine("direct", LonelyGroup(0, CPU), accelerator)
        (wire,) = engine.open_wires([(20, torch.float32)])
        stream = accelerator.open_stream()
        stream.follow()
        stream.run(lambda: wire.buffer.fill_(1.0))
        stream.mark()
        waiting = len(stream.queue)
        accelerator.calls.clear()
        stream.run(engine.abort)
        engine.abort()
        assert (accelerator.calls, len(stream.queue)) == ({}, waiting), "nothing was waited for, or queued behind"
        assert [int(word) for word in accelerator.host_words] == [1]


# Symmetric memory


class _Engine:
    """Does nothing, and notes that it was told to stop."""

    algorithm = "direct"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def launch(self, wire: DeviceWire) -> None: ...

    def guard(self, wires: Any) -> None: ...

    def abort(self) -> None:
        self.calls.append("abort")

    def close(self) -> None:
        self.calls.append("close")


class _Host:
    """Two ranks, the other of which is gone in some looks."""

    rank, ranks, size = 0, (0, 1), 2

    def __init__(self, *gone: bool) -> None:
        self._gone = list(gone)

    def check_peers(self, needed: Any) -> None:
        if self._gone.pop(0):
            raise PeerLostError("gone", rank=0, peers=needed)


def _all_reduce(
    accelerator: FakeAccelerator, host: Any = None, timeout_seconds: float = 30.0, lost_afar: Any = None
) -> tuple[OnStream, _Engine]:
    engine = _Engine()
    all_reduce = OnStream(
        engine, accelerator, in_background=True, host=host, timeout_seconds=timeout_seconds, lost_afar=lost_afar
    )
    all_reduce._watchdog._stop.set()  # tests look themselves
    report = torch.full((1, 2), NOT_FOUND, dtype=torch.int32)
    buffer = torch.zeros(4)
    all_reduce.start(DeviceWire(buffer, buffer, torch.zeros(1, dtype=torch.int64), (0, 4), report, 0))
    return all_reduce, engine


def _sealed(all_reduce: OnStream) -> torch.Tensor:
    fetched = torch.full((1, 2), -1, dtype=torch.int32)
    all_reduce.seal(fetched)
    return fetched


def test_a_rank_leaves_when_its_device_is_through(accelerator: FakeAccelerator) -> None:
    all_reduce, engine = _all_reduce(accelerator)
    fetched = _sealed(all_reduce)
    waited = accelerator.calls["synchronize"]
    all_reduce.close()
    assert accelerator.calls["synchronize"] == waited + 1
    assert engine.calls == ["close"]
    all_reduce, engine = _all_reduce(accelerator)
    fetched = _sealed(all_reduce)
    fetched.fill_(NOT_FOUND)
    waited = accelerator.calls["synchronize"]
    all_reduce.close()
    assert accelerator.calls["synchronize"] == waited, "there is nothing to wait for"


def test_a_reduction_that_was_aborted_is_not_waited_for(accelerator: FakeAccelerator) -> None:
    """Its peers will not come."""
    all_reduce, engine = _all_reduce(accelerator)
    waited = accelerator.calls["synchronize"]
    all_reduce.close()
    assert (engine.calls, accelerator.calls["synchronize"]) == (["abort", "close"], waited)


def test_a_last_reduction_that_fails_is_not_left_without_a_word(
    accelerator: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_reduce, _ = _all_reduce(accelerator)
    _sealed(all_reduce)
    monkeypatch.setattr(
        accelerator, "synchronize", lambda: all_reduce.fail(PeerLostError("rank 1 is gone", peers=(1,)))
    )
    with pytest.warns(RuntimeWarning, match="NaN.*rank 1 is gone"):
        all_reduce.close()


@pytest.mark.parametrize(("gone", "is_lost"), [((True, True), True), ((True, False, True), False), ((False,), False)])
def test_a_peer_is_lost_if_it_is_gone_at_two_looks(
    accelerator: FakeAccelerator, gone: tuple[bool, ...], *, is_lost: bool
) -> None:
    all_reduce, _ = _all_reduce(accelerator, _Host(*gone))
    _sealed(all_reduce)
    found = [all_reduce._watchdog._look() for _ in gone]
    assert [error is not None for error in found] == [False] * (len(gone) - 1) + [is_lost]
    all_reduce.close()


def test_a_peer_that_is_done_may_leave_before_its_words_have_come(accelerator: FakeAccelerator) -> None:
    all_reduce, engine = _all_reduce(accelerator, _Host(True, True, True))
    first = _sealed(all_reduce)
    assert all_reduce._watchdog._look() is None
    first.fill_(NOT_FOUND)
    assert all_reduce._watchdog._look() is None
    assert all_reduce._watchdog._look() is None
    all_reduce.close()
    assert engine.calls == ["close"]


class _Afar:
    """Another host, whose rank is gone in some looks."""

    def __init__(self, *gone: bool) -> None:
        self.looks = list(gone)

    def find(self) -> PeerLostError | None:
        return PeerLostError("gone", peers=(3,)) if self.looks.pop(0) else None


@pytest.mark.parametrize(("gone", "is_lost"), [((True, True), True), ((True, False, True), False), ((False,), False)])
def test_a_rank_of_another_host_that_dies_is_noticed(
    accelerator: FakeAccelerator, gone: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch, *, is_lost: bool
) -> None:
    """While this rank's main thread waits for its device; but not before the device has waited for a while."""
    afar = _Afar(*gone)
    all_reduce, _ = _all_reduce(accelerator, lost_afar=afar.find)
    _sealed(all_reduce)
    assert all_reduce._watchdog._look() is None
    assert len(afar.looks) == len(gone)
    monkeypatch.setattr(watchdog, "_AFAR_SECONDS", 0.0)
    found = [all_reduce._watchdog._look() for _ in gone]
    assert [error is not None for error in found] == [False] * (len(gone) - 1) + [is_lost]
    all_reduce.close()


@pytest.mark.parametrize("forked", [False, True])
def test_a_script_that_ends_leaves_nothing_to_the_destructors(accelerator: FakeAccelerator, *, forked: bool) -> None:
    """NCCL's destructor would complain. A forked child has no device."""
    all_reduce, engine = _all_reduce(accelerator)
    _sealed(all_reduce)
    waited = accelerator.calls["synchronize"]
    if forked:
        all_reduce._watchdog._pid += 1
    all_reduce._watchdog._leave()
    assert engine.calls == ([] if forked else ["abort"])
    assert accelerator.calls["synchronize"] == waited + (not forked)
    all_reduce.close()


def test_a_device_that_does_not_come_to_an_end_is_late(accelerator: FakeAccelerator) -> None:
    all_reduce, _ = _all_reduce(accelerator, timeout_seconds=0.0)
    assert all_reduce._watchdog._look() is None, "how long a backward takes is the script's business"
    _sealed(all_reduce)
    assert isinstance(all_reduce._watchdog._look(), PeerTimeoutError)
    all_reduce.close()


class _Launches:
    """In place of `prepare_direct` and `prepare_ring`: what was prepared, and how often each was launched."""

    def __init__(self) -> None:
        self.prepared: list[dict[str, Any]] = []
        self.launched: list[int] = []  # indices into `prepared`, or `guarded`
        self.guarded: list[list[int]] = []  # elements of wires

    def prepare(self, wires: Any, signals: Any, wire: torch.Tensor, **options: Any) -> Callable[[], None]:
        self.prepared.append({**options, "numel": wire.numel()})
        return functools.partial(self.launched.append, len(self.prepared) - 1)

    def guard(self, wires: list[torch.Tensor], abort: torch.Tensor) -> Callable[[], None]:
        self.guarded.append([wire.numel() for wire in wires])
        return functools.partial(self.launched.append, len(self.guarded) - 1)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> _Launches:
    found = _Launches()
    for name in ("prepare_direct", "prepare_ring"):
        monkeypatch.setattr(engines, name, found.prepare)
    monkeypatch.setattr(engines, "prepare_guard", found.guard)
    return found


class _Group:
    """The first of several ranks, whose memory no other rank has."""

    def __init__(self, size: int) -> None:
        self.ranks, self.index, self.size, self.num_processors = tuple(range(size)), 0, size, 144
        self.allocated: list[int] = []

    def allocate(self, num_bytes: int) -> CudaBlock:
        self.allocated.append(num_bytes)
        parts = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in self.ranks]
        return CudaBlock(parts, 0, None)


def test_a_launch_is_prepared_once(accelerator: FakeAccelerator, launches: _Launches) -> None:
    """For each wire and half."""
    engine = SharedMemoryEngine("direct", _Group(2), accelerator)
    first, second = engine.open_wires([(64, torch.float32), (32, torch.float32)])
    for _ in range(3):
        engine.launch(first)
        engine.launch(second)
        engine.direct(first, spread=False)
        engine.direct(first, gather=False)
    assert launches.launched == [0, 1, 2, 3] * 3
    told = [(each["numel"], each["gather"], each["spread"]) for each in launches.prepared]
    assert told == [(64, True, True), (32, True, True), (64, True, False), (64, False, True)]


def test_a_group_of_one_launches_nothing(accelerator: FakeAccelerator, launches: _Launches) -> None:
    for algorithm in ("direct", "ring"):
        engine = SharedMemoryEngine(algorithm, LonelyGroup(0, CPU), accelerator)
        (wire,) = engine.open_wires([(64, torch.float32)])
        engine.launch(wire)
        assert (wire.bounds, launches.prepared, engine.guard([wire])) == ((0, 64), [], None)


def test_what_a_backend_has_reduced_is_guarded_once(accelerator: FakeAccelerator, launches: _Launches) -> None:
    """Behind all wires of a reduction, by what is prepared once for the same wires."""
    backend = accelerator.open_backend(dist.HashStore(), 0, 1, 10.0)
    engine = BackendEngine(backend, accelerator)
    all_reduce = OnStream(engine, accelerator, in_background=True, host=None, timeout_seconds=10.0)
    wires = all_reduce.open_wires([(5, torch.float32), (3, torch.bfloat16), (0, torch.float16)])
    for used in (wires, wires, wires[1:]):
        for work in [all_reduce.start(wire) for wire in used]:
            work.wait()
    assert launches.guarded == [[5, 3, 0], [3, 0]]
    assert launches.launched == [0, 0, 1]
    all_reduce.settle()
    all_reduce.close()


_HERE = {"processes": "pid:[1]", "folder": "1:2", "trouble": ""}


def test_why_ranks_cannot_share_memory() -> None:
    def card(device: str, *unreachable: str, **handover: str) -> dict[str, Any]:
        return {
            "device": device, "unreachable": list(unreachable), "handover": {**_HERE, **handover}, "overlaps": False,
        }  # fmt: skip

    assert find_problem({0: card("a"), 1: card("b")}) == ""
    assert find_problem({0: card("a", "c"), 1: card("b")}) == "", "nobody is on c"
    same = find_problem({2: card("a"), 5: card("a")})
    assert "ranks 2 and 5 use the same GPU" in same
    assert "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES" in same
    meant = {**card("a"), "overlaps": True}
    assert find_problem({2: meant, 5: meant}) == ""
    assert find_problem({2: meant, 5: card("a")}) == same, "all ranks decide alike, whatever each was told"
    apart = find_problem({0: card("a"), 1: card("b"), 3: card("c", "b")})
    assert apart == "the GPU of rank 3 has no peer access to that of rank 1"
    contained = find_problem({2: card("a"), 3: card("b", processes="pid:[9]")})
    assert contained.startswith("ranks 2 and 3 are in different PID namespaces")


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({}, ""),
        ({"processes": "pid:[9]"}, "ranks 4 and 6 are in different PID namespaces"),
        ({"folder": "1:3"}, "ranks 4 and 6 have different folders for temporary files"),
        ({"trouble": "too long", "folder": ""}, "rank 6 has no folder for PyTorch's sockets: too long; set TMPDIR"),
    ],
)
def test_ranks_that_cannot_hand_each_other_memory(theirs: dict[str, str], said: str) -> None:
    found = why_no_handover({4: _HERE, 5: _HERE, 6: {**_HERE, **theirs}})
    assert found.startswith(said)
    assert bool(found) == bool(said)


def test_where_pytorch_puts_its_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR"):
        monkeypatch.delenv(name, raising=False)
    by_default = describe_handover()
    assert by_default == {**describe_handover(), "trouble": ""}
    assert by_default["processes"].startswith("pid:[")
    monkeypatch.setenv("TMP", str(tmp_path))
    assert describe_handover()["folder"] == f"{tmp_path.stat().st_dev}:{tmp_path.stat().st_ino}" != by_default["folder"]
    monkeypatch.setenv("TMPDIR", str(tmp_path / "absent"))
    assert "No such file" in describe_handover()["trouble"]
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    assert "too long a name" in describe_handover()["trouble"]


class _Allocations:
    """In place of `_SymmetricMemory`."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.is_full = threading.local()  # the GPU of this thread's rank
        self.environment: dict[str, str] = {}

    def empty_strided_p2p(self, *args: Any) -> torch.Tensor:
        self.calls.append(args)
        self.environment = dict(os.environ)
        if getattr(self.is_full, "now", False):
            raise torch.OutOfMemoryError("CUDA driver error: out of memory")
        return torch.ones(args[0], dtype=args[2])

    def rendezvous(self, tensor: torch.Tensor, name: str) -> _Allocations:
        self.calls.append(name)
        return self

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(sizes, 10 + rank, dtype=dtype)


def test_memory_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """From PyTorch's allocator itself."""
    allocations = _simulated_memory(monkeypatch)
    emptied = mock.Mock(side_effect=lambda: allocations.calls.append("emptied"))
    monkeypatch.setattr(torch.cuda, "empty_cache", emptied)
    block = _cuda_group(dist.HashStore(), 0, 1).allocate(40)
    assert allocations.calls == ["emptied", ((48,), (1,), torch.uint8, CPU), "torchring/x"]
    assert [part.tolist() for part in block.parts] == [[0] * 40]
    assert block.own is block.parts[0]


def _simulated_memory(monkeypatch: pytest.MonkeyPatch) -> _Allocations:
    from torch._C import _distributed_c10d as c10d

    allocations = _Allocations()
    monkeypatch.setattr(c10d, "_SymmetricMemory", allocations)
    monkeypatch.setattr(symmetric_memory, "register_group", mock.Mock())
    for name, stub in (("device", mock.MagicMock()), ("synchronize", mock.Mock()), ("empty_cache", mock.Mock())):
        monkeypatch.setattr(torch.cuda, name, stub)
    return allocations


def _cuda_group(store: dist.Store, index: int, size: int, **options: Any) -> CudaGroup:
    """Its rank `index`, a thread of this process."""
    host: Any = SimpleNamespace(ranks=tuple(range(size)), index=index)
    rendezvous = Rendezvous(store, index, size, 10.0)
    return CudaGroup(host, rendezvous, CPU, "x", 132, **{"is_isolated": False, **options})


def test_memory_that_one_rank_lacks_is_refused_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would wait for that rank in symmetric memory."""
    allocations, store = _simulated_memory(monkeypatch), dist.HashStore()

    def allocate(rank: int) -> list[str]:
        group, found = _cuda_group(store, rank, 2), []
        for is_full in (False, True, False):
            allocations.is_full.now = is_full and rank == 1
            try:
                found.append(str(int(group.allocate(3 << 20).parts[1 - rank][0])))
            except TopologyError as error:
                found.append(error.message)
        return found

    with ThreadPoolExecutor(2) as threads:
        first, second = (pending.result(20) for pending in [threads.submit(allocate, rank) for rank in range(2)])
    refused = "rank 1 cannot allocate 3.0 MiB of GPU memory for buckets: CUDA driver error: out of memory"
    assert first == ["11", refused, "11"]
    assert second == ["10", refused, "10"]
    assert allocations.calls.count("torchring/x") == 4, "nobody waits where somebody has nothing to show"


def test_multicast_is_not_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    allocations = _simulated_memory(monkeypatch)
    for options, expected in (
        ({}, {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}),
        (
            {"is_isolated": True},
            {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"},
        ),
    ):
        _cuda_group(dist.HashStore(), 0, 1, **options).allocate(16)
        assert {name: v for name, v in allocations.environment.items() if name.startswith("TORCH_SYMM_MEM")} == expected
        assert not any(name.startswith("TORCH_SYMM_MEM") for name in os.environ)


def test_the_smallest_gpu_and_ranks_that_share_one_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the number of blocks, which is the same on all ranks."""
    gpus = {0: ("a", 132), 1: ("b", 60), 2: ("b", 60)}
    groups = mock.Mock()
    monkeypatch.setattr(symmetric_memory, "CudaGroup", groups)
    monkeypatch.setattr(symmetric_memory, "_unreachable", lambda device: [])
    monkeypatch.setattr(symmetric_memory, "describe_handover", lambda: _HERE)
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    store = dist.HashStore()
    here = threading.local()
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(uuid=gpus[here.rank][0], multi_processor_count=gpus[here.rank][1]),
    )

    def share(rank: int) -> None:
        here.rank = rank
        host: Any = SimpleNamespace(ranks=(0, 1, 2), size=3, rank=rank)
        share_memory(host, Rendezvous(store, rank, 3, 10.0), torch.device("cuda", 0))

    with ThreadPoolExecutor(3) as threads:
        for pending in [threads.submit(share, rank) for rank in range(3)]:
            pending.result(20)
    assert [call.args[-1] for call in groups.call_args_list] == [30] * 3


@pytest.mark.parametrize(("processors", "blocks"), [(144, 24), (132, 22), (58, 9), (3, 1)])
def test_waiting_blocks_take_a_share_of_the_gpu(
    accelerator: FakeAccelerator, launches: _Launches, processors: int, blocks: int
) -> None:
    group = _Group(2)
    group.num_processors = processors
    engine = SharedMemoryEngine("direct", group, accelerator)
    engine.launch(engine.open_wires([(64, torch.float32)])[0])
    assert launches.prepared[-1]["max_blocks"] == blocks
    assert group.allocated[0] == signal_bytes(2, blocks)


def test_exchanges_of_a_group_are_counted_by_the_group() -> None:
    """The processes have made other exchanges before, but not equally many. PyTorch calls the store from C++."""
    shared = dist.HashStore()
    here, there = (ExchangeStore(shared, 5.0) for _ in range(2))
    ours, theirs = (dist.PrefixStore("CUDASymmetricMemory", store) for store in (here, there))
    for exchange in range(3):
        at = exchange * 2, exchange * 3 + 7
        ours.set(f"{at[0]}/0", bytes([0, 255, exchange]))  # PyTorch sends the bytes of a struct
        theirs.set(f"{at[1]}/1", bytes([128, exchange]))
        ours.wait([f"{at[0]}/1"])
        assert ours.get(f"{at[0]}/1") == bytes([128, exchange])
        assert theirs.get(f"{at[1]}/0") == bytes([0, 255, exchange])
        assert ours.multi_get([f"{at[0]}/{rank}" for rank in range(2)]) == [
            ours.get(f"{at[0]}/0"),
            bytes([128, exchange]),
        ]
    impatient = ExchangeStore(shared, 0.05)
    assert impatient.timeout == timedelta(seconds=0.05), "barriers take it"
    with pytest.raises(RuntimeError, match=r"[Tt]imeout"):
        dist.PrefixStore("CUDASymmetricMemory", impatient).wait(["9/2"])


def test_ranks_of_a_group_meet_at_barriers_of_symmetric_memory() -> None:
    """`StoreExchange::barrier` of 2.13 calls `Store::barrier`, under a key without a rank."""

    def meet(store: dist.Store, key: str) -> None:
        if hasattr(dist.Store, "barrier"):
            dist.Store.barrier(store, key, 2)
            return
        if dist.Store.add(store, f"{key}/num_members", 1) == 2:
            dist.Store.set(store, f"{key}/last_member", "<val_ignored>")
        dist.Store.wait(store, [f"{key}/last_member"], store.timeout)

    shared = dist.HashStore()
    here, there = (ExchangeStore(shared, 5.0) for _ in range(2))
    with ThreadPoolExecutor(2) as threads:
        for exchange in range(2):
            pending = [
                threads.submit(meet, here, f"CUDASymmetricMemory/{exchange + 8}"),
                threads.submit(meet, there, f"CUDASymmetricMemory/{exchange + 11}"),
            ]
            assert [future.result() for future in pending] == [None, None]
    with pytest.raises(RuntimeError, match=r"[Tt]imeout"):  # nobody else comes
        meet(ExchangeStore(dist.PrefixStore("another group", shared), 0.05), "CUDASymmetricMemory/8")


def test_a_rank_that_is_alone_needs_nobody() -> None:
    group = share_memory(None, None, CPU)
    assert isinstance(group, LonelyGroup)
    assert (group.ranks, group.index, group.size) == ((0,), 0, 1)
    block = group.allocate(48)
    assert len(block.parts) == 1
    assert block.own is block.parts[0]
    assert block.own.tolist() == [0] * 48


def test_a_group_is_found_by_name_without_a_default_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """As symmetric memory looks for it."""
    from torch._C import _distributed_c10d as c10d

    monkeypatch.setattr(torch, "__version__", "2.13.0")
    store = ExchangeStore(dist.HashStore(), 5.0)
    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5.0))
    with mock.patch.object(c10d._SymmetricMemory, "set_group_info") as told:
        group = register_group("torchring/a test", store, gloo)
    told.assert_called_once_with("torchring/a test", 0, 1, store)
    found = c10d._resolve_process_group("torchring/a test")
    assert found.group_name == group.group_name == "torchring/a test"
    assert (found.rank(), found.size()) == (0, 1)
    assert found.get_group_store() is store
    assert not dist.is_initialized()
    del group, found
    with pytest.raises(RuntimeError, match="destroyed"):  # so whoever needs it keeps it
        c10d._resolve_process_group("torchring/a test")


def test_no_release_after_those_that_need_it_is_told_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would compare how often each process has allocated, since it started."""
    from torch._C import _distributed_c10d as c10d

    monkeypatch.setattr(torch, "__version__", "2.14.0+cu130")
    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5.0))
    with mock.patch.object(c10d._SymmetricMemory, "set_group_info") as told:
        register_group("torchring/another test", dist.HashStore(), gloo)
    told.assert_not_called()


def test_the_fake_keeps_to_the_contract() -> None:
    """Methods of the real accelerator, stream and mark have the fakes' names and parameters."""
    import inspect

    from tests.support.fake_device import FakeMark
    from torchring.devices.cuda import CudaMark, CudaStream

    for real, fake in ((CudaAccelerator, FakeAccelerator), (CudaStream, FakeStream), (CudaMark, FakeMark)):
        for name, method in inspect.getmembers(real, inspect.isfunction):
            if not name.startswith("_"):
                theirs = inspect.signature(getattr(fake, name)).parameters
                assert list(theirs) == list(inspect.signature(method).parameters), name
