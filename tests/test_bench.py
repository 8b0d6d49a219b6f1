"""The benchmarks run, check what they time, and say where they ran: for their results, in seconds, not for speed.

measure.py on known data · processes, none of which is left · models.py · each script · wrong results end a script ·
bench/micro. What needs torch in a process of its own is forked from the harness's server where it can be.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import test_bench_gpu
import torch
from harness import patient, run_ranks

import torchring
import torchring.horovod
from torchring.bench import (
    allreduce,
    buckets,
    compiled,
    elastic,
    elastic_job,
    elastic_worker,
    measure,
    memory,
    netns,
    network,
    prediction,
    step,
)
from torchring.bench.measure import Command, Spread
from torchring.bench.models import MODELS

BENCH = Path(__file__).resolve().parent.parent / "bench"
needs_mpi = pytest.mark.skipif(not measure.has_mpi(), reason="needs mpirun and mpi4py")


# What the scripts share


@pytest.mark.parametrize(
    "arguments", [["--json", "/nowhere/x.json"], ["--ranks", "1"], ["--sizes", "-8"], ["--seconds", "0"]]
)
def test_what_a_benchmark_cannot_do_is_refused_at_the_start(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["allreduce.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        allreduce.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("usage: torchring bench allreduce")


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


def test_json_is_written_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    measure.write_json(None, [{"a": 1}], {})
    assert list(tmp_path.iterdir()) == []
    measure.write_json("out.json", [{"a": 1}], {"b": 2})
    assert json.loads(Path("out.json").read_text()) == {"about": {"b": 2}, "rows": [{"a": 1}]}


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """measure.py as if it were in site-packages, inside somebody else's checkout."""
    folder = tmp_path / "venv" / "site-packages" / "torchring" / "bench"
    folder.mkdir(parents=True)
    monkeypatch.setattr(measure, "__file__", str(folder / "measure.py"))
    return folder


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


@needs_git
def test_the_commit_is_that_of_a_checkout_with_the_bench_folder_at_its_top(installed: Path) -> None:
    (checkout := installed.parent / "bench" / "measure.py").touch()
    git(installed.parent, "init")
    assert measure.provenance()["commit"] is None  # none yet
    git(installed.parent, "add", ".")
    git(installed.parent, "commit", "-m", "first")
    about = measure.provenance()
    assert re.fullmatch("[0-9a-f]{7,}", about["commit"])
    assert about["dirty"] is False
    assert f"commit {about['commit']})" in measure.origin(about)
    checkout.write_text("changed")
    assert measure.provenance() == {**about, "dirty": True, "date": measure.provenance()["date"]}


@needs_git
@pytest.mark.parametrize("top", ["venv", "venv/site-packages", "venv/site-packages/torchring/bench"])
def test_another_checkout_around_an_installed_torchring_does_not_count(
    top: str, installed: Path, tmp_path: Path
) -> None:
    (installed / "measure.py").touch()
    git(tmp_path / top, "init")
    git(tmp_path / top, "add", ".")
    git(tmp_path / top, "commit", "-m", "theirs")
    about = measure.provenance()
    assert about["commit"] is about["dirty"] is None
    assert f"torchring {torchring.__version__})" in measure.origin(about)


def test_provenance_needs_no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    about = measure.provenance()
    assert about["commit"] is about["dirty"] is None


# Processes


def python(name: str, code: str) -> Command:
    return Command(name, [sys.executable, "-c", code], {})


def started_by_this_process() -> set[int]:
    """Its children, zombies included."""
    children = Path("/proc/self/task").glob("*/children")
    return {int(pid) for file in children for pid in file.read_text().split()}


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 5
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.01)
    with contextlib.suppress(ChildProcessError):  # the harness may have made this process adopt it
        os.waitpid(pid, 0)


@pytest.fixture
def _leaves_no_process() -> Iterator[None]:
    before = started_by_this_process()
    yield
    assert started_by_this_process() == before


@pytest.mark.usefixtures("_leaves_no_process")
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
    out, err = capfd.readouterr()
    assert out == f"0 0 2 127.0.0.1 {port} 1 --x a b\n"
    assert re.fullmatch(r"rank 1 \(pid \d+\) ended first, with exit code 3\n" if code else "", err)


@pytest.mark.usefixtures("_leaves_no_process")
@pytest.mark.parametrize(
    ("ending", "code", "how"),
    [("sys.exit(7)", 7, "with exit code 7"), ("os.kill(os.getpid(), 9)", 128 + 9, "killed by SIGKILL")],
)
def test_the_first_failure_ends_all_and_is_named(
    ending: str, code: int, how: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "_REPORT_SECONDS", 0.1)
    started = time.monotonic()
    commands = [python("rank 0", "import time; time.sleep(60)"), python("rank 1", f"import os, sys; {ending}")]
    assert measure.run_together(commands) == code
    assert time.monotonic() - started < patient(5)
    assert re.fullmatch(rf"rank 1 \(pid \d+\) ended first, {how}\n", capfd.readouterr().err)


@pytest.mark.usefixtures("_leaves_no_process")
def test_after_a_failure_others_have_last_words_but_no_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One fails because of it, and says so; one does not hear SIGTERM."""
    monkeypatch.setattr(measure, "_TERMINATION_SECONDS", 0.2)
    wait = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'failing')!r}): time.sleep(0.01)\n"
    commands = [
        python("rank 0", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"),
        python("rank 1", f"import os; open({str(tmp_path / 'failing')!r}, 'w'); os._exit(3)"),
        python("rank 2", f"{wait}time.sleep(0.2); raise SystemExit('rank 1 is lost')"),
    ]
    started = time.monotonic()
    assert measure.run_together(commands) == 3
    assert time.monotonic() - started < patient(5)
    said = capfd.readouterr().err
    assert re.fullmatch(r"rank 1 \(pid \d+\) ended first, with exit code 3\nrank 1 is lost\n", said)


@pytest.mark.usefixtures("_leaves_no_process")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_processes_and_the_script(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    threading.Timer(0.2, os.kill, [os.getpid(), number]).start()
    with pytest.raises(SystemExit) as error:
        measure.run_together([python(f"rank {rank}", "import time; time.sleep(60)") for rank in range(2)])
    assert error.value.code == 128 + number
    assert signal.getsignal(number) is before


@pytest.mark.usefixtures("_leaves_no_process")
def test_a_signal_that_comes_while_a_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Command.start

    def slowly(command: Command) -> subprocess.Popen[bytes]:
        process = start(command)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        return process

    monkeypatch.setattr(Command, "start", slowly)
    with pytest.raises(SystemExit) as error:
        measure.run_together([python("rank 0", "import time; time.sleep(60)")])
    assert error.value.code == 128 + signal.SIGTERM


@pytest.mark.usefixtures("_leaves_no_process")
def test_a_process_that_cannot_be_started_ends_the_others() -> None:
    with pytest.raises(FileNotFoundError):
        measure.run_together([python("rank 0", "import time; time.sleep(60)"), Command("rank 1", ["/nowhere"], {})])


def test_processes_end_with_a_script_that_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid()) + chr(10)); time.sleep(60)"
    script = os.fork()
    if script == 0:
        measure.run_together([python("rank 0", code)])
        os._exit(0)
    try:
        deadline = time.monotonic() + 20
        while not (file.exists() and file.read_text().endswith("\n")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.kill(script, signal.SIGKILL)
        os.waitpid(script, 0)
    wait_until_gone(int(file.read_text()))


@needs_mpi
@pytest.mark.usefixtures("_leaves_no_process")
def test_mpirun_cleans_up_when_it_is_interrupted(tmp_path: Path) -> None:
    """Its ranks are gone, and so are their files in /dev/shm."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "import numpy\n"
        "from mpi4py import MPI\n"
        "MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, numpy.ones(1000))\n"
        "maps = open('/proc/self/maps').read().split()\n"
        "with open(f'{sys.argv[1]}/{os.getpid()}', 'w') as file:\n"
        "    print(*(word for word in maps if word.startswith('/dev/shm/')), 'end', file=file)\n"
        "time.sleep(60)\n"
    )
    (folder := tmp_path / "ranks").mkdir()

    def interrupt() -> None:
        deadline = time.monotonic() + 30
        while sum(file.read_text().endswith("end\n") for file in folder.iterdir()) < 2:
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(SystemExit) as error:
        measure.start_ranks(str(script), 2, [str(folder)], mpi=True, rendezvous=measure.free_port())
    assert error.value.code == 128 + signal.SIGINT
    files = list(folder.iterdir())
    assert len(files) == 2
    for file in files:
        wait_until_gone(int(file.name))
    mapped = {name for file in files for name in file.read_text().split()[:-1]}
    assert len(mapped) >= 2
    assert not any(map(os.path.exists, mapped))


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


def run_bench(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    script: ModuleType,
    *arguments: str,
) -> tuple[str, dict[str, Any]]:
    """Run its main with --json, in this process, as torch takes long to import; what it printed, and what it wrote."""
    out = tmp_path / "results.json"
    name = Path(str(script.__file__)).name
    monkeypatch.setattr(sys, "argv", [name, *arguments, "--json", str(out)])
    assert script.main() == 0
    written = json.loads(out.read_text())
    assert list(written) == ["about", "rows"]
    check_about(written["about"], name)
    return capfd.readouterr().out, written


def check_about(about: dict[str, Any], script: str) -> None:
    assert about["script"] == script
    assert about["cores"] == len(os.sched_getaffinity(0))
    assert about["processor"]
    assert about["versions"]["torch"] == torch.__version__
    assert about["versions"]["torchring"] == torchring.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", about["date"])
    if (BENCH.parent / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{7,}", about["commit"])
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


@pytest.mark.grid
def test_allreduce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    sizes = [1024, 1 << 20]
    arguments = ["--ranks", "2", "--sizes", *map(str, sizes), "--seconds", "0.2", "--most", "5", "--no-mpi"]
    printed, written = run_bench(tmp_path, monkeypatch, capfd, allreduce, *arguments)
    assert [(row["bytes"], row["ranks"]) for row in written["rows"]] == [(size, 2) for size in sizes]
    for row in written["rows"]:
        check_times(row, "direct", "tensor", "ring", "gloo", "copy")
    rows = check_table(printed, 2, "size", "direct ms", "tensor ms", "ring ms", "gloo ms", "copy ms", "gloo / direct")
    assert [row[0] for row in rows] == ["1 KiB", "1 MiB"]


@pytest.mark.grid
def test_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Without DDP, which `test_network` trains, too: every rival starts ranks of its own, and that takes time."""
    monkeypatch.setattr(step, "RIVALS", {name: step.RIVALS[name] for name in ("torchring", "alone")})
    monkeypatch.setattr(measure, "has_horovod", lambda: False)
    arguments = ["--ranks", "2", "--models", "small", "--seconds", "0.1", "--most", "3"]
    printed, written = run_bench(tmp_path, monkeypatch, capfd, step, *arguments)
    (row,) = written["rows"]
    check_times(row, "torchring", "alone")
    assert (row["model"], row["tensors"], row["ranks"]) == ("small", 802, 2)
    assert row["bytes"] == 4 * row["parameters"]
    assert row["stats"]["num_reductions"] >= row["ms"]["torchring"]["repetitions"]
    (cells,) = check_table(printed, 1, "model", "torchring ms", "alone ms", "overhead ms", "efficiency")
    assert cells[0] == "small"


@pytest.mark.skipif(netns.why_unavailable() is not None, reason=str(netns.why_unavailable()))
@pytest.mark.grid
def test_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "small", "--rates", "10gbit", "--layouts", "2x1", "--seconds", "0.1", "--most", "3"]
    printed, written = run_bench(tmp_path, monkeypatch, capfd, network, *arguments)
    (row,) = written["rows"]
    check_times(row, *network.RIVALS)
    assert (row["model"], row["layout"], row["rate"], row["ranks"]) == ("small", "2x1", "10gbit", 2)
    assert row["weight_difference"]["ddp"] < 1e-5
    assert row["weight_difference"]["alone"] > 0.1
    check_table(printed, len(row["ms"]), "rate", "layout", "rival", "step ms")


@pytest.mark.grid
@pytest.mark.skipif(netns.why_unavailable() is not None, reason=str(netns.why_unavailable()))
def test_prediction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "small", "--hosts", "3", "--steps", "12"]
    printed, written = run_bench(tmp_path, monkeypatch, capfd, prediction, *arguments)
    assert [(row["from"], row["ranks"]) for row in written["rows"]] == [(1, 3), (2, 3)]
    for row in written["rows"]:
        assert row["predicted_ms"] > 0.0
        assert row["error"] == pytest.approx(row["predicted_ms"] / row["measured_ms"]["p50"] - 1.0)
    with pytest.raises(argparse.ArgumentTypeError, match="'fast' is no rate"):
        prediction.rate("fast")
    check_table(printed, 2, "from", "hosts", "predicted ms", "measured ms", "error")


@pytest.mark.grid
def test_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    printed, written = run_bench(tmp_path, monkeypatch, capfd, compiled, "--model", "mlp", "--seconds", "0.1")
    rows = {row["rival"]: row for row in written["rows"]}
    assert list(rows) == list(compiled.RIVALS)
    assert rows["whole"]["left"] < rows["layers"]["left"], "gradients arrive layer by layer"
    assert [name for name, row in rows.items() if row["hidden"] is None] == ["ddp"]
    check_table(printed, len(rows), "rival", "step ms", "left of backward", "hidden")


@pytest.mark.grid
def test_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--models", "small", "--rates", "none", "--seconds", "0.1"]
    printed, written = run_bench(tmp_path, monkeypatch, capfd, buckets, *arguments)
    (row,) = written["rows"]
    check_times(row, "default", "auto")
    assert "default buckets" in row["stats"]["auto"]["reason"] or "buckets found" in row["stats"]["auto"]["reason"]
    (cells,) = check_table(printed, 1, "link", "model", "buckets", "step ms", "exposed ms", "ratio")
    assert cells[:2] == ["none", "small"]


def test_buckets_that_change_the_result_end_the_run() -> None:
    start, moved, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    trainers = {"default": step.Trainer(moved, None, []), "auto": step.Trainer(moved, None, [])}
    buckets.check_weights(trainers, start, may_round=False)
    with pytest.raises(SystemExit, match="trained differently"):
        buckets.check_weights(trainers | {"auto": step.Trainer(other, None, [])}, start, may_round=False)


def _train_for_memory(rank: int, world_size: int, model: str, rival: str, steps: int, file: str) -> int:
    return memory.work(argparse.Namespace(models=[model], rivals=[rival], steps=steps, worker=file))


def test_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Each rival has processes of its own; here they are forked."""

    def start_ranks(script: str, ranks: int, arguments: list[str], **_: object) -> int:
        assert script == memory.__file__
        names, values = arguments[::2], arguments[1::2]
        assert names == ["--models", "--rivals", "--steps", "--worker"]
        model, rival, steps, file = values
        return max(run_ranks(_train_for_memory, ranks, model, rival, int(steps), file))

    monkeypatch.setattr(measure, "start_ranks", start_ranks)
    chosen = ["torchring", "alone"]
    arguments = ["--models", "small", "--steps", "3", "--rivals", *chosen]
    printed, written = run_bench(tmp_path, monkeypatch, capfd, memory, *arguments)
    assert [(row["model"], row["rival"], row["ranks"]) for row in written["rows"]] == [("small", r, 2) for r in chosen]
    for row in written["rows"]:
        assert row["bytes"] == 4 * sum(p.numel() for p in MODELS["small"]().model.parameters())
        for of_ranks in row["memory_bytes"].values():
            assert len(of_ranks) == 2
            assert 2 * row["bytes"] < min(of_ranks) <= max(of_ranks) < 1 << 30
    cells = check_table(printed, len(chosen), "model", "gradients", "rival")
    assert [row[2] for row in cells] == chosen
    assert len(re.findall(r"- small, peak (?:RSS|PSS): (?:kept|BROKEN), -?\d\.\d\d copies\n", printed)) == 2


@pytest.mark.parametrize(("above", "verdict"), [(100, "kept, 1.00"), (101, "BROKEN, 1.01"), (-10, "kept, -0.10")])
def test_memory_claims_one_copy_of_the_gradients(above: int, verdict: str) -> None:
    """Of the worst rank's peak, beyond that of the worst rank alone."""

    def row(model: str, rival: str, rss: list[int], pss: list[int]) -> dict[str, Any]:
        return {"model": model, "rival": rival, "bytes": 100, "memory_bytes": {"peak_rss": rss, "peak_pss": pss}}

    others = [row("a", "ddp", [9000, 9000], [9000, 9000]), row("b", "alone", [0, 0], [0, 0])]
    ours, alone = row("a", "torchring", [900, 1500 + above], [1050, 1000]), row("a", "alone", [1500, 900], [1000, 900])
    said = [f"- a, peak RSS: {verdict} copies", "- a, peak PSS: kept, 0.50 copies"]
    assert memory.verdicts([ours, *others, alone]) == said
    assert memory.verdicts([ours, *others]) == []


@pytest.mark.grid
def test_elastic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    signals = ["--kills", "1", "--polite", "1", "--turns", "1", "--seconds", "1", "--cost-seconds", "1"]
    arguments = ["--rivals", "torchring", "--model", "small", *signals]
    printed, written = run_bench(tmp_path, monkeypatch, capfd, elastic, *arguments)
    row, cost = written["rows"]
    assert (row["rival"], row["model"], row["ranks"], row["failures"]) == ("torchring", "small", 3, [])
    assert [fault["signal"] for fault in row["faults"]] == ["SIGKILL", "SIGTERM"]
    for fault in row["faults"]:
        assert fault["lost_steps"] == 0
        assert 0 < fault["pause_s"] < fault["whole_s"]
        assert 0 < fault["start_s"] < fault["whole_s"]
    assert row["comparisons"] > 0
    assert cost["pairs"] > 0
    assert printed.count("| torchring |") == 4


def a_job(*workers: list[tuple[int, int]]) -> Any:
    """A job whose workers have finished these steps: (step, digest)."""
    made = {}
    for pid, steps in enumerate(workers):
        lines = [elastic_worker.Line(pid, "step", step=step, world=1, digest=digest) for step, digest in steps]
        made[pid] = SimpleNamespace(pid=pid, lines=lines, steps=lines)
    return SimpleNamespace(name="x", workers=made, lost=set(), restarts_all=False)


def test_elastic_replicas_that_differ_end_the_run() -> None:
    """A replacement begins at a later step, and what was lost may have been different."""
    job = a_job([(1, 10), (2, 20), (3, 30)], [(1, 10), (2, 99)], [(3, 30)])
    with pytest.raises(SystemExit, match="x: workers had different parameters after step 2"):
        elastic_job.check(job)
    job.lost = {(0, 2)}
    assert elastic_job.check(job) == 2
    with pytest.raises(SystemExit, match="x: worker 0 went back to a step that it had finished"):
        elastic_job.check(a_job([(1, 10), (1, 10)]))


def test_elastic_gaps_overlap_the_time_that_is_asked_for() -> None:
    steps = [elastic_worker.Line(at * 10**9, "step") for at in (0, 5, 6, 8, 20)]
    gaps = {(0, 5): 5, (5, 6): 1, (5, 7): 2, (7, 8): 2, (7, 9): 12}
    assert {when: elastic_job.longest_gap(steps, *(at * 10**9 for at in when)) for when in gaps} == gaps


def test_every_script_has_its_test() -> None:
    scripts = {file.stem for file in BENCH.glob("*.py") if '__name__ == "__main__"' in file.read_text()}
    assert scripts <= {name.removeprefix("test_") for name in (*globals(), *vars(test_bench_gpu))}


# Wrong results


def _allreduce_with_a_wrong_result(rank: int, world_size: int, wrong: str) -> tuple[list[str], str]:
    """What was checked, and what was said in the end."""
    torchring.horovod.init()
    measure.open_gloo()
    check, checked = allreduce.check, []

    def spoil_and_check(name: str, result: torch.Tensor, expected: torch.Tensor, *, rank: int) -> None:
        checked.append(name)
        if name == wrong:
            result[-1] += 1
        check(name, result, expected, rank=rank)

    allreduce.check = spoil_and_check
    try:
        allreduce.row_for(1000, argparse.Namespace(seconds=0.0, most=3, no_mpi=True))
    except SystemExit as end:
        return checked, str(end.code)
    return checked, ""


def test_a_rival_that_reduces_wrongly_ends_the_run() -> None:
    """Here the last one; the right results before it have passed."""
    for rank, (checked, said) in enumerate(run_ranks(_allreduce_with_a_wrong_result, 2, "gloo")):
        assert checked == ["direct", "ring", "tensor", "torchring.horovod", "gloo"]
        assert said == f"gloo reduced 1000 elements wrongly on rank {rank}"


def test_weights_that_differ_end_the_run() -> None:
    """By the bound of each rival, as a share of the way that torchring's have come."""

    def trainers(**distances: float) -> dict[str, step.Trainer]:
        weights = {"torchring": 2.0, "alone": 5.0, **{name: 2.0 + by for name, by in distances.items()}}
        names = {name.replace("_", " "): weight for name, weight in weights.items()}
        return {name: step.Trainer(filled(weight), None, []) for name, weight in names.items()}

    def filled(value: float) -> torch.nn.Module:
        module = torch.nn.Linear(3, 2)
        for parameter in module.parameters():
            torch.nn.init.constant_(parameter, value)
        return module

    start, near = filled(1.0), {"ddp": 0.0005, "torchring_bf16": -0.01, "ddp_fp16": 0.01}
    found = network.check_weights(trainers(**near), start)
    assert found == pytest.approx({"ddp": 5e-4, "torchring bf16": 0.01, "ddp fp16": 0.01, "alone": 3.0}, rel=1e-3)
    for rival, by in (("ddp", 0.01), ("torchring_bf16", 0.03), ("ddp_fp16", -0.03), ("ddp", float("nan"))):
        with pytest.raises(SystemExit, match=f"the weights of {rival.replace('_', ' ')} differ"):
            network.check_weights(trainers(**near | {rival: by}), start)


# Microbenchmarks


def _pytest(rank: int, world_size: int, options: list[str]) -> str:
    """What it prints, if all is well."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = pytest.main(options)
    assert code == 0, said.getvalue()
    return said.getvalue()


def run_micro(tmp_path: Path, *options: str) -> str:
    """Run bench/micro, forked from a process that has imported torch."""
    pytest.importorskip("pytest_benchmark")
    storage = f"--benchmark-storage=file://{tmp_path / 'storage'}"  # which it makes in any case
    arguments = [str(BENCH / "micro"), "-q", storage, *options]
    env = {"PYTEST_XDIST_WORKER": None}  # pytest-benchmark measures nothing in such a worker
    (said,) = run_ranks(_pytest, 1, arguments, launcher_env=False, env=env, deadline=120)
    return str(said)


@pytest.mark.grid
def test_micro(tmp_path: Path) -> None:
    """All of them, once, for their results; only the largest sizes are left out."""
    files = {file.stem for file in (BENCH / "micro").glob("bench_*.py")}
    assert files == {"bench_allreduce", "bench_hooks", "bench_kernels", "bench_plan"}
    junit = tmp_path / "junit.xml"
    run_micro(
        tmp_path, "--benchmark-disable", f"--junit-xml={junit}", "-k", "not vgg and not mlp and not resnet and not 25"
    )
    names = set(re.findall(r'<testcase classname="[^"]*?(bench_\w+)" name="(\w+)', junit.read_text()))
    assert {file for file, _ in names} == files
    functions = {function for _, function in names}
    for name in ("build_plan", "fingerprint", "gradients", "model", "pack", "unpack", "accumulate", "allreduce"):
        assert f"bench_{name}" in functions


def test_micro_measures_and_puts_rivals_side_by_side(tmp_path: Path) -> None:
    """A few, and briefly."""
    out = tmp_path / "micro.json"
    chosen = "bench_gradients and torchring or bench_pack and tiny and fp32"
    printed = run_micro(tmp_path, "-k", chosen, f"--benchmark-json={out}", "--benchmark-max-time=0.01")
    entries = json.loads(out.read_text())["benchmarks"]
    assert all(entry["stats"]["median"] > 0 for entry in entries)
    (hooks,) = (entry for entry in entries if entry["name"].startswith("bench_gradients"))
    per_parameter = hooks["extra_info"]["us per parameter"]
    assert per_parameter == pytest.approx(hooks["stats"]["median"] / 802 * 1e6, abs=0.01)
    assert f"bench_gradients[torchring]: us per parameter {per_parameter}" in printed
    packs = [entry for entry in entries if entry is not hooks]
    assert len(packs) == 5
    assert {entry["group"] for entry in packs} == {"pack: fp32 wire, tiny"}
    assert "benchmark 'pack: fp32 wire, tiny': 5 tests" in printed


def test_plain_pytest_leaves_the_microbenchmarks_alone(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.getini("testpaths") == ["tests"]
    assert not any(
        file.match(pattern) for file in BENCH.rglob("*.py") for pattern in pytestconfig.getini("python_files")
    )
