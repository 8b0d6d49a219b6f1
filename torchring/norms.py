"""Batch normalisation over the batches of all ranks, in place of torch.nn.SyncBatchNorm, which takes a GPU.

Every rank computes the mean and the variance of each channel over its own batch. Ranks gather these, weighted by how
many values each rank has, so batches may differ in size. Backward sums two numbers per channel over ranks.

Source: S. Ioffe and C. Szegedy, "Batch Normalization: Accelerating Deep Network Training by Reducing Internal Covariate
Shift", ICML 2015. Variances are combined as in T. F. Chan, G. H. Golub and R. J. LeVeque, "Updating formulae and a
pairwise algorithm for computing sample variances", COMPSTAT 1982.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from torchring.collectives.service import Collectives
from torchring.collectives.signature import Signature
from torchring.default_world import members_of, world_of
from torchring.dynamo import run_eagerly
from torchring.errors import GradientError, PlanMismatchError
from torchring.gradients.group import OptimizerGroup
from torchring.interruption import InterruptionGuard
from torchring.world import Group, World

_T = TypeVar("_T")


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation that uses the mean and the variance over the batches of all ranks while it trains.

    It does on the CPU, too, what torch.nn.SyncBatchNorm does on GPUs: results and gradients are those of one process
    that has the batches of all ranks, whose sizes may differ. In evaluation, and in a world of one rank, the module is
    torch's BatchNorm, whose parameters, buffers and keys of `state_dict()` it has. Running statistics are equal on all
    ranks.

    In training, `forward` and its backward are collective: all ranks must run the same SyncBatchNorm layers in the
    same order, inside `no_sync()`, too. Statistics are computed in fp32, of fp64 inputs in fp64.

    A batch of weight 0 is left out of the statistics, so call `weigh(0)` before `forward`, on all optimizers, and
    `weigh(1)` on ranks that have a batch. Its backward takes no other weights.

    Args:
        *args: as for torch.nn.BatchNorm2d. num_features is C, of inputs of shape [N, C] or [N, C, ...].
        group: the ranks whose batches count. See `wrap`.
        **kwargs: as for torch.nn.BatchNorm2d.

    Raises (from `forward` and backward):
        ValueError: the input has fewer than two dimensions, or the ranks together have fewer than two values of a
            channel.
        GradientError: the batch has got weight 0, or lost it, between `forward` and backward; it has a weight that is
            neither 0 nor 1; or it has weight 0 with some of the optimizers only.
        PlanMismatchError: ranks run different layers, or one of them runs forward where another runs backward.
        PeerLostError: another rank died.
        PeerTimeoutError: another rank did not run the layer within the timeout.
    """

    _keeps_buffers_equal = True

    _label = ""
    """The layer's name in the model, for errors. `convert_sync_batchnorm` sets it."""

    _group: Any = None

    def __init__(self, *args: Any, group: Group | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if group is not None:
            self._group = [members_of(group)]

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`, of shape [N, C] or [N, C, ...] and any floating-point dtype, which the result has, too."""
        self._check_input_dim(input)
        if not self.training or world_of(self._group).size == 1:
            return super().forward(input)
        return self._normalize(input)

    @run_eagerly
    def _normalize(self, input: Tensor) -> Tensor:
        result: Tensor
        result, mean, variance, count = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, self._label, world_of(self._group)
        )
        if self.track_running_stats and count:
            self._update(mean, variance, int(count))
        return result

    @torch.no_grad()
    def _update(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Bring the running statistics up to date as BatchNorm does, whose variances are unbiased."""
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, now in ((self.running_mean, mean), (self.running_var, variance * (count / (count - 1)))):
            assert running is not None
            wide = _widen(running)  # fp16 does not hold a large variance, but may hold the running one
            running.copy_(wide.mul_(1.0 - factor).add_(now.to(wide.dtype), alpha=factor))

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm takes inputs of shape [N, C] or [N, C, ...], got {list(input.shape)}")


def convert_sync_batchnorm(module: torch.nn.Module, group: Group | None = None) -> torch.nn.Module:
    """Put a `SyncBatchNorm` in the place of each BatchNorm of `module`, torch.nn.SyncBatchNorm included.

    The new layers share parameters, buffers and hooks with the layers that they replace. So an optimizer that exists
    already keeps working.

    Args:
        module: a model. It is changed in place.
        group: the ranks whose batches count. See `wrap`. By default the process_group of a torch.nn.SyncBatchNorm, or
            all ranks.

    Returns:
        `module`, or the new layer if `module` is a BatchNorm itself.

    Raises:
        ValueError: a layer has no shape yet, is parametrized, or is of a class with a forward of its own.
    """
    converted: dict[torch.nn.Module, torch.nn.Module] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm):
            converted[layer] = _convert(layer, name, group)
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child in converted:
                parent._modules[name] = converted[child]
    return converted.get(module, module)


def _convert(layer: _BatchNorm, name: str, group: Group | None) -> SyncBatchNorm:
    if parametrize.is_parametrized(layer):
        raise ValueError(f"{name or 'the layer'} is parametrized; convert first, then register parametrizations")
    if isinstance(layer.weight, torch.nn.parameter.UninitializedParameter) or layer.num_features == 0:
        raise ValueError(f"{name or 'the layer'} has no shape yet; run a batch through the lazy module first")
    if type(layer).forward not in (_BatchNorm.forward, torch.nn.SyncBatchNorm.forward):
        kind = type(layer).__name__
        raise ValueError(f"{name or 'the layer'} is a {kind}, which has a forward of its own; convert it by hand")
    new = SyncBatchNorm.__new__(SyncBatchNorm)
    new.__dict__.update(layer.__dict__)
    new._label = name
    own = new.__dict__.pop("process_group", None)  # of torch's SyncBatchNorm
    if (group := own if group is None else group) is not None:
        new._group = [members_of(group)]
    return new


class _Normalize(torch.autograd.Function):
    """SyncBatchNorm's arithmetic: (input, ...) -> (result, mean [C], biased variance [C], number of values).

    Values of batches of weight 0 do not count. If there are no others, they are normalised by themselves, and the
    number is 0.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, label: str, world: World
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = _widen(input)
        channels, dims = input.shape[1], _all_but_channels(input)
        num_values = input.numel() // channels
        own = torch.zeros(2, channels, dtype=wide.dtype, device=wide.device)
        if num_values:
            own[1], own[0] = torch.var_mean(wide, dims, correction=0)
        is_left_out = num_values > 0 and _batch_weights(world) == {0.0}
        sent = (torch.zeros_like(own), 0) if is_left_out else (own, num_values)
        counts, means, variances = _gather(world, *sent, f"{label} forward")
        num_counted = counts.sum()
        if not num_counted:
            counts, means, variances = _gather(world, own, num_values, f"{label} forward")
        count = counts.sum()
        if count < 2:
            raise ValueError(f"SyncBatchNorm needs more than one value of each channel, got {int(count)} on all ranks")
        mean = (counts * means).sum(0) / count
        variance = (counts * (variances + (means - mean).square())).sum(0) / count
        mean, variance = mean.to(wide.dtype), variance.to(wide.dtype)
        factor, offset = (None if p is None else p.to(wide.dtype) for p in (weight, bias))
        result = torch.nn.functional.batch_norm(wide, mean, variance, factor, offset, training=False, eps=eps)
        ctx.save_for_backward(input, weight, mean, torch.rsqrt(variance + eps))
        ctx.count, ctx.label = float(count), label
        ctx.world = weakref.ref(world)  # an error that broke the world may keep this graph alive, and so the world
        ctx.is_left_out = is_left_out
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, variance, num_counted)
        return result.to(input.dtype), mean, variance, num_counted

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, inverse_deviation = ctx.saved_tensors
        gradient, dims = _widen(gradient), _all_but_channels(input)
        centred = _widen(input) - _along_channels(mean, input)
        own = torch.stack([gradient.sum(dims), (gradient * centred).sum(dims)])
        of_input: Tensor | None = None
        if ctx.needs_input_grad[0]:
            is_left_out = _is_left_out(ctx, input)
            sent = torch.zeros_like(own) if is_left_out else own
            sums = _gather(ctx.world(), sent, 0, f"{ctx.label} backward")[1:]
            if is_left_out:
                of_input = torch.zeros_like(input)
            else:
                of_mean, of_deviation = ((part.sum(0) / ctx.count).to(own.dtype) for part in sums)
                factor = inverse_deviation if weight is None else inverse_deviation * weight.to(own.dtype)
                centred *= _along_channels(inverse_deviation.square() * of_deviation, input)
                of_normal = gradient - _along_channels(of_mean, input) - centred
                of_input = (of_normal * _along_channels(factor, input)).to(input.dtype)
        of_weight = (own[1] * inverse_deviation).to(weight.dtype) if ctx.needs_input_grad[1] else None
        of_bias = own[0].to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return of_input, of_weight, of_bias, None, None, None


def _is_left_out(ctx: Any, input: Tensor) -> bool:
    """Whether the batch whose backward runs has weight 0. Raises GradientError if it has a weight that is not clear."""
    world = ctx.world()
    if world is None or not world.is_open:
        raise ValueError("torchring.shutdown() was called between forward and backward of a SyncBatchNorm layer")
    given = _batch_weights(world)
    if other := given - {None, 0.0, 1.0}:
        _refuse(
            world,
            f"a batch has weight {max(filter(None, other)):g}, and SyncBatchNorm's backward takes only weigh(1), and "
            "weigh(0) for a batch that does not count: leave weigh() out and give ranks equally many samples, or wrap "
            'the optimizer with op="sum" and add up the losses of samples, divided by their number on all ranks',
        )
    if 0.0 in given and len(given) > 1:
        _refuse(world, "a batch has weight 0: call weigh(0) on all optimizers of the model")
    if input.numel() and ctx.is_left_out != (0.0 in given):
        _refuse(
            world,
            "SyncBatchNorm leaves a batch of weight 0 out of its statistics, so its forward must know the weight: call "
            "weigh(0) before forward, or give the model an empty batch",
        )
    return 0.0 in given


def _batch_weights(world: World) -> set[float | None]:
    """The weights that optimizers have for the batch whose forward or backward runs: several if they differ."""
    reducers = [reducer for group in world.shared(OptimizerGroup).of_this_rank for reducer in group.reducers]
    return {each.weights.last if each.in_backward else each.weights.next for each in reducers}


def _refuse(world: World, reason: str) -> NoReturn:
    """Raise GradientError in a backward that other ranks may wait for. They hear of it."""
    error = GradientError(reason, rank=world.rank)
    try:
        world.break_off("SyncBatchNorm's backward", error)
        raise error
    finally:
        del error  # its traceback refers to this frame


def _gather(world: World, own: Tensor, number: float, detail: str) -> tuple[Tensor, Tensor, Tensor]:
    """Collective: from all ranks `number` [ranks, 1] and both rows of `own` [2, C] as [ranks, C], in fp64.

    Where `detail` is not equal on all ranks, they raise PlanMismatchError.
    """
    mine = torch.cat([own.new_tensor([number], dtype=torch.float64), own.double().flatten()])
    signature = Signature("SyncBatchNorm", detail.strip(), f"{own.shape[1]} channels")
    turns = world.shared(LayerTurns)
    everybody = torch.stack(turns.run(signature, lambda: world.shared(_open).all_gather(mine, signature)))
    counts, first, second = torch.split(everybody, [1, own.shape[1], own.shape[1]], dim=1)
    return counts, first, second


class LayerTurns:
    """Counts the collectives of SyncBatchNorm layers, and refuses them while another rank takes no part in them."""

    def __init__(self, world: World) -> None:
        self.num_begun = 0
        self._world = world
        self._under_way: Signature | None = None
        self._most: int | None = None
        self._reason = ""

    def run(self, signature: Signature, operation: Callable[[], _T]) -> _T:
        """Run `operation()`, the next collective of a layer, or break the world if it is refused."""
        self.num_begun += 1  # before _under_way: whichever of two threads comes later has to see both
        self._under_way = signature
        try:
            self._check()
            return operation()
        finally:
            self._under_way = None

    def limit(self, most: int | None, reason: str = "") -> None:
        """Let this rank begin `most` collectives in all; None: any number. For any thread.

        If a later one is under way already, break the world, which ends its wait, and raise PlanMismatchError.
        """
        self._reason = reason
        self._most = most
        self._check()

    def _check(self) -> None:
        most, signature = self._most, self._under_way
        if most is not None and signature is not None and self.num_begun > most:
            rank = self._world.rank
            error = PlanMismatchError(f"rank {rank} called {signature}, while {self._reason}", rank=rank)
            self._world.break_off(signature.operation, error)
            raise error


def _open(world: World) -> Collectives:
    """SyncBatchNorm's own collectives: the script and the reduction of gradients may call theirs at the same time."""
    return InterruptionGuard(world).run("the first SyncBatchNorm", lambda: Collectives(world, "norms"))


def _widen(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _all_but_channels(input: Tensor) -> list[int]:
    return [dim for dim in range(input.dim()) if dim != 1]


def _along_channels(values: Tensor, input: Tensor) -> Tensor:
    """`values` [C], so that they broadcast over `input` [N, C, ...]."""
    return values.view(1, -1, *[1] * (input.dim() - 2))
