"""Who observes a world: a flight recorder if it has several ranks, and a recorder if somebody has asked for one."""

from __future__ import annotations

import os
import sys

from torchring.observe import TRACE
from torchring.observe.flight_recorder.entries import MEMORY_BYTES, FlightRecorder
from torchring.observe.flight_recorder.monitor import StallMonitor
from torchring.world import World


def observe(world: World) -> World:
    """Begin to observe `world`, which has just been opened. Collective. Returns `world`."""
    monitor_of(world)
    writer = sys.modules.get("torchring.observe.recorder.writer")
    if os.environ.get(TRACE) or (writer is not None and writer.is_writing()):
        from torchring.observe.recorder.writer import recorder_of

        recorder_of(world)
    return world


def flight_recorder_of(world: World) -> FlightRecorder | None:
    """Where this rank says what it is doing. None in a world of one."""
    monitor = monitor_of(world)
    return None if monitor is None else monitor.recorder


def monitor_of(world: World) -> StallMonitor | None:
    """Knows what the other ranks are doing, and warns when this rank waits. None in a world of one."""
    return world.shared(_open_monitor)


def _open_monitor(world: World) -> StallMonitor | None:
    rendezvous, host = world.rendezvous, world.host
    if rendezvous is None or host is None:
        return None
    observer, limit = world.observer, world.stall_warning_seconds
    monitor = StallMonitor(rendezvous, host, host.allocate(MEMORY_BYTES), limit, observer.operations)
    world.on_close(monitor.close)
    observer.add(monitor.recorder)
    observer.explain = monitor.explain
    rendezvous.on_wait = host.on_wait = monitor.recorder.await_ranks
    return monitor
