"""Native all-reduce: the packed bucket is handed to the engine's own collective (Gloo, MPI).

The engine has threads of its own, so a bucket leaves in the hook that has filled it, and nobody waits before the end of
backward. Ranks do not compare which bucket they reduce, which would be a message in front of every bucket. All ranks
start the buckets of a reduction in plan order. A rank that has aborted a reduction sends zeros for each bucket that is
left, before it begins the next one. So the n-th all-reduce is that of the same bucket on all ranks, and the message at
the end of the reduction tells all ranks what has happened.

Gloo's all-reduce is a ring: each link carries 2(N-1)/N of the buffer. 16-bit values are rounded once per hop, so the
error of an element is at most (N-1) u sum|x| with u the unit roundoff of the wire dtype.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchring.errors import RingError, in_step
from torchring.transport.contract import Transport


@dataclass(eq=False)
class NativeWire:
    """See `Wire`. whole: the same memory, for the all-reduce's writes."""

    tensor: torch.Tensor
    whole: torch.Tensor


class NativeWork:
    """One all-reduce of a bucket. See `BucketWork`."""

    def __init__(self, buffer: torch.Tensor, transport: Transport, *, is_aborted: bool = False) -> None:
        self.span: tuple[float, float] | None = None
        self._started = time.perf_counter()
        self._transfer = (transport.start_nothing if is_aborted else transport.start_all_reduce)(buffer)

    def advance(self, *, waits: bool = False) -> bool:
        """The engine proceeds by itself."""
        return True

    def wait(self) -> None:
        if self.span is None:
            self._transfer.wait()
            self.span = self._started, time.perf_counter()


class NativeAllReduce:
    """The engine's own all-reduce. See `AllReduce`."""

    algorithm = "native"
    in_background = True

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[NativeWire]:
        check_dtypes(self._transport, specs)
        wholes = [torch.zeros(numel, dtype=dtype, device="cpu") for numel, dtype in specs]
        return [NativeWire(whole.data, whole) for whole in wholes]

    def start(self, wire: NativeWire) -> NativeWork:
        return NativeWork(wire.whole, self._transport)

    def abort_bucket(self, wire: NativeWire) -> NativeWork:
        return NativeWork(wire.whole, self._transport, is_aborted=True)

    def fail(self, error: RingError) -> None:
        self._transport.fail(error)

    def close(self) -> None:
        self._transport.close()


def check_dtypes(transport: Transport, specs: Sequence[tuple[int, torch.dtype]]) -> None:
    """Raise ValueError if the engine does not sum a dtype."""
    for _, dtype in specs:
        if not transport.sums(dtype):
            raise in_step(ValueError(f"{transport.engine} does not reduce {dtype} between hosts"))
