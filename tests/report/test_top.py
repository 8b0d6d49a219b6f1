"""`torchring top` shows what live files say, and ends when the job has ended."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.traces import simulate, with_facts, write
from torchring import cli
from torchring.observe.recorder.files import path_of
from torchring.observe.recorder.records import RankTrace
from torchring.report.show import top


def write_live(folder: Path, traces: Sequence[RankTrace], age: float = 0.0) -> None:
    for trace in traces:
        write(folder, with_facts(trace, ended_by="", written_at=time.time() - age))


def test_a_job_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pause of 2 s counts in the speed, as it does for whoever waits for the job."""
    write_live(tmp_path, simulate(2, 50, input_ms=[2, 60], noise=0))
    assert cli.main(["top", str(tmp_path), "--once"]) == 0
    first, verdict, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("Step 50: ")
    assert first.endswith("2 ranks, the last 47 steps.")
    assert "waits for data on rank 1" in verdict
    assert any(line.startswith("  1 ") and line.endswith("rank 0") for line in rest), "rank 0 waits for rank 1"
    write_live(tmp_path, simulate(2, 50), age=60)
    assert re.search(r"^No rank has made a step for [6-9]\d s\.$", top.look(tmp_path).text, re.MULTILINE)
    paused = simulate(1, 50, bucket_mb=[], noise=0, input_ms=lambda step, rank: 2 + 2000 * (step == 30))
    write_live(tmp_path / "paused", paused)
    seconds = 47 * 0.1005 + 2
    speed = f"Step 50: {47 / seconds:.3g} steps/s, {47 * 16 / seconds:,.0f} samples/s, 1 rank, the last 46 steps.\n"
    assert top.look(tmp_path / "paused").text.startswith(speed)


def test_a_killed_rank_leaves_its_last_steps_behind(tmp_path: Path) -> None:
    survivor, killed = simulate(2, 50)
    write_live(tmp_path, [survivor, killed], age=5)
    assert not top.look(tmp_path).is_over
    write(tmp_path, with_facts(survivor, ended_by="rank 1 is gone", written_at=time.time() - 4))
    assert top.look(tmp_path).is_over


def test_a_job_that_has_not_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert cli.main(["top", str(folder), "--once"]) == 1
        assert f"no rank has written to {folder} yet; `torchring run --trace {folder}" in capsys.readouterr().out
    assert cli.main(["top", str(tmp_path / "nowhere")]) == 1  # no terminal
    assert f"torchring top: there is no folder {tmp_path}/nowhere." in capsys.readouterr().err


def test_ends_with_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Files come and change while it looks: nothing, torn, the last steps, and then the whole trace."""
    error, other = simulate(2, 50)
    lost = with_facts(error, ended_by="rank 1 is gone")
    stages: Iterator[Callable[[], object]] = iter(
        [
            lambda: path_of(tmp_path, 0).write_bytes(b"torn"),
            lambda: write_live(tmp_path, [error, other]),
            lambda: [write(tmp_path, trace) for trace in (lost, other)],
        ]
    )
    monkeypatch.setattr(time, "sleep", lambda seconds: next(stages)() if seconds == 0.25 else pytest.fail(str(seconds)))
    assert cli.main(["top", str(tmp_path), "--every", "0.25"]) == 0
    out = capsys.readouterr().out
    assert out.count("no rank has written") == 1
    assert out.count("Step 50: ") == 2
    assert "The job has ended: rank 1 is gone." in out


def test_the_reader_may_end_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `torchring top DIR | head`: no traceback, also not from Python's exit, which flushes once more."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        assert cli.main(["top", str(tmp_path), "--once"]) == 128 + signal.SIGPIPE
