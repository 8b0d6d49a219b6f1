"""LARS and LAMB: optimizers that adapt the learning rate of each parameter tensor to its norm.

Both look at whole tensors, so with `torchring.wrap(..., shard=True)` each tensor is stepped on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

Exclude = Literal["1d"] | bool
_EXCLUDES: Final = ("1d", True, False)


class _LayerWise(Optimizer):
    """Steps lists of parameters of one device and dtype, or, with foreach=False, lists of one parameter."""

    def __init__(self, params: Iterable[Any], **defaults: Any) -> None:
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim.Optimizer's. Raises ValueError for an option that makes no sense."""
        options = {**self.defaults, **param_group}
        lr = options["lr"]
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(f"lr must be a number or a tensor of one element, got {lr.numel()} elements")
        betas = dict(zip(("betas[0]", "betas[1]"), options.get("betas", ()), strict=False))
        for name, value in {**options, **betas}.items():
            if name in ("lr", "weight_decay", "eps", "trust_coefficient") and not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be 0 or more, got {value!r}")
            if (name == "momentum" or name in betas) and not 0 <= value < 1:
                raise ValueError(f"{name} must be at least 0 and less than 1, got {value!r}")
        if options["exclude"] not in _EXCLUDES:
            raise ValueError(f"exclude must be '1d', True or False, got {options['exclude']!r}")
        if options.get("nesterov") and not options["momentum"]:
            raise ValueError("nesterov=True needs a momentum above 0")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient. Does not wait for a GPU.

        Args:
            closure: evaluates the model again, and returns the loss, which `step` then returns.

        Raises ValueError if a gradient is sparse, or complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lists: dict[Any, list[Tensor]] = {}
            for index, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                if p.grad.is_sparse or p.grad.is_complex():
                    kind = "sparse" if p.grad.is_sparse else "complex"
                    raise ValueError(
                        f"{type(self).__name__} takes no {kind} gradients, and a parameter of shape {tuple(p.shape)} "
                        "has one; give that parameter to another optimizer"
                    )
                is_excluded = p.ndim <= 1 if group["exclude"] == "1d" else group["exclude"]
                foreach = p.device.type != "cpu" if group["foreach"] is None else group["foreach"]
                lists.setdefault((is_excluded, p.device, p.dtype, None if foreach else index), []).append(p)
            for (is_excluded, *_), parameters in lists.items():
                updates, lr = self._updates(parameters, group, is_excluded), group["lr"]
                if isinstance(lr, Tensor):  # alpha would take its value to the CPU
                    torch._foreach_add_(parameters, torch._foreach_mul(updates, -lr.squeeze()))
                else:
                    torch._foreach_add_(parameters, updates, alpha=-lr)
        return loss

    def _updates(self, parameters: list[Tensor], group: dict[str, Any], is_excluded: bool) -> list[Tensor]:
        """Update the state of the parameters. Returns what, times the learning rate, is to be subtracted from them.

        The results may be tensors of the state. Gradients must stay as they are.
        """
        raise NotImplementedError


class LARS(_LayerWise):
    """SGD with momentum, whose learning rate for each tensor is proportional to |w| / |gradient|.

        rate = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)     (1 if |w| or |g| is 0)
        v = momentum * v + rate * (g + weight_decay * w)
        w = w - lr * v                             (nesterov: w - lr * (rate * (g + weight_decay * w) + momentum * v))

    Excluded parameters have a rate of 1 and no weight decay. In the paper, v has lr as a factor; here it has not, as in
    torch.optim.SGD. With a constant lr both are the same. Where lr changes, this is the paper's form with the momentum
    correction of Goyal et al. (2017, section 3), so that no other correction is needed.

    Args:
        params: parameters, or parameter groups, which may have options of their own.
        lr: learning rate; a float, or a tensor of one element. Values above 1 are common: rates contain
            `trust_coefficient`.
        momentum: at least 0, less than 1.
        weight_decay: multiplied with w and added to the gradient.
        trust_coefficient: the paper's eta.
        eps: keeps the rate finite.
        nesterov: Nesterov momentum, in the form of torch.optim.SGD.
        exclude: "1d" excludes parameters of at most one dimension, which are the biases and the scales of norms; True
            excludes the whole group, False nothing.
        foreach: step tensors of a group together. None means on GPUs only. Takes memory for two copies of them.

    Raises ValueError for options that make no sense; `step` for sparse and complex gradients.

    Source: Y. You, I. Gitman, B. Ginsburg, "Large Batch Training of Convolutional Networks", arXiv:1708.03888, 2017.
    What is excluded is that of the reference models of MLPerf.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        nesterov: bool = False,
        exclude: Exclude = "1d",
        foreach: bool | None = None,
    ) -> None:
        options = {"trust_coefficient": trust_coefficient, "eps": eps, "nesterov": nesterov, "exclude": exclude}
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, foreach=foreach, **options)

    def _updates(self, parameters: list[Tensor], group: dict[str, Any], is_excluded: bool) -> list[Tensor]:
        grads = [p.grad for p in parameters if p.grad is not None]
        momentum, decay = group["momentum"], 0.0 if is_excluded else group["weight_decay"]
        updates = list(torch._foreach_add(grads, parameters, alpha=decay) if decay else grads)
        if not is_excluded:
            of_weights, of_grads = _norms(parameters), _norms(grads)
            rates = group["trust_coefficient"] * of_weights / (of_grads + decay * of_weights + group["eps"])
            rates = torch.where((of_weights > 0) & (of_grads > 0), rates, 1.0)
            updates = list(torch._foreach_mul(updates, rates.unbind()))
        if not momentum:
            return updates
        buffers = []
        for p in parameters:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            buffers.append(self.state[p]["momentum_buffer"])
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, updates)
        return list(torch._foreach_add(updates, buffers, alpha=momentum)) if group["nesterov"] else buffers


class LAMB(_LayerWise):
    """Adam, whose step for each tensor is as long as the tensor's norm.

        m = beta1 * m + (1 - beta1) * g            v = beta2 * v + (1 - beta2) * g * g
        r = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * w
        w = w - lr * |w| / |r| * r                                            (|w| / |r| is 1 if either norm is 0)

    Excluded parameters have |w| / |r| = 1 and no weight decay: Adam. Gradients are not clipped; where a recipe clips
    them to a total norm of 1, call torch.nn.utils.clip_grad_norm_ before `step`.

    Args:
        params: parameters, or parameter groups, which may have options of their own.
        lr: learning rate; a float, or a tensor of one element.
        betas: coefficients of the running means of gradients and their squares.
        eps: added to the denominator.
        weight_decay: as in AdamW, apart from the running means.
        bias_correction: divide by (1 - beta^t); t counts the steps of each parameter.
        exclude: "1d" excludes parameters of at most one dimension, which are the biases and the scales of norms; True
            excludes the whole group, False nothing.
        foreach: step tensors of a group together. None means on GPUs only. Takes memory for two copies of them.

    Raises ValueError for options that make no sense; `step` for sparse and complex gradients.

    Source: Y. You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", arXiv:1904.00962,
    2019, algorithm 2, with phi(z) = z. What is excluded is that of the authors' code for BERT.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        exclude: Exclude = "1d",
        foreach: bool | None = None,
    ) -> None:
        options = {"weight_decay": weight_decay, "bias_correction": bias_correction, "exclude": exclude}
        super().__init__(params, lr=lr, betas=betas, eps=eps, foreach=foreach, **options)

    def _updates(self, parameters: list[Tensor], group: dict[str, Any], is_excluded: bool) -> list[Tensor]:
        grads = [p.grad for p in parameters if p.grad is not None]
        beta1, beta2 = group["betas"]
        states = [self.state[p] for p in parameters]
        for p, state in zip(parameters, states, strict=True):
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")  # the CPU can read it at once
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["step"] += 1
        means, squares = [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        steps = [float(state["step"]) if group["bias_correction"] else float("inf") for state in states]
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, [(1 - beta2**step) ** 0.5 for step in steps])
        torch._foreach_add_(roots, group["eps"])
        updates = list(torch._foreach_div(means, roots))
        torch._foreach_div_(updates, [1 - beta1**step for step in steps])
        if is_excluded:
            return updates
        if group["weight_decay"]:
            torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        of_weights, of_updates = _norms(parameters), _norms(updates)
        ratios = torch.where((of_weights > 0) & (of_updates > 0), of_weights / of_updates, 1.0)
        torch._foreach_mul_(updates, ratios.unbind())
        return updates


def _norms(tensors: list[Tensor]) -> Tensor:
    """The 2-norms of tensors of one dtype, in fp32 at least."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(list(torch._foreach_norm(tensors, 2, dtype=dtype)))
