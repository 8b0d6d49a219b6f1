"""An operation between ranks that an exception ends at any point: right results or an error that names the rank, on all
ranks, until they meet again."""

import gc
import inspect
import random
import signal
import sys
import threading
import time
import weakref
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchring
from tests.support.harness import patient, ranks, run_ranks, run_threads, wait_until
from torchring.collectives.service import collectives_of
from torchring.errors import RingError
from torchring.interruption import InterruptionGuard
from torchring.memory import host as host_module
from torchring.participants import replicas
from torchring.rendezvous.rendezvous import Rendezvous
from torchring.world import World

_AGAIN = "call torchring.shutdown() and torchring.init() on all ranks"


class _Stop(Exception):  # noqa: N818 - what a script's signal handler raises
    pass


class _AtLine:
    """Raises _Stop once, at the n-th line that this thread runs of a guarded operation, and again `also` lines on."""

    def __init__(self, number: int, also: int | None = None) -> None:
        self.countdown = [number] if also is None else [number, also]
        self._guarded: FrameType | None = None

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if self._guarded is None and frame.f_code is InterruptionGuard.run.__code__:
            self._guarded = frame
        if not self.countdown or self._guarded is None or "torchring" not in frame.f_code.co_filename:
            return self._trace
        if event == "line" and not (frame is self._guarded and frame.f_lineno <= _FIRST_LINE):
            self.countdown[0] -= 1
            if self.countdown[0] < 0:
                self.countdown.pop(0)
                raise _Stop
        return self._trace


_LINES, _START = inspect.getsourcelines(InterruptionGuard.run)
_FIRST_LINE = _START + [line.strip() for line in _LINES].index("try:")  # before it is entered nothing has begun


def _sums(collectives: Any, rank: int, outcomes: list[Any], stop: _AtLine | None) -> None:
    """Five calls, of which the second is interrupted. What a script sees of them."""
    for call in range(5):
        value = torch.full((3,), 10.0**call * (rank + 1))
        try:
            if stop is not None and call == 1:
                with stop:
                    collectives.all_reduce(value, "sum")
            else:
                collectives.all_reduce(value, "sum")
            outcomes.append(value.tolist())
        except (_Stop, RingError) as error:
            outcomes.append(error)


def _check(outcomes: list[list[Any]], stopped: int, size: int) -> bool:
    """Whether the world was broken; right sums, or errors that name the rank, from some call on."""
    broken = False
    total = sum(range(1, size + 1))
    for rank, calls in enumerate(outcomes):
        failed = False
        for call, outcome in enumerate(calls):
            if isinstance(outcome, _Stop):
                assert (rank, call) == (stopped, 1)
            elif isinstance(outcome, RingError):
                failed = True
                assert "all_reduce was interrupted by _Stop" in str(outcome) or "was called inside" in str(outcome)
                assert rank == stopped or f"rank {stopped} stopped" in str(outcome)
                assert _AGAIN in str(outcome)
                assert outcome.peers == (stopped,)
            else:
                assert not failed, (rank, calls)
                assert outcome == [10.0**call * total] * 3, (rank, calls)
        broken = broken or failed
    return broken


def _at_every_line(rank: int, size: int, store: dist.Store, first: int, step: int, also: int | None) -> Any:
    results = []
    apart = Rendezvous(dist.PrefixStore("apart", store), rank, size, 20.0)
    for turn, number in enumerate(range(first, 400, step)):
        world = World(dist.PrefixStore(f"{turn}", store), rank, size, timeout_seconds=20.0)
        collectives = collectives_of(world)
        stop = _AtLine(number, also) if rank == turn % size else None
        outcomes: list[Any] = []
        _sums(collectives, rank, outcomes, stop)
        over = [stop is not None and len(stop.countdown) == (1 if also is None else 2)]
        everybody = apart.all_gather("over", bytes(over))
        results.append(outcomes)
        world.close()
        if any(map(any, everybody)):  # the call ended before that line
            break
    return results


@pytest.mark.parametrize(
    ("size", "also", "step"), [(2, None, 4), pytest.param(3, None, 7, marks=pytest.mark.grid), (2, 0, 7)]
)
def test_a_collective_that_stops_at_any_line(size: int, also: int | None, step: int) -> None:
    """In the tenth line of everything, say; with `also`, once more while that is being handled."""
    first = size % 2
    by_rank = run_threads(_at_every_line, size, first, step, also, deadline=60.0)
    turns = list(zip(*by_rank, strict=True))
    broken = [_check(list(outcomes), turn % size, size) for turn, outcomes in enumerate(turns)]
    assert len(turns) > 10  # it was interrupted here and there, and the last time not at all
    assert sum(broken) > len(turns) / 2
    assert not broken[-1] or also is not None


class _Training:
    """What a script does in one world: each kind of operation, whose result is a number that its call determines."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.total = float(sum(range(1, size + 1)))
        self.parameters = [torch.nn.Parameter(torch.ones(300)) for _ in range(4)]
        half = [self.parameters[:2], self.parameters[2:]]
        self.optimizers = [torchring.wrap(torch.optim.SGD(ps, lr=0.0), op="sum", bucket_mb=0.001) for ps in half]

    def all_reduce(self, factor: float) -> float:
        return float(torchring.all_reduce(torch.full((3,), factor * (self.rank + 1)), "sum")[0])

    def all_reduce_later(self, factor: float) -> float:
        work = torchring.all_reduce(torch.full((3,), factor * (self.rank + 1)), "sum", async_op=True)
        return float(work.wait()[0])

    def backward(self, factor: float) -> float:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        sum((p * factor * (self.rank + 1)).sum() for p in self.parameters).backward()
        return self._gradient()

    def synchronize(self, factor: float) -> float:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        with self.optimizers[0].no_sync(), self.optimizers[1].no_sync():
            sum((p * factor * (self.rank + 1)).sum() for p in self.parameters).backward()
        for optimizer in self.optimizers:
            optimizer.synchronize()
        return self._gradient()

    def _gradient(self) -> float:
        values = {value for p in self.parameters if p.grad is not None for value in p.grad.tolist()}
        return values.pop() if len(values) == 1 else float("nan")


@ranks(2, run_ranks)
def test_a_thread_may_call_collectives_while_another_one_trains(rank: int) -> None:
    """One thread trains, another one sums up metrics; then everything is dropped, without a collector."""
    replicas.STEPS_BETWEEN_CHECKS = 1  # type: ignore[misc]  # what torchring itself asks, after every backward
    gc.disable()
    world = weakref.ref(torchring.init(timeout_seconds=20.0))

    def train(training: _Training) -> None:
        sums: list[float] = []
        thread = threading.Thread(target=lambda: sums.extend(training.all_reduce(float(i)) for i in range(200)))
        thread.start()
        gradients = [training.backward(2.0) for _ in range(60)]
        thread.join()
        assert sums == [3.0 * i for i in range(200)]
        assert gradients == [6.0] * 60

    train(_Training(rank, 2))
    torchring.shutdown()
    assert world() is None, "a closed world is held by a cycle of references"
    wait_until(lambda: "torchring-store" not in [t.name for t in threading.enumerate()], "the store's thread to end")


def _inside(frame: FrameType | None) -> bool:
    """Whether a signal has come in the midst of an operation between ranks, and not before or after it."""
    while frame is not None and frame.f_code is not InterruptionGuard.run.__code__:
        frame = frame.f_back
    return frame is not None and frame.f_lineno > _FIRST_LINE


def _at_any_time(rank: int, size: int, is_one_host: bool, num_turns: int) -> Any:
    if not is_one_host:
        host_module._host_identity = lambda: f"host {rank}"
    chance = random.Random(1234)  # the same on all ranks
    results = []

    is_armed = False

    def alarm(_: int, frame: FrameType | None) -> None:
        if is_armed and not _inside(frame):
            signal.setitimer(signal.ITIMER_REAL, 50e-6)
        elif is_armed:
            raise _Stop

    signal.signal(signal.SIGALRM, alarm)
    gc.freeze()  # `wrap` collects garbage, which takes 0.1 s with all that PyTorch has loaded
    for turn in range(num_turns):
        torchring.init(timeout_seconds=20.0)
        training = _Training(rank, size)
        calls = [training.all_reduce, training.all_reduce_later, training.backward, training.synchronize]
        order, delay = chance.choices(calls, k=6), chance.uniform(20e-6, 3e-3)
        outcomes: list[Any] = []
        for number, call in enumerate(order):
            if number == 2 and rank == turn % size:
                is_armed = True
                signal.setitimer(signal.ITIMER_REAL, delay)
            factor, started = 10.0**number, time.monotonic()
            try:
                outcome: Any = call(factor) == factor * training.total
            except (_Stop, RingError) as error:
                outcome = (type(error).__name__, str(error))
                torch.set_grad_enabled(True)  # the signal may have come while torch.no_grad() was being left
            outcomes.append((call.__name__, outcome, time.monotonic() - started))
        is_armed = False  # a signal that is on its way already shall do nothing
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        results.append(outcomes)
        torchring.shutdown()
    return results


@pytest.mark.parametrize(("is_one_host", "num_turns"), [(True, 12), (False, 4)])
def test_training_that_is_interrupted_at_any_time(is_one_host: bool, num_turns: int) -> None:
    """By a signal's handler. After shutdown() and init() everything works, every time."""
    by_rank = run_ranks(_at_any_time, 2, is_one_host, num_turns, deadline=120.0)
    num_broken = 0
    for turn, (one, other) in enumerate(zip(*by_rank, strict=True)):
        stopped = turn % 2
        for rank, outcomes in enumerate((one, other)):
            failed = [call for call in outcomes if call[1] is not True]
            for _, outcome, seconds in failed:
                assert seconds < patient(10.0), outcomes  # the time-out is 20
                assert outcome, (turn, rank, outcomes)
                kind, text = outcome
                assert kind == "_Stop" or ("_Stop" in text and _AGAIN in text), text
                assert rank == stopped or f"rank {stopped} stopped: " in text, text
            num_broken += bool(failed)
    assert num_broken > num_turns / 2
