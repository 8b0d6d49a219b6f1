"""report.html: what it says and shows, and that it can be trusted with any text."""

import dataclasses
import re
import sys
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.traces import MS, shifted, simulate, with_facts

pytest.importorskip("jinja2", reason="needs jinja2: pip install 'torchring[report]'")

from torchring.observe.recorder.records import RankTrace
from torchring.observer import Phase
from torchring.report.model.merge import merge
from torchring.report.show.figures import DRAW_AS, Figure
from torchring.report.show.page import page_of, write_page
from torchring.report.show.terminal import plain
from torchring.report.verdict.analysis import analyse
from torchring.report.verdict.findings import Analysis

FIGURES = ["by-rank", "over-time", "lanes"]
BAD = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>\"'&"


def late_data() -> list[RankTrace]:
    """Rank 3 waits 40 ms longer for its data than the others do."""
    return simulate(4, 24, input_ms=[2.0, 2.0, 2.0, 42.0], noise=0.0)


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    return dataclasses.replace(analyse(merge(late_data())), problems=("Rank 9 has left no trace for 1.5 ms: why?",))


@pytest.fixture(scope="module")
def page(analysis: Analysis) -> str:
    return page_of(analysis)


class Elements(HTMLParser):
    """The elements of a page: (name, attributes), and its text outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] not in ("script", "style"):
            self.text += data

    def all(self, name: str) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.elements if tag == name]


def bars_of(figure: Figure, phase: Phase, row: str = "rank") -> list[tuple[float, float]]:
    """Where the spans of a phase begin, and how long they are, in rows whose label begins with `row`."""
    rows = [spans for label, spans in figure.rows if label.startswith(row)]
    return [(span.begin, span.end - span.begin) for spans in rows for span in spans if span.phase == phase]


def test_the_page_says_what_the_terminal_says(page: str, analysis: Analysis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    ids = [attributes["id"] for name, attributes in Elements(page).elements if name == "h2"]
    assert ids == ["problems", "advice", "time", "waits", "buckets", "step", "scaling"]
    assert page.index("<h1") < page.index('id="problems"')
    assert "rank\xa03" in page[page.index("<h1") : page.index("</h1>")]
    text = "".join(Elements(page).text.split())
    for line in plain(analysis).replace("\n  - ", "\n").splitlines():
        assert "".join(line.split()) in text


def test_findings_have_links_that_other_pages_can_name(page: str) -> None:
    ids = [attributes["id"] for _, attributes in Elements(page).elements if "id" in attributes]
    assert {link["href"][1:] for link in Elements(page).all("a")} == set(ids)
    assert len(set(ids)) == len(ids)
    assert {"verdict", "problems-rank-9-has-left-no-trace-for", *FIGURES} < set(ids)


def test_one_file_that_names_no_address(page: str, analysis: Analysis, tmp_path: Path) -> None:
    assert "//" not in page
    assert "default-src 'none'" in page
    elements = Elements(page)
    assert [a for name, a in elements.elements if a.get("src")] == []
    assert [a["href"] for a in elements.all("link")] == ["data:,"]
    write_page(analysis, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page
    write_page(dataclasses.replace(analysis, problems=("\udcff is no Unicode",)), tmp_path / "report.html")
    assert "? is no Unicode" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_text_of_users_is_only_text() -> None:
    first, *others = late_data()
    parameters = [each._replace(name=f"</script>{BAD}{i}") for i, each in enumerate(first.run_info.parameters)]
    texts: dict[str, Any] = dict.fromkeys(("host", "algorithm", "reason"), BAD)
    texts |= {"options": {BAD: BAD}, "versions": {BAD: BAD}, "parameters": tuple(parameters)}
    traces = [with_facts(it, **texts) for it in (first, *others)]
    page = page_of(dataclasses.replace(analyse(merge(traces)), problems=(BAD,)))
    assert "<img" not in page
    assert page.count("<script") == page.count("</script>") == 1
    text = Elements(page).text
    assert text.count(BAD) >= 6
    assert f"</script>{BAD}"[:48] in text
    assert f"rank 1 on {BAD}\ninput: 2 ms" in text, "what the mouse shows"


def test_what_the_figures_show(page: str, analysis: Analysis) -> None:
    figures = {name: draw(analysis) for name, draw in DRAW_AS.items()}
    expected = {Phase.INPUT: [2, 2, 2, 42], Phase.FORWARD: [30] * 4, Phase.BACKWARD: [60] * 4}
    expected |= {Phase.WAITING: [40, 40, 40, 0], Phase.EXPOSED: [18.95] * 4, Phase.OPTIMIZER: [8] * 4}
    for phase, values in expected.items():
        assert [length for _, length in bars_of(figures["by-rank"], phase)] == pytest.approx(values, abs=0.1), phase
    over_time = figures["over-time"]
    assert over_time.areas[Phase.INPUT] == pytest.approx([42.0] * 24, abs=0.1)
    assert Phase.WAITING not in over_time.areas
    assert over_time.most == pytest.approx(max(over_time.areas[Phase.OPTIMIZER])), "the lowest are the last"
    lanes = figures["lanes"]
    begins, waits = zip(*bars_of(lanes, Phase.WAITING, "buckets"), strict=True)
    reduced = [duration for _, duration in bars_of(lanes, Phase.EXPOSED, "buckets")]
    assert reduced == pytest.approx([0.95, 18.95, 18.95] * 4, abs=0.01)
    # Backward of rank 0 begins at 32 ms, that of rank 3 at 72 ms. Both take 60 ms for three buckets. A bucket has its
    # turn when the one before it is reduced.
    assert begins[:3] == pytest.approx([52.0, 92.95, 130.95], abs=0.1)
    assert waits == pytest.approx([40.0, 112.0 - 92.95, 132.0 - 130.95] * 3 + [0.0] * 3, abs=0.1)
    assert [duration for _, duration in bars_of(lanes, Phase.INPUT)] == pytest.approx([2, 2, 2, 42], abs=0.1)
    drawn = re.findall(r'x="([\d.]+)%" width="([\d.]+)%"><title>(.*?)</title>', page, re.DOTALL)
    spans = [(figure, span) for figure in figures.values() for _, spans in figure.rows for span in spans]
    for (x, width, title), (figure, span) in zip(drawn, spans, strict=True):
        length = figure.end - figure.begin
        assert float(x) == pytest.approx(100 * (span.begin - figure.begin) / length, abs=0.01)
        assert float(width) == pytest.approx(100 * (span.end - span.begin) / length, abs=0.01)
        assert title == escape(span.text)


def test_a_long_trace_becomes_at_most_300_points_that_keep_the_sum() -> None:
    (trace,) = simulate(1, 308, bucket_mb=[])
    figure = DRAW_AS["over-time"](analyse(merge([shifted(trace, 5)])))
    ((_, columns),) = figure.rows
    assert (columns[0].begin, columns[0].end, columns[-1].begin, columns[-1].end) == (5, 7, 307, 308)
    total = sum(np.subtract(figure.areas[Phase.FORWARD], figure.areas[Phase.INPUT]) * ([2] * 151 + [1]))
    assert total == pytest.approx(sum(step.ns_in(Phase.FORWARD) for step in trace.steps[5:]) / MS)


def test_of_many_ranks_those_that_others_wait_for_are_shown() -> None:
    analysis = analyse(merge(simulate(66, 4, input_ms=[2.0] * 65 + [20.0], bucket_mb=())))
    page = page_of(analysis)
    assert len(page.encode()) < 1_000_000
    shown = [label for label, _ in DRAW_AS["by-rank"](analysis).rows]
    assert len(shown) == 64
    assert "rank 65" in shown
    assert len(DRAW_AS["lanes"](analysis).rows) == 8
    assert 'id="buckets"' not in page, "there is nothing to show"


def test_what_is_missing_is_named(analysis: Analysis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"needs jinja2: pip install 'torchring\[report\]'"):
        page_of(analysis)
