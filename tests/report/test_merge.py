"""Traces of all ranks are put on one clock. What is missing is said, and the rest is used."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.support.traces import MS, simulate, write
from torchring.observe.recorder.files import TraceError, path_of
from torchring.observe.recorder.records import ClockOffset, RankTrace, RunInfo
from torchring.report.model.merge import load, merge
from torchring.report.verdict.analysis import analyse


def write_all(folder: Path, traces: list[RankTrace]) -> Path:
    for trace in traces:
        write(folder, trace)
    return folder


def run_info(trace: RankTrace, **changes: object) -> RankTrace:
    return dataclasses.replace(trace, run_info=dataclasses.replace(trace.run_info, **changes))


def test_clocks_that_are_5_seconds_apart_or_drift_are_aligned() -> None:
    there = merge(simulate(4, 12, skew_ms=[0, 0, 5000, 5000], ranks_per_host=2))
    here = merge(simulate(4, 12, ranks_per_host=2, skew_ms=[0] * 4))
    assert there.steps == here.steps
    assert [trace.run_info.wrapped for trace in there.traces] == [trace.run_info.wrapped for trace in here.traces]
    assert there.clock_error_ms == 0.05  # that of the simulation
    assert merge(simulate(2, 3)).clock_error_ms == 0
    home, away = simulate(2, 12, ranks_per_host=1, skew_ms=[0, 0])
    first, last = away.steps[0].begin, away.steps[-1].begin
    # In the middle, the clock is 3 ms ahead; before and after the measurements, it is taken to stand.
    clock = (ClockOffset(last, 4 * MS, 7), ClockOffset(first, 2 * MS, 5))
    job = merge([home, dataclasses.replace(away, clock=clock)])
    moved = [before.begin - row[1].begin for before, row in zip(away.steps, job.steps, strict=True)]
    assert moved[0] == 2 * MS
    assert moved[-1] == 4 * MS
    middle = (away.steps[6].begin - first) / (last - first)
    assert moved[6] == pytest.approx(2 * MS + 2 * MS * middle, abs=2)
    assert job.clock_error_ms == 7e-6


def test_a_torn_file_and_a_missing_rank_are_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    write_all(tmp_path, simulate(4, 20))
    path_of(tmp_path, 1).write_bytes(path_of(tmp_path, 1).read_bytes()[:500])
    path_of(tmp_path, 2).unlink()
    job = load(tmp_path)
    assert [trace.run_info.rank for trace in job.traces] == [0, 3]
    assert len(job.steps) == 20
    assert "rank-00001.npz is torn" in job.problems[0]
    assert job.problems[1] == (
        "Ranks 1, 2 of 4 have no trace that can be used. Waiting for them counts as communication."
    )
    assert analyse(job).size == 4


def test_an_error_that_ended_a_rank_is_quoted() -> None:
    first, second = simulate(2, 5)
    job = merge([run_info(first, ended_by="end"), run_info(second, ended_by="PeerLostError: rank 0 died")])
    assert job.problems == ('Rank 1 ended with an error: "PeerLostError: rank 0 died".',)
    assert job.ended_badly == job.problems[0]
    assert merge([first, second]).ended_badly == ""


def test_a_killed_rank_has_the_steps_that_it_wrote_last(tmp_path: Path) -> None:
    first, second, third = simulate(3, 60)
    running = [run_info(dataclasses.replace(each, steps=each.steps[40:]), ended_by="") for each in (first, third)]
    job = load(write_all(tmp_path, [first, second, running[1]]))
    assert [len(trace.steps) for trace in job.traces] == [60, 60, 20]
    assert len(job.steps) == 20
    assert job.problems == ("Rank 2 was killed, or still runs. Of its steps, only 20 are known.",)
    assert job.ended_badly == "Rank 2 was killed, or still runs."
    lost = run_info(second, ended_by="PeerLostError: rank 2 is gone")
    assert load(write_all(tmp_path, [lost])).ended_badly == "Rank 2 was killed, or still runs."
    for path in tmp_path.iterdir():
        path.unlink()
    job = load(write_all(tmp_path, [*running, run_info(second, ended_by="")]))
    assert job.problems == ("Ranks 0-2 were killed, or still run. Of their steps, only 60 are known.",)
    assert job.ended_badly == "", "no rank has ended, so the job may run"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"there is no folder .*gone.*`torchring run --trace .*` writes one"),
        ([], r"no file is named like rank-00000\.npz.*`torchring run --trace .*` writes one, if .*wrap\(\) and makes"),
        ([b"torn"], r"no file of the trace in .*gone can be read\. A file cannot be read: .*rank-00000\.npz is torn"),
        ([RankTrace(RunInfo())], r"the trace has no step"),
    ],
)
def test_a_folder_without_a_trace_is_an_error(
    content: list[bytes | RankTrace] | None, said: str, tmp_path: Path
) -> None:
    folder = tmp_path / "gone"
    for each in content or []:
        folder.mkdir()
        if isinstance(each, bytes):
            path_of(folder, 0).write_bytes(each)
        else:
            write(folder, each)
    if content == []:
        folder.mkdir()
    with pytest.raises(TraceError, match=said):
        load(folder)
    (tmp_path / "file").touch()
    with pytest.raises(TraceError, match="Not a directory"):
        load(tmp_path / "file")
