"""Carries out Horovod's collectives: from a call on one rank, through negotiation, to the result.

A call puts an `Operation` in line, and wakes the engine's thread. The thread begins a negotiation cycle, in which all
ranks hand each other their new requests; a bell wakes the threads of ranks that have none (`bells.py`). All ranks then
know which operations are ready (`negotiation.py`), and carry these out in the same order (`execution.py`).

Source: the contract is Horovod's (horovod.torch.mpi_ops): operations of one name meet, in any order of calls.
"""

import functools
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from torchring.collectives.operations import Backend, exchange
from torchring.collectives.service import Collectives
from torchring.collectives.signature import Signature
from torchring.dynamo import run_eagerly
from torchring.errors import RingError, ranks_in_words
from torchring.groups import open_world
from torchring.horovod.bells import Bell, SharedMemoryBell, StoreBell
from torchring.horovod.exceptions import HorovodInternalError
from torchring.horovod.execution import Operation, Plane, carry_out
from torchring.horovod.negotiation import JOIN, Negotiation, Request, Response, decode_requests, encode_requests
from torchring.horovod.settings import DYNAMIC_TIMELINE, Settings
from torchring.horovod.timeline import Timeline
from torchring.norms import LayerTurns
from torchring.threads import SerialThread, at_last
from torchring.world import World

ADD_SET: Final = "add_process_set"
REMOVE_SET: Final = "remove_process_set"
_CYCLE: Final = "a cycle of Horovod's collectives"
_SIGNATURE: Final = Signature("negotiation")
_logger: Final = logging.getLogger("torchring")
_IDLE_SECONDS: Final = 2.0  # between two looks of the sleeping thread, if nothing is waiting for other ranks
_WATCH_SECONDS: Final = 0.1  # the same, if something is: are the other ranks alive?
_HEARTBEAT_SECONDS: Final = 5.0  # between hosts, only a cycle shows whether the other ranks are alive


class CollectiveEngine:
    """The operations of one world. Opening it is collective."""

    def __init__(self, world: World, settings: Settings) -> None:
        self.world = world
        self.settings = settings
        self.turns = world.shared(LayerTurns)  # counts SyncBatchNorm layers, and ends them after a join
        has_file = world.rank == 0 and settings.timeline not in (None, DYNAMIC_TIMELINE)
        # Open the file of HOROVOD_TIMELINE before other ranks ask for anything.
        self.timeline = Timeline(str(settings.timeline), mark_cycles=settings.mark_cycles) if has_file else None
        self._is_closed = False
        # Process sets, and those with this rank
        # the global ranks of each process set, ascending, by its number. 0 is the set of all ranks.
        self.sets: dict[int, tuple[int, ...]] = {0: tuple(range(world.size))}
        self._planes: dict[int, Plane] = {}
        self._num_sets = 0  # that were ever added
        # Operations of this rank, under a lock, which a signal handler may take, too
        self.handles: dict[int, Operation] = {}  # operations that were started, and not waited for yet
        self.next_handle: Callable[[], int] = itertools.count().__next__
        self._lock = threading.RLock()
        self._submitted: list[Operation] = []
        self._in_flight: dict[tuple[int, str], Operation] = {}
        self._has_waiter = False  # a thread waits for a result, so that the next cycle begins at once
        self._warned: set[tuple[int, str]] = set()  # operations whose wait was logged
        # Cycles, which the thread runs
        self._negotiation = Negotiation(self.sets)
        self._num_cycles = 0
        self._last_cycle = time.monotonic()
        self._fusion_bytes = settings.fusion_threshold_bytes
        self._collectives = Collectives(world, "horovod", is_scripts=False)
        self._bell = self._collectives.run("hvd.init()", self._open)
        self._thread = SerialThread("torchring-horovod")
        self._thread.submit(self._serve)
        world.on_close(self.close)
        world.on_failure(self)
        _engines.add(self)

    def _open(self, backend: Backend) -> Bell:
        world = self.world
        self._planes[0] = Plane(self._collectives, self.sets[0])
        # What is reduced together must be the same on all ranks, so the setting of rank 0 counts.
        self._fusion_bytes = int(exchange(backend, b"%d" % self._fusion_bytes, _SIGNATURE)[0])
        if world.rendezvous is None or world.host is None:
            return Bell()
        return SharedMemoryBell(world.host) if world.shares_memory else StoreBell(world.rendezvous)

    def submit(self, operation: Operation, *, is_awaited: bool = False) -> Operation:
        """Put an operation in line. Returns it.

        Raises ValueError if one of this name is under way, HorovodInternalError if the world is closed or broken.
        """
        request = operation.request
        with self._lock:
            if self._is_closed or not self.world.is_open:
                raise HorovodInternalError("Horovod has been shut down; call hvd.init() first")
            self.world.raise_if_broken()
            if request.key in self._in_flight:
                raise ValueError(
                    f"{request.kind} {request.name!r} was called while an operation of the same name is under way; "
                    "wait for that with synchronize(), or give each call a name of its own"
                )
            self._in_flight[request.key] = operation
            if (timeline := self.timeline) is not None:
                timeline.submitted(request)
            self._submitted.append(operation)
            self._has_waiter |= is_awaited
            is_first = len(self._submitted) == 1
        if is_first or is_awaited:
            self._bell.wake()
        return operation

    def run(self, operation: Operation) -> Any:
        """Submit an operation and wait for its result."""
        return self.wait(self.submit(operation, is_awaited=True))

    def wait(self, operation: Operation) -> Any:
        """The result of a submitted operation. Raises its error."""
        if not operation.done.done() and not self._has_waiter:
            self._has_waiter = True
            self._bell.wake()
        result = operation.done.result()
        if operation.aside is not None:
            operation.aside.wait(result[0])
        return result

    # ---- the thread

    def _serve(self) -> None:
        try:
            while not self._is_closed:
                self._bell.wait(_WATCH_SECONDS if self._in_flight else _IDLE_SECONDS)
                self._wait_for_more()
                if not self._is_closed and self.world.failure is None:
                    self._take_part()
                elif self.world.failure is not None:
                    raise self.world.failure
        except Exception as error:
            _logger.debug("%s has failed", _CYCLE, exc_info=True)
            self.world.break_off(_CYCLE, error)
            self._end_all(error)

    def _wait_for_more(self) -> None:
        """More calls may follow, and join the next cycle, unless a thread of the script waits."""
        until = time.monotonic() + self.settings.cycle_seconds
        while self._submitted and not self._has_waiter and (left := until - time.monotonic()) > 0:
            self._bell.wait(left)

    def _take_part(self) -> None:
        idle = time.monotonic() - self._last_cycle
        is_heartbeat = bool(self._in_flight) and not self.world.shares_memory and idle > _HEARTBEAT_SECONDS
        if self._submitted or self._bell.last_begun() > self._num_cycles or is_heartbeat:
            self._run_cycle()
        elif self._in_flight:
            self._watch()

    def _watch(self) -> None:
        """Look after operations that wait for other ranks: check that these are alive, warn of long waits."""
        waiting = self._negotiation.waiting()
        if self.world.host is not None:
            needed = {rank for ranks in waiting.values() for rank in ranks}
            self.world.host.check_peers(sorted(needed - {self.world.rank}))
        for key, missing in waiting.items() if self.settings.stall_check else ():
            operation = self._in_flight.get(key)
            if operation is None:
                continue
            waited = time.monotonic() - operation.since
            text = f"{operation.request.kind} {key[1]!r} has waited {waited:.1f} s for {ranks_in_words(missing)}"
            if waited > self.settings.stall_warning_seconds and key not in self._warned:
                self._warned.add(key)
                _logger.warning("%s", text)
            if 0 < self.settings.stall_shutdown_seconds < waited:
                raise HorovodInternalError(f"{text}, longer than HOROVOD_STALL_SHUTDOWN_TIME_SECONDS allows")

    @run_eagerly
    def _run_cycle(self) -> None:
        """Exchange requests with all ranks, and carry out the operations that are ready."""
        with self._lock:
            requests = [operation.request for operation in self._submitted]
            self._submitted, self._has_waiter = [], False
        self._num_cycles += 1
        self._bell.begin(self._num_cycles)
        self._last_cycle = time.monotonic()
        self._collectives.run(_CYCLE, self._negotiate, requests)

    def _negotiate(self, backend: Backend, requests: Sequence[Request]) -> None:
        """Tell all ranks about these requests, learn about theirs, and carry out what is ready."""
        message = encode_requests(requests)
        said = exchange(backend, message, _SIGNATURE)
        submitted = [requests if text == message else decode_requests(text) for text in said]
        if (timeline := self.timeline) is not None:
            timeline.cycle(submitted)
        responses = self._negotiation.advance(submitted)
        # SyncBatchNorm layers would wait for a rank that has joined.
        who = ranks_in_words(self._negotiation.joined)
        reason = f"{who} called hvd.join(no SyncBatchNorm layer may train meanwhile)"
        self.turns.limit(self._negotiation.layers_before_join(), reason)
        for batch in self._batches(responses):
            self._carry_out(batch)

    # ---- carrying out

    def _batches(self, responses: Sequence[Response]) -> Iterator[list[Response]]:
        """Responses in order. Reductions of one kind and dtype are carried out together, up to the fusion threshold."""
        batch: list[Response] = []
        num_bytes = 0
        for response in responses:
            size, kind = response.first.num_bytes, response.fuses_as
            if batch and (kind is None or kind != batch[-1].fuses_as or num_bytes + size > self._fusion_bytes):
                yield batch
                batch, num_bytes = [], 0
            batch.append(response)
            num_bytes += size
        if batch:
            yield batch

    def _carry_out(self, batch: Sequence[Response]) -> None:
        first = batch[0].first
        if (plane := self._planes.get(first.process_set)) is None:
            return  # this rank is not in the set
        # None if this rank has joined
        calls = [self._in_flight.get(r.first.key) if self.world.rank in r.requests else None for r in batch]
        if batch[0].error:
            self._finish(calls, error=HorovodInternalError(batch[0].error))
        elif first.kind == JOIN:
            self._finish(calls, [batch[0].last_to_join])
        elif first.kind == ADD_SET:
            self._finish(calls, [self._add_set(first.argument("ranks"))])
        elif first.kind == REMOVE_SET:
            self._remove_set(first.argument("process set"))
            self._finish(calls)
        else:
            self._compute(plane, calls, batch)

    def _compute(self, plane: Plane, calls: Sequence[Operation | None], batch: Sequence[Response]) -> None:
        requests = [response.first for response in batch]
        if (timeline := self.timeline) is not None:
            timeline.begin(requests)
        asides = [call.aside for call in calls if call is not None and call.aside is not None]
        run = functools.partial(plane.devices.run_aside, asides, carry_out) if asides else carry_out
        try:
            results = run(plane, calls, batch)
        except (ValueError, TypeError) as error:
            if not getattr(error, "in_step", False):
                raise
            self._finish(calls, error=error)
        else:
            self._finish(calls, results)
        if timeline is not None:
            timeline.end(requests)

    def _add_set(self, ranks: tuple[int, ...]) -> int:
        """Collective: let these ranks exchange data among themselves. Returns the number of the process set."""
        number = next(number for number in itertools.count(1) if number not in self.sets)
        self._num_sets += 1
        self.sets[number] = ranks
        if self.world.rank in ranks:
            world = open_world(self.world, ranks, f"horovod/set{self._num_sets}")
            self._planes[number] = Plane(Collectives(world, "horovod", is_scripts=False), ranks)
        return number

    def _remove_set(self, number: int) -> None:
        """Collective: forget a process set, and what its ranks are waiting for."""
        self._negotiation.forget(number)
        error = HorovodInternalError("the process set was removed while this operation was under way")
        with self._lock:
            self._submitted = [each for each in self._submitted if each.request.process_set != number]
            self._finish([each for key, each in self._in_flight.items() if key[0] == number], error=error)
        del self.sets[number]
        if (plane := self._planes.pop(number, None)) is not None:
            plane.collectives.world.close()

    def _finish(
        self, calls: Sequence[Operation | None], results: Sequence[Any] = (), error: Exception | None = None
    ) -> None:
        for operation, result in itertools.zip_longest(calls, results):
            if operation is None or self._in_flight.pop(operation.request.key, None) is None:
                continue  # of another rank, or the world was closed meanwhile
            self._warned.discard(operation.request.key)
            if error is not None:
                operation.done.set_exception(error)
            else:
                operation.done.set_result(result)

    def _end_all(self, cause: BaseException) -> None:
        """Carry out nothing more: wake all threads that wait, with the error that scripts and `elastic.run` catch."""
        error = cause
        if not isinstance(error, HorovodInternalError):
            error = HorovodInternalError(f"{type(cause).__name__}: {cause}")
            error.__cause__ = cause
        with self._lock:
            self._submitted = []
            self._finish(list(self._in_flight.values()), error=error)

    # ---- the end

    def fail(self, error: RingError) -> None:
        """The world is broken: have the thread look."""
        self._bell.wake()

    def close(self) -> None:
        """Operations that are under way raise HorovodInternalError."""
        self.stop()
        self._end_all(HorovodInternalError("Horovod has been shut down"))
        for number in [number for number in self.sets if number]:
            self._remove_set(number)

    def stop(self) -> None:
        """End the thread."""
        self._is_closed = True
        if not self.world.is_forked:
            self._bell.wake()
            self._bell.close()
        self._thread.close()
        if threading.current_thread().name != "torchring-horovod":
            self._thread.join(1.0)


_engines: weakref.WeakSet[CollectiveEngine] = weakref.WeakSet()


@at_last
def _stop_at_exit() -> None:
    for engine in list(_engines):
        engine.stop()
