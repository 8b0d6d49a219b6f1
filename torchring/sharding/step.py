"""The sharded step of one optimizer."""

from __future__ import annotations

import functools
import json
import logging
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

import torch
from torch.optim import Optimizer

from torchring.allreduce import AllReduce
from torchring.collectives.initial_state import broadcast_state, load_plain, save_plain
from torchring.collectives.join import Join
from torchring.collectives.service import internal_collectives_of
from torchring.devices.stream import OnStream
from torchring.errors import GradientError, RingError, in_step, ranks_in_words
from torchring.gradients.group import OptimizerGroup
from torchring.gradients.validation import PART_OF_STATE
from torchring.gradients.views import CAN_SWAP
from torchring.sharding.cut import Candidate, assign_whole, cut_elements
from torchring.sharding.device import DeviceExchange
from torchring.sharding.exchange import Exchange
from torchring.sharding.hooks import refuse_patched, run_after, run_before, without_hooks
from torchring.sharding.kinds import Kind, cost_of, kind_of, plain_values
from torchring.sharding.parameters import RegionMemory, movable, move
from torchring.sharding.pieces import Piece, cut_pieces, piece_bytes, whole_piece
from torchring.sharding.together import begin_together
from torchring.sharding.variants import advice_on_fused
from torchring.world import World

_T = TypeVar("_T")
_logger: Final = logging.getLogger("torchring")
_PAST: Final = (
    "the optimizer that torchring.wrap(..., shard=True) was given has the state of a part of the parameters only, so "
    "{what} of its own would be wrong; call {what} of the optimizer that torchring.wrap has returned"
)


class Shards:
    """This rank's share of the parameters and of the state of one optimizer. Opening it is collective.

    `optimizer.state` has an entry for each piece that this rank steps. Parameters that cannot be cut are stepped by
    every rank: those with sparse gradients, and those that are parts of a larger tensor.

    Args:
        optimizer: its state, if there is any, is the same on all ranks. This rank's share stays.
        names: the names of its parameters.
        sparse: parameters with sparse gradients.
        number: of the optimizer, among those of the world that are sharded.
        step: steps the optimizer for a rank that has ended, inside `torchring.join`.
        all_reduce: of the gradients.

    Attributes:
        kind: how the optimizer is cut.
        parameters, names: all parameters, in the order of the parameter groups, and their names.
        memories: of the regions.
        pieces: what this rank steps, by region.
        everywhere: the parameters that every rank steps.
        accelerator: of the parameters; None on the CPU.
        has_said: rank 0 has logged what there is to save.
    """

    def __init__(
        self,
        world: World,
        optimizer: Optimizer,
        names: Mapping[torch.nn.Parameter, str],
        sparse: Collection[torch.nn.Parameter],
        number: int,
        step: Callable[[], object],
        all_reduce: AllReduce[Any],
    ) -> None:
        self.world = world
        self.optimizer = optimizer
        self.kind = kind_of(optimizer)
        self.parameters: list[torch.nn.Parameter] = []
        self.names: list[str] = []
        self.memories: list[RegionMemory] = []
        self.pieces: list[Piece] = []
        self.everywhere: dict[torch.nn.Parameter, None] = {}
        self.accelerator = all_reduce.accelerator if isinstance(all_reduce, OnStream) else None
        self._names = names
        self._sparse = sparse
        self._kept: list[torch.Tensor] = []  # memory that the parameters had, where others may still read it
        self._addresses: list[int] = []
        self._groups: list[frozenset[torch.nn.Parameter]] = []  # when they were cut
        self._num_looks = 0  # steps after which `_refuse_differences` may look
        self._exchange = DeviceExchange(world, all_reduce) if isinstance(all_reduce, OnStream) else Exchange(world)
        world.on_close(self._exchange.close)
        self.number = number
        self._step = weakref.WeakMethod(step)
        self._members = world.shared(OptimizerGroup).members
        self._is_under_way = False
        self.has_said = False
        self._is_closed = False
        self.extend()
        self._guard_state()
        self._handles = [  # last: a rank that is lost above leaves no hooks that refuse
            optimizer.register_step_pre_hook(lambda *_: self._refuse("step()")),
            optimizer.register_state_dict_pre_hook(lambda _: self._refuse("state_dict()")),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self._accept_state()),
        ]

    @property
    def name(self) -> bytes:
        return f"step() of optimizer {self.number}".encode()

    def extend(self) -> None:
        """Collective: cut the parameters that the optimizer has got since."""
        first = len(self.parameters)
        groups = [(g, p) for g, group in enumerate(self.optimizer.param_groups) for p in group["params"]][first:]
        self.parameters += [parameter for _, parameter in groups]
        self.names += [self._names[parameter] for _, parameter in groups]
        movable = self._movable([parameter for _, parameter in groups])
        candidates = []
        for index, (group, parameter) in enumerate(groups, start=first):
            if movable[index - first]:
                cost = cost_of(parameter, self.optimizer.param_groups[group], self.optimizer)
                trained = parameter.requires_grad
                candidates.append(Candidate(index, group, parameter.numel(), parameter.dtype, trained, cost))
            else:
                self.everywhere[parameter] = None
        if self.kind is Kind.WHOLE:
            regions = assign_whole(candidates, self.world.size)
        else:
            regions = cut_elements(candidates, self.world.size, on_device=self.accelerator is not None)
        memories = self._exchange.allocate(regions)
        self._kept += move(self.parameters, memories)
        for memory in memories:
            self.memories.append(memory)
            self._add_pieces_of(len(self.memories) - 1)
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]
        self._groups = [frozenset(group["params"]) for group in self.optimizer.param_groups]

    def _add_pieces_of(self, index: int) -> None:
        self.pieces += self._pieces_of(index, self.world.rank)

    def _pieces_of(self, index: int, rank: int) -> list[Piece]:
        """A rank's pieces of a region, as they are at first."""
        where = index, self.memories[index], rank, self.parameters, self.names
        if self.kind is Kind.WHOLE:
            return whole_piece(*where)
        pieces = cut_pieces(*where, most_bytes=piece_bytes(self.accelerator is not None))
        # Fused kernels compute the end of a tensor, which fills no vector, with other instructions than the rest. So
        # there each parameter keeps its end. A fused step of many tensors costs little more than that of one. Nor does
        # any step on a device, where gradients need not be copied side by side then.
        groups, on_device = self.optimizer.param_groups, self.accelerator is not None
        return [part for p in pieces for part in (p.split() if on_device or groups[p.group].get("fused") else (p,))]

    def _movable(self, parameters: Sequence[torch.nn.Parameter]) -> list[bool]:
        """Collective: which parameters all ranks can move to shared memory."""
        mine = [p not in self._sparse and can for p, can in zip(parameters, movable(parameters), strict=True)]
        flags = torch.tensor(mine, dtype=torch.uint8, device="cpu")
        if mine:
            internal_collectives_of(self.world).all_reduce(flags, "min")
        stays = [
            self._names[p]
            for p, can in zip(parameters, flags.tolist(), strict=True)
            if not can and p.numel() and p not in self._sparse
        ]
        if stays and self.world.rank == 0:
            _logger.warning(
                "%s and %s other parameters are parts of larger tensors, or in memory that the script shares; every "
                "rank keeps the whole optimizer state for them",
                *(stays[0], len(stays) - 1),
            )
        return [bool(can) for can in flags.tolist()]

    # A step

    def step(self, run: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """Collective: call `run`, which steps the optimizer, for this rank's pieces, and give all ranks the results.

        On the thread that calls `step()`. Raises GradientError on all ranks if gradients are there on some ranks only.

        Args:
            run: takes the arguments of the optimizer's step.
            *args: of the optimizer's step, as hooks get them.
            **kwargs: of the optimizer's step, as hooks get them.
        """
        if self.accelerator is not None and self.accelerator.is_capturing():
            text = "step() with shard=True needs the other ranks' hosts, so a CUDA graph cannot hold it"
            raise GradientError(f"{text}; capture forward and backward only", rank=self.world.rank)
        with self._breaking_off("step()"):
            passed, kwargs = run_before(self.optimizer, self._handles[0].id, (self.optimizer, *args), kwargs)
        self._refuse_changes()
        if ended := self._members.announce(self.name):
            self._share_gradients(min({*range(self.world.size)}.difference(ended)))
        result = self._step_pieces(functools.partial(run, *passed[1:], **kwargs))
        with self._breaking_off("step()"):
            run_after(self.optimizer, passed, kwargs)
        return result

    @contextmanager
    def _breaking_off(self, what: str) -> Iterator[None]:
        """Where one rank raises, the others must not wait for it."""
        try:
            yield
        except BaseException as error:
            self.world.break_off(what, error)
            raise

    def of_optimizer(self, name: str, value: Any) -> Any:
        """What the script gets for a public name of the optimizer. A method may write to parameters, as a step does."""
        is_foreign = getattr(value, "__self__", None) is self.optimizer and not hasattr(Optimizer, name)
        return functools.partial(self._call, value) if is_foreign else value

    @torch.no_grad()
    def _call(self, method: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """Collective: call a method of the optimizer for this rank's pieces, and give all ranks the results."""
        name = f"{method.__name__}()"
        self.world.shared(Join).refuse(name)
        self._refuse_changes()
        begin_together(self.world, self.number, name)
        with self._breaking_off(name):
            with self._in_place(self.pieces, self.everywhere):
                result = method(*args, **kwargs)
            self._exchange.start(self.memories)
            self._exchange.finish()
        torch.autograd.graph.increment_version(self.parameters)
        return result

    def follow(self, said: Sequence[bytes]) -> None:
        """Collective, on a rank that has ended: step its pieces as the others do."""
        own = [parameter.grad for parameter in self.parameters]
        try:
            self._share_gradients(next(rank for rank, theirs in enumerate(said) if theirs))
            step = self._step()
            assert step is not None  # torchring.join holds the optimizer
            self._step_pieces(step)
        finally:
            for parameter, grad in zip(self.parameters, own, strict=True):
                parameter.grad = grad

    def _share_gradients(self, src: int) -> None:
        """Collective: ranks that have ended get the gradients and the options of the groups of rank `src`.

        Only the script knows how gradients are clipped, and which learning rate comes. What every rank steps is left
        out, as ranks that have ended take that over at the end.
        """
        collectives = internal_collectives_of(self.world)
        has_gradient = [p.grad is not None and p not in self.everywhere for p in self.parameters]
        has_gradient = load_plain(collectives.broadcast_bytes(save_plain(has_gradient), src))
        self._take_over_groups(src)
        chosen = [parameter for parameter, has in zip(self.parameters, has_gradient, strict=True) if has]
        grads = [p.grad if self.world.rank == src else torch.empty_like(p.detach()) for p in chosen]
        collectives.broadcast_together([grad for grad in grads if grad is not None], src)
        if self._members.has_ended:
            for parameter in self.parameters:
                parameter.grad = None
            for parameter, grad in zip(chosen, grads, strict=True):
                parameter.grad = grad

    def take_over(self, src: int) -> None:
        """Collective, at the end of `torchring.join`: the options of the groups, and the state of what every rank
        steps, become those of rank `src`."""
        self._take_over_groups(src)
        broadcast_state(_StateOf(self), src)

    def _take_over_groups(self, src: int) -> None:
        """Collective: take over the options of the parameter groups from rank `src`."""
        mine = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        theirs = load_plain(internal_collectives_of(self.world).broadcast_bytes(save_plain(mine), src))
        if self.world.rank != src:
            for group, options in zip(self.optimizer.param_groups, theirs, strict=True):
                group.update(options)

    def _step_pieces(self, run: Callable[[], _T]) -> _T:
        self._enter()
        with self._breaking_off("step()"):
            stepped = [p.grad is not None for p in self.parameters]
            changed = [memory for memory in self.memories if any(stepped[m.parameter] for m in memory.region.members)]
            self.pieces = self._with_gradients(self.pieces)
            with self._in_place(self.pieces, self.everywhere):
                result = run()
            self._exchange.start(changed)
            self._exchange.finish()
        # Peers have written to these, which autograd has to know.
        torch.autograd.graph.increment_version([p for p, has in zip(self.parameters, stepped, strict=True) if has])
        if not self.has_said and any(stepped):
            self.has_said = True
            with suppress(RingError):  # of a rank that is lost now: the step counts
                self._say_what_it_saves()
        self._refuse_differences()
        return result

    def _by_group(self, pieces: Sequence[Piece]) -> list[list[torch.Tensor]]:
        tensors: list[list[torch.Tensor]] = [[] for _ in self.optimizer.param_groups]
        for piece in pieces:
            tensors[piece.group].append(piece.tensor)
        return tensors

    @contextmanager
    def _in_place(self, pieces: Sequence[Piece], everywhere: Collection[torch.nn.Parameter]) -> Iterator[None]:
        """Inside, the optimizer's groups hold these pieces, and parameters, in place of all parameters."""
        whole = [group["params"] for group in self.optimizer.param_groups]
        try:
            for group, parameters, own in zip(self.optimizer.param_groups, whole, self._by_group(pieces), strict=True):
                group["params"] = [*own, *(p for p in parameters if p in everywhere)] if everywhere else own
            self._is_under_way = True
            with without_hooks(self.optimizer):
                yield
        finally:
            self._is_under_way = False
            for group, parameters in zip(self.optimizer.param_groups, whole, strict=True):
                group["params"] = parameters
            self._drop_gradients(pieces)

    def _drop_gradients(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            piece.drop_gradient()

    @torch.no_grad()
    def _with_gradients(self, given: list[Piece]) -> list[Piece]:
        """The pieces, each with its gradient. A piece is split if only some of its parameters have a gradient."""
        if all(piece.take_gradient() for piece in given):
            return given
        pieces = []
        for piece in given:
            if piece.take_gradient():
                pieces.append(piece)
                continue
            parts = piece.split()
            if piece.tensor in (state := self.optimizer.state):
                for part, its in zip(parts, piece.split_state(state.pop(piece.tensor)), strict=True):
                    state[part.tensor] = its
            for part in parts:
                part.take_gradient()
            pieces += parts
        return pieces

    def _enter(self) -> None:
        """Collective: from here on, other ranks write to this rank's parameters."""
        pattern = zlib.crc32(bytes([p.grad is not None for p in self.parameters if p not in self.everywhere]))
        said = begin_together(self.world, self.number, "step()", pattern.to_bytes(4, "little"))
        if others := [rank for rank, other in enumerate(said) if other != said[0]]:
            text = (
                f"on {ranks_in_words(others)} other parameters have a gradient than on rank 0. The script has removed "
                "gradients, or put some there, on some ranks only; change .grad on all ranks alike"
            )
            raise in_step(GradientError(text, rank=self.world.rank, peers=others))

    def _refuse_changes(self) -> None:
        """Raise an error if the script has changed what pieces know nothing of."""
        refuse_patched(self.optimizer)
        self._refuse_moved()
        for group, then in zip(self.optimizer.param_groups, self._groups, strict=True):
            if others := then.symmetric_difference(group["params"]):
                name = next(self._names[parameter] for parameter in self.parameters if parameter in others)
                raise GradientError(
                    f"{name} is in another parameter group than when torchring.wrap(..., shard=True) cut it. Leave "
                    "parameters where they are, and change the options of groups. Or, on all ranks: keep "
                    "state_dict(all_ranks=True), close() this optimizer, load the state into the plain optimizer, move "
                    "parameters there, and wrap it again",
                    rank=self.world.rank,
                    parameters=(name,),
                )

    def _refuse_entry(self, key: object) -> None:
        """Raise GradientError if the script changes the state of a parameter, which is kept by pieces."""
        if not isinstance(key, torch.nn.Parameter) or key not in self._names or key in self.everywhere:
            return
        if not any(piece.tensor is key for piece in self.pieces):
            raise GradientError(
                f"the state of {self._names[key]} cannot be changed through optimizer.state, as shard=True keeps it "
                "by the slices of ranks. On all ranks: change what state_dict(all_ranks=True) returns, and pass that "
                "to load_state_dict(). To begin anew with all parameters: optimizer.state.clear()",
                rank=self.world.rank,
                parameters=(self._names[key],),
            )

    def _refuse_differences(self) -> None:
        """Collective, after every 2^k-th step: raise GradientError if ranks differ in what decides their next steps.

        An optimizer may begin late to look at all parameters, of which a rank steps a share. Groups of which this rank
        steps nothing are left out.
        """
        self._num_looks += 1
        if self.kind is not Kind.WHOLE or self._num_looks & (self._num_looks - 1):
            return
        groups = {piece.group for piece in self.pieces}
        mine = json.dumps(plain_values(self.optimizer, groups) if groups else {}).encode()
        first: dict[str, tuple[int, str]] = {}
        said: Sequence[bytes] = ()
        with suppress(RingError):  # of a rank that is lost now: the step counts
            said = internal_collectives_of(self.world).all_gather_bytes(mine)
        for rank, text in enumerate(said):
            for place, value in json.loads(text).items():
                other, its = first.setdefault(place, (rank, value))
                if its != value:
                    raise in_step(
                        GradientError(
                            f"{place} of the {type(self.optimizer).__name__} is {its} on rank {other}, and {value} on "
                            f"rank {rank}. Its steps depend on all parameters, and with shard=True each rank steps a "
                            "share. Leave shard out",
                            rank=self.world.rank,
                            peers=(rank,),
                        )
                    )

    def _refuse_moved(self) -> None:
        """Raise GradientError if a parameter is not where it was: the optimizer would step other memory."""
        addresses = list(map(torch.Tensor.data_ptr, self.parameters))
        if addresses == self._addresses:
            return
        name = next(n for n, now, then in zip(self.names, addresses, self._addresses, strict=True) if now != then)
        raise GradientError(
            f"the memory of {name} was replaced after torchring.wrap(..., shard=True), as `p.data = ...`, model.to() "
            "or load_state_dict(assign=True) do. Write to it in place (p.copy_(...)), or close() this optimizer and "
            "call torchring.wrap() again, on all ranks",
            rank=self.world.rank,
            parameters=(name,),
        )

    def _say_what_it_saves(self) -> None:
        """Collective, after the first step: say what state there is, and what a fused optimizer would save."""
        state = self.optimizer.state
        shared = sum(map(num_bytes_of, (state.get(p) for p in self.everywhere)))
        mine = sum(map(num_bytes_of, state.values()))
        rows = internal_collectives_of(self.world).all_gather(torch.tensor([mine], device="cpu"))
        sizes = [int(row) for row in rows]
        total, most = sum(sizes) - (len(sizes) - 1) * shared, max(sizes)
        if total:
            self.keep_an_entry()
        if self.world.rank == 0 and total:
            _logger.warning("optimizer state: %.4g -> %.4g MB per rank", total / 1e6, most / 1e6)
            if self.accelerator is None and (text := advice_on_fused(self.optimizer)):
                _logger.warning("%s", text)

    # The end, and what goes past it

    def close(self) -> None:
        """The optimizer keeps the state of this rank's share, with which it refuses to step."""
        self._is_closed = True
        self.optimizer.state = defaultdict(dict, self.optimizer.state)
        self._exchange.close()

    def keep_an_entry(self) -> None:
        """Where ranks have state, each has an entry: get_optimizer_state_dict() steps an optimizer that has none."""
        if not self.optimizer.state:
            self.optimizer.state[torch.empty(0, device="cpu")] = {}

    def release(self) -> None:
        """The ranks of this world part. What this rank has of the state is of no use without the rest."""
        for handle in self._handles:
            handle.remove()
        self.optimizer.state = defaultdict(dict, self.optimizer.state)
        self._exchange.close()

    def reset_pieces(self) -> None:
        """Forget which pieces were split."""
        self.pieces = []
        for index in range(len(self.memories)):
            self._add_pieces_of(index)

    @contextmanager
    def whole_state(self, state: dict[torch.Tensor, Any] | None = None) -> Iterator[None]:
        """Inside, `optimizer.state` is the given one, of whole parameters; or what a load leaves there."""
        mine = self.optimizer.state
        if state is not None:
            self.optimizer.state = defaultdict(dict, state)
        self._is_under_way = True
        try:
            yield
        finally:
            self._is_under_way = False
            if state is not None:
                self.optimizer.state = mine
            else:
                self._guard_state()

    def _guard_state(self) -> None:
        self.optimizer.state = PieceState(self.optimizer.state, self._refuse_entry)

    def _refuse(self, what: str) -> None:
        if not self._is_under_way:
            raise GradientError(PART_OF_STATE if self._is_closed else _PAST.format(what=what), rank=self.world.rank)

    def _accept_state(self) -> None:
        """A whole state is loaded into the optimizer."""
        if self._is_closed:
            for handle in self._handles:
                handle.remove()
        else:
            self._refuse("load_state_dict()")


class PieceState(defaultdict[torch.Tensor, Any]):
    """The state of an optimizer. `refuse` raises an error for a key whose entry the script may not change.

    To look up such a key gives an empty entry, as torch.distributed.checkpoint expects.
    """

    def __init__(self, entries: Mapping[torch.Tensor, Any], refuse: Callable[[object], None]) -> None:
        super().__init__(dict, entries)
        self._refuse = refuse

    def __missing__(self, key: torch.Tensor) -> Any:
        entry: dict[str, Any] = {}
        dict.__setitem__(self, key, entry)
        return entry

    def __setitem__(self, key: torch.Tensor, entry: Any) -> None:
        self._refuse(key)
        super().__setitem__(key, entry)

    def pop(self, key: torch.Tensor, *default: Any) -> Any:
        self._refuse(key)
        return super().pop(key, *default)

    def __reduce__(self) -> Any:
        """A copy belongs to no optimizer that steps pieces."""
        return defaultdict, (dict,), None, None, iter(self.items())


class _StateOf:
    """The state of what every rank steps, by its number."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def state_dict(self) -> dict[str, Any]:
        state, everywhere = self._shards.optimizer.state, self._shards.everywhere
        return {str(i): state[p] for i, p in enumerate(everywhere) if p in state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for i, entry in state_dict.items():
            self._shards.optimizer.state[list(self._shards.everywhere)[int(i)]] = entry


def check_shardable(optimizer: Optimizer) -> None:
    """Raise ValueError if shard=True does not work with this optimizer, or with this PyTorch."""
    if not CAN_SWAP:
        raise ValueError(f"shard=True takes PyTorch 2.12 or newer, and this is {torch.__version__}; leave shard out")
    refuse_patched(optimizer)
    kind_of(optimizer)


def say_cost(world: World) -> None:
    if world.rank == 0 and world.num_nodes > 1:
        _logger.warning(
            "between hosts, shard=True sends 1.5 times the bytes: whole gradients, and then parameters. If the network "
            "limits your steps, leave shard out. If you need less memory, use FSDP2 "
            "(torch.distributed.fsdp.fully_shard) in place of torchring.wrap"
        )


def refuse_closure() -> None:
    raise in_step(
        ValueError(
            "step(closure) does not work with shard=True: a closure may evaluate the model while parameters are "
            "stepped in parts. Call backward() first, and then step()"
        )
    )


def num_bytes_of(value: Any) -> int:
    """Bytes of all tensors in a state."""
    if isinstance(value, torch.Tensor):
        return value._indices().nbytes + value._values().nbytes if value.is_sparse else value.nbytes
    if isinstance(value, dict):
        return sum(map(num_bytes_of, value.values()))
    return sum(map(num_bytes_of, value)) if isinstance(value, (list, tuple)) else 0
