"""The collectives of a world, in the order in which they are called."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch

from torchring.collectives import operations
from torchring.collectives.gloo import GlooCollectives
from torchring.collectives.interruption import InterruptionGuard
from torchring.collectives.operations import Backend, SingleRank
from torchring.collectives.shared_memory import SharedMemoryCollectives
from torchring.collectives.signature import Signature, fingerprint, first_difference
from torchring.dynamo import run_eagerly
from torchring.errors import PlanMismatchError, in_step
from torchring.memory.host import bytes_of
from torchring.threads import SerialThread
from torchring.transport.c10d import C10dTransport
from torchring.world import World

_T = TypeVar("_T")
_BATCH_BYTES: Final = 8 << 20


class Collectives:
    """One stream of collectives of a world, in the order in which they are called. Opening it is collective.

    Args:
        name: of the stream; unique in this world, the same on every rank.
    """

    def __init__(self, world: World, name: str = "collectives") -> None:
        self.world = world
        self._name = name
        # Between hosts it is opened with the first call: a thread and a connection for each rank.
        self._backend: Backend | None = None
        if world.size == 1:
            self._backend = SingleRank()
        elif world.shares_memory and world.host is not None:
            self._backend = SharedMemoryCollectives(world.host)
        self._background = SerialThread(f"torchring-{name}")
        self._calls = InterruptionGuard(world)
        self._in_background = InterruptionGuard(world)
        self._last: Future[Any] | None = None
        world.on_close(self.close)

    @run_eagerly
    def run(self, what: str, operation: Callable[[Backend], _T]) -> _T:
        """Now, or after the asynchronous ones that were called before. Error messages call it `what`."""

        def in_turn() -> _T:
            if self._last is not None and not self._last.done():
                return self._start(what, operation).result()
            return operation(self._opened())

        return self._calls.run(what, in_turn)

    @run_eagerly
    def start(self, what: str, operation: Callable[[Backend], _T]) -> Future[_T]:
        """On the background thread."""
        return self._calls.run(what, lambda: self._start(what, operation))

    def _start(self, what: str, operation: Callable[[Backend], _T]) -> Future[_T]:
        future = self._background.submit(lambda: self._in_background.run(what, lambda: operation(self._opened())))
        self._last = future
        return future

    def _opened(self) -> Backend:
        if self._backend is None:
            world = self.world
            assert world.rendezvous is not None
            transport = C10dTransport(world.rendezvous, self._name, world.host)
            world.on_failure(transport)
            self._backend = GlooCollectives(transport)
        return self._backend

    def close(self) -> None:
        self._background.close()
        if self._backend is not None:
            self._backend.close()
        _of_world.pop(self.world, None)

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        return self.run("all_reduce", lambda backend: operations.all_reduce(backend, tensor, op))

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        return self.run("broadcast", lambda backend: operations.broadcast(backend, tensor, src))

    def broadcast_together(self, tensors: Iterable[torch.Tensor], src: int) -> None:
        """Many at once, in messages of some MiB: between hosts, one message for each of 800 took 2 s."""
        tensors = list(tensors)
        for checked in tensors:
            operations.check_dense(checked)
            operations.check_writable(checked)
        batch: list[torch.Tensor] = []
        num_bytes = 0
        for tensor in [*tensors, None]:
            if batch and (tensor is None or num_bytes + tensor.nbytes > _BATCH_BYTES):
                flat = torch.cat([bytes_of(operations.plain(small)) for small in batch])
                self.broadcast(flat, src)
                if self.world.rank != src:
                    operations.hand_out(flat, batch)
                batch, num_bytes = [], 0
            if tensor is not None and tensor.nbytes > _BATCH_BYTES:
                self.broadcast(tensor, src)
            elif tensor is not None:
                batch.append(tensor)
                num_bytes += tensor.nbytes

    def broadcast_bytes(self, data: bytes | None, src: int) -> bytes:
        """`data` of rank `src`, which alone has to pass it."""

        def operation(backend: Backend) -> bytes:
            mine = data if self.world.rank == src and data is not None else b""
            call = Signature("broadcast_object", f"src={src}")
            length = torch.tensor([len(mine)], device="cpu")
            backend.broadcast(bytes_of(length), src, call)
            buffer = (
                operations.tensor_of(mine)
                if self.world.rank == src
                else torch.empty(int(length), dtype=torch.uint8, device="cpu")
            )
            backend.broadcast(buffer, src, call)
            return buffer.numpy().tobytes()

        return self.run("broadcast_object", operation)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Everybody's `data`, in rank order."""
        call = Signature("all_gather_object")

        def operation(backend: Backend) -> list[bytes]:
            return [part.numpy().tobytes() for part in backend.all_gather(operations.tensor_of(data), call)]

        return self.run("all_gather_object", operation)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's tensor, in rank order; sizes of dimension 0 may differ."""
        return self.run("all_gather", lambda backend: operations.all_gather(backend, tensor))

    def check_equal(self, description: Sequence[str]) -> None:
        """Raise PlanMismatchError on every rank, naming the first difference, unless all ranks pass the same lines."""
        if len(set(self.all_gather_bytes(fingerprint(description)))) == 1:
            return
        everybody = [json.loads(text) for text in self.all_gather_bytes(json.dumps(list(description)).encode())]
        others = [rank for rank, theirs in enumerate(everybody) if theirs != everybody[0]]
        raise in_step(PlanMismatchError(first_difference(everybody), rank=self.world.rank, peers=others))

    def raise_together(self, problem: Exception | None, what: str) -> None:
        """Raise `problem`, and PlanMismatchError on ranks that have none where another one has: nobody waits for it.

        `what` goes between that rank's number and its problem: "could not wrap its optimizer".
        """
        text = f"{type(problem).__name__}: {problem}" if problem is not None else ""
        problems = self.all_gather_bytes(text.encode())
        others = [rank for rank, other in enumerate(problems) if other]
        if problem is not None:
            raise in_step(problem)
        if others:
            text = f"rank {others[0]} {what}: {problems[others[0]].decode()}"
            raise in_step(PlanMismatchError(text, rank=self.world.rank, peers=others))

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.run("barrier", lambda backend: backend.barrier(Signature("barrier")))

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank."""
        return bool(self.all_reduce(torch.tensor([int(flag)], device="cpu"), "max"))


@dataclass(frozen=True)
class _Streams:
    script: Collectives
    internal: Collectives


_of_world: dict[World, _Streams] = {}


def _streams_of(world: World) -> _Streams:
    """Opened together at the first call, which all ranks make; gone when the world is closed."""
    streams = _of_world.get(world)
    if streams is None:
        with world.opening:
            streams = _of_world.get(world)
            if streams is None:
                streams = _of_world[world] = InterruptionGuard(world).run("the first collective", lambda: _open(world))
    return streams


def _open(world: World) -> _Streams:
    return _Streams(Collectives(world), Collectives(world, "internal"))


def collectives_of(world: World) -> Collectives:
    """The script's collectives, which it calls by themselves or by way of `wrap` and `broadcast_parameters`."""
    return _streams_of(world).script


def internal_collectives_of(world: World) -> Collectives:
    """What torchring itself calls, in and after a backward."""
    return _streams_of(world).internal
