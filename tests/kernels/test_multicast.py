"""Direct in the switch, interpreted: support/ptx.py stands in for the switch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.checks import assert_bitwise, assert_same_on_all_ranks
from tests.support.grids import grid
from tests.support.kernel_ranks import GUARD, Round, come_early, launch_direct, places_of_one_process
from tests.support.kernels import B16, F16, F32, F64, NAN, PTX, cast, needs_interpreter
from tests.support.ptx import SWITCH
from torchring.kernels import multicast
from torchring.kernels.finite import NOT_FOUND


@needs_interpreter
@grid("dtype, apart", [F32, B16, F16], [False, True], keep=lambda dtype, apart: apart == (dtype == B16))
def test_the_switch_sums(dtype: torch.dtype, apart: bool) -> None:
    # Two blocks, of which the first has two turns, and a last vector that is not full.
    todo = Round(20_003, dtype, scale=1 / 3, max_blocks=2, seed=20, by_hand={(0, 9_001): NAN})
    places = places_of_one_process(2, PTX)
    total = (todo.input(0).float() + todo.input(1).float()).to(dtype)
    expected = cast(total.float() * torch.tensor(1 / 3), dtype)
    for place in places:
        place.fill(todo)
        place.wire(todo.numel + GUARD, dtype)[todo.numel :] = NAN  # padding is summed, and not looked at
    for gather, spread in [(True, False), (False, True)] if apart else [(True, True)]:
        for place in places:
            come_early(place)
            launch_direct(place, todo, gather=gather, spread=spread, multicast=SWITCH)
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
