"""Ordinary checkpoints of a sharded optimizer: the whole state, by parameter, as the plain optimizer has it.

A checkpoint knows no region, slice or number of ranks. So any number of ranks can go on from it, and a plain optimizer,
too. Beside the result, a rank holds a few MiB of each rank while state is gathered, and the tensor of one parameter
while state is handed out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from torchring.collectives.initial_state import fill_outline, load_plain, outline_of, save_plain
from torchring.collectives.service import internal_collectives_of
from torchring.errors import in_step, ranks_in_words
from torchring.memory.heap import trim
from torchring.sharding.cut import Region
from torchring.sharding.kinds import Kind
from torchring.sharding.pieces import Part, Piece, flat, is_scalar, laid_out_as
from torchring.sharding.step import Shards, num_bytes_of
from torchring.sharding.together import begin_together

_PIECES_AT_ONCE: Final = 8  # 4 MiB
_BYTES_BETWEEN_TRIMS: Final = 64 << 20

Entry = dict[str, Any]  # the state of one parameter
State = dict[torch.Tensor, Entry]
Outlines = dict[int, Entry]  # by index of the parameter: without the values of tensors that have its shape
Fetch = Callable[[int, str, torch.Tensor], torch.Tensor]


def gather_state(shards: Shards, *, all_ranks: bool) -> dict[str, Any] | None:
    """Collective: the ordinary state_dict on rank 0, or on all ranks. None on the others."""
    begin_together(shards.world, shards.number, "state_dict()")
    keeps = all_ranks or shards.world.rank == 0
    gather = _gather_elements if shards.kind is Kind.ELEMENTS else _gather_whole
    found: State = {}
    num_bytes = 0
    for parameter, entry in gather(shards, keeps=keeps):
        found[parameter] = entry
        # What was received leaves holes between the results.
        if (num_bytes := num_bytes + num_bytes_of(entry)) > _BYTES_BETWEEN_TRIMS:
            num_bytes = 0
            trim()
    for parameter in shards.everywhere:
        if parameter in shards.optimizer.state:
            found[parameter] = shards.optimizer.state[parameter]
    if not keeps:
        return None
    with shards.whole_state({p: found[p] for p in shards.parameters if p in found}):
        return shards.optimizer.state_dict()


def _gather_elements(shards: Shards, *, keeps: bool) -> Iterator[tuple[torch.nn.Parameter, Entry]]:
    """Collective: the state of each parameter that is cut. Nothing unless this rank `keeps` it."""
    collectives = internal_collectives_of(shards.world)
    state, mine = shards.optimizer.state, defaultdict[int, list[Piece]](list)
    for piece in shards.pieces:
        if piece.tensor in state:
            mine[piece.region].append(piece)
    said = {
        region: [(piece.start, piece.tensor.numel(), _outline_of_elements(state[piece.tensor])) for piece in pieces]
        for region, pieces in mine.items()
    }
    everybody = [load_plain(text) for text in collectives.all_gather_bytes(save_plain(said))]
    for index, memory in enumerate(shards.memories):
        region = memory.region
        entries: dict[int, Entry] = {}
        rows = [theirs.get(index, []) for theirs in everybody]
        for row in rows if keeps else ():
            for start, length, outline in row:
                for member in region.members:
                    if start < member.offset + member.numel and start + length > member.offset:
                        entries.setdefault(member.parameter, _room_for(outline, shards.parameters[member.parameter]))
        keys = {key: value.dtype for row in rows for *_, outline in row for key, value in outline.items()
                if not is_scalar(key, value)}  # fmt: skip
        for key, dtype in sorted(keys.items()):
            own = [state[piece.tensor][key] for piece in mine[index] if key in state[piece.tensor]]
            places = [[(start, length) for start, length, outline in row if key in outline] for row in rows]
            for first in range(0, max(map(len, places)), _PIECES_AT_ONCE):
                batch = slice(first, first + _PIECES_AT_ONCE)
                nothing = torch.empty(0, dtype=dtype, device="cpu")
                gathered = collectives.all_gather(torch.cat([nothing, *own[batch]]))
                for rank, data in enumerate(gathered if keeps else ()):
                    for start, length in places[rank][batch]:
                        _hand_out(region, start, data[:length], key, entries)
                        data = data[length:]
        for parameter, entry in entries.items():
            yield shards.parameters[parameter], entry


def _outline_of_elements(entry: Entry) -> Entry:
    return {key: value if is_scalar(key, value) else value.to("meta") for key, value in entry.items()}


def _room_for(outline: Entry, parameter: torch.Tensor) -> Entry:
    """The state of a parameter whose tensors are still to be filled. Shares none with parameters of the same piece."""
    shape, stride = parameter.shape, parameter.stride()
    return {
        key: _copy(value)
        if is_scalar(key, value)
        else torch.empty_strided(shape, stride, dtype=value.dtype, device="cpu")
        for key, value in outline.items()
    }


def _hand_out(region: Region, start: int, data: torch.Tensor, key: str, entries: Mapping[int, Entry]) -> None:
    """Copy `data`, which begins at element `start` of the region, to the states of the parameters there."""
    for member in region.members:
        begin, end = max(start, member.offset), min(start + len(data), member.offset + member.numel)
        if begin < end:
            target = flat(entries[member.parameter][key])
            target[begin - member.offset : end - member.offset] = data[begin - start : end - start]


def _gather_whole(shards: Shards, *, keeps: bool) -> Iterator[tuple[torch.nn.Parameter, Entry]]:
    """Collective: the state of each parameter that one rank owns. Nothing unless this rank `keeps` it."""
    collectives = internal_collectives_of(shards.world)
    state = shards.optimizer.state
    tensors: dict[int, dict[str, torch.Tensor]] = {}
    said: Outlines = {}
    for piece in shards.pieces:
        if piece.tensor in state:
            index = shards.memories[piece.region].region.members[0].parameter
            said[index] = outline_of(state[piece.tensor], "", tensors.setdefault(index, {}))
    everybody = [load_plain(text) for text in collectives.all_gather_bytes(save_plain(said))]
    for index, parameter in enumerate(shards.parameters):
        for owner, theirs in enumerate(everybody):
            if index in theirs:
                wanted: dict[str, torch.Tensor] = {}
                entry = fill_outline(theirs[index], "", tensors.get(index, {}), wanted)
                collectives.broadcast_together(wanted.values(), owner)
                if keeps:
                    yield parameter, entry


def load_state(shards: Shards, state_dict: Mapping[str, Any] | None) -> None:
    """Collective: load an ordinary state_dict, which all ranks have, or rank 0 alone.

    Raises ValueError on all ranks if the state does not fit; then the optimizer keeps what it has.
    """
    world, optimizer = shards.world, shards.optimizer
    collectives = internal_collectives_of(world)
    said = begin_together(world, shards.number, "load_state_dict()", b"\1" if state_dict is not None else b"\0")
    missing = [rank for rank, theirs in enumerate(said) if theirs == b"\0"]
    if missing and missing != list(range(1, world.size)):
        raise in_step(
            ValueError(
                "load_state_dict() takes a state on all ranks, or on rank 0 and None on the others; "
                f"{ranks_in_words(missing)} passed None"
            )
        )
    entries: State = {}
    problem: Exception | None = None
    if state_dict is not None:
        try:
            _check_shapes(shards, state_dict)
            with shards.whole_state({}):
                optimizer.load_state_dict(dict(state_dict))
                entries = dict(optimizer.state)
        except Exception as error:
            problem = error
    collectives.raise_together(problem, "could not load its optimizer's state")
    if not missing:
        keep_share(shards, entries)
        return
    tensors: dict[int, dict[str, torch.Tensor]] = {}
    text = b""
    if world.rank == 0:
        with shards.whole_state({}):
            groups = optimizer.state_dict()["param_groups"]
        text = save_plain({"groups": groups, "outlines": _outlines(shards, entries, tensors)})
    sent = load_plain(collectives.broadcast_bytes(text, 0))
    if world.rank:
        with shards.whole_state({}):
            optimizer.load_state_dict({"state": {}, "param_groups": sent["groups"]})

    room = torch.empty(0, dtype=torch.uint8, device="cpu")

    def fetch(parameter: int, place: str, like: torch.Tensor) -> torch.Tensor:
        nonlocal room
        if world.rank == 0:
            return collectives.broadcast(tensors[parameter][place], 0)
        if room.numel() < like.nbytes:
            room = torch.empty(like.nbytes, dtype=torch.uint8, device="cpu")
        received = room[: like.nbytes].view(like.dtype).as_strided(like.shape, like.stride())
        return collectives.broadcast(received, 0)

    build(shards, sent["outlines"], fetch)


def keep_share(shards: Shards, entries: Mapping[torch.Tensor, Entry]) -> None:
    """Make this rank's share of a state, which all ranks have, the state of the optimizer."""
    tensors: dict[int, dict[str, torch.Tensor]] = {}
    build(shards, _outlines(shards, entries, tensors), lambda parameter, place, _: tensors[parameter][place])


def _outlines(
    shards: Shards, entries: Mapping[torch.Tensor, Entry], tensors: dict[int, dict[str, torch.Tensor]]
) -> Outlines:
    """Outlines of the states of parameters. Their tensors, by place, go to `tensors`."""
    outlines: Outlines = {}
    for index, parameter in enumerate(shards.parameters):
        if parameter in entries:
            entry, own = entries[parameter], tensors.setdefault(index, {})
            if shards.kind is Kind.ELEMENTS and parameter not in shards.everywhere:
                outlines[index] = _outline_of_elements(entry)
                own.update({key: value for key, value in entry.items() if not is_scalar(key, value)})
            else:
                outlines[index] = outline_of(entry, "", own)
    return outlines


@torch.no_grad()
def build(shards: Shards, outlines: Outlines, fetch: Fetch) -> None:
    """Replace the state of this rank's pieces.

    Args:
        fetch: returns a tensor of a parameter, which is good until the next call. May be collective.
    """
    state = shards.optimizer.state
    state.clear()
    trim()
    shards.reset_pieces()
    if shards.kind is Kind.ELEMENTS:
        _make_room(shards, outlines)
    wanted = defaultdict[torch.Tensor, list[tuple[torch.Tensor, Part]]](list)
    for piece in (*shards.pieces, *shards.mirror):
        for part in piece.parts:
            wanted[part.parameter].append((piece.tensor, part))
    everywhere = shards.everywhere
    for index, parameter in enumerate(shards.parameters):
        if (outline := outlines.get(index)) is None:
            continue
        if shards.kind is Kind.ELEMENTS and parameter not in everywhere:
            for key in [key for key, value in outline.items() if not is_scalar(key, value)]:
                data = flat(laid_out_as(fetch(index, key, outline[key]), parameter))
                for tensor, part in wanted[parameter]:
                    state[tensor][key][part.place : part.place + part.numel] = data[part.start : part.stop]
            continue
        is_mine = parameter in everywhere or bool(wanted[parameter])
        places: dict[str, torch.Tensor] = {}
        entry = fill_outline(outline, "", {}, places)
        for place, target in places.items():
            data = fetch(index, place, target)
            if is_mine:
                target.copy_(data)
        if is_mine:
            state[parameter] = entry


def _make_room(shards: Shards, outlines: Outlines) -> None:
    """Give each piece the state that its parameters have in common. Pieces whose parameters differ are split."""
    indices = {parameter: index for index, parameter in enumerate(shards.parameters)}

    def split(given: list[Piece]) -> list[Piece]:
        pieces = []
        for piece in given:
            own = [outlines.get(indices[part.parameter]) for part in piece.parts]
            pieces += [piece] if all(_are_alike(own[0], other) for other in own[1:]) else piece.split()
        return pieces

    shards.pieces, shards.mirror = split(shards.pieces), split(shards.mirror)
    for piece in (*shards.pieces, *shards.mirror):
        if (outline := outlines.get(indices[piece.parts[0].parameter])) is not None:
            shards.optimizer.state[piece.tensor] = {
                key: _copy(value)
                if is_scalar(key, value)
                else torch.zeros(piece.tensor.numel(), dtype=value.dtype, device="cpu")
                for key, value in outline.items()
            }


def _are_alike(one: Entry | None, other: Entry | None) -> bool:
    """Whether two parameters have the same state, but for what each element has."""
    if one is None or other is None:
        return one is other
    if one.keys() != other.keys():
        return False
    return all(
        bool(torch.equal(value, other[key])) if isinstance(value, torch.Tensor) else value == other[key]
        for key, value in one.items()
        if is_scalar(key, value)
    )


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _check_shapes(shards: Shards, state_dict: Mapping[str, Any]) -> None:
    """Raise ValueError if a state belongs to a parameter of another shape. torch would notice in the next step."""
    saved = [index for group in state_dict["param_groups"] for index in group["params"]]
    for index, parameter, name in zip(saved, shards.parameters, shards.names, strict=False):
        for key, value in state_dict["state"].get(index, {}).items():
            is_element_wise = shards.kind is Kind.ELEMENTS and not is_scalar(key, value)
            if is_element_wise and value.shape != parameter.shape:
                raise ValueError(
                    f"{key} of {name} has the shape {tuple(value.shape)} in this state, and the parameter has "
                    f"{tuple(parameter.shape)}; the state belongs to another model"
                )
