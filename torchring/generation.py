"""Elastic jobs, as the engine knows them: the world before the first generation, and a coming change of ranks."""

from __future__ import annotations

from torchring.errors import TopologyError
from torchring.world import World


class ProvisionalWorld(World):
    """A world of one in an elastic job between two generations, and before the first: collectives raise."""


class Change:
    """A change of ranks that this rank has heard of. `world.shared(Change)` is that of a world.

    Attributes:
        is_wanted: at the end of a step, the ranks of this world are to meet anew, or to end.
        leaves: this rank is about to end, and does not meet the others anew.
    """

    def __init__(self, world: World) -> None:
        self.is_wanted = False
        self.leaves = False


def refuse_before_generation(world: World, what: str) -> None:
    """Raise TopologyError in an elastic job whose workers have not met yet."""
    if isinstance(world, ProvisionalWorld):
        raise TopologyError(
            f"{what} was called before the workers of this elastic job have met; call it inside the function that "
            "torchring.elastic.run decorates (docs/guides/elastic.md shows how)"
        )
