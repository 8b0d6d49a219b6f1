"""Wires in NCCL's own memory, which NCCL maps on all ranks. There it adds up with its symmetric kernels: within one
NVLink domain they take fewer processors than its rings, and add 16-bit values in fp32.

PyTorch registers memory, too (`ProcessGroupNCCL.register_mem_pool`). But its abort first takes the memory back, while
kernels that wait for a dead rank are about to use it, and only then tells them to stop; before 2.13 it then even fails
(pytorch#181610). NCCL itself takes the memory back when it has told its kernels to stop, or is shut down. So this file
calls NCCL. What is said here of NCCL was read in the sources of 2.28.9, 2.29.7 and 2.30.7.
"""

import contextlib
import ctypes
import weakref
from pathlib import Path
from typing import Any, Final, cast

import torch

from torchring.devices.symmetric_memory import CudaBlock, LonelyGroup

# As ncclGetVersion says it: 2.29.7. Symmetric kernels of earlier releases never look whether NCCL was aborted
# (ncclLsaBarrierSession::wait): a dead rank would keep the others' streams waiting until their processes end.
_LEAST_NCCL: Final = 22907
_SYMMETRIC: Final = 1  # NCCL_WIN_COLL_SYMMETRIC


class RegisteredGroup(LonelyGroup):
    """A `LonelyGroup` whose memory is registered with a connected NCCL: allocating and releasing are collective.

    Raises RuntimeError, or OSError, AttributeError, if this NCCL or this build of PyTorch cannot.
    """

    is_mapped = True

    def __init__(self, rank: int, device: torch.device, backend: Any) -> None:
        super().__init__(rank, device)
        # By way of PyTorch's library, so that it is the NCCL that PyTorch uses.
        self._library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
        version = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(version))
        if version.value < _LEAST_NCCL:
            raise RuntimeError(f"NCCL {version.value} cannot end its symmetric kernels, {_LEAST_NCCL} can")
        with torch.cuda.device(device):
            self._communicator = ctypes.c_void_p(backend._comm_ptr())

    def allocate(self, num_bytes: int) -> CudaBlock:
        # Not by PyTorch's `mem_allocator`, which refuses GPUs that no switch reaches. NCCL's kernels do not need one.
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()  # as in `CudaGroup.allocate`
            memory = _Memory(self, max(num_bytes, 1))
        part = torch.as_tensor(memory, device=self._device).zero_()
        window = ctypes.c_void_p()
        where = ctypes.c_void_p(part.data_ptr()), ctypes.c_size_t(part.nbytes)
        self.call("ncclCommWindowRegister", self._communicator, *where, ctypes.byref(window), _SYMMETRIC)
        if not window:
            raise RuntimeError("NCCL does not map memory of other ranks here")
        return CudaBlock([part], window)

    def free(self, pointer: ctypes.c_void_p) -> None:
        if torch.cuda.is_current_stream_capturing():  # freeing would end the capture: such memory stays
            return
        with contextlib.suppress(RuntimeError):  # of a device that has failed
            torch.cuda.synchronize(self._device)
            self.call("ncclMemFree", pointer)

    def release(self, block: CudaBlock) -> None:
        self.call("ncclCommWindowDeregister", self._communicator, cast(ctypes.c_void_p, block.handle))

    def call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._library, name)(*arguments):
            raise RuntimeError(f"{name} fails with NCCL's error {code}; NCCL_DEBUG=WARN says why")


class _Memory:
    """Memory of NCCL's on the current device, for `torch.as_tensor`. It goes with the last tensor that views it."""

    def __init__(self, group: RegisteredGroup, num_bytes: int) -> None:
        pointer = ctypes.c_void_p()
        group.call("ncclMemAlloc", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
        bytes_at = {"data": (pointer.value, False), "shape": (num_bytes,), "typestr": "|u1", "version": 3}
        self.__cuda_array_interface__ = bytes_at
        weakref.finalize(self, group.free, pointer).atexit = False
