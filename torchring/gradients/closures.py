"""Steps that take a closure."""

from __future__ import annotations

from typing import Any

import torch

from torchring.collectives.service import internal_collectives_of
from torchring.world import World


def refuse_closure() -> None:
    raise ValueError(
        "step(closure) does not work with on_nonfinite='skip': an optimizer that evaluates a closure may have moved "
        "parameters before a gradient is not finite. Pass on_nonfinite='raise' or 'ignore' to torchring.wrap; or call "
        "backward() first, and then step() without a closure"
    )


def mean_loss(loss: Any, world: World) -> Any:
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
