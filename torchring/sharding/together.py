"""Ranks begin a step, or a checkpoint, together. Finds ranks that do something else, so that nobody waits for them."""

from __future__ import annotations

from torchring.collectives.operations import exchange
from torchring.collectives.service import internal_collectives_of
from torchring.collectives.signature import Signature
from torchring.world import World


def begin_together(world: World, number: int, what: str, said: bytes = b"") -> list[bytes]:
    """Collective: begin `what`, and tell the other ranks a few bytes. Returns those of all ranks.

    Args:
        number: of the optimizer, among those of the world that are sharded.

    Raises PlanMismatchError on all ranks if others begin something else, another backward for instance.
    """
    return internal_collectives_of(world).run(
        what, exchange, said, Signature(what.removesuffix("()"), f"optimizer {number}")
    )
