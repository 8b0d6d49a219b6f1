"""Compiled models and CUDA graphs on two ranks that share the GPU, against a plain loop on all batches."""

from collections.abc import Callable
from typing import Any, Final
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import torchring
from tests.devices.test_gpu import on_gpu
from torchring.bench.step import distance, flat_weights
from torchring.optimizer import sync_of

pytestmark = pytest.mark.gpu
_BUCKET_MB: Final = 3 * 64 * 65 * 4 / 2**20  # of 3 of the 12 layers


class Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.gelu(super().forward(x))


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(64, 64) for _ in range(12))).to(torchring.device())


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(2 * step + rank)).to(torchring.device())


def _by_layer(model: nn.Sequential) -> nn.Module:
    for layer in model:
        layer.compile()
    return model


def _in_parts(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend=torchring.compile_backend(bucket_mb=_BUCKET_MB), **options)


_WAYS: Final[dict[str, Callable[[Any], Any]]] = {
    "graphed callables": lambda model: torch.cuda.make_graphed_callables(model, (_batch(0, 0),)),
    "layers compiled one by one": _by_layer,
    "reduce-overhead": lambda model: torch.compile(model, mode="reduce-overhead"),
    "compile_backend": _in_parts,
    "compile_backend, reduce-overhead": lambda model: _in_parts(model, mode="reduce-overhead"),
}


def _train(model: nn.Module, run: Any, optimizer: Any, ranks: list[int], see: Callable[[Tensor], object]) -> Tensor:
    for step in range(5):
        optimizer.zero_grad()
        loss = run(torch.cat([_batch(step, rank) for rank in ranks])).square().mean()
        see(loss)
        loss.backward()
        optimizer.step()
    return flat_weights(model)


def _sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@on_gpu
def test_each_way_trains_as_a_plain_loop(rank: int) -> None:
    torchring.init(process_group=True)
    plain, start = _model(), flat_weights(_model())
    right = _train(plain, plain, _sgd(plain), [0, 1], id)
    for way, prepare in _WAYS.items():
        torch.compiler.reset()
        model, launched = _model(), [0]
        optimizer = torchring.wrap(_sgd(model), model, algorithm="direct", bucket_mb=_BUCKET_MB)
        sync: Any = sync_of(optimizer)

        def see(loss: Tensor, launched: list[int] = launched, sync: Any = sync) -> None:
            """Note how many buckets have left when a graph of backward begins."""
            node = loss.grad_fn
            while node is not None:
                if "Compiled" in node.name():
                    node.register_prehook(lambda _: launched.append(sync.launcher.reduction.num_launched))
                node = next((other for other, _ in node.next_functions if other is not None), None)

        graph = torch.cuda.CUDAGraph
        with mock.patch.object(graph, "replay", autospec=True, side_effect=graph.replay) as replay:
            ours = _train(model, prepare(model), optimizer, [rank], see)
        assert distance(ours, right, start) <= 1e-3, way
        if way in ("graphed callables", "reduce-overhead", "compile_backend, reduce-overhead"):
            assert replay.call_count >= 6, way
        if "compile_backend" in way:
            assert launched[-1] >= 2, f"{way}: buckets that have left before the last graph of backward"
        optimizer.close()
    torchring.shutdown()
