"""Puts the traces of all ranks together: on one clock, with the steps that all of them have."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from torchring.errors import ranks_in_words
from torchring.observe.recorder.files import TraceError, find, read
from torchring.observe.recorder.records import ENDED_WELL, ClockOffset, RankTrace, StepRecord

BUCKET_TIMES: Final = ("ready", "launched", "started", "reduced")


@dataclass(frozen=True)
class Job:
    """The traces of a job."""

    traces: tuple[RankTrace, ...]  # of the ranks that have one, by rank. Times are on rank 0's clock.
    # steps that all these ranks have, at least one; steps[i][j] is the i-th such step of `traces[j]`
    steps: tuple[tuple[StepRecord, ...], ...]
    clock_error_ms: float  # times of different hosts differ by at most this; 0 on one host
    problems: tuple[str, ...]  # sentences: what is missing or strange
    ended_badly: str = ""  # how the job ended, if it did not end well: a sentence
    group: tuple[int, ...] = ()  # the ranks, if these are a group that reduces for itself
    is_part: bool = False  # ranks also reduce in other groups, whose communication is in these times

    @property
    def size(self) -> int:
        """Number of ranks of the job, whether they have a trace or not."""
        return self.traces[0].run_info.size


def load(folder: Path) -> list[Job]:
    """Read a folder of traces, one job for each group of ranks. Raises TraceError if nothing in it can be read."""
    how = f"`torchring run --trace {folder} ...` writes one"
    try:
        paths = find(folder)
    except OSError as error:
        raise TraceError(f"cannot read {folder}: {error.strerror}. A trace is a folder; {how}") from error
    if not paths:
        raise TraceError(
            f"{folder} has no trace: no file is named like rank-00000.npz. {how}, if the script calls torchring.wrap() "
            "and makes a step"
        )
    problems: list[str] = []
    traces = read_all(paths, problems)
    if not traces:
        raise TraceError(f"no file of the trace in {folder} can be read. {' '.join(problems)}")
    return list(map(_with_killed, merge_groups(traces.values(), problems)))


def _with_killed(job: Job) -> Job:
    """The same job, in which somebody may have killed ranks."""
    running = {trace.run_info.rank: trace for trace in job.traces if not trace.run_info.ended_by}
    if not running:
        return job
    was, its, still = ("were", "their", "run") if len(running) > 1 else ("was", "its", "runs")
    remark = killed = f"{ranks_in_words(running).capitalize()} {was} killed, or still {still}."
    if any(trace.steps[0].number > 0 for trace in running.values()):
        remark += f" Of {its} steps, only {max(len(trace.steps) for trace in running.values())} are known."
    # As long as no rank has ended, the job runs. An error of another rank is what came of a rank that was killed.
    ended_badly = killed if len(running) < len(job.traces) else job.ended_badly
    return dataclasses.replace(job, problems=(*job.problems, remark), ended_badly=ended_badly)


def read_all(paths: Mapping[int, Path], problems: list[str]) -> dict[int, RankTrace]:
    """The traces that can be read, by rank. Adds a sentence to `problems` for each other file."""
    found = {}
    for rank, path in paths.items():
        try:
            found[rank] = read(path)
        except TraceError as error:
            problems.append(f"A file cannot be read: {error}.")
    return found


def merge_groups(traces: Iterable[RankTrace], problems: Sequence[str] = ()) -> list[Job]:
    """As `merge`, one job for each group of ranks that reduce together."""
    found = list(problems)
    kept = _of_one_run(list(traces), found)
    groups = sorted({_group_of(trace, each.optimizer) for trace in kept for each in trace.run_info.parameters})
    if not any(groups):
        return [merge(kept, found)]
    found.append(
        "Ranks reduce in groups, of which this is one. Waits in another group count as communication, and waits "
        "outside of torchring, as in tensor or pipeline parallelism, as computing."
    )
    is_part = any(len({_group_of(each, p.optimizer) for p in each.run_info.parameters}) > 1 for each in kept)
    jobs = (merge(_parts(kept, group), found, group) for group in groups)
    return [dataclasses.replace(job, is_part=is_part) for job in jobs]


def _group_of(trace: RankTrace, optimizer: int) -> tuple[int, ...]:
    return tuple(trace.run_info.groups.get(str(optimizer), {}).get("ranks", ()))


def _parts(traces: Sequence[RankTrace], group: tuple[int, ...]) -> list[RankTrace]:
    """What the ranks of a group have recorded of its optimizers; () is the group of all ranks."""
    members = [trace for trace in traces if not group or trace.run_info.rank in group]
    parts = []
    for trace in members:
        info = trace.run_info
        mine = {each.optimizer for each in info.parameters if _group_of(trace, each.optimizer) == group}
        about: dict[str, Any] = {}
        if group and mine:
            near = [each for each in members if each.run_info.node_rank == info.node_rank]
            about = {**info.groups[str(max(mine))], "size": len(group), "local_size": len(near)}
            about["host_ranks"] = info.local_size
            del about["ranks"]
        clock = tuple(ClockOffset(*each) for each in about.pop("clock", trace.clock))
        about["parameters"] = tuple(each for each in info.parameters if each.optimizer in mine)
        steps = (
            dataclasses.replace(s, buckets=tuple(b for b in s.buckets if b.optimizer in mine)) for s in trace.steps
        )
        arrivals = tuple(each for each in trace.arrivals if each.optimizer in mine)
        parts.append(RankTrace(dataclasses.replace(info, **about), tuple(steps), arrivals, clock, trace.samples))
    return parts


def merge(traces: Iterable[RankTrace], problems: Sequence[str] = (), group: tuple[int, ...] = ()) -> Job:
    """Put the traces of ranks together, which reduce together. Raises TraceError if none has written down a step."""
    found = list(problems)
    kept = _of_one_run(sorted(traces, key=lambda trace: trace.run_info.rank), found)
    missing = sorted(set(group or range(kept[0].run_info.size)) - {trace.run_info.rank for trace in kept})
    if missing:
        have, it = ("have", "them") if len(missing) > 1 else ("has", "it")
        found.append(
            f"{ranks_in_words(missing).capitalize()} of {kept[0].run_info.size} {have} no trace that can be used. "
            f"Waiting for {it} counts as communication."
        )
    failed = [trace.run_info for trace in kept if trace.run_info.ended_by not in ENDED_WELL]
    found += (f'Rank {run_info.rank} ended with an error: "{run_info.ended_by}".' for run_info in failed)
    # An exception that nobody caught has its class in front. Other texts may say that another rank is lost.
    failed.sort(key=lambda run_info: not re.match(r"\w+: ", run_info.ended_by))
    kept = _with_common_steps(kept, found)
    # On the first rank's clock: ranks of several hosts compare their clocks.
    first = group[0] if group else 0
    home = next((trace.run_info.node_rank for trace in kept if trace.run_info.rank == first), 0)
    aligned = [_moved(trace) if trace.run_info.node_rank != home and trace.clock else trace for trace in kept]
    error_ms = max((offset.error_ns for trace in kept for offset in trace.clock), default=0) / 1e6
    numbers = set.intersection(*({step.number for step in trace.steps} for trace in aligned))
    rows = [[step for step in trace.steps if step.number in numbers] for trace in aligned]
    ended_badly = f'Rank {failed[0].rank} ended with an error: "{failed[0].ended_by}".' if failed else ""
    if group and error_ms:
        found.append("The clocks of its hosts were compared at the start only, and may have drifted since.")
    return Job(tuple(aligned), tuple(zip(*rows, strict=True)), error_ms, tuple(found), ended_badly, group)


def _of_one_run(traces: list[RankTrace], problems: list[str]) -> list[RankTrace]:
    """The traces of the run whose rank wrote its file last."""
    newest = max(traces, key=lambda trace: (trace.run_info.written_at, -trace.run_info.rank)).run_info
    earlier = [trace.run_info.rank for trace in traces if trace.run_info.run != newest.run]
    if earlier:
        files = "file of" if len(earlier) == 1 else "files of"
        problems.append(
            f"The {files} {ranks_in_words(earlier)} {'is' if len(earlier) == 1 else 'are'} left over from another run "
            f"than that of rank {newest.rank}, or from before an elastic job has lost or got ranks."
        )
    return [trace for trace in traces if trace.run_info.run == newest.run]


def _with_common_steps(traces: list[RankTrace], problems: list[str]) -> list[RankTrace]:
    """The traces that share steps with the rank that has most steps. Raises TraceError if there is no step."""
    longest = max(traces, key=lambda trace: (len(trace.steps), -trace.run_info.rank))
    if not longest.steps:
        told = " ".join(problems)
        raise TraceError(f"the trace has no step: no rank had ended one when the trace was written. {told}".rstrip())
    common = {step.number for step in longest.steps}
    kept = []
    for trace in traces:
        numbers = {step.number for step in trace.steps}
        if common & numbers:
            common &= numbers
            kept.append(trace)
        elif numbers:
            problems.append(
                f"Rank {trace.run_info.rank} has steps {min(numbers)} to {max(numbers)}, of which the other ranks have "
                "none. It is left out."
            )
        else:
            problems.append(f"Rank {trace.run_info.rank} has written down no step. It is left out.")
    return kept


def _moved(trace: RankTrace) -> RankTrace:
    """The same trace with times of rank 0's clock. Between measurements, a clock drifts evenly."""
    at = np.array([each.at for each in trace.clock], np.int64)
    offsets = np.array([each.offset_ns for each in trace.clock], np.int64)
    order = np.argsort(at)
    at, offsets = at[order], offsets[order]
    # Differences are small enough for floating-point numbers; the times themselves are not.
    begins = np.array([step.begin for step in trace.steps], np.int64)
    drift = np.interp((begins - at[0]).astype(float), (at - at[0]).astype(float), (offsets - offsets[0]).astype(float))
    earlier = offsets[0] + np.round(drift).astype(np.int64)
    steps = tuple(_earlier(step, int(ns)) for step, ns in zip(trace.steps, earlier, strict=True))
    return dataclasses.replace(trace, steps=steps)


def _earlier(step: StepRecord, ns: int) -> StepRecord:
    def earlier(record: Any, names: Sequence[str], **others: Any) -> Any:
        return dataclasses.replace(record, **{name: getattr(record, name) - ns for name in names}, **others)

    parts = tuple(earlier(part, ("begin", "end")) for part in step.phases)
    buckets = tuple(earlier(bucket, BUCKET_TIMES) for bucket in step.buckets)
    moved: StepRecord = earlier(step, ("begin", "end"), phases=parts, buckets=buckets)
    return moved
