"""States of an elastic job, which survive a failure: a model, an optimizer, a sampler, and any other values."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

import torchring.horovod as hvd
from torchring.elastic.worker.checkpoint import copy_of
from torchring.horovod.elastic.sampler import ElasticSampler
from torchring.horovod.elastic.worker import agree, current_worker
from torchring.horovod.exceptions import HostsUpdatedInterrupt
from torchring.optimizer import DistributedOptimizer, rejoin


class State:
    """The parts that every state has: `horovod.common.elastic.State`. Subclasses say what is saved, and how."""

    _num_commits: int = 0

    def __init__(
        self, bcast_object: Callable[[Any], Any] | None = None, get_rank: Callable[[], int] | None = None
    ) -> None:
        self._bcast_object = bcast_object or (lambda obj: hvd.broadcast_object(obj, name="elastic.state"))
        self._rank = get_rank or (lambda: hvd.rank())
        self._reset_callbacks: list[Callable[[], object]] = []

    def save(self) -> None:
        """Copy the state to host memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks rank 0's state, and save it. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to the ranks that there are now. Does nothing here."""

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Have `callbacks` called after each reset: init() has run, `sync` has not."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call `reset`, then the callbacks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state, and raise HostsUpdatedInterrupt if hosts have changed. Collective."""
        self.save()
        self._num_commits += 1
        if (worker := current_worker()) is not None:
            worker.elastic.has_stepped(self._num_commits)
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks if hosts have changed, or a rank was told to end. Collective."""
        if (worker := current_worker()) is None:
            return  # ranks stay as they are
        are_removed, are_added = agree("elastic.changes", *worker.changes())
        if are_removed or are_added:
            raise HostsUpdatedInterrupt(skip_sync=not are_added)


class ObjectState(State):
    """Any values, given as keywords, as attributes: `horovod.common.elastic.ObjectState`.

    A commit copies the values deeply, where Horovod keeps references: a list that grows after the commit is as long as
    at the commit once it is restored. Values that cannot be copied are kept as they are.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any] | None = None, get_rank: Callable[[], int] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = {name: _copied(value) for name, value in kwargs.items()}
        self._set_attributes(kwargs)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def save(self) -> None:
        self._saved_state = {name: _copied(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        self._set_attributes({name: _copied(value) for name, value in self._saved_state.items()})

    def sync(self) -> None:
        if self._saved_state:
            self._set_attributes(self._bcast_object({name: getattr(self, name) for name in self._saved_state}))
        self.save()

    def _set_attributes(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


class TorchState(ObjectState):
    """Model, optimizer, sampler, and any other values: `horovod.torch.elastic.TorchState`.

        state = TorchState(model, optimizer, sampler=sampler, epoch=0)

    Modules, optimizers and samplers are changed in place by `restore` and `sync`; other values are replaced. Assigning
    a module to `state.model` saves that module. Where Horovod leaves the last commit as it was, `sync` also saves.
    """

    _saved_dicts: Mapping[str, Any] = {}  # of the modules, optimizers and samplers, by name

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        kwargs = {"model": model, "optimizer": optimizer, **kwargs}
        for name, value in kwargs.items():
            setattr(self, name, value)
        kinds = (torch.nn.Module, torch.optim.Optimizer, ElasticSampler)
        self._saved_dicts = {
            name: copy_of(value.state_dict()) for name, value in kwargs.items() if isinstance(value, kinds)
        }
        super().__init__(**{name: value for name, value in kwargs.items() if name not in self._saved_dicts})

    def save(self) -> None:
        self._saved_dicts = {name: copy_of(getattr(self, name).state_dict()) for name in self._saved_dicts}
        super().save()

    def restore(self) -> None:
        for name, saved in self._saved_dicts.items():
            # A copy: optimizers go on to use tensors that they are given, and would change what is saved.
            getattr(self, name).load_state_dict(copy_of(saved))
        super().restore()

    def sync(self) -> None:
        for name in self._saved_dicts:
            value = getattr(self, name)
            if isinstance(value, torch.nn.Module):
                hvd.broadcast_parameters(value.state_dict(), root_rank=0)
            elif isinstance(value, torch.optim.Optimizer):
                hvd.broadcast_optimizer_state(value, root_rank=0)
            else:
                value.load_state_dict(hvd.broadcast_object(value.state_dict(), name="elastic.sampler"))
        super().sync()

    def reset(self) -> None:
        for name in self._saved_dicts:
            value = getattr(self, name)
            if isinstance(value, DistributedOptimizer):
                rejoin(value)
            elif isinstance(value, ElasticSampler):
                value.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self._saved_dicts:
            self._saved_dicts = {**self._saved_dicts, name: copy_of(value.state_dict())}


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # an open file, a generator
        return value
