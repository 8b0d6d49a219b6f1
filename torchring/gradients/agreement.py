"""Whether a reduction was finite, and how long it took. For reductions on a device, see `devices/agreement.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from torchring.allreduce import AllReduce, Wire
from torchring.gradients.bucket import Bucket
from torchring.gradients.hooks import StreamNotes
from torchring.gradients.packing import Packing, Suspect, first_non_finite, slot_at
from torchring.gradients.plan import Plan
from torchring.gradients.reduction import NonFiniteGradient, Reduction


@dataclass
class Timing:
    """Milliseconds in all-reduce ("busy"), and those during which backward stood still ("exposed").

    The totals leave out the first reduction, in which ranks also wait for each other to get going.
    """

    last_busy_ms: float = 0.0
    last_exposed_ms: float = 0.0
    total_busy_ms: float = 0.0
    total_exposed_ms: float = 0.0
    num_timed: int = -1  # reductions in the totals

    def add(self, busy_seconds: float, exposed_seconds: float) -> None:
        """Count one more reduction."""
        self.last_busy_ms, self.last_exposed_ms = busy_seconds * 1e3, exposed_seconds * 1e3
        self.num_timed += 1
        if self.num_timed > 0:
            self.total_busy_ms += self.last_busy_ms
            self.total_exposed_ms += self.last_exposed_ms


class Agreement:
    """Ends the reductions of one optimizer. `DeviceAgreement` overrides this where a device reduces."""

    knows_at_once = True  # `agree` finds all that is not finite, so that `find_non_finite` is not collective
    starts_at_once = True  # a bucket leaves without a wait for other ranks, which may wait in another all-reduce
    stream_notes: StreamNotes | None = None  # what hooks call on a device, see `hooks.make_hook`
    works: Sequence[Any] = ()  # the all-reduces of the last reduction's buckets, on a device, if it was dated

    def __init__(self, all_reduce: AllReduce[Any], timing: Timing, num_ranks: int) -> None:
        self.overlap = "thread" if all_reduce.in_background else "inline"  # or "stream": for `stats()`
        self._all_reduce = all_reduce
        self._timing = timing
        self._num_ranks = num_ranks
        self._suspects: list[Suspect] = []  # of this rank, in this reduction

    def open_wires(self, plan: Plan, scale: float) -> Sequence[tuple[Wire, Packing]]:
        """Collective: for each bucket its wire buffer, and what makes its copies. `scale`: see `Packing`."""
        wires = self._all_reduce.open_wires(wires_of(plan))
        return [
            (wire, Packing(scale, bucket, wire.tensor, self._num_ranks, self._suspects))
            for bucket, wire in zip(plan.buckets, wires, strict=True)
        ]

    def is_captured(self) -> bool:
        """Whether a graph records what backward launches."""
        return False

    def follow_current_stream(self) -> None:
        """What is reduced next has been written on the current stream of the device."""

    def begin(self, current: Reduction) -> None:
        """A reduction begins. Raises what has ended the all-reduce."""
        self._suspects.clear()

    def backward_is_over(self) -> None:
        """The host has run the whole backward, and is about to wait for the buckets."""

    def tell(self, current: Reduction, buckets: Sequence[Bucket]) -> None:
        """Every gradient is packed. Set the fields `non_finite` and `overflowed` of the message."""
        if self._suspects:
            current.mine["overflowed"] = True
            found = [(plan.index, element, plan) for plan, element in self._suspects if element is not None]
            if found:
                _, element, plan = min(found, key=lambda each: each[:2])
                current.mine["non_finite"] = 1 + plan.slots[slot_at(plan, element)].parameter

    def agree(self, current: Reduction, buckets: Sequence[Bucket]) -> None:
        """Every bucket is REDUCED, and ranks know `current.said`. Sets `non_finite` of the reduction."""
        self._timing.add(current.busy_seconds, current.exposed_seconds)
        said = current.heard.by_rank
        if (rank := next((rank for rank, found in enumerate(said["non_finite"]) if found), None)) is not None:
            index = int(said["non_finite"][rank]) - 1
            bucket = next(each for each in buckets if index in (slot.parameter for slot in each.plan.slots))
            slot = next(i for i, each in enumerate(bucket.plan.slots) if each.parameter == index)
            current.non_finite = _non_finite(rank, bucket, slot)
        elif any(said["overflowed"]):
            for bucket in buckets:  # all ranks look at the same bits
                if (element := first_non_finite(bucket.wire.tensor)) is not None:
                    current.non_finite = _non_finite(None, bucket, slot_at(bucket.plan, element))
                    return

    def find_non_finite(self) -> NonFiniteGradient | None:
        """Collective, after `agree`: the reduction's first NaN or infinity, if `agree` could not know of it yet."""
        return None

    def poll(self) -> None:
        """Take in what a device has finished since. Raises what has ended the all-reduce."""

    def wait_for_device(self) -> None:
        """Wait until a device has finished all reductions. The buckets are about to be replaced."""


def _non_finite(rank: int | None, bucket: Bucket, slot: int) -> NonFiniteGradient:
    # Looked up before a step: this rank may have no gradient before the bucket hands out the result.
    return NonFiniteGradient(rank, bucket.names[slot], partial(getattr, bucket.parameters[slot], "grad"))


def wires_of(plan: Plan) -> list[tuple[int, torch.dtype]]:
    """(elements, dtype) of each bucket's wire buffer."""
    return [(bucket.numel, bucket.wire_dtype) for bucket in plan.buckets]
