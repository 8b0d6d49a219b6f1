"""`wrap` makes an optimizer distributed; `DistributedOptimizer` is what it returns.

`gradients/__init__.py` lists the way of a gradient. When `backward()` returns, every gradient is reduced, so clipping,
GradScaler, schedulers and closures need no extra call.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, NoReturn, TypeVar, overload

import torch
from torch.optim import Optimizer

from torchring.accelerators import accelerator_of
from torchring.allreduce.select import Algorithm, Overlap
from torchring.collectives.service import Join, internal_collectives_of
from torchring.connection import ConnectedOptimizer, no_model
from torchring.default_world import members_of
from torchring.dynamo import run_eagerly
from torchring.errors import GradientError, RingError
from torchring.gradients.contract import Stats
from torchring.gradients.group import OptimizerGroup, check_free
from torchring.gradients.layout import Options, SyncBuffers
from torchring.gradients.local import LocalSync
from torchring.gradients.plan import COMPRESSIONS, Compression
from torchring.gradients.reducer import Reducer
from torchring.gradients.reduction import Participant
from torchring.gradients.validation import GradientOp, OnNonfinite, parameters_of
from torchring.gradients.weights import check_weight
from torchring.optimizer_wrapper import with_held
from torchring.rooms import room
from torchring.world import Group, World

_T = TypeVar("_T")


def wrap(
    optimizer: Optimizer,
    model: torch.nn.Module | None = None,
    *,
    op: GradientOp = "mean",
    compression: Compression | object | None = None,
    max_error: float | None = None,
    bucket_mb: float | None = None,
    accumulate: int = 1,
    algorithm: Algorithm = "auto",
    overlap: Overlap = "auto",
    on_nonfinite: OnNonfinite = "raise",
    sync_buffers: SyncBuffers = "mean",
    sync_initial_state: bool = True,
    shard: bool = False,
    ignore: Sequence[str | torch.nn.Module | torch.Tensor] = (),
    noise_scale: bool = False,
    group: Group | None = None,
) -> DistributedOptimizer:
    """Make `optimizer` average its gradients over all ranks while `backward()` runs. Collective.

    Args:
        optimizer: any torch.optim.Optimizer. Its parameters are on the CPU or on one GPU. It keeps its state.
        model: gives parameters their names in errors, shows which embeddings have sparse gradients, and has its buffers
            copied from rank 0, and kept equal after that.
        op: "mean" or "sum" over ranks.
        compression: send gradients as "fp16" or "bf16". They are scaled before they are rounded, and added up in fp32.
            None sends them in their own dtype. Between hosts also "int8", "powersgd", or an object that compresses: see
            `torchring.compression`. On one host, these send gradients in their own dtype.
        max_error: if the `compression` changes gradients by more than this, relative to their norm, all ranks go back
            to full precision, and rank 0 warns. See `Stats.compression_error`.
        bucket_mb: size of a bucket in MiB. The first bucket is at most 1 MiB. Default (None): 25, and for gradients on
            the CPU between hosts at most 4 in the last bucket; 10 for four GPUs or more that reduce in each other's
            memory.
        accumulate: reduce in every n-th `backward()` only. The n gradients are summed, as PyTorch sums them.
            `zero_grad()` of the returned optimizer restarts the count, so call it on all ranks alike.
        algorithm: "direct" (memory shared by the ranks of one host), "ring" (messages between all ranks),
            "hierarchical" (direct on each host, rings between hosts), "native" (the backend's own all-reduce) or
            "auto": "direct" on one host; "native" between hosts of one rank, and else "hierarchical"; among four GPUs
            or more, the fastest that was measured. See `Stats.reason`.
        overlap: "inline" (reduce in the thread that runs `backward()`: on CPUs, for "direct" only), "thread" (in the
            background) or "auto": "thread", unless a thread would only compete with `backward()` for the cores. On
            CUDA, both reduce in a stream of torchring's own; with "inline" the stream of `backward()` waits for each
            bucket.
        on_nonfinite: what `step()` does if a gradient has a NaN or an infinity. "raise" raises GradientError. "skip"
            leaves the step out on all ranks, and counts it in `stats()`; on a GPU, the host then waits in each step for
            the device. "ignore" makes the step. With "raise" and "ignore" the host does not wait for a GPU, so the
            error may come a step or two late. In a world of one rank only "skip" looks at gradients: at all of them.
        sync_buffers: what `step()` does with the model's buffers, which each rank's forward changes in its own way.
            "mean" gives all ranks the mean of running statistics, such as those of BatchNorm, over the ranks that have
            data. Each rank keeps its other buffers, and a warning names those that differ between ranks. A dict chooses
            for other buffers, by the name of a buffer or module: `{"queue": None, "codebook": "mean"}`. Integers and
            booleans have no mean, and follow the lowest rank that has data. With "rank0" all buffers follow rank 0, or
            the lowest rank that has data. None leaves all buffers alone. The buffers that `model` has now travel with
            the gradients of each `backward()` that reduces.
        sync_initial_state: copy parameters, buffers and optimizer state from rank 0 to all ranks.
        shard: each rank keeps the optimizer state for its share of the parameters, and steps that share.
            `step()` and `state_dict()` are collective then. Gradients are whole on all ranks, as without it.
        ignore: parameters, buffers and modules of `model`, or their names, that belong to this rank: experts, for
            example. They are neither copied from rank 0, nor reduced, nor compared. `optimizer` must not have them:
            train them with an optimizer of their own that is not wrapped. Ranks may ignore different ones. What
            optimizers of other groups have is ignored without being named.
        noise_scale: measure the gradient noise scale while gradients are reduced, see `Stats`. A script that is traced
            as a whole does, too.
        group: the ranks that reduce together, where they are not all ranks: one dimension of a DeviceMesh
            (`mesh["dp"]`), a ProcessGroup of torch.distributed, or lists of ranks that do not overlap, of which one has
            this rank. Rank 0 is the group's first rank then, and collective means over the group.

    Returns:
        The optimizer to use in place of `optimizer`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a wrong value, or a parameter cannot be reduced.
        PlanMismatchError: another rank wraps a different model or uses other options, or could not wrap its optimizer.
        TopologyError: see `init`; or `algorithm` does not fit the hosts.
        PeerLostError: another rank died.
        PeerTimeoutError: another rank did not call `wrap` within the timeout.
    """
    given = dict(locals())
    kind: type[DistributedOptimizer] = room("sharding").ShardedOptimizer if shard is True else DistributedOptimizer
    return kind(**given)


class DistributedOptimizer(ConnectedOptimizer):
    """An optimizer whose gradients are the same on all ranks. `wrap` creates it, and describes the arguments.

    It is a torch.optim.Optimizer that shares `param_groups`, `state` and `defaults` with the optimizer that it wraps.
    So learning rate schedulers, GradScaler, hooks, checkpoints, deepcopy and pickling work on both. A deep copy, or an
    unpickled optimizer, joins the other ranks when its first gradient arrives. So all ranks have to use theirs.

    Attributes:
        optimizer: the wrapped optimizer.
    """

    _has_stepped = False

    def __init__(self, optimizer: Optimizer, model: torch.nn.Module | None = None, **options: Any) -> None:
        group = options.pop("group", None)
        if group is not None:  # which may be of another process, after pickling
            self._group = [members_of(group)]
        world = self._find_world()
        world.shared(Join).refuse("wrap()")
        compression = options.get("compression")
        if compression is not None and not (isinstance(compression, str) and compression in COMPRESSIONS):
            options["compression"] = room("compression").scheme_of(compression)
        options["noise_scale"] = options.get("noise_scale", False) or bool(os.environ.get("TORCHRING_TRACE"))
        own = {name: options.pop(name) for name in ("sync_initial_state", "ignore") if name in options}
        guard = world.shared(OptimizerGroup).guard
        guard.run("wrap()", functools.partial(self._open, **own), world, optimizer, model, Options(**options))

    # What torchring.horovod's optimizer overrides, or that of torchring.sharding

    def _prepare_step(self, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Called when a step begins. Returns the closure to use."""
        return closure

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether GradScaler leaves it to the kernels of a fused optimizer to unscale gradients, or to skip the step.

        The host then need not wait for the GPU. Where `step()` looks at gradients first, GradScaler has to decide
        before that: on the CPU, and with on_nonfinite="skip".
        """
        if self._options.on_nonfinite == "skip" or not getattr(self.optimizer, "_step_supports_amp_scaling", False):
            return False
        return any(accelerator_of(parameter.device) for parameter in self._names)

    @overload
    def step(self, closure: None = None, *args: Any, **kwargs: Any) -> None: ...
    @overload
    def step(self, closure: Callable[[], _T], *args: Any, **kwargs: Any) -> _T: ...

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped optimizer's step, unless gradients are known to be wrong.

        Args:
            closure: evaluates the model and calls `backward()`, as for any optimizer. The loss that it returns is
                averaged over ranks, so that an optimizer that decides by the loss (LBFGS) decides alike on all ranks.
                On a rank that calls `skip()`, the closure returns None.
            *args: passed to the wrapped optimizer's `step()`.
            **kwargs: passed to the wrapped optimizer's `step()`.

        Returns:
            What the wrapped optimizer returns: the loss if there is a closure. None for a step that was left out, see
            `on_nonfinite`.

        Raises:
            GradientError: a gradient is not reduced or not finite, or parameters differ between ranks.
            ValueError: this optimizer is closed; or a closure is given inside `torchring.join`, with shard=True, or
                with on_nonfinite="skip".
        """
        closure = self._prepare_step(closure)
        sync = self._live_sync()
        try:
            sync.before_step()
            if closure is not None:
                sync.world.shared(Join).refuse("step(closure)")
                if not self._only_creates_state():
                    if self._options.on_nonfinite == "skip":
                        raise ValueError(_TAKES_NO_CLOSURE)
                    sync.world.refuse_provisional("step()")
                closure = functools.partial(self._evaluate, closure, sync)
            elif not self._only_creates_state() and not self._check_before_step(sync):
                return None
            self._has_stepped = True
            self._is_stepping = True
            try:
                result = self._step_wrapped(closure, *args, **kwargs)
            finally:
                self._is_stepping = False
            sync.has_stepped()
        except RingError as error:
            sync.world.note_members(error)
            raise
        self._forward_watch.start()
        return result

    def _watch_wrapped(self) -> None:
        """Hook the steps of the wrapped optimizer, so that the model's buffers are equal before other hooks run.

        A script, or a framework, may also step the wrapped optimizer itself, or one that it holds: `second_step()` of
        SAM steps its `base_optimizer`. The hooks then do what `step()` does.
        """
        own = weakref.ref(self)
        num_steps: dict[Optimizer, int] = {}  # before a step of an optimizer, which may step another one

        @run_eagerly
        def before(stepped: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            optimizer = own()
            sync = None if optimizer is None else optimizer._sync
            if optimizer is None or sync is None or sync.is_closed:
                return None
            if optimizer._is_stepping:
                sync.agree_on_step()
                return None
            num_steps[stepped] = sync.num_steps
            sync.before_step()
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            if closure is not None:
                kwargs = {key: value for key, value in kwargs.items() if key != "closure"}
                return (args[0], functools.partial(optimizer._evaluate, closure, sync), *args[2:]), kwargs
            if not optimizer._only_creates_state() and not optimizer._check_before_step(sync):
                raise GradientError(_STEPPED_PAST)
            sync.agree_on_step()
            return None

        @run_eagerly
        def after(stepped: Optimizer, *_: Any) -> None:
            optimizer = own()
            sync = None if optimizer is None else optimizer._sync
            if optimizer is None or sync is None or sync.is_closed or optimizer._is_stepping:
                return
            if num_steps.pop(stepped, None) == sync.num_steps:
                sync.has_stepped()
            else:  # the optimizer that it holds has made the step
                sync.accept_parameters()

        for each in with_held(self.optimizer):
            self._step_handles += (each.register_step_pre_hook(before), each.register_step_post_hook(after))

    def weigh(self, weight: float) -> None:
        """Say that this rank's next loss is a mean over `weight` samples, or tokens. Call before its `backward()`.

        The reduced gradients are then sum(n_r * g_r) / sum(n_r) over ranks, where g_r is a rank's gradient and n_r its
        weight: those of the mean over all samples, whatever the ranks' shares are. With `accumulate` or `no_sync()`,
        each backward has its own weight, and the sums are over all of them. Before the reduction, `.grad` holds the
        weighted mean over the backwards so far.

        All ranks must give a weight, or none. A weight costs no message. Gradients in fp16 take none. With weight 0,
        gradients count as zero, whatever they are: NaN, too, and this rank's buffers do not count. `GradScaler` and
        clipping need no change. The loss of a closure stays a plain mean over ranks, so do not weigh under an optimizer
        that decides by the loss (LBFGS). With SyncBatchNorm layers, call this before `forward`.

        Args:
            weight: 0, or from 2**-10 to 2**28. An int, a float, or a tensor of one element.

        Raises:
            TypeError: the weight is no number.
            ValueError: the weight is out of range; op="sum"; this optimizer is
                closed.
            GradientError: called twice before a backward, called inside one, or some of the backwards that are reduced
                together have a weight and others have none. `backward()` raises GradientError on all ranks if some of
                them have not called `weigh`, or if all weights are 0 and `.grad` holds gradients of an earlier one.
        """
        value = check_weight(weight)
        if self._options.op == "sum":
            raise ValueError("weigh() takes op='mean'; with op='sum', multiply the loss by its weight")
        self._live_sync().weigh(value)

    def skip(self) -> None:
        """Take part in the others' backward without one of this rank's own: where a batch is bad, or empty. Collective.

        Call this in place of `backward()`, and then `step()` as the other ranks do. The mean is over the ranks that do
        not skip. With `accumulate`, one of the n backwards is left out; if that is the last one, earlier gradients of
        this rank are reduced with those of the others. If all ranks skip, gradients are zero, or stay None. If one
        backward reaches the parameters of several optimizers, call this on one of them.
        Not for models with SyncBatchNorm layers, which the other ranks run meanwhile: give such a model an empty
        batch, with weight 0.

        Raises:
            GradientError: called inside `backward()`.
            ValueError: this optimizer is closed.
        """
        self._live_sync().skip()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to None, or to zeros, as torch.optim.Optimizer.zero_grad does."""
        self._current.forget_gradients()
        if set_to_none and not _takes_set_to_none(type(self.optimizer)):  # type: ignore[arg-type]
            self.optimizer.zero_grad()
            return
        self.optimizer.zero_grad(set_to_none=set_to_none)
        if self._sync is not None and not set_to_none:
            self._sync.ledger.mark_zeroed()

    def synchronize(self) -> None:
        """Reduce the gradients that are not reduced yet on some rank. Collective. Does nothing if there are none.

        Needed for gradients of `no_sync()`, for the last, incomplete group of `accumulate` micro-steps, and for
        gradients that the script has put into `.grad`. After an ordinary `backward()`, all gradients are reduced.

        Raises:
            GradientError: called inside `backward()`, or refused on another rank.
        """
        self._live_sync().synchronize()

    def sync_buffers(self) -> None:
        """Make the model's buffers equal on all ranks as they are now, by the choices of `wrap`. Collective.

        Each `step()` does so after `forward()` and `backward()`. Call this after forwards in training mode that no step
        follows, as those of torch.optim.swa_utils.update_bn, before the model is evaluated or saved.

        Raises:
            GradientError: called inside `backward()`.
            ValueError: `wrap` was given no model, this optimizer is closed, or called inside `torchring.join`.
        """
        if self._model is no_model:
            raise ValueError("sync_buffers() makes the buffers of a model equal; pass the model to torchring.wrap, too")
        self._live_sync().sync_buffers()

    def no_sync(self) -> AbstractContextManager[None]:
        """A context manager: inside, `backward()` accumulates gradients on this rank and sends nothing.

        What counts is where `backward()` runs, not where the loss was computed. With several optimizers, enter that of
        all whose parameters the backward may reach: the others reduce.
        """
        return _inside_no_sync(self._live_sync())

    def stats(self) -> Stats:
        """Returns the cost of communication so far, on this rank."""
        return self._live_sync().stats()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as torch.optim.Optimizer.add_param_group does. Collective.

        The new parameters start from rank 0's values.
        """
        if self._is_initialising:  # Optimizer.__init__, whose groups the wrapped optimizer has already
            return
        sync = self._live_sync()
        sync.world.shared(Join).refuse("add_param_group()")
        self.optimizer.add_param_group(param_group)
        added = list(parameters_of(self.optimizer))[len(self._names) :]
        try:
            names = {parameter: f"group{len(self.param_groups) - 1}.param{i}" for i, parameter in enumerate(added)}
            check_free(names, sync.world)
        except ValueError:
            del self.param_groups[-1]
            raise
        self._names.update(names)
        if self._sync is None:
            return

        sync.world.shared(OptimizerGroup).guard.run("add_param_group()", self._extend, added)

    def _extend(self, added: list[torch.nn.Parameter]) -> None:
        """Collective: reduce the gradients of more parameters."""
        sync = self._live_sync()
        room("initial state").copy_from(sync.world, 0, {self._names[p]: p.data for p in added})
        sync.extend(added)

    def state_dict(self, *, all_ranks: bool = False) -> dict[str, Any]:
        """The state of the wrapped optimizer. A script without torchring can load it, and the other way round.

        With shard=True, collective: rank 0 gets the whole state of all parameters, and the other ranks get None.
        For torch.distributed.checkpoint, see `torchring.sharding.DistributedState`.

        Args:
            all_ranks: all ranks get the whole state.

        Raises:
            PlanMismatchError: with shard=True, another rank did not call this.
            GradientError: with shard=True, called inside `backward()`.
        """
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any] | None) -> None:
        """Load a state into the wrapped optimizer. All ranks must load the same state.

        With shard=True, collective: each rank keeps its share. Rank 0 alone may have a state, and the others pass None.

        Raises:
            ValueError: the state belongs to another model; with shard=True, some ranks have a state, others have none.
        """
        self.optimizer.load_state_dict(dict(state_dict or {}))

    def close(self) -> None:
        """Remove the hooks from the parameters and release buffers. All ranks should call this at the same point.

        The wrapped optimizer can be used without torchring afterwards.
        """
        if self._sync is not None:
            self._sync.world.shared(Join).refuse("close()")
        self._disconnect()
        self._forward_watch.close()
        self.is_closed = True

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def __copy__(self) -> NoReturn:
        raise TypeError(
            "copy.copy() of a DistributedOptimizer would reduce the same parameters twice; use the optimizer itself, "
            "or copy.deepcopy((model, optimizer))"
        )

    @property
    def _current(self) -> Reducer | LocalSync:
        """Has reduced the last gradients."""
        return self._sync or self._local

    def _set_accumulate(self, accumulate: int) -> None:
        """Reduce in every so many backwards from now on. For torchring.horovod."""
        self._options = dataclasses.replace(self._options, accumulate=accumulate)
        self._current.accumulate = accumulate

    def _live_sync(self) -> Reducer | LocalSync:
        """Returns what reduces the gradients. A copy connects now, if no gradient has made it connect before."""
        if self.is_closed:
            raise ValueError(
                "this DistributedOptimizer is closed; use the optimizer that it wrapped, or wrap that again"
            )
        if self._sync is not None:
            if not self._sync.world.is_open:
                raise ValueError("this DistributedOptimizer belongs to a world that was shut down; wrap again")
            if self._sync.is_closed:
                raise ValueError(
                    "this DistributedOptimizer was closed because another rank had dropped its own; wrap again, on all "
                    "ranks"
                )
            return self._sync
        world = self._find_world()
        if world.size == 1:
            self._local.world = world
            return self._local
        self._drop_early_hooks()
        return self._connect(world)

    def _only_creates_state(self) -> bool:
        """Whether a step would only create the optimizer's state, because learning rates and gradients are 0.

        torch.distributed.checkpoint makes such a step before it reads or loads a state that is not there yet.
        """
        if self.optimizer.state:
            return False
        for group in self.param_groups:
            lr = group.get("lr")
            if lr is None or (isinstance(lr, torch.Tensor) and lr.device.type != "cpu") or lr != 0:
                return False
        grads = [parameter.grad for parameter in self._names if parameter.grad is not None]
        return not any(grad.is_sparse or bool(grad.any()) for grad in grads)

    def _evaluate(self, closure: Callable[[], Any], sync: Reducer | LocalSync) -> Any:
        sync.accept_parameters()
        with torch.enable_grad():
            loss = closure()
        sync.before_step()
        if not self._check_before_step(sync):
            raise GradientError(_STEPPED_PAST)
        sync.agree_on_step()
        return _mean_loss(loss, sync.world)  # None where the closure has called skip()

    def _check_before_step(self, sync: Reducer | LocalSync) -> bool:
        """Raise GradientError rather than train on something that is known to be wrong. Returns whether to step."""
        try:
            sync.check_backward()
            return sync.check_gradients()
        except RingError as error:  # also of a step of the wrapped optimizer itself
            sync.world.note_members(error)
            raise


# What rooms ask of an optimizer


def names_of(optimizer: DistributedOptimizer) -> dict[torch.nn.Parameter, str]:
    """The names of its parameters. May be changed before `rejoin`."""
    return optimizer._names


def options_of(optimizer: DistributedOptimizer) -> Options:
    """The options that it was wrapped with."""
    return optimizer._options


def sync_of(optimizer: DistributedOptimizer) -> Reducer | LocalSync:
    """What reduces its gradients. A copy connects."""
    return optimizer._live_sync()


def forward_watch_of(optimizer: DistributedOptimizer) -> Any:
    """Sees the forwards of its model: a `ForwardWatch`."""
    return optimizer._forward_watch


def others_of(optimizer: DistributedOptimizer) -> dict[str, torch.Tensor]:
    """The parameters of its model that it does not train, by name, but for those that belong to this rank."""
    model = optimizer._model()
    of_model = model.named_parameters() if model is not None else ()
    return {name: p.data for name, p in of_model if p not in optimizer._names and p not in optimizer._ignored}


def rejoin(optimizer: DistributedOptimizer, world: World | None = None, guests: Sequence[Participant] = ()) -> None:
    """Reduce with the ranks of another world from now on.

    Args:
        world: collective; gradients are dropped. With shard=True, parameters are cut among its ranks, and the state
            comes later. None: the one that is open when the next gradient arrives.
        guests: take part in the reductions, before all others.
    """
    optimizer._rejoin(world, guests)


_TAKES_NO_CLOSURE: Final = (
    "step(closure) does not work with on_nonfinite='skip': an optimizer that evaluates a closure may have moved "
    "parameters before a gradient is not finite. Pass on_nonfinite='raise' or 'ignore' to torchring.wrap; or call "
    "backward() first, and then step() without a closure"
)
_STEPPED_PAST: Final = (
    "a gradient is not finite, and on_nonfinite='skip' cannot leave out a step of the wrapped optimizer itself; call "
    "step() of the optimizer that torchring.wrap has returned"
)


@contextmanager
def _inside_no_sync(sync: Reducer | LocalSync) -> Iterator[None]:
    sync.no_sync_depth += 1
    try:
        yield
    finally:
        sync.no_sync_depth -= 1


def _mean_loss(loss: Any, world: World) -> Any:
    """Collective: the mean of the ranks' losses. A rank without a loss (None) takes the mean of the others."""
    if world.size == 1:
        return loss
    mine = [0.0, 0.0] if loss is None else [float(loss.detach() if isinstance(loss, torch.Tensor) else loss), 1.0]
    sums = torch.tensor(mine, dtype=torch.float64, device="cpu")
    total, num_losses = internal_collectives_of(world).all_reduce(sums, "sum").tolist()
    if not num_losses:
        return None
    mean = total / num_losses
    return torch.full_like(loss.detach(), mean) if isinstance(loss, torch.Tensor) else mean


@functools.cache
def _takes_set_to_none(kind: type[Optimizer]) -> bool:
    """Older optimizers have a zero_grad() without arguments."""
    parameters = inspect.signature(kind.zero_grad).parameters
    return "set_to_none" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
