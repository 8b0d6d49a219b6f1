"""Horovod's DistributedOptimizer: torchring's, with Horovod's arguments and methods.

Gradients are reduced in buckets while `backward()` runs, by the engine of `torchring.wrap`. So they are reduced when
`backward()` returns, and clipping or GradScaler needs no `synchronize()`. To call it, as Horovod's scripts do, is
right, too. A rank that has run no backward takes part with zeros when it calls `step()` or `synchronize()`.

Where the engine does not serve (a compressor of the script's own, a process set, Adasum), gradients stay local until
`synchronize()` or `step()` reduces them as one grouped allreduce.
"""

import functools
import gc
import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.optim import Optimizer

from torchring import optimizer as wrapping
from torchring.default_world import default_world
from torchring.errors import GradientError
from torchring.gradients.contract import Setup
from torchring.gradients.group import OptimizerGroup
from torchring.gradients.local import LocalSync
from torchring.gradients.reducer import Reducer
from torchring.gradients.reduction import Participant
from torchring.gradients.validation import parameters_of, sparse_parameters
from torchring.gradients.views import whole_of
from torchring.horovod import mpi_ops
from torchring.horovod.compression import BF16Compressor, Compression, Compressor, FP16Compressor, NoneCompressor
from torchring.horovod.context import ProcessSet, engine, global_process_set
from torchring.horovod.elastic.worker import current_worker
from torchring.participants.replicas import ReplicaCheck
from torchring.world import World

_logger: Final = logging.getLogger("torchring")
_COMPRESSION: Final[dict[Any, Any]] = {
    **dict.fromkeys((Compressor, NoneCompressor)),
    FP16Compressor: "fp16",
    BF16Compressor: "bf16",
}


class _LenientReplicaCheck(ReplicaCheck):
    """Warns once of parameters that differ between ranks. Horovod trains on, and its scripts may know why."""

    _has_warned = False

    def compare(self, *, is_step: bool = False) -> None:
        try:
            super().compare(is_step=is_step)
        except GradientError as error:
            if not self._has_warned:
                _logger.warning("%s", error.message)
            self._has_warned = True


class DistributedOptimizer(wrapping.DistributedOptimizer):
    """An optimizer that reduces its gradients over all ranks, with Horovod's arguments. See `torchring.wrap`, too.

    Args:
        named_parameters: (name, parameter) pairs that name all parameters of the optimizer, for errors.
        compression: `Compression.none`, `.fp16` or `.bf16`, or an object of the script's own with `compress` and
            `decompress`.
        backward_passes_per_step: gradients of so many backwards are added up before they are reduced. `step()` reduces
            what there is.
        op: Average, Sum or Adasum.
        gradient_predivide_factor, num_groups, groups, sparse_as_dense: make no difference: an average is scaled in fp32
            and rounded once, buckets need no groups, and sparse gradients are reduced, too.
        process_set: the ranks that reduce. Others make steps of their own.

    Raises ValueError for wrong arguments, HorovodInternalError if other ranks wrap another optimizer.
    """

    # Not pickled
    _connects_later = False
    _should_synchronize = True  # in step(); False inside skip_synchronize()
    _synchronized = False  # since the last step
    _num_reductions_before = 0  # reductions until the last step or synchronize()
    _has_warned = False  # of a gradient that is not finite

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        compression: Any = Compression.none,
        backward_passes_per_step: int = 1,
        op: int = mpi_ops.Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        self._given_names = _check_names(optimizer, named_parameters)
        _check_passes(backward_passes_per_step)
        _check_op(op, gradient_predivide_factor, process_set)
        is_global = process_set is global_process_set
        if not is_global and process_set.process_set_id is None:
            raise ValueError(f"{process_set!r} is not registered; call hvd.add_process_set() on all ranks first")
        has_wire = isinstance(compression, type) and compression in _COMPRESSION
        self._reduces_together = is_global and has_wire and op != mpi_ops.Adasum
        self._compression = compression
        self._op = op
        self._set = process_set
        self._passes = int(backward_passes_per_step)
        engine()
        if self._reduces_together:
            _close_earlier(optimizer)
        # In an elastic job, the optimizer of a new worker is made while others have theirs already, and do not take
        # part. All of them connect with the first gradient.
        self._connects_later = self._reduces_together and current_worker() is not None
        super().__init__(
            optimizer,
            op="sum" if op == mpi_ops.Sum else "mean",
            compression=_COMPRESSION[compression] if self._reduces_together else None,
            accumulate=self._passes,
            on_nonfinite="ignore",
            sync_buffers=None,
            sync_initial_state=False,
        )
        if self._connects_later:
            self._connects_later = False
            self._connect_with_first_gradient()
        _optimizers.add(self)

    @property
    def _parameter_names(self) -> Mapping[torch.nn.Parameter, str]:
        return self._names

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Add up the gradients of `passes` backwards from now on. ValueError unless `passes` is at least 1."""
        _check_passes(passes)
        self._passes = int(passes)
        self._set_accumulate(self._passes)

    def weigh(self, weight: float) -> None:
        """See `torchring.DistributedOptimizer.weigh`. ValueError with a process set, Adasum or a compressor."""
        self._require_buckets("weigh()")
        super().weigh(weight)

    def skip(self) -> None:
        """See `torchring.DistributedOptimizer.skip`. ValueError with a process set, Adasum or a compressor."""
        self._require_buckets("skip()")
        super().skip()

    def _require_buckets(self, what: str) -> None:
        if not self._reduces_together:
            raise ValueError(
                f"{what} does not work with a process set, op=hvd.Adasum or a compressor of the script's own, where "
                "step() reduces the gradients"
            )

    def synchronize(self) -> None:
        """Reduce what is not reduced yet. Collective. All gradients are reduced when it returns."""
        if not self._reduces_together:
            self._reduce_alone()
        else:
            sync, before = self._live_sync(), self._num_reductions_before
            if isinstance(sync, Reducer) and (sync.num_reductions == before or sync.ledger.first_unsettled()):
                sync.take_part()
        self._synchronized = True
        self._note_reductions()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context manager: `step()` in it does not call `synchronize()`, because the script has."""
        if self._op == mpi_ops.Adasum:
            raise AssertionError("skip_synchronize() does not fit op=hvd.Adasum, which reduces the steps themselves")
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def _prepare_step(self, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        if closure is not None:
            return closure if self._reduces_together else functools.partial(self._evaluate_alone, closure)
        if self._should_synchronize and self._op != mpi_ops.Adasum:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(). "
                    "Gradients are reduced already; torchring needs neither of the two calls",
                    stacklevel=5,
                )
            else:
                self.synchronize()
        return None

    def _evaluate_alone(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            loss = closure()
        self._reduce_alone()
        if loss is None:
            return None
        mean = mpi_ops.allreduce(torch.as_tensor(loss).detach().double(), process_set=self._set)
        return mean.to(loss.dtype) if isinstance(loss, torch.Tensor) else float(mean)

    def _live_sync(self) -> Reducer | LocalSync:
        if self._sync is not None and not self._sync.world.is_open and not self.is_closed:
            self._rejoin()  # after hvd.shutdown() and hvd.init()
        return super()._live_sync()

    def _step_wrapped(self, closure: Callable[[], Any] | None, *args: Any, **kwargs: Any) -> Any:
        adds_up = self._op == mpi_ops.Adasum and self._is_distributed()  # the steps that each rank makes by itself
        parameters = [p for p in self._names if p.requires_grad] if adds_up else []
        before = [parameter.detach().clone() for parameter in parameters]
        try:
            result = super()._step_wrapped(closure, *args, **kwargs)
        finally:
            self._synchronized = False
            self._note_reductions()
        if adds_up:
            self._add_up(parameters, before)
        return result

    @torch.no_grad()
    def _add_up(self, parameters: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> None:
        deltas = [parameter - start for parameter, start in zip(parameters, before, strict=True)]
        reduced = mpi_ops.grouped_allreduce(deltas, name="adasum", compression=self._compression, op=mpi_ops.Adasum)
        for parameter, start, delta in zip(parameters, before, reduced, strict=True):
            parameter.copy_(start + delta)

    @torch.no_grad()
    def _reduce_alone(self) -> None:
        """Reduce the gradients in one grouped allreduce: those that are None count as zero."""
        if not self._is_distributed() or self._op == mpi_ops.Adasum:
            return
        parameters = [p for p in self._names if p.requires_grad]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        reduced = mpi_ops.grouped_allreduce(
            [grad.to_dense() if grad.is_sparse else grad for grad in grads],
            name=f"gradients.{next(iter(self._names.values()), '')}",
            compression=self._compression,
            op=self._op,
            process_set=self._set,
        )
        for parameter, grad, result in zip(parameters, grads, reduced, strict=True):
            if grad.is_sparse:
                grad.data = result.to_sparse(grad.sparse_dim())
            else:
                grad.copy_(result)
            parameter.grad = grad

    def _is_distributed(self) -> bool:
        return self._set.included() and len(self._set.ranks) > 1

    def _note_reductions(self) -> None:
        self._num_reductions_before = 0 if self._sync is None else self._sync.num_reductions

    def _rejoin(self, world: World | None = None, guests: Sequence[Participant] = ()) -> None:
        super()._rejoin(world, guests)
        self._synchronized, self._num_reductions_before = False, 0

    # What torchring's optimizer asks of this class

    def _find_participants(self, setup: Setup) -> list[type[Participant]]:
        kinds = super()._find_participants(setup)
        return [_LenientReplicaCheck if kind is ReplicaCheck else kind for kind in kinds]

    def _find_world(self) -> World:
        return default_world() if self._reduces_together and not self._connects_later else World(None, 0, 1)

    def _name_parameters(self, optimizer: Optimizer, model: torch.nn.Module | None) -> dict[torch.nn.Parameter, str]:
        names = super()._name_parameters(optimizer, model)
        return {parameter: self._given_names.get(whole_of(parameter), name) for parameter, name in names.items()}

    def _find_sparse(self, optimizer: Optimizer, model: torch.nn.Module | None) -> set[torch.nn.Parameter]:
        # Horovod's arguments do not say which modules use the parameters, so all modules of the process are looked at.
        layers = (torch.nn.Embedding, torch.nn.EmbeddingBag)
        return sparse_parameters(each for each in gc.get_objects() if issubclass(type(each), layers))

    def _check_before_step(self, sync: Reducer | LocalSync) -> bool:
        may_step = super()._check_before_step(sync)
        found = None if self._sync is None else self._sync.non_finite
        if found is not None and not self._has_warned and found.is_still_there():
            self._has_warned = True
            origin = found.origin(self._options.compression)
            _logger.warning("the gradient of %s is not finite: %s", found.name, origin)
        return may_step

    def __getstate__(self) -> dict[str, Any]:
        if not self._reduces_together and self._set is not global_process_set:
            raise TypeError("a DistributedOptimizer of a process set cannot be pickled")
        own = (self._compression, self._op, self._passes, self._reduces_together)
        return {**super().__getstate__(), "horovod": own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._compression, self._op, self._passes, self._reduces_together = state["horovod"]
        self._set = global_process_set
        self._given_names = {}
        super().__setstate__(state)
        _optimizers.add(self)


_optimizers: weakref.WeakSet[DistributedOptimizer] = weakref.WeakSet()


def live_optimizers() -> list[DistributedOptimizer]:
    """All of this process that are still used."""
    return [optimizer for optimizer in _optimizers if not optimizer.is_closed]


def _close_earlier(optimizer: Optimizer) -> None:
    """Horovod's optimizers cannot be closed, so that a script that wraps the same parameters again means the new one.

    All ranks do so at the same point.
    """
    group = default_world().shared(OptimizerGroup)
    for reducer in group.owners_of(parameters_of(optimizer)):
        if isinstance(owner := reducer.owner(), DistributedOptimizer):
            _logger.debug("a DistributedOptimizer is closed: its parameters are wrapped again")
            owner.close()


def _check_names(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> dict[torch.nn.Parameter, str]:
    own = [(i, j, p) for i, group in enumerate(optimizer.param_groups) for j, p in enumerate(group["params"])]
    if named_parameters is None:
        return {parameter: f"allreduce.noname.{i}.{j}" for i, j, parameter in own}
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError("named_parameters takes (name, parameter) pairs, such as model.named_parameters()")
    names = [name for name, _ in pairs]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"names in named_parameters must be unique; these are not: {', '.join(repeated)}")
    named = {id(parameter) for _, parameter in pairs}
    if unnamed := "; ".join(f"group {i}, parameter {j}" for i, j, parameter in own if id(parameter) not in named):
        raise ValueError(f"named_parameters leaves out parameters of the optimizer: {unnamed}")
    return {parameter: name for name, parameter in pairs}


def _check_passes(passes: int) -> None:
    if passes <= 0:
        raise ValueError(f"backward_passes_per_step must be at least 1, got {passes!r}")


def _check_op(op: int, factor: float, process_set: ProcessSet) -> None:
    if op not in (mpi_ops.Average, mpi_ops.Sum, mpi_ops.Adasum):
        raise ValueError(f"op is hvd.Average, hvd.Sum or hvd.Adasum, got {op!r}")
    if factor != 1.0 and op != mpi_ops.Average:
        raise ValueError("gradient_predivide_factor needs op=hvd.Average")
    if op == mpi_ops.Adasum and process_set.process_set_id not in (None, 0):
        raise NotImplementedError("op=hvd.Adasum takes all ranks, and no other process set")
