"""What the figures of the benchmarks rest on: results that are checked, quantiles, models, and files of rows.

No benchmark is timed here. A wrong result ends a benchmark, and no process outlives one.
"""

import itertools
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.support.harness import patient, ranks, run_ranks
from torchring.bench import allreduce, measure, network, step
from torchring.bench.gpu import link
from torchring.bench.measure import Command, Spread

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_spread_is_in_milliseconds_and_of_the_right_quantiles() -> None:
    assert Spread.of([i / 1000 for i in (11, 3, 1, 2, 10, 9, 4, 5, 8, 7, 6)]) == Spread(3.0, 6.0, 9.0, 11)
    assert Spread.of([0.002]) == Spread(2.0, 2.0, 2.0, 1)
    assert Spread.of([0.001, 0.003]).p50 == 2.0


def test_rows_are_read_back_and_results_say_where_they_are_from(tmp_path: Path) -> None:
    measure.write_rows(str(tmp_path / "rows"), [{"ms": {"p50": 1.23456789}}, {"sizes": [1, 2.5]}], {"date": "first"})
    measure.write_rows(str(tmp_path / "rows"), [], {"date": "second"})
    assert measure.read_runs(tmp_path / "rows") == [
        ({"date": "first"}, [{"ms": {"p50": 1.23457}}, {"sizes": [1, 2.5]}]),
        ({"date": "second"}, []),
    ]
    for about, rows in itertools.chain.from_iterable(map(measure.read_runs, (BENCH / "results").glob("*.jsonl"))):
        assert about.keys() >= {"date", "commit", "processor", "cores", "versions", "script"}
        assert rows


def test_a_failure_ends_all_and_is_named(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def children() -> set[str]:
        """Of this process, zombies included."""
        return {pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}

    monkeypatch.setattr(measure, "_REPORT_SECONDS", 0.1)
    before, started = children(), time.monotonic()
    commands = [
        Command(f"rank {i}", [sys.executable, "-c", f"import os, sys, time; {what}"], {})
        for i, what in enumerate(("time.sleep(60)", "os.kill(os.getpid(), 9)"))
    ]
    assert measure.run_together(commands) == 128 + 9
    assert time.monotonic() - started < patient(5)
    assert re.fullmatch(r"rank 1 \(pid \d+\) ended first, killed by SIGKILL\n", capfd.readouterr().err)
    assert children() == before


def test_the_model_of_a_link_gives_the_published_times() -> None:
    for (gpus, mib), us in link.TWO_SHOT.items():
        assert 1e6 * link.seconds(mib << 20, gpus, gpus << 13) == pytest.approx(us, rel=0.03 if gpus == 8 else 0.12)


@ranks(2, run_ranks)
def test_a_rival_that_reduces_wrongly_ends_the_run(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the last one; the right results before it have passed."""
    check, checked = allreduce.check, []

    def spoil_and_check(name: str, result: torch.Tensor, expected: torch.Tensor, *, rank: int) -> None:
        checked.append(name)
        if name == "gloo":
            result[-1] += 1
        check(name, result, expected, rank=rank)

    monkeypatch.setattr(allreduce, "check", spoil_and_check)
    step, _ = allreduce.prepare("torchring", Path())
    with pytest.raises(SystemExit, match=f"^gloo reduced 1000 elements wrongly on rank {rank}$"):
        list(map(step, (f"{name}:1000" for name in allreduce.OURS)))
    assert checked == ["direct", "native", "tensor", "torchring.horovod", "gloo"]


def test_weights_that_differ_and_bytes_that_no_algorithm_sends_end_the_run() -> None:
    """By the bound of each rival, as a share of the way that torchring's have come."""

    def filled(value: float) -> torch.nn.Module:
        module = torch.nn.Linear(3, 2)
        for parameter in module.parameters():
            torch.nn.init.constant_(parameter, value)
        return module

    def check(distances: dict[str, float]) -> dict[str, float]:
        weights = {"torchring": 2.0, "alone": 5.0, **{name: 2.0 + by for name, by in distances.items()}}
        trainers = {name: step.Trainer(filled(weight), None, []) for name, weight in weights.items()}
        return network.check_weights(trainers, filled(1.0))

    near = {"torchring": 0.0, "ddp": 0.0005, "torchring bf16": -0.01, "ddp fp16": 0.01}
    assert check(near) == pytest.approx({name: abs(by) for name, by in near.items()} | {"alone": 3}, rel=1e-3)
    for rival, by in (("ddp", 0.01), ("torchring bf16", 0.03), ("ddp fp16", -0.03), ("ddp", float("nan"))):
        with pytest.raises(SystemExit, match=f"the weights of {rival} differ"):
            check(near | {rival: by})
    sent = {"torchring": 68.0, "ddp": 102.0, "ddp fp16": 51.0, "torchring int8": 17.4, "alone": 0.0}
    sent |= {"torchring powersgd": 2.5, "ddp powersgd": 1.6}
    by_host = {"algorithm": "hierarchical"}
    ours = {name: by_host for name in sent if name.startswith("torchring")}
    row = {"layout": "2x2", "model": "gpt", "stats": ours}
    network.check_bytes(row | {"link_bytes": {rival: mb * 1e6 for rival, mb in sent.items()}})
    wrong = {"torchring": 79, "ddp": 68, "ddp fp16": 102, "torchring int8": 34, "ddp powersgd": 3, "alone": 1}
    for rival, mb in wrong.items():
        with pytest.raises(SystemExit, match=f"a step of {rival} sent {mb * 1e6} bytes"):
            network.check_bytes(row | {"link_bytes": {rival: mb * 1e6}})


@pytest.mark.grid
def test_micro(tmp_path: Path) -> None:
    """All of them, once, for their results, as `torchring bench` runs them."""
    pytest.importorskip("pytest_benchmark")
    junit = tmp_path / "junit.xml"
    command = [sys.executable, "-m", "torchring.cli", "bench", "micro", "-q", "--benchmark-disable"]
    ran = subprocess.run([*command, f"--junit-xml={junit}"], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    names = set(re.findall(r'<testcase classname="[^"]*?(bench_\w+)" name="(\w+)', junit.read_text()))
    kernels = {("bench_kernels", f"bench_{name}") for name in ("pack", "unpack", "accumulate")}
    assert names == {("bench_hooks", "bench_gradients")} | kernels
