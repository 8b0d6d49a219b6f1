"""Movers whose reductions fly in lanes, threads that go on while backward does, or are over when `start` returns.

A lane is one thread that reduces one wire after the other. With several, the next bucket is on its way while the last
one is checked, added and waited for, so the network is not left idle between buckets; that ranks keep to one order in
each lane is enough, as lanes do not wait for each other.

      lane 0   bucket 0 ..........  bucket 2 ..........
      lane 1        bucket 1 ..........  bucket 3 ...
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future

import torch

from torchring.allreduce.mover import LaneMover, NonFinite, Wire
from torchring.errors import PeerLostError, RingError
from torchring.threads import SerialThread


class _Driver:
    """What drives a mover, whichever thread it does so in."""

    def __init__(self, mover: LaneMover) -> None:
        self._mover = mover

    @property
    def algorithm(self) -> str:
        return self._mover.algorithm

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> Sequence[Wire]:
        return self._mover.open_wires(specs)

    def fail(self, error: RingError) -> None:
        self._mover.fail(error)

    def close(self) -> None:
        self._mover.close()


class PendingInLane:
    """One reduction in a lane. See `PendingReduction`."""

    __slots__ = ("_future", "_lanes", "span")

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self.span: tuple[float, float] | None = None
        self._future: Future[NonFinite | None] | None = None

    def advance(self) -> bool:
        return True

    def contribute(self) -> None:
        """It does so by itself."""

    def wait(self) -> NonFinite | None:
        assert self._future is not None
        try:
            return self._future.result()
        except CancelledError:
            raise PeerLostError("torchring.shutdown() or close() was called before this reduction began") from None
        except RingError as error:
            # What went wrong first; what follows in other lanes are its echoes.
            raise self._lanes.failure or error from None


class Lanes(_Driver):
    """Runs a mover in lanes. See `StagedMover`; used by one thread."""

    in_background = True

    def __init__(self, mover: LaneMover) -> None:
        super().__init__(mover)
        self._workers = [SerialThread(f"torchring-lane-{i}") for i in range(mover.num_lanes)]
        self._num_started = 0
        self._lock = threading.Lock()
        self.failure: RingError | None = None  # the first one

    def all_reduce(self, wire: Wire, *, scale: float = 1.0, tag: int = 0) -> NonFinite | None:
        return self.start(wire, scale=scale, tag=tag).wait()

    def start(self, wire: Wire, *, scale: float = 1.0, tag: int = 0) -> PendingInLane:
        lane = self._num_started % len(self._workers)
        self._num_started += 1
        flight = PendingInLane(self)
        flight._future = self._workers[lane].submit(lambda: self._reduce(flight, wire, scale, tag, lane))
        return flight

    def fail(self, error: RingError) -> None:
        with self._lock:
            self.failure = self.failure or error
        super().fail(error)

    def _reduce(self, flight: PendingInLane, wire: Wire, scale: float, tag: int, lane: int) -> NonFinite | None:
        if self.failure is not None:  # nothing is sent through a broken mover
            raise self.failure
        started = time.perf_counter()
        try:
            return self._mover.all_reduce(wire, scale=scale, tag=tag, lane=lane)
        except RingError as error:
            with self._lock:
                self.failure = self.failure or error
            raise
        finally:
            flight.span = started, time.perf_counter()

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        super().close()


class DoneFlight:
    """A reduction that is over. See `PendingReduction`."""

    span = None

    def __init__(self, result: NonFinite | None) -> None:
        self._result = result

    def advance(self) -> bool:
        return True

    def contribute(self) -> None:
        """Done."""

    def wait(self) -> NonFinite | None:
        return self._result


class StandingBy(_Driver):
    """Runs a mover in the caller's thread, which stands by. See `StagedMover`."""

    in_background = False

    def all_reduce(self, wire: Wire, *, scale: float = 1.0, tag: int = 0) -> NonFinite | None:
        return self._mover.all_reduce(wire, scale=scale, tag=tag)

    def start(self, wire: Wire, *, scale: float = 1.0, tag: int = 0) -> DoneFlight:
        return DoneFlight(self._mover.all_reduce(wire, scale=scale, tag=tag))
