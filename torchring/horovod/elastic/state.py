"""States of an elastic job, which survive a failure: a model, an optimizer, a sampler, and any other values."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

import torchring.horovod as hvd
from torchring.elastic.worker.checkpoint import copy_of
from torchring.horovod.elastic.sampler import ElasticSampler
from torchring.horovod.elastic.worker import agree, current_worker
from torchring.horovod.exceptions import HostsUpdatedInterrupt
from torchring.optimizer import DistributedOptimizer, rejoin


class _Recoverable:
    """What can be saved, and brought back after a failure."""

    def save(self) -> None:
        """Copy the state to host memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks rank 0's state. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to the ranks that there are now. Does nothing here."""


class State(_Recoverable):
    """The parts that every state has: `horovod.common.elastic.State`. Subclasses say what is saved, and how."""

    _num_commits: int = 0

    def __init__(
        self, bcast_object: Callable[[Any], Any] | None = None, get_rank: Callable[[], int] | None = None
    ) -> None:
        self._bcast_object = bcast_object or (lambda obj: hvd.broadcast_object(obj, name="elastic.state"))
        self._rank = get_rank or (lambda: hvd.rank())
        self._reset_callbacks: list[Callable[[], object]] = []

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
            ObjectState.save(self)

    def _set_attributes(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


class StateHandler(_Recoverable):
    """Handles one value of a `TorchState`, which has state_dict() and load_state_dict()."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        self._saved = copy_of(self.value.state_dict())

    def restore(self) -> None:
        # A copy: optimizers go on to use tensors that they are given, and would change what is saved.
        self.value.load_state_dict(copy_of(self._saved))


class ModelStateHandler(StateHandler):
    """Handles a module: its parameters and buffers."""

    def sync(self) -> None:
        hvd.broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateHandler):
    """Handles an optimizer: its state and the options of its groups."""

    def sync(self) -> None:
        hvd.broadcast_optimizer_state(self.value, root_rank=0)

    def reset(self) -> None:
        if isinstance(self.value, DistributedOptimizer):
            rejoin(self.value)


class SamplerStateHandler(StateHandler):
    """Handles an ElasticSampler: epoch, and samples done."""

    def sync(self) -> None:
        self.value.load_state_dict(hvd.broadcast_object(self.value.state_dict(), name="elastic.sampler"))

    def reset(self) -> None:
        self.value.reset()


_HANDLERS: Final[dict[type, type[StateHandler]]] = {
    torch.nn.Module: ModelStateHandler,
    torch.optim.Optimizer: OptimizerStateHandler,
    ElasticSampler: SamplerStateHandler,
}


class TorchState(ObjectState):
    """Model, optimizer, sampler, and any other values: `horovod.torch.elastic.TorchState`.

        state = TorchState(model, optimizer, sampler=sampler, epoch=0)

    Modules, optimizers and samplers are changed in place by `restore` and `sync`; other values are replaced. Assigning
    a module to `state.model` has that module handled, and saves it. Where Horovod leaves the last commit as it was,
    `sync` also saves.
    """

    _handlers: Mapping[str, StateHandler] = {}

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        kwargs = {"model": model, "optimizer": optimizer, **kwargs}
        handlers: dict[str, StateHandler] = {}
        for name, value in kwargs.items():
            setattr(self, name, value)
            if handler := next((handler for kind, handler in _HANDLERS.items() if isinstance(value, kind)), None):
                handlers[name] = handler(value)
        self._handlers = handlers
        super().__init__(**{name: value for name, value in kwargs.items() if name not in self._handlers})

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
            handler.save()
        super().sync()

    def reset(self) -> None:
        for handler in self._handlers.values():
            handler.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._handlers:
            self._handlers[name].value = value
            self._handlers[name].save()
        super().__setattr__(name, value)


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # an open file, a generator
        return value
