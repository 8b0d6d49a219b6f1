"""Finds DistributedDataParallel (DDP) and FullyShardedDataParallel (FSDP) around parameters that torchring reduces.

DDP and FSDP write their own results to `.grad`. If torchring reduces the same parameter, the gradient is wrong. The
gradient is equally wrong on all ranks, so comparing ranks does not reveal the error.

When the first optimizer is wrapped, existing DDP and FSDP instances are found among the objects that Python's garbage
collector knows; the search takes 30 ms for 300,000 objects. Instances that are built later are noticed through
PyTorch's public hook on the registration of submodules. In a training step, `ownership.py` only compares numbers.
"""

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from torchring.dynamo import run_eagerly
from torchring.gradients.views import whole_of
from torchring.rooms import room
from torchring.world import World

_T = TypeVar("_T")
WAY_OUT: Final = (
    "Train the bare model, without DistributedDataParallel or FSDP around it, and pass it to torchring.wrap(). Where a "
    "framework wraps the model: with Accelerate, use torchring.accelerate.RingAccelerator; with a transformers "
    "Trainer, torchring.transformers.RingTrainer, or RingMixin before your own trainer; with Lightning, import "
    "torchring.lightning and pass strategy='torchring'; with Ray, call ray.train.torch.prepare_model(model, "
    "parallel_strategy=None)"
)


class ModuleWrappers:
    """The DDP and FSDP instances of this process that are alive. `MODULE_WRAPPERS` is the one object of this class."""

    def __init__(self) -> None:
        self.num_built = 0  # how many instances were built since this module was imported
        self._has_searched = False
        self._alive: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        register_module_module_registration_hook(self._notice)

    def find(self) -> None:
        """Find the instances that were built before this module was imported."""
        if self._has_searched:
            return
        self._has_searched = True
        kinds = tuple(with_subclasses(_kinds()))
        self._alive.update(found for found in gc.get_referrers(*kinds) if type(found) in kinds)

    def first_shared(self, parameters: Sequence[torch.Tensor]) -> tuple[int, str] | None:
        """The first of `parameters` whose gradient a module wrapper reduces: its index, and the wrapper's class."""
        if (shared := self._first_shared(parameters)) is None:
            return None
        del shared
        gc.collect()  # a module wrapper that the script has dropped is no mistake
        return self._first_shared(parameters)

    def _first_shared(self, parameters: Sequence[torch.Tensor]) -> tuple[int, str] | None:
        reducers = {id(p): type(wrapper).__name__ for wrapper in list(self._alive) for p in _reduced_by(wrapper)}
        return next(((i, reducers[id(p)]) for i, p in enumerate(parameters) if id(p) in reducers), None)

    @run_eagerly
    def _notice(self, module: torch.nn.Module, name: str, submodule: torch.nn.Module | None) -> None:
        """A submodule is assigned to `module`. In the constructor of DDP or FSDP, the submodule is the model."""
        if isinstance(module, _kinds()):
            self._alive.add(module)
            self.num_built += 1


MODULE_WRAPPERS: Final = ModuleWrappers()


def check_model(model: torch.nn.Module) -> None:
    """Raise ValueError if `wrap` was given a model that reduces gradients itself."""
    if isinstance(model, _kinds()):  # what fully_shard() has cut are DTensors, see `mesh.check`
        raise ValueError(f"the model is a {type(model).__name__}, which reduces gradients itself. {WAY_OUT}")


def check(names: Mapping[torch.nn.Parameter, str], world: World) -> None:
    """Raise ValueError if a module wrapper reduces one of the parameters, or has split it up over ranks of `world`."""
    MODULE_WRAPPERS.find()
    if any(parameter is not whole_of(parameter) for parameter in names):
        room("mesh").check(names, world, f". {WAY_OUT}")
    trainable = [parameter for parameter in names if parameter.requires_grad]
    if shared := MODULE_WRAPPERS.first_shared(trainable):
        index, kind = shared
        raise ValueError(explain(names[trainable[index]], kind))


def explain(name: str, kind: str) -> str:
    """The error's text for a parameter that a module wrapper of class `kind` reduces as well."""
    return f"{name} belongs to a {kind}, which reduces its gradient as well; the result would be wrong. {WAY_OUT}"


def is_module_wrapper(model: torch.nn.Module) -> bool:
    """Whether `model` is a DDP or FSDP, or was given to fully_shard()."""
    fsdp2 = _loaded("torch.distributed.fsdp", "FSDPModule")
    return isinstance(model, _kinds()) or (fsdp2 is not None and isinstance(model, fsdp2))


def _kinds() -> tuple[type, ...]:
    """The classes of module wrappers. FSDP takes a while to import, and a script that uses it has done so."""
    fsdp = _loaded("torch.distributed.fsdp", "FullyShardedDataParallel")
    return (DistributedDataParallel,) if fsdp is None else (DistributedDataParallel, fsdp)


def _loaded(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def with_subclasses(kinds: Iterable[type]) -> Iterator[type]:
    for kind in kinds:
        yield kind
        yield from with_subclasses(kind.__subclasses__())


def _reduced_by(wrapper: torch.nn.Module) -> Iterable[torch.Tensor]:
    if not isinstance(wrapper, DistributedDataParallel):
        return wrapper.parameters()
    # The parameters that DDP's constructor chose, without the ignored ones. After a constructor that raised there is no
    # reducer.
    return wrapper._module_parameters if "reducer" in vars(wrapper) else ()


def living(kind: type[_T]) -> list[_T]:
    """The objects of a class that this process has. Takes 20 ms and more, so only where something may be wrong."""
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]
