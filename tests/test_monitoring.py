"""`metrics()`: its names are those of its docstring."""

from __future__ import annotations

import re

import torch

import torchring
from torchring.default_world import default_world
from torchring.observe.recorder.writer import recorder_of


def test_the_docstring_names_every_figure() -> None:
    torchring.metrics()  # begins to record
    model = torch.nn.Linear(4, 4)
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(3):
        model(torch.ones(6, 4)).sum().backward()
        optimizer.step()
    recorder_of(default_world()).noise_scale = 12.0  # a world of one has none
    names = {name.removeprefix("torchring_") for name in torchring.metrics()}
    assert {*re.findall(r"torchring_(\w+)", torchring.metrics.__doc__ or "")} == names
