"""The memory that a transport reads and writes: the tensor's own, or a copy on the host where it cannot touch that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from torchring.memory.host import bytes_of

# Of MPIs that do not answer MPIX_Query_cuda_support: Cray's MPICH and MVAPICH2 read these themselves.
_CUDA_SWITCHES: Final = ("MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_CUDA")


def contiguous_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8: every dtype travels, those that the engine does not know included."""
    if not tensor.is_contiguous():
        raise ValueError(f"a transport moves contiguous tensors, got strides {tensor.stride()}")
    return bytes_of(tensor)


def takes_device_pointers(library: Any, environ: Mapping[str, str]) -> bool:
    """Whether an MPI library (as ctypes.CDLL) may be handed the addresses of CUDA memory."""
    query = getattr(library, "MPIX_Query_cuda_support", None)
    if query is not None and query() == 1:
        return True
    return any(environ.get(switch) == "1" for switch in _CUDA_SWITCHES)


def outgoing(tensor: torch.Tensor, *, device_pointers: bool) -> torch.Tensor:
    """What the engine reads, complete: whatever the current stream was to write there is in it."""
    if is_on_host(tensor):
        return tensor
    if device_pointers:
        torch.cuda.current_stream(tensor.device).synchronize()  # the engine knows of no streams
        return tensor
    return _host_buffer(tensor).copy_(tensor)  # after the current stream's work, and done on return


def incoming(tensor: torch.Tensor, *, device_pointers: bool) -> torch.Tensor:
    """What the engine writes. If it is not `tensor`, `tensor.copy_` it when it is complete (on the current stream)."""
    if is_on_host(tensor):
        return tensor
    if device_pointers:
        torch.cuda.current_stream(tensor.device).synchronize()  # nobody still reads what is about to be overwritten
        return tensor
    return _host_buffer(tensor)


def is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _host_buffer(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available(), device="cpu")
