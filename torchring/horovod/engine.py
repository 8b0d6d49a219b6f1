"""Carries out Horovod's collectives: from a call on one rank, through negotiation, to the result.

A call puts an `Operation` in line. Whoever wants its result, or this engine's thread, begins a negotiation cycle: all
ranks hand each other their new requests (`cycles.py`). All ranks then know which operations are ready
(`negotiation.py`), and carry these out in the same order (`execution.py`).

Only one thread runs cycles at a time. A thread of the script that waits for a result runs the cycle itself, so that a
blocking call needs no switch of threads. The engine's own thread runs cycles for calls whose result nobody waits for
yet, and takes part in the cycles of other ranks. It sleeps otherwise.

Source: the contract is Horovod's (horovod.torch.mpi_ops): operations of one name meet, in any order of calls.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from torchring.collectives.operations import Backend
from torchring.collectives.service import Collectives
from torchring.dynamo import run_eagerly
from torchring.errors import RingError, ranks_in_words
from torchring.horovod.cycles import Cycles, SharedMemoryCycles, StoreCycles
from torchring.horovod.exceptions import HorovodInternalError
from torchring.horovod.execution import Operation, Plane, carry_out
from torchring.horovod.negotiation import (
    ADD_SET,
    JOIN,
    REMOVE_SET,
    Negotiation,
    Response,
    decode_requests,
    encode_requests,
)
from torchring.horovod.settings import Settings
from torchring.horovod.timeline import Timeline
from torchring.norms import LayerTurns
from torchring.observe.services import observe
from torchring.rendezvous.signed import within
from torchring.threads import SerialThread, at_last
from torchring.world import World

_logger: Final = logging.getLogger("torchring")
_IDLE_SECONDS: Final = 2.0  # between two looks of the sleeping thread, if nothing is waiting for other ranks
_WATCH_SECONDS: Final = 0.1  # the same, if something is: are the other ranks alive?
_HEARTBEAT_SECONDS: Final = 5.0  # between hosts, only a cycle shows whether the other ranks are alive


class CollectiveEngine:
    """The operations of one world. Opening it is collective."""

    def __init__(self, world: World, settings: Settings, timeline: Timeline | None = None) -> None:
        self.world = world
        self.timeline = timeline
        self.turns = world.shared(LayerTurns)  # counts SyncBatchNorm layers, and ends them after a join
        self._settings = settings
        self._fusion_bytes = settings.fusion_threshold_bytes
        self._collectives = Collectives(world, "horovod", is_scripts=False)
        self._is_closed = False
        # Process sets: the global ranks of each, ascending, and how these exchange data (only of sets with this rank)
        self.sets: dict[int, tuple[int, ...]] = {0: tuple(range(world.size))}
        self.planes: dict[int, Plane] = {}
        self._num_sets = 0  # that were ever added
        # Operations of this rank, under the lock of `_state`, which a signal handler may take, too
        self._state = threading.Condition(threading.RLock())
        self._submitted: list[Operation] = []
        self._in_flight: dict[tuple[int, str], Operation] = {}
        self._warned: set[tuple[int, str]] = set()  # operations whose wait was logged
        # Cycles, run by one thread at a time, which holds `_turn`
        self._cycles: Cycles | None = None
        self._negotiation = Negotiation(self.sets)
        self._turn = threading.RLock()
        self._num_waiting = 0  # threads that wait for a result
        self._last_cycle = time.monotonic()
        self._thread = SerialThread("torchring-horovod")
        if world.size == 1:
            self.planes[0] = Plane(world, (0,), self._collectives.run)
        else:
            self._cycles = self._collectives.run("hvd.init()", self._open_cycles)
            self._thread.submit(self._serve)
        world.on_close(self.close)
        world.on_failure(self)
        _engines.add(self)

    def _open_cycles(self, backend: Backend) -> Cycles:
        world = self.world
        self.planes[0] = Plane(world, self.sets[0], lambda _, operation: operation(backend))  # while a cycle is run
        cycles: Cycles
        if world.shares_memory and world.host is not None:
            cycles = SharedMemoryCycles(world.host, backend, self._settings.cycle_seconds)
        else:
            assert world.rendezvous is not None
            cycles = StoreCycles(world.rendezvous, backend)
        # What is reduced together must be the same on all ranks, so the setting of rank 0 counts.
        self._fusion_bytes = int(cycles.exchange(b"%d" % self._fusion_bytes)[0])
        return cycles

    def _add_set(self, ranks: tuple[int, ...]) -> int:
        """Collective: let these ranks exchange data among themselves. Returns the id of the process set."""
        process_set = next(number for number in itertools.count(1) if number not in self.sets)
        self._num_sets += 1
        self.sets[process_set] = ranks
        outer, rendezvous = self.world, self.world.rendezvous
        if outer.rank in ranks:
            assert rendezvous is not None
            world = World(
                within(rendezvous.store, f"horovod/set{self._num_sets}") if len(ranks) > 1 else None,
                ranks.index(outer.rank),
                len(ranks),
                timeout_seconds=outer.timeout_seconds,
                launcher=outer.launcher,
                backend=outer.backend,
                stall_warning_seconds=outer.stall_warning_seconds,
            )
            observe(world)
            self.planes[process_set] = Plane(world, ranks, Collectives(world, "horovod", is_scripts=False).run)
        return process_set

    def _remove_set(self, process_set: int) -> None:
        """Collective: forget a process set, and what its ranks are waiting for."""
        self._negotiation.forget(process_set)
        with self._state:
            error = HorovodInternalError("the process set was removed while this operation was under way")
            for operation in list(self._in_flight.values()):
                if operation.request.process_set == process_set:
                    self._end(operation, None, error)
            self._submitted = [each for each in self._submitted if each.request.process_set != process_set]
            self._state.notify_all()
        plane = self.planes.pop(process_set, None)
        del self.sets[process_set]
        if plane is not None:
            plane.world.close()

    def submit(self, operation: Operation, *, wakes: bool = True) -> None:
        """Put an operation in line. The engine's thread will carry it out, if nobody waits for it before.

        Raises ValueError if one of this name is under way, HorovodInternalError if the world is closed or broken.
        """
        request = operation.request
        with self._state:
            if self._is_closed or not self.world.is_open:
                raise HorovodInternalError("Horovod has been shut down; call hvd.init() first")
            self.world.raise_if_broken()
            if request.key in self._in_flight:
                raise ValueError(
                    f"{request.kind} {request.name!r} was called while an operation of the same name is under way; "
                    "wait for that with synchronize(), or give each call a name of its own"
                )
            operation.since = time.monotonic()
            self._in_flight[request.key] = operation
            if (timeline := self.timeline) is not None:
                timeline.submitted(request)
            if len(self.sets[request.process_set]) == 1:  # of this rank alone
                self._carry_out_alone(operation)
                return
            self._submitted.append(operation)
            is_first = len(self._submitted) == 1
        if is_first and wakes and self._cycles is not None:
            self._cycles.wake()

    def run(self, operation: Operation) -> Any:
        """Submit an operation and wait for its result."""
        self.submit(operation, wakes=False)  # this thread runs the cycle
        return self.wait(operation)

    def wait(self, operation: Operation) -> Any:
        """The result of a submitted operation. Raises its error."""
        self._num_waiting += 1
        try:
            while not operation.is_done:
                if self._submitted and self._turn.acquire(blocking=False):
                    try:
                        if self._submitted and not operation.is_done:
                            self._run_cycle()
                    finally:
                        self._end_turn()
                    continue
                with self._state:
                    if not operation.is_done and not (self._submitted and self._is_nobodys_turn()):
                        self._state.wait(_WATCH_SECONDS)
                    if not operation.is_done and (self._is_closed or self.world.failure is not None):
                        self._end_all(self.world.failure or HorovodInternalError("Horovod has been shut down"))
        finally:
            self._num_waiting -= 1
        if operation.error is not None:
            raise operation.error
        if operation.stream is not None:  # the caller may be in another one by now
            torch.cuda.current_stream(operation.stream.device).wait_stream(operation.stream)
        return operation.result

    def _end_turn(self) -> None:
        """Let a thread that waits run the next cycle."""
        self._turn.release()
        if self._num_waiting > 1 or self._submitted:
            with self._state:
                self._state.notify_all()

    def _is_nobodys_turn(self) -> bool:
        if not self._turn.acquire(blocking=False):
            return False
        self._turn.release()
        return True

    # ---- cycles

    def _serve(self) -> None:
        """The engine's thread."""
        assert self._cycles is not None
        while not self._is_closed:
            self._cycles.wait(_WATCH_SECONDS if self._in_flight else _IDLE_SECONDS)
            if self._is_closed or self.world.failure is not None:
                break
            if self._submitted and not self._num_waiting:
                time.sleep(self._settings.cycle_seconds)  # more calls may follow, and join this cycle
            try:
                self._take_part()
            except Exception as error:
                _logger.debug("a cycle of Horovod's collectives has failed", exc_info=True)
                self.world.break_off("a cycle of Horovod's collectives", error)
                self._end_all(error)
                break
        if self.world.failure is not None:
            self._end_all(self.world.failure)
            if self._negotiation.joined:  # they wait for cycles alone, which tell them
                self._cycles.wake_others()

    def fail(self, error: RingError) -> None:
        """The world is broken: have the engine's thread look."""
        if self._cycles is not None:
            self._cycles.wake()

    def _take_part(self) -> None:
        """Run a cycle if there is reason for it."""
        assert self._cycles is not None
        with self._turn:
            idle = time.monotonic() - self._last_cycle
            is_heartbeat = bool(self._in_flight) and not self.world.shares_memory and idle > _HEARTBEAT_SECONDS
            if self._is_closed:
                return
            if self._submitted or self._cycles.is_awaited() or is_heartbeat:
                self._run_cycle()
            elif self._in_flight:
                self._watch()
        with self._state:
            self._state.notify_all()

    def _watch(self) -> None:
        """Look after operations that wait for other ranks: check that these are alive, warn of long waits."""
        host = self.world.host
        if host is not None:
            with self._state:
                needed = {rank for ranks in self._negotiation.waiting().values() for rank in ranks}
            host.check_peers(sorted(needed - {self.world.rank}))
        if not self._settings.stall_check:
            return
        now = time.monotonic()
        for key, missing in self._negotiation.waiting().items():
            operation = self._in_flight.get(key)
            if operation is None:
                continue
            waited = now - operation.since
            text = f"{operation.request.kind} {key[1]!r} has waited {waited:.1f} s for {ranks_in_words(missing)}"
            if waited > self._settings.stall_warning_seconds and key not in self._warned:
                self._warned.add(key)
                _logger.warning("%s", text)
            if 0 < self._settings.stall_shutdown_seconds < waited:
                raise HorovodInternalError(f"{text}, longer than HOROVOD_STALL_SHUTDOWN_TIME_SECONDS allows")

    @run_eagerly
    def _run_cycle(self) -> None:
        """Exchange requests with all ranks, and carry out the operations that are ready."""
        with self._state:
            operations, self._submitted = self._submitted, []
        self._last_cycle = time.monotonic()
        try:
            self._collectives.run("a cycle of Horovod's collectives", lambda backend: self._negotiate(operations))
        except BaseException as error:
            self._end_all(error)
            if not isinstance(error, Exception):
                raise
            raise _as_internal_error(error) from error

    def _negotiate(self, operations: Sequence[Operation]) -> None:
        """Tell all ranks about these operations, learn about theirs, and carry out those that are ready."""
        assert self._cycles is not None
        requests = [operation.request for operation in operations]
        message = encode_requests(requests)
        said = self._cycles.exchange(message)
        submitted = [requests if text == message else decode_requests(text) for text in said]
        if (timeline := self.timeline) is not None:
            timeline.cycle(submitted)
        responses = self._negotiation.advance(submitted)
        self._limit_layers()
        self._carry_out(responses)

    def _limit_layers(self) -> None:
        """End the SyncBatchNorm layers that would wait for a rank that has joined."""
        most = self._negotiation.layers_before_join()
        if most is None:
            self.turns.limit(None)
            return
        ranks = ranks_in_words(self._negotiation.joined)
        self.turns.limit(most, f"{ranks} called hvd.join(no SyncBatchNorm layer may train meanwhile)")

    # ---- carrying out

    def _carry_out(self, responses: Sequence[Response]) -> None:
        for batch in self._batches(responses):
            first = batch[0].first
            # None if this rank has joined, or is not in the set
            operations = [
                self._in_flight[response.first.key] if self.world.rank in response.requests else None
                for response in batch
            ]
            plane = self.planes.get(first.process_set)
            if plane is None:
                continue  # not in the set
            if batch[0].error:
                self._finish(operations, error=HorovodInternalError(batch[0].error))
                continue
            if first.kind == JOIN:
                self._finish(operations, [batch[0].last_to_join])
                continue
            if first.kind == ADD_SET:
                self._finish(operations, [self._add_set(tuple(first.arguments["ranks"]))])
                continue
            if first.kind == REMOVE_SET:
                self._remove_set(first.arguments["process set"])
                self._finish(operations)
                continue
            if (timeline := self.timeline) is not None:
                timeline.begin([response.first for response in batch])
            streams = [operation.stream for operation in operations if operation and operation.stream is not None]
            for other in streams[1:]:
                streams[0].wait_stream(other)
            try:
                with torch.cuda.stream(streams[0]) if streams else contextlib.nullcontext():
                    results = plane.run(first.kind, functools.partial(carry_out, plane, operations, batch))
            except (ValueError, TypeError) as error:
                if not getattr(error, "in_step", False):
                    raise
                self._finish(operations, error=error)
            else:
                for other in streams[1:]:
                    other.wait_stream(streams[0])
                self._finish(operations, results)
            if timeline is not None:
                timeline.end([response.first for response in batch])

    def _batches(self, responses: Sequence[Response]) -> Iterator[list[Response]]:
        """Responses in order. Reductions of one kind and dtype are carried out together, up to the fusion threshold."""
        batch: list[Response] = []
        num_bytes = 0
        for response in responses:
            size = response.first.num_bytes
            fits = num_bytes + size <= self._fusion_bytes
            if batch and not (fits and batch[-1].fuses_with(response)):
                yield batch
                batch, num_bytes = [], 0
            batch.append(response)
            num_bytes += size
        if batch:
            yield batch

    def _carry_out_alone(self, operation: Operation) -> None:
        """The result of an operation whose process set has no other rank."""
        request, rank = operation.request, self.world.rank
        try:
            self._carry_out([Response({rank: request}, last_to_join=rank)])
        except BaseException:
            del self._in_flight[request.key]
            raise

    def _finish(
        self, operations: Sequence[Operation | None], results: Sequence[Any] = (), error: Exception | None = None
    ) -> None:
        with self._state:
            for operation, result in itertools.zip_longest(operations, results):
                if operation is not None:
                    self._end(operation, result, error)
            self._state.notify_all()

    def _end(self, operation: Operation, result: Any, error: Exception | None) -> None:
        self._in_flight.pop(operation.request.key, None)
        self._warned.discard(operation.request.key)
        operation.result, operation.error = result, error
        operation.is_done = True

    def _end_all(self, cause: BaseException) -> None:
        """Carry out nothing more: wake all threads that wait, with an error."""
        error = _as_internal_error(cause)
        with self._state:
            for operation in list(self._in_flight.values()):
                self._end(operation, None, error)
            self._submitted = []
            self._state.notify_all()

    def close(self) -> None:
        """Operations that are under way raise HorovodInternalError."""
        self.stop()
        self._end_all(HorovodInternalError("Horovod has been shut down"))
        for process_set in [number for number in self.sets if number]:
            self._remove_set(process_set)

    def stop(self) -> None:
        """End the thread."""
        self._is_closed = True
        if self._cycles is not None and not self.world.is_forked:
            self._cycles.wake()
            self._cycles.close()
        self._thread.close()
        if threading.current_thread().name != "torchring-horovod":
            self._thread.join(1.0)


_engines: weakref.WeakSet[CollectiveEngine] = weakref.WeakSet()


@at_last
def _stop_at_exit() -> None:
    for engine in list(_engines):
        engine.stop()


def _as_internal_error(cause: BaseException) -> HorovodInternalError:
    """The error that scripts and `elastic.run` catch, caused by `cause`."""
    if isinstance(cause, HorovodInternalError):
        return cause
    error = HorovodInternalError(f"{type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
