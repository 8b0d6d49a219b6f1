"""Training in which ranks do not exchange gradients: each rank acts as if all ranks had the gradients that it has.

Hooks, packing and buckets work as always. Wires lie in the same memory as always. The ranks come to differ, so what
they train is worth nothing.

    silence()       before the script calls torchring.wrap, on all ranks

What the script exchanges by itself, such as metrics and the statistics of SyncBatchNorm, is exchanged. So is what
torchring exchanges once: initial parameters, and the order of the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchring import optimizer
from torchring.allreduce import Mover, Wire
from torchring.allreduce.choice import Choice
from torchring.allreduce.device.stream import DeviceWire, OnStream
from torchring.errors import RingError
from torchring.gradients import group, rounds, sync
from torchring.gradients.participants import buffers, replicas, sparse
from torchring.gradients.participants.buffers import BufferSync
from torchring.gradients.plan import Plan
from torchring.gradients.reduction import Reduction
from torchring.world import World


class SilentReduction:
    """A reduction that is over when it starts. See `PendingReduction`."""

    span = None

    def advance(self) -> bool:
        return True

    def contribute(self) -> None: ...

    def wait(self) -> None: ...


class SilentMover:
    """Reduces as if all ranks had contributed what this rank has. See `Mover`.

    Args:
        mover: has the wires. Nothing is sent through it.
        num_ranks: of the world.
    """

    def __init__(self, mover: Mover[Any], num_ranks: int) -> None:
        self.algorithm = mover.algorithm
        self.in_background = mover.in_background
        self._mover = mover
        self._num_ranks = num_ranks

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> Sequence[Any]:
        return self._mover.open_wires(specs)

    def start(self, wire: Wire, *, scale: float = 1.0, tag: int = 0) -> SilentReduction:
        _reduce(wire.tensor.data, scale * self._num_ranks)  # `data` has a version counter of its own
        return SilentReduction()

    def fail(self, error: RingError) -> None:
        self._mover.fail(error)

    def close(self) -> None:
        self._mover.close()


class AloneTogether:
    """Answers as `Collectives` would if all ranks passed what this rank passes."""

    def __init__(self, world: World) -> None:
        self._num_ranks = world.size

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        return tensor.mul_(self._num_ranks) if op == "sum" else tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor] * self._num_ranks

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data] * self._num_ranks

    def any_rank(self, flag: bool) -> bool:
        return flag


def silence() -> None:
    """From now on, optimizers of this process that are wrapped exchange no gradients, and nothing else in a step."""
    open_mover = Reduction._open_mover

    def open_silent(reduction: Reduction, plan: Plan, device: torch.device) -> tuple[Mover[Any], Choice]:
        mover, choice = open_mover(reduction, plan, device)
        num_ranks = reduction.world.size
        if not isinstance(mover, OnStream):
            return SilentMover(mover, num_ranks), choice

        def launch(wire: DeviceWire, scale: float) -> None:
            _reduce(wire.buffer, scale * num_ranks)

        vars(mover._engine)["launch"] = launch
        return mover, choice

    Reduction._open_mover = open_silent  # type: ignore[method-assign,assignment]
    BufferSync.write = _keep_buffers  # type: ignore[method-assign]
    for module in (buffers, group, optimizer, replicas, rounds, sparse, sync):
        vars(module)["internal_collectives_of"] = AloneTogether


def _reduce(buffer: torch.Tensor, factor: float) -> None:
    """What is there is the mean already. With compression, which has divided it, and for sums, it is not."""
    if factor != 1.0:
        buffer.mul_(factor)


def _keep_buffers(self: BufferSync) -> None: ...
