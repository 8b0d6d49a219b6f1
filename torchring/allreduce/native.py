"""Native all-reduce: the packed bucket is handed to the engine's own collective (Gloo, MPI).

Where the engine has threads of its own, as Gloo does, a bucket leaves in the hook that has filled it, and nobody waits
before the end of backward. Ranks do not compare tags, which would be a message in front of every bucket. All ranks
start the buckets of a round in plan order. A rank that has broken a round off voids the buckets that are left, before
it begins another round. So the n-th reduction is that of the same bucket on all ranks, and its last element says how
many ranks have voided it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchring.allreduce.contract import NonFinite, blame, first_non_finite, is_finite, tag_mismatch
from torchring.errors import PlanMismatchError, RingError, in_step
from torchring.transport.contract import Transfer, Transport


@dataclass(frozen=True)
class NativeWire:
    tensor: torch.Tensor
    whole: torch.Tensor  # the same memory, for the all-reduce's writes, and one element that counts ranks


class PendingNative:
    """One all-reduce of the engine. See `PendingReduction`."""

    def __init__(self, whole: torch.Tensor, scale: float, transport: Transport, *, is_void: bool = False) -> None:
        self.span: tuple[float, float] | None = None
        self._whole = whole
        self._buffer = buffer = whole[:-1]
        self._is_void = is_void
        self._transport = transport
        self._result: NonFinite | None = None
        self._started = time.perf_counter()
        self._suspect = first_non_finite(buffer)  # the sum replaces what this rank has contributed
        if buffer.dtype.itemsize == 2 and scale != 1.0:
            buffer.mul_(scale)  # the engine sums in 16 bits
            scale = 1.0
        self._scale = scale
        whole[-1:].fill_(float(is_void))
        self._transfer: Transfer | None = transport.start_all_reduce(whole)

    def advance(self) -> bool:
        return True

    def contribute(self) -> None:
        """Do nothing: the engine proceeds by itself, or in `wait`."""

    def wait(self) -> NonFinite | None:
        if self._transfer is None:
            return self._result
        self._transfer.wait()
        self._transfer = None
        if 0 < float(self._whole[-1]) < self._transport.size:
            raise self._transport.fail(self._broken_off())
        if not scale_and_check(self._buffer, self._scale):
            # All ranks hold the same bits, so either all ranks come here or none.
            suspects = self._transport.all_gather(-1 if self._suspect is None else self._suspect)
            self._result = blame(self._buffer, range(self._transport.size), suspects)
        self.span = self._started, time.perf_counter()
        return self._result

    def _broken_off(self) -> PlanMismatchError:
        """Collective: the error if some ranks have voided what the others have reduced."""
        rank, voids = self._transport.rank, self._transport.all_gather(int(self._is_void))
        culprit = voids.index(1)
        return PlanMismatchError(
            f"a backward was broken off on rank {culprit} after part of its gradients had left, and others went on",
            rank=rank,
            peers=(culprit,),
        )


class NativeAllReduce:
    """The engine's own all-reduce. See `AllReduce`, where the engine proceeds by itself; else `BlockingAllReduce`.

    Gloo sums 16-bit wires in 16 bits. MPI has no 16-bit types, so `open_wires` raises ValueError.

    Args:
        transports: one for each lane. `start` uses the first one.
    """

    algorithm = "native"
    in_background = True

    def __init__(self, transports: Sequence[Transport]) -> None:
        self._transports = transports
        self.num_lanes = len(transports)

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[NativeWire]:
        transport = self._transports[0]
        for _, dtype in specs:
            if not transport.sums(dtype):
                text = f"algorithm='native' under {transport.engine} does not reduce {dtype}; use algorithm='ring'"
                raise in_step(ValueError(text))
        wholes = [torch.zeros(numel + 1, dtype=dtype, device="cpu") for numel, dtype in specs]
        return [NativeWire(whole.data[:-1], whole) for whole in wholes]

    def start(self, wire: NativeWire, *, scale: float = 1.0, tag: int = 0) -> PendingNative:
        return PendingNative(wire.whole, scale, self._transports[0])

    def void(self, wire: NativeWire) -> PendingNative:
        return PendingNative(torch.zeros_like(wire.whole), 1.0, self._transports[0], is_void=True)

    def all_reduce(self, wire: NativeWire, *, scale: float = 1.0, tag: int = 0, lane: int = 0) -> NonFinite | None:
        transport = self._transports[lane]
        try:
            for rank, other in enumerate(transport.all_gather(tag)):
                if other != tag:
                    raise tag_mismatch(transport.rank, tag, rank, other)
            return PendingNative(wire.whole, scale, transport).wait()
        except RingError as error:
            self.fail(error)  # in the other lanes, too
            raise

    def fail(self, error: RingError) -> None:
        for transport in self._transports:
            transport.fail(error)

    def close(self) -> None:
        for transport in self._transports:
            transport.close()


def scale_and_check(buffer: torch.Tensor, scale: float) -> bool:
    """Multiply `buffer` by `scale`. True if all results are finite. One pass where PyTorch has one: in fp32."""
    if buffer.dtype != torch.float32 or scale == 1.0:
        return is_finite(buffer.mul_(scale) if scale != 1.0 else buffer)
    found = torch.zeros(1, device="cpu")
    torch._amp_foreach_non_finite_check_and_unscale_([buffer], found, torch.tensor(scale, device="cpu"))
    return not found.item()
