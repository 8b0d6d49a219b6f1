"""States of an elastic job, which survive a failure: a model, an optimizer, a sampler, and any other values."""

import copy
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import torch

import torchring.horovod as hvd
from torchring.elastic.worker.checkpoint import copy_of
from torchring.horovod.elastic.sampler import ElasticSampler
from torchring.horovod.elastic.worker import ADDED as ADDED
from torchring.horovod.elastic.worker import NO_UPDATE as NO_UPDATE
from torchring.horovod.elastic.worker import REMOVED as REMOVED
from torchring.horovod.elastic.worker import agree, current_worker
from torchring.horovod.exceptions import HostsUpdatedInterrupt
from torchring.optimizer import DistributedOptimizer, rejoin

_V = TypeVar("_V")
_LATER_SECONDS: Final = 0.001  # than what was announced before: clocks of hosts differ


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
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], object]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Have `callbacks` called after each reset: init() has run, `sync` has not."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Forget host changes that were announced, call `reset`, then the callbacks."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Announce a change of hosts for the next commit: 1 for removed, 2 for added, 3 for both. From any thread."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, and raise HostsUpdatedInterrupt if hosts have changed. Collective."""
        self.save()
        self._num_commits += 1
        if (worker := current_worker()) is not None:
            worker.elastic.has_stepped(self._num_commits)
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks if hosts have changed, or a rank was told to end. Collective."""
        worker = current_worker()
        before = latest = self._last_updated_timestamp
        if worker is not None and (announced := worker.changes()):
            self.on_hosts_updated(max(time.time(), before + _LATER_SECONDS), announced)
        changes = NO_UPDATE
        while not self._host_messages.empty():
            timestamp, change = self._host_messages.get()
            if timestamp > before:
                latest = max(latest, timestamp)
                changes |= change
        if worker is None:
            before, self._last_updated_timestamp, changes = self._bcast_object((before, latest, changes))
        else:
            said = agree("elastic.changes", latest > before, latest, changes & REMOVED, changes & ADDED)
            before, changes = said[1] - said[0], int(said[2]) | int(said[3])
            self._last_updated_timestamp = said[1]
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(skip_sync=changes == REMOVED)


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


class StateHandler(_Recoverable, Generic[_V]):
    """Saves, restores and synchronises one value of a `TorchState`. The extension point for types of your own:

    set_handler_registry([*get_handler_registry(), (MyType, MyHandler)])
    """

    def __init__(self, value: _V) -> None:
        self.value = value

    def set_value(self, value: _V) -> None:
        """Handle another value from now on, and save it."""
        self.value = value
        self.save()


class _StateDictHandler(StateHandler[_V]):
    """Handles a value with state_dict() and load_state_dict()."""

    def __init__(self, value: _V) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy_of(self.value.state_dict())  # type: ignore[attr-defined]

    def restore(self) -> None:
        # A copy: optimizers go on to use tensors that they are given, and would change what is saved.
        self.value.load_state_dict(copy_of(self._saved))  # type: ignore[attr-defined]


class ModelStateHandler(_StateDictHandler[torch.nn.Module]):
    """Handles a module: its parameters and buffers."""

    def sync(self) -> None:
        hvd.broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(_StateDictHandler[torch.optim.Optimizer]):
    """Handles an optimizer: its state and the options of its groups."""

    def sync(self) -> None:
        hvd.broadcast_optimizer_state(self.value, root_rank=0)

    def reset(self) -> None:
        if isinstance(self.value, DistributedOptimizer):
            rejoin(self.value)


class SamplerStateHandler(_StateDictHandler[ElasticSampler]):
    """Handles an ElasticSampler: epoch, and samples done."""

    def sync(self) -> None:
        state = self.value.state_dict()
        numbers = hvd.broadcast(torch.tensor(list(state.values()), device="cpu"), root_rank=0, name="elastic.sampler")
        self.value.load_state_dict(dict(zip(state, numbers.tolist(), strict=True)))

    def reset(self) -> None:
        self.value.reset()


_Registry = list[tuple[type, Callable[[Any], StateHandler[Any]]]]
_registry: _Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> _Registry:
    """The (type, handler) pairs; the first type that fits a value counts. The list itself, not a copy."""
    return _registry


def set_handler_registry(registry: _Registry) -> None:
    """Use `registry` in states that are made from now on."""
    global _registry
    _registry = registry


class TorchState(ObjectState):
    """Model, optimizer, sampler, and any other values: `horovod.torch.elastic.TorchState`.

        state = TorchState(model, optimizer, sampler=sampler, epoch=0)

    Modules, optimizers and samplers are changed in place by `restore` and `sync`; other values are replaced. Assigning
    a module to `state.model` has that module handled, and saves it. Where Horovod leaves the last commit as it was,
    `sync` also saves.
    """

    _handlers: Mapping[str, StateHandler[Any]] = {}

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        kwargs = {"model": model, "optimizer": optimizer, **kwargs}
        handlers: dict[str, StateHandler[Any]] = {}
        for name, value in kwargs.items():
            setattr(self, name, value)
            if handler := next((handler for kind, handler in _registry if isinstance(value, kind)), None):
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
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # an open file, a generator
        return value
