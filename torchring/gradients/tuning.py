"""bucket_mb="auto": finds the buckets that keep the last reduction short, tries them, and keeps the faster ones.

      round    1        2                       3 .. 7    9 .. 13  15 .. 19  21 .. 25  26
      buckets  default  default, in ready order measured  found    default   found     the faster ones, for good

In the measured rounds each rank writes down when its gradients became ready. Then the ranks measure what a reduction
takes by its size, and rank 0 cuts the gradients into buckets (`boundaries.py`). All ranks take the same decisions in
the same rounds, from numbers that they have exchanged: a round has the same number on all ranks, even where one of them
has broken off a backward. The outcome is kept for the next start (`plan_cache.py`).
"""

from __future__ import annotations

import enum
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

from torchring.allreduce import Mover
from torchring.allreduce.cost import measure_cost
from torchring.allreduce.device.stream import OnStream
from torchring.collectives.service import internal_collectives_of
from torchring.gradients import plan_cache
from torchring.gradients.best_plan import cost_in_backward, find_groups, largest_kind, predict
from torchring.gradients.plan import ParameterSpec, Plan, plan_of, wire_dtype
from torchring.gradients.plan_cache import FoundBuckets
from torchring.gradients.scheduler import Scheduler
from torchring.world import World

_NUM_WARMUPS: Final = 1  # rounds that touch the memory of new buckets for the first time
_NUM_ROUNDS: Final = 5  # that are measured in each turn of a plan
_FEWEST_ROUNDS: Final = 3
_NUM_TURNS: Final = 4  # of both plans together
_LEAST_GAIN: Final = 0.03  # of the exposed time, predicted: less is not tried, because it would drown in noise


class Stage(enum.Enum):
    """What the tuner does."""

    WAITING = "for the first backward, which shows the order of gradients"
    MEASURING = "rounds, with default buckets or in a trial of others"
    DONE = "nothing any more"


@dataclass
class Observation:
    """One round on one rank. Times are seconds from the first gradient.

    Attributes:
        began: when the first gradient was ready, in seconds of time.perf_counter.
        ready: for each parameter, when its gradient was ready and copied. Time in calls of the mover is subtracted, so
            these are the times of a backward that only computes.
        computed: when all gradients were ready, in the same way.
        total: when all gradients were reduced.
        exposed: how long backward stood still for reductions.
        busy: how long something was being reduced.
    """

    began: float = field(default_factory=time.perf_counter)
    ready: dict[int, float] = field(default_factory=dict)
    computed: float = 0.0
    total: float = 0.0
    exposed: float = 0.0
    busy: float = 0.0


class Times(NamedTuple):
    """What all ranks know of one round: of each time of `Observation` the shortest.

    That is the time of the rank that began last, and waited for nobody.
    """

    total: float
    exposed: float
    busy: float


@dataclass
class Trial:
    """Buckets that were found take turns with the default ones: other load on the machine may come and go.

    Attributes:
        default, found: the two plans.
        predicted: exposed seconds with each.
        with_default, with_found: what was measured with each.
        num_turns: how many are over. The default ones have the first.
    """

    default: Plan
    found: Plan
    predicted: tuple[float, float]
    with_default: list[Times]
    with_found: list[Times] = field(default_factory=list)
    num_turns: int = 1

    def next_turn(self, times: list[Times]) -> Plan | None:
        """The rounds of a turn are measured. Returns the buckets of the next turn; None if there have been enough."""
        (self.with_found if self.num_turns % 2 else self.with_default).extend(times)
        self.num_turns += 1
        if self.num_turns == _NUM_TURNS:
            return None
        return self.found if self.num_turns % 2 else self.default

    def is_won(self) -> bool:
        """Whether the buckets that were found leave less exposed, and slow nothing down, by more than the noise."""
        default, noise = _median_and_noise([times.exposed for times in self.with_default])
        found, more_noise = _median_and_noise([times.exposed for times in self.with_found])
        if found >= default - math.hypot(noise, more_noise):
            return False
        default, noise = _median_and_noise([times.total for times in self.with_default])
        found, more_noise = _median_and_noise([times.total for times in self.with_found])
        return found < default + 2 * math.hypot(noise, more_noise)  # of the whole, which varies more

    def describe(self) -> str:
        default, found = (
            [statistics.median(column) for column in zip(*times, strict=True)]
            for times in (self.with_default, self.with_found)
        )
        before, after = self.predicted
        return (
            f"{_ms(found[1])} exposed instead of {_ms(default[1])}, and backward took {_ms(found[0])} instead of "
            f"{_ms(default[0])}; {_ms(after)} instead of {_ms(before)} exposed was predicted"
        )


class Tuner:
    """Tunes the buckets of one optimizer.

    Args:
        world: has more than one rank.
        mover: reduces the buckets, on the host.
        scheduler: counts the rounds.
        subject: what the buckets are found for, as lines of text. Those of rank 0 count.
        bucket_bytes: size of default buckets. Others are not larger: large ones leave late.
        compression: see `build_plan`.

    Attributes:
        reason: what has been decided, and why, as a clause.
    """

    def __init__(
        self,
        world: World,
        mover: Mover[Any],
        scheduler: Scheduler,
        subject: Sequence[str],
        bucket_bytes: int,
        compression: str | None,
    ) -> None:
        self.reason = "default buckets, until backwards have been measured"
        self._world = world
        self._mover = mover
        self._scheduler = scheduler
        self._subject = subject
        self._bucket_bytes = bucket_bytes
        self._compression = compression
        self._stage = Stage.WAITING
        self._first = 0  # number of the first round that is measured
        self._round: Observation | None = None  # the round under way, if it is measured
        self._observed: dict[int, Observation] = {}  # by number of the round
        self._trial: Trial | None = None  # since buckets were found

    @property
    def is_observing(self) -> bool:
        """Whether gradients of the round under way go through `mark_ready`."""
        return self._round is not None

    def recall(self, specs: Sequence[ParameterSpec]) -> Plan | None:
        """Collective, before the first round: the buckets that were found by an earlier run, if there are any."""
        collectives = internal_collectives_of(self._world)
        data = plan_cache.read(self._subject) if self._world.rank == 0 else None
        data = collectives.broadcast_bytes(data, 0)
        try:
            found = FoundBuckets.decode(data)
            plan = None if found.groups is None else plan_of(specs, found.groups, compression=self._compression)
        except (ValueError, RecursionError):  # nothing there, or not ours
            return None
        self.stop(f"{found.text}, as measured by an earlier run")
        return plan

    def stop(self, reason: str) -> None:
        """The buckets stay as they are. To be called in the same round on all ranks."""
        if self._stage is not Stage.DONE:
            self._stage, self.reason = Stage.DONE, reason
        self._round, self._observed = None, {}

    def order_is_known(self) -> None:
        """The default buckets have been laid out in the order of gradients; the next round is the first with them."""
        if self._stage is Stage.WAITING:
            self._measure()

    def next_plan(self, current: Plan, specs: Sequence[ParameterSpec]) -> Plan | None:
        """Collective, before the next round begins: the buckets to use from this round on; None for the same ones."""
        if self._stage is not Stage.MEASURING or self._next_number < self._first + _NUM_ROUNDS:
            return None
        times = self._agree_on_times()
        trial = self._trial
        if len(times) < _FEWEST_ROUNDS:
            self.stop("default buckets: too few backwards reduced gradients of all ranks while these were measured")
            return None if trial is None else trial.default
        if trial is None:
            return self._find(current, specs, times)
        if (plan := trial.next_turn(times)) is not None:
            self._measure()
            return plan
        if trial.is_won():
            groups = [[slot.parameter for slot in bucket.slots] for bucket in trial.found.buckets]
            self._keep(groups, f"{len(groups)} buckets found for this model: {trial.describe()}")
            return trial.found
        self._keep(None, f"default buckets, as those found were not better: {trial.describe()}")
        return trial.default

    def begin_round(self, *, is_ordinary: bool) -> None:
        """The round has begun; its first gradient is about to be marked ready.

        Args:
            is_ordinary: whether this is the round of a backward of this rank.
        """
        is_measured = self._stage is Stage.MEASURING and self._scheduler.round.number >= self._first
        self._round = Observation() if is_ordinary and is_measured else None

    def mark_ready(self, index: int) -> None:
        """As `Scheduler.mark_ready`, and take the time."""
        self._scheduler.mark_ready(index)
        if (seen := self._round) is not None:
            seen.ready[index] = time.perf_counter() - seen.began - self._scheduler.round.exposed_seconds

    def end_round(self) -> None:
        """All buckets are reduced."""
        seen, current = self._round, self._scheduler.round
        if seen is None:
            return
        seen.total = time.perf_counter() - seen.began
        seen.exposed, seen.busy = current.exposed_seconds, current.busy_seconds
        seen.computed = seen.total - seen.exposed
        self._observed[current.number] = seen
        self._round = None

    @property
    def _next_number(self) -> int:
        return self._scheduler.round.next_number

    def _measure(self) -> None:
        """Begin to measure rounds with the buckets that the next round has."""
        self._stage = Stage.MEASURING
        self._first = self._next_number + _NUM_WARMUPS
        self._observed = {}

    def _agree_on_times(self) -> list[Times]:
        """Collective: how long the measured rounds took, without those that were not measured on all ranks."""
        numbers = range(self._first, self._first + _NUM_ROUNDS)
        seen = [self._observed.get(number) for number in numbers]
        times = [[0.0, 0.0, 0.0] if one is None else [one.total, one.exposed, one.busy] for one in seen]
        least = torch.tensor(times, dtype=torch.float64, device="cpu")
        internal_collectives_of(self._world).all_reduce(least, "min")
        rows = {number: row for number, row in zip(numbers, least.tolist(), strict=True) if row[0] > 0.0}
        self._observed = {number: one for number, one in self._observed.items() if number in rows}
        return [Times(*row) for row in rows.values()]

    def _find(self, current: Plan, specs: Sequence[ParameterSpec], times: list[Times]) -> Plan | None:
        """Collective: the buckets that should do best, if they are worth a try."""
        collectives = internal_collectives_of(self._world)
        computed = statistics.median(one.computed for one in self._observed.values())
        ready = [
            statistics.median(one.ready.get(index, one.computed) for one in self._observed.values())
            for index in range(len(specs))
        ]
        latest = torch.tensor([*ready, computed], dtype=torch.float64, device="cpu")
        *ready, computed = collectives.all_reduce(latest, "max").tolist()
        kind = largest_kind(specs)
        points = measure_cost(self._world, self._mover, wire_dtype(kind[0], self._compression))
        busy = statistics.median(each.busy for each in times)
        cost = cost_in_backward(points, current, busy, in_background=self._mover.in_background)
        answer = None
        if self._world.rank == 0:  # the others take its answer: on other processors, sums may be rounded otherwise
            groups = find_groups(specs, current, ready, cost, self._bucket_bytes, self._compression)
            plans = current, plan_of(specs, groups, compression=self._compression)
            exposed = [predict(plan, ready, cost) - computed for plan in plans]
            answer = json.dumps([groups, exposed]).encode()
        groups, exposed = json.loads(collectives.broadcast_bytes(answer, 0))
        before, after = (max(each, 0.0) for each in exposed)
        if before - after < _LEAST_GAIN * before or before == 0.0:
            expected = f"no buckets should do much better: {_ms(after)} exposed instead of {_ms(before)}, by prediction"
            self._keep(None, f"default buckets: {expected}")
            return None
        plan = plan_of(specs, groups, compression=self._compression)
        self._trial = Trial(current, plan, (before, after), times)
        self._measure()
        self.reason = "buckets that were found for this model are being tried"
        return plan

    def _keep(self, groups: list[list[int]] | None, text: str) -> None:
        self.stop(text)
        if self._world.rank == 0:
            plan_cache.write(self._subject, FoundBuckets(groups, text))


def open_tuner(
    world: World,
    mover: Mover[Any],
    scheduler: Scheduler,
    plan: Plan,
    description: Sequence[str],
    bucket_bytes: int,
    compression: str | None,
) -> Tuner:
    """A tuner for the default buckets of `plan`, of the parameters and options in `description`."""
    subject = [
        *description,
        f"{mover.algorithm} {'in background' if mover.in_background else 'inline'} between {world.hosts}",
        f"{world.num_cores} cores, {torch.get_num_threads()} threads, torch {torch.__version__}",
    ]
    tuner = Tuner(world, mover, scheduler, subject, bucket_bytes, compression)
    if isinstance(mover, OnStream):
        tuner.stop("buckets are not tuned on a GPU")
    elif not plan.buckets:
        tuner.stop("no buckets, as all gradients are sparse")
    return tuner


def _median_and_noise(values: Sequence[float]) -> tuple[float, float]:
    """The median and its standard error, estimated from the median distance to it, which outliers do not move."""
    median = statistics.median(values)
    distance = statistics.median(abs(value - median) for value in values)
    return median, 1.2533 * 1.4826 * distance / math.sqrt(len(values))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
