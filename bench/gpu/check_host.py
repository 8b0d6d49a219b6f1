"""Figures: the host's time and its calls of CUDA for a bucket, a step and small parameters. See `bench.gpu.check`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist

import torchring
from torchring.bench.gpu.buckets import time_backward
from torchring.bench.gpu.check import Figure
from torchring.bench.gpu.timing import Row
from torchring.bench.gpu.training import RIVALS, connected
from torchring.bench.step import sgd


def figures() -> Iterator[Figure]:
    """A step in few buckets and one of the same gradients in many say what a bucket costs, and what a step."""
    torchring.init()
    shapes = [torch.Size([2**18])] * 10
    few, many = (
        time_backward(shapes, {"plain": sgd, "torchring": partial(connected, bucket_mb=mb)}) for mb in (100, 1)
    )
    for unit, of_a_bucket, of_a_step in (("us", 120, 400), ("CUDA calls", 10, 14)):
        added = [_added(row, unit) for row in (few, many)]
        bucket = (added[1] - added[0]) / (many["buckets"] - few["buckets"])
        yield Figure("the host, for a bucket", bucket, unit, of_a_bucket)
        yield Figure("the host, for a step", added[0] - few["buckets"] * bucket, unit, of_a_step)
    rivals = {"plain": sgd, "torchring": RIVALS["direct"], "ddp": RIVALS["ddp"]}
    small = time_backward([torch.Size([1000])] * 800, rivals)
    us = ", ".join(f"{name} {each['p50']:.0f}" for name, each in small["us"].items())
    name = f"backward of 800 small parameters on the host, {us} us; torchring's over DDP's"
    yield Figure(name, small["share"]["ddp"], "", 1.0)
    dist.destroy_process_group()


def _added(row: Row, unit: str) -> float:
    """What torchring adds."""
    values = row["cuda_calls"] if unit == "CUDA calls" else {name: each["p50"] for name, each in row["us"].items()}
    return float(values["torchring"] - values["plain"])
