"""The sections of the page, in the order of its questions: what bounds the job, what would help, and the evidence."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Final

from torchring.report.model.phases import Phase
from torchring.report.model.timing import Spread
from torchring.report.model.waits import together
from torchring.report.show import captions, figures, gantt
from torchring.report.show.drawing import (
    COLORS,
    MAX_RANKS,
    OTHER_COLOR,
    default_rank,
    shown_buckets,
    shown_phases,
    shown_ranks,
)
from torchring.report.show.formats import mean_with_spread, megabytes, milliseconds, number, percent
from torchring.report.show.markup import (
    Html,
    choice,
    element,
    html,
    join,
    legend,
    panel,
    paragraph,
    section,
    swatch,
    table,
)
from torchring.report.verdict.findings import Advice, Analysis

_MAX_ROWS: Final = 12
_TEXT: Final = "currentColor"
_MEANINGS: Final = {
    Phase.INPUT: "from the end of a step to forward: next batch, zero_grad(), logging",
    Phase.FORWARD: "the model computes",
    Phase.BACKWARD: "loss and gradients, without stops for communication",
    Phase.WAITING: "communication cannot go on, because another rank is late",
    Phase.COMMUNICATION: "exposed: the rank stands still while gradients are reduced",
    Phase.BETWEEN: "clipping, unscaling, logging",
    Phase.OPTIMIZER: "inside step()",
}


def body(analysis: Analysis) -> Html:
    """All that is visible."""
    parts = [
        _verdict(analysis),
        _problems(analysis),
        _advice(analysis),
        _time(analysis),
        _waits(analysis),
        _median_step(analysis),
        _bandwidth(analysis),
        _scaling(analysis),
    ]
    no_script = element("noscript", element("p", "The figures need JavaScript.", class_="notice"))
    return join([_header(), element("main", join([*parts, no_script])), _footer(analysis)])


def _header() -> Html:
    return element(
        "header", element("p", "torchring ", element("span", "report")), element("button", id="theme", type="button")
    )


def _verdict(analysis: Analysis) -> Html:
    about = analysis.about
    hosts = len({rank.node_rank for rank in analysis.ranks})
    steps = f"{analysis.num_steps:,}"
    samples = f"{number(analysis.samples_per_s)} samples/s, all ranks" if analysis.samples_per_s else ""
    left_out = f"{analysis.num_left_out:,} at the beginning left out" if analysis.num_left_out else ""
    facts: list[tuple[str, str | Spread, str]] = [
        ("Step", analysis.step, f"median; {milliseconds(analysis.step.mean)} on average"),
        ("Speed", f"{number(analysis.steps_per_s)} steps/s", samples),
        ("Efficiency", percent(analysis.efficiency), "ranks compute for this share of a step"),
        ("Ranks", f"{analysis.size:,}", f"on {hosts:,} hosts" if hosts > 1 else f"on one host, {about.device}"),
        ("Steps", steps, left_out),
        ("Algorithm", about.algorithm, f"overlap: {about.overlap}"),
    ]
    entries = [
        element("div", element("dt", name), element("dd", value, *([element("small", note)] if note else [])))
        for name, value, note in facts
    ]
    return element(
        "section",
        join(
            [
                element("h1", analysis.verdict.sentence),
                paragraph(captions.of_verdict(analysis)),
                element("dl", join(entries), class_="facts"),
            ]
        ),
        class_="verdict",
    )


def _problems(analysis: Analysis) -> Html:
    if not analysis.problems:
        return Html("")
    entries = join(element("li", problem) for problem in analysis.problems)
    title = element("h2", "What is missing or strange in this trace", id="problems")
    return element("section", title, element("ul", entries), class_="notice", aria_labelledby="problems")


def _advice(analysis: Analysis) -> Html:
    cards = [_card(advice, analysis) for advice in analysis.advice]
    content = [element("ol", join(cards), class_="advice")] if cards else []
    return section("advice", "What would help", paragraph(captions.of_advice(analysis)), *content)


def _card(advice: Advice, analysis: Analysis) -> Html:
    saved = analysis.step.mean - advice.predicted_ms
    note = f"saves {milliseconds(saved)}: {milliseconds(advice.predicted_ms)} a step"
    how = paragraph(advice.how) if advice.how.endswith(".") else element("pre", element("code", advice.how))
    return element(
        "li",
        element("div", element("h3", advice.what), paragraph(advice.why, class_="note")),
        element("p", f"−{percent(advice.saves_share)}", element("small", note), class_="saving number"),
        element("div", how, class_="how"),
        Html(f'<div class="bar" aria-hidden="true"><span style="width:{100 * advice.saves_share:.1f}%"></span></div>'),
    )


def _time(analysis: Analysis) -> Html:
    total = sum(spread.mean for spread in analysis.path.values())
    rows: list[list[str | Spread]] = [
        [
            join([swatch(COLORS[phase]), html(captions.name_of(phase, analysis)), element("small", _MEANINGS[phase])]),
            mean_with_spread(spread),
            percent(spread.mean / total if total else 0.0),
        ]
        for phase, spread in analysis.path.items()
        if spread.mean > 0
    ]
    first = default_rank(analysis)
    shown = shown_ranks(analysis)
    phases = [(phase.value, COLORS[phase]) for phase in shown_phases(analysis)]
    by_rank, over_time = captions.of_ranks(analysis), captions.of_time(analysis, first)
    top = figures.top_over_time(analysis)
    if top is not None:
        over_time += f" Triangles at the top mark what is longer than {milliseconds(top)}."
    options = [(f"{rank.rank} on {rank.host}", {"group": str(rank.rank)}) for rank in shown]
    selected = [rank.rank for rank in shown].index(first)
    menu = [choice("Rank", "over-time", options, selected)] if len(shown) > 1 else []
    title = "A step of the rank that the others wait for" if analysis.size > 1 else "A step"
    return section(
        "time",
        "Where the time of a step goes",
        paragraph(captions.of_path(analysis)),
        table(title, ["Phase", "Mean time in a step", "Share"], rows, texts=(0,)),
        paragraph(captions.of_start_up(analysis), class_="note"),
        element("h3", "By rank"),
        paragraph(" ".join(filter(None, [by_rank, _left_out_ranks(analysis)]))),
        panel("by-rank", figures.phases_by_rank(analysis), f"Bars, one for each rank. {by_rank}", legend(phases)),
        element("h3", "Over time"),
        paragraph(over_time),
        panel(
            "over-time",
            figures.phases_over_time(analysis),
            f"Stacked areas over steps. {over_time}",
            *menu,
            legend(phases),
        ),
    )


def _left_out_ranks(analysis: Analysis) -> str:
    if len(analysis.ranks) <= MAX_RANKS:
        return ""
    return f"Of {len(analysis.ranks):,} ranks, figures show the {MAX_RANKS} that the others wait for most."


def _waits(analysis: Analysis) -> Html:
    contents = [paragraph(captions.of_waits(analysis))]
    if analysis.waits:
        figure = figures.who_waits_for_whom(analysis)
        contents.append(panel("wait-map", figure, f"Heat map. {captions.of_waits(analysis)}"))
    least = captions.NOTICEABLE_WAIT * analysis.step.mean
    long = [(who, wait) for who, wait in together(analysis.waits) if wait.mean_ms >= least]
    if long:
        rows: list[list[str | Spread]] = [
            [f"{who} for {wait.awaited}", milliseconds(wait.mean_ms), percent(wait.share), mean_with_spread(wait.cost)]
            for who, wait in long[:_MAX_ROWS]
        ]
        columns = ["Who waits", "Mean of all steps", "Steps with a wait", "Such a wait"]
        contents.append(table(_first_rows("The longest waits", len(long)), columns, rows, texts=(0,)))
    contents.append(paragraph(captions.of_clock(analysis), class_="note"))
    if analysis.buckets:
        contents += [element("h3", "Buckets"), paragraph(captions.of_buckets(analysis)), _bucket_table(analysis)]
    if analysis.late_parameters:
        contents += [element("h3", "Late parameters"), _parameter_table(analysis)]
    return section("waits", "Who waits for whom", *contents)


def _bucket_table(analysis: Analysis) -> Html:
    buckets = shown_buckets(analysis, _MAX_ROWS)
    rows: list[list[str | Spread]] = [
        [
            str(bucket.index),
            megabytes(bucket.num_bytes),
            bucket.ready,
            bucket.reducing,
            bucket.exposed,
            str(bucket.last_rank),
            _some(bucket.names),
        ]
        for bucket in buckets
    ]
    columns = ["Bucket", "Size", "Ready in backward", "Reduction", "Exposed", "Last rank", "Parameters"]
    return table(
        _first_rows("Buckets with most exposed communication", len(analysis.buckets)), columns, rows, texts=(6,)
    )


def _parameter_table(analysis: Analysis) -> Html:
    rows: list[list[str | Spread]] = [
        [
            late.name,
            megabytes(late.num_bytes),
            str(late.bucket),
            percent(late.ready_share),
            milliseconds(late.holds_ms),
            milliseconds(late.exposed_ms),
            late.why,
        ]
        for late in analysis.late_parameters[:_MAX_ROWS]
    ]
    columns = ["Parameter", "Size", "Bucket", "Ready at (of backward)", "Holds its bucket for", "Exposed", "Why"]
    caption = _first_rows("Parameters whose gradients come late", len(analysis.late_parameters))
    return table(caption, columns, rows, texts=(0, 6))


def _median_step(analysis: Analysis) -> Html:
    groups = gantt.ranks_in_view(analysis)
    options = [
        (f"{group[0]} to {group[-1]}", {"layout": {"yaxis.range": gantt.lanes_in_view(analysis, group)}})
        for group in groups
    ]
    selected = next(i for i, group in enumerate(groups) if default_rank(analysis) in group)
    menu = [choice("Ranks", "lanes", options, selected)] if len(groups) > 1 else []
    used = {span.phase for span in analysis.median_step.spans}
    if analysis.median_step.buckets:
        used |= {Phase.WAITING, Phase.COMMUNICATION}
    colors = [(phase.value, COLORS[phase]) for phase in Phase if phase in used]
    text = captions.of_lanes(analysis)
    return section(
        "step",
        "One step, rank by rank",
        paragraph(text),
        panel("lanes", gantt.median_step(analysis), f"Bars over time. {text}", *menu, legend(colors)),
        paragraph("Drag over a figure to zoom in, double-click to return.", class_="note mouse"),
    )


def _bandwidth(analysis: Analysis) -> Html:
    if not analysis.buckets:
        return Html("")
    text = captions.of_bandwidth(analysis)
    colors = [("bus bandwidth of a bucket", COLORS[Phase.COMMUNICATION]), ("all buckets together (dashed)", _TEXT)]
    figure = figures.bandwidth_by_bucket(analysis)
    return section(
        "bandwidth",
        "How fast gradients travel",
        paragraph(text),
        panel("bus-bandwidth", figure, f"Bars. {text}", legend(colors)),
    )


def _scaling(analysis: Analysis) -> Html:
    if not analysis.predictions:
        return Html("")
    text = captions.of_scaling(analysis)
    colors = [
        ("everything else", OTHER_COLOR),
        (Phase.WAITING.value, COLORS[Phase.WAITING]),
        (Phase.COMMUNICATION.value, COLORS[Phase.COMMUNICATION]),
        ("measured", _TEXT),
    ]
    rows = [
        [
            f"{each.num_ranks:,}",
            milliseconds(each.step_ms),
            milliseconds(each.exposed_ms),
            milliseconds(each.waiting_ms),
            percent(each.efficiency),
            number(each.efficiency * each.num_ranks, 10),
        ]
        for each in analysis.predictions
    ]
    columns = ["Ranks", "Step", "Communication", "Waiting", "Efficiency", "Speed-up"]
    return section(
        "scaling",
        "With more ranks",
        paragraph(text),
        paragraph(captions.of_hiding(analysis)),
        element("h3", "Predicted step time"),
        panel("step-time", figures.predicted_step(analysis), f"Stacked bars. {text}", legend(colors)),
        element("h3", "Predicted efficiency"),
        panel("efficiency", figures.predicted_efficiency(analysis), f"A line over the number of ranks. {text}"),
        table("Predictions", columns, rows),
    )


def _footer(analysis: Analysis) -> Html:
    about = analysis.about
    versions = ", ".join(f"{name} {version}" for name, version in about.versions.items())
    options = ", ".join(f"{name}={value}" for name, value in about.options.items())
    written = datetime.fromtimestamp(about.written_at, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    lines = [
        f"Trace written {written} with {versions}.",
        f"Algorithm {about.algorithm}: {about.reason}" if about.reason else "",
        f"Options: {options}" if options else "",
    ]
    return element("footer", join(paragraph(line) for line in lines))


def _first_rows(caption: str, num_rows: int) -> str:
    return caption if num_rows <= _MAX_ROWS else f"{caption} ({_MAX_ROWS} of {num_rows:,})"


def _some(names: tuple[str, ...]) -> str:
    """The first of some names, and how many more there are."""
    shown = ", ".join(names[:2])
    return f"{shown} and {len(names) - 2:,} more" if len(names) > 2 else shown or "–"
