"""Learning rates for large batches: how large they should be, and how training gets there."""

from __future__ import annotations

import math
import numbers
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Rule = Literal["linear", "sqrt"]


def scale_lr(base_lr: float, base_batch: int, batch: int, rule: Rule = "linear") -> float:
    """The learning rate for another batch size than that which `base_lr` was found with.

    Args:
        base_lr: a learning rate that trains well, above 0.
        base_batch: the batch size that it was found with, in samples.
        batch: the batch size of a step, in samples, over all ranks and micro-steps.
        rule: "linear", for SGD: `base_lr * batch / base_batch`; "sqrt", for Adam and LAMB:
            `base_lr * sqrt(batch / base_batch)`.

    Raises:
        TypeError: a batch size is no whole number.
        ValueError: a number is not above 0, or not finite, or there is no such rule.

    Source: P. Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", arXiv:1706.02677, 2017
    ("linear"); A. Krizhevsky, "One weird trick for parallelizing convolutional neural networks", arXiv:1404.5997, 2014,
    and the paper on LAMB, arXiv:1904.00962 ("sqrt").
    """
    for name, value in (("base_batch", base_batch), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(
                f"{name} must be a whole number of samples, got {value!r}; the order is base_lr, base_batch, batch"
            )
        if value < 1:
            raise ValueError(f"{name} must be a number of samples, 1 or more, got {value}")
    if not 0 < base_lr < math.inf:
        raise ValueError(f"base_lr must be above 0 and finite, got {base_lr!r}")
    if rule not in ("linear", "sqrt"):
        raise ValueError(f"rule must be 'linear' or 'sqrt', got {rule!r}")
    ratio = batch / base_batch
    return base_lr * (ratio if rule == "linear" else math.sqrt(ratio))


class WarmUp(LRScheduler):
    """What `warm_up` returns: a scheduler that raises the learning rate, and then lets another one go on.

    Attributes:
        after: the scheduler that goes on; None if the learning rate stays.
        is_over: whether the full learning rate is reached.
    """

    # torch's SequentialLR takes no ReduceLROnPlateau and no ChainedScheduler, and resets what schedulers have done.

    def __init__(self, optimizer: Optimizer, after: LRScheduler | None, steps: int, start: float) -> None:
        self.after, self.steps, self.start = after, steps, start
        self.full = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer)

    @property
    def is_over(self) -> bool:
        return self.last_epoch >= self.steps

    def get_lr(self) -> list[float | torch.Tensor]:
        done = min(1.0, self.last_epoch / self.steps)
        return [full * (self.start * (1 - done) + done) for full in self.full]

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Call after each step of the optimizer. The arguments are those of the scheduler that goes on."""
        if not self.is_over:
            super().step()
        elif self.after is not None:
            self.after.step(*args, **kwargs)

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """The learning rate of each parameter group."""
        return self.after.get_last_lr() if self.is_over and self.after is not None else super().get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """The state of this scheduler, and of the one that goes on."""
        state = {key: value for key, value in self.__dict__.items() if key not in ("optimizer", "after")}
        return {**state, "after": None if self.after is None else self.after.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict()` was called. Load the optimizer's state, too: it has the learning rates."""
        state = dict(state_dict)
        after = state.pop("after")
        if (after is None) != (self.after is None):
            raise ValueError("warm_up() was given a scheduler in one of the runs only; build it as in the saved run")
        self.__dict__.update(state)
        if self.after is not None:
            self.after.load_state_dict(after)


def warm_up(after: Optimizer | LRScheduler, steps: int, start: float = 0.0) -> WarmUp:
    """Raise the learning rates from `start` times their present values to those, in equal steps; then hand over.

    With N = `steps`, the first step of the optimizer is made with `start` times the full learning rate, and step N + 1
    with the full one. Then `after` goes on as if it began there: its own steps are counted from the end of the warm-up.
    Call `step()` of what `warm_up` returns, and not that of `after`. Each parameter group keeps its own learning rate.

    PyTorch's optimizers, LARS and LAMB need no correction of momentum for that.

    Args:
        after: the scheduler that goes on, any of torch's; or the optimizer, if the learning rates stay as they are.
        steps: number of calls of `step()` until the full learning rates are reached, 1 or more.
        start: from 0 to 1. For a learning rate that was multiplied by k, 1 / k begins at the unscaled one.

    Raises:
        TypeError: `after` is neither, or `steps` is no whole number.
        ValueError: `steps` or `start` is out of range.

    Source: P. Goyal et al., arXiv:1706.02677, 2017, section 2.2. With `start=1 / size()`, this is the warm-up of
    Horovod's LearningRateWarmupCallback.
    """
    if not isinstance(after, (Optimizer, LRScheduler)):
        raise TypeError(f"warm_up takes an optimizer or a scheduler of torch.optim, got {type(after).__name__}")
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"steps must be a whole number, got {steps!r}")
    if steps < 1:
        raise ValueError(f"steps must be 1 or more, got {steps}")
    if not 0 <= start <= 1:
        raise ValueError(f"start must be from 0 to 1: it is multiplied with the full learning rate; got {start!r}")
    if isinstance(after, Optimizer):
        return WarmUp(after, None, steps, start)
    return WarmUp(after.optimizer, after, steps, start)
