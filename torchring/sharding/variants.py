"""Says what `fused=True` would save. torchring never switches by itself: results differ in last bits."""

from __future__ import annotations

import inspect
import time
from typing import Any, Final

import torch
from torch.optim import Optimizer

_HAVE_FUSED: Final = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)  # on the CPU
_LENGTH: Final = 128 * 1024
_REPEATS: Final = 5
_WORTH_SAYING: Final = 0.8


def advice_on_fused(optimizer: Optimizer) -> str:
    """A sentence for an optimizer that is not fused and could be, with times measured for a tensor; else "".

    Takes a few milliseconds.
    """
    kind = type(optimizer)
    if kind not in _HAVE_FUSED or any(group.get("fused") for group in optimizer.param_groups):
        return ""
    if any(not p.is_floating_point() for group in optimizer.param_groups for p in group["params"]):
        return ""
    known = inspect.signature(kind).parameters
    options = {key: value for key, value in optimizer.defaults.items() if key in known and key not in ("foreach", "lr")}
    plain = _seconds(optimizer, options)
    fused = _seconds(optimizer, {**options, "fused": True})
    if fused > _WORTH_SAYING * plain:
        return ""
    return (
        f"{kind.__name__}(..., fused=True) would take about {fused / plain:.0%} of the time of this {kind.__name__}'s "
        "step (its results differ in the last bits)"
    )


def _seconds(optimizer: Optimizer, options: dict[str, Any]) -> float:
    tensor = torch.zeros(_LENGTH, device="cpu")
    tensor.grad = torch.zeros_like(tensor)
    kind: Any = type(optimizer)
    trial = kind([tensor], lr=0.0, **options)
    trial.step()
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        trial.step()
        seconds.append(time.perf_counter() - started)
    return min(seconds)  # what disturbs a measurement makes it longer
