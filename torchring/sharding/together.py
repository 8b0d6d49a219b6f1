"""Ranks begin a step, or a checkpoint, together. Finds ranks that do something else, so that nobody waits for them."""

from __future__ import annotations

import time
from typing import Final

from torchring.collectives.operations import exchange
from torchring.collectives.service import internal_collectives_of
from torchring.collectives.signature import Signature
from torchring.errors import PlanMismatchError, ranks_in_words
from torchring.gradients.group import OptimizerGroup
from torchring.observe.flight_recorder.entries import Entry
from torchring.observe.services import monitor_of
from torchring.world import World

_LOOK_SECONDS: Final = 0.2


def begin_together(world: World, number: int, what: str, said: bytes = b"") -> list[bytes]:
    """Collective: begin `what`, and tell the other ranks a few bytes. Returns those of all ranks.

    Args:
        number: of the optimizer, among those of the world that are sharded.

    Raises PlanMismatchError on all ranks if others begin something else, or, on this host, another backward.
    """
    entries = (reducer.progress for reducer in world.shared(OptimizerGroup).reducers)
    positions = {entry.key: entry.num_begun for entry in entries if isinstance(entry, Entry)}
    next_look = time.monotonic() + _LOOK_SECONDS

    def look() -> bool:
        nonlocal next_look
        if (now := time.monotonic()) > next_look:
            next_look = now + _LOOK_SECONDS
            _refuse_backward(world, what, positions)
        return True

    signature = Signature(what.removesuffix("()"), f"optimizer {number}")
    return internal_collectives_of(world).run(what, exchange, said, signature, look)


def _refuse_backward(world: World, what: str, positions: dict[int, int]) -> None:
    """Raise PlanMismatchError if another rank waits in a backward that this rank has not begun."""
    monitor = monitor_of(world)
    ahead = [
        rank
        for rank, state in ({} if monitor is None else monitor.states()).items()
        if any(
            (entry := state.entries.get(key)) is not None and entry.waits and entry.num_begun > position
            for key, position in positions.items()
        )
    ]
    if ahead:
        raise PlanMismatchError(
            f"{what} was called on rank {world.rank}, where {ranks_in_words(ahead)} went on with another backward(). "
            f"An optimizer with shard=True needs {what} on all ranks",
            rank=world.rank,
            peers=ahead,
        )
