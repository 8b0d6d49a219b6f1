"""Native all-reduce: the packed bucket is handed to the engine's own collective (Gloo, MPI).

The engine has threads of its own, so a bucket leaves in the hook that has filled it, and nobody waits before the end of
backward. Ranks do not compare tags, which would be a message in front of every bucket. All ranks start the buckets of a
reduction in plan order. A rank that has broken a reduction off voids the buckets that are left, before it begins the
next one. So the n-th all-reduce is that of the same bucket on all ranks. A rank that voids a bucket sends a NaN, so
that all ranks look for the origin of the NaN, and find out.

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
    broken_off,
    first_non_finite,
    is_finite,
)
from torchring.errors import RingError, in_step
from torchring.transport.contract import Transport

_ELEMENTS: Final = 1 << 40  # more than a wire has
_NO_SUSPECT: Final = -1
_VOID: Final = -2


class EngineSum:
    """One all-reduce of the engine that has been started, and the look for NaN and infinity in its result.

    Args:
        buffer: [n] on the ranks of `transport`. `wait` leaves scale * sum in it.
        suspect: the origin of the first NaN or infinity in this rank's `buffer`, None if there is none.
        is_marked: the last element of `buffer` is a mark, see `NativeWire`. Otherwise all ranks look at the result.
        lookups: the transport on which ranks look for the origin of a NaN. By default `transport`: then all ranks have
            to start the same sums before the first wait.
        is_void: this rank has broken the reduction off, and contributes nothing.
    """

    def __init__(
        self,
        transport: Transport,
        buffer: torch.Tensor,
        scale: float,
        suspect: NonFinite | None,
        *,
        is_marked: bool = False,
        lookups: Transport | None = None,
        is_void: bool = False,
    ) -> None:
        self._buffer = buffer[:-1] if is_marked else buffer
        self._mark = buffer[-1:] if is_marked else None
        self._scale = scale
        self._lookups = lookups or transport
        self._suspect = _NO_SUSPECT
        if is_void:
            buffer[:1].fill_(math.nan)
            buffer[-1:].fill_(math.nan)
            self._suspect = _VOID
        elif suspect is not None and suspect.rank is not None:
            self._suspect = suspect.rank * _ELEMENTS + suspect.element
        self._transfer = transport.start_all_reduce(buffer)

    def wait(self) -> NonFinite | None:
        """Returns the origin of the first NaN or infinity. Raises PlanMismatchError unless all or none have voided."""
        self._transfer.wait()
        if self._mark is not None and math.isfinite(self._mark):
            return None
        if scale_and_check(self._buffer, self._scale):
            return None
        # All ranks hold the same bits, so either all ranks come here or none.
        lookups = self._lookups
        suspects = lookups.all_gather(self._suspect)
        if _VOID in suspects:
            if set(suspects) == {_VOID}:
                return None
            raise lookups.fail(broken_off(lookups.rank, lookups.ranks[suspects.index(_VOID)]))
        for suspect in suspects:
            if suspect != _NO_SUSPECT:
                return NonFinite(*divmod(suspect, _ELEMENTS))
        return NonFinite(None, first_non_finite(self._buffer) or 0)


@dataclass(eq=False)
class NativeWire:
    """See `Wire`.

    Attributes:
        whole: the same memory, for the all-reduce's writes, and one element more: the mark. If it is finite after the
            sum, the result is finite, too, and no rank has to look at it.
        scale_first: inputs are scaled and looked at where they are packed, and whoever packs calls `mark`. Otherwise
            inputs of 16 bits are looked at by their extremes, and wider ones before and after the sum.
        suspect: index of the first NaN or infinity that this rank has packed. None if there is none.
    """

    tensor: torch.Tensor
    whole: torch.Tensor
    scale_first: bool = False
    suspect: int | None = None

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
        if self.suspect is None:
            self.suspect = element

    def clear(self) -> None:
        """Another reduction begins."""
        self.whole[-1:].zero_()
        self.suspect = None


class NativeWork:
    """One all-reduce of a bucket. See `BucketWork`."""

    def __init__(self, wire: NativeWire, scale: float, transport: Transport, *, is_void: bool = False) -> None:
        self.span: tuple[float, float] | None = None
        self._started = time.perf_counter()
        self._result: NonFinite | None = None
        buffer = torch.zeros_like(wire.whole) if is_void else wire.whole
        looks = wire.whole.dtype.itemsize == 2  # partial sums of 16 bits travel
        if looks and not is_void:
            if scale != 1.0:
                buffer.mul_(scale)
            wire.look(len(transport.ranks))
        is_marked = looks or wire.scale_first
        # Without a mark: the sum replaces what this rank has contributed.
        element = wire.suspect if is_marked else first_non_finite(buffer)
        suspect = None if element is None else NonFinite(transport.rank, element)
        self._sum = EngineSum(
            *(transport, buffer, 1.0 if looks else scale, suspect),
            is_marked=is_marked,
            is_void=is_void,
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

    def void(self, wire: NativeWire) -> NativeWork:
        return self._start(NativeWork(wire, 1.0, self._transport, is_void=True))

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
