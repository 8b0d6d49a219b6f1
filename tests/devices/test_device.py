"""The pieces of the device path by themselves: accelerators, packing, reductions, symmetric memory's arrangements."""

import contextlib
import ctypes
import gc
import inspect
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.fake_device import FakeAccelerator, FakeMark, FakeStream
from tests.support.kernels import table_of
from torchring.devices import agreement as agreement_module
from torchring.devices import cuda, nccl, symmetric_memory, watchdog
from torchring.devices.agreement import DeviceAgreement, _first_finding
from torchring.devices.cuda import CudaAccelerator, CudaMark, CudaStream
from torchring.devices.engines import DeviceWire, Engine
from torchring.devices.handover import describe_handover
from torchring.devices.opening import open_on_device
from torchring.devices.stream import Dated, OnStream
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
from torchring.gradients.plan import ParameterSpec, build_plan
from torchring.kernels.pack import NOT_FOUND
from torchring.rendezvous.rendezvous import Rendezvous

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def accelerator() -> Iterator[FakeAccelerator]:
    with FakeAccelerator().installed() as accelerator:
        yield accelerator


# Reductions


@pytest.mark.parametrize(
    ("flights", "backward_end", "expected"),
    [
        ([(10, 14), (20, 30)], 26, (14, 4)),  # the last 4 ms of it stuck out
        ([(10, 14), (20, 30)], 35, (14, 0)),  # all hidden
        ([(40, 44), (44, 45)], 10, (5, 5)),  # begun long after backward: no more is exposed than there was
        ([], 10, (0, 0)),
    ],
)
def test_how_long_a_reduction_took_and_how_much_of_it_showed(
    flights: list[tuple[float, float]], backward_end: float, expected: tuple[float, float]
) -> None:
    def mark(at: float) -> Any:
        return SimpleNamespace(at=at, milliseconds_since=lambda earlier: at - earlier.at)

    agreement: Any = SimpleNamespace(_timing=Timing())
    finished: Any = SimpleNamespace(
        works=[Dated(mark(begin), mark(end)) for begin, end in flights], backward_end=mark(backward_end)
    )
    DeviceAgreement._take_time(agreement, finished)
    assert (agreement._timing.last_busy_ms, agreement._timing.last_exposed_ms) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("report", "overflows", "expected"),
    [
        ([NOT_FOUND, NOT_FOUND], True, None),
        ([1, 0], True, ("non_finite", 1)),  # what is not finite on this rank goes first
        ([NOT_FOUND, 0], False, None),
        ([NOT_FOUND, 0], True, ("overflowed", 1)),
    ],
)
def test_what_may_overflow_in_the_sum_is_told_only_if_it_has(report: list[int], overflows: bool, expected: Any) -> None:
    specs = [ParameterSpec(f"p{i}", (20,), (1,), torch.float32, CPU) for i in range(2)]
    (plan,) = build_plan(specs, bucket_bytes=1 << 20, order=range(2)).buckets
    packed = [((0, 1), table_of([20, 20], [s.offset for s in plan.slots]))]
    reports = [torch.tensor([report], dtype=torch.int32)]
    finished: Any = SimpleNamespace(opened=[(plan, SimpleNamespace(row=0), None, 0)], packed=[packed], reports=reports)
    parameters = [torch.nn.Parameter(torch.zeros(20)) for _ in specs]
    for parameter, value in zip(parameters, (0.0, torch.inf if overflows else 0.0), strict=True):
        parameter.grad = torch.full((20,), value)
    assert agreement_module._find(finished, parameters) == expected


def test_who_is_named_when_several_have_found_something() -> None:
    assert _first_finding([0, 0], [0, 0]) is None
    assert _first_finding([0, 0], [5, 0]) == (None, 4)
    assert _first_finding([0, 4, 10], [5, 0, 0]) == (1, 3)


# Engines


def test_a_device_that_is_stuck_is_told_to_stop_without_asking_it() -> None:
    """Kernels look at a word in the host's memory."""
    with FakeAccelerator("lazy").installed() as accelerator:
        engine = Engine("direct", LonelyGroup(0, CPU), accelerator)
        stream = accelerator.open_stream()
        stream.mark()
        accelerator.calls.clear()
        stream.run(engine.abort)
        assert (accelerator.calls, len(stream.queue)) == ({}, 1), "nothing was waited for, or queued behind"
        assert [int(word) for word in accelerator.host_words] == [1]


@pytest.mark.parametrize(("algorithm", "also"), [("ring", "'native'"), ("direct", "'hierarchical'")])
def test_kernels_that_share_memory_take_one_host(accelerator: FakeAccelerator, algorithm: str, also: str) -> None:
    world: Any = SimpleNamespace(hosts=((0,), (1,)), rank=0)
    with pytest.raises(TopologyError, match=f"algorithm='{algorithm}'.* takes one host.*{also}"):
        open_on_device(world, algorithm, "auto", [], accelerator)


def test_kernels_know_of_an_abort_before_the_backend_leaves_half_a_sum(accelerator: FakeAccelerator) -> None:
    """The host may have launched all that follows. Errors of a backend that is on its way out say nothing."""
    words: list[int] = []

    def abort() -> None:
        words.extend(int(word) for word in accelerator.host_words)
        raise RuntimeError("ProcessGroup abort timed out")

    backend: Any = mock.Mock(abort=abort, shutdown=mock.Mock(side_effect=RuntimeError("was aborted")))
    engine = Engine("native", LonelyGroup(0, CPU), accelerator, 1, backend)
    engine.abort()
    engine.close()
    assert words == [1]
    assert backend.shutdown.call_count == 1


def _nccl(version: int, window: int, asked: list[Any]) -> mock.Mock:
    """NCCL, which notes what it was asked for."""
    memory = (ctypes.c_byte * 20)(*range(20))

    def give(where: Any, value: int) -> int:
        where._obj.value = value
        return 0

    def note(*what: Any, code: int = 0) -> int:
        asked.append(what)
        return code

    return mock.Mock(
        ncclGetVersion=lambda where: give(where, version),
        ncclMemAlloc=lambda where, size: give(where, ctypes.addressof(memory)),
        ncclMemFree=lambda pointer: note(pointer.value == ctypes.addressof(memory)),
        ncclCommWindowRegister=lambda comm, place, size, where, flags: (
            note(comm.value, size.value, flags) or give(where, window)
        ),
        ncclCommWindowDeregister=lambda comm, window: note(comm.value, window.value, code=5),
    )


@pytest.mark.parametrize(
    ("version", "window", "asked", "problem"),
    [
        (22809, 7, [], "NCCL 22809 cannot end its symmetric kernels"),
        (22907, 0, [(3, 20, 1), (True,)], "NCCL does not map memory of other ranks here"),
        (22907, 7, [(3, 20, 1), (3, 7), (True,)], "ncclCommWindowDeregister fails with NCCL's error 5"),
    ],
)
def test_calls_of_nccl(
    version: int, window: int, asked: list[Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_tensor(memory: Any, device: torch.device) -> torch.Tensor:
        at = SimpleNamespace(__array_interface__=memory.__cuda_array_interface__, memory=memory)
        return torch.from_numpy(np.asarray(at))

    seen: list[Any] = []
    library = _nccl(version, window, seen)
    monkeypatch.setattr(nccl.ctypes, "CDLL", lambda _: library)
    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    for name in ("device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(RuntimeError, match=problem):  # noqa: PT012 - whichever fails
        group = nccl.RegisteredGroup(0, CPU, SimpleNamespace(_comm_ptr=lambda: 3))
        view = group.allocate(20).parts[0][:7]
        assert view.tolist() == [0] * 7
        assert seen == [(3, 20, 1)]
        group.release(CudaBlock([], ctypes.c_void_p(window)))
    view = None
    gc.collect()  # the error had references, too
    assert seen == asked


@pytest.mark.parametrize(("processors", "blocks"), [(144, 24), (132, 22), (58, 9), (3, 1)])
def test_waiting_blocks_take_a_share_of_the_gpu(accelerator: FakeAccelerator, processors: int, blocks: int) -> None:
    group = LonelyGroup(0, CPU)
    group.num_processors = processors
    assert Engine("direct", group, accelerator)._max_blocks == blocks


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
    on = mock.MagicMock()
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: on.return_value.__enter__.called)
    accelerator = object.__new__(CudaAccelerator)
    accelerator.device = torch.device("cuda", 1)
    assert accelerator.is_capturing()
    on.assert_called_once_with(accelerator.device)


@pytest.mark.parametrize(
    ("code", "fault"),
    [(0, ""), (600, ""), (35, ""), (906, ""), (214, "CUDA says 214"), (700, "CUDA says 700"), (710, "CUDA says 710")],
)
def test_what_makes_a_device_useless(code: int, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 and 600: it works; the others leave it as it is."""
    runtime = mock.Mock(**{"cudaSetDevice.return_value": 0, "cudaStreamQuery.return_value": code})
    monkeypatch.setattr(cuda, "_runtime", runtime)
    monkeypatch.setattr(torch.cuda, "CudaError", "CUDA says {}".format)
    accelerator = object.__new__(CudaAccelerator)
    accelerator.device = torch.device("cuda", 3)
    assert accelerator.find_fault() == fault
    runtime.cudaSetDevice.assert_called_once_with(3)
    runtime.cudaSetDevice.return_value = 719
    assert accelerator.find_fault() == "CUDA says 719"
    monkeypatch.setattr(cuda, "_runtime", object())
    assert accelerator.find_fault() == "", "not to be had where PyTorch was not built for CUDA"


def test_the_word_that_stops_kernels_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that look at it may be queued for longer than their engine lives."""
    zeros = torch.zeros
    monkeypatch.setattr(cuda, "_host_words", [])
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory, **options: zeros(*size, **options))
    accelerator = object.__new__(CudaAccelerator)
    kept = weakref.ref(accelerator.host_word().fill_(1))
    assert kept() is not None
    assert accelerator.host_word() == 0


# The watchdog


class _Peer:
    """Another rank, which is gone in some looks."""

    rank, ranks, size = 0, (0, 1), 2

    def __init__(self, *gone: bool) -> None:
        self.gone = list(gone)

    def find(self) -> PeerLostError | None:
        return PeerLostError("gone", peers=(1,)) if self.gone.pop(0) else None

    def check_peers(self, needed: Any) -> None:
        if error := self.find():
            raise error


def _all_reduce(
    accelerator: FakeAccelerator, host: Any = None, timeout_seconds: float = 30.0, **options: Any
) -> tuple[OnStream, mock.Mock]:
    engine = mock.Mock(algorithm="direct", accelerator=accelerator)
    world: Any = mock.Mock(host=host, timeout_seconds=timeout_seconds, rank=0)
    all_reduce = OnStream(engine, world, in_background=True, **options)
    all_reduce._watchdog._stop.set()  # tests look themselves
    report, buffer = torch.full((1, 2), NOT_FOUND, dtype=torch.int32), torch.zeros(4)
    all_reduce.start(DeviceWire(buffer, buffer, torch.zeros(1, dtype=torch.int64), (0, 4), report, 0))
    return all_reduce, engine


def _sealed(all_reduce: OnStream) -> torch.Tensor:
    fetched = torch.full((1, 2), -1, dtype=torch.int32)
    all_reduce.seal(fetched)
    return fetched


@pytest.mark.parametrize(
    ("what", "waits", "aborts"),
    [
        ("close, the device is late", 2, False),
        ("close, the device is through", 1, False),  # before memory is given back
        ("close, amid a reduction", 1, True),  # peers will not come
        ("the script ends", 1, True),  # or NCCL's destructor would complain
        ("a forked child ends", 0, False),  # the device is the parent's
    ],
)
def test_how_a_rank_leaves(what: str, waits: int, aborts: bool, accelerator: FakeAccelerator) -> None:
    all_reduce, engine = _all_reduce(accelerator)
    if "amid" not in what:
        fetched = _sealed(all_reduce)
        if "through" in what:
            fetched.fill_(NOT_FOUND)
    before = accelerator.calls["synchronize"]
    if "child" in what:
        all_reduce._watchdog._pid += 1
    all_reduce.close() if "close" in what else all_reduce._watchdog._leave()
    assert accelerator.calls["synchronize"] - before == waits
    assert engine.abort.called == aborts
    all_reduce.close()
    assert engine.close.called


@pytest.mark.parametrize("is_afar", [False, True])
@pytest.mark.parametrize(("gone", "is_lost"), [((True, True), True), ((True, False, True), False), ((False,), False)])
def test_a_peer_is_lost_if_it_is_gone_at_two_looks(
    gone: tuple[bool, ...], is_lost: bool, is_afar: bool, accelerator: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another host, not before the device has waited for a while."""
    peer = _Peer(*gone)
    all_reduce, _ = _all_reduce(accelerator, **{"lost_afar": peer.find} if is_afar else {"host": peer})
    fetched = _sealed(all_reduce)
    if is_afar:
        assert all_reduce._watchdog._look() is None
        assert len(peer.gone) == len(gone)
        monkeypatch.setattr(watchdog, "_AFAR_SECONDS", 0.0)
    found = [all_reduce._watchdog._look() for _ in gone]
    assert [error is not None for error in found] == [False] * (len(gone) - 1) + [is_lost]
    fetched.fill_(NOT_FOUND)
    peer.gone = [True]
    assert all_reduce._watchdog._look() is None, "a peer that is done may leave before its words have come"
    all_reduce.close()


def test_a_last_reduction_that_fails_is_told(accelerator: FakeAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    all_reduce, _ = _all_reduce(accelerator)
    _sealed(all_reduce)
    error = PeerLostError("rank 1 is gone", peers=(1,))
    monkeypatch.setattr(accelerator, "synchronize", lambda: all_reduce.fail(error))
    with pytest.warns(RuntimeWarning, match="NaN.*rank 1 is gone"):
        all_reduce.close()


def test_a_device_that_does_not_come_to_an_end_is_late(accelerator: FakeAccelerator) -> None:
    all_reduce, _ = _all_reduce(accelerator, timeout_seconds=0.0)
    assert all_reduce._watchdog._look() is None, "how long a backward takes is the script's business"
    _sealed(all_reduce)
    assert isinstance(all_reduce._watchdog._look(), PeerTimeoutError)
    all_reduce.close()


# Symmetric memory


_HERE = {"processes": "pid:[1]", "folder": "1:2", "trouble": ""}


def _card(device: str, *unreachable: str, is_part: bool = False, overlaps: bool = False, **more: str) -> dict[str, Any]:
    about = {"is_part": is_part, "overlaps": overlaps, "handover": {**_HERE, **more}}
    return {"device": device, "unreachable": list(unreachable), **about}


_SAME = "ranks 2 and 5 use the same GPU; give each rank its own (model.to(torchring.device())), or set TORCH_SYMM_MEM_"


@pytest.mark.parametrize(
    ("cards", "problem"),
    [
        ({0: _card("a"), 1: _card("b")}, ""),
        ({0: _card("a", "c"), 1: _card("b")}, ""),  # nobody is on c
        ({2: _card("a"), 5: _card("a")}, _SAME),
        ({2: _card("a", overlaps=True), 5: _card("a", overlaps=True)}, ""),
        ({2: _card("a", overlaps=True), 5: _card("a")}, _SAME),  # all ranks decide alike, whatever each was told
        ({0: _card("a"), 3: _card("c", "a")}, "the GPU of rank 3 has no peer access to that of rank 0"),
        # MIG: CUDA shows each process one part.
        ({0: _card("a"), 3: _card("b", is_part=True)}, "rank 3 uses a part of a GPU (MIG), which does not reach the"),
        ({r: _card("a", is_part=True, overlaps=True) for r in (2, 5)}, ""),
        ({2: _card("a"), 3: _card("b", processes="pid:[9]")}, "ranks 2 and 3 are in different PID namespaces"),
        ({2: _card("a"), 3: _card("b", folder="1:3")}, "ranks 2 and 3 have different folders for temporary files"),
        (
            {2: _card("a"), 3: _card("b", trouble="too long")},
            "rank 3 has no folder for PyTorch's sockets: too long; set",
        ),
    ],
)
def test_why_ranks_cannot_share_memory(cards: dict[int, dict[str, Any]], problem: str) -> None:
    found = find_problem(cards)
    assert found.startswith(problem)
    assert bool(found) == bool(problem)


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
    def __init__(self) -> None:
        self.is_full = threading.local()  # the GPU of this thread's rank
        self.num_meetings = 0
        self.settings: set[str] = set()

    def empty_strided_p2p(self, size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.settings |= {name for name in os.environ if name.startswith("TORCH_SYMM_MEM")}
        if self.is_full.now:
            raise torch.OutOfMemoryError("CUDA driver error: out of memory")
        return torch.ones(size, dtype=dtype)

    def rendezvous(self, tensor: torch.Tensor, name: str) -> Any:
        self.num_meetings += 1
        return self

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(sizes, 10 + rank, dtype=dtype)


def test_memory_that_one_rank_lacks_is_refused_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would wait for that rank in symmetric memory. GPUs may be isolated, and multicast is not set up."""
    from torch._C import _distributed_c10d as c10d

    allocations, store = _Allocations(), dist.HashStore()
    monkeypatch.setattr(c10d, "_SymmetricMemory", allocations)
    monkeypatch.setattr(symmetric_memory, "register_group", mock.Mock())
    for name in ("device", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())

    def allocate(rank: int) -> list[str]:
        host: Any = SimpleNamespace(ranks=(0, 1), index=rank)
        group, found = CudaGroup(host, Rendezvous(store, rank, 2, 10.0), CPU, "x", 132, is_isolated=True), []
        for is_full in (False, True, False):
            allocations.is_full.now = is_full and rank == 1
            try:
                found.append(str(int(group.allocate(3 << 20).parts[1 - rank][0])))
            except TopologyError as error:
                found.append(error.message)
        return found

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(allocate, range(2))
    refused = "rank 1 cannot allocate 3.0 MiB of GPU memory for buckets: CUDA driver error: out of memory"
    assert first == ["11", refused, "11"]
    assert second == ["10", refused, "10"]
    assert allocations.num_meetings == 4, "nobody waits where somebody has nothing to show"
    assert allocations.settings == {symmetric_memory.NO_MULTICAST, symmetric_memory.OVERLAPPING_DEVICES}
    assert not any(name in os.environ for name in allocations.settings)


def test_the_smallest_gpu_and_ranks_that_share_one_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the number of blocks, which is the same on all ranks."""
    gpus = {0: ("a", 132), 1: ("b", 60), 2: ("b", 60)}
    groups = mock.Mock()
    monkeypatch.setattr(symmetric_memory, "CudaGroup", groups)
    monkeypatch.setattr(symmetric_memory, "_unreachable", lambda device: [])
    monkeypatch.setattr(symmetric_memory, "describe_handover", lambda: _HERE)
    monkeypatch.setenv(symmetric_memory.OVERLAPPING_DEVICES, "1")
    store = dist.HashStore()
    here = threading.local()

    def properties(_: object) -> Any:
        uuid, processors = gpus[here.rank]
        return SimpleNamespace(name="", uuid=uuid, multi_processor_count=processors)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)

    def share(rank: int) -> None:
        here.rank = rank
        host: Any = SimpleNamespace(ranks=(0, 1, 2), size=3, rank=rank)
        share_memory(host, Rendezvous(store, rank, 3, 10.0), torch.device("cuda", 0))

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(share, range(3)))
    assert [(call.args[-1], call.kwargs) for call in groups.call_args_list] == [(30, {"is_isolated": True})] * 3


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
            keys = [f"CUDASymmetricMemory/{exchange + counted}" for counted in (8, 11)]
            assert list(threads.map(meet, (here, there), keys)) == [None, None]
    with pytest.raises(RuntimeError, match=r"[Tt]imeout"):  # nobody else comes
        meet(ExchangeStore(dist.PrefixStore("another group", shared), 0.05), "CUDASymmetricMemory/8")


@pytest.mark.parametrize(("release", "is_told"), [("2.13.0", True), ("2.14.0+cu130", False)])
def test_a_group_is_found_without_a_default_group(release: str, is_told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As symmetric memory looks for it. Releases that need no store would compare how often processes allocated."""
    from torch._C import _distributed_c10d as c10d

    monkeypatch.setattr(torch, "__version__", release)
    name, store = f"torchring/{release}", ExchangeStore(dist.HashStore(), 5.0)
    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5.0))
    with mock.patch.object(c10d._SymmetricMemory, "set_group_info") as told:
        group = register_group(name, store, gloo)
    assert told.call_args_list == [mock.call(name, 0, 1, store)] * is_told
    found = c10d._resolve_process_group(name)
    assert found.group_name == group.group_name == name
    assert (found.rank(), found.size()) == (0, 1)
    assert found.get_group_store() is store
    assert not dist.is_initialized()
    del group, found
    with pytest.raises(RuntimeError, match="destroyed"):  # so whoever needs it keeps it
        c10d._resolve_process_group(name)


def test_the_fake_keeps_to_the_contract() -> None:
    """Methods of the real accelerator, stream and mark have the fakes' names and parameters."""
    for real, fake in ((CudaAccelerator, FakeAccelerator), (CudaStream, FakeStream), (CudaMark, FakeMark)):
        for name, method in inspect.getmembers(real, inspect.isfunction):
            if not name.startswith("_"):
                theirs = inspect.signature(getattr(fake, name)).parameters
                assert list(theirs) == list(inspect.signature(method).parameters), name
