"""`torchring` as a command: what ranks of `torchring run` are told, wrong command lines, and `torchring bench`.

usage_errors.txt has wrong command lines, each with what is said of it. After a new line,

python -m tests.launch.test_launcher      writes it anew; look at the differences
"""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

from tests.support import commands
from tests.support.commands import Launcher, run_python
from tests.support.documents import ROOT, blocks, golden
from tests.support.harness import patient, wait_until
from torchring import cli
from torchring.placement import bind

# Of the package, by README's script on one host. These numbers only fall.
MOST_FILES_LOADED, MOST_LINES_LOADED = 84, 13_900

USAGE_ERRORS = Path(__file__).with_name("usage_errors.txt")

REPORT = """
import json, os, sys
from pathlib import Path
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "TORCHRING_PLACE", "PYTHONPATH"]
facts = {"argv": sys.argv[1:], "cores": sorted(os.sched_getaffinity(0)), "input": sys.stdin.read()}
text = json.dumps({**facts, **{name: os.environ.get(name) for name in names}})
Path(os.environ["REPORTS"], os.environ["RANK"]).write_text(text)
print("all", "well")
print("not all", file=sys.stderr)
"""

# What rank 0 and its agent listen at, in the kernel's text for addresses.
LISTENING = """
def listening(pid):
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, here, _, state, *others = line.split()
            if state == "0A" and f"socket:[{others[5]}]" in links:
                yield here.partition(":")[0]
if torchring.rank() == 0:
    print("listening at", *sorted([*listening(os.getpid()), *listening(os.getppid())]), file=sys.stderr, flush=True)
torchring.all_reduce(torch.zeros(1))
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path)


# What ranks are told


def test_ranks_get_their_place_and_the_scripts_arguments(launcher: Launcher) -> None:
    """Those that look like the launcher's own, too.

    A checkout that is not installed is enough: its processes find the package. Here nothing reads the .pth file that
    leads to the checkout.
    """
    launcher.script(REPORT, "module.py")
    search = f"{sysconfig.get_path('purelib')}:{launcher.folder}"
    line = "-- data --help -np 7 --num-proc=3 -h --version --nproc-per-node=9 -x -- -- run --standalone --lr -0.5"
    given = [*line.split(), "a b", ""]
    command = [sys.executable, "-S", "-m", "torchring", "run", "-np", "2"]
    command += ["--log-dir", str(launcher.reports_folder), "-m", "module", *given]
    ran = launcher.finish(commands.start(command, {**launcher.environ, "PYTHONPATH": search}, ROOT), "for rank 0\n")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "all well\n" * 2, "not all\n" * 2)
    reports = launcher.reports()
    assert [*reports] == ["0", "1"]
    for rank, report in enumerate(reports.values()):
        cores, threads, sentence = bind("auto", rank, 2, os.sched_getaffinity(0))
        assert report == {
            **{"argv": given, "input": "" if rank else "for rank 0\n", "PYTHONPATH": f"{ROOT}:{search}"},
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
            **{"OMP_NUM_THREADS": str(threads), "TORCHRING_PLACE": sentence},
            "cores": sorted({cpu for core in cores for cpu in core} or os.sched_getaffinity(0)),
        }
        log = (launcher.reports_folder / f"rank{rank}.log").read_text()
        assert sorted(log.splitlines()) == ["all well", "not all"]


def test_readmes_first_script_trains_as_pasted(launcher: Launcher) -> None:
    """And ranks reduce together, and listen on loopback only. What it loads of the package is all that a reader has to
    know of it."""
    code = blocks(ROOT / "README.md", "python")[0].code
    code += """
import json, os, sys
from pathlib import Path
loaded = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "torchring"]
lines = sum(Path(file).read_text().count("\\n") for file in loaded)
total = torchring.all_reduce(torch.tensor([float(torchring.rank() + 1)]), "sum").item()
said = json.dumps({"total": total, "size": torchring.size(), "files": len(loaded), "lines": lines})
Path(os.environ["REPORTS"], str(torchring.rank())).write_text(said)
"""
    ran = launcher.run("run", "-np", "2", launcher.script(code + LISTENING, "a script with spaces.py"))
    assert (ran.returncode, ran.stderr) == (0, "listening at 0100007F\n")
    losses = [float(line.rpartition(" ")[2]) for line in ran.stdout.splitlines()]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 2
    for report in launcher.reports().values():
        assert (report["total"], report["size"]) == (3.0, 2)
        assert report["files"] <= MOST_FILES_LOADED
        assert 8_000 < report["lines"] <= MOST_LINES_LOADED


# What is missing


def test_a_script_that_forgets_to_wrap_is_told(launcher: Launcher) -> None:
    code = "import torch, torchring\n(torch.ones(1, requires_grad=True) * 2).sum().backward()"
    assert "never met the others" in launcher.run("run", "-np", "2", launcher.script(code)).stderr


def test_without_a_package_there_is_a_sentence(launcher: Launcher) -> None:
    """The same one from all commands, and as the last line of a script's traceback."""
    launcher.script("", "train.py")
    code = """
import sys
from torchring.__main__ import main
for package in ("numpy", "torch"):
    sys.modules[package] = None
    for words in ("doctor", "run -np 2 train.py", "run --elastic -np 2 train.py", "bench step"):
        sys.argv[1:] = words.split()
        assert main() == 2, words
    sys.modules.pop("numpy", None)
import torchring
torchring.wrap
"""
    ran = run_python("-c", code, env=launcher.environ, folder=launcher.folder)
    numpy, torch = (f"torchring needs {it}, which is not installed: pip install {it}" for it in ("numpy", "torch"))
    *lines, last = ran.stderr.splitlines()
    assert lines[:8] == [numpy] * 4 + [torch] * 4
    assert last == f"ModuleNotFoundError: {torch}"


def test_a_machine_that_does_not_reach_itself_says_so(launcher: Launcher) -> None:
    """torch would try for a minute, and print pages."""
    alone = ["unshare", "--net", "--map-root-user"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("takes a network namespace")
    ran = launcher.run("run", "-np", "2", launcher.script(""), before=alone)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("torchring run: this host does not reach itself at 127.0.0.1")
    assert "`ip link set lo up`" in ran.stderr


def test_what_needs_no_torch_imports_none(launcher: Launcher) -> None:
    """And Ctrl-C during its import, which takes seconds, ends the command without a traceback."""
    code = "import os, signal, time\nif os.environ.get('RANK'): signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
    launcher.script(f"{code}open(f'importing{{os.getpid()}}', 'w').close()\ntime.sleep(60)\n", "torch.py")
    lines = [("--version", 0), ("run --help", 0), ("bench --help", 0), ("doctor --help", 0), ("run", 2), ("report", 2)]
    lines += [("report nowhere", 1), ("top", 2), ("top nowhere --once", 1)]
    code = f"""
from torchring.cli import main
for line, code in {lines}:
    try:
        assert main(line.split()) == code, line
    except SystemExit as error:
        assert error.code == code, line
"""
    command = [sys.executable, launcher.script(code, "codes.py")]
    subprocess.run(command, cwd=launcher.folder, env=launcher.environ, check=True, capture_output=True)
    assert not [*launcher.folder.glob("importing*")]
    environ = {"PYTHONPATH": f"{launcher.folder}:{ROOT}"}
    started = [launcher.start(*line, **environ) for line in (["run", "-np", "2", "torch.py"], ["doctor"])]
    try:
        wait_until(lambda: len([*launcher.folder.glob("importing*")]) == 6, "the imports of agents and ranks")
    finally:
        for process in started:
            process.send_signal(signal.SIGINT)
    for ran in map(launcher.finish, started):
        assert ran.returncode in (130, -signal.SIGINT)  # 130 to a shell
        assert (ran.stdout, ran.stderr) == ("", "")


# Command lines, in this process: what is wrong ends before anything is started


def exit_code(arguments: list[str]) -> int:
    try:
        return cli.main(arguments)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1


def called(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    return exit_code(arguments), *capsys.readouterr()


def complaint(line: str) -> str:
    """What a command says of a line that it does not take. Nothing is started, and there is a train.py."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = exit_code(line.split())
    assert (code, out.getvalue()) == (2, ""), line
    return re.sub(r" \(choose from .*\)", "", err.getvalue())  # releases of Python have other quotes there


def test_a_usage_error_is_one_sentence_that_says_where_help_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    expected = golden(USAGE_ERRORS)
    assert {line: complaint(line) for line in expected} == expected


def test_the_command_is_installed() -> None:
    """Beside the interpreter that runs the tests."""
    command = [Path(sys.executable).with_name("torchring"), "run", "-np", "1", "nowhere.py"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=patient(60))
    assert (ran.returncode, ran.stderr) == (2, "torchring run: there is no script 'nowhere.py'\n")


def test_completion(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = called(["--print-completion", "bash"], capsys)
    assert code == 0
    assert subprocess.run(["bash", "-n"], input=out, text=True).returncode == 0
    assert ("--nproc-per-node" in out, "--trace-json" in out, "--cycle-time-ms" in out) == (True, True, False)
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert "needs shtab: pip install shtab" in called(["--print-completion", "zsh"], capsys)[2]


# Benchmarks: `torchring bench` with a folder of our own

ONE = 'import json, sys\nif __name__ == "__main__":\n    print(json.dumps(sys.argv))\n    sys.exit(5)\n'


def test_benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command becomes the benchmark, whose exit code and arguments are its own."""
    code, out, _ = called(["bench"], capsys)
    assert (code, out) == (0, called(["bench", "--help"], capsys)[1])
    assert all(f"\n  {name} " in out for name in ("allreduce", "micro", "step"))
    assert called([], capsys) == (2, "", called(["--help"], capsys)[1])
    (tmp_path / "micro").mkdir()
    for name, source in {"one": ONE, "tool": "def main(): ...", "__init__": "", "micro/__main__": ""}.items():
        (tmp_path / f"{name}.py").write_text(source)
    given = ["-h", "--version", "-np", "2", "--", "one", "--sizes", "-5", "--", ""]
    line = [sys.executable, "-c", "import sys; from torchring import cli; from pathlib import Path; "
            "cli._BENCH = Path(sys.argv.pop(1)); print(cli.main())"]  # fmt: skip
    ran = subprocess.run([*line, tmp_path, "bench", "one", *given], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (5, "")
    assert json.loads(ran.stdout) == [str(tmp_path / "one.py"), *given]
    monkeypatch.setattr(cli, "_BENCH", tmp_path)
    code, out, err = called(["bench", "tool"], capsys)
    assert (code, out) == (2, "")
    assert err.startswith("torchring bench: argument NAME: invalid choice: 'tool' (choose from ")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    message = "torchring bench: cannot start /nowhere/python: No such file or directory\n"
    assert called(["bench", "one"], capsys) == (2, "", message)


if __name__ == "__main__":
    lines = golden(USAGE_ERRORS)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("train.py").touch()
        USAGE_ERRORS.write_text("".join(f"=== {line}\n{complaint(line)}" for line in lines), encoding="utf-8")
