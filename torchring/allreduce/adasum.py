"""Adasum of each parameter by itself, in memory that the ranks of a host share. See `collectives/adasum.py`.

Rank r owns slice r of all buffers of its host, as in `direct`. It computes the scalar products of the slice, and all
ranks add up the products of all slices. So all know the weights, and each writes the weighted sum of its slice to all.

      rank 0                                               rank 1
      "packed"                                             "packed"
      products of slice 0 of both buffers, "multiplied"    products of slice 1, "multiplied"
      adds up both products: the weights                   ...
      weighted sum of slice 0 to both buffers, "done"      weighted sum of slice 1 to both buffers, "done"

Between hosts the buffer is cut into as many columns as the smallest host has ranks, as in `hierarchical`. The owner of
a column leaves the host's combination in its buffer, and sends each other host's owner a slice of it. Then the same
happens again, with the hosts in place of the ranks: products, weights, weighted sums. In the end the owners send each
other their slices. A host sends 2(H-1)/H of a buffer, as for a sum. One rank computes each element for all, so all
ranks have the same bits.

What lies behind the parameters, the flags and control bits, is added up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from torchring.allreduce.contract import CombinedSpec, NonFinite, first_non_finite, tag_mismatch
from torchring.allreduce.records import MAX_PENDING, ReductionRecords
from torchring.allreduce.slices import Slices, slice_bounds
from torchring.collectives.adasum import Combination, coefficients
from torchring.errors import FirstFailure, RingError
from torchring.memory.channel import Channel
from torchring.memory.host import HostGroup
from torchring.transport.contract import Transport

_GRACE_SECONDS: Final = 5.0  # between hosts, as in `hierarchical`


@dataclass(frozen=True)
class _Column:
    """What the owner of a column exchanges with its other owners, by rank.

    Attributes:
        combination: of this rank's slice of the column, over hosts.
        first: where this rank's slice begins in the wire buffer.
        own: this rank's slice.
        slices: of this rank's buffer, which the others combine.
        received: the others' buffers of this rank's slice.
    """

    combination: Combination
    first: int
    own: torch.Tensor
    slices: dict[int, torch.Tensor]
    received: dict[int, torch.Tensor]


@dataclass(frozen=True)
class AdasumWire:
    """A buffer in shared memory. See `Wire`.

    Attributes:
        first: where this rank's slice begins.
        own: this rank's slice.
        others: the same slice in the peers' buffers.
        combination: of this rank's slice, over the ranks of the host.
        products: [S, N, N] of each rank of the host; between hosts also [S, H, H], of hosts.
        column: None on one host, and on a rank that has none.
    """

    tensor: torch.Tensor
    first: int
    own: torch.Tensor
    others: Sequence[torch.Tensor]
    combination: Combination
    products: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
    column: _Column | None


@dataclass
class _Lane:
    """Shared by the reductions of one lane.

    Attributes:
        transport: to the other owners of this rank's column. None if there are none.
        packed, multiplied, done: the signals.
        pending: started and not yet over, the oldest first.
    """

    group: HostGroup
    hosts: Sequence[Sequence[int]]
    transport: Transport | None
    packed: Channel
    multiplied: Channel
    done: Channel
    records: ReductionRecords
    pending: deque[PendingAdasum] = field(default_factory=deque)


class PendingAdasum:
    """One reduction. See `PendingReduction`."""

    span = None

    def __init__(self, lane: _Lane, wire: AdasumWire, scale: float, tag: int) -> None:
        self._lane = lane
        self._number = lane.records.begin(tag)
        self._steps = _steps(lane, wire, scale, tag, self._number)
        self._waits_for = next(self._steps)
        self._is_over = False
        self._result: NonFinite | None = None
        lane.pending.append(self)

    def advance(self) -> bool:
        while self._waits_for is not self._lane.done:
            if not self._waits_for.has_gathered():
                return False
            self._waits_for = next(self._steps)
        return True

    def contribute(self) -> None:
        while self._waits_for is not self._lane.done:
            self._waits_for.gather()
            self._waits_for = next(self._steps)

    def wait(self) -> NonFinite | None:
        if not self._is_over:
            lane = self._lane
            assert self is lane.pending[0], "reductions end in the order in which they were started"
            self.contribute()
            lane.done.gather()
            lane.pending.popleft()
            self._is_over = True
            self._result = lane.records.read(self._number)
        return self._result


def _steps(lane: _Lane, wire: AdasumWire, scale: float, tag: int, number: int) -> Iterator[Channel]:
    """This rank's part. Yields the signal that it waits for; `done` at the end."""
    group, records, hosts = lane.group, lane.records, lane.hosts
    lane.packed.announce()
    yield lane.packed
    records.check_tags(number, tag)
    found: NonFinite | None = None
    overflow: int | None = None
    if group.size > 1:
        products = wire.combination.products()
        found = _non_finite_input(products, wire.combination.parts, group.ranks, wire.first)
        gram = yield from _add_up(lane, wire.products[0], products)
        is_result = len(hosts) == 1
        look = first_non_finite if is_result else None
        overflow = wire.combination.run(_weights(gram) * (scale if is_result else 1.0), look)
    if len(hosts) > 1:
        products = torch.zeros_like(wire.products[1][0])
        if (column := wire.column) is not None:
            found = _multiply_between_hosts(lane, column, products, tag, found)
        gram = yield from _add_up(lane, wire.products[1], products)
        if column is not None:
            column.combination.run(_weights(gram) * scale)
            _exchange(lane, dict.fromkeys(column.slices, column.own), column.slices)
            overflow = first_non_finite(wire.own)
            for other in wire.others:
                other.copy_(wire.own)
    if found is None and overflow is not None:
        found = NonFinite(None, wire.first + overflow)
    records.write(number, found)
    lane.done.announce()
    yield lane.done


def _add_up(lane: _Lane, places: Sequence[torch.Tensor], own: torch.Tensor) -> Generator[Channel, None, torch.Tensor]:
    """The sum of what all ranks of the host have computed, in one order on all."""
    places[lane.group.index].copy_(own)
    lane.multiplied.announce()
    yield lane.multiplied
    return torch.stack(list(places)).sum(0)


def _weights(gram: torch.Tensor) -> torch.Tensor:
    weights = coefficients(gram)
    weights[-1] = 1.0  # what lies behind the parameters is added up
    return weights


def _multiply_between_hosts(
    lane: _Lane, column: _Column, products: torch.Tensor, tag: int, found: NonFinite | None
) -> NonFinite | None:
    """Set `products` to those of the whole column. Returns the first NaN or infinity that a rank of any host had."""
    transport = lane.transport
    assert transport is not None
    for member, other in zip(transport.members, transport.all_gather(tag), strict=True):
        if other != tag:
            raise tag_mismatch(transport.rank, tag, member, other)
    _exchange(lane, column.slices, column.received)
    own = column.combination.products()
    if found is None:  # hosts of several ranks have looked
        ranks = [members[0] if len(members) == 1 else None for members in lane.hosts]
        found = _non_finite_input(own, column.combination.parts, ranks, column.first)
    said = (-1, -1) if found is None or found.rank is None else (found.element, found.rank)
    mine = torch.cat([own.flatten(), torch.tensor(said, dtype=torch.float64, device="cpu")])
    messages = {peer: mine if peer == transport.rank else torch.empty_like(mine) for peer in transport.members}
    received = {peer: message for peer, message in messages.items() if peer != transport.rank}
    _exchange(lane, dict.fromkeys(received, mine), received)
    products.copy_(torch.stack([message[:-2] for message in messages.values()]).sum(0).view_as(products))
    findings = [message[-2:].long().tolist() for message in messages.values()]
    element, rank = min((each for each in findings if each[1] >= 0), default=(-1, -1))
    return None if rank < 0 else NonFinite(rank, element)


def _non_finite_input(
    products: torch.Tensor, parts: Sequence[torch.Tensor], ranks: Sequence[int | None], first: int
) -> NonFinite | None:
    """The first NaN or infinity in parts of which these are the products, and that begin at element `first`.

    Args:
        ranks: of the parts. None: of several ranks, which have looked before.
    """
    if bool(products.isfinite().all()):
        return None
    looked = [(first_non_finite(part), rank) for part, rank in zip(parts, ranks, strict=True) if rank is not None]
    found = [(element, rank) for element, rank in looked if element is not None]
    return NonFinite(min(found)[1], first + min(found)[0]) if found else None


def _exchange(lane: _Lane, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
    transport = lane.transport
    assert transport is not None
    under_way = [transport.receive(tensor, peer) for peer, tensor in receives.items()]
    under_way += [transport.send(tensor, peer) for peer, tensor in sends.items()]
    for transfer in under_way:
        transfer.wait()


class AdasumAllReduce:
    """Adasum, opened by all ranks of the world together. See `AllReduce` and `BlockingAllReduce`; `start` is for one
    host. Wires of `open_wires` are added up.

    Args:
        group: the ranks of this host.
        hosts: all ranks.
        transports: for each lane, to the other owners of this rank's column; None if there are none.
        poll_seconds: see `Channel`.
    """

    in_background = False

    def __init__(
        self,
        group: HostGroup,
        hosts: Sequence[Sequence[int]],
        transports: Sequence[Transport | None],
        *,
        poll_seconds: float,
    ) -> None:
        self.algorithm = "direct" if len(hosts) == 1 else "hierarchical"
        self.num_lanes = len(transports)
        self._group = group
        self._hosts = hosts
        self._slices = Slices(group, min(map(len, hosts)))
        self._failure = FirstFailure()

        def channel() -> Channel:
            return Channel(group, poll_seconds=poll_seconds, grace_seconds=_GRACE_SECONDS if len(hosts) > 1 else 0.0)

        self._lanes = [
            _Lane(group, hosts, transport, channel(), channel(), channel(), ReductionRecords(group))
            for transport in transports
        ]

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[AdasumWire]:
        return self.open_combined([CombinedSpec(numel, dtype, (0,)) for numel, dtype in specs])

    def open_combined(self, specs: Sequence[CombinedSpec]) -> list[AdasumWire]:
        size, num_hosts = self._group.size, len(self._hosts)
        squares = size**2 + num_hosts**2
        buffers = self._slices.allocate(
            [(spec.numel, spec.dtype) for spec in specs]
            + [(len(spec.bounds) * squares, torch.float64) for spec in specs]
        )
        wires = []
        for spec, parts, areas in zip(specs, buffers[: len(specs)], buffers[len(specs) :], strict=True):
            num, middle = len(spec.bounds), len(spec.bounds) * size**2
            within = [area[:middle].view(num, size, size) for area in areas]
            between = [area[middle:].view(num, num_hosts, num_hosts) for area in areas]
            wires.append(self._wire((*spec.bounds, spec.numel), parts, (within, between)))
        return wires

    def start(self, wire: AdasumWire, *, scale: float = 1.0, tag: int = 0) -> PendingAdasum:
        return self._start(wire, scale, tag, 0)

    def all_reduce(self, wire: AdasumWire, *, scale: float = 1.0, tag: int = 0, lane: int = 0) -> NonFinite | None:
        try:
            return self._start(wire, scale, tag, lane).wait()
        except RingError as error:
            self.fail(error)  # in the other lanes, too
            raise

    def fail(self, error: RingError) -> None:
        if self._failure.set(error):
            self._group.report_failure(error)
            for lane in self._lanes:
                if lane.transport is not None:
                    lane.transport.fail(error)

    def close(self) -> None:
        for lane in self._lanes:
            if lane.transport is not None:
                lane.transport.close()

    def _start(self, wire: AdasumWire, scale: float, tag: int, lane: int) -> PendingAdasum:
        self._failure.raise_if_set()
        pending = self._lanes[lane].pending
        if len(pending) == MAX_PENDING:
            pending[0].wait()
        return PendingAdasum(self._lanes[lane], wire, scale, tag)

    def _wire(
        self,
        bounds: Sequence[int],
        parts: Sequence[torch.Tensor],
        products: tuple[list[torch.Tensor], list[torch.Tensor]],
    ) -> AdasumWire:
        me = self._group.index
        first, stop = self._slices.bounds(parts[me])
        views = [part[first:stop] for part in parts]
        own, others = views[me], [view for rank, view in enumerate(views) if rank != me]
        outs = [own, *others] if len(self._hosts) == 1 else [own]
        within = _clipped(bounds, first, stop)
        transport = self._lanes[0].transport
        column = None if transport is None else _column(transport, first, own, within)
        combination = Combination(views, within, outs)
        return AdasumWire(parts[me].data, first, own, others, combination, products, column)


def _column(transport: Transport, first: int, buffer: torch.Tensor, bounds: Sequence[int]) -> _Column:
    members, rank = transport.members, transport.rank
    cuts = dict(zip(members, slice_bounds(len(buffer), len(members), buffer.element_size()), strict=True))
    slices = {peer: buffer[start:stop] for peer, (start, stop) in cuts.items()}
    own = slices.pop(rank)
    received = {peer: torch.empty_like(own) for peer in slices}
    parts = [own if peer == rank else received[peer] for peer in members]
    combination = Combination(parts, _clipped(bounds, *cuts[rank]), [own])
    return _Column(combination, first + cuts[rank][0], own, slices, received)


def _clipped(bounds: Sequence[int], start: int, stop: int) -> list[int]:
    """The bounds in the piece from `start` to `stop`."""
    return [min(max(bound, start), stop) - start for bound in bounds]
