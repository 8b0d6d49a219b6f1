"""Broadcasts of many tensors at once, and of bytes; and which tensors a script may pass."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final

import torch

from torchring.accelerators import ACCELERATORS
from torchring.collectives import operations
from torchring.collectives.operations import Backend
from torchring.collectives.service import Collectives
from torchring.collectives.signature import Signature
from torchring.memory.host import bytes_of, tensor_of

BATCH_BYTES: Final = 8 << 20


def broadcast_together(
    collectives: Collectives, tensors: Iterable[torch.Tensor], src: int, what: str = "broadcast"
) -> None:
    """Broadcast many tensors, in messages of some MiB. Warnings and errors call it `what`."""
    tensors = list(tensors)
    for checked in tensors:
        check_dense(checked)
        check_writable(checked)
    is_src = collectives.world.rank == src
    collectives.run(what, partial(broadcast_batches, tensors=tensors, src=src, is_src=is_src))


def broadcast_bytes(collectives: Collectives, data: bytes | None, src: int) -> bytes:
    """The `data` of rank `src`. The other ranks may pass None."""
    is_src = collectives.world.rank == src

    def operation(backend: Backend) -> bytes:
        buffer = tensor_of(data if is_src and data is not None else b"")
        signature = Signature("broadcast_object", f"src={src}")
        length = torch.tensor([buffer.numel()], device="cpu")
        backend.broadcast(bytes_of(length), src, signature)
        if not is_src:
            buffer = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        backend.broadcast(buffer, src, signature)
        return buffer.numpy().tobytes()

    return collectives.run("broadcast_object", operation)


@torch.no_grad()
def broadcast_batches(backend: Backend, tensors: Sequence[torch.Tensor], src: int, *, is_src: bool) -> None:
    """Overwrite tensors with those of rank `src`, in place, in messages of some MiB. Between hosts, 800 messages took
    2 s. Tensors that `check_dense` and `check_writable` accept."""
    batch: list[torch.Tensor] = []
    num_bytes = 0
    for tensor in [*tensors, None]:
        if batch and (tensor is None or num_bytes + tensor.nbytes > BATCH_BYTES):
            parts = [bytes_of(operations.plain(backend, small)) for small in batch]
            flat = torch.cat([part.to(parts[0].device) for part in parts])
            operations.broadcast(backend, flat, src)
            if not is_src:
                _hand_out(flat, batch)
            batch, num_bytes = [], 0
        if tensor is not None and tensor.nbytes > BATCH_BYTES:
            operations.broadcast(backend, tensor, src)
        elif tensor is not None:
            batch.append(tensor)
            num_bytes += tensor.nbytes


@torch.no_grad()
def _hand_out(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy `flat`, the bytes of all tensors one after the other, to the tensors."""
    for tensor, part in zip(tensors, torch.split(flat, [tensor.nbytes for tensor in tensors]), strict=True):
        fresh = torch.empty(tensor.shape, dtype=tensor.dtype, device=flat.device)
        bytes_of(fresh).copy_(part)
        operations.writable(tensor.detach()).copy_(fresh)


def is_movable(device: torch.device) -> bool:
    """True if collectives take tensors on this device."""
    return device.type in ("cpu", *ACCELERATORS)


def check_dense(tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected a torch.Tensor, got {type(tensor).__name__}")
    if not tensor.is_cpu and not is_movable(tensor.device):
        raise ValueError(f"expected a tensor on the CPU or on CUDA, got one on {tensor.device}")
    if hasattr(tensor, "to_local"):
        raise ValueError("expected a tensor of this rank, got a DTensor; pass tensor.to_local()")
    if tensor.layout != torch.strided:
        raise ValueError(f"expected a dense tensor, got layout {tensor.layout}; pass tensor.to_dense()")


def check_writable(tensor: torch.Tensor) -> None:
    if tensor.is_contiguous():
        return
    if any(step == 0 and length > 1 for length, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError("an expanded tensor has elements that share memory and cannot be written; pass tensor.clone()")
