"""Collectives of scripts on a device: NCCL moves the tensors, in a stream of its own. The host waits for no device, but
for the scalar products of Adasum.

Ranks compare on the CPU what they call, in one small message, before anything is launched. So what does not fit
together is an error, and never a device that waits for ever. A watchdog ends what waits for a rank that is gone.

      script's stream   ... computes the tensor ------------------------------ [hold] uses the result
      collectives                          [follow] 16 bits to fp32, NCCL, back
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Final, TypeVar

import torch

from torchring.accelerators import accelerator_of
from torchring.collectives import operations
from torchring.collectives.service import SHUT_DOWN, Collectives, collectives_of
from torchring.collectives.signature import Signature
from torchring.devices.cuda import Backend as Library
from torchring.devices.cuda import CudaAccelerator, CudaMark, CudaStream
from torchring.devices.engines import all_gather, all_reduce, broadcast
from torchring.devices.opening import open_collectives
from torchring.devices.stream import OnStream
from torchring.errors import PeerLostError, TopologyError
from torchring.world import World

_T = TypeVar("_T")
_logger: Final = logging.getLogger("torchring")


class Aside:
    """Tensors of a device that another thread works on, in a stream of its own, while the script's streams go on.

    Made by the thread that passes the tensors. Raises ValueError if a graph is captured there.
    """

    def __init__(self, accelerator: CudaAccelerator, tensors: Sequence[torch.Tensor]) -> None:
        if accelerator.is_capturing():
            raise ValueError(
                "a collective was called while a CUDA graph is captured, whose replays would not tell the other ranks; "
                "call it before or after the graph"
            )
        self.accelerator, self.tensors = accelerator, tensors
        self.ready = accelerator.mark_current()  # when the script's stream has computed the tensors
        self.end: CudaMark | None = None  # of the work on them, once it is launched

    def wait(self, results: Sequence[torch.Tensor]) -> None:
        """Have the caller's current stream wait for the work, which gave `results`. The host does not wait."""
        assert self.end is not None
        self.end.hold_current()
        self.accelerator.join((), results)


class DeviceCollectives:
    """The `Backend` of `collectives` for tensors on a device: the methods that move these.

    What NCCL does not do goes through the CPU, and is said once: if it does not connect, unequal rows, all_to_all.
    """

    on_cpu = False

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._world = collectives.world
        self._opened: dict[tuple[int, ...], OnStream | None] = {}  # by the devices of all ranks
        self._beside: dict[torch.device, CudaStream] = {}
        self._said: set[str] = set()

    def instead_of(self, backend: operations.Backend) -> Any:
        """What moves tensors on a device, in an operation of the collectives, which have `backend`."""
        return self if self._world.size > 1 else backend

    def run_aside(self, asides: Sequence[Aside], work: Callable[..., _T], *arguments: Any) -> _T:
        """What `work` returns, which uses the tensors of `asides`. Always called by one thread."""
        results: list[_T] = []

        def run() -> None:
            for aside in asides:
                aside.ready.hold_current()
                aside.accelerator.join((), aside.tensors)
            results.append(work(*arguments))
            for aside in asides:
                aside.end = aside.accelerator.mark_current()

        accelerator = asides[0].accelerator
        if accelerator.device not in self._beside:
            self._beside[accelerator.device] = accelerator.open_stream()
        self._beside[accelerator.device].run(run)
        return results[0]

    def _by_cpu(self, what: str, why: str) -> operations.Backend:
        """The backend on the CPU, after a warning that `what` takes tensors there."""
        if what not in self._said and self._world.rank == 0:
            _logger.warning("tensors on a GPU go through the CPU in %s, and the host waits: %s", what, why)
        self._said.add(what)
        return self._collectives.opened()

    def all_reduce(self, data: torch.Tensor, op: str, signature: Signature) -> None:
        stream, _ = self._agree(data, signature)
        if stream is not None:
            keeps_nan = op in ("min", "max") and data.is_floating_point()
            combine = partial(operations.combine_by, data=data, op=op, size=self._world.size, keeps_nan=keeps_nan)
            self._run(stream, data, lambda library: combine(partial(all_reduce, library)))
        else:
            self._collectives.opened().all_reduce(on_cpu := data.cpu(), op, signature)
            data.copy_(on_cpu)

    def broadcast(self, data: torch.Tensor, src: int, signature: Signature) -> None:
        stream, _ = self._agree(data, signature)
        if stream is not None:
            self._run(stream, data, lambda library: broadcast(library, data, src))
        else:
            self._collectives.opened().broadcast(on_cpu := data.cpu(), src, signature)
            data.copy_(on_cpu)

    def all_gather(self, data: torch.Tensor, signature: Signature) -> list[torch.Tensor]:
        stream, sizes = self._agree(data, signature)
        if stream is not None and len(set(sizes)) == 1:
            gathered = data.new_empty(sum(sizes))
            self._run(stream, gathered, lambda library: all_gather(library, gathered, data))
            return list(torch.split(gathered, sizes))
        if stream is not None:
            self._by_cpu(signature.operation, "ranks have different numbers of rows")
        return self._collectives.opened().all_gather(data.cpu(), signature)

    def all_to_all(self, pieces: Sequence[torch.Tensor], signature: Signature) -> list[torch.Tensor]:
        backend = self._by_cpu(signature.operation, "it does not use NCCL")
        return backend.all_to_all([piece.cpu() for piece in pieces], signature)

    def start_exchange(self, data: bytes, signature: Signature) -> Callable[[operations.Meanwhile], list[bytes]]:
        return self._collectives.opened().start_exchange(data, signature)

    def _agree(self, data: torch.Tensor, signature: Signature) -> tuple[OnStream | None, list[int]]:
        """Collective: compare signatures. Returns what works on the device, None for the CPU; and all ranks' sizes."""
        mine = b"%d %d" % (data.device.index or 0, data.numel())
        said = self.start_exchange(mine, _on_device(signature, data.device.type))(None)
        indices, sizes = zip(*(map(int, each.split()) for each in said), strict=True)
        if indices not in self._opened:
            name = f"{self._collectives.name}{len(self._opened)}"
            try:
                opened = open_collectives(self._collectives, name, accelerator_of(data.device))
                self._world.on_failure(opened)
                self._world.on_close(opened.close)
                if not self._world.is_open:  # by now
                    opened.close()
                self._opened[indices] = opened
            except TopologyError as error:  # on all ranks
                self._by_cpu("collectives", error.message)
                self._opened[indices] = None
        return self._opened[indices], list(sizes)

    def _run(self, stream: OnStream, data: torch.Tensor, work: Callable[[Library], None]) -> None:
        """Run `work`, which writes `data`. If it is aborted, `data` is NaN, and bytes have all bits set."""
        if not data.numel():
            return
        if not self._world.is_open:
            raise PeerLostError(SHUT_DOWN)
        engine, aborted = stream.engine, torch.empty(1, dtype=torch.int32, device=data.device)
        nothing = torch.nan if data.is_floating_point() else torch.iinfo(data.dtype).max

        def run() -> None:
            assert engine.backend is not None
            work(engine.backend)
            aborted.copy_(engine.abort_word, non_blocking=True)
            data.masked_fill_(aborted.view(torch.bool)[:1], nothing)  # by the byte that is 0 or 1

        stream.run(run, aborted)
        torch.autograd.graph.increment_version(data)


@lru_cache(256)
def _on_device(signature: Signature, kind: str) -> Signature:
    """So that ranks whose tensors are on the CPU get an error."""
    return replace(signature, tensor=f"{signature.tensor} on {kind}")


def of_script(world: World) -> DeviceCollectives:
    """Those of the functions that a script calls, of which a world has one."""
    return DeviceCollectives(collectives_of(world))
