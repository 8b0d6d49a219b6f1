"""Step hooks of the script on an optimizer that steps shards: they run around the step, and see whole parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def run_before(optimizer: Optimizer, own: int, args: tuple[Any, ...], kwargs: Any) -> tuple[tuple[Any, ...], Any]:
    """Run the hooks before a step, as torch.optim.Optimizer does, but for the one whose id is `own`.

    Returns the arguments of the step.
    """
    hooks = [hook for number, hook in optimizer._optimizer_step_pre_hooks.items() if number != own]
    for hook in chain(list(_global_optimizer_pre_hooks.values()), hooks):
        if (result := hook(optimizer, args, kwargs)) is not None:
            if not isinstance(result, tuple) or len(result) != 2:
                raise RuntimeError(f"{hook} must return None or a tuple of (new_args, new_kwargs), but got {result}.")
            args, kwargs = result
    return args, kwargs


def run_after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: Any) -> None:
    for hook in list(chain(optimizer._optimizer_step_post_hooks.values(), _global_optimizer_post_hooks.values())):
        hook(optimizer, args, kwargs)


@contextmanager
def without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Inside, a step of the optimizer runs no hooks."""
    every: Any = (
        *(optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks),
        *(_global_optimizer_pre_hooks, _global_optimizer_post_hooks),
    )
    kept = [dict(hooks) for hooks in every]
    try:
        for hooks in every:
            hooks.clear()
        yield
    finally:
        for hooks, before in zip(every, kept, strict=True):
            hooks.update(before)


def refuse_patched(optimizer: Optimizer) -> None:
    """Raise ValueError if the script has replaced `step` of this instance, as no scheduler does."""
    patched = vars(optimizer).get("step")
    if patched is not None and not getattr(patched, "_wrapped_by_lr_sched", False):
        raise ValueError(
            f"step() of this {type(optimizer).__name__} was replaced in the instance; with shard=True, it would see "
            "parts of parameters. Replace step() of the optimizer that torchring.wrap returns, or use "
            "register_step_pre_hook() and register_step_post_hook(), whose hooks see whole parameters"
        )
