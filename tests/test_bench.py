"""The benchmarks run, check what they time, and say where they ran: for their results, in seconds, not for speed.

measure.py on known data · models.py · each script as a user runs it · wrong results end a script · bench/micro
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks, run_script

import torchring
from torchring.bench import measure, step
from torchring.bench.measure import Spread
from torchring.bench.models import MODELS

BENCH = Path(__file__).resolve().parent.parent / "bench"
PYTEST = Path(sys.executable).with_name("pytest")


# What the scripts share


def test_spread_is_in_milliseconds_and_of_the_right_quantiles() -> None:
    assert Spread.of([i / 1000 for i in (11, 3, 1, 2, 10, 9, 4, 5, 8, 7, 6)]) == Spread(3.0, 6.0, 9.0, 11)
    assert Spread.of([0.002]) == Spread(2.0, 2.0, 2.0, 1)
    assert Spread.of([0.001, 0.003]).p50 == 2.0


def _turns(rank: int, world_size: int, seconds: float, most: int) -> tuple[list[str], dict[str, Spread]]:
    """Rivals of which each is slow on one rank."""
    said: list[str] = []

    def turn(name: str, slow_rank: int) -> None:
        said.append(name)
        time.sleep(0.03 * (rank == slow_rank))

    spreads = measure.take_turns(
        {"a": lambda: turn("a", 0), "b": lambda: turn("b", 1), "c": lambda: said.append("c")},
        prepare=lambda name: said.append(f"prepare {name}"),
        warmups=1,
        seconds=seconds,
        most=most,
    )
    return said, spreads


def test_rivals_take_turns_in_an_order_that_rotates_and_the_slowest_rank_counts() -> None:
    results = run_ranks(_turns, 2, 60.0, 4)
    for said, _ in results:
        order = "".join(said[1::2])
        assert said[::2] == [f"prepare {name}" for name in order]
        assert order == "cab" + "abc" + "bca" + "cab" + "abc"  # one warm-up, and four that count
    (_, spreads), (_, others) = results
    assert spreads == others
    assert [spread.repetitions for spread in spreads.values()] == [4, 4, 4]
    assert spreads["a"].p20 >= 30
    assert spreads["b"].p20 >= 30
    assert spreads["c"].p20 < 30


def test_turns_end_when_time_is_up() -> None:
    """On all ranks after the same repetition, the third at the earliest."""
    results = run_ranks(_turns, 2, 0.0, 1000)
    assert [spreads["a"].repetitions for _, spreads in results] == [3, 3]


def test_a_table_is_aligned_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    measure.print_table("Title", ["size", "ms"], [["1 KiB", "0.5"], ["64 MiB", "12.25"]])
    assert capsys.readouterr().out == (
        "\nTitle\n\n"
        "| size   | ms    |\n"
        "| ------ | ----- |\n"
        "| 1 KiB  | 0.5   |\n"
        "| 64 MiB | 12.25 |\n"
    )  # fmt: skip
    with pytest.raises(ValueError, match="zip"):
        measure.print_table("Title", ["size", "ms"], [["1 KiB"]])


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (25 << 20, "25 MiB"), (3 << 30, "3072 MiB")]
)
def test_human_bytes(count: int, text: str) -> None:
    assert measure.human_bytes(count) == text


def test_json_is_written_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    measure.write_json(None, [{"a": 1}], {})
    assert list(tmp_path.iterdir()) == []
    measure.write_json("out.json", [{"a": 1}], {"b": 2})
    assert json.loads(Path("out.json").read_text()) == {"about": {"b": 2}, "rows": [{"a": 1}]}


@pytest.mark.parametrize("code", [0, 3])
def test_ranks_are_told_their_place_and_their_exit_code_is_heard(
    code: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 ends with the code; rank 0's output is the run's."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "rank = int(os.environ['RANK'])\n"
        "names = ['RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT', 'OMP_NUM_THREADS']\n"
        "print(*(os.environ[name] for name in names), *sys.argv[1:])\n"
        f"sys.exit(rank * {code})\n"
    )
    port = measure.free_port()
    assert measure.start_ranks(str(script), 2, ["--x", "a b"], mpi=False, rendezvous=port) == code
    assert capfd.readouterr().out == f"0 0 2 127.0.0.1 {port} 1 --x a b\n"


# Models


@pytest.mark.parametrize(
    ("name", "tensors", "mib"),
    [("mlp", 20, 160), ("gpt", 77, 65), ("small", 802, 3), ("vgg", 32, 144), ("resnet", 161, 97)],
)
def test_models_are_what_the_tables_say(name: str, tensors: int, mib: int) -> None:
    workload = MODELS[name]()
    parameters = list(workload.model.parameters())
    assert len(parameters) == tensors
    assert round(sum(p.numel() * p.element_size() for p in parameters) / 2**20) == mib
    first, again, other = workload.batch(seed=1), workload.batch(seed=1), workload.batch(seed=2)
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))
    with torch.no_grad():
        loss = workload.loss(workload.model, first)
    assert loss.isfinite()
    assert 1 < loss < 20


def test_every_model_has_its_test() -> None:
    assert set(MODELS) == {"mlp", "gpt", "small", "vgg", "resnet"}


# Scripts


def run_bench(tmp_path: Path, script: str, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Run it with --json; what it printed, and what it wrote."""
    out = tmp_path / "results.json"
    ran = run_script([BENCH / script, *arguments, "--json", out], deadline=120)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    written = json.loads(out.read_text())
    assert list(written) == ["about", "rows"]
    check_about(written["about"], script)
    return ran.stdout, written


def check_about(about: dict[str, Any], script: str) -> None:
    assert about["script"] == script
    assert about["cores"] == len(os.sched_getaffinity(0))
    assert about["processor"]
    assert about["versions"]["torch"] == torch.__version__
    assert about["versions"]["torchring"] == torchring.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", about["date"])
    assert re.fullmatch(r"[0-9a-f]{7,}" if (BENCH.parent / ".git").exists() else ".*", about["commit"])
    assert isinstance(about["dirty"], bool)


def check_times(row: dict[str, Any], *rivals: str) -> None:
    assert row["ms"].keys() >= set(rivals)
    for times in row["ms"].values():
        spread = Spread(**times)
        assert 0 < spread.p20 <= spread.p50 <= spread.p80
        assert spread.repetitions >= 3


def check_table(printed: str, num_rows: int, *columns: str) -> list[list[str]]:
    """The cells of the table's rows; the table is the only one."""
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1
    head, rule, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert set(columns) <= set(head)
    assert all(set(cell) == {"-"} for cell in rule)
    assert len(rows) == num_rows
    return rows


def test_allreduce(tmp_path: Path) -> None:
    sizes = [1024, 1 << 20]
    arguments = ["--ranks", "2", "--sizes", *map(str, sizes), "--seconds", "0.2", "--most", "5", "--no-mpi"]
    printed, written = run_bench(tmp_path, "allreduce.py", *arguments)
    assert [(row["bytes"], row["ranks"]) for row in written["rows"]] == [(size, 2) for size in sizes]
    for row in written["rows"]:
        check_times(row, "direct", "tensor", "ring", "gloo", "copy")
    rows = check_table(printed, 2, "size", "direct ms", "tensor ms", "ring ms", "gloo ms", "copy ms", "gloo / direct")
    assert [row[0] for row in rows] == ["1 KiB", "1 MiB"]


def test_step(tmp_path: Path) -> None:
    printed, written = run_bench(
        tmp_path, "step.py", "--ranks", "2", "--models", "small", "--seconds", "0.5", "--most", "4"
    )
    (row,) = written["rows"]
    check_times(row, "torchring", "ddp", "alone")
    assert (row["model"], row["tensors"], row["ranks"]) == ("small", 802, 2)
    assert row["bytes"] == 4 * row["parameters"]
    assert row["loss_difference"] < 1e-5
    assert row["stats"]["num_reductions"] == 3 + row["ms"]["torchring"]["repetitions"]
    (cells,) = check_table(printed, 1, "model", "torchring ms", "ddp ms", "alone ms", "ratio to ddp", "efficiency")
    assert cells[0] == "small"


def test_network(tmp_path: Path) -> None:
    netns = pytest.importorskip("torchring.bench.netns")
    if (reason := netns.why_unavailable()) is not None:
        pytest.skip(reason)
    arguments = ["--model", "small", "--rates", "10gbit", "--layouts", "2x1", "--seconds", "0.5", "--most", "3"]
    printed, written = run_bench(tmp_path, "network.py", *arguments)
    (row,) = written["rows"]
    check_times(row, "torchring", "ddp", "alone")
    assert (row["model"], row["layout"], row["rate"], row["ranks"]) == ("small", "2x1", "10gbit", 2)
    check_table(printed, len(row["ms"]), "rate", "layout", "rival", "step ms")


def test_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Each rival has processes of its own, so only torchring is measured, and said to be all of them."""
    memory = pytest.importorskip("torchring.bench.memory")
    out = tmp_path / "results.json"
    measure_rival, measured = memory.measure_rival, []

    def measure_once(model: str, rival: str, options: argparse.Namespace) -> dict[str, Any]:
        if not measured:
            measured.append(measure_rival(model, "torchring", options))
        return {**measured[0], "rival": rival}

    monkeypatch.setattr(memory, "measure_rival", measure_once)
    monkeypatch.setattr(sys, "argv", ["memory.py", "--models", "small", "--steps", "4", "--json", str(out)])
    assert memory.main() == 0
    written = json.loads(out.read_text())
    check_about(written["about"], "memory.py")
    rivals = list(memory.RIVALS)
    assert [(row["model"], row["rival"], row["ranks"]) for row in written["rows"]] == [("small", r, 2) for r in rivals]
    for row in written["rows"]:
        assert row["bytes"] == 4 * sum(p.numel() for p in MODELS["small"]().model.parameters())
        assert all(len(of_ranks) == 2 and min(of_ranks) > row["bytes"] for of_ranks in row["memory_bytes"].values())
    cells = check_table(capfd.readouterr().out, len(rivals), "model", "gradients", "rival")
    assert [row[2] for row in cells] == rivals


def test_every_script_has_its_test() -> None:
    scripts = {file.stem for file in BENCH.glob("*.py") if '__name__ == "__main__"' in file.read_text()}
    assert scripts <= {name.removeprefix("test_") for name in globals()}


# Wrong results


def _reduces_wrongly(rank: int, world_size: int) -> str:
    from torchring.bench import allreduce

    torchring.init()
    options = argparse.Namespace(seconds=0.1, most=3, no_mpi=True)
    torchring.all_reduce = lambda tensor, op: tensor.mul_(world_size)  # type: ignore[assignment]
    with pytest.raises(SystemExit) as error:
        allreduce.row_for(1000, options)
    return str(error.value)


def test_a_rival_that_reduces_wrongly_ends_the_run() -> None:
    said = run_ranks(_reduces_wrongly, 2)
    assert said == [f"tensor reduced 1000 elements wrongly on rank {rank}" for rank in range(2)]


def test_losses_that_differ_end_the_run() -> None:
    def contestants(**losses: list[float]) -> dict[str, step.Contestant]:
        return {rival: step.Contestant(torch.nn.Identity(), None, values) for rival, values in losses.items()}

    ours = [4.0, 2.0]
    assert step.loss_difference(contestants(torchring=ours, ddp=[4.0, 2.0], alone=[9.0, 9.0])) == 0
    assert step.loss_difference(contestants(torchring=ours, ddp=[4.0, 2.001], horovod=ours)) == pytest.approx(5e-4)
    with pytest.raises(SystemExit, match="the losses differ by"):
        step.loss_difference(contestants(torchring=ours, ddp=[4.0, 2.01], alone=ours))
    with pytest.raises(SystemExit, match="the losses differ by"):
        step.loss_difference(contestants(torchring=ours, ddp=ours, horovod=[4.1, 2.0]))


# Microbenchmarks


def test_micro(tmp_path: Path) -> None:
    """All of them, once, for their results."""
    pytest.importorskip("pytest_benchmark")
    files = {file.stem for file in (BENCH / "micro").glob("bench_*.py")}
    assert files == {"bench_allreduce", "bench_hooks", "bench_kernels", "bench_plan"}
    junit = tmp_path / "junit.xml"
    options = ["-q", "--benchmark-disable", f"--junit-xml={junit}", storage(tmp_path)]
    ran = run_script([PYTEST, BENCH / "micro", *options], deadline=120)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    names = set(re.findall(r'<testcase classname="[^"]*?(bench_\w+)" name="(\w+)', junit.read_text()))
    assert {file for file, _ in names} == files
    functions = {function for _, function in names}
    for name in ("build_plan", "fingerprint", "gradients", "model", "pack", "unpack", "accumulate", "allreduce"):
        assert f"bench_{name}" in functions


def test_micro_measures_and_puts_rivals_side_by_side(tmp_path: Path) -> None:
    """A few, and briefly."""
    pytest.importorskip("pytest_benchmark")
    out = tmp_path / "micro.json"
    chosen = "bench_gradients and torchring or bench_pack and tiny and fp32"
    options = ["-q", "-k", chosen, f"--benchmark-json={out}", "--benchmark-max-time=0.01", storage(tmp_path)]
    ran = run_script([PYTEST, BENCH / "micro", *options], deadline=120)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    entries = json.loads(out.read_text())["benchmarks"]
    assert all(entry["stats"]["median"] > 0 for entry in entries)
    (hooks,) = (entry for entry in entries if entry["name"].startswith("bench_gradients"))
    per_parameter = hooks["extra_info"]["us per parameter"]
    assert per_parameter == pytest.approx(hooks["stats"]["median"] / 802 * 1e6, abs=0.01)
    assert f"bench_gradients[torchring]: us per parameter {per_parameter}" in ran.stdout
    packs = [entry for entry in entries if entry is not hooks]
    assert len(packs) == 5
    assert {entry["group"] for entry in packs} == {"pack: fp32 wire, tiny"}
    assert "benchmark 'pack: fp32 wire, tiny': 5 tests" in ran.stdout


def storage(tmp_path: Path) -> str:
    """pytest-benchmark makes a folder in any case."""
    return f"--benchmark-storage=file://{tmp_path / 'storage'}"


def test_plain_pytest_leaves_the_microbenchmarks_alone(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.getini("testpaths") == ["tests"]
    assert not any(
        file.match(pattern) for file in BENCH.rglob("*.py") for pattern in pytestconfig.getini("python_files")
    )
