"""What launches of `direct` and `ring` have in common: number of blocks, tile, and poison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, no_type_check

import torch

from . import reference
from .lazy import Kernel, lazy_jit, triton_dtype

if TYPE_CHECKING:
    import triton.language as tl

NUM_WARPS = 8  # 256 threads, on AMD 512
# (bytes, blocks): wires of fewer bytes get no more than that many blocks. For them latency counts, not bandwidth.
_SMALL_WIRES = ((1 << 20, 8), (4 << 20, 16))


def takes_ptx(device: torch.device) -> bool:
    """Whether kernels on `device` may contain inline PTX: on NVIDIA GPUs."""
    return device.type == "cuda" and torch.version.hip is None


def prepare_between(
    kernel: Kernel,
    arguments: Sequence[Any],
    wire: torch.Tensor,
    num_ranks: int,
    tile: int,
    max_blocks: int,
    **constants: bool,
) -> Callable[[], None]:
    """A launch of `direct` or `ring` with these arguments, for this rank's own `wire`. See `Kernel.prepare`."""
    return kernel.prepare(
        wire.device,
        num_blocks(wire.numel(), wire.dtype.itemsize, num_ranks, tile, max_blocks),
        *arguments,
        COMPUTE=triton_dtype(reference.compute_dtype(wire.dtype, wire.dtype)),
        NUM_RANKS=num_ranks,
        PTX=takes_ptx(wire.device),
        TILE=tile,
        num_warps=NUM_WARPS,
        **register_limit(wire.device),
        **constants,
    )


def register_limit(device: torch.device) -> dict[str, int]:
    """An option of Triton: all the registers that a thread can have, on NVIDIA GPUs.

    Without a limit of its own ptxas aims at more blocks for each SM, and spills some registers to get there.
    """
    return {"maxnreg": 255} if takes_ptx(device) else {}


def num_blocks(numel: int, itemsize: int, num_ranks: int, tile: int, max_blocks: int) -> int:
    """Number of blocks of a launch, equal on all ranks: one for each tile of a slice, at most `max_blocks`.

    Wires under 1 MiB get at most 8 blocks, those under 4 MiB at most 16: a block that waits keeps up to half of an SM's
    registers and 64 KiB of its shared memory from backward.
    """
    max_blocks = min([max_blocks, *(blocks for size, blocks in _SMALL_WIRES if numel * itemsize < size)])
    return max(1, min(max_blocks, -(-numel // (num_ranks * tile))))


def tile_numel(itemsize: int, num_ranks: int) -> int:
    """Number of elements that a block loads at a time from each rank, when it loads from `num_ranks` ranks.

    A link is full when bandwidth times latency, nearly 1 MB, is in flight, and of two ranks half is local. So each of
    24 blocks has 64 KiB from all ranks together under way: `direct` loads two tiles of 32 KiB, each by 8 loads of 128
    bits of 256 threads. One such load for each thread and rank is the least: 4 KiB, on AMD 8 KiB.
    """
    shares = 1 << (num_ranks - 1).bit_length()  # a tile is a power of two
    least = 16 * NUM_WARPS * (64 if torch.version.hip else 32)
    return max(least, 32768 // shares) // itemsize


@lazy_jit()
@no_type_check
def poison(
    wire,  # [numel] OUT
    numel,
    TILE: tl.constexpr,
):
    """Fill this block's share of a wire with NaN, so that nobody uses an unfinished result."""
    nothing = tl.full([TILE], float("nan"), wire.dtype.element_ty)
    stride = tl.num_programs(0).to(tl.int64) * TILE
    for tile in range(tl.program_id(0).to(tl.int64) * TILE, numel, stride):
        lane = tile + tl.arange(0, TILE)
        tl.store(wire + lane, nothing, mask=lane < numel)
