"""Ordinary checkpoints of a sharded optimizer: the whole state, by parameter, as the plain optimizer has it.

A checkpoint knows no region, slice or number of ranks. So any number of ranks can go on from it, and a plain optimizer,
too. Beside the result, a rank holds a few MiB of each rank while state is gathered, and the tensor of one parameter
while state is handed out.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

import torch

from torchring.collectives.initial_state import fill_outline, load_plain, outline_of, save_plain
from torchring.collectives.service import internal_collectives_of
from torchring.errors import in_step, ranks_in_words
from torchring.memory.heap import trim
from torchring.sharding.cut import Region
from torchring.sharding.kinds import Kind
from torchring.sharding.pieces import Part, Piece, copy_of, flat, is_scalar, laid_out_as, piece_bytes
from torchring.sharding.shard_tensor import ShardTensor
from torchring.sharding.step import Shards, num_bytes_of
from torchring.sharding.together import begin_together

_BYTES_AT_ONCE: Final = 4 << 20  # of each rank; or one piece
_BYTES_BETWEEN_TRIMS: Final = 64 << 20

_V = TypeVar("_V")
Entry = dict[str, Any]  # the state of one parameter
State = dict[torch.Tensor, Entry]
Outlines = dict[int, Entry]  # by index of the parameter: without the values of tensors that have its shape
Tensors = dict[int, dict[str, torch.Tensor]]  # by index of the parameter and place in its state
Row = list[tuple[int, int, Entry]]  # of pieces in a region: first element, length, outline
Fetch = Callable[[int, str, torch.Tensor], torch.Tensor]


def gather_state(shards: Shards, *, keeps: bool) -> dict[str, Any] | None:
    """Collective: the ordinary state_dict on ranks that keep it, None on the others.

    In host memory: a device has room for a share, and maybe not for the whole.
    """
    begin_together(shards.world, shards.number, "state_dict()")
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
            found[parameter] = _on_host(shards.optimizer.state[parameter])
    if not keeps:
        return None
    with shards.whole_state({p: found[p] for p in shards.parameters if p in found}):
        return shards.optimizer.state_dict()


def _gather_elements(shards: Shards, *, keeps: bool) -> Iterator[tuple[torch.nn.Parameter, Entry]]:
    """Collective: the state of each parameter that is cut. Nothing unless this rank `keeps` it."""
    collectives = internal_collectives_of(shards.world)
    pieces_at_once = max(1, _BYTES_AT_ONCE // piece_bytes(shards.accelerator is not None))
    state, mine = shards.optimizer.state, pieces_with_state(shards)
    everybody = tell_pieces(shards, mine)
    for index, memory in enumerate(shards.memories):
        region = memory.region
        rows = [theirs.get(index, []) for theirs in everybody]
        entries = {
            parameter: _room_for(outline, shards.parameters[parameter])
            for parameter, outline in (outlines_in(region, rows) if keeps else {}).items()
        }
        keys = {key: value.dtype for row in rows for *_, outline in row for key, value in outline.items()
                if not is_scalar(key, value)}  # fmt: skip
        for key, dtype in sorted(keys.items()):
            own = [state[piece.tensor][key] for piece in mine[index] if key in state[piece.tensor]]
            places = [[(start, length) for start, length, outline in row if key in outline] for row in rows]
            for first in range(0, max(map(len, places)), pieces_at_once):
                batch = slice(first, first + pieces_at_once)
                nothing = torch.empty(0, dtype=dtype, device="cpu")
                gathered = collectives.all_gather(torch.cat([nothing, *(part.cpu() for part in own[batch])]))
                for rank, data in enumerate(gathered if keeps else ()):
                    for start, length in places[rank][batch]:
                        _hand_out(region, start, data[:length], key, entries)
                        data = data[length:]
        for parameter, entry in entries.items():
            yield shards.parameters[parameter], entry


def pieces_with_state(shards: Shards) -> Mapping[int, list[Piece]]:
    """This rank's pieces that have state, by region."""
    mine = defaultdict[int, list[Piece]](list)
    for piece in shards.pieces:
        if piece.tensor in shards.optimizer.state:
            mine[piece.region].append(piece)
    return mine


def tell_pieces(shards: Shards, mine: Mapping[int, list[Piece]]) -> list[dict[int, Row]]:
    """Collective: which pieces have which state, by rank and region."""
    state = shards.optimizer.state
    said = {
        region: [(piece.start, piece.tensor.numel(), _outline_of_elements(state[piece.tensor])) for piece in pieces]
        for region, pieces in mine.items()
    }
    collectives = internal_collectives_of(shards.world)
    return [load_plain(text) for text in collectives.all_gather_bytes(save_plain(said))]


def outlines_in(region: Region, rows: Sequence[Row]) -> Outlines:
    """What state the parameters of a region have."""
    outlines: Outlines = {}
    for start, length, outline in itertools.chain.from_iterable(rows):
        for member in region.members:
            if start < member.offset + member.numel and start + length > member.offset:
                outlines.setdefault(member.parameter, outline)
    return outlines


def _outline_of_elements(entry: Entry) -> Entry:
    return {
        key: value
        if is_scalar(key, value)
        else torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        for key, value in entry.items()
    }


def _room_for(outline: Entry, parameter: torch.Tensor) -> Entry:
    """The state of a parameter whose tensors are still to be filled. Shares none with parameters of the same piece."""
    shape, stride = parameter.shape, parameter.stride()
    return {
        key: copy_of(value)
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
    everybody, tensors = tell_whole(shards)
    for index, parameter in enumerate(shards.parameters):
        for owner, theirs in enumerate(everybody):
            if index in theirs:
                wanted: dict[str, torch.Tensor] = {}
                entry = fill_outline(theirs[index], "", tensors.get(index, {}), wanted)
                collectives.broadcast_together(wanted.values(), owner)
                if keeps:
                    yield parameter, _on_host(entry)


def tell_whole(shards: Shards) -> tuple[list[Outlines], Tensors]:
    """Collective: the outlines of what each rank owns, and the tensors of this rank."""
    tensors: Tensors = {}
    said: Outlines = {}
    for region, (piece,) in pieces_with_state(shards).items():
        index = shards.memories[region].region.members[0].parameter
        said[index] = outline_of(shards.optimizer.state[piece.tensor], "", tensors.setdefault(index, {}))
    collectives = internal_collectives_of(shards.world)
    return [load_plain(text) for text in collectives.all_gather_bytes(save_plain(said))], tensors


def load_state(shards: Shards, state_dict: Mapping[str, Any] | None, src: int = 0) -> None:
    """Collective: load an ordinary state_dict, which all ranks have, or rank `src` alone.

    Raises ValueError on all ranks if the state does not fit; then the optimizer keeps what it has.
    """
    world, optimizer = shards.world, shards.optimizer
    collectives = internal_collectives_of(world)
    said = begin_together(world, shards.number, "load_state_dict()", b"\1" if state_dict is not None else b"\0")
    missing = [rank for rank, theirs in enumerate(said) if theirs == b"\0"]
    if missing and missing != [rank for rank in range(world.size) if rank != src]:
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
            state = _own_shards(shards, state_dict, is_shared=not missing)
            entries = _loaded(shards, {**state_dict, "state": state})
        except Exception as error:
            problem = error
    collectives.raise_together(problem, "could not load its optimizer's state")
    if not missing:
        keep_share(shards, entries)
        if state_dict is not None and state_dict["state"]:
            shards.keep_an_entry()
        return
    tensors: Tensors = {}
    text = b""
    if world.rank == src:
        with shards.whole_state({}):
            groups = optimizer.state_dict()["param_groups"]
        text = save_plain({"groups": groups, "outlines": _outlines(shards, entries, tensors)})
    sent = load_plain(collectives.broadcast_bytes(text, src))
    if world.rank != src:
        with shards.whole_state({}):
            optimizer.load_state_dict({"state": {}, "param_groups": sent["groups"]})

    room = torch.empty(0, dtype=torch.uint8, device="cpu")

    def fetch(parameter: int, place: str, like: torch.Tensor) -> torch.Tensor:
        nonlocal room
        if world.rank == src:
            return collectives.broadcast(tensors[parameter][place], src)
        if room.numel() < like.nbytes:
            room = torch.empty(like.nbytes, dtype=torch.uint8, device="cpu")
        received = room[: like.nbytes].view(like.dtype).as_strided(like.shape, like.stride())
        return collectives.broadcast(received, src)

    build(shards, sent["outlines"], fetch)


def _loaded(shards: Shards, state_dict: Mapping[str, Any]) -> State:
    """The state of whole parameters that the optimizer makes of a state_dict; in host memory."""
    optimizer = shards.optimizer
    whole = [group["params"] for group in optimizer.param_groups]
    with shards.whole_state({}):
        if shards.accelerator is None:
            optimizer.load_state_dict(dict(state_dict))
            return dict(optimizer.state)
        # torch moves state to where its parameter is. In place of a parameter it gets a tensor that takes no memory.
        stand_ins = {torch.empty((), dtype=p.dtype, device="cpu").expand(p.shape): p for p in shards.parameters}
        left = iter(stand_ins)
        try:
            for group in optimizer.param_groups:
                group["params"] = list(itertools.islice(left, len(group["params"])))
            optimizer.load_state_dict(dict(state_dict))
            return {stand_ins.get(key, key): entry for key, entry in optimizer.state.items()}
        finally:
            for group, parameters in zip(optimizer.param_groups, whole, strict=True):
                group["params"] = parameters


def keep_share(shards: Shards, entries: Mapping[torch.Tensor, Entry]) -> None:
    """Make this rank's share of a state, which all ranks have, the state of the optimizer."""
    tensors: Tensors = {}
    build(shards, _outlines(shards, entries, tensors), lambda parameter, place, _: tensors[parameter][place])


def _outlines(shards: Shards, entries: Mapping[torch.Tensor, Entry], tensors: Tensors) -> Outlines:
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
    wanted = _parts_of(shards)
    everywhere = shards.everywhere
    groups = {parameter: group for group in shards.optimizer.param_groups for parameter in group["params"]}
    for index, parameter in enumerate(shards.parameters):
        if (outline := outlines.get(index)) is None:
            continue
        if shards.kind is Kind.ELEMENTS and parameter not in everywhere:
            for key in [key for key, value in outline.items() if not is_scalar(key, value)]:
                whole = fetch(index, key, outline[key])
                if isinstance(whole, ShardTensor):
                    first, data = whole.first, whole.elements
                else:
                    first, data = 0, flat(laid_out_as(whole, parameter))
                for tensor, part in wanted[parameter]:
                    target = state[tensor][key][part.place : part.place + part.numel]
                    target.copy_(data[part.start - first : part.stop - first])
            continue
        is_mine = parameter in everywhere or bool(wanted[parameter])
        places: dict[str, torch.Tensor] = {}
        entry = fill_outline(outline, "", {}, places)
        for place, target in places.items():
            data = fetch(index, place, target)
            if is_mine:
                target.copy_(data)
        if is_mine:
            state[parameter] = _on_device(entry, parameter, groups[parameter])
    if outlines:
        shards.keep_an_entry()


def _parts_of(shards: Shards) -> Mapping[torch.Tensor, list[tuple[torch.Tensor, Part]]]:
    """What this rank steps of each parameter, with the tensors of the pieces."""
    parts = defaultdict[torch.Tensor, list[tuple[torch.Tensor, Part]]](list)
    for piece in shards.pieces:
        for part in piece.parts:
            parts[part.parameter].append((piece.tensor, part))
    return parts


def _make_room(shards: Shards, outlines: Outlines) -> None:
    """Give each piece the state that its parameters have in common. Pieces whose parameters differ are split."""
    indices = {parameter: index for index, parameter in enumerate(shards.parameters)}

    def split(given: list[Piece]) -> list[Piece]:
        pieces = []
        for piece in given:
            own = [outlines.get(indices[part.parameter]) for part in piece.parts]
            pieces += [piece] if all(_are_alike(own[0], other) for other in own[1:]) else piece.split()
        return pieces

    shards.pieces = split(shards.pieces)
    for piece in shards.pieces:
        if (outline := outlines.get(indices[piece.parts[0].parameter])) is not None:
            entry = {
                key: copy_of(value)
                if is_scalar(key, value)
                else torch.zeros(piece.tensor.numel(), dtype=value.dtype, device=piece.tensor.device)
                for key, value in outline.items()
            }
            group = shards.optimizer.param_groups[piece.group]
            shards.optimizer.state[piece.tensor] = _on_device(entry, piece.parts[0].parameter, group)


def _on_host(entry: Entry) -> Entry:
    return _mapped(entry, lambda _, value: value.cpu())


def _on_device(entry: Entry, parameter: torch.nn.Parameter, group: Mapping[str, Any]) -> Entry:
    """The entry, with its tensors where `Optimizer.load_state_dict` puts them for a parameter of this group."""
    has_steps = group.get("fused") or group.get("capturable")
    return _mapped(entry, lambda key, value: value if key == "step" and not has_steps else value.to(parameter.device))


def _mapped(value: _V, function: Callable[[object, torch.Tensor], torch.Tensor], key: object = None) -> _V:
    """A copy of a state in which `function` replaces the tensors, given the key of each."""
    result: Any = value
    if isinstance(value, torch.Tensor):
        result = function(key, value)
    elif isinstance(value, dict):
        result = {name: _mapped(item, function, name) for name, item in value.items()}
    elif isinstance(value, (list, tuple)):
        result = type(value)(_mapped(item, function) for item in value)
    return cast(_V, result)


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


def _saved_parameters(
    shards: Shards, state_dict: Mapping[str, Any]
) -> Iterator[tuple[Any, torch.nn.Parameter, str]]:  # fmt: skip
    """The key of each parameter in the state, the parameter, and its name."""
    saved = [index for group in state_dict["param_groups"] for index in group["params"]]
    return zip(saved, shards.parameters, shards.names, strict=False)  # torch says what differs


def _check_shapes(shards: Shards, state_dict: Mapping[str, Any]) -> None:
    """Raise ValueError if a state belongs to a parameter of another shape. torch would notice in the next step."""
    for index, parameter, name in _saved_parameters(shards, state_dict):
        for key, value in state_dict["state"].get(index, {}).items():
            is_element_wise = shards.kind is Kind.ELEMENTS and not is_scalar(key, value)
            if is_element_wise and value.shape != parameter.shape:
                raise ValueError(
                    f"{key} of {name} has the shape {tuple(value.shape)} in this state, and the parameter has "
                    f"{tuple(parameter.shape)}; the state belongs to another model"
                )


def _own_shards(shards: Shards, state_dict: Mapping[str, Any], *, is_shared: bool) -> dict[Any, Any]:
    """The states by parameter. Of what torch.distributed.checkpoint has loaded, this rank's whole parameters are plain
    tensors then. Raises ValueError if a state has other elements than this rank steps.

    Args:
        is_shared: all ranks pass a state.
    """
    states, parts = dict(state_dict["state"]), _parts_of(shards)
    has_state = any(shards.optimizer.state.values())
    for index, parameter, name in _saved_parameters(shards, state_dict):
        if index not in states:
            continue
        if has_state and not states[index]:
            raise ValueError(
                f"the state has no values for {name}. With shard=True, set_optimizer_state_dict() takes no state that "
                "was saved with flatten_optimizer_state_dict=True; leave that option out, when saving, too"
            )
        own = [part for _, part in parts[parameter]] if is_shared else None
        if own or shards.kind is Kind.ELEMENTS or not is_shared or parameter in shards.everywhere:
            states[index] = _own_part(states[index], parameter, own, shards.kind)
        else:  # another rank owns it
            del states[index]
    return states


def _own_part(value: Any, parameter: torch.Tensor, own: Sequence[Part] | None, kind: Kind) -> Any:
    """The state of one parameter, of which this rank steps the parts `own`. None: other ranks need this state, too."""
    if isinstance(value, dict):
        return {key: _own_part(item, parameter, own, kind) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_own_part(item, parameter, own, kind) for item in value)
    if not isinstance(value, ShardTensor):
        return value
    if own is not None and kind is Kind.WHOLE and value.elements.numel() == value.numel():
        return value.whole()
    if kind is Kind.ELEMENTS and own is not None and value.stride() == parameter.stride():
        stop = value.first + value.elements.numel()
        if all(value.first <= part.start and part.stop <= stop for part in own):
            return value
    raise ValueError(
        "this rank has only a part of this state, which get_optimizer_state_dict() has sharded for "
        "torch.distributed.checkpoint: save it there, and load it from there, on all ranks; or load what state_dict() "
        "of the optimizer has returned"
    )
