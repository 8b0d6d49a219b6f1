"""`torchring run`: what ranks are told, what becomes of their exit codes, and that none survives the launcher; and
`torchring bench`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import torchring
from tests.support import commands
from tests.support.documents import ROOT, blocks
from tests.support.grids import grid
from tests.support.harness import _clean_environ, patient, wait_until
from torchring import cli
from torchring.placement import bind

# Of the package, by README's script on one host. These numbers only fall.
MOST_FILES_LOADED, MOST_LINES_LOADED = 84, 13_900

REPORT = """
import json, os, sys
from pathlib import Path
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "TORCHRING_PLACE"]
facts = {"argv": sys.argv[1:], "cores": sorted(os.sched_getaffinity(0)), "input": sys.stdin.read()}
text = json.dumps({**facts, **{name: os.environ.get(name) for name in names}})
Path(os.environ["REPORTS"], os.environ["RANK"]).write_text(text)
"""


class Launcher:
    """Runs `python -m torchring ...` in a folder of its own; what ranks write to $REPORTS is in `reports`.

    Args:
        ssh: a script for /bin/sh that stands in for ssh.
    """

    input = "for rank 0\n"

    def __init__(self, folder: Path, ssh: str = "") -> None:
        self.folder = folder / "a folder's name"
        self.reports_folder = folder / "reports"
        for made in (self.folder, self.reports_folder, folder / "bin"):
            made.mkdir()
        if ssh:
            (folder / "bin" / "ssh").write_text(f"#!/bin/sh\n{ssh}")
            (folder / "bin" / "ssh").chmod(0o755)
        self.environ = {name: value for name, value in _clean_environ().items() if not name.startswith("TORCHRING_")}
        self.environ |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        self.environ["REPORTS"] = str(self.reports_folder)
        del self.environ["OMP_NUM_THREADS"]

    def script(self, code: str, name: str = "script.py") -> str:
        (self.folder / name).write_text(code)
        return name

    def start(self, *arguments: str, before: Sequence[str] = (), **environ: str) -> subprocess.Popen[str]:
        command = [*before, sys.executable, "-m", "torchring", *arguments]
        return commands.start(command, {**self.environ, **environ}, self.folder)

    def run(self, *arguments: str, **how: str) -> subprocess.CompletedProcess[str]:
        return commands.finish(self.start(*arguments, **how), self.input)

    def reports(self) -> list[dict[str, Any]]:
        files = sorted(self.reports_folder.glob("[0-9]*"), key=lambda file: int(file.name))
        return [json.loads(file.read_text()) for file in files]


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path)


# What ranks are told


def test_ranks_get_their_place_and_the_scripts_arguments(launcher: Launcher) -> None:
    """Those that look like the launcher's own, too: everything behind the script belongs to it."""
    line = "data --help -np 7 --num-proc=3 -h --version --nproc-per-node=9 -x -- -- run --standalone --lr -0.5"
    given = [*line.split(), "a b", ""]
    ran = launcher.run("run", "-np", "2", launcher.script(REPORT), *given)
    assert ran.returncode == 0, ran.stderr
    reports = launcher.reports()
    assert [report["argv"] for report in reports] == [given, given]
    assert [report["input"] for report in reports] == [launcher.input, ""]
    assert [report["RANK"] for report in reports] == ["0", "1"]
    assert [report["LOCAL_RANK"] for report in reports] == ["0", "1"]
    assert [report["WORLD_SIZE"] for report in reports] == ["2", "2"]
    expected = [bind("auto", index, 2, os.sched_getaffinity(0)) for index in range(2)]
    for report, (cores, threads, sentence) in zip(reports, expected, strict=True):
        assert report["cores"] == sorted({cpu for core in cores for cpu in core} or os.sched_getaffinity(0))
        assert (report["OMP_NUM_THREADS"], report["TORCHRING_PLACE"]) == (str(threads), sentence)


def test_a_double_dash_first_belongs_to_the_script(launcher: Launcher) -> None:
    """A module, and a terminal's worth of nothing: what it prints is in the log file only."""
    launcher.script(REPORT + "print('all', 'well')")
    logs = ["--log-dir", "logs", "--quiet"]
    ran = launcher.run("run", "--num-proc=1", *logs, "-m", "script", "--", "--epochs", "3", OMP_NUM_THREADS="3")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert (launcher.folder / "logs" / "rank0.log").read_text() == "all well\n"
    (report,) = launcher.reports()
    assert [report[name] for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")] == ["0", "1", "3"]
    assert report["argv"] == ["--", "--epochs", "3"]


def test_readmes_first_script_trains_as_pasted(launcher: Launcher) -> None:
    """And ranks reduce together. What it loads of the package is all that a reader has to know of it."""
    code = blocks(ROOT / "README.md", "python")[0].code
    code += """
import os, sys
from pathlib import Path
loaded = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "torchring"]
lines = sum(Path(file).read_text().count("\\n") for file in loaded)
total = torchring.all_reduce(torch.tensor([float(torchring.rank() + 1)]), "sum").item()
Path(os.environ["REPORTS"], str(torchring.rank())).write_text(str([total, torchring.size(), len(loaded), lines]))
"""
    ran = launcher.run("run", "-np", "2", launcher.script(code, "a script with spaces.py"))
    assert ran.returncode == 0, ran.stderr
    losses = [float(line.rpartition(" ")[2]) for line in ran.stdout.splitlines()]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 2
    for total, size, num_files, num_lines in launcher.reports():
        assert (total, size) == (3.0, 2)
        assert num_files <= MOST_FILES_LOADED
        assert 8_000 < num_lines <= MOST_LINES_LOADED


# Exit codes


def test_exit_code_of_the_rank_that_failed_first(launcher: Launcher) -> None:
    """Its exit handlers run for longer than the other rank takes to fail because of it, and to end."""
    code = """
import atexit, os, sys, time
from pathlib import Path
path = Path(os.environ["REPORTS"], "1")
@atexit.register  # runs last: torchring has said goodbye to the other rank
def wait():
    while os.environ["RANK"] == "0" and os.path.exists(f"/proc/{path.read_text()}"):
        time.sleep(0.01)
import torch, torchring
if os.environ["RANK"] == "1":
    path.write_text(str(os.getpid()))
torchring.barrier()
if os.environ["RANK"] == "0":
    sys.exit(3)
torchring.all_reduce(torch.ones(1))
"""
    ran = launcher.run("run", "-np", "2", launcher.script(code))
    assert ran.returncode == 3, ran.stderr
    assert re.search(r"rank 0 \(pid [0-9]+\) failed first, with exit code 3", ran.stderr)


def test_a_killed_rank_is_137(launcher: Launcher) -> None:
    """The other rank has time to see it, and to say so. It does not count as the one that ended first."""
    code = """
import os, signal, sys, time
from pathlib import Path
path = Path(os.environ["REPORTS"], "0")
if os.environ["RANK"] == "0":
    path.write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGKILL)
while not path.exists() or not path.read_text() or os.path.exists(f"/proc/{path.read_text()}"):
    time.sleep(0.01)
sys.exit("rank 0 died in step 5")
"""
    ran = launcher.run("run", "-np", "2", launcher.script(code))
    assert ran.returncode == 137
    assert "rank 0 died in step 5" in ran.stderr
    assert "rank 0 (pid " in ran.stderr
    assert "killed by SIGKILL" in ran.stderr


@grid("closed", [">&-", ">&- 2>&-"], keep=lambda closed: closed == ">&-")
def test_closed_streams(closed: str, launcher: Launcher) -> None:
    """The ranks print into nothing, as a script without launcher does."""
    script = launcher.script("import sys; print('hello'); print('hello', file=sys.stderr)")
    command = ["sh", "-c", f'exec "$0" -m torchring run -np 2 {script} {closed}', sys.executable]
    ran = subprocess.run(command, cwd=launcher.folder, env=launcher.environ, capture_output=True, timeout=patient(60))
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"" if "2>" in closed else b"hello\n" * 2)


@pytest.mark.parametrize("package", ["torch", "numpy"])
def test_without_a_package_there_is_a_sentence(package: str, launcher: Launcher) -> None:
    """The same one from all commands, and as the last line of a script's traceback."""
    launcher.script("", "train.py")
    code = f"""
import sys
import sysconfig
sys.modules[{package!r}] = None
from torchring.__main__ import main
for words in ("doctor", "run -np 2 train.py", "run --elastic -np 2 train.py", "bench step"):
    sys.argv[1:] = words.split()
    assert main() == 2, words
import torchring
torchring.wrap
"""
    quiet = [sys.executable, "-W", "ignore", "-c", code]  # torch warns of NumPy
    ran = subprocess.run(quiet, cwd=launcher.folder, env=launcher.environ, capture_output=True, text=True)
    sentence = f"torchring needs {package}, which is not installed: pip install {package}"
    *lines, last = ran.stderr.splitlines()
    assert lines[:4] == [sentence] * 4
    assert last == f"ModuleNotFoundError: {sentence}"


def test_a_checkout_that_is_not_installed_works(launcher: Launcher) -> None:
    """Processes that it starts find the package, too. Here nothing reads the .pth file that leads to the checkout."""
    environ = {**launcher.environ, "PYTHONPATH": (packages := sysconfig.get_path("purelib"))}
    script = launcher.folder / launcher.script("import os; print(os.environ['PYTHONPATH'])")
    for arguments, said in (
        (["--version"], f"torchring {torchring.__version__}"),
        (["run", "-np", "1", script], f"{ROOT}:{packages}"),
    ):
        command = [sys.executable, "-S", "-m", "torchring", *arguments]
        ran = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"{said}\n", "")


def test_a_machine_that_does_not_reach_itself_says_so(launcher: Launcher) -> None:
    """torch would try for a minute, and print pages."""
    alone = ["unshare", "--net", "--map-root-user"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("takes a network namespace")
    command = [*alone, sys.executable, "-m", "torchring", "run", "-np", "2", launcher.script("")]
    ran = subprocess.run(command, cwd=launcher.folder, capture_output=True, text=True, timeout=patient(60))
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("torchring run: this host does not reach itself at 127.0.0.1")
    assert "`ip link set lo up`" in ran.stderr


def test_what_needs_no_torch_imports_none(launcher: Launcher) -> None:
    """And Ctrl-C during its import, which takes seconds, ends the command without a traceback."""
    sign = launcher.folder / "importing"
    (launcher.folder / "fake").mkdir()
    launcher.script(f"open({str(sign)!r}, 'w').close()\nimport time\ntime.sleep(60)\n", "fake/torch.py")
    environ = {"PYTHONPATH": str(launcher.folder / "fake")}
    lines = ["--version", "run --help", "bench --help", "doctor --help"]
    lines += ["run", "report", "report nowhere", "top", "top nowhere --once"]
    for line, code in zip(lines, (0, 0, 0, 0, 2, 2, 1, 2, 1), strict=True):
        assert launcher.run(*line.split(), **environ).returncode == code, line
        assert not sign.exists()
    for command in (["run", "-np", "2", launcher.script("")], ["doctor"]):
        process = launcher.start(*command, **environ)
        try:
            wait_until(sign.exists, "the import")
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=patient(60))
            assert process.returncode in (130, -signal.SIGINT)  # 130 to a shell
            assert (out, err) == ("", "")
        finally:
            commands.kill(process)
        sign.unlink()


# Wrong use, in this process: it ends before anything is started


def called(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    try:
        code = cli.main(arguments)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("", "torchring: say which command: run, doctor, report, top, manifest, bench"),
        ("walk", "torchring: there is no command 'walk'"),
        ("rnu", "torchring: there is no command 'rnu'; did you mean run?"),
        ("version", "torchring: there is no command 'version'; did you mean --version?"),
        ("run", "torchring run: say which script to run"),
        ("run -np 2", "torchring run: say which script to run"),
        ("run -np", "torchring run: argument -np/-n/--num-proc/--nproc-per-node: expected one argument"),
        ("bench --wrong", "torchring bench: unrecognized arguments: --wrong"),
        ("manifest slurm", "torchring manifest: the following arguments are required: JOB.YAML"),
        ("top --evry=3 x", "torchring top: unrecognized arguments: --evry=3; did you mean --every?"),
    ],
)
def test_a_usage_error_is_the_error_and_where_help_is(
    line: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = called(line.split(), capsys)
    assert (code, out) == (2, "")
    assert err == f"{complaint}\n`{complaint.partition(':')[0]} --help` shows what can be given\n"


def test_hosts_that_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    refused = "torchring run: launcher 'local' starts nothing on 192.0.2.1;"
    code, out, err = called(["run", "-H", "192.0.2.1:1", "--launcher", "local", __file__], capsys)
    assert (code, out, err.startswith(refused)) == (2, "", True), err


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        *((line, "usage: torchring") for line in ("--help", "-h", "run --help", "run -h")),
        ("--version", f"torchring {torchring.__version__}"),
    ],
)
def test_help_and_version(line: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = called(line.split(), capsys)
    assert (code, err) == (0, "")
    assert out.startswith(shown)
    assert ("-np" in out) is line.startswith("run")


def test_the_command_is_installed() -> None:
    """Beside the interpreter that runs the tests."""
    command = Path(sys.executable).with_name("torchring")
    ran = subprocess.run(
        [command, "run", "-np", "1", "nowhere.py"], capture_output=True, text=True, timeout=patient(60)
    )
    assert (ran.returncode, ran.stderr) == (2, "torchring run: there is no script 'nowhere.py'\n")


# Benchmarks: `torchring bench` with a folder of our own, in this process

ONE = '''"""One: prints what it was given.

Not in the summary."""
import json, sys
if __name__ == "__main__":
    print(json.dumps(sys.argv))
    sys.exit(5)
'''


@pytest.fixture
def benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that `torchring bench` looks into."""
    folder = tmp_path / "bench"
    (folder / "micro").mkdir(parents=True)
    sources = {"one": ONE, "tool": "def main(): ...", "__init__": ""}
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    (folder / "micro" / "__main__.py").touch()
    monkeypatch.setattr(cli, "_BENCH", folder)
    return folder


def test_the_command_becomes_the_benchmark(benchmarks: Path) -> None:
    """Whose exit code, and signals, are its own. Its arguments are taken apart by nobody."""
    given = "-h --version -np 2 -- one --sizes -5 --"
    line = [sys.executable, "-c", "import sys; from torchring import cli; from pathlib import Path; "
            "cli._BENCH = Path(sys.argv.pop(1)); print(cli.main())"]  # fmt: skip
    ran = subprocess.run([*line, benchmarks, "bench", "one", *given.split(), ""], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (5, "")
    assert json.loads(ran.stdout) == [str(benchmarks / "one.py"), *given.split(), ""]


def test_a_benchmark_that_is_unknown_or_cannot_be_started(
    benchmarks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for unknown in ("two", "tool", "__init__", "one.py", ""):
        code, out, err = called(["bench", unknown], capsys)
        assert (code, out) == (2, "")
        assert err.startswith(f"torchring bench: there is no benchmark {unknown!r}, but micro, one")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    message = "torchring bench: cannot start /nowhere/python: No such file or directory\n"
    assert called(["bench", "one"], capsys) == (2, "", message)


def test_the_benchmarks_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = called(["bench"], capsys)
    assert (code, out) == (0, called(["bench", "--help"], capsys)[1])
    assert all(name in out for name in ("allreduce", "micro", "step"))
