"""Native all-reduce: the packed bucket is handed to the engine's own collective (Gloo, MPI).

Where the engine has threads of its own, as Gloo does, nobody here waits before the end of backward: a bucket leaves in
the hook that has filled it. Nothing but gradients travels. That ranks reduce the same bucket follows from the plan, see
`Launcher.begin`; the control bits of the round confirm it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchring.allreduce.contract import NonFinite, blame, first_non_finite, is_finite
from torchring.errors import RingError, in_step
from torchring.transport.contract import Transfer, Transport


@dataclass(frozen=True)
class NativeWire:
    tensor: torch.Tensor
    buffer: torch.Tensor  # the same memory, for the mover's writes


class PendingNative:
    """One all-reduce of the engine. See `PendingReduction`."""

    def __init__(self, buffer: torch.Tensor, scale: float, transport: Transport) -> None:
        self.span: tuple[float, float] | None = None
        self._buffer = buffer
        self._transport = transport
        self._result: NonFinite | None = None
        self._started = time.perf_counter()
        self._suspect = first_non_finite(buffer)  # the sum replaces what this rank has contributed
        if buffer.dtype.itemsize == 2 and scale != 1.0:
            buffer.mul_(scale)  # the engine sums in 16 bits
            scale = 1.0
        self._scale = scale
        self._transfer: Transfer | None = transport.start_all_reduce(buffer)

    def advance(self) -> bool:
        return True

    def contribute(self) -> None:
        """Do nothing: the engine proceeds by itself, or in `wait`."""

    def wait(self) -> NonFinite | None:
        if self._transfer is None:
            return self._result
        self._transfer.wait()
        self._transfer = None
        if not scale_and_check(self._buffer, self._scale):
            # All ranks hold the same bits, so either all ranks come here or none.
            suspects = self._transport.all_gather(-1 if self._suspect is None else self._suspect)
            self._result = blame(self._buffer, range(self._transport.size), suspects)
        self.span = self._started, time.perf_counter()
        return self._result


class NativeAllReduce:
    """Mover over the engine's all-reduce: a `Mover` where the engine proceeds by itself, else a `BlockingMover`.

    Gloo sums 16-bit wires in 16 bits. MPI has no 16-bit types, so `open_wires` raises ValueError.

    Args:
        transports: one for each lane. A `Mover` uses the first one.
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
        buffers = [torch.zeros(numel, dtype=dtype, device="cpu") for numel, dtype in specs]
        return [NativeWire(buffer.data, buffer) for buffer in buffers]

    def start(self, wire: NativeWire, *, scale: float = 1.0, tag: int = 0) -> PendingNative:
        return PendingNative(wire.buffer, scale, self._transports[0])

    def all_reduce(self, wire: NativeWire, *, scale: float = 1.0, tag: int = 0, lane: int = 0) -> NonFinite | None:
        try:
            return PendingNative(wire.buffer, scale, self._transports[lane]).wait()
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
