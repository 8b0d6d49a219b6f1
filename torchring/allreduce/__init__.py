"""Reduces full buckets: schedules (pure functions), and the all-reduces that follow them."""

from __future__ import annotations

from torchring.allreduce.contract import TAGS_PER_ROUND, AllReduce, BlockingAllReduce, NonFinite, PendingReduction, Wire

__all__ = ["TAGS_PER_ROUND", "AllReduce", "BlockingAllReduce", "NonFinite", "PendingReduction", "Wire"]
