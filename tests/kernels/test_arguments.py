"""All kernels: which path a call takes, and which arguments are refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.support.kernel_ranks import Round, Runner, come_early, places_of_one_process, run_direct, run_ring
from tests.support.kernels import F32, pack, unpack, where_triton_runs
from torchring.kernels import lazy, reference
from torchring.kernels.chunks import ChunkTable
from torchring.kernels.direct import prepare_direct
from torchring.kernels.ring import prepare_ring

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


@pytest.mark.parametrize(("name", "run"), [("direct", run_direct), ("ring", run_ring)])
def test_without_cuda_or_interpreter_it_says_so(name: str, run: Runner) -> None:
    message = f"{name} runs on CUDA, or on CPU tensors under TRITON_INTERPRET=1; got"
    with nullcontext() if lazy.INTERPRETED else pytest.raises(ValueError, match=message):
        come_early(place := places_of_one_process(2, "cpu")[0])
        run(place, Round(4))


@pytest.mark.parametrize(
    ("error", "message", "tensors", "wire"),
    [
        (TypeError, r"built for a wire of torch.float32, got torch.float16", [torch.ones(4)], torch.zeros(4).half()),
        (ValueError, r"hold 4 elements; got shape \(3,\)", [torch.ones(4)], torch.zeros(3)),
        (ValueError, r"with strides \(2,\)", [torch.ones(4)], torch.zeros(8)[::2]),
        (ValueError, r"multiple of 16 bytes", [torch.ones(4)], torch.zeros(8)[1:]),
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


@where_triton_runs
def test_refused_by_direct_and_ring(device: str) -> None:
    """Nothing is launched: a kernel that should have been refused would wait for ever."""
    place = places_of_one_process(2, device)[0]
    both: dict[str, Any] = {
        "wires": place.wires, "signals": place.signals, "wire": place.wire(64), "rank": 0, "num_ranks": 2,
        "abort": place.abort,
    }  # fmt: skip
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, r"sums .* got a wire of torch\.int32", {"wire": place.wire(64).view(torch.int32)}),
        (ValueError, r"start at a multiple of 64 bytes", {"wire": place.wire(64)[1:]}),
        (ValueError, r"with strides \(2,\)", {"wire": place.wire(64)[::2]}),
        (ValueError, r"rank must be one of 2, got 2", {"rank": 2}),
        (ValueError, r"rank must be one of 2, got -1", {"rank": -1}),
        (ValueError, r"max_blocks must be at least 1, got 0", {"max_blocks": 0}),
        (ValueError, r"wires must be .*, torch.int64 \[2\] .* got torch.int64 \[1\]", {"wires": place.wires[:1]}),
        (ValueError, r"signals must be .* got torch.int32", {"signals": place.signals.int()}),
        (ValueError, r"num_ranks must be 2 to 256, got 257", {"num_ranks": 257}),
        (ValueError, r"abort must be contiguous, torch.int32 \[1\] on cpu", {"abort": place.abort.long()}),
    ]
    of_direct: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, r"slice \[16, 65\) must lie within the wire's 64", {"end": 65}),
        (ValueError, r"begin at a multiple of 64 bytes, got 8 elements of 4 bytes", {"begin": 8}),
        (ValueError, r"gather and spread are both False", {"gather": False, "spread": False}),
    ]
    if device != "cpu":
        refused.append((ValueError, r"abort must be in pinned host memory", {"abort": place.abort.clone()}))
    for error, message, change in refused:
        with pytest.raises(error, match=message):
            prepare_ring(**{**both, **change})
    for error, message, change in refused + of_direct:
        with pytest.raises(error, match=message):
            prepare_direct(**{**both, "begin": 16, "end": 60, **change})
