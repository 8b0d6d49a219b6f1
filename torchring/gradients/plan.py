"""Which parameters share a bucket, in which order, at which offset. Pure data; nothing here moves.

Every rank computes the plan by itself. Ranks compare what `describe` returns before the first byte moves.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch

ALIGNMENT_BYTES: Final = 64  # of each parameter in its bucket: a cache line, and 128-bit accesses on a GPU
FIRST_BUCKET_BYTES: Final = 1 << 20  # small, so that the link is busy early in backward
# Between hosts, what is reduced after backward has ended is not hidden, so little should be ready last.
LAST_BUCKET_BYTES: Final = 4 << 20
BUCKET_MB: Final = 25.0
# For four GPUs or more that reduce in each other's memory. Among 8 H100, direct's two shots take 0.065 ms for 8 MiB and
# NCCL 0.076; for 32 MiB 0.242 and 0.195 (vllm-project/vllm#42324). Smaller buckets would
# cost the host more launches.
_BUCKET_MB_SHARED_BY_GPUS: Final = 10.0
_FEWEST_SHARING_GPUS: Final = 4

# A complex gradient travels as twice as many real numbers.
_REAL: Final = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}

Compression = Literal["fp16", "bf16", "int8", "powersgd"]
COMPRESSIONS: Final[dict[str | None, torch.dtype | None]] = {None: None, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter, as the plan needs it. `stride` decides the order of the elements in the wire buffer."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_sparse: bool = False
    place: str = ""  # of what this rank has of a DTensor

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def real_dtype(self) -> torch.dtype:
        """dtype of the real numbers that the gradient consists of."""
        return _REAL.get(self.dtype, self.dtype)

    @property
    def num_reals(self) -> int:
        """Number of real numbers in the gradient."""
        return self.numel * self.dtype.itemsize // self.real_dtype.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill a block of memory without gaps or overlaps, in any order of dimensions."""
        expected = 1
        for length, step in sorted(zip(self.shape, self.stride, strict=True), key=lambda pair: (pair[1], pair[0])):
            if length == 1:
                continue
            if step != expected:
                return self.numel == 0
            expected *= length
        return True

    @property
    def gradient_stride(self) -> tuple[int, ...]:
        """Of the gradient: the parameter's, as autograd has it, unless the parameter has gaps."""
        return self.stride if self.numel and self.is_dense else torch.empty(self.shape, device="meta").stride()

    def describe(self) -> str:
        order = _order_of(self.shape, self.stride)
        layout = f" dimensions in memory {order}" if self.is_dense and order != sorted(order) else ""
        sparse = " sparse" if self.is_sparse else ""
        device = "" if self.device.type == "cpu" else f" on {self.device.type}"
        return f"{self.name} {self.shape} {_short(self.dtype)}{layout}{sparse}{device}{self.place}"


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a bucket."""

    parameter: int  # index into the list of specs
    offset: int  # elements, in the wire buffer
    numel: int  # real numbers


@dataclass(frozen=True)
class BucketPlan:
    """One wire buffer, and the places of gradients in it."""

    index: int
    dtype: torch.dtype  # dtype of the gradients, or of their real and imaginary parts if they are complex
    wire_dtype: torch.dtype  # dtype of the wire buffer
    slots: tuple[Slot, ...]
    numel: int  # number of elements of the whole wire buffer

    @property
    def num_bytes(self) -> int:
        """Bytes of the wire buffer."""
        return self.numel * self.wire_dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """All buckets, in the order in which they are reduced. Sparse parameters are in no bucket."""

    buckets: tuple[BucketPlan, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all wire buffers: what one rank contributes to one reduction."""
        return sum(bucket.num_bytes for bucket in self.buckets)


def default_bucket_mb(num_ranks: int, num_hosts: int, algorithm: str, *, on_device: bool) -> float:
    """MiB of a bucket, unless the script says how many.

    With "auto", "auto" measures buckets of the size for the kernels that share memory. NCCL gets the size that it is
    best with, once it is chosen.
    """
    shares_memory = on_device and num_hosts == 1 and algorithm in ("auto", "direct", "ring")
    return _BUCKET_MB_SHARED_BY_GPUS if shares_memory and num_ranks >= _FEWEST_SHARING_GPUS else BUCKET_MB


def build_plan(
    specs: Sequence[ParameterSpec],  # in registration order
    *,
    bucket_bytes: int,  # cap, in bytes of gradient; 0 gives every parameter its own bucket
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,  # cap of the first bucket of each (dtype, device)
    alignment: int | None = None,  # of each parameter, in elements of the wire buffer; by default 64 bytes
    # Cap of the last bucket of all, if it has several parameters: the others go before it
    last_bucket_bytes: int | None = None,
    compression: str | None = None,  # a key of COMPRESSIONS; narrows wider floating-point gradients on the wire
    # Indices into specs of what to lay out, in the order in which gradients become ready. Default: all, in reverse
    # registration order.
    order: Sequence[int] | None = None,
    first_index: int = 0,  # of the buckets
) -> Plan:
    """Fill buckets in `order` until each has reached its cap.

    Caps are soft, as in DistributedDataParallel: a parameter that crosses the cap still goes in and closes the bucket.
    No parameter is split. A bucket holds one dtype on one device.

    Example: three fp32 parameters of 4, 2 and 3 elements and a cap of 16 bytes: the bucket (2, 1), reached first, holds
    parameter 2 at element 0 and parameter 1 at element 16 (64-byte aligned); parameter 0 has the second to itself.
    """
    ready = range(len(specs))[::-1] if order is None else order
    open_buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    open_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    num_closed: dict[tuple[torch.dtype, torch.device], int] = {}
    closed: list[tuple[torch.dtype, list[int]]] = []
    for index in ready:
        spec = specs[index]
        if spec.is_sparse:
            continue
        key = (spec.real_dtype, spec.device)
        open_buckets.setdefault(key, []).append(index)
        open_bytes[key] = open_bytes.get(key, 0) + spec.numel * spec.dtype.itemsize
        cap = bucket_bytes if num_closed.get(key) else min(first_bucket_bytes, bucket_bytes)
        if open_bytes[key] >= cap:
            closed.append((spec.real_dtype, open_buckets.pop(key)))
            open_bytes[key] = 0
            num_closed[key] = num_closed.get(key, 0) + 1
    closed += [(dtype, parameters) for (dtype, _), parameters in open_buckets.items()]
    # A bucket can leave when its last gradient is ready, and buckets leave in plan order.
    position = {index: i for i, index in enumerate(ready)}
    closed.sort(key=lambda item: position[item[1][-1]])
    if last_bucket_bytes is not None and closed:
        dtype, parameters = closed.pop()
        sizes = [specs[index].numel * specs[index].dtype.itemsize for index in reversed(parameters)]
        num_last = max(1, sum(size <= last_bucket_bytes for size in itertools.accumulate(sizes)))
        parts = [(dtype, part) for part in (parameters[:-num_last], parameters[-num_last:]) if part]
        closed = sorted([*closed, *parts], key=lambda item: position[item[1][-1]])
    return Plan(
        tuple(
            _lay_out(i, dtype, own, specs, compression, alignment) for i, (dtype, own) in enumerate(closed, first_index)
        )
    )


def wire_dtype(dtype: torch.dtype, compression: str | None) -> torch.dtype:
    """The dtype in which a gradient travels: `compression` narrows, it never widens."""
    narrow = COMPRESSIONS[compression]
    return narrow if narrow is not None and dtype.itemsize > narrow.itemsize else dtype


def describe(specs: Iterable[ParameterSpec], options: str) -> list[str]:
    """The lines that ranks compare: one "subject: value" each."""
    return [f"options: {options}", *(f"parameter {i}: {spec.describe()}" for i, spec in enumerate(specs))]


def _lay_out(
    index: int,
    dtype: torch.dtype,
    parameters: Sequence[int],
    specs: Sequence[ParameterSpec],
    compression: str | None,
    alignment: int | None,
) -> BucketPlan:
    wire = wire_dtype(dtype, compression)
    slots, offset, line = [], 0, alignment or ALIGNMENT_BYTES // wire.itemsize
    for parameter in parameters:
        slots.append(Slot(parameter, offset, specs[parameter].num_reals))
        offset += math.ceil(specs[parameter].num_reals / line) * line
    return BucketPlan(index, dtype, wire, tuple(slots), offset)


def _order_of(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Dimensions of more than one element, from the slowest to the fastest."""
    if 0 in shape:
        return []
    return sorted((d for d, length in enumerate(shape) if length > 1), key=lambda d: -stride[d])


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
