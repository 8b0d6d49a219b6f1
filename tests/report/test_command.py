"""`torchring report`: what it prints and writes, and what it says about bad input.

python -m tests.report.test_command      writes exports.txt anew; look at the differences
"""

import dataclasses
import json
import tempfile
from pathlib import Path

import pytest

from tests.support.documents import golden
from tests.support.traces import simulate, with_facts, write
from torchring.cli import main
from torchring.report import command

NUM_STEPS = 10
EXPORTS = Path(__file__).parent / "exports.txt"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a job whose rank 1 loads slowly."""
    faults = {"input_ms": [2, 62, 2], "noise": 0.0}
    for trace in simulate(3, NUM_STEPS, skew_ms=[0, 500, 500], ranks_per_host=1, **faults):
        write(tmp_path / "trace", trace)
    return tmp_path / "trace"


def test_the_verdict_comes_first_and_the_page_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    monkeypatch.setattr(command, "write_page", lambda analysis, path: written.append((analysis.verdict.rank, path)))
    for options, page in (([], folder / "report.html"), (["--html", "elsewhere.html"], Path("elsewhere.html"))):
        assert main(["report", str(folder), *options]) == 0
        assert written.pop() == (1, page)
        out, err = capsys.readouterr()
        first = " ".join(out.partition("\n\n")[0].split())
        assert "% of each step waits for data on rank 1, or for other code between step() and forward" in first
        assert first.endswith("(62 ms of 177 ms).")
        assert (out.splitlines()[-1], err) == (f"Written: {page}", "")
    assert main(["report", str(folder), "--no-html", "--bandwidth", "10"]) == 0
    assert sorted(path.name for path in folder.iterdir()) == [f"rank-0000{rank}.npz" for rank in range(3)]
    out = capsys.readouterr().out
    for said in ("What would help", "times of hosts may differ by 0.05 ms", "the network that was given (1.2 GB/s"):
        assert said in " ".join(out.split())
    assert written == []
    assert "\x1b" not in out
    assert main(["report", str(folder), str(folder)]) == 0
    assert capsys.readouterr().out.startswith("9 steps are too few to tell a change from noise.")


def test_what_cannot_be_read_is_one_sentence(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (empty := tmp_path / "empty").mkdir()
    gone = folder / "gone" / "table.csv"
    for arguments, said in (
        ([empty], f"torchring report: {empty} has no trace"),
        ([folder, empty], f"torchring report: {empty} has no trace"),
        ([folder, "--no-html", "--csv", gone], f"torchring report: cannot write {gone}: No such file or directory\n"),
    ):
        assert main(["report", *map(str, arguments)]) == 1
        err = capsys.readouterr().err
        assert err.startswith(said)
        assert err.count("\n") == 1


def test_a_package_that_is_missing_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(analysis: object, path: object) -> None:
        raise ImportError("report.html needs jinja2: pip install 'torchring[report]'")

    monkeypatch.setattr(command, "write_page", refuse)
    assert main(["report", str(folder)]) == 0, "the summary is a report, too"
    assert main(["report", str(folder), "--html", str(folder / "page.html")]) == 2
    out, err = capsys.readouterr()
    assert out.count("waits for data on rank 1") == 2
    assert err == 2 * "torchring report: report.html needs jinja2: pip install 'torchring[report]'\n"


def exported(folder: Path) -> dict[str, str]:
    """Of two steps, in which backward stands still for 7 ms, and rank 1 loads slowly; an event of the trace a line."""
    for trace in simulate(3, 2, skew_ms=[0, 500, 500], ranks_per_host=1, input_ms=[2, 62, 2], noise=0.0):
        steps = tuple(dataclasses.replace(step, stall_ns=7_000_000) for step in trace.steps)
        write(folder, dataclasses.replace(trace, steps=steps))
    table, events = folder / "table.csv", folder / "trace.json"
    assert main(["report", str(folder), "--no-html", "--csv", str(table), "--trace-json", str(events)]) == 0
    lines = map(json.dumps, json.loads(events.read_text())["traceEvents"])
    return {"table": table.read_text(), "trace": "".join(f"{line}\n" for line in lines)}


def test_what_other_programs_get(tmp_path: Path) -> None:
    assert exported(tmp_path) == golden(EXPORTS)


def test_a_host_name_is_no_formula(tmp_path: Path) -> None:
    (trace,) = simulate(1, 2)
    write(tmp_path, with_facts(trace, host="=HYPERLINK(1)"))
    assert main(["report", str(tmp_path), "--no-html", "--csv", str(tmp_path / "table.csv")]) == 0
    assert "0,0,'=HYPERLINK(1)," in (tmp_path / "table.csv").read_text()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        texts = exported(Path(folder)).items()
    EXPORTS.write_text("".join(f"=== {name}\n{text}" for name, text in texts), encoding="utf-8")
