"""The worlds of a worker of an elastic job: a provisional one, and in its place one generation after the other."""

from torch.distributed import Store

from torchring.default_world import become, default_world, init, is_initialized
from torchring.errors import TopologyError
from torchring.meeting import enter, launched, meetings
from torchring.observe.services import observe
from torchring.rendezvous.environment import LaunchEnvironment
from torchring.world import World


def open_provisional(
    launch: LaunchEnvironment, backend: str, timeout_seconds: float, stall_warning_seconds: float
) -> World:
    """The world of a worker of an elastic job until `torchring.elastic.run` opens a generation."""
    if backend == "mpi":
        raise TopologyError("backend='mpi' does not work in an elastic job, whose ranks change; leave it out")
    world = World(
        None,
        launch.rank,
        1,
        local_rank=launch.local_rank,
        timeout_seconds=timeout_seconds,
        launcher=launch.launcher,
        stall_warning_seconds=stall_warning_seconds,
        is_provisional=True,
    )
    enter(world, launch.size)
    return observe(world)


def open_generation(store: Store, rank: int, size: int) -> World:
    """Make the world of a generation the default world, with the options of init(). Collective.

    Only the ranks of this generation share the store. Raises RingError if a rank is lost, or does not come.
    """
    before = leave_generation()
    meetings.num_worlds += 1
    world = observe(
        World(
            store if size > 1 else None,
            rank,
            size,
            local_rank=before.local_rank,
            timeout_seconds=before.timeout_seconds,
            launcher=before.launcher,
            stall_warning_seconds=before.stall_warning_seconds,
        )
    )
    world.check_data = before.check_data
    become(world)
    enter(world, size)
    return world


def leave_generation() -> World:
    """Close the world of a generation. Returns the provisional world that is the default world from then on."""
    if not is_initialized():
        return init()
    world = default_world()
    if world.is_provisional:
        return world
    world.close()
    provisional = open_provisional(launched(), world.backend, world.timeout_seconds, world.stall_warning_seconds)
    provisional.check_data = world.check_data
    become(provisional)
    return provisional
