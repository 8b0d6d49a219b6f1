"""Direct in the switch, interpreted, with a stand-in for the switch; kernels/test_compile.py looks at the real thing.

The stand-in's multicast address is that of a table with the addresses of all wires.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, no_type_check
from unittest import mock

import pytest
import torch

from tests.support.checks import assert_bitwise, assert_same_on_all_ranks
from tests.support.grids import grid
from tests.support.kernel_ranks import GUARD, Round, come_early, launch_direct, places_of_one_process
from tests.support.kernels import B16, F16, F32, F64, NAN, cast, needs_interpreter
from torchring.kernels import lazy, multicast
from torchring.kernels.finite import NOT_FOUND

if TYPE_CHECKING:
    import triton.language as tl

NUM_RANKS = 2


@lazy.lazy_jit()
@no_type_check
def element_sum(table, index, mine, DTYPE: tl.constexpr):
    """What the switch makes of these elements of two ranks, as uint32."""
    wires = table.to(tl.pointer_type(tl.int64))
    first = tl.load(tl.load(wires).to(tl.pointer_type(DTYPE)) + index, mask=mine, other=0.0)
    second = tl.load(tl.load(wires + 1).to(tl.pointer_type(DTYPE)) + index, mask=mine, other=0.0)
    total = (first.to(tl.float32) + second.to(tl.float32)).to(DTYPE)
    if tl.float32 == DTYPE:
        return total.to(tl.uint32, bitcast=True)
    return total.to(tl.uint16, bitcast=True).to(tl.uint32)


@lazy.lazy_jit(uses=(element_sum,))
@no_type_check
def word_sum(table, word, mine, DTYPE: tl.constexpr):
    if tl.float32 == DTYPE:
        return element_sum(table, word, mine, DTYPE)
    return element_sum(table, word * 2, mine, DTYPE) | (element_sum(table, word * 2 + 1, mine, DTYPE) << 16)


@lazy.lazy_jit(uses=(word_sum,))
@no_type_check
def load_sum(table, vector, mine, DTYPE: tl.constexpr):
    a = word_sum(table, vector * 4, mine, DTYPE)
    b = word_sum(table, vector * 4 + 1, mine, DTYPE)
    c = word_sum(table, vector * 4 + 2, mine, DTYPE)
    d = word_sum(table, vector * 4 + 3, mine, DTYPE)
    return a, b, c, d


@lazy.lazy_jit()
@no_type_check
def store_to_all(table, vector, mine, words):
    for rank in tl.static_range(2):
        wire = tl.load(table.to(tl.pointer_type(tl.int64)) + rank).to(tl.pointer_type(tl.uint32))
        for i in tl.static_range(4):
            tl.store(wire + vector * 4 + i, words[i], mask=mine)


@lazy.lazy_jit()
@no_type_check
def order_aliases():
    pass


@contextmanager
def switch_stand_in() -> Iterator[None]:
    module: Any = sys.modules["torchring.kernels.direct"]
    _ = module._direct_kernel.jitted  # puts the real functions where the stand-ins go
    with (
        mock.patch.multiple(multicast, load_sum=load_sum.jitted, store_to_all=store_to_all.jitted),
        mock.patch.multiple(module, order_aliases=order_aliases.jitted, check_multicast=lambda *_: None),
    ):
        yield


@needs_interpreter
@grid("dtype, apart", [F32, B16, F16], [False, True], keep=lambda dtype, apart: apart == (dtype == B16))
def test_the_switch_sums(dtype: torch.dtype, apart: bool) -> None:
    # Two blocks, of which the first has two turns, and a last vector that is not full.
    todo = Round(20_003, dtype, scale=1 / 3, max_blocks=2, seed=20, by_hand={(0, 9_001): NAN})
    places = places_of_one_process(NUM_RANKS, "cpu")
    total = cast(todo.input(0).float() + todo.input(1).float(), dtype)
    expected = cast(total.float() * torch.tensor(1 / 3), dtype)
    for place in places:
        place.fill(todo)
        place.wire(todo.numel + GUARD, dtype)[todo.numel :] = NAN  # padding is summed, and not looked at
    with switch_stand_in():
        for gather, spread in [(True, False), (False, True)] if apart else [(True, True)]:
            for place in places:
                come_early(place)
                launch_direct(place, todo, gather=gather, spread=spread, multicast=place.wires.data_ptr())
    results = [place.wire(todo.numel, dtype).clone() for place in places]
    assert_same_on_all_ranks(results)
    assert results[0].isnan().nonzero().flatten().tolist() == [9_001]
    assert_bitwise(results[0].nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))
    assert [int(place.found) for place in places] == [9_001, NOT_FOUND]


def test_what_the_switch_cannot_do() -> None:
    def wire(dtype: torch.dtype = F32, device: str = "cuda") -> Any:
        return SimpleNamespace(device=torch.device(device), dtype=dtype, numel=lambda: 1000)

    for error, message, capability, arguments in [
        (ValueError, r"multicast needs an NVIDIA GPU", (9, 0), (wire(device="cpu"), 64, 1000)),
        (ValueError, r"needs compute capability 9.0 or later; cuda has less", (8, 9), (wire(), 64, 1000)),
        (TypeError, r"multicast sums fp16, bf16 and fp32; got a wire of torch.float64", (9, 0), (wire(F64), 64, 1000)),
        (ValueError, r"multicast must be a multiple of 64 bytes, got 0x20", (9, 0), (wire(), 32, 1000)),
        (ValueError, r"ends at a multiple of 16 bytes or with the wire, got 998", (9, 0), (wire(), 64, 998)),
    ]:
        with mock.patch("torch.cuda.get_device_capability", return_value=capability):
            with pytest.raises(error, match=message):
                multicast.check_multicast(*arguments)
            multicast.check_multicast(wire(), 64, 996) if capability == (9, 0) else None
    with (
        mock.patch("torch.version.hip", "6.4"),
        pytest.raises(ValueError, match="multicast needs an NVIDIA GPU"),
    ):
        multicast.check_multicast(wire(), 64, 1000)
