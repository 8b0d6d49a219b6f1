"""Rounds of a device: what the ranks' hosts tell each other, and what a host hears of its device afterwards.

The device reduces gradients and nothing else. Which parameters were used, which round it is, the signals and what was
found in earlier rounds travel between the hosts, in one small message at the end of each backward, when most of the
round is still to be computed. So nobody waits for a device, and a rank that is dead or out of step is found before
anybody steps.

How long a round took, and whether gradients were finite, is known when the device has come that far: at one of the next
rounds.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from torchring.accelerators import Mark
from torchring.allreduce import TAGS_PER_ROUND
from torchring.allreduce.contract import tag_mismatch
from torchring.allreduce.device.stream import NOTHING_FOUND, DeviceWire, OnStream, PendingOnStream
from torchring.allreduce.device.watchdog import has_come
from torchring.collectives.service import internal_collectives_of
from torchring.gradients.bucket import Bucket
from torchring.gradients.packing import DevicePacking, slots_of
from torchring.gradients.plan import NUM_SIGNALS
from torchring.kernels import ChunkTable
from torchring.world import World

_HEADER: Final = struct.Struct(f"{3 + NUM_SIGNALS}q")  # round, what was found, in which parameter; signals
_IN_INPUT, _IN_SUM = 1, 2


@dataclass
class _Round:
    """One that the device is still busy with, as far as the host knows."""

    flights: list[PendingOnStream]
    backward_end: Mark
    buckets: list[Bucket]
    packed: list[list[tuple[Sequence[int], ChunkTable]]]
    reports: dict[int, torch.Tensor]  # by id of the tensor on the device

    def is_over(self) -> bool:
        return all(map(has_come, self.reports.values())) and self.backward_end.is_reached()


@dataclass(frozen=True)
class Agreement:
    """What all ranks know at the end of a round.

    Attributes:
        heard: for each signal, the share of ranks that had set it.
        non_finite: (rank, parameter index) of a NaN or infinity in an earlier round; the rank is None if only the sum
            overflowed.
    """

    heard: list[float]
    non_finite: tuple[int | None, int] | None


class DeviceRounds:
    """The rounds of one optimizer.

    Args:
        world: of any size.
        mover: of its device.
        on_timing: called with the seconds of communication, and those during which backward's stream stood still, of
            every round that the device has finished.
    """

    def __init__(self, world: World, mover: OnStream, on_timing: Callable[[float, float], None]) -> None:
        self._world = world
        self._mover = mover
        self._on_timing = on_timing
        self._under_way: deque[_Round] = deque()
        self._finding: tuple[int, int] | None = None  # (kind, parameter), to be told
        self._backward_end: Mark | None = None

    def begin(self, buckets: Sequence[Bucket]) -> None:
        """A round begins. Raises what ended the mover meanwhile."""
        self.check()
        self.poll()
        if self._mover.take_started():  # of a round that was broken off
            self._seal(buckets)
        _take_packed(buckets)
        reports = list(_reports_of(buckets).values())

        def clear_reports() -> None:
            for report in reports:
                report.fill_(NOTHING_FOUND)

        self._mover.stream.run(clear_reports)

    def check(self) -> None:
        """Raise what ended the mover, if something has."""
        self._mover.check()

    def backward_is_over(self) -> None:
        """As far as the host goes."""
        self._backward_end = self._mover.accelerator.mark_current()

    def end(self, buckets: Sequence[Bucket]) -> None:
        """Every bucket has been launched."""
        assert self._backward_end is not None
        flights, reports = self._mover.take_started(), self._seal(buckets)
        self._under_way.append(_Round(flights, self._backward_end, list(buckets), _take_packed(buckets), reports))

    def agree(self, round_number: int, signals: Sequence[float], buckets: Sequence[Bucket]) -> Agreement:
        """Collective: ranks compare rounds, and a bucket's flags become 0 where they are on all ranks only.

        Raises PlanMismatchError where a rank is in another round, PeerLostError, PeerTimeoutError.
        """
        kind, parameter = self._finding or (0, 0)
        self._finding = None
        flags = [bucket.flags.numpy()[: len(bucket.names)] for bucket in buckets]
        used = np.concatenate(flags).astype(np.bool_).tobytes() if flags else b""
        mine = _HEADER.pack(round_number, kind, parameter, *map(int, signals)) + used
        everybody = internal_collectives_of(self._world).all_gather_bytes(mine)
        headers = [_HEADER.unpack_from(theirs) for theirs in everybody]
        for rank, theirs in enumerate(headers):
            if theirs[0] != round_number:
                tags = round_number * TAGS_PER_ROUND, theirs[0] * TAGS_PER_ROUND
                raise tag_mismatch(self._world.rank, tags[0], rank, tags[1])
        if any(text[_HEADER.size :] != used for text in everybody):  # else what nobody uses is flagged so already
            parts = [np.frombuffer(text, np.uint8, offset=_HEADER.size) for text in everybody]
            ends = np.cumsum([len(own) for own in flags])
            for own, part in zip(flags, np.split(np.sum(parts, axis=0), ends), strict=False):
                own[:] = part
        heard = [sum(theirs[3 + i] for theirs in headers) / len(headers) for i in range(NUM_SIGNALS)]
        return Agreement(heard, _first_finding(headers))

    def poll(self) -> None:
        """Take in what the device has finished."""
        while self._under_way and self._under_way[0].is_over():
            finished = self._under_way.popleft()
            self._take_time(finished)
            self._finding = self._finding or _find(finished)

    def settle(self) -> None:
        """Wait until the device has finished all rounds. Before buffers are given up."""
        self._mover.accelerator.synchronize()
        self.poll()

    def _seal(self, buckets: Sequence[Bucket]) -> dict[int, torch.Tensor]:
        """Have what was found sent to the host, behind all that was launched."""
        fetched: dict[int, torch.Tensor] = {}
        fetch, reports = self._mover.accelerator.fetch, _reports_of(buckets)
        self._mover.stream.run(lambda: fetched.update({key: fetch(report) for key, report in reports.items()}))
        for copy in fetched.values():
            self._mover.seal(copy)
        return fetched

    def _take_time(self, finished: _Round) -> None:
        flights = finished.flights
        if not flights:
            return
        busy = sum(flight.end.milliseconds_since(flight.begin) for flight in flights)
        exposed = max(0.0, flights[-1].end.milliseconds_since(finished.backward_end))
        self._on_timing(busy / 1e3, min(busy, exposed) / 1e3)


def _take_packed(buckets: Sequence[Bucket]) -> list[list[tuple[Sequence[int], ChunkTable]]]:
    """What was packed since the last call, in this round or in one that was broken off."""
    return [bucket.packing.take_packed() for bucket in buckets if isinstance(bucket.packing, DevicePacking)]


def _reports_of(buckets: Sequence[Bucket]) -> dict[int, torch.Tensor]:
    """Where kernels note what they find, a tensor for each set of wires that was opened together."""
    wires = [bucket.wire for bucket in buckets]
    return {id(wire.report): wire.report for wire in wires if isinstance(wire, DeviceWire)}


def _find(finished: _Round) -> tuple[int, int] | None:
    """(what was found, in which parameter) first in a round, inputs of this rank before sums."""
    found = None
    for bucket, packed in zip(finished.buckets, finished.packed, strict=True):
        wire = bucket.wire
        assert isinstance(wire, DeviceWire)
        chunk, element = finished.reports[id(wire.report)][wire.row].tolist()
        if chunk != NOTHING_FOUND:
            return _IN_INPUT, bucket.plan.slots[_suspect(bucket, slots_of(packed, chunk))].parameter
        if element != NOTHING_FOUND and found is None:
            slots = [slot for slot in bucket.plan.slots if slot.offset <= element]
            found = _IN_SUM, slots[-1].parameter
    return found


def _suspect(bucket: Bucket, slots: Sequence[int]) -> int:
    """Of several slots, the first whose parameter shows it by now. If none does, the step was left out."""
    if len(slots) == 1:
        return slots[0]
    spoiled = (slot for slot in slots if not bool(bucket.parameters[slot].isfinite().all()))
    return next(spoiled, slots[0])


def _first_finding(headers: Sequence[Sequence[int]]) -> tuple[int | None, int] | None:
    """Of the lowest rank that found something in its own gradients; else of one that found it in the sum."""
    for kind in (_IN_INPUT, _IN_SUM):
        for rank, header in enumerate(headers):
            if header[1] == kind:
                return (rank if kind == _IN_INPUT else None), header[2]
    return None
