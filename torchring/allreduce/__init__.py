"""Reduces full buckets: schedules (pure functions), and the movers that follow them."""

from __future__ import annotations

from torchring.allreduce.contract import TAGS_PER_ROUND, BlockingMover, Mover, NonFinite, PendingReduction, Wire

__all__ = ["TAGS_PER_ROUND", "BlockingMover", "Mover", "NonFinite", "PendingReduction", "Wire"]
