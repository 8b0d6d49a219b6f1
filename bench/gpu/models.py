"""Models of the sizes that are trained on GPUs, and the shapes of their gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from torchring.bench.models import Batch, Block, Bottleneck, Workload

Shapes = list[torch.Size]


class Gpt(nn.Module):
    """A transformer with learned positions. The token embedding is also the output layer's weight, as in GPT-2."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return functional.linear(self.norm(self.blocks(x)), self.tokens.weight)


def gpt2(batch: int = 8) -> Workload:
    """GPT-2 small: 12 layers of width 768, 50,257 tokens; sequences of 1024 tokens."""

    def batch_of(seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 50257, (batch, 1025), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    return Workload(Gpt(12, 768, 12, 50257, 1024), batch_of)


def resnet50(batch: int = 64) -> Workload:
    """ResNet-50 for 224 x 224 images."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = 64
    for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(depth):
            layers.append(Bottleneck(channels, width, stride if i == 0 else 1))
            channels = 4 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)]
    return Workload(nn.Sequential(*layers), lambda seed: _images(seed, batch))


def vgg16(batch: int = 64) -> Workload:
    """VGG-16 for 224 x 224 images. Three layers hold nine tenths of the bytes."""
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.Flatten(), nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    return Workload(nn.Sequential(*layers, *head, nn.Linear(4096, 1000)), lambda seed: _images(seed, batch))


def shapes_of(build: Callable[[], Workload]) -> Shapes:
    """The shapes of a model's parameters, in registration order. Allocates no memory for the parameters."""
    with torch.device("meta"):
        return [parameter.shape for parameter in build().model.parameters()]


LISTS: dict[str, Callable[[], Shapes]] = {
    "resnet50": lambda: shapes_of(resnet50),
    "gpt2": lambda: shapes_of(gpt2),
    "vgg16": lambda: shapes_of(vgg16),
    "tiny": lambda: [torch.Size([1000])] * 2000,
    "tiny32": lambda: [torch.Size([32])] * 2000,
}


def _images(seed: int, batch: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(batch, 3, 224, 224, generator=generator)
    return images, torch.randint(0, 1000, (batch,), generator=generator)
