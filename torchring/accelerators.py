"""Accelerators: devices that queue work in streams and do it later. See `devices/cuda.py`.

A CPU is no accelerator: its work is done when a call returns. `ACCELERATORS` lists the device types that are.
"""

from collections.abc import Callable
from typing import Any, Final

import torch

from torchring.rooms import room


def accelerator_of(device: torch.device) -> Any:
    """The `CudaAccelerator` of `device`; None for the CPU."""
    if device not in _open:
        opened = ACCELERATORS.get(device.type)
        _open[device] = None if opened is None else opened(device)
    return _open[device]


ACCELERATORS: Final[dict[str, Callable[[torch.device], Any]]] = {
    "cuda": lambda device: room("cuda").CudaAccelerator(device)
}
_open: Final[dict[torch.device, Any]] = {}
