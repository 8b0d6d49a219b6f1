"""report.html: what it says and shows, and that it can be trusted with any text."""

import base64
import dataclasses
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.traces import MS, shifted, simulate, with_facts

pytest.importorskip("plotly", reason="needs plotly: pip install 'torchring[report]'")

from torchring.observe.recorder.records import RankTrace
from torchring.observer import Phase
from torchring.report.model.merge import merge
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
    return dataclasses.replace(analyse(merge(late_data())), problems=("Rank 9 has left no trace.",))


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


def without_plotly(page: str) -> str:
    from plotly.offline import get_plotlyjs

    assert page.count(get_plotlyjs()) == 1
    return page.replace(get_plotlyjs(), "")


def traces_of(page: str, figure: str) -> dict[str, dict[str, Any]]:
    """The traces of a figure, by name or else by number, with all arrays decoded."""
    found = re.search(rf'Plotly\.newPlot\(\s*"{figure}",\s*', page)
    assert found, f"there is no figure {figure}"
    traces, _ = json.JSONDecoder().raw_decode(page[found.end() :])
    return {str(trace.get("name", i)): _decoded(trace) for i, trace in enumerate(traces)}


def _decoded(value: Any) -> Any:
    if isinstance(value, dict) and "bdata" in value:
        array = np.frombuffer(base64.b64decode(value["bdata"]), value["dtype"])
        return array.reshape([int(n) for n in str(value.get("shape", len(array))).split(",")])
    return {key: _decoded(each) for key, each in value.items()} if isinstance(value, dict) else value


def test_the_page_says_what_the_terminal_says(page: str, analysis: Analysis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    ids = [attributes["id"] for name, attributes in Elements(page).elements if name == "h2"]
    assert ids == ["problems", "advice", "time", "waits", "buckets", "step", "scaling"]
    assert page.index("<h1>") < page.index('id="problems"')
    assert "rank 3" in page[page.index("<h1>") : page.index("</h1>")]
    text = "".join(Elements(page).text.split())
    for line in plain(analysis).replace("\n  - ", "\n").splitlines():
        assert "".join(line.split()) in text


def test_one_file_that_names_no_address(page: str, analysis: Analysis, tmp_path: Path) -> None:
    ours = without_plotly(page)
    assert "//" not in ours
    assert "default-src 'none'" in ours
    elements = Elements(ours)
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
    page = without_plotly(page_of(dataclasses.replace(analyse(merge(traces)), problems=(BAD,))))
    assert "<img" not in page
    assert page.count("<script") == page.count("</script>") == len(FIGURES) + 3  # two of the library
    text = Elements(page).text
    assert text.count(BAD) >= 6
    assert f"</script>{BAD}"[:48] in text
    hovers = traces_of(page, "by-rank")["input"]["hovertext"]
    assert all("<script" not in each and "&lt;script" in each for each in hovers)


def test_what_the_figures_show(page: str) -> None:
    bars = traces_of(page, "by-rank")
    expected = {"input": [2, 2, 2, 42], "forward": [30] * 4, "backward": [60] * 4, "optimizer": [8] * 4}
    expected |= {"waiting for a rank": [40, 40, 40, 0], "communication": [18.95] * 4}
    for name, values in expected.items():
        assert bars[name]["x"] == pytest.approx(values, abs=0.1), name
    areas = traces_of(page, "over-time")
    assert areas["input"]["y"] == pytest.approx([42.0] * 24, abs=0.1)
    assert "waiting for a rank" not in areas
    lanes = traces_of(page, "lanes")
    reduced, waits = lanes["bucket is reduced"], lanes["bucket waits"]
    assert reduced["x"] == pytest.approx([0.95, 18.95, 18.95] * 4, abs=0.01)
    # Backward of rank 0 begins at 32 ms, that of rank 3 at 72 ms. Both take 60 ms for three buckets. A bucket has its
    # turn when the one before it is reduced.
    assert waits["base"][:3] == pytest.approx([52.0, 92.95, 130.95], abs=0.1)
    assert waits["x"] == pytest.approx([40.0, 112.0 - 92.95, 132.0 - 130.95] * 3 + [0.0] * 3, abs=0.1)
    assert lanes["input"]["x"] == pytest.approx([2, 2, 2, 42], abs=0.1)


def test_a_long_trace_becomes_at_most_300_points_that_keep_the_sum() -> None:
    (trace,) = simulate(1, 308, bucket_mb=[])
    areas = traces_of(page_of(analyse(merge([shifted(trace, 5)]))), "over-time")
    assert areas["forward"]["x"][:2].tolist() == [5, 7]
    total = sum(areas["forward"]["y"] * ([2] * 151 + [1]))
    assert total == pytest.approx(sum(step.ns_in(Phase.FORWARD) for step in trace.steps[5:]) / MS)


def test_of_many_ranks_those_that_others_wait_for_are_shown() -> None:
    page = page_of(analyse(merge(simulate(66, 4, input_ms=[2.0] * 65 + [20.0], bucket_mb=()))))
    assert len(page.encode()) < 6_000_000
    shown = traces_of(page, "by-rank")["input"]["y"]
    assert len(shown) == 64
    assert "65" in shown
    assert len(traces_of(page, "lanes")["input"]["y"]) == 8
    assert 'id="buckets"' not in page, "there is nothing to show"


def test_what_is_missing_is_named(analysis: Analysis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"needs plotly and jinja2: pip install 'torchring\[report\]'"):
        page_of(analysis)
