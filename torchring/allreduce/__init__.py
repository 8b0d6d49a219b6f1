"""How a full bucket is reduced: schedules (pure functions) and the movers that follow them."""

from __future__ import annotations

from torchring.allreduce.mover import TAGS_PER_ROUND, LaneMover, Mover, NonFinite, PendingReduction, StagedMover, Wire

__all__ = ["TAGS_PER_ROUND", "LaneMover", "Mover", "NonFinite", "PendingReduction", "StagedMover", "Wire"]
