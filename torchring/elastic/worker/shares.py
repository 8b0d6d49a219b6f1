"""Optimizers with shard=True in a State: their state is gathered where ranks part, and dealt out where they meet."""

import logging
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torchring.collectives.service import collectives_of
from torchring.errors import RingError
from torchring.sharding import checkpoint
from torchring.sharding.optimizer import ShardedOptimizer, release, shards_of
from torchring.world import World

_log = logging.getLogger("torchring.elastic")


class Shares:
    """The state of optimizers with shard=True. Without such optimizers, nothing happens."""

    def __init__(self, sharded: Mapping[str, ShardedOptimizer]) -> None:
        self.sharded = sharded  # the optimizers, by name
        self.is_part = False  # their state was dealt out: what this rank has of it is not the whole
        self._whole: dict[str, dict[str, Any]] = {}  # their state_dicts, on the rank that deals them out

    def become_whole(self) -> None:
        """The ranks have parted: the optimizers get the whole state, if this rank was given it, or none."""
        for name, optimizer in self.sharded.items():
            release(optimizer)
            if self.is_part:
                optimizer.optimizer.state = defaultdict(dict)
                if self._whole:
                    optimizer.optimizer.load_state_dict(self._whole[name])
        self.is_part = self.is_part and not self._whole
        self._whole = {}

    def cut(self, world: World, *, keeps: bool) -> None:
        """The optimizers are about to be cut among the ranks of `world`. `keeps`: this rank deals out what it has."""
        if keeps:
            self._whole = {name: each.optimizer.state_dict() for name, each in self.sharded.items()}
        self.is_part = bool(self.sharded) and world.size > 1

    def deal_out(self, world: World, src: int) -> None:
        """Collective: give each rank its share of what rank `src` has."""
        if self.sharded and world.size > 1:
            for name, optimizer in self.sharded.items():
                whole = self._whole[name] if world.rank == src else None
                if (shards := shards_of(optimizer, "dealing out")) is not None:
                    checkpoint.load_state(shards, whole, src)
            collectives_of(world).barrier()  # until then, rank `src` may have to do this once more
        self._whole = {}

    def part(self, world: World, heir: int) -> None:
        """Collective, where ranks change: rank `heir` gets the whole state."""
        if world.size == 1:
            return
        try:
            for name, optimizer in self.sharded.items():
                shards, keeps = shards_of(optimizer, "gathering"), world.rank == heir
                if shards is not None and (whole := checkpoint.gather_state(shards, keeps=keeps)) is not None:
                    self._whole[name] = whole
        except RingError as error:  # a rank is lost meanwhile
            self._whole = {}
            _log.warning("ranks part without the optimizer's state: %s", error)
