"""Native all-reduce: the packed bucket is handed to the engine's own collective (Gloo, MPI).

The engine has threads of its own, so a bucket leaves in the hook that has filled it, and nobody waits before the end of
backward. Ranks do not compare tags, which would be a message in front of every bucket. All ranks start the buckets of a
reduction in plan order. A rank that has aborted a reduction sends a NaN for each bucket that is left, before it begins
the next one. So the n-th all-reduce is that of the same bucket on all ranks, and all ranks look for the origin of the
NaN, and find out.

Gloo's all-reduce is a ring: each link carries 2(N-1)/N of the buffer. 16-bit values are rounded once per hop, so the
error of an element is at most (N-1) u sum|x| with u the unit roundoff of the wire dtype.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from torchring.allreduce.contract import (
    NonFinite,
    aborted,
    first_non_finite,
    is_finite,
)
from torchring.errors import RingError, in_step
from torchring.transport.contract import Transport

_ELEMENTS: Final = 1 << 40  # more than a wire has
_NOTHING: Final = -1
_ABORTED: Final = -2


class EngineSum:
    """One all-reduce of the engine that has been started, and the look for NaN and infinity in its result.

    Args:
        buffer: [n] on the ranks of `transport`. `wait` leaves scale * sum in it.
        found: the origin of the first NaN or infinity in this rank's `buffer`, None if there is none.
        is_marked: the last element of `buffer` is a mark, see `NativeWire`. Otherwise all ranks look at the result.
        lookups: the transport on which ranks look for the origin of a NaN. By default `transport`: then all ranks have
            to start the same sums before the first wait.
        is_aborted: this rank has aborted the reduction, and contributes nothing.
    """

    def __init__(
        self,
        transport: Transport,
        buffer: torch.Tensor,
        scale: float,
        found: NonFinite | None,
        *,
        is_marked: bool = False,
        lookups: Transport | None = None,
        is_aborted: bool = False,
    ) -> None:
        self._buffer = buffer[:-1] if is_marked else buffer
        self._mark = buffer[-1:] if is_marked else None
        self._scale = scale
        self._lookups = lookups or transport
        self._found = _NOTHING
        if is_aborted:
            buffer[:1].fill_(math.nan)
            buffer[-1:].fill_(math.nan)
            self._found = _ABORTED
        elif found is not None and found.rank is not None:
            self._found = found.rank * _ELEMENTS + found.element
        self._transfer = transport.start_all_reduce(buffer)

    def wait(self) -> NonFinite | None:
        """Returns the origin of the first NaN or infinity. Raises PlanMismatchError unless all or none have aborted."""
        self._transfer.wait()
        if self._mark is not None and math.isfinite(self._mark):
            return None
        if scale_and_check(self._buffer, self._scale):
            return None
        # All ranks hold the same bits, so either all ranks come here or none.
        lookups = self._lookups
        everybody = lookups.all_gather(self._found)
        if _ABORTED in everybody:
            if set(everybody) == {_ABORTED}:
                return None
            raise lookups.fail(aborted(lookups.rank, lookups.ranks[everybody.index(_ABORTED)]))
        for found in everybody:
            if found != _NOTHING:
                return NonFinite(*divmod(found, _ELEMENTS))
        return NonFinite(None, first_non_finite(self._buffer) or 0)


@dataclass(eq=False)
class NativeWire:
    """See `Wire`.

    Attributes:
        whole: the same memory, for the all-reduce's writes, and one element more: the mark. If it is finite after the
            sum, the result is finite, too, and no rank has to look at it.
        scale_first: inputs are scaled and looked at where they are packed, and whoever packs calls `mark`. Otherwise
            inputs of 16 bits are looked at by their extremes, and wider ones before and after the sum.
        found: index of the first NaN or infinity that this rank has packed. None if there is none.
    """

    tensor: torch.Tensor
    whole: torch.Tensor
    scale_first: bool = False
    found: int | None = None

    def look(self, num_ranks: int) -> None:
        """Mark the wire if the sum of this many inputs may be not finite, by the extremes of this one."""
        self.clear()
        limit = torch.finfo(self.whole.dtype).max / num_ranks / 2
        least, most = self.whole.aminmax()
        if not (-limit <= least.item() and most.item() <= limit):  # a NaN is both extremes
            self.mark(first_non_finite(self.tensor))

    def mark(self, element: int | None) -> None:
        """The result may be not finite. `element` is: this rank's input already holds a NaN or an infinity there."""
        self.whole[-1:].fill_(math.nan)
        if self.found is None:
            self.found = element

    def clear(self) -> None:
        """Another reduction begins."""
        self.whole[-1:].zero_()
        self.found = None


class NativeWork:
    """One all-reduce of a bucket. See `BucketWork`."""

    def __init__(self, wire: NativeWire, scale: float, transport: Transport, *, is_aborted: bool = False) -> None:
        self.span: tuple[float, float] | None = None
        self._started = time.perf_counter()
        self._result: NonFinite | None = None
        buffer = torch.zeros_like(wire.whole) if is_aborted else wire.whole
        looks = wire.whole.dtype.itemsize == 2  # partial sums of 16 bits travel
        if looks and not is_aborted:
            if scale != 1.0:
                buffer.mul_(scale)
            wire.look(len(transport.ranks))
        is_marked = looks or wire.scale_first
        # Without a mark: the sum replaces what this rank has contributed.
        element = wire.found if is_marked else first_non_finite(buffer)
        found = None if element is None else NonFinite(transport.rank, element)
        self._sum = EngineSum(
            *(transport, buffer, 1.0 if looks else scale, found),
            is_marked=is_marked,
            is_aborted=is_aborted,
        )

    def advance(self) -> bool:
        return True

    def contribute(self) -> None:
        """Do nothing: the engine proceeds by itself."""

    def wait(self) -> NonFinite | None:
        if self.span is None:
            self._result = self._sum.wait()
            self.span = self._started, time.perf_counter()
        return self._result


class NativeAllReduce:
    """The engine's own all-reduce. See `AllReduce`.

    Args:
        in_background: whether buckets go on after `start` has returned. If not, `start` waits for them.
    """

    algorithm = "native"

    def __init__(self, transport: Transport, *, in_background: bool = True) -> None:
        self._transport = transport
        self.in_background = in_background

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[NativeWire]:
        check_dtypes(self._transport, specs)
        wholes = [torch.zeros(numel + 1, dtype=dtype, device="cpu") for numel, dtype in specs]
        return [NativeWire(whole.data[:-1], whole) for whole in wholes]

    def start(self, wire: NativeWire, *, scale: float = 1.0, tag: int = 0) -> NativeWork:
        return self._start(NativeWork(wire, scale, self._transport))

    def abort_bucket(self, wire: NativeWire) -> NativeWork:
        return self._start(NativeWork(wire, 1.0, self._transport, is_aborted=True))

    def _start(self, work: NativeWork) -> NativeWork:
        if not self.in_background:
            work.wait()
        return work

    def fail(self, error: RingError) -> None:
        self._transport.fail(error)

    def close(self) -> None:
        self._transport.close()


def check_dtypes(transport: Transport, specs: Sequence[tuple[int, torch.dtype]]) -> None:
    """Raise ValueError if the engine does not sum a dtype."""
    for _, dtype in specs:
        if not transport.sums(dtype):
            raise in_step(ValueError(f"{transport.engine} does not reduce {dtype} between hosts"))


def scale_and_check(buffer: torch.Tensor, scale: float) -> bool:
    """Multiply `buffer` by `scale`. True if all results are finite. One pass where PyTorch has one: in fp32."""
    if buffer.dtype != torch.float32 or scale == 1.0:
        return is_finite(buffer.mul_(scale) if scale != 1.0 else buffer)
    found = torch.zeros(1, device="cpu")
    torch._amp_foreach_non_finite_check_and_unscale_([buffer], found, torch.tensor(scale, device="cpu"))
    return not found.item()
