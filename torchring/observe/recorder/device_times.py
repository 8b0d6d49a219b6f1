"""Gives steps the times at which a device did its work, and not those at which the host launched it.

The host runs ahead of the device. So each stamp is an event in the current stream, too. Steps are recorded with the
host's times at first, and get the device's times when the device has come to their end. Nobody waits for that.

Events tell how far they are apart, but not what the host's clock said. The device reaches an event after the host has
recorded it. So the device's times are shifted to where no event of the last 64 steps is reached before it was recorded,
and no further: that is exact if the device was idle once in these steps. Both clocks may drift apart.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from torchring.observe.recorder.records import (
    BEGIN,
    END,
    LAUNCHED,
    NUM_BUCKETS,
    NUM_PHASES,
    PACKING_NS,
    READY,
    REDUCED,
    STALL_NS,
    STARTED,
    bucket_start,
    phase_begin,
)

if TYPE_CHECKING:
    from torchring.devices.cuda import CudaAccelerator, CudaMark

_NUM_SHIFTS: Final = 64


class _Step(NamedTuple):
    """A step that the device has not finished, as far as the host knows."""

    encoded: array[int]
    marks: list[CudaMark]
    recorded: list[int]
    buckets: list[tuple[CudaMark, CudaMark]]  # begin and end of their all-reduces

    def is_finished(self) -> bool:
        return self.marks[-1].is_reached() and all(end.is_reached() for _, end in self.buckets)


class DeviceTimes:
    """Gives steps the times of a device, which computes in its current stream. For the thread that trains.

    `now` is the time on the host's clock, in nanoseconds.
    """

    def __init__(self, device: CudaAccelerator, now: int) -> None:
        self._device = device
        self._unfinished: deque[_Step] = deque()
        self._begin_anew(now)

    def _begin_anew(self, now: int) -> None:
        """Begin with the next step as if it were the first: its times do not continue those of earlier steps."""
        self._marks: list[CudaMark] = []
        self._recorded: list[int] = []
        self.buckets: list[tuple[CudaMark, CudaMark]] = []  # that reductions have started, in this order: begin and end
        self._unfinished.clear()
        self._elapsed_ns = 0  # from the first mark to the end of the last finished step
        self._shifts_ns = deque([now], maxlen=_NUM_SHIFTS)  # the least that each of the last steps allows
        self._is_complete = True  # all stamps of this step have a mark
        self.mark(now)

    def mark(self, now: int) -> None:
        if self._device.is_capturing():  # an event would become part of the graph
            self._is_complete = False
        else:
            self._marks.append(self._device.mark_current())
            self._recorded.append(now)

    def end_step(self, step: array[int], now: int) -> None:
        """A step has ended. `step`: its row, with its buckets."""
        self.mark(now)
        if self._is_complete and len(self._marks) == step[NUM_PHASES] + 1:
            self._unfinished.append(_Step(step, self._marks, self._recorded, self.buckets))
            self._marks, self._recorded = self._marks[-1:], self._recorded[-1:]
            self.buckets = []
        else:
            self._begin_anew(now)
        self.take_finished()

    def take_finished(self) -> None:
        """Give times to the steps that the device has finished since."""
        try:
            while self._unfinished and self._unfinished[0].is_finished():
                self._date(self._unfinished[0])
                self._unfinished.popleft()
        except RuntimeError as error:  # training goes on without
            logging.getLogger("torchring").debug("a step keeps the host's times: %s", error)
            self._begin_anew(self._recorded[-1] if self._recorded else 0)

    def is_unfinished(self, step: array[int]) -> bool:
        """Whether a step still has the host's times. For any thread."""
        return any(each.encoded is step for each in list(self._unfinished))  # the thread that trains changes it

    def _date(self, finished: _Step) -> None:
        step, first = finished.encoded, finished.marks[0]
        offsets = [0, *(_ns_between(first, mark) for mark in finished.marks[1:])]
        least = (recorded - offset for recorded, offset in zip(finished.recorded, offsets, strict=True))
        self._shifts_ns.append(max(least) - self._elapsed_ns)
        begin = self._elapsed_ns + max(self._shifts_ns)
        step[BEGIN], step[END] = begin, begin + offsets[-1]
        step[STALL_NS] = step[PACKING_NS] = 0  # the host has only launched them
        for number, offset in enumerate(offsets[:-1]):
            step[phase_begin(number)] = begin + offset
        for number, (started_at, reduced_at) in enumerate(finished.buckets[: step[NUM_BUCKETS]]):
            bucket = bucket_start(step[NUM_PHASES], number)
            started = begin + _ns_between(first, started_at)
            for time in (READY, LAUNCHED, STARTED):
                step[bucket + time] = started
            step[bucket + REDUCED] = begin + _ns_between(first, reduced_at)
        self._elapsed_ns += offsets[-1]


def _ns_between(earlier: CudaMark, later: CudaMark) -> int:
    return round(later.milliseconds_since(earlier) * 1e6)
