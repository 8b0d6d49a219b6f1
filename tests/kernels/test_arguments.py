"""All kernels: which path a call takes, and which arguments are refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from tests.support.kernels import F32, pack, unpack
from torchring.kernels import lazy, reference
from torchring.kernels.chunks import ChunkTable

CALLS: dict[str, Callable[[], None]] = {
    "pack": lambda: pack([torch.ones(1)], torch.zeros(1), table_of(1)),
    "unpack": lambda: unpack(torch.zeros(1), [torch.ones(1)], table_of(1)),
}


def table_of(numel: int) -> ChunkTable:
    return ChunkTable([numel], [0], wire_dtype=F32, device="cpu")


@pytest.mark.parametrize("name", CALLS)
def test_which_path_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("the torch path")

    monkeypatch.setattr(reference, name, fail)
    with nullcontext() if lazy.INTERPRETED else pytest.raises(AssertionError, match="the torch path"):
        CALLS[name]()


@pytest.mark.parametrize(
    ("error", "message", "tensors", "wire"),
    [
        (ValueError, r"describes 1 tensors, got 2", [torch.ones(4)] * 2, torch.zeros(4)),
        (ValueError, r"tensor 0 should have 4 elements, got shape \(5,\)", [torch.ones(5)], torch.zeros(4)),
        (ValueError, r"strides \(1, 2\), its wire view is contiguous", [torch.ones(2, 2).t()], torch.zeros(4)),
        (TypeError, r"tensors must have one of .* got torch.int32", [torch.ones(4).int()], torch.zeros(4)),
    ],
)
def test_refused_by_pack_and_unpack(
    error: type[Exception], message: str, tensors: list[torch.Tensor], wire: torch.Tensor
) -> None:
    for call in (lambda: pack(tensors, wire, table_of(4)), lambda: unpack(wire, tensors, table_of(4))):
        with pytest.raises(error, match=message):
            call()
