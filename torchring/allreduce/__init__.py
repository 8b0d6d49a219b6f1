"""How a full bucket is reduced: schedules (pure functions) and the movers that follow them."""

from __future__ import annotations

from torchring.allreduce.mover import Mover, NonFinite, Wire

__all__ = ["Mover", "NonFinite", "Wire"]
