"""Hands the state of a sharded optimizer from the ranks of one generation of an elastic job to those of the next.

1. `leave`: the generation is over. Each rank holds its share, and with `shard=True` another rank's (`mirror.py`). Ranks
   that were told to end have given theirs to a rank that stays (`leave_shares`).
2. `agree`: the ranks that have met find out which of them gives which share. A step that counts on some of them is made
   on all; one that counts on none is undone.
3. `restore`: each tensor is gathered from those who have parts of it, and each rank takes what is its own by now.
4. `confirm`: all ranks have theirs. Until then each rank also holds what it had, because ranks may be lost meanwhile.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.optim import Optimizer

from torchring.collectives.initial_state import fill_outline, load_plain, outline_of, save_plain
from torchring.collectives.service import internal_collectives_of
from torchring.gradients.validation import parameters_of
from torchring.memory.heap import trim
from torchring.sharding.checkpoint import Entry, Outlines, build
from torchring.sharding.kinds import Kind, kind_of
from torchring.sharding.mirror import keeper_of
from torchring.sharding.pieces import Part, Piece, copy_of, flat, is_scalar, laid_out_as
from torchring.sharding.step import Shards
from torchring.world import World

_VALUES: Final = "values"  # of parameters, among the names of their state


class _Row(NamedTuple):
    """What a rank has, as the other ranks hear of it.

    Attributes:
        generation: from which it has it.
        num_ranks: of that generation.
        num_steps: of that generation, that count.
        shares: of which ranks; its own first.
        can_finish: a step was broken off, which the rank can make.
        may_be_torn: a step was broken off, in which others have written to this rank's parameters.
    """

    generation: int
    num_ranks: int
    num_steps: int
    shares: list[int]
    can_finish: bool
    may_be_torn: bool


class Held:
    """What a rank has of the state, from the ranks of one generation.

    Attributes:
        generation: its number.
        num_ranks: of that generation.
        shares: pieces, by the rank whose share they are. In a world of one, rank 0 has whole parameters.
        everywhere: what every rank has.
        state: of all these pieces.
    """

    def __init__(self, optimizer: Optimizer, generation: int, shards: Shards | None) -> None:
        self.generation = generation
        self.shards = shards
        self.state, optimizer.state = optimizer.state, defaultdict(dict)
        self.shares: dict[int, list[Piece]] = {0: list(map(_whole, parameters_of(optimizer)))}
        self.num_ranks = 1
        self.everywhere: list[Piece] = []
        if shards is not None:
            self.num_ranks = shards.world.size
            self.shares = _shares_of(shards)
            self.everywhere = list(map(_whole, shards.everywhere))

    def describe(self) -> _Row:
        """What other ranks need to know."""
        shards = self.shards
        if shards is None:
            return _Row(self.generation, self.num_ranks, 0, [0], can_finish=False, may_be_torn=False)
        left, shares = shards.unfinished, [] if shards.is_half_done else list(self.shares)
        return _Row(
            *(self.generation, self.num_ranks, shards.num_steps, shares),
            can_finish=left is not None and left.is_intact,
            may_be_torn=left is not None and self.num_ranks > 2,
        )

    def finish(self, optimizer: Optimizer) -> None:
        """Make the step that was broken off."""
        assert self.shards is not None
        other, optimizer.state = optimizer.state, self.state
        try:
            self.shards.finish()
            self.shares = _shares_of(self.shards)
        finally:
            optimizer.state = other


class Handover:
    """Hands over the state of one sharded optimizer, given the plain one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._kept: Held | None = None  # of the last generation that was confirmed
        self._newer: Held | None = None  # of one that has begun since
        self._generation = -1  # whose state the optimizer has; -1 if it has none to hand over
        self._is_confirmed = False
        self._has_begun = False
        self._before: Held | None = None  # a plain state, until all ranks have their share of it
        # Agreed
        self._chosen: Held | None = None
        self._givers: list[int] = []  # of each share
        self._giver_of_all = 0  # of what every rank has

    def leave(self, shards: Shards | None) -> None:
        """The generation is over."""
        if shards is not None:
            shards.release()
            if not self._has_begun:  # sharded by wrap()
                self._generation, self._is_confirmed = 0, True
        held = Held(self._optimizer, self._generation, shards) if self._generation >= 0 else None
        if held is not None and self._is_confirmed:
            self._kept, self._newer = held, None
        elif held is not None:
            self._newer = held
        if self._before is not None:
            self._optimizer.state, self._before = self._before.state, None
        elif self._has_begun:
            self._optimizer.state = defaultdict(dict)
        self._generation = -1

    @property
    def has_state(self) -> bool:
        """Whether some rank has something from an earlier generation, as agreed."""
        return bool(self._givers)

    def agree(self, world: World) -> list[int]:
        """Collective: find out who gives which share. Returns the ranks of the last generation whose share is lost."""
        mine = [None if held is None else held.describe() for held in (self._kept, self._newer)]
        said = [json.loads(text) for text in internal_collectives_of(world).all_gather_bytes(json.dumps(mine).encode())]
        everybody = [[None if row is None else _Row(*row) for row in theirs] for theirs in said]
        self._chosen, self._givers, self._has_begun = None, [], True
        kept = [theirs[0].generation for theirs in everybody if theirs[0] is not None]
        if not kept:
            return []
        # A rank that was in this generation has dropped what was before. Then all have what is from this generation.
        generation = max(kept)
        rows = {
            rank: row
            for rank, theirs in enumerate(everybody)
            for row in theirs
            if row is not None and row.generation == generation
        }
        target = max((row.num_steps for row in rows.values() if row.shares), default=0)
        for row in rows.values():
            if row.num_steps < target and not (row.num_steps == target - 1 and row.can_finish):
                row.shares.clear()
        num_ranks = next(iter(rows.values())).num_ranks
        owners = [[rank for rank, row in rows.items() if share in row.shares] for share in range(num_ranks)]
        if lost := [share for share, ranks in enumerate(owners) if not ranks]:
            return lost
        self._givers = [min(ranks, key=lambda r: (rows[r].shares[0] != share, r)) for share, ranks in enumerate(owners)]
        self._giver_of_all = min(rank for rank, row in rows.items() if row.shares)
        if (mine_now := rows.get(world.rank)) is not None and mine_now.shares:
            self._chosen = next(h for h in (self._newer, self._kept) if h is not None and h.generation == generation)
            if mine_now.num_steps < target:
                self._chosen.finish(self._optimizer)
        is_torn = any(row.may_be_torn for row in rows.values() if row.num_steps == target)
        if is_torn:
            self._mend(world)
        return []

    @torch.no_grad()
    def _mend(self, world: World) -> None:
        """Collective: parameters were being exchanged. Each rank has those of its share as they were before."""
        pieces = self._given(world.rank)
        values = {piece.tensor: {_VALUES: piece.tensor.detach()} for piece in pieces}
        parameters = list(parameters_of(self._optimizer))
        source = _Elements(world, parameters, pieces, values)
        for index in range(source.num_parameters):
            if (outline := source.outlines.get(index)) is not None:
                parameters[index].copy_(source.fetch(index, _VALUES, outline[_VALUES]))

    def _given(self, rank: int) -> list[Piece]:
        """The shares that this rank gives."""
        if self._chosen is None:
            return []
        return [
            piece for share, giver in enumerate(self._givers) if giver == rank for piece in self._chosen.shares[share]
        ]

    def restore(self, world: World, shards: Shards | None, src: int | None, generation: int) -> None:
        """Collective: give each rank its share.

        Args:
            shards: of this rank; None in a world of one.
            src: the rank whose plain optimizer has the whole state; None: the state is where it was agreed to be.
        """
        if src is not None and world.size == 1:
            self._generation, self._is_confirmed = generation, False
            return
        if src is not None:
            self._before = Held(self._optimizer, generation, None)
        held = self._chosen if src is None else self._before
        if src is None:
            pieces = self._given(world.rank)
            if held is not None and world.rank == self._giver_of_all:
                pieces = [*pieces, *held.everywhere]
        else:
            assert held is not None
            pieces = held.shares[0] if world.rank == src else []
        state = {} if held is None else held.state
        source = self._source(world, pieces, state)
        if shards is not None:
            build(shards, source.outlines, source.fetch)
            shards.has_said = bool(source.outlines)
        else:
            self._optimizer.state = defaultdict(dict, source.entries())
        self._generation, self._is_confirmed = generation, False

    def confirm(self) -> None:
        """All ranks have restored their share."""
        self._is_confirmed = True
        self._kept = self._newer = self._chosen = self._before = None
        self._givers = []
        trim()

    @property
    def is_between(self) -> bool:
        """Whether the optimizer has no state, and this has what the last generation had."""
        return self._generation < 0 and self._kept is not None

    def whole(self) -> dict[torch.Tensor, Entry]:
        """The whole state between two generations. Raises ValueError if this rank has a part of it only."""
        held = self._kept
        if held is None or not held.describe().shares or len(held.shares) < held.num_ranks:
            raise ValueError("other ranks, which are gone, have the rest of the optimizer's state")
        pieces = [piece for pieces in (*held.shares.values(), held.everywhere) for piece in pieces]
        alone = World(None, 0, 1)
        try:
            return self._source(alone, pieces, held.state).entries()
        finally:
            alone.close()

    def _source(self, world: World, pieces: Sequence[Piece], state: Any) -> _Source:
        kind = _Elements if kind_of(self._optimizer) is Kind.ELEMENTS else _Whole
        return kind(world, list(parameters_of(self._optimizer)), pieces, state)


def _shares_of(shards: Shards) -> dict[int, list[Piece]]:
    mirror = {shards.kept_rank: shards.mirror} if shards.is_mirrored else {}
    return {shards.world.rank: shards.pieces, **mirror, **shards.left_here}


def leave_shares(shards: Shards, *, leaves: bool) -> None:
    """Collective: ranks that are about to end give the shares that no rank would have to one that stays."""
    world = shards.world
    said = internal_collectives_of(world).all_gather_bytes(bytes([leaves]))
    leaving = [rank for rank, theirs in enumerate(said) if theirs[0]]
    staying = [rank for rank in range(world.size) if rank not in leaving]
    for rank in leaving if staying else ():
        if not shards.is_mirrored or keeper_of(rank, world.hosts) in leaving:
            _leave_share(shards, rank, staying[0])


def _leave_share(shards: Shards, owner: int, heir: int) -> None:
    collectives, state = internal_collectives_of(shards.world), shards.optimizer.state
    indices = {parameter: index for index, parameter in enumerate(shards.parameters)}
    tensors: dict[int, dict[str, torch.Tensor]] = {}
    said = b""
    if shards.world.rank == owner:
        rows = []
        for number, piece in enumerate(piece for piece in shards.pieces if piece.tensor in state):
            parts = [(indices[part.parameter], part.start, part.stop, part.place) for part in piece.parts]
            outline = outline_of(state[piece.tensor], "", tensors.setdefault(number, {}))
            rows.append((piece.region, piece.group, piece.start, piece.tensor.numel(), parts, outline))
        said = save_plain(rows)
    pieces = []
    for number, row in enumerate(load_plain(collectives.broadcast_bytes(said, owner))):
        region, group, start, numel, parts, outline = row
        wanted: dict[str, torch.Tensor] = {}
        entry = fill_outline(outline, "", tensors.get(number, {}), wanted)
        collectives.broadcast_together(wanted.values(), owner)
        if shards.world.rank == heir:
            its = tuple(
                Part(shards.parameters[i], shards.names[i], first, last, place) for i, first, last, place in parts
            )
            tensor = shards.memories[region].own[start : start + numel]
            piece = Piece(its[0].parameter if shards.kind is Kind.WHOLE else tensor, region, group, start, its)
            state[piece.tensor] = entry
            pieces.append(piece)
    if shards.world.rank == heir:
        shards.left_here[owner] = pieces


def _whole(parameter: torch.nn.Parameter) -> Piece:
    return Piece(parameter, 0, 0, 0, (Part(parameter, "", 0, parameter.numel(), 0),))


class _Source:
    """Gives all ranks the state that some of them have, tensor by tensor. Opening it is collective.

    Args:
        parameters: of this rank, in the order of groups.
        pieces: what this rank gives.

    Attributes:
        outlines: see `checkpoint.build`.
    """

    def __init__(
        self, world: World, parameters: Sequence[torch.nn.Parameter], pieces: Sequence[Piece], state: Any
    ) -> None:
        self._collectives = internal_collectives_of(world)
        self._parameters = parameters
        self._state = state
        self._pieces = [piece for piece in pieces if piece.tensor in state]
        self._indices = {parameter: index for index, parameter in enumerate(parameters)}
        self.outlines: Outlines = {}
        self._everybody = [
            load_plain(text)
            for text in self._collectives.all_gather_bytes(save_plain(list(map(self._say, self._pieces))))
        ]

    @property
    def num_parameters(self) -> int:
        return len(self._parameters)

    def _say(self, piece: Piece) -> Any:
        raise NotImplementedError

    def fetch(self, index: int, place: str, like: torch.Tensor) -> torch.Tensor:
        """Collective: a tensor of a parameter."""
        raise NotImplementedError

    def entries(self) -> dict[torch.Tensor, Entry]:
        """Collective: all of it."""
        entries: dict[torch.Tensor, Entry] = {}
        for index in sorted(self.outlines):
            places: dict[str, torch.Tensor] = {}
            entry = fill_outline(self.outlines[index], "", {}, places)
            for place, target in places.items():
                target.copy_(self.fetch(index, place, target))
            entries[self._parameters[index]] = entry
        return entries


class _Elements(_Source):
    """Of an optimizer that treats every element by itself: parts of parameters come from several ranks."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._segments = defaultdict[int, list[tuple[int, int, int]]](list)  # by parameter: rank, start, stop
        for rank, theirs in enumerate(self._everybody):
            for parts, outline in theirs:
                for index, start, stop in parts:
                    self._segments[index].append((rank, start, stop))
                    if index not in self.outlines and index < self.num_parameters:
                        self.outlines[index] = {key: self._outline(index, value) for key, value in outline.items()}
        self._mine = defaultdict[int, list[tuple[Piece, Part]]](list)
        for piece in self._pieces:
            for part in piece.parts:
                self._mine[self._indices[part.parameter]].append((piece, part))

    def _say(self, piece: Piece) -> Any:
        parts = [(self._indices[part.parameter], part.start, part.stop) for part in piece.parts]
        entry = self._state[piece.tensor]
        return parts, {
            key: value if is_scalar(key, value) else torch.empty(0, dtype=value.dtype, device="meta")
            for key, value in entry.items()
        }

    def _outline(self, index: int, value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.device.type == "meta"):
            return copy_of(value)
        like = self._parameters[index]
        return torch.empty_strided(like.shape, like.stride(), dtype=value.dtype, device="meta")

    def fetch(self, index: int, place: str, like: torch.Tensor) -> torch.Tensor:
        parameter, segments = self._parameters[index], self._segments[index]
        assert sum(stop - start for _, start, stop in segments) == parameter.numel()
        own = [self._elements(piece, part, place) for piece, part in self._mine[index]]
        nothing = torch.empty(0, dtype=like.dtype, device="cpu")
        gathered = self._collectives.all_gather(torch.cat([nothing, *own]))
        result = torch.empty_strided(parameter.shape, parameter.stride(), dtype=like.dtype, device="cpu")
        elements = flat(result)
        for rank, start, stop in segments:
            elements[start:stop] = gathered[rank][: stop - start]
            gathered[rank] = gathered[rank][stop - start :]
        return result

    def _elements(self, piece: Piece, part: Part, key: str) -> torch.Tensor:
        value: torch.Tensor = self._state[piece.tensor][key]
        if piece.is_parameter:
            value = flat(laid_out_as(value, part.parameter))
        return value[part.place : part.place + part.numel]


class _Whole(_Source):
    """Of an optimizer that needs whole parameters: each comes from one rank."""

    def __init__(self, *arguments: Any) -> None:
        self._tensors: dict[int, dict[str, torch.Tensor]] = {}
        super().__init__(*arguments)
        self._givers: dict[int, int] = {}
        for rank, theirs in enumerate(self._everybody):
            for index, outline in theirs:
                self._givers[index], self.outlines[index] = rank, outline

    def _say(self, piece: Piece) -> Any:
        index = self._indices[piece.parts[0].parameter]
        return index, outline_of(self._state[piece.tensor], "", self._tensors.setdefault(index, {}))

    def fetch(self, index: int, place: str, like: torch.Tensor) -> torch.Tensor:
        mine = self._tensors.get(index)
        tensor: torch.Tensor = torch.empty_like(like) if mine is None else mine[place]
        self._collectives.broadcast(tensor, self._givers[index])
        return tensor
