"""The models that the step benchmarks train, with their batches and losses."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Workload:
    """A model, a function that makes a batch of random data from a seed, and the loss."""

    model: nn.Module
    batch: Callable[..., Batch]

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        inputs, targets = batch
        outputs = model(inputs)
        return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        out: torch.Tensor = x + self.mlp(self.norm2(x))
        return out


class Bottleneck(nn.Module):
    """The residual block of ResNet-50."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.path = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = functional.relu(self.path(x) + self.skip(x))
        return out


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
    return Workload(Gpt(12, 768, 12, 50257, 1024), lambda seed: _tokens(seed, batch, 1024, 50257))


def mlp() -> Workload:
    """10 linear layers of 2048 x 2048, batch 16: 42 M parameters in large tensors, with little arithmetic for each."""
    layers = [layer for _ in range(10) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    return Workload(nn.Sequential(*layers[:-1]), lambda seed: _features(seed, 16, 2048, 2048))


def gpt() -> Workload:
    """A transformer with 6 layers of width 384 and 8192 tokens; batches of 2 sequences of 64 tokens."""
    model = nn.Sequential(
        nn.Embedding(8192, 384), *(Block(384, 6) for _ in range(6)), nn.LayerNorm(384), nn.Linear(384, 8192)
    )

    return Workload(model, lambda seed: _tokens(seed, 2, 64, 8192))


def small() -> Workload:
    """200 x (Linear 64 + LayerNorm 64): 802 tensors of at most 16 KiB. Bookkeeping takes most of the time."""
    layers = [layer for _ in range(200) for layer in (nn.Linear(64, 64), nn.LayerNorm(64))]
    return Workload(nn.Sequential(*layers, nn.Linear(64, 64)), lambda seed: _features(seed, 16, 64, 64))


def vgg(batch: int = 4, side: int = 32) -> Workload:
    """VGG-16 for square images, 1000 classes. Two layers hold two thirds of the bytes, or more for larger images."""
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.Flatten(), nn.Linear(512 * (side // 32) ** 2, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    return Workload(nn.Sequential(*layers, *head, nn.Linear(4096, 1000)), lambda seed: _images(seed, batch, side))


def resnet(batch: int = 4, side: int = 32) -> Workload:
    """ResNet-50 for square images, 1000 classes. Most of the 161 tensors are small."""
    stem = nn.Conv2d(3, 64, 3, 1, 1, bias=False) if side <= 64 else nn.Conv2d(3, 64, 7, 2, 3, bias=False)
    stages: list[nn.Module] = [stem, nn.BatchNorm2d(64), nn.ReLU()]
    if side > 64:
        stages.append(nn.MaxPool2d(3, 2, 1))
    channels = 64
    for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(depth):
            stages.append(Bottleneck(channels, width, stride if i == 0 else 1))
            channels = 4 * width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)]
    return Workload(nn.Sequential(*stages, *head), lambda seed: _images(seed, batch, side))


MODELS: dict[str, Callable[[], Workload]] = {"mlp": mlp, "gpt": gpt, "small": small, "vgg": vgg, "resnet": resnet}


def _features(seed: int, batch: int, inputs: int, classes: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, inputs, generator=generator), torch.randint(0, classes, (batch,), generator=generator)


def _tokens(seed: int, batch: int, length: int, vocabulary: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary, (batch, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def _images(seed: int, batch: int, side: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, side, side, generator=generator), torch.randint(0, 1000, (batch,), generator=generator)
