"""Inside `torchring.join`, some ranks may have ended. They take part in reductions of gradients only."""

from __future__ import annotations

from torchring.world import World


class Join:
    """Whether the script is inside `torchring.join`. `world.shared(Join)` is that of a world."""

    def __init__(self, world: World) -> None:
        self.is_open = False

    def refuse(self, what: str) -> None:
        """Raise ValueError inside `torchring.join`, for what needs all ranks."""
        if self.is_open:
            raise ValueError(
                f"{what} was called inside torchring.join(), where ranks whose data has ended would not take part; "
                "call it before or after the with block"
            )
