"""bucket_mb="auto" and compression="auto": finds what keeps the last reduction short, tries it, and keeps the better.

      round    1        2                       3 .. 7    9 .. 13  15 .. 19  21 .. 25  26
      plan     default  default, in ready order measured  found    default   found     the better one, for good

In the measured rounds each rank writes down when its gradients became ready. Then the ranks measure what a reduction
takes by its size, in 16 bits, too, where compression="auto" allows them. Rank 0 cuts the gradients into buckets
(`boundaries.py`). A plan that rounds is tried if it should shorten backward enough. If the plan loses, buckets that do
not round may get a trial, too. All ranks take the same decisions in the same rounds, from numbers that they have
exchanged: a round has the same number on all ranks, even where one of them has broken off a backward. The outcome is
kept for the next start (`plan_cache.py`).
"""

from __future__ import annotations

import enum
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import torch

from torchring.allreduce import AllReduce
from torchring.allreduce.cost import measure_cost
from torchring.allreduce.device.stream import OnStream
from torchring.collectives.service import internal_collectives_of
from torchring.gradients.launcher import Launcher
from torchring.gradients.participants.tuning import plan_cache
from torchring.gradients.participants.tuning.best_plan import cost_alone, largest_kind, slowdown, slowed
from torchring.gradients.participants.tuning.boundaries import ReductionCost
from torchring.gradients.participants.tuning.candidates import Candidate, Tuned, groups_of, worth_trying
from torchring.gradients.participants.tuning.plan_cache import FoundBuckets
from torchring.gradients.participants.tuning.trial import Times, Trial
from torchring.gradients.plan import ParameterSpec, Plan, plan_of, wire_dtype
from torchring.gradients.round import ControlFields, RoundState
from torchring.observe.services import recorder_of
from torchring.world import World

_NUM_WARMUPS: Final = 1  # rounds that touch the memory of new buckets for the first time
_NUM_ROUNDS: Final = 5  # that are measured in each turn of a plan
_FEWEST_ROUNDS: Final = 3


class Stage(enum.Enum):
    """What the tuner does."""

    WAITING = "for the first backward, which shows the order of gradients"
    MEASURING = "rounds, with the default plan or in a trial of another"
    DONE = "nothing any more"


@dataclass
class Observation:
    """One round on one rank. Times are seconds since `began`.

    Attributes:
        began: when forward had ended, in seconds of time.perf_counter; where that cannot be seen, when the first
            gradient was ready.
        ready: for each parameter, when its gradient was ready and copied. Time in the all-reduce is subtracted, so
            these are the times of a backward that only computes.
        computed: when all gradients were ready, in the same way.
        total: when all gradients were reduced.
        exposed: how long backward stood still for reductions.
        busy: how long something was being reduced.
    """

    began: float
    ready: dict[int, float] = field(default_factory=dict)
    computed: float = 0.0
    total: float = 0.0
    exposed: float = 0.0
    busy: float = 0.0


class Tuner:
    """Tunes the plan of one optimizer.

    Args:
        world: has more than one rank.
        all_reduce: reduces the buckets, on the host.
        launcher: counts the rounds.
        subject: what the plan is found for, as lines of text. Those of rank 0 count.
        tuned: what may be changed.
        control: the control bits of all plans.

    Attributes:
        compression: of the plan in use.
    """

    def __init__(
        self,
        world: World,
        all_reduce: AllReduce[Any],
        launcher: Launcher,
        subject: Sequence[str],
        tuned: Tuned,
        control: ControlFields,
    ) -> None:
        self.compression = tuned.compressions[0]
        self._world = world
        self._all_reduce = all_reduce
        self._launcher = launcher
        self._subject = subject
        self._tuned = tuned
        self._control = control
        self._decision = f"{self._default}, until backwards have been measured"
        self._stage = Stage.WAITING
        self._first = 0  # number of the first round that is measured
        self._round: Observation | None = None  # the round under way, if it is measured
        self._observed: dict[int, Observation] = {}  # by number of the round
        self._trial: Trial | None = None
        self._candidates: list[Candidate] = []  # still to be tried
        self._lost: list[str] = []  # what was tried and was not better

    @property
    def is_observing(self) -> bool:
        """Whether gradients of the round under way go through `mark_ready`."""
        return self._round is not None

    @property
    def reason(self) -> str:
        """What has been decided, and why, as a clause."""
        return self._decision

    @property
    def _default(self) -> str:
        names = ["default buckets"] * self._tuned.buckets
        return " and ".join(names + ["full precision"] * (len(self._tuned.compressions) > 1))

    def recall(self, specs: Sequence[ParameterSpec]) -> Plan | None:
        """Collective, before the first round: the buckets that were found by an earlier run, if there are any.

        Sets `compression`.
        """
        if self._stage is Stage.DONE:  # where nothing is tuned, nothing that was tuned is used
            return None
        collectives = internal_collectives_of(self._world)
        data = plan_cache.read(self._subject) if self._world.rank == 0 else None
        data = collectives.broadcast_bytes(data, 0)
        try:
            found = FoundBuckets.decode(data)
            if found.compression not in self._tuned.compressions:
                return None
            plan = None if found.groups is None else self._plan_of(specs, found.groups, found.compression)
        except (ValueError, RecursionError):  # nothing there, or not ours
            return None
        self.compression = found.compression
        self.stop(f"{found.text}, as measured by an earlier run")
        return plan

    def stop(self, reason: str) -> Plan | None:
        """Nothing is tuned any more, because of `reason`. To be called in the same round on all ranks.

        Returns the default plan if another one is in use, which has not won its trial yet.
        """
        trial = self._trial if self._stage is Stage.MEASURING else None
        if self._stage is not Stage.DONE:
            self._stage, self._decision = Stage.DONE, reason
        self._round, self._observed = None, {}
        return self._use_default(trial) if trial is not None and trial.is_turn_of_found else None

    def order_is_known(self) -> None:
        """The default buckets have been laid out in the order of gradients; the next round is the first with them."""
        if self._stage is Stage.WAITING:
            self._measure()

    def next_plan(self, current: Plan, specs: Sequence[ParameterSpec]) -> Plan | None:
        """Collective, before the next round begins: the plan to use from this round on; None for the same one."""
        if self._stage is not Stage.MEASURING or self._next_number < self._first + _NUM_ROUNDS:
            return None
        times = self._agree_on_times()
        trial = self._trial
        if len(times) < _FEWEST_ROUNDS:
            what = "too few backwards reduced gradients of all ranks while these were measured"
            return self.stop(f"{self._default}: {what}")
        if trial is None:
            self._find(current, specs, times)
            return self._try_next(current, specs, times) if self._candidates else None
        if trial.end_turn(times):
            self._measure()
            return self._use_found(trial) if trial.is_turn_of_found else self._use_default(trial)
        if trial.is_won():
            self._keep(trial.candidate, f"{trial.candidate.subject}: {trial.describe()}")
            return self._use_found(trial)
        self._lost.append(f"{trial.candidate.subject} were not better: {trial.describe()}")
        if self._candidates:
            return self._try_next(trial.default, specs, trial.with_default)
        self._keep(None, f"{self._default}, as {'; '.join(self._lost)}")
        return self._use_default(trial)

    def begin_round(self, current: RoundState) -> None:
        """The round begins; its first gradient is about to be marked ready."""
        is_measured = self._stage is Stage.MEASURING and current.number >= self._first
        is_ordinary = not (current.is_again or current.is_absent)  # the round of a backward of this rank
        recorder = recorder_of(self._world)
        began = recorder.phase_began * 1e-9 if recorder.is_on else time.perf_counter()
        self._round = Observation(began) if is_ordinary and is_measured else None

    def mark_ready(self, index: int) -> None:
        """As `Launcher.mark_ready`, and take the time."""
        self._launcher.mark_ready(index)
        if (seen := self._round) is not None:
            seen.ready[index] = time.perf_counter() - seen.began - self._launcher.round.exposed_seconds

    def end_round(self) -> None:
        """All buckets are reduced."""
        seen, current = self._round, self._launcher.round
        if seen is None:
            return
        seen.total = time.perf_counter() - seen.began
        seen.exposed, seen.busy = current.exposed_seconds, current.busy_seconds
        seen.computed = seen.total - seen.exposed
        self._observed[current.number] = seen
        self._round = None

    @property
    def _next_number(self) -> int:
        return self._launcher.round.next_number

    def _measure(self) -> None:
        """Begin to measure rounds with the plan that the next round has."""
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

    def _find(self, current: Plan, specs: Sequence[ParameterSpec], times: list[Times]) -> None:
        """Collective: the plans that are worth a trial. If there are none, the default plan stays."""
        collectives = internal_collectives_of(self._world)
        computed = statistics.median(one.computed for one in self._observed.values())
        ready = [
            statistics.median(one.ready.get(index, one.computed) for one in self._observed.values())
            for index in range(len(specs))
        ]
        latest = torch.tensor([*ready, computed], dtype=torch.float64, device="cpu")
        *ready, computed = collectives.all_reduce(latest, "max").tolist()
        costs = self._measure_costs(current, specs, statistics.median(each.busy for each in times))
        answer = None
        if self._world.rank == 0:  # the others take its answer: on other processors, sums may be rounded otherwise
            candidates, reasons = worth_trying(self._tuned, current, specs, ready, computed, costs)
            answer = json.dumps([list(map(asdict, candidates)), reasons]).encode()
        found, reasons = json.loads(collectives.broadcast_bytes(answer, 0))
        self._candidates = [Candidate(**fields) for fields in found]
        self._lost = reasons
        if not found:
            self._keep(None, f"{self._default}, as {'; '.join(reasons)}")

    def _measure_costs(self, current: Plan, specs: Sequence[ParameterSpec], busy: float) -> list[ReductionCost]:
        """Collective: what reductions take in a backward, with each compression."""
        dtype, _ = largest_kind(specs)
        alone: list[ReductionCost] = []
        for compression in self._tuned.compressions:
            points = measure_cost(self._world, self._all_reduce, wire_dtype(dtype, compression))
            alone.append(cost_alone(points, in_background=self._all_reduce.in_background))
        factor = slowdown(alone[0], current, busy)
        return [slowed(cost, factor) for cost in alone]

    def _plan_of(
        self, specs: Sequence[ParameterSpec], groups: Sequence[Sequence[int]], compression: str | None
    ) -> Plan:
        return plan_of(specs, groups, compression=compression, control=self._control)

    def _try_next(self, default: Plan, specs: Sequence[ParameterSpec], times: list[Times]) -> Plan:
        """Begin the trial of the next candidate. The default plan has had its first turn, with these times."""
        candidate = self._candidates.pop(0)
        groups = groups_of(default) if candidate.groups is None else candidate.groups
        found = self._plan_of(specs, groups, candidate.compression)
        self._trial = Trial(candidate, default, found, list(times))
        self._measure()
        self._decision = f"{candidate.subject}, which are being tried"
        return self._use_found(self._trial)

    def _use_found(self, trial: Trial) -> Plan:
        self.compression = trial.candidate.compression
        return trial.found

    def _use_default(self, trial: Trial) -> Plan:
        self.compression = self._tuned.compressions[0]
        return trial.default

    def _keep(self, winner: Candidate | None, text: str) -> None:
        self.stop(text)
        if self._world.rank == 0:
            groups, compression = None, self._tuned.compressions[0]
            if winner is not None:
                groups, compression = winner.groups, winner.compression
            plan_cache.write(self._subject, FoundBuckets(groups, compression, text))


def tunes_by_default(world: World, all_reduce: AllReduce[Any], plan: Plan) -> bool:
    """Whether buckets are tuned where the script does not say how large they are: between two hosts, on the CPU.

    Between hosts the cores are free while a reduction waits for the network, so that small buckets at the end pay. Of
    two hosts, each element is a sum of two, in which no bit depends on the buckets. With more hosts, the place in a
    bucket decides in which order hosts are added up; there the buckets stay the same in all runs. So do they where sums
    of a host's ranks are rounded to 16 bits on the way, or added up by the backend, in an order of its own.
    """
    if isinstance(all_reduce, OnStream) or len(world.hosts) != 2:
        return False
    is_narrow = any(bucket.wire_dtype.itemsize == 2 for bucket in plan.buckets)
    return world.size == 2 or (all_reduce.algorithm == "hierarchical" and not is_narrow)


def open_tuner(
    world: World, all_reduce: AllReduce[Any], launcher: Launcher, plan: Plan, description: Sequence[str], tuned: Tuned
) -> Tuner:
    """A tuner for the default buckets of `plan`, of the parameters and options in `description`."""
    subject = [
        *description,
        f"{all_reduce.algorithm} {'in background' if all_reduce.in_background else 'inline'} between {world.hosts}",
        f"{world.num_cores} cores, {torch.get_num_threads()} threads, torch {torch.__version__}",
    ]
    tuner = Tuner(world, all_reduce, launcher, subject, tuned, plan.control)
    if isinstance(all_reduce, OnStream):
        tuner.stop("nothing is tuned on a GPU")
    elif not plan.buckets:
        tuner.stop("no buckets, as all gradients are sparse")
    elif not tuned.buckets and len(tuned.compressions) == 1:
        tuner.stop("")
    return tuner
