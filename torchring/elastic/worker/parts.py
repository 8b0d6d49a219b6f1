"""What a State consists of, as one thing that can be copied, saved, loaded, and sent to other ranks."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch

from torchring.elastic.worker.checkpoint import copy_of
from torchring.gradients.validation import parameters_of
from torchring.initial_state import broadcast_parameters, broadcast_state, check_broadcastable, check_sendable
from torchring.local_steps.local_sgd import LocalSGD
from torchring.optimizer import DistributedOptimizer, names_of
from torchring.sharding.optimizer import ShardedOptimizer

FORMAT: Final = 2  # of checkpoints


@dataclass
class Counters:
    """How far the state is."""

    steps: int = 0  # of the first optimizer
    progress: int = 0  # steps of all optimizers: more is further
    size: int = 0  # of the world that trained last; 0 for none


class Parts:
    """The modules, the objects with a state dict, and the values of a State, by name. The values are attributes of it.

    Its own state dict has all but the tensors of modules and optimizers. `owner` is the State, `given` what it got.
    """

    def __init__(self, owner: object, given: Mapping[str, Any]) -> None:
        self._owner = owner
        self.modules = {name: each for name, each in given.items() if isinstance(each, torch.nn.Module)}
        kinds = (DistributedOptimizer, LocalSGD)  # which has what is asked of the other here
        self.optimizers: dict[str, DistributedOptimizer] = {n: o for n, o in given.items() if isinstance(o, kinds)}  # type: ignore[misc]
        self.alone = [each for each in given.values() if isinstance(each, LocalSGD)]
        self.sharded = {n: each for n, each in self.optimizers.items() if isinstance(each, ShardedOptimizer)}
        rest = {name: each for name, each in given.items() if name not in {**self.modules, **self.optimizers}}
        methods = ("state_dict", "load_state_dict")
        self.others = {name: each for name, each in rest.items() if all(hasattr(each, method) for method in methods)}
        self._values = [name for name in rest if name not in self.others]
        self.counters = Counters()

    def check(self) -> None:
        """Raise TypeError or ValueError, with its name, for what cannot be sent to other ranks."""
        if not self.optimizers:
            raise TypeError("a State needs an optimizer that torchring.wrap() has returned")
        for name, optimizer in self.optimizers.items():
            if isinstance(optimizer.optimizer, torch.optim.LBFGS):
                raise ValueError(
                    f"{name} is LBFGS, which changes parameters several times in a step, so ranks cannot change within "
                    "it; train with another optimizer, or without torchring.elastic"
                )
        for name, module in self.modules.items():
            try:
                check_broadcastable(module)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        check_sendable(self)
        for name, optimizer in self.optimizers.items():
            if name not in self.sharded:
                check_sendable(optimizer)

    def layout(self) -> list[str]:
        """Lines that must be equal on all ranks, and in a checkpoint."""
        lines = []
        for name, module in self.modules.items():
            tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            lines += [f"{name}.{key}: {tuple(t.shape)} {t.dtype}" for key, t in tensors.items()]
        of_torch = {name: each.optimizer for name, each in self.optimizers.items()}  # with shard=True or without
        lines += [f"{name}: {type(each).__name__}" for name, each in {**of_torch, **self.others}.items()]
        return [*lines, *(f"{name}: a value" for name in self._values)]

    def state_dict(self) -> dict[str, Any]:
        places = self._places()  # a parameter that came past torchring has none. The next step refuses it.
        return {
            "groups": {
                name: [{**group, "params": [places.get(p, "") for p in group["params"]]} for group in each.param_groups]
                for name, each in self.optimizers.items()
            },
            "names": {
                name: [names_of(each).get(parameter, "") for parameter in parameters_of(each)]
                for name, each in self.optimizers.items()
            },
            "requires_grad": {place: parameter.requires_grad for parameter, place in places.items()},
            "values": {name: getattr(self._owner, name) for name in self._values},
            "counters": {**vars(self.counters)},
            "others": {name: each.state_dict() for name, each in self.others.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        parameters = {place: parameter for parameter, place in self._places().items()}
        for name, optimizer in self.optimizers.items():
            groups = [{**group} for group in state_dict["groups"][name]]
            for group in groups:
                if unknown := [place for place in group["params"] if place not in parameters]:
                    raise ValueError(
                        f"{name} has {unknown[0]} where training goes on, which no module of this State has; build "
                        "the same model, and keep all modules in the State whose parameters are added later"
                    )
                group["params"] = [parameters[place] for place in group["params"]]
            _take_groups(optimizer, groups, state_dict["names"][name])
        for place, requires_grad in state_dict["requires_grad"].items():
            if place in parameters and parameters[place].requires_grad != requires_grad:
                parameters[place].requires_grad_(requires_grad)
        for name in self._values:
            setattr(self._owner, name, state_dict["values"][name])
        vars(self.counters).update(state_dict["counters"])
        for name, each in self.others.items():
            each.load_state_dict(state_dict["others"][name])

    def _places(self) -> dict[torch.nn.Parameter, str]:
        """Each parameter, and where it is."""
        places = {
            parameter: f"{each} of {name}"
            for name, optimizer in self.optimizers.items()
            for parameter, each in names_of(optimizer).items()
        }
        for name, module in self.modules.items():
            places |= {parameter: f"{name}.{each}" for each, parameter in module.named_parameters()}
        return places

    def everything(self) -> dict[str, Any]:
        """The whole state as it is now, for a checkpoint. Collective if an optimizer has shard=True."""
        return {
            "format": FORMAT,
            "layout": self.layout(),
            "time": time.time(),
            "modules": {name: module.state_dict() for name, module in self.modules.items()},
            "optimizers": {name: each.state_dict() for name, each in self.optimizers.items()},
            "rest": self.state_dict(),
        }

    def copy(self) -> dict[str, Any]:
        """A copy of everything, also of buffers that no checkpoint has."""
        buffers = {name: dict(module.named_buffers()) for name, module in self.modules.items()}
        return cast("dict[str, Any]", copy_of({**self.everything(), "buffers": buffers}))

    def become(self, everything: Mapping[str, Any]) -> None:
        self.load_state_dict(everything["rest"])  # first: optimizers load into groups that are alike
        for name, module in self.modules.items():
            module.load_state_dict(everything["modules"][name])
        for name, buffers in everything.get("buffers", {}).items():
            own = dict(self.modules[name].named_buffers())
            for place in buffers.keys() & own.keys():
                own[place].resize_(buffers[place].shape).copy_(buffers[place])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(everything["optimizers"][name])

    def share(self, src: int, *, parameters: bool, keeps: bool = False) -> None:
        """Collective: give all ranks what rank `src` has, but for the state of optimizers with shard=True.

        Without `parameters`, ranks have equal ones, and equal state of optimizers. With `keeps`, this rank keeps what
        it has done since the last outer step (`LocalSGD`); else it begins from the outer parameters.
        """
        alone = self.alone if parameters else []
        own = [each._own_steps() if keeps else None for each in alone]
        broadcast_state(self, src)
        for module in self.modules.values():
            broadcast_parameters(module if parameters else dict(module.named_buffers()), src)
        for name, optimizer in self.optimizers.items():
            if parameters and name not in self.sharded:
                broadcast_state(optimizer, src)
        for each_alone, steps in zip(alone, own, strict=True):
            each_alone._resume(steps)


def _take_groups(optimizer: DistributedOptimizer, groups: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Take over these groups, options and names of parameters. Existing groups stay, as schedulers refer to them."""
    own = optimizer.param_groups
    of_both = zip(own, groups, strict=False)
    alike = [[*map(id, mine["params"])] == [*map(id, its["params"])] for mine, its in of_both]
    num_alike = [*alike, False].index(False)
    if num_alike < max(len(own), len(groups)):
        for parameter in [parameter for group in own[num_alike:] for parameter in group["params"]]:
            optimizer.state.pop(parameter, None)
        del own[num_alike:]
        for group in groups[num_alike:]:
            optimizer.optimizer.add_param_group(dict(group))
        named = names_of(optimizer)
        named.clear()
        named.update(zip(parameters_of(optimizer), names, strict=True))
    for mine, its in zip(own, groups, strict=True):
        mine.update({key: value for key, value in its.items() if key != "params"})
