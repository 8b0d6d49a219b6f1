"""The facts that the verdict, the advice and the remarks are drawn from."""

from __future__ import annotations

from dataclasses import dataclass

from torchring.observe.recorder.records import RunInfo
from torchring.report.model.buckets import BucketSummary, LateParameter
from torchring.report.model.loader_time import LoaderTime
from torchring.report.model.merge import Job
from torchring.report.model.network import Network
from torchring.report.model.ranks import StartUp
from torchring.report.model.scaling import Connections, Workload
from torchring.report.model.timing import Array, Steps
from torchring.report.model.waits import Critical
from torchring.report.verdict.costs import Costs
from torchring.report.verdict.pauses import Pauses


@dataclass(frozen=True)
class Situation:
    """What is known of a job. Numbers are means over the steps that count."""

    job: Job
    timing: Steps  # steps with a pause do not count
    critical: Critical
    costs: Costs
    step_ms: float
    start_up: StartUp | None
    pauses: tuple[Pauses, ...]  # the most costly first
    # What ranks compute
    efficiency: float
    backward_ms: float  # on the slowest rank
    who_has_cores: str  # while a rank has none: a clause
    loading: LoaderTime | None  # None if nothing is known of loading
    # Communication
    exposed_ms: float  # in a step that has the buckets below
    buckets: tuple[BucketSummary, ...]
    late: tuple[LateParameter, ...]
    network: Network | None  # None if it is unknown, as `links`
    links: Connections | None
    workload: Workload

    @property
    def run_info(self) -> RunInfo:
        return self.job.traces[0].run_info

    @property
    def cycle(self) -> Array:
        """[S, R, 7], `Critical.cycle` of the steps that count."""
        return self.critical.cycle[self.timing.counts]
