"""pack, unpack and accumulate in plain torch: the CPU path, and the oracle for the Triton kernels.

One rule for all three: arithmetic is done in fp32 (in fp64 where an operand is fp64), and the result is rounded once,
to the dtype in which it is stored. So an fp32 gradient of 1e5 scaled by 0.5 into an fp16 wire is 49984, the fp16 value
nearest to 50000. Casting before scaling would give inf.

Example: grads fp32 [1, 2] and [3], scale 0.5, fp16 wire
    pack        -> wire [0.5, 1.0, 1.5]
    accumulate  -> with a peer's wire [1, 1, 1]: [1.5, 2.0, 2.5]
    unpack      -> grads [1.5, 2.0] and [2.5]
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

# Up to this size one torch call over many tensors beats a call for each tensor (800 tensors of 4.4 KB: 0.9 ms instead
# of 1.6 ms). Larger tensors have left the cache when the call makes its second pass over the list.
_SMALL_NUMEL = 16 * 1024
# A cast to a narrower dtype makes a temporary tensor as large as its input. The allocator reuses the memory of
# temporary tensors of 1 MiB. A temporary of 32 MiB gets new memory from the system each time (fp32 to fp16: 13.6 ms,
# not 1.8 ms).
_PIECE_NUMEL = 256 * 1024

_Pair = tuple[torch.dtype, torch.dtype]


def compute_dtype(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """The dtype in which values of dtype `a` are scaled or summed on their way to dtype `b`."""
    common = a if a == b else torch.promote_types(a, b)
    return torch.float32 if common.is_floating_point and common.itemsize < 4 else common


def pack(grads: Sequence[Tensor], views: Sequence[Tensor], *, scale: float = 1.0) -> None:
    """views[i] <- cast(grads[i] * scale): gradients into their slices of the wire buffer.

    grads: tensors of any shape, strides and dtype; not modified.
    views: same shapes, in the wire dtype; usually slices of one buffer. Values go where their index says, so strides
        may differ from the gradient's. The caller owns both; nothing is kept.
    Raises ValueError for lists or shapes that do not match, TypeError for scaling into an integer dtype.
    """
    if len(grads) != len(views):
        raise ValueError(f"{len(grads)} tensors cannot be copied to {len(views)}: one for each is needed")
    if not all(map(Tensor.is_same_size, grads, views)):  # torch would silently broadcast (1,) to (3,)
        i, grad, view = next((i, g, v) for i, (g, v) in enumerate(zip(grads, views, strict=True)) if g.shape != v.shape)
        raise ValueError(f"tensor {i} has shape {tuple(grad.shape)}, its target has shape {tuple(view.shape)}")
    if scale != 1.0:
        _pack_scaled(grads, views, scale)
    elif views:
        torch._foreach_copy_(list(views), list(grads))


def unpack(views: Sequence[Tensor], grads: Sequence[Tensor], *, scale: float = 1.0) -> None:
    """grads[i] <- cast(views[i] * scale): the reverse of `pack`, with the same arithmetic and the same errors."""
    pack(views, grads, scale=scale)


class Accumulation:
    """out <- cast(parts[0] + parts[1] + ...), added in list order, for tensors that are summed again and again.

    parts: one or more tensors of out's dtype and shape; not modified, except that `out` may be one of them. None may
        overlap `out` in part. Sums of integers are exact (modulo 2**bits).
    scratch: at least out.numel() contiguous elements of `compute_dtype`, overwritten; fastest if it has out's shape.
        Holds the running sum if out cannot: if out has 16 bits, or is parts[2] or later. Allocated if None and needed.

    Bound, with u = 2**-24 for fp32 and N parts: |error| <= N * u * sum(|parts|) to first order in u, then one rounding
    to out's dtype.
    """

    def __init__(self, parts: Sequence[Tensor], out: Tensor, scratch: Tensor | None = None) -> None:
        running = compute_dtype(out.dtype, out.dtype)
        # The first two parts are read before anything is written; a later one would be overwritten before its turn.
        sums_in_out = out.dtype == running and out.data_ptr() not in map(Tensor.data_ptr, parts[2:])
        self._running = running
        self._parts, self._out = list(parts), out
        self._total = out if sums_in_out else None if scratch is None else _running_sum(scratch, out, running)
        if len(parts) == 2:  # torch adds 16-bit values in fp32 and rounds once: one call instead of three
            self.run = functools.partial(torch.add, parts[0], parts[1], out=out)  # type: ignore[assignment, method-assign]

    def run(self) -> None:
        """Add up what the tensors hold now."""
        parts, out = self._parts, self._out
        total = _running_sum(None, out, self._running) if self._total is None else self._total
        if out.dtype == self._running and len(parts) > 1:
            torch.add(parts[0], parts[1], out=total)
            later = parts[2:]
        else:
            total.copy_(parts[0])
            later = parts[1:]
        for part in later:
            total.add_(part)  # torch adds in the wider dtype, so a 16-bit part is added in fp32
        if total is not out:
            out.copy_(total)


def _running_sum(scratch: Tensor | None, out: Tensor, dtype: torch.dtype) -> Tensor:
    if scratch is None:
        return torch.empty_like(out, dtype=dtype)
    return scratch if scratch.shape == out.shape else scratch.view(-1)[: out.numel()].view(out.shape)


def _pack_scaled(grads: Sequence[Tensor], views: Sequence[Tensor], scale: float) -> None:
    small: dict[_Pair, tuple[list[Tensor], list[Tensor]]] = {}
    for grad, view in zip(grads, views, strict=True):
        if not (view.is_floating_point() or view.is_complex()):
            raise TypeError(f"a target of dtype {view.dtype} takes scale 1 only, got {scale}")
        if grad.numel() <= _SMALL_NUMEL or not (grad.is_contiguous() and view.is_contiguous()):
            sources, targets = small.setdefault((grad.dtype, view.dtype), ([], []))
            sources.append(grad)
            targets.append(view)
        elif grad.dtype == view.dtype:
            torch.mul(grad, scale, out=view)  # computes 16-bit products in fp32
        else:
            source, target = grad.view(-1), view.view(-1)
            for i in range(0, source.numel(), _PIECE_NUMEL):
                _scale_into([source[i : i + _PIECE_NUMEL]], [target[i : i + _PIECE_NUMEL]], scale)
    for sources, targets in small.values():
        _scale_into(sources, targets, scale)


def _scale_into(sources: list[Tensor], targets: list[Tensor], scale: float) -> None:
    """targets[i] <- cast(sources[i] * scale). All sources have one dtype, and all targets have one dtype."""
    source, target = sources[0].dtype, targets[0].dtype
    common = torch.promote_types(source, target)
    # A tensor, because torch 2.13 first rounds a Python number to the dtype of 16-bit targets when it works in place on
    # CPU. Besides, torch would make a tensor of the number for every target.
    factor = torch.tensor(scale, dtype=compute_dtype(source, target), device=targets[0].device)
    if common == target:  # widening is exact, so scaling afterwards rounds once
        torch._foreach_copy_(targets, sources)
        torch._foreach_mul_(targets, factor)
    elif common == source:
        torch._foreach_copy_(targets, torch._foreach_mul(sources, factor))
    else:  # fp16 and bf16: neither holds the other, so the product has to be fp32
        torch._foreach_copy_(targets, torch._foreach_mul([tensor.to(common) for tensor in sources], factor))
