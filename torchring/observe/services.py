"""Who observes a world: a flight recorder if it has several ranks, and a recorder if somebody has asked for one."""

import os
import sys

from torchring.observe import TRACE
from torchring.observe.flight_recorder.entries import MEMORY_BYTES
from torchring.observe.flight_recorder.monitor import StallMonitor
from torchring.world import World


def observe(world: World) -> World:
    """Begin to observe `world`, which has just been opened. Collective. Returns `world`."""
    world.shared(monitor_of)
    writer = sys.modules.get("torchring.observe.recorder.writer")
    if os.environ.get(TRACE) or (writer is not None and writer.writers):
        from torchring.observe.recorder.writer import recorder_of

        recorder_of(world)
    return world


def monitor_of(world: World) -> StallMonitor | None:
    """For `World.shared`: knows what other ranks do, and warns when this one waits. None in a world of one."""
    rendezvous, host = world.rendezvous, world.host
    if rendezvous is None or host is None:
        return None
    observer, limit = world.observer, world.stall_warning_seconds
    monitors = world.outer.shared(_monitors)
    monitor = StallMonitor(rendezvous, host, host.allocate(MEMORY_BYTES), limit, observer.operations, monitors)
    world.on_close(monitor.close)
    observer.add(monitor.recorder)
    observer.explain = monitor.explain
    rendezvous.on_wait = host.on_wait = monitor.recorder.await_ranks
    return monitor


def _monitors(world: World) -> list[StallMonitor]:
    """Those of this rank, in the world of all ranks and its groups."""
    return []
