"""The services that observe a world: a recorder and a flight recorder. `World.shared` opens one of each."""

from __future__ import annotations

from torchring.errors import RingError
from torchring.observe.flight_recorder.entries import MEMORY_BYTES, FlightRecorder
from torchring.observe.flight_recorder.monitor import StallMonitor
from torchring.observe.recorder import writer
from torchring.observe.recorder.recorder import Recorder
from torchring.world import World


def observe(world: World) -> World:
    """Begin to observe `world`, which has just been opened. Collective. Returns `world`."""
    monitor_of(world)
    recorder_of(world)
    return world


def recorder_of(world: World) -> Recorder:
    """Writes down the steps of this rank."""
    return world.shared(_Recording).recorder


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
    observer.listeners.append(monitor.recorder)
    observer.explain = monitor.explain
    rendezvous.on_wait = host.on_wait = monitor.recorder.await_ranks
    return monitor


class _Recording:
    """The recorder of a world. Its trace is written when the world breaks or closes."""

    def __init__(self, world: World) -> None:
        self.recorder = Recorder()
        world.observer.listeners.append(self.recorder)
        writer.add(self.recorder)
        world.on_failure(self)
        world.on_close(self.close)

    def fail(self, error: RingError) -> None:
        writer.note_end(self.recorder, str(error))

    def close(self) -> None:
        writer.note_end(self.recorder)
