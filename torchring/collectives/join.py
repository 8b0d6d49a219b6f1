"""Refuses collectives inside `torchring.join`, where ranks that have ended only reduce gradients."""

from __future__ import annotations

from torchring.world import World


class Join:
    """Knows if the script is inside `torchring.join`. A world has one: `world.shared(Join)`."""

    def __init__(self, world: World) -> None:
        self.is_open = False

    def refuse(self, what: str) -> None:
        """Raise ValueError inside `torchring.join`, for what needs all ranks."""
        if self.is_open:
            raise ValueError(
                f"{what} was called inside torchring.join(), where ranks whose data has ended would not take part; "
                "call it before or after the with block"
            )
