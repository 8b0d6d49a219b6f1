"""Buckets leave in plan order, whatever order hooks fire in; what goes wrong on the way comes out with its place."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchring.allreduce import AllReduce, Wire
from torchring.allreduce.threaded import WorkOnThread
from torchring.errors import FirstFailure, GradientError, PeerLostError, RingError
from torchring.gradients.bucket import Bucket, BucketState
from torchring.gradients.launcher import Launcher, union_length
from torchring.gradients.ledger import GradientStatus, Ledger
from torchring.gradients.packing import Packing
from torchring.gradients.places import open_bucket
from torchring.gradients.plan import ParameterSpec, build_plan
from torchring.gradients.reduction import Reduction, Said
from torchring.observer import LAUNCHED, OVER, PACKED, READY, REDUCED, STARTED
from torchring.threads import SerialThread


@dataclass
class PlainWire:
    tensor: torch.Tensor
    buffer: torch.Tensor  # the same memory, for the all-reduce's writes


class AtOnce:
    """In place of a thread: the caller's own."""

    def submit(self, function: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        future.set_result(function())
        return future

    def close(self) -> None: ...


@dataclass
class RecordingAllReduce:
    """A world of one that writes down what it is asked for; the wire's first element says which bucket it was."""

    algorithm: str = "recording"
    in_background: bool = False
    order: list[int] = field(default_factory=list)
    threads: list[str] = field(default_factory=list)
    fail_at: dict[int, Exception] = field(default_factory=dict)
    seconds: float = 0.0
    gate: threading.Event | None = None

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> Sequence[Wire]:
        buffers = [torch.zeros(numel, dtype=dtype) for numel, dtype in specs]
        return [PlainWire(buffer.data, buffer) for buffer in buffers]

    failure: FirstFailure = field(default_factory=FirstFailure)
    thread: Any = field(default_factory=AtOnce)

    def start(self, wire: Wire) -> Any:
        return WorkOnThread(self.thread, lambda: self.all_reduce(wire), self.failure, self.failure.set)

    def go_on_a_thread(self) -> None:
        self.thread, self.in_background = SerialThread("torchring-reductions"), True

    def all_reduce(self, wire: Wire) -> None:
        assert isinstance(wire, PlainWire)
        if self.gate is not None:
            assert self.gate.wait(20)
        index = int(wire.tensor[0])
        self.order.append(index)
        self.threads.append(threading.current_thread().name)
        time.sleep(self.seconds)
        if index in self.fail_at:
            raise self.fail_at[index]

    def fail(self, error: RingError) -> None: ...

    def close(self) -> None:
        self.thread.close()


@dataclass
class StagedRecorder(RecordingAllReduce):
    """The same, staged: `advance` finds the peers there when the test says so; who has advanced lands."""

    events: list[tuple[str, int]] = field(default_factory=list)
    ready: set[int] = field(default_factory=set)

    def start(self, wire: Wire) -> RecordedFlight:
        index = int(wire.tensor[0])
        self.events.append(("start", index))
        return RecordedFlight(self, wire, index)

    def take_events(self) -> list[tuple[str, int]]:
        events, self.events = self.events, []
        return events


@dataclass
class RecordedFlight:
    all_reduce: StagedRecorder
    wire: Wire
    index: int
    has_advanced: bool = False
    span: tuple[float, float] | None = None

    def advance(self, *, waits: bool = False) -> bool:
        index = self.index
        if index in self.all_reduce.fail_at and index not in self.all_reduce.ready and not waits:
            raise self.all_reduce.fail_at[index]
        if not self.has_advanced and (waits or index in self.all_reduce.ready):
            self.has_advanced = True
            self.all_reduce.events.append(("reduce", index))
        return self.has_advanced

    def wait(self) -> None:
        assert self.has_advanced, "peers wait for this rank's part"
        self.all_reduce.events.append(("land", self.index))
        self.all_reduce.all_reduce(self.wire)


def open_buckets(all_reduce: RecordingAllReduce, count: int, per_bucket: int = 1) -> list[Bucket]:
    """`count` buckets; bucket i holds the parameters b{i}.p0, b{i}.p1, ..."""
    names = [f"b{i}.p{j}" for i in range(count) for j in range(per_bucket)]
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in names]
    specs = [ParameterSpec(name, (2,), (1,), torch.float32, torch.device("cpu")) for name in names]
    cap = 8 * per_bucket
    plan = build_plan(specs, bucket_bytes=cap, order=range(len(specs)))
    assert len(plan.buckets) == count
    wires = all_reduce.open_wires([(bucket.numel, bucket.wire_dtype) for bucket in plan.buckets])
    return buckets_of(plan, wires, specs, parameters)


def buckets_of(plan: Any, wires: Sequence[Wire], specs: Any, parameters: Any) -> list[Bucket]:
    ledger = Ledger()
    ledger.lay_out([slot.parameter for bucket in plan.buckets for slot in bucket.slots], specs, parameters)
    return [
        open_bucket(b, w, specs, parameters, Packing(1.0, b, w.tensor, 1, []), ledger)
        for b, w in zip(plan.buckets, wires, strict=True)
    ]


def pack(bucket: Bucket) -> None:
    """All gradients of the bucket arrive: its index, in every element."""
    for slot, parameter in enumerate(bucket.parameters):
        parameter.grad = torch.full((2,), float(bucket.index))
        is_full = bucket.mark_noted((slot,))
    if is_full:
        bucket.pack_rest()


@contextmanager
def opened(
    count: int, *, threaded: bool, per_bucket: int = 1, all_reduce: RecordingAllReduce | None = None
) -> Iterator[tuple[Launcher, RecordingAllReduce]]:
    all_reduce = all_reduce if all_reduce is not None else RecordingAllReduce()
    if threaded:
        all_reduce.go_on_a_thread()
    try:
        yield open_launcher(open_buckets(all_reduce, count, per_bucket), all_reduce), all_reduce
    finally:
        all_reduce.close()


def open_launcher(buckets: Sequence[Bucket], all_reduce: AllReduce[Any]) -> Launcher:
    launcher = Launcher(all_reduce, buckets[0].ledger if buckets else Ledger())
    launcher.install(buckets)
    return launcher


def finish(launcher: Launcher) -> None:
    launcher.launch_rest()
    launcher.wait()


def begin(launcher: Launcher, *, number: int, step: int, hold: bool) -> None:
    """As `Reducer` does it."""
    launcher.drain()
    launcher.begin(Reduction(number, step, hold, said=Said({})))


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=lambda order: "".join(map(str, order)))
def test_plan_order_despite_hook_order(order: tuple[int, ...], threaded: bool) -> None:
    with opened(4, threaded=threaded) as (launcher, all_reduce):
        begin(launcher, number=0, step=0, hold=False)
        for index in order:
            pack(launcher.buckets[index])
            launcher.advance()
        finish(launcher)
        assert all_reduce.order == [0, 1, 2, 3]
        assert {bucket.state for bucket in launcher.buckets} == {BucketState.REDUCED}
        assert [bucket.parameters[0].grad.tolist() for bucket in launcher.buckets] == [[float(i)] * 2 for i in range(4)]


def test_inline_a_bucket_leaves_as_soon_as_those_before_it_have_left() -> None:
    with opened(4, threaded=False) as (launcher, all_reduce):
        begin(launcher, number=0, step=0, hold=False)
        seen = []
        for index in (2, 0, 3, 1):
            pack(launcher.buckets[index])
            launcher.advance()
            seen.append(list(all_reduce.order))
        assert seen == [[], [0], [0], [0, 1, 2, 3]]
        finish(launcher)
        assert all_reduce.order == [0, 1, 2, 3]
        assert set(all_reduce.threads) == {threading.current_thread().name}


def test_a_thread_reduces_while_backward_goes_on() -> None:
    gate = threading.Event()
    with opened(3, threaded=True, all_reduce=RecordingAllReduce(gate=gate)) as (launcher, all_reduce):
        begin(launcher, number=0, step=0, hold=False)
        for index in (0, 1, 2):
            pack(launcher.buckets[index])
            launcher.advance()
        assert all_reduce.order == []
        assert [bucket.state for bucket in launcher.buckets] == [BucketState.REDUCING] * 3
        gate.set()
        finish(launcher)
        assert all_reduce.order == [0, 1, 2]
        assert set(all_reduce.threads) == {"torchring-reductions"}


def test_a_thread_does_not_wait_for_finish() -> None:
    with opened(2, threaded=True) as (launcher, all_reduce):
        begin(launcher, number=0, step=0, hold=False)
        pack(launcher.buckets[0])
        launcher.advance()
        wait_until(lambda: all_reduce.order == [0])
        pack(launcher.buckets[1])
        finish(launcher)
        assert all_reduce.order == [0, 1]


@pytest.mark.parametrize("threaded", [False, True])
def test_held_buckets_leave_in_finish(threaded: bool) -> None:
    with opened(3, threaded=threaded) as (launcher, all_reduce):
        for _ in range(2):
            all_reduce.order.clear()
            begin(launcher, number=0, step=0, hold=True)
            for index in (0, 2, 1):
                pack(launcher.buckets[index])
                launcher.advance()
            assert [bucket.state for bucket in launcher.buckets] == [BucketState.PACKED] * 3
            assert all_reduce.order == []
            finish(launcher)
            assert all_reduce.order == [0, 1, 2]
            for bucket in launcher.buckets:
                bucket.close_reduction()
        begin(launcher, number=0, step=0, hold=False)  # the next reduction need not be held
        pack(launcher.buckets[0])
        launcher.advance()
        wait_until(lambda: all_reduce.order == [0, 1, 2, 0])
        for bucket in launcher.buckets[1:]:
            pack(bucket)
        finish(launcher)


@pytest.mark.parametrize("threaded", [False, True])
def test_finish_fills_the_buckets_whose_gradients_have_not_arrived(threaded: bool) -> None:
    with opened(3, threaded=threaded, per_bucket=2) as (launcher, all_reduce):
        begin(launcher, number=0, step=0, hold=False)
        pack(launcher.buckets[1])
        launcher.advance()
        bucket = launcher.buckets[2]
        bucket.parameters[0].grad = torch.full((2,), 2.0)
        bucket.mark_noted((0,))
        finish(launcher)
        assert all_reduce.order == [0, 1, 2]
        unused = {each.plan.slots[slot].parameter for each in launcher.buckets for slot in each.unused}
        launcher.reduction.said = Said({}, unused)
        launcher.close_reduction()
        grads = [[parameter.grad for parameter in bucket.parameters] for bucket in launcher.buckets]
        assert [[None if grad is None else grad.tolist() for grad in row] for row in grads] == [
            [None, None],
            [[1.0, 1.0], [1.0, 1.0]],
            [[2.0, 2.0], None],
        ]


def arrive(launcher: Launcher, index: int) -> None:
    """As the hook of parameter `index` does it, with one parameter per bucket."""
    launcher.buckets[index].parameters[0].grad = torch.full((2,), float(index))
    launcher.mark_ready(index)


def test_gradients_that_are_ready_fill_their_buckets_and_the_first_reduction_shows_their_order() -> None:
    with opened(3, threaded=False) as (launcher, all_reduce):
        for order in ((2, 0, 1), (0, 1, 2)):
            begin(launcher, number=0, step=0, hold=False)
            for index in order:
                arrive(launcher, index)
            assert all_reduce.order == [0, 1, 2]
            assert launcher.ready_order == (None if order[0] else [2, 0, 1])
            finish(launcher)
            launcher.close_reduction()
            assert launcher.ready_order == [2, 0, 1]
            all_reduce.order.clear()
        launcher.forget_order()
        assert launcher.ready_order is None


def test_small_gradients_are_noted_and_the_last_one_of_a_bucket_has_them_counted() -> None:
    with opened(2, threaded=False, per_bucket=3) as (launcher, all_reduce):
        launcher.forget_order()
        parameters = [parameter for bucket in launcher.buckets for parameter in bucket.parameters]

        def hook(index: int) -> list[int]:
            """Returns the buckets that have left when the hook of parameter `index` has run."""
            parameter, value = parameters[index], torch.full((2,), float(index // 3))
            parameter.grad = value if parameter.grad is None else parameter.grad.add_(value)
            launcher.on_ready(6)[index](index)
            return list(all_reduce.order)

        planned, other = (0, 1, 2, 3, 4, 5), (2, 0, 1, 3, 4, 5)
        for order, left in (
            (planned, [[], [], [0], [0], [0], [0, 1]]),
            (other, [[], [], [], [], [], [0, 1]]),
            (other, [[], [], [0], [0], [0], [0, 1]]),
        ):
            begin(launcher, number=0, step=0, hold=False)
            assert [hook(index) for index in order] == left
            finish(launcher)
            launcher.close_reduction()
            assert launcher.ledger.first_unsettled() is None
            assert [p.grad.tolist() for p in parameters if p.grad is not None] == [[0.0] * 2] * 3 + [[1.0] * 2] * 3
            for parameter in parameters:
                parameter.grad = None
            all_reduce.order.clear()

        begin(launcher, number=0, step=0, hold=False)
        assert [hook(index) for index in other][-1] == [0, 1]
        hook(0)
        with pytest.raises(GradientError, match=r"b0\.p0 received another gradient"):
            launcher.count_noted()


def test_what_was_noted_when_a_backward_is_aborted_is_local() -> None:
    with opened(1, threaded=False, per_bucket=3) as (launcher, _):
        launcher.forget_order()
        begin(launcher, number=0, step=0, hold=False)
        pack(launcher.buckets[0])
        finish(launcher)
        launcher.close_reduction()
        begin(launcher, number=1, step=1, hold=False)
        grad = launcher.buckets[0].parameters[1].grad
        assert grad is not None
        grad += 1  # as autograd does it, into the result of the reduction before
        launcher.on_ready(3)[1](1)
        assert launcher.ledger.first_unsettled() is None
        launcher.abort()
        assert launcher.ledger.first_unsettled() == ("b0.p1", GradientStatus.LOCAL.value)


@pytest.mark.parametrize(("num_left", "number", "order"), [(0, 0, None), (2, 1, None), (3, 1, [0, 1, 2])])
def test_who_aborts_a_reduction_goes_on_with_the_number_of_its_peers(
    num_left: int, number: int, order: list[int] | None
) -> None:
    """Once a bucket has left, peers finish the reduction. Once all have left, they know the order of gradients, too."""
    with opened(3, threaded=False) as (launcher, all_reduce):
        launcher.begin(Reduction(0))
        for index in range(num_left):
            arrive(launcher, index)
        launcher.abort()
        assert launcher.reduction.next_number == number
        assert launcher.ready_order == order
        launcher.drain()
        launcher.begin(Reduction(number))
        assert {bucket.state for bucket in launcher.buckets} == {BucketState.IDLE}
        for index in (2, 1, 0):
            arrive(launcher, index)
        finish(launcher)
        launcher.close_reduction()
        assert launcher.reduction.next_number == number + 1
        assert launcher.ready_order == (order or [2, 1, 0])
        assert all_reduce.order[num_left:] == [0, 1, 2]


# Reductions that are aborted


def test_begin_waits_for_what_an_aborted_reduction_left_with_the_worker() -> None:
    """Its buckets are the all-reduce's until then: filling them again would change what is under way."""
    gate = threading.Event()
    with opened(3, threaded=True, all_reduce=RecordingAllReduce(gate=gate)) as (launcher, all_reduce):
        begin(launcher, number=0, step=0, hold=False)
        for index in (0, 1):  # and the gradients of bucket 2 never arrive
            pack(launcher.buckets[index])
            launcher.advance()
        opener = threading.Timer(0.3, gate.set)
        opener.start()
        assert all_reduce.order == []
        begin(launcher, number=1, step=0, hold=False)
        assert gate.is_set()
        assert all_reduce.order == [0, 1]
        states = [bucket.state for bucket in launcher.buckets]
        assert states == [BucketState.REDUCING, BucketState.REDUCING, BucketState.IDLE], "nobody uses the results"
        assert (launcher.reduction.busy_seconds, launcher.reduction.exposed_seconds) == (0.0, 0.0)
        assert not launcher.reduction.num_launched
        for bucket in launcher.buckets:
            bucket.reset()
        for bucket in launcher.buckets:
            pack(bucket)
            launcher.advance()
        finish(launcher)
        assert all_reduce.order == [0, 1, 0, 1, 2]
        assert [bucket.parameters[0].grad.tolist() for bucket in launcher.buckets] == [[float(i)] * 2 for i in range(3)]
        opener.join()


def test_a_failure_in_an_aborted_reduction_comes_out_of_begin_once() -> None:
    gate = threading.Event()
    all_reduce = RecordingAllReduce(
        gate=gate, fail_at={0: PeerLostError("rank 3 died", rank=0, peers=(3,), seconds=0.5)}
    )
    with opened(2, threaded=True, per_bucket=2, all_reduce=all_reduce) as (launcher, _):
        begin(launcher, number=0, step=7, hold=False)
        for bucket in launcher.buckets:
            pack(bucket)
            launcher.advance()
        gate.set()
        with pytest.raises(PeerLostError) as caught:
            begin(launcher, number=1, step=8, hold=False)
        check_located(caught.value, bucket=0, step=7)
        assert all_reduce.order == [0], "nothing is sent through a broken all-reduce"
        begin(launcher, number=1, step=8, hold=False)  # it has been said


# Failures


@pytest.mark.parametrize("threaded", [False, True])
def test_failure_comes_out_of_finish(threaded: bool) -> None:
    all_reduce = RecordingAllReduce(fail_at={1: PeerLostError("rank 3 died", rank=0, peers=(3,), seconds=0.5)})
    with opened(4, threaded=threaded, per_bucket=2, all_reduce=all_reduce) as (launcher, _):
        begin(launcher, number=0, step=7, hold=True)
        for bucket in launcher.buckets:
            pack(bucket)
        with pytest.raises(PeerLostError) as caught:
            finish(launcher)
        check_located(caught.value, bucket=1, step=7)
        assert all_reduce.order == [0, 1]  # nothing is sent through a broken all-reduce


def check_located(error: PeerLostError, *, bucket: int, step: int) -> None:
    assert (error.bucket, error.step, error.parameters) == (bucket, step, (f"b{bucket}.p0", f"b{bucket}.p1"))
    assert (error.rank, error.peers, error.seconds) == (0, (3,), 0.5)
    assert str(error) == (
        f"rank 3 died [rank 0, step {step}, bucket {bucket}, parameters b{bucket}.p0 .. b{bucket}.p1, after 0.50 s]"
    )


def test_a_thread_survives_a_failure_that_is_not_the_all_reduces() -> None:
    all_reduce = RecordingAllReduce(fail_at={0: ValueError("not between ranks")})
    with opened(3, threaded=True, all_reduce=all_reduce) as (launcher, _):
        begin(launcher, number=0, step=0, hold=False)
        for bucket in launcher.buckets:
            pack(bucket)
            launcher.advance()
        with pytest.raises(ValueError, match="not between ranks"):
            finish(launcher)
        all_reduce.fail_at.clear()
        for bucket in launcher.buckets:
            bucket.reset()
        begin(launcher, number=0, step=1, hold=False)
        for bucket in launcher.buckets:
            pack(bucket)
            launcher.advance()
        finish(launcher)
        assert all_reduce.order == [0, 1, 2, 0, 1, 2]


# Times and threads


def test_a_threads_time_is_exposed_only_in_finish() -> None:
    gate = threading.Event()
    with opened(2, threaded=True, all_reduce=RecordingAllReduce(seconds=0.2, gate=gate)) as (launcher, all_reduce):
        begin(launcher, number=0, step=0, hold=False)
        for bucket in launcher.buckets:
            pack(bucket)
            launcher.advance()
        in_launches = launcher.reduction.exposed_seconds
        gate.set()  # not before: launching waits for no reduction
        wait_until(lambda: all_reduce.order == [0, 1])
        time.sleep(0.25)
        started = time.perf_counter()
        finish(launcher)
        in_finish = time.perf_counter() - started
        assert launcher.reduction.busy_seconds >= 0.4
        assert 0.0 < launcher.reduction.exposed_seconds - in_launches <= in_finish


# ---- all-reduces that nobody has to stand by for


def test_a_staged_all_reduce_is_started_and_looked_in_on_and_waited_for_at_the_end() -> None:
    all_reduce = StagedRecorder()
    with opened(3, threaded=False, all_reduce=all_reduce) as (launcher, _):
        for _ in range(2):
            all_reduce.ready.clear()
            begin(launcher, number=0, step=0, hold=False)
            pack(launcher.buckets[0])
            launcher.advance()
            assert all_reduce.take_events() == [("start", 0)]
            launcher.advance()
            assert all_reduce.take_events() == []
            pack(launcher.buckets[1])
            launcher.advance()
            assert all_reduce.take_events() == [("start", 1)]
            all_reduce.ready.add(1)
            launcher.advance()
            assert all_reduce.take_events() == [], "bucket 1 may not go before bucket 0"
            all_reduce.ready.add(0)
            launcher.advance()
            assert all_reduce.take_events() == [("reduce", 0), ("reduce", 1)]
            assert [b.state for b in launcher.buckets[:2]] == [BucketState.REDUCING] * 2
            pack(launcher.buckets[2])
            finish(launcher)
            assert all_reduce.take_events() == [("start", 2), ("reduce", 2), ("land", 0), ("land", 1), ("land", 2)]
            assert [b.state for b in launcher.buckets] == [BucketState.REDUCED] * 3
            for bucket in launcher.buckets:
                bucket.close_reduction()


def test_an_observer_hears_what_happens_to_each_bucket() -> None:
    """One is reduced during backward, another afterwards."""
    all_reduce = StagedRecorder(ready={0})
    with opened(2, threaded=False, all_reduce=all_reduce) as (launcher, _):
        begin(launcher, number=0, step=0, hold=False)
        seen: list[tuple[int, int]] = []
        launcher.reduction.events = lambda event, index, at: seen.append((index, event))
        pack(launcher.buckets[0])
        launcher.advance()
        num_in_backward = len(seen)
        pack(launcher.buckets[1])
        finish(launcher)
    of_bucket = [READY, PACKED, LAUNCHED, STARTED, REDUCED]
    assert [event for index, event in seen[:num_in_backward] if index == 0] == of_bucket
    assert [*dict.fromkeys(event for index, event in seen[num_in_backward:] if index == 1)] == of_bucket
    assert (-1, OVER) in seen[num_in_backward:]


def test_held_buckets_all_start_before_one_is_waited_for() -> None:
    all_reduce = StagedRecorder()
    with opened(2, threaded=False, all_reduce=all_reduce) as (launcher, _):
        begin(launcher, number=0, step=0, hold=True)
        for bucket in launcher.buckets:
            pack(bucket)
            launcher.advance()
        assert all_reduce.take_events() == []
        finish(launcher)
        events = [("start", 0), ("start", 1), ("reduce", 0), ("reduce", 1), ("land", 0), ("land", 1)]
        assert all_reduce.take_events() == events


def test_a_reduction_that_was_aborted_lands_before_the_next_begins() -> None:
    all_reduce = StagedRecorder()
    with opened(2, threaded=False, all_reduce=all_reduce) as (launcher, _):
        begin(launcher, number=0, step=0, hold=False)
        pack(launcher.buckets[0])
        launcher.advance()
        all_reduce.take_events()
        begin(launcher, number=1, step=0, hold=False)
        assert all_reduce.take_events() == [("reduce", 0), ("land", 0)]
        assert launcher.buckets[0].state is BucketState.REDUCING, "nobody uses the result"
        assert not launcher.reduction.num_launched


@pytest.mark.parametrize(
    ("spans", "length"),
    [([], 0), ([(1, 3)], 2), ([(0, 2), (1, 3), (5, 6)], 4), ([(5, 6), (0, 10)], 10), ([(0, 1), (1, 2)], 2)],
)
def test_what_is_under_way_at_a_time_is_busy_once(spans: list[tuple[float, float]], length: float) -> None:
    assert union_length(spans) == length


def test_every_flight_lands_though_a_bucket_before_it_fails() -> None:
    """Nothing may be under way when the error comes out: the next reduction fills the buffers again."""
    all_reduce = RecordingAllReduce()
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    specs = [ParameterSpec(name, (2,), (1,), torch.float32, torch.device("cpu")) for name in "ab"]
    plans = build_plan(specs, bucket_bytes=0, compression="fp16").buckets
    wires = all_reduce.open_wires([(plan.numel, plan.wire_dtype) for plan in plans])
    all_reduce.gate = threading.Event()
    all_reduce.go_on_a_thread()
    buckets = buckets_of(SimpleNamespace(buckets=plans), wires, specs, parameters)
    launcher = open_launcher(buckets, all_reduce)
    begin(launcher, number=0, step=0, hold=False)
    for bucket in buckets:
        pack(bucket)
        launcher.advance()
    buckets[0].parameters[0].grad = None
    threading.Timer(0.2, all_reduce.gate.set).start()
    with pytest.raises(GradientError, match="was taken away"):
        finish(launcher)
    assert len(all_reduce.order) == 2
    all_reduce.close()


@pytest.mark.parametrize("where", ["advance", "land"])
def test_a_flight_that_fails_says_which_bucket_it_was(where: str) -> None:
    all_reduce = StagedRecorder(fail_at={1: PeerLostError("rank 3 died", peers=(3,))})
    if where == "land":
        all_reduce.ready = {0, 1}
    with opened(2, threaded=False, per_bucket=2, all_reduce=all_reduce) as (launcher, _):
        begin(launcher, number=0, step=7, hold=False)
        pack(launcher.buckets[0])
        launcher.advance()
        pack(launcher.buckets[1])
        if where == "advance":
            all_reduce.ready = {0}

        def reduce() -> None:
            launcher.advance()
            finish(launcher)

        with pytest.raises(PeerLostError) as caught:
            reduce()
        assert (caught.value.bucket, caught.value.step) == (1, 7)
        assert caught.value.parameters == ("b1.p0", "b1.p1")
