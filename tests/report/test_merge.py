"""Traces of all ranks are put on one clock. What is missing is said, and the rest is used."""

import dataclasses
from pathlib import Path

import pytest

from tests.support.traces import MS, simulate, with_facts, write
from torchring.observe.recorder.files import TraceError, path_of, read
from torchring.observe.recorder.records import ClockOffset, RankTrace, RunInfo
from torchring.report.command import main
from torchring.report.model.merge import load, merge
from torchring.report.verdict.analysis import analyse


def test_clocks_that_are_5_seconds_apart_or_drift_are_aligned() -> None:
    there = merge(simulate(4, 12, skew_ms=[0, 0, 5000, 5000], ranks_per_host=2))
    here = merge(simulate(4, 12, ranks_per_host=2, skew_ms=[0] * 4))
    assert there.steps == here.steps
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
    for trace in simulate(4, 20):
        write(tmp_path, trace)
    path_of(tmp_path, 1).write_bytes(path_of(tmp_path, 1).read_bytes()[:500])
    path_of(tmp_path, 2).unlink()
    (job,) = load(tmp_path)
    assert [trace.run_info.rank for trace in job.traces] == [0, 3]
    assert len(job.steps) == 20
    torn, missing = job.problems
    assert "rank-00001.npz is torn" in torn
    assert missing == "Ranks 1, 2 of 4 have no trace that can be used. Waiting for them counts as communication."
    assert analyse(job).size == 4


def test_how_a_job_ended(tmp_path: Path) -> None:
    """A rank that was killed has the steps that it wrote last. As long as no rank has ended, the job may run."""
    whole = simulate(3, 60)
    killed = [with_facts(dataclasses.replace(each, steps=each.steps[40:]), ended_by="") for each in whole]
    lost = with_facts(whole[1], ended_by="PeerLostError: rank 2 is gone")
    for traces, problems, ended_badly in (
        (whole, (), ""),
        (
            [whole[0], lost, whole[2]],
            ('Rank 1 ended with an error: "PeerLostError: rank 2 is gone".',),
            'Rank 1 ended with an error: "PeerLostError: rank 2 is gone".',
        ),
        (
            [*whole[:2], killed[2]],
            ("Rank 2 was killed, or still runs. Of its steps, only 20 are known.",),
            "Rank 2 was killed, or still runs.",
        ),
        (killed, ("Ranks 0-2 were killed, or still run. Of their steps, only 20 are known.",), ""),
    ):
        for trace in traces:
            write(tmp_path, trace)
        (job,) = load(tmp_path)
        assert (job.problems, job.ended_badly) == (problems, ended_badly)
        assert len(job.steps) == min(len(trace.steps) for trace in traces)
    write(tmp_path, lost)
    write(tmp_path, whole[0])
    assert load(tmp_path)[0].ended_badly == "Rank 2 was killed, or still runs."


def test_a_rank_waits_for_ranks_of_its_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 3 is late, and only rank 1 waits for it. Then all ranks also reduce with another optimizer."""
    groups = [(0, 2), (1, 3)]
    traces = simulate(4, 20, input_ms=[2.0, 2.0, 2.0, 30.0])
    for rank, trace in enumerate(traces):
        here = {"ranks": groups[rank % 2], "algorithm": "direct", "overlap": "inline", "options": {}, "clock": []}
        write(tmp_path, with_facts(trace, groups={"0": here}))
    even, odd = map(analyse, load(tmp_path))
    assert (even.job.group, odd.job.group) == tuple(groups)
    assert [wait.awaited for wait in odd.waits] == [3]
    assert odd.verdict.sentence.startswith("Group of ranks 1, 3: ")
    assert 3 not in {rank for wait in even.waits for rank in (*wait.waiting, wait.awaited)}
    assert (even.size, even.run_info.local_size, even.run_info.host_ranks) == (2, 2, 4)
    assert even.predictions
    assert main([str(tmp_path), "--csv", str(tmp_path / "steps.csv"), "--no-html"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("Group of")][1:]
    assert (tmp_path / "steps-2.csv").exists()
    for trace in traces:
        both = (*trace.run_info.parameters, *(each._replace(optimizer=1) for each in trace.run_info.parameters))
        write(tmp_path, with_facts(read(path_of(tmp_path, trace.run_info.rank)), parameters=both))
    assert [job.group for job in load(tmp_path)] == [(), *groups]
    assert not any(analyse(job).predictions for job in load(tmp_path)), "times of both are in one another"


def test_a_folder_without_a_trace_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "torn").mkdir()
    path_of(tmp_path / "torn", 0).write_bytes(b"torn")
    write(tmp_path / "stepless", RankTrace(RunInfo()))
    for name, said in {
        "gone": r"cannot read .*gone: No such.*`torchring run --trace .*` writes one",
        "empty": r"no file is named like rank-00000\.npz.*`torchring run --trace .*` writes one, if .*wrap\(",
        "torn": r"no file of the trace in .*torn can be read\. A file cannot .*00000\.npz is torn",
        "stepless": "the trace has no step",
        "file": "Not a directory",
    }.items():
        with pytest.raises(TraceError, match=said):
            load(tmp_path / name)
