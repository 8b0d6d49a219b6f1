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
from torchring.collectives.service import Join, internal_collectives_of
from torchring.devices.stream import OnStream
from torchring.errors import GradientError, RingError, in_step, ranks_in_words
from torchring.gradients.group import OptimizerGroup
from torchring.gradients.validation import PART_OF_STATE
from torchring.sharding.cut import Candidate, assign_whole, cut_elements
from torchring.sharding.device import DeviceExchange
from torchring.sharding.exchange import Exchange
from torchring.sharding.kinds import Kind, cost_of, kind_of, plain_values
from torchring.sharding.parameters import FlatMemory, movable, move
from torchring.sharding.shard import Run, Shard, ShardState, cut_shards, join, num_bytes_of, whole_shards
from torchring.sharding.step_hooks import refuse_patched, run_after, run_before, without_hooks
from torchring.sharding.together import begin_together
from torchring.world import World

_T = TypeVar("_T")
_logger: Final = logging.getLogger("torchring")
_PAST: Final = (
    "the optimizer that torchring.wrap(..., shard=True) was given has the state of a part of the parameters only, so "
    "{what} of its own would be wrong; call {what} of the optimizer that torchring.wrap has returned"
)


class Shards:
    """This rank's share of the parameters and of the state of one optimizer. Opening it is collective.

    `optimizer.state` has an entry for each shard that this rank steps. Parameters that cannot be cut are stepped by
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
        memories: of all parameters that are cut.
        shards: what this rank steps of them.
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
        self.memories: list[FlatMemory] = []
        self.shards: list[Shard] = []
        self._runs: list[Run] = []
        self._joined_for: list[bool] = []  # which parameters had gradients then
        self.everywhere: dict[torch.nn.Parameter, None] = {}
        self.accelerator = all_reduce.accelerator if isinstance(all_reduce, OnStream) else None
        self._names = names
        self._sparse = sparse
        self._kept: list[torch.Tensor] = []  # memory that the parameters had, where others may still read it
        self._addresses: list[int] = []
        self._group_of: dict[int, int] = {}  # when they were cut
        self._num_looks = 0  # steps after which `_refuse_differences` may look
        self._exchange = DeviceExchange(world, all_reduce) if isinstance(all_reduce, OnStream) else Exchange(world)
        world.on_close(self._exchange.close)
        self.number = number
        self._step = weakref.WeakMethod(step)
        self._reducers = world.shared(OptimizerGroup).reducers
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
        added = [p for group in self.optimizer.param_groups for p in group["params"]][first:]
        self.parameters += added
        self.names += [self._names[parameter] for parameter in added]
        self._group_of = self._find_groups()
        candidates = []
        for index, (parameter, can_move) in enumerate(zip(added, self._movable(added), strict=True), start=first):
            if can_move:
                cost = cost_of(parameter, self.optimizer.param_groups[self._group_of[id(parameter)]], self.optimizer)
                candidates.append(Candidate(index, parameter.numel(), parameter.dtype, parameter.requires_grad, cost))
            else:
                self.everywhere[parameter] = None
        cut = assign_whole if self.kind is Kind.WHOLE else cut_elements
        memories = self._exchange.allocate(cut(candidates, self.world.size))
        self._kept += move(self.parameters, memories)
        self.memories += memories
        for memory in memories:
            if self.kind is Kind.WHOLE:
                self.shards += whole_shards(memory, self.world.rank, self.parameters)
            else:
                on_device = self.accelerator is not None
                self.shards += cut_shards(memory, self.world.rank, self.parameters, on_device=on_device)
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]
        self.split()

    def split(self) -> None:
        """Each shard gets a state of its own, until the next step."""
        for run in self._runs:
            run.split_state(self.optimizer.state)
        self._runs = [Run([shard]) for shard in self.shards]
        self._joined_for = []

    def _join(self, stepped: list[bool]) -> None:
        """Join small shards that are stepped alike, given which parameters have gradients."""
        self.split()
        self._joined_for = stepped
        fused = {g for g, group in enumerate(self.optimizer.param_groups) if group.get("fused")}

        def traits(shard: Shard) -> object:
            group = self._group_of[id(shard.parameter)]
            return shard if group in fused else group, stepped[shard.index]

        if self.kind is Kind.ELEMENTS and self.accelerator is None:
            self._runs = join(self.shards, self.optimizer.state, traits)

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
        """Collective: call `run`, which steps the optimizer, for this rank's shards, and give all ranks the results.

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
        if ended := self._reducers.announce(self.name):
            self._share_gradients(min({*range(self.world.size)}.difference(ended)))
        result = self._step_shards(functools.partial(run, *passed[1:], **kwargs))
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
        """Collective: call a method of the optimizer for this rank's shards, and give all ranks the results."""
        name = f"{method.__name__}()"
        self.world.shared(Join).refuse(name)
        self._refuse_changes()
        begin_together(self.world, self.number, name)
        with self._breaking_off(name):
            with self._in_place():
                result = method(*args, **kwargs)
            self._exchange.start(self.memories)
            self._exchange.finish()
        torch.autograd.graph.increment_version(self.parameters)
        return result

    def follow(self, said: Sequence[bytes]) -> None:
        """Collective, on a rank that has ended: step its shards as the others do."""
        own = [parameter.grad for parameter in self.parameters]
        try:
            self._share_gradients(next(rank for rank, theirs in enumerate(said) if theirs))
            step = self._step()
            assert step is not None  # torchring.join holds the optimizer
            self._step_shards(step)
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
        if self._reducers.has_ended:
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

    def _step_shards(self, run: Callable[[], _T]) -> _T:
        self._enter()
        with self._breaking_off("step()"):
            stepped = [p.grad is not None for p in self.parameters]
            changed = [m for m in self.memories if any(stepped[index] for index in m.flat.spans)]
            if stepped != self._joined_for:
                self._join(stepped)
            with self._in_place():
                with torch.no_grad():
                    for each in self._runs:
                        each.take_gradient(self.names)
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

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Inside, the optimizer's groups hold this rank's shards in place of the parameters that are cut."""
        groups = self.optimizer.param_groups
        whole = [group["params"] for group in groups]
        own: list[list[torch.Tensor]] = [[] for _ in groups]
        for run in self._runs:
            own[self._group_of[id(run.shards[0].parameter)]].append(run.tensor)
        for parameter in self.everywhere:
            own[self._group_of[id(parameter)]].append(parameter)
        try:
            for group, tensors in zip(groups, own, strict=True):
                group["params"] = tensors
            self._is_under_way = True
            with without_hooks(self.optimizer):
                yield
        finally:
            self._is_under_way = False
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters
            for run in self._runs:
                run.drop_gradient()

    def _enter(self) -> None:
        """Collective: from here on, other ranks write to this rank's parameters."""
        cut = (self.parameters[index] for memory in self.memories for index in memory.flat.spans)
        pattern = zlib.crc32(bytes([p.grad is not None for p in cut]))
        said = begin_together(self.world, self.number, "step()", pattern.to_bytes(4, "little"))
        if others := [rank for rank, other in enumerate(said) if other != said[0]]:
            text = (
                f"on {ranks_in_words(others)} other parameters have a gradient than on rank 0. The script has removed "
                "gradients, or put some there, on some ranks only; change .grad on all ranks alike"
            )
            raise in_step(GradientError(text, rank=self.world.rank, peers=others))

    def _refuse_changes(self) -> None:
        """Raise an error if the script has changed what shards know nothing of."""
        refuse_patched(self.optimizer)
        self._refuse_moved()
        if (group_of := self._find_groups()) != self._group_of:
            pairs = zip(self.parameters, self.names, strict=True)
            name = next((n for p, n in pairs if group_of.get(id(p)) != self._group_of[id(p)]), "a parameter")
            raise GradientError(
                f"{name} is in another parameter group than when torchring.wrap(..., shard=True) cut it. Leave "
                "parameters where they are, and change the options of groups. Or, on all ranks: keep "
                "state_dict(all_ranks=True), close() this optimizer, load the state into the plain optimizer, move "
                "parameters there, and wrap it again",
                rank=self.world.rank,
                parameters=(name,),
            )

    def _find_groups(self) -> dict[int, int]:
        """The group of each parameter, by its id: to hash a parameter takes a call of Python."""
        return {each: g for g, group in enumerate(self.optimizer.param_groups) for each in map(id, group["params"])}

    def _refuse_entry(self, key: object) -> None:
        """Raise GradientError if the script changes the state of a parameter, which is kept by shards."""
        if not isinstance(key, torch.nn.Parameter) or key not in self._names or key in self.everywhere:
            return
        if not any(shard.tensor is key for shard in self.shards):
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
        groups = {self._group_of[id(shard.parameter)] for shard in self.shards}
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
        """Collective, after the first step: say what state there is."""
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

    @contextmanager
    def whole_state(self, state: Mapping[torch.Tensor, Any]) -> Iterator[None]:
        """Inside, `optimizer.state` is the given one, of whole parameters."""
        mine = self.optimizer.state
        self.optimizer.state = defaultdict(dict, state)
        self._is_under_way = True
        try:
            yield
        finally:
            self._is_under_way = False
            self.optimizer.state = mine

    def _guard_state(self) -> None:
        self.optimizer.state = ShardState(self.optimizer.state, self._refuse_entry)

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
