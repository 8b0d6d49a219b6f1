"""Collectives on tensors of any device, shape and strides. A `Backend` moves their bytes between ranks."""

from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

import torch

from torchring.collectives.signature import ELEMENTWISE_OPS, Signature, signature_of
from torchring.kernels import reference
from torchring.memory.host import bytes_of

Meanwhile: TypeAlias = Callable[[], bool] | None
"""Called now and then while a rank waits for ranks of its host, until it returns False."""
DETAILS = {op: f"op={op!r}" for op in ELEMENTWISE_OPS}
_PAIRWISE: Final[dict[str, Callable[..., torch.Tensor]]] = {
    "mean": torch.add,
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}
_EXCHANGE = Signature("all_gather_object")


class Backend(Protocol):
    """Collectives on flat tensors; see `SharedMemoryCollectives`."""

    on_cpu: bool  # takes tensors on the CPU only

    def all_reduce(self, data: torch.Tensor, op: str, signature: Signature) -> None: ...
    def broadcast(self, data: torch.Tensor, src: int, signature: Signature) -> None: ...
    def all_gather(self, data: torch.Tensor, signature: Signature) -> list[torch.Tensor]: ...
    def start_exchange(self, data: bytes, signature: Signature) -> Callable[[Meanwhile], list[bytes]]: ...
    def all_to_all(self, pieces: Sequence[torch.Tensor], signature: Signature) -> list[torch.Tensor]: ...
    def barrier(self, signature: Signature) -> None: ...
    def close(self) -> None: ...


class SingleRank:
    """The backend of a world of one, where every collective returns what it was given."""

    on_cpu = False

    def all_reduce(self, data: torch.Tensor, op: str, signature: Signature) -> None:
        """The mean, sum, minimum, maximum and product of one value is that value."""

    def broadcast(self, data: torch.Tensor, src: int, signature: Signature) -> None: ...

    def all_gather(self, data: torch.Tensor, signature: Signature) -> list[torch.Tensor]:
        return [data.clone()]

    def start_exchange(self, data: bytes, signature: Signature) -> Callable[[Meanwhile], list[bytes]]:
        return lambda meanwhile: [data]

    def all_to_all(self, pieces: Sequence[torch.Tensor], signature: Signature) -> list[torch.Tensor]:
        return [piece.clone() for piece in pieces]

    def barrier(self, signature: Signature) -> None: ...

    def close(self) -> None: ...


def all_reduce(backend: Backend, tensor: torch.Tensor, op: str) -> torch.Tensor:
    flat = plain(backend, tensor).view(-1)
    backend.all_reduce(flat, op, signature_of("all_reduce", (tensor,), DETAILS[op]))
    if flat.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            writable(tensor).copy_(flat.view(tensor.shape))
    return tensor


@torch.no_grad()
def broadcast(backend: Backend, tensor: torch.Tensor, src: int) -> torch.Tensor:
    data = plain(backend, tensor)
    backend.broadcast(bytes_of(data), src, signature_of("broadcast", [tensor], f"src={src}"))
    if data.data_ptr() != tensor.data_ptr():
        writable(tensor).copy_(data)
    return tensor


@torch.no_grad()
def all_gather(backend: Backend, tensor: torch.Tensor, signature: Signature | None = None) -> list[torch.Tensor]:
    data = plain(backend, tensor.reshape(1) if tensor.dim() == 0 else tensor)
    signature = signature or signature_of("all_gather", [data], any_rows=True)
    if not data.shape[1:].numel():  # rows without elements: only the number of rows travels
        counts = exchange(backend, b"%d" % len(data), signature)
        return [tensor.new_empty(int(count), *data.shape[1:]) for count in counts]
    parts = backend.all_gather(bytes_of(data), signature)
    return [rows_from(part, data).to(tensor.device) for part in parts]


@torch.no_grad()
def all_to_all(
    backend: Backend, tensor: torch.Tensor, splits: Sequence[int], signature: Signature
) -> tuple[list[torch.Tensor], list[int]]:
    """Deal out the rows of a tensor. Returns what this rank gets from each rank, and how many rows that is."""
    data = plain(backend, tensor)
    parts = backend.all_to_all([bytes_of(part) for part in torch.split(data, list(splits))], signature)
    received = [rows_from(part, data).to(tensor.device) for part in parts]
    return received, [len(part) for part in received]


@torch.no_grad()
def reduce_scatter(backend: Backend, tensor: torch.Tensor, size: int, op: str, signature: Signature) -> torch.Tensor:
    """This rank's share of the rows, of `size` ranks, combined in rank order; 16-bit values in fp32."""
    parts, _ = all_to_all(backend, tensor, even_shares(len(tensor), size), signature)
    total = torch.empty_like(parts[0])
    combine(parts, total, op)
    return total


def even_shares(num_rows: int, size: int) -> list[int]:
    """Number of rows for each rank. If `num_rows` is not a multiple of `size`, the first ranks get one row more.

    Example: 5 rows, 3 ranks -> [2, 2, 1].
    """
    share, rest = divmod(num_rows, size)
    return [share + (rank < rest) for rank in range(size)]


def exchange(backend: Backend, data: bytes, signature: Signature = _EXCHANGE) -> list[bytes]:
    return backend.start_exchange(data, signature)(None)


def combine(parts: Sequence[torch.Tensor], out: torch.Tensor, op: str) -> None:
    """out <- parts[0] op parts[1] op ..., of one dtype, in list order. 16-bit values are combined in fp32, and rounded
    once. `out` may be one of the first two parts, and must not overlap the others. Checks nothing, as it is called for
    each piece of a tensor.
    """
    pairwise = _PAIRWISE[op]
    if len(parts) == 2 and op != "mean":  # torch computes in fp32 here, and rounds once
        pairwise(parts[0], parts[1], out=out)
        return
    wide = reference.compute_dtype(out.dtype, out.dtype)
    if wide == out.dtype and len(parts) > 1:
        total = out
        pairwise(parts[0], parts[1], out=total)
        later = parts[2:]
    else:
        total = torch.empty_like(out, dtype=wide)
        total.copy_(parts[0])
        later = parts[1:]
    for part in later:
        pairwise(total, part, out=total)
    if op == "mean" and out.numel():
        total.mul_(1.0 / len(parts))
    if total is not out:
        out.copy_(total)


def combine_by(
    reduce: Callable[[torch.Tensor, str], None], data: torch.Tensor, op: str, size: int, *, keeps_nan: bool
) -> None:
    """Combine `data` of `size` ranks in place by `reduce`, another library's all-reduce, where "mean" adds up.

    16-bit values travel as fp32, so that they are rounded once. Libraries know no int16, and lose some NaN in "min" and
    "max", where a NaN counts, whoever has it (`keeps_nan`).
    """
    is_nan = torch.empty_like(data, dtype=torch.bool) if keeps_nan else None
    if is_nan is not None:
        torch.ne(data, data, out=is_nan)
        reduce(is_nan.view(torch.uint8), "max")
    wide = torch.int32 if data.dtype == torch.int16 else reference.compute_dtype(data.dtype, data.dtype)
    buffer = data if data.dtype == wide else torch.empty_like(data, dtype=wide).copy_(data)
    reduce(buffer, op)
    if op == "mean":
        buffer.mul_(1.0 / size)
    if is_nan is not None:
        buffer.masked_fill_(is_nan, torch.nan)
    if buffer is not data:
        data.copy_(buffer)


def plain(backend: Backend, tensor: torch.Tensor) -> torch.Tensor:
    """The values in row-major order, where `backend` takes them, without autograd history and lazy conjugation.

    Returns a view of `tensor` if possible. A copy on the CPU is made after the current stream has computed the tensor.
    """
    data = writable(tensor).detach()
    if not data.is_contiguous() or data.is_conj() or data.is_neg():
        data = data.resolve_conj().resolve_neg().contiguous()
    return data.cpu() if backend.on_cpu else data


def writable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor. If it was made under torch.inference_mode(): an alias that can be written outside, too."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        alias = alias.conj() if tensor.is_conj() else alias
        return torch._neg_view(alias) if tensor.is_neg() else alias


def rows_from(data: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`data` as rows of the shape and dtype of those of `like`."""
    return data.view(like.dtype).view(-1, *like.shape[1:])
