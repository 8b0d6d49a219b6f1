"""The sharded step of one optimizer."""

import logging
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch
from torch.optim import Optimizer

from torchring.allreduce import AllReduce
from torchring.collectives.operations import exchange
from torchring.collectives.service import internal_collectives_of
from torchring.collectives.signature import Signature
from torchring.devices.stream import OnStream
from torchring.errors import GradientError, in_step, ranks_in_words
from torchring.gradients.validation import PART_OF_STATE, parameters_of
from torchring.gradients.views import whole_of
from torchring.sharding.cut import assign_whole, cut_elements
from torchring.sharding.device import DeviceExchange
from torchring.sharding.exchange import Exchange
from torchring.sharding.kinds import Kind, cost_of, kind_of
from torchring.sharding.parameters import FlatMemory, Shard, cut_shards, is_cut, move
from torchring.world import World

_T = TypeVar("_T")
_logger: Final = logging.getLogger("torchring")
_PAST: Final = (
    "the optimizer that torchring.wrap(..., shard=True) was given has the state of a part of the parameters only, so "
    "{what} of its own would be wrong; call {what} of the optimizer that torchring.wrap has returned"
)


class Shards:
    """This rank's share of the parameters and of the state of one optimizer. Opening it is collective.

    `optimizer.state` has an entry for each shard that this rank steps. A step of the optimizer is one of the shards:
    the last hook before it puts shards in the place of parameters, and the first hook after it puts parameters back. So
    the script's hooks see parameters.
    """

    def __init__(
        self,
        world: World,
        optimizer: Optimizer,  # its state does not change; `checkpoint.deal_out` keeps this rank's share
        names: Mapping[torch.nn.Parameter, str],  # of its parameters
        number: int,  # of the optimizer, among those of the world that are sharded
        all_reduce: AllReduce[Any],  # of the gradients
    ) -> None:
        self.world = world
        self.optimizer = optimizer
        self.names = names
        self.kind = kind_of(optimizer)  # how the optimizer is cut
        self.parameters: list[torch.nn.Parameter] = []  # all parameters, in the order of the parameter groups
        self.memories: list[FlatMemory] = []  # of all parameters
        self.shards: list[Shard] = []  # what this rank steps of them
        self._kept: list[torch.Tensor] = []  # memory that the parameters had, where others may still read it
        self._addresses: list[int] = []
        self._group_of: dict[int, int] = {}  # when they were cut
        self._number = number
        self._accelerator = all_reduce.accelerator if isinstance(all_reduce, OnStream) else None
        self._exchange = DeviceExchange(world, all_reduce) if isinstance(all_reduce, OnStream) else Exchange(world)
        world.on_close(self._exchange.close)
        self._is_under_way = False  # the optimizer's own methods are called by this class
        self._is_closed = False
        self._stepped: list[bool] = []  # which parameters have gradients, since the hooks of the present step have run
        self._whole: list[Any] = []  # the parameters of each group, while shards are in their place
        self.extend()
        self.guard_state()
        self._handles = [  # last: a rank that is lost above leaves no hooks that refuse
            optimizer.register_step_pre_hook(lambda *_: self._begin_step()),
            optimizer.register_step_post_hook(lambda *_: self._end_step()),
            optimizer.register_state_dict_pre_hook(lambda _: self._refuse("state_dict()")),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self._accept_state()),
        ]

    def extend(self) -> None:
        """Collective: cut the parameters that the optimizer has got since."""
        first = len(self.parameters)
        self.parameters += list(parameters_of(self.optimizer))[first:]
        self._group_of = self._find_groups()
        added = {i: p for i, p in enumerate(self.parameters[first:], first) if is_cut(p)}
        if self.kind is Kind.WHOLE:
            costs = {
                i: cost_of(p, self.optimizer.param_groups[self.group_of(p)], self.optimizer) for i, p in added.items()
            }
            flats = assign_whole(added, self.world.size, costs)
        else:
            flats = cut_elements(added, self.world.size)
        memories = self._exchange.allocate(flats)
        self._kept += move(self.parameters, memories)
        self.memories += memories
        for memory in memories:
            self.shards += cut_shards(memory, self.world.rank, self.parameters, self.kind)
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]

    def group_of(self, parameter: torch.Tensor) -> int:
        return self._group_of[hash(parameter)]

    def begin(self, what: str, said: bytes = b"") -> list[bytes]:
        """Collective: begin `what`, and tell the other ranks a few bytes. Returns those of all ranks.

        Raises PlanMismatchError on all ranks if others begin something else, another backward for instance.
        """
        signature = Signature(what.removesuffix("()"), f"optimizer {self._number}")
        return internal_collectives_of(self.world).run(what, exchange, said, signature)

    # A step

    def step(self, run: Callable[[], _T]) -> _T:
        """Collective: call `run`, which steps the optimizer, for this rank's shards, and give all ranks the results.

        On the thread that calls `step()`. Raises GradientError on all ranks if gradients are there on some ranks only.
        """
        if self._accelerator is not None and self._accelerator.is_capturing():
            text = "step() with shard=True needs the other ranks' hosts, so a CUDA graph cannot hold it"
            raise GradientError(f"{text}; capture forward and backward only", rank=self.world.rank)
        refuse_patched(self.optimizer)
        before: Any = self.optimizer._optimizer_step_pre_hooks
        after: Any = self.optimizer._optimizer_step_post_hooks
        before.move_to_end(self._handles[0].id)
        after.move_to_end(self._handles[1].id, last=False)
        self._stepped = []
        with self.under_way("step()"):
            result = run()
            if not self._stepped:
                raise RuntimeError(f"step() of {type(self.optimizer).__name__} runs no hooks; leave shard out")
        return result

    def _begin_step(self) -> None:
        self._refuse("step()")
        self._stepped = [parameter.grad is not None for parameter in self.parameters]
        problem = self._find_change()
        text = str(problem or "")
        said = self.begin("step()", zlib.crc32(bytes(self._stepped)).to_bytes(4, "little") + text.encode())
        if text := next(filter(None, (other[4:].decode() for other in said)), ""):
            raise in_step(problem or GradientError(text, rank=self.world.rank))
        if others := [rank for rank, other in enumerate(said) if other != said[0]]:
            text = (
                f"on {ranks_in_words(others)} other parameters have a gradient than on rank 0. The script has removed "
                "gradients, or put some there, on some ranks only; change .grad on all ranks alike"
            )
            raise in_step(GradientError(text, rank=self.world.rank, peers=others))
        self.put_shards()
        for shard in self.shards:
            if shard.tensor is not shard.parameter:
                shard.tensor.grad = shard.gradient()

    def _end_step(self) -> None:
        self.put_parameters()
        self._spread(self._stepped)

    def _spread(self, stepped: Sequence[bool]) -> None:
        """Collective: give all ranks what this rank has stepped of these parameters."""
        self._exchange.spread([m for m in self.memories if any(stepped[index] for index in m.flat.spans)])
        # Peers have written to these, which autograd has to know.
        written = [whole_of(p) for p, has in zip(self.parameters, stepped, strict=True) if has]
        torch.autograd.graph.increment_version(written)

    def put_shards(self) -> None:
        """Put this rank's shards in the place of parameters, in the groups of the optimizer."""
        groups = self.optimizer.param_groups
        self._whole = [group["params"] for group in groups]
        for group in groups:
            group["params"] = []
        for shard in self.shards:
            groups[self.group_of(shard.parameter)]["params"].append(shard.tensor)

    def put_parameters(self) -> None:
        for group, parameters in zip(self.optimizer.param_groups, self._whole, strict=False):
            group["params"] = parameters
        self._whole = []
        for shard in self.shards:
            if shard.tensor is not shard.parameter:
                shard.tensor.grad = None

    @contextmanager
    def under_way(self, what: str) -> Iterator[None]:
        """Inside, the optimizer's own methods may be called. Where one rank raises, the others do not wait for it."""
        before, self._is_under_way = self._is_under_way, True  # a hook of a step may ask for the state
        try:
            yield
        except BaseException as error:
            self.world.note_members(error)
            if not self.world.is_in_step(error):
                self.world.break_off(what, error)
            raise
        finally:
            self._is_under_way = before
            if not before:
                self.put_parameters()

    # Other methods of the optimizer

    def of_optimizer(self, name: str, value: Any) -> Any:
        """What the script gets for a public name of the optimizer. A method may write to parameters, as a step does."""
        if getattr(value, "__self__", None) is not self.optimizer or hasattr(Optimizer, name):
            return value

        @torch.no_grad()
        def call(*args: Any, **kwargs: Any) -> Any:
            """Collective: call the method for this rank's shards, and give all ranks the results."""
            what = f"{name}()"
            if (problem := self._find_change()) is not None:
                raise problem
            self.begin(what)
            with self.under_way(what):
                self.put_shards()
                result = value(*args, **kwargs)
                self.put_parameters()
                self._spread([True] * len(self.parameters))
            return result

        return call

    # What is refused

    def _refuse(self, what: str) -> None:
        if not self._is_under_way:
            text = PART_OF_STATE if self._is_closed else _PAST.format(what=what)
            raise self.world.note_members(GradientError(text, rank=self.world.rank))

    def _find_change(self) -> GradientError | None:
        """The error if the script has changed what shards know nothing of."""
        addresses, group_of = list(map(torch.Tensor.data_ptr, self.parameters)), self._find_groups()
        if addresses == self._addresses and group_of == self._group_of:
            return None
        places = zip(self.parameters, addresses, self._addresses, strict=True)
        if name := next((self.names[p] for p, address, then in places if address != then), ""):
            text = (
                f"the memory of {name} was replaced after torchring.wrap(..., shard=True), as `p.data = ...`, "
                "model.to() or load_state_dict(assign=True) do. Write to it in place (p.copy_(...)), or close() this "
                "optimizer and call torchring.wrap() again, on all ranks"
            )
        else:
            moved = (self.names[p] for p in self.parameters if group_of.get(hash(p)) != self.group_of(p))
            name = next(moved, "a parameter")
            text = (
                f"{name} is in another parameter group than when torchring.wrap(..., shard=True) cut it. Leave "
                "parameters where they are, and change the options of groups. Or, on all ranks: keep "
                "state_dict(all_ranks=True), close() this optimizer, load the state into the plain optimizer, move "
                "parameters there, and wrap it again"
            )
        return self.world.note_members(GradientError(text, rank=self.world.rank, parameters=(name,)))

    def _find_groups(self) -> dict[int, int]:
        """The group of each parameter, by its id: to hash a parameter takes a call of Python."""
        return {each: g for g, group in enumerate(self.optimizer.param_groups) for each in map(id, group["params"])}

    def refuse_entry(self, key: object) -> None:
        """Raise GradientError if the script asks for the state of a parameter, which is kept by shards."""
        if isinstance(key, torch.nn.Parameter) and key in self.names and all(s.tensor is not key for s in self.shards):
            text = (
                f"optimizer.state has no entry for {self.names[key]}, as shard=True keeps the state by the slices of "
                "ranks, nor can set_optimizer_state_dict(flatten_optimizer_state_dict=True) find one. On all ranks: "
                "change what state_dict(all_ranks=True) returns, and pass that to load_state_dict(). To begin anew "
                "with all parameters: optimizer.state.clear()"
            )
            error = GradientError(text, rank=self.world.rank, parameters=(self.names[key],))
            raise self.world.note_members(error)

    # The state

    def guard_state(self) -> None:
        self.optimizer.state = _State(dict, self.optimizer.state)
        self.optimizer.state.refuse = self.refuse_entry

    def state_dict_of(self, state: Mapping[Any, Any]) -> dict[str, Any]:
        """The optimizer's own state_dict, of this state of whole parameters."""
        mine = self.optimizer.state
        with self.under_way("state_dict()"):
            self.optimizer.state = defaultdict(dict, {whole_of(p): entry for p, entry in state.items()})
            try:
                return self.optimizer.state_dict()
            finally:
                self.optimizer.state = mine

    def adapted(self, state_dict: Any) -> Any:
        """What the script's hooks make of a whole state that is to be loaded."""
        for number, hook in list(self.optimizer._optimizer_load_state_dict_pre_hooks.items()):
            if number != self._handles[-1].id:
                state_dict = hook(self.optimizer, state_dict) or state_dict
        return state_dict

    def close(self) -> None:
        """The optimizer keeps the state of this rank's share, with which it refuses to step."""
        self._is_closed = True
        self.optimizer.state = defaultdict(dict, self.optimizer.state)
        self._exchange.close()

    def release(self) -> None:
        """The ranks of this world part. What this rank has of the state is of no use without the rest."""
        self.close()
        self._accept_state()

    def _accept_state(self) -> None:
        """A whole state is loaded into the optimizer."""
        if not self._is_closed:
            self._refuse("load_state_dict()")
            return
        for handle in self._handles:
            handle.remove()


class _State(defaultdict[torch.Tensor, Any]):
    """The state of an optimizer by shards. `refuse` raises an error for a key whose entry the script cannot have."""

    refuse: Callable[[object], None] = staticmethod(lambda key: None)

    def __missing__(self, key: torch.Tensor) -> Any:
        self.refuse(key)
        return super().__missing__(key)

    def __setitem__(self, key: torch.Tensor, entry: Any) -> None:
        self.refuse(key)
        super().__setitem__(key, entry)

    def pop(self, key: torch.Tensor, *default: Any) -> Any:
        self.refuse(key)
        return super().pop(key, *default)


def refuse_patched(optimizer: Optimizer) -> None:
    """Raise ValueError if the script has replaced `step` of this instance, as no scheduler does."""
    patched = vars(optimizer).get("step")
    if patched is not None and not getattr(patched, "_wrapped_by_lr_sched", False):
        raise ValueError(
            f"step() of this {type(optimizer).__name__} was replaced in the instance; with shard=True, it would see "
            "parts of parameters. Replace step() of the optimizer that torchring.wrap returns, or use "
            "register_step_pre_hook() and register_step_post_hook(), whose hooks see whole parameters"
        )
