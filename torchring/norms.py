"""Batch normalisation over the batches of all ranks, in place of torch.nn.SyncBatchNorm, which takes a GPU.

Every rank computes the mean and the variance of each channel over its own batch. Ranks gather these, weighted by how
many values each rank has, so batches may differ in size. Backward sums two numbers per channel over ranks.

Source: S. Ioffe and C. Szegedy, "Batch Normalization: Accelerating Deep Network Training by Reducing Internal Covariate
Shift", ICML 2015. Variances are combined as in T. F. Chan, G. H. Golub and R. J. LeVeque, "Updating formulae and a
pairwise algorithm for computing sample variances", COMPSTAT 1982.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from torchring.collectives.interruption import InterruptionGuard
from torchring.collectives.service import Collectives
from torchring.collectives.signature import Signature
from torchring.default_world import default_world
from torchring.dynamo import run_eagerly
from torchring.world import World


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation that uses the mean and the variance over the batches of all ranks while it trains.

    What torch.nn.SyncBatchNorm is on GPUs, on the CPU and on GPUs: the results and gradients are those of one process
    that has the batches of all ranks, whose sizes may differ. In evaluation, and in a world of one rank, the module is
    torch's BatchNorm. Parameters, buffers and the keys of `state_dict()` are those of BatchNorm, too. Running
    statistics are equal on all ranks.

    In training, `forward` and its backward are collective: all ranks must run the same SyncBatchNorm layers in the
    same order, inside `no_sync()`, too. Statistics are computed in fp32, of fp64 inputs in fp64.

    The arguments are those of torch.nn.BatchNorm2d. num_features is C, of inputs of shape [N, C] or [N, C, ...].

    Raises (from `forward` and backward):
        ValueError: the input has fewer than two dimensions, or the ranks together have fewer than two values of a
            channel.
        PlanMismatchError: ranks run different layers, or one of them runs forward where another runs backward.
        PeerLostError: another rank died.
        PeerTimeoutError: another rank did not run the layer within the timeout.
    """

    label = ""
    """The layer's name in the model, for errors. `convert_sync_batchnorm` sets it."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`, of shape [N, C] or [N, C, ...] and any floating-point dtype, which the result has, too."""
        self._check_input_dim(input)
        if not self.training or default_world().size == 1:
            return super().forward(input)
        return self._normalize(input)

    @run_eagerly
    def _normalize(self, input: Tensor) -> Tensor:
        result: Tensor
        result, mean, variance, count = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, self.label, default_world()
        )
        if self.track_running_stats:
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
            running.mul_(1.0 - factor).add_(now.to(running.dtype), alpha=factor)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm takes inputs of shape [N, C] or [N, C, ...], got {list(input.shape)}")


def convert_sync_batchnorm(module: torch.nn.Module) -> torch.nn.Module:
    """Put a `SyncBatchNorm` in the place of each BatchNorm of `module`, torch.nn.SyncBatchNorm included.

    The new layers share parameters, buffers and hooks with the layers that they replace. So an optimizer that exists
    already goes on to work.

    Args:
        module: a model. It is changed in place.

    Returns:
        `module`, or the new layer if `module` is a BatchNorm itself.

    Raises:
        ValueError: a layer has no shape yet, is parametrized, or is of a class with a forward of its own.
    """
    converted: dict[torch.nn.Module, torch.nn.Module] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm):
            converted[layer] = _convert(layer, name)
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child in converted:
                parent._modules[name] = converted[child]
    return converted.get(module, module)


def _convert(layer: _BatchNorm, name: str) -> SyncBatchNorm:
    if parametrize.is_parametrized(layer):
        raise ValueError(f"{name or 'the layer'} is parametrized; convert first, then register parametrizations")
    if isinstance(layer.weight, torch.nn.parameter.UninitializedParameter) or layer.num_features == 0:
        raise ValueError(f"{name or 'the layer'} has no shape yet; run a batch through the lazy module first")
    if type(layer).forward not in (_BatchNorm.forward, torch.nn.SyncBatchNorm.forward):
        kind = type(layer).__name__
        raise ValueError(f"{name or 'the layer'} is a {kind}, which has a forward of its own; convert it by hand")
    new = SyncBatchNorm.__new__(SyncBatchNorm)
    new.__dict__.update(layer.__dict__)
    new.label = name
    return new


class _Normalize(torch.autograd.Function):
    """SyncBatchNorm's arithmetic: (input, ...) -> (result, mean [C], biased variance [C], number of values)."""

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
        ctx.count, ctx.label, ctx.world = float(count), label, world
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, variance, count)
        return result.to(input.dtype), mean, variance, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, inverse_deviation = ctx.saved_tensors
        gradient, dims = _widen(gradient), _all_but_channels(input)
        centred = _widen(input) - _along_channels(mean, input)
        own = torch.stack([gradient.sum(dims), (gradient * centred).sum(dims)])
        of_input: Tensor | None = None
        if ctx.needs_input_grad[0]:
            sums = _gather(ctx.world, own, 0, f"{ctx.label} backward")[1:]
            of_mean, of_deviation = (part.sum(0).to(own.dtype) / ctx.count for part in sums)
            factor = inverse_deviation if weight is None else inverse_deviation * weight.to(own.dtype)
            centred *= _along_channels(inverse_deviation.square() * of_deviation, input)
            of_normal = gradient - _along_channels(of_mean, input) - centred
            of_input = (of_normal * _along_channels(factor, input)).to(input.dtype)
        of_weight = (own[1] * inverse_deviation).to(weight.dtype) if ctx.needs_input_grad[1] else None
        of_bias = own[0].to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return of_input, of_weight, of_bias, None, None, None


def _gather(world: World, own: Tensor, num_values: int, detail: str) -> tuple[Tensor, Tensor, Tensor]:
    """Collective: from all ranks `num_values` [ranks, 1] and both rows of `own` [ranks, C], as fp64.

    Args:
        own: [2, C].
        detail: equal on all ranks, else they raise PlanMismatchError.
    """
    mine = torch.cat([own.new_tensor([num_values], dtype=torch.float64), own.double().flatten()])
    signature = Signature("SyncBatchNorm", detail.strip(), f"{own.shape[1]} channels")
    everybody = torch.stack(_collectives_of(world).all_gather(mine, signature))
    counts, first, second = torch.split(everybody, [1, own.shape[1], own.shape[1]], dim=1)
    return counts, first, second


def _collectives_of(world: World) -> Collectives:
    """SyncBatchNorm's own collectives: the script and the reduction of gradients may call theirs at the same time."""
    return world.shared(_open)


def _open(world: World) -> Collectives:
    return InterruptionGuard(world).run("the first SyncBatchNorm", lambda: Collectives(world, "norms"))


def _widen(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _all_but_channels(input: Tensor) -> list[int]:
    return [dim for dim in range(input.dim()) if dim != 1]


def _along_channels(values: Tensor, input: Tensor) -> Tensor:
    """`values` [C], so that they broadcast over `input` [N, C, ...]."""
    return values.view(1, -1, *[1] * (input.dim() - 2))
