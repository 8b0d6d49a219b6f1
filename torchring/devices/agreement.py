"""Ranks agree at the end of a reduction with the help of a device. See `gradients/agreement.py`.

A device reduces gradients and nothing else. The hosts tell each other the rest in one small message at the end of each
backward (`gradients/reduction.py`), when the device still has to compute most of the reduction. So no host waits for a
device, and a rank that is dead or out of step is found before anybody steps. The message must not come with the next
reduction: a rank that skips changes the mean of all others, and a rank in another reduction has contributed another
step's gradients. How long a reduction took, and whether its gradients were finite, is known when the device has come
that far: in a later reduction. Times take events, each of which costs the host some microseconds: few reductions are
dated.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from torchring.allreduce import Wire
from torchring.collectives.service import internal_collectives_of
from torchring.devices.cuda import CudaMark
from torchring.devices.engines import DeviceWire
from torchring.devices.packing import DevicePacking, slots_of
from torchring.devices.stream import Dated, OnStream
from torchring.devices.watchdog import has_come
from torchring.gradients.agreement import Agreement, Timing, wires_of
from torchring.gradients.bucket import Bucket
from torchring.gradients.packing import Packing
from torchring.gradients.plan import BucketPlan, ParameterSpec, Plan
from torchring.gradients.reduction import NonFiniteGradient, Reduction
from torchring.kernels.chunks import ChunkTable
from torchring.kernels.pack import NOT_FOUND
from torchring.world import World

_IN_INPUT, _IN_SUM = "non_finite", "overflowed"  # what was found, as the message calls it
_FIRST_DATED, _DATED_EVERY = 4, 16  # the first reductions are dated, and then one in so many


class _Opened(NamedTuple):
    """One bucket on a device."""

    plan: BucketPlan
    wire: DeviceWire
    packing: DevicePacking
    report: int  # which of the reports is the wire's


@dataclass
class _Unfinished:
    """A reduction that the device is still busy with, as far as the host knows."""

    works: list[Dated]
    backward_end: CudaMark | None  # of a reduction that is dated
    opened: list[_Opened]
    packed: list[list[tuple[Sequence[int], ChunkTable]]]
    reports: list[torch.Tensor]  # one for each set of wires that was opened together

    def is_over(self) -> bool:
        return all(map(has_come, self.reports)) and (self.backward_end is None or self.backward_end.is_reached())


class DeviceAgreement(Agreement):
    """For reductions on a device."""

    knows_at_once = False

    def __init__(
        self,
        world: World,  # of any size
        all_reduce: OnStream,  # works in a stream of the device
        timing: Timing,  # gets the seconds of every reduction that the device has finished
        specs: Sequence[ParameterSpec],  # all of the optimizer's; this list and the next may grow
        parameters: Sequence[torch.nn.Parameter],
    ) -> None:
        super().__init__(all_reduce, timing, world.size)
        self.overlap = "stream" if all_reduce.in_background else "inline"
        self.starts_at_once = False  # two buckets that wait for their peers may keep each other from running
        self._world = world
        self._all_reduce: OnStream = all_reduce
        self._specs = specs
        self._parameters = parameters
        self._opened: list[_Opened] = []
        self._streams: set[object] = set()  # on which gradients were computed since the reduction began
        self.stream_notes = (all_reduce.accelerator.current_stream, self._streams.add)
        self._unfinished: deque[_Unfinished] = deque()
        self._finding: tuple[str, int] | None = None  # (what, parameter), for the other ranks
        self._backward_end: CudaMark | None = None
        self.works: list[Dated] = []

    def open_wires(self, plan: Plan, scale: float) -> list[tuple[Wire, Packing]]:
        wires = self._all_reduce.open_wires(wires_of(plan))
        return [(wire, self._packing(bucket, wire, scale)) for bucket, wire in zip(plan.buckets, wires, strict=True)]

    def is_captured(self) -> bool:
        return self._all_reduce.accelerator.is_capturing()

    def follow_current_stream(self) -> None:
        self._all_reduce.stream.follow()

    def begin(self, current: Reduction) -> None:
        self.poll()
        is_dated = current.events is not None or current.number < _FIRST_DATED or current.number % _DATED_EVERY == 0
        self._all_reduce.is_dated = is_dated
        self._all_reduce.take_dated()
        if any(self._take_packed()) or self._all_reduce.take_fetched():  # of a reduction that was aborted
            self._all_reduce.clear_reports()
        self._streams.clear()

    def backward_is_over(self) -> None:
        self._backward_end = self._all_reduce.accelerator.mark_current() if self._all_reduce.is_dated else None

    def tell(self, current: Reduction, buckets: Sequence[Bucket]) -> None:
        if found := self._take_finding():
            current.mine[found[0]] = found[1] + 1

    def agree(self, current: Reduction, buckets: Sequence[Bucket]) -> None:
        self.works = self._all_reduce.take_dated()  # of all buckets of this reduction
        reports = self._all_reduce.take_fetched()
        self._unfinished.append(_Unfinished(self.works, self._backward_end, self._opened, self._take_packed(), reports))
        by_rank = current.heard.by_rank
        if found := _first_finding(by_rank[_IN_INPUT], by_rank[_IN_SUM]):
            source, index = found
            # The gradient of that reduction is gone. The parameter shows whether it was trained on.
            trained = self._parameters[index]
            current.non_finite = NonFiniteGradient(source, self._specs[index].name, lambda: trained)

    def find_non_finite(self) -> NonFiniteGradient | None:
        self._all_reduce.accelerator.synchronize()
        self._take_finished()
        what, parameter = self._take_finding() or ("", 0)
        mine = torch.tensor([(parameter + 1) * (what == each) for each in (_IN_INPUT, _IN_SUM)], device="cpu")
        everybody = internal_collectives_of(self._world).all_gather(mine)
        found = _first_finding(*torch.stack(everybody).t().tolist())
        if found is None:
            return None
        source, index = found
        return NonFiniteGradient(source, self._specs[index].name, None)

    def poll(self) -> None:
        self._all_reduce.check()
        self._take_finished()

    def wait_for_device(self) -> None:
        self._all_reduce.accelerator.synchronize()
        self._take_finished()
        self._all_reduce.forget_wires([opened.wire for opened in self._opened])
        self._opened = []

    def _packing(self, plan: BucketPlan, wire: DeviceWire, scale: float) -> DevicePacking:
        packing = DevicePacking(scale, plan, wire.buffer, wire.found, self._world.size, self._all_reduce, self._streams)
        reports = self._all_reduce.reports
        if not reports or reports[-1] is not wire.report:
            reports.append(wire.report)
        self._opened = [*self._opened, _Opened(plan, wire, packing, len(reports) - 1)]
        return packing

    def _take_finished(self) -> None:
        while self._unfinished and self._unfinished[0].is_over():
            finished = self._unfinished.popleft()
            self._take_time(finished)
            self._finding = self._finding or _find(finished, self._parameters)
            self._all_reduce.give_back(finished.reports)

    def _take_finding(self) -> tuple[str, int] | None:
        found, self._finding = self._finding, None
        return found

    def _take_time(self, finished: _Unfinished) -> None:
        if not finished.works or finished.backward_end is None:
            return
        busy = sum(end.milliseconds_since(begin) for begin, end in finished.works)
        exposed = max(0.0, finished.works[-1].end.milliseconds_since(finished.backward_end))
        self._timing.add(busy / 1e3, min(busy, exposed) / 1e3)

    def _take_packed(self) -> list[list[tuple[Sequence[int], ChunkTable]]]:
        """The tables that were packed since the last call, in this reduction or in one that was aborted."""
        return [opened.packing.take_packed() for opened in self._opened]


def _find(finished: _Unfinished, parameters: Sequence[torch.nn.Parameter]) -> tuple[str, int] | None:
    """(what was found, in which parameter) first in a reduction. Inputs of this rank go before sums."""
    suspects: list[int] = []  # whose sum over ranks may have overflowed
    for (plan, wire, _, number), packed in zip(finished.opened, finished.packed, strict=True):
        bad, large = finished.reports[number][wire.row].tolist()
        if bad != NOT_FOUND:
            found = [plan.slots[slot].parameter for slot in slots_of(packed, bad)]
            return _IN_INPUT, found[0] if len(found) == 1 else _first_bad(found, parameters, found[0])
        if large != NOT_FOUND:
            suspects += [plan.slots[slot].parameter for slot in slots_of(packed, large)]
            suspects += [slot.parameter for slot in plan.slots]
    found_bad = _first_bad(suspects, parameters, -1)
    return None if found_bad < 0 else (_IN_SUM, found_bad)


def _first_bad(indices: Sequence[int], parameters: Sequence[torch.nn.Parameter], default: int) -> int:
    """The first of these parameters that is not finite by now; or else whose gradient is not; or else the default.

    The host waits for the device, once.
    """
    tensors: list[tuple[int, torch.Tensor]] = [(i, parameters[i]) for i in indices]
    tensors += [(i, grad) for i in indices if (grad := parameters[i].grad) is not None]
    finite = torch.stack([tensor.isfinite().all() for _, tensor in tensors]).tolist() if tensors else []
    return next((i for (i, _), is_fine in zip(tensors, finite, strict=True) if not is_fine), default)


def _first_finding(in_inputs: Sequence[float], in_sums: Sequence[float]) -> tuple[int | None, int] | None:
    """(rank, parameter) of the lowest rank that found something in its own gradients; else (None, parameter).

    The arguments have of each rank 1 + the index of a parameter, or 0.
    """
    for rank, found in enumerate(in_inputs):
        if found:
            return rank, int(found) - 1
    return next(((None, int(found) - 1) for found in in_sums if found), None)
