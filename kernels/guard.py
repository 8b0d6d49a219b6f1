"""Guard: what another library has left unfinished in wires, when it was aborted, becomes NaN.

One block looks at the abort word, once. It comes behind the work that it guards, in the same stream. Whoever aborts
sets the word first, so the block that follows half a sum finds the word.

Example: wires fp16 [1, 2, 3] and fp32 [4], after an abort: [NaN, NaN, NaN] and [NaN]. Without one they stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, no_type_check

import torch
from torch import Tensor

from .chunks import sent
from .launching import NUM_WARPS, takes_ptx
from .lazy import lazy_jit
from .signals import is_aborted

if TYPE_CHECKING:
    import triton.language as tl

_TILE = 8192


@lazy_jit(do_not_specialize=("wires", "num_wires", "abort"), uses=(is_aborted,))
@no_type_check
def _guard_kernel(
    wires,  # [num_wires, 2] int64 IN: where each wire begins, and its number of int16 words
    num_wires: tl.int32,
    abort,  # [1] int32 IN: in host memory
    PTX: tl.constexpr,
    TILE: tl.constexpr,
):
    if is_aborted(abort, PTX) != 0:
        nothing = tl.full([TILE], -1, tl.int16)  # all bits are set: NaN in every dtype
        for i in range(num_wires):
            wire = tl.load(wires + 2 * i).to(tl.pointer_type(tl.int16))
            numel = tl.load(wires + 2 * i + 1)
            for tile in range(0, numel, TILE):
                lane = tile + tl.arange(0, TILE)
                tl.store(wire + lane, nothing, mask=lane < numel)


def prepare_guard(wires: Sequence[Tensor], abort: Tensor) -> Callable[[], None]:
    """A function that fills all `wires` with NaN if `abort` is not 0 by then. See `Kernel.prepare`.

    wires: contiguous, on one device: fp16, bf16, fp32 or fp64. The caller keeps them while it may call the function,
        and calls it on the stream that is current now.
    abort: as for `prepare_direct`.
    """
    device = wires[0].device
    places = [(wire.data_ptr(), wire.numel() * wire.dtype.itemsize // 2) for wire in wires]
    table = sent(torch.tensor(places, dtype=torch.int64, device="cpu"), device)
    launch: Callable[[], None] = _guard_kernel.prepare(
        device, 1, table, len(wires), abort, PTX=takes_ptx(device), TILE=_TILE, num_warps=NUM_WARPS
    )
    return launch
