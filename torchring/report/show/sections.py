"""What the report says: headings, sentences and tables. The terminal prints them, and the page also draws figures."""

import math
from dataclasses import dataclass
from typing import Final

from torchring.errors import ranks_in_words
from torchring.observe.recorder.records import RunInfo
from torchring.observer import Phase
from torchring.placement import count
from torchring.report.model.buckets import BucketSummary
from torchring.report.model.scaling import range_of
from torchring.report.model.timing import Spread
from torchring.report.verdict.findings import NOTICEABLE_WAIT, Analysis
from torchring.report.words import NAMES, about, number, share_in_words

_MAX_ROWS: Final = 8
_MAX_NAME: Final = 48
_MOST_RANKS: Final = 64  # that figures show


@dataclass(frozen=True)
class Section:
    """A heading, then sentences, then a table, then figures of the page. The second line of a sentence is code."""

    name: str  # a word
    title: str
    sentences: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    figures: tuple[str, ...] = ()


def sections(analysis: Analysis) -> list[Section]:
    """The sections below the verdict, without empty ones."""
    no_advice = "Nothing that is known." if analysis.has_enough_steps else "So few steps do not tell."
    advice = (
        f"- {each.what}: {share_in_words(each.saves_share)} less, {about(each.predicted_ms)} ms a step. "
        f"{each.why}\n{each.how}"
        for each in analysis.advice
    )
    number_of_median = analysis.timing.numbers[analysis.median_step]
    found = [
        Section("problems", "What is missing or strange", analysis.problems),
        Section(
            "advice", "What would help, and how much of the time that a sample takes", tuple(advice) or (no_advice,)
        ),
        table_of_phases(analysis),
        table_of_waits(analysis),
        _buckets(analysis),
        Section("step", f"Step {number_of_median:,}, of median duration", figures=("lanes",)),
        _predictions(analysis),
    ]
    return [section for section in found if section.rows or section.sentences or section.figures]


def facts(analysis: Analysis) -> str:
    """What was run, and how fast it was."""
    run_info = analysis.run_info
    hosts = len({rank.host for rank in analysis.ranks})
    speed = f"{analysis.step.mean:.3g} ms on average, {number(analysis.steps_per_s)} steps/s"
    samples = f", {analysis.samples_per_s:,.0f} samples/s" if analysis.samples_per_s else ""
    efficiency = f", efficiency {share_in_words(analysis.efficiency)}" if analysis.size > 1 else ""
    first = "first step does" if analysis.num_left_out == 1 else f"first {analysis.num_left_out} do"
    left_out = f"; the {first} not count" if analysis.num_left_out else ""
    error = analysis.job.clock_error_ms
    clocks = f"; times of hosts may differ by {error:.2g} ms" if error else ""
    return (
        f"{count(analysis.size, 'rank')} on {count(hosts, 'host')}, {run_info.device}, algorithm {run_info.algorithm}, "
        f"overlap {run_info.overlap}. {count(analysis.num_steps, 'step')} of {_median(analysis.step)} ms (the median), "
        f"{speed}{samples}{efficiency}{left_out}{clocks}. In brackets: 20 % and 80 % of the steps are below."
    )


def shown_ranks(analysis: Analysis, most: int = _MOST_RANKS) -> list[int]:
    """The ranks that others wait for most, in order."""
    blamed = analysis.verdict.rank
    by_blame = sorted(analysis.ranks, key=lambda rank: (rank.rank != blamed, rank.phases[Phase.WAITING].mean))
    return sorted(rank.rank for rank in by_blame[:most])


def table_of_phases(analysis: Analysis) -> Section:
    ranks, title = list(analysis.ranks), "Milliseconds of a step, by rank, on average"
    if len(ranks) > _MAX_ROWS:
        title += f" (those of {len(ranks)} for which others wait most)"
        shown = shown_ranks(analysis, _MAX_ROWS)
        ranks = [rank for rank in ranks if rank.rank in shown]
    has_hosts = len({rank.host for rank in analysis.ranks}) > 1
    least = NOTICEABLE_WAIT * analysis.step.mean
    has_queue = any(rank.queued is not None and rank.queued.mean >= least for rank in analysis.ranks)
    rows = [
        (
            str(rank.rank),
            *(number(spread.mean) for spread in (rank.step, *(rank.phases[phase] for phase in analysis.phases))),
            *([number(rank.queued.mean) if rank.queued else "?"] if has_queue else []),
            *([rank.host.partition(".")[0]] if has_hosts else []),
        )
        for rank in ranks
    ]
    columns = {phase: NAMES[phase].split()[0] for phase in Phase}
    columns |= {Phase.EXPOSED: "comm.", Phase.OPTIMIZER: "step()"}
    if not analysis.costs.is_forward_known:
        columns[Phase.INPUT] = "input and forward"
    names = [*("rank", "step"), *(columns[phase] for phase in analysis.phases)]
    names += ["no core"] * has_queue + ["host"] * has_hosts
    return Section("time", title, (), tuple(names), tuple(rows), ("over-time",))


def table_of_waits(analysis: Analysis) -> Section:
    """Who waits for whom. No rows if nobody waits for long."""
    least = NOTICEABLE_WAIT * analysis.step.mean
    rows = [
        (
            *(str(wait.awaited), number(wait.mean_ms), share_in_words(wait.share), _median(wait.cost)),
            ranks_in_words(wait.waiting),
        )
        for wait in analysis.waits[:_MAX_ROWS]
        if wait.mean_ms >= least
    ]
    columns = ("rank", "ms a step", "of steps", "then ms", "awaited by")
    return Section("waits", "Who waits for whom", (), columns, tuple(rows))


def _buckets(analysis: Analysis) -> Section:
    slowest = sorted(analysis.buckets, key=lambda bucket: -bucket.exposed.median)[:_MAX_ROWS]
    rows = [_bucket(bucket) for bucket in slowest]
    title = "Buckets"
    if len(rows) < len(analysis.buckets):
        title += f" (those {len(rows)} of {len(analysis.buckets)} that backward hides least)"
    late = tuple(f"{each.name} is late. {each.why}" for each in analysis.late_parameters[:_MAX_ROWS])
    if errors := analysis.run_info.compression_error:
        shares = ", ".join(f"{share:.2g} ({kind})" for kind, share in sorted(errors.items()))
        late += (f"Compression changed gradients by these shares of their norm, when it was looked at last: {shares}.",)
    columns = ("bucket", "MB", "ready ms", "takes ms", "exposed ms", "MB/s", "parameters")
    return Section("buckets", title, late, columns, tuple(rows))


def _bucket(bucket: BucketSummary) -> tuple[str, ...]:
    names = ", ".join(bucket.names)
    names = names if len(names) <= _MAX_NAME else f"{bucket.names[0][:_MAX_NAME]} and {len(bucket.names) - 1} more"
    measured = map(_median, (bucket.ready, bucket.reducing, bucket.exposed))
    return (str(bucket.index), f"{bucket.num_bytes / 1e6:.3g}", *measured, _median(bucket.bus_bandwidth, 1e3), names)


def _predictions(analysis: Analysis) -> Section:
    rows = [
        (
            f"{of_size[0].num_ranks:,}",
            *(about(*range_of(name, of_size, analysis.size)) for name in ("step_ms", "exposed_ms", "waiting_ms")),
            f"{about(*range_of('efficiency', of_size, analysis.size), factor=100)} %",
        )
        for of_size in analysis.predictions
    ]
    sentences = filter(None, (analysis.predictions_note, about_batch(analysis.run_info)))
    columns = ("ranks", "step ms", "comm. ms", "waiting ms", "efficiency")
    return Section("scaling", "Predicted", tuple(sentences), columns, tuple(rows))


def _median(spread: Spread, factor: float = 1.0) -> str:
    """The median: "61 [58, 66]"."""
    median, low, high = (number(factor * value) for value in (spread.median, spread.low, spread.high))
    return f"{median} [{low}, {high}]"


def about_batch(run_info: RunInfo) -> str:
    """Whether a larger batch still pays, in one sentence; "" if the noise scale is unknown.

    With batch B, a training takes steps in proportion to 1 + noise scale / B. (McCandlish et al. 2018, equation 2.7)
    """
    batch, scale = run_info.batch_size, run_info.noise_scale
    if batch <= 0 or scale < 0:
        return ""
    if math.isinf(scale):
        return f"Batch {batch:,.0f}; noise hides the gradient of so few samples: many times the ranks still pay."
    twice, four_times = ((1 + scale / (n * batch)) / (1 + scale / batch) for n in (2, 4))
    return (
        f"Batch {batch:,.0f}; noise scale about {float(f'{scale:.2g}'):,.0f}: twice the ranks would take "
        f"{share_in_words(twice)} of the steps, and four times the ranks {share_in_words(four_times)}."
    )
