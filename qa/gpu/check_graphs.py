"""Figures: compiled models and CUDA graphs on two ranks that share the GPU, against a plain loop on all batches."""

from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor, nn

import torchring
from qa.gpu.check import Figure
from qa.gpu.sharing import figures_of, say
from torchring.bench.step import distance, flat_weights
from torchring.optimizer import sync_of

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


def _ways() -> Iterator[Figure]:
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

        with mock.patch.object(
            graph := torch.cuda.CUDAGraph, "replay", autospec=True, side_effect=graph.replay
        ) as replay:
            ours = _train(model, prepare(model), optimizer, [torchring.rank()], see)
        yield Figure(f"{way}: off by", distance(ours, right, start), "of the way", 1e-3)
        if way in ("graphed callables", "reduce-overhead", "compile_backend, reduce-overhead"):
            yield Figure(f"{way}: replays", replay.call_count, "of CUDA graphs", 6, at_least=True)
        if "compile_backend" in way:
            yield Figure(f"{way}: before the last graph of backward", launched[-1], "buckets left", 2, at_least=True)
        optimizer.close()


def figures() -> Iterator[Figure]:
    return figures_of(__name__, "ways")


if __name__ == "__main__":
    say({"ways": _ways}, seconds=50)
