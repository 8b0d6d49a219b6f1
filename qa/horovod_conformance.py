"""`make horovod-conformance HOROVOD_SRC=path`: Horovod's own tests, from a checkout of Horovod, against torchring.

    python qa/horovod_conformance.py path                    all that are about PyTorch on a CPU
    python qa/horovod_conformance.py path --file test_torch  one of the files below
    python qa/horovod_conformance.py path -k allreduce_grad  the ids that contain this

Each test runs in processes of its own, one per rank, under the aliases of torchring/horovod/aliases.py, with a
time-out: a test that hangs does not take the others with it. The ranks are forked from this process, which has imported
torch, so that a test takes about a second. mpirun starts the ranks of the file that needs MPI. A test has passed if no
rank has failed. Horovod's tests skip what needs a GPU. Exit code 1 if a test failed or hung.

torch.optim.Muon is hidden from tests that try all optimizers: Muon refuses parameters with one dimension, whichever
library reduces them (--show-muon). Modules that the tests import are taken from the checkout, but for horovod.torch and
those that go with it.
"""

from __future__ import annotations

import argparse
import ast
import atexit
import contextlib
import faulthandler
import gc
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PASSED, SKIPPED, FAILED, HUNG = "passed", "skipped", "failed", "hung"
_KILL_SECONDS = 5.0  # for a rank to print its stacks
_SECONDS_MORE_OF_MPIRUN = 30.0  # whose ranks import torch
_LONGEST = 300  # characters of an error in the list
_ONE = "--one"  # a rank of mpirun's: the arguments behind are those of `_run_one`


@dataclass(frozen=True)
class File:
    """A file of Horovod's tests, relative to test/ of the checkout."""

    path: str
    size: int = 2
    over_mpi: bool = False


FILES = (
    File("parallel/test_torch.py"),
    File("parallel/test_adasum_pytorch.py", over_mpi=True),  # its tests skip unless MPI started the ranks
    File("parallel/test_timeline.py"),
    File("parallel/test_common.py"),
    File("single/test_torch_elastic.py", size=1),
    File("integration/test_stall.py"),
)


@dataclass(frozen=True)
class Outcome:
    """How a test went: of all ranks together, and why, if not well."""

    kind: str
    reason: str = ""
    output: str = ""


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="Runs Horovod's own tests against torchring.")
    parser.add_argument("checkout", type=Path, help="a checkout of Horovod")
    parser.add_argument("--file", action="append", choices=[Path(file.path).stem for file in FILES], metavar="NAME")
    parser.add_argument("-k", dest="part", default="", metavar="TEXT", help="tests whose ids contain this")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="for each test")
    parser.add_argument("--show-muon", action="store_true", help="do not hide torch.optim.Muon")
    parser.add_argument("-v", "--verbose", action="store_true", help="what ranks of failed tests have printed")
    options = parser.parse_args(arguments)
    checkout = options.checkout.resolve()
    if not (checkout / "test" / FILES[0].path).exists():
        parser.error(f"{checkout} is no checkout of Horovod: it has no test/{FILES[0].path}")
    files = [file for file in FILES if options.file is None or Path(file.path).stem in options.file]
    _prepare(checkout, options.show_muon)
    counts: dict[str, Counter[str]] = {}
    bad: list[tuple[str, Outcome]] = []
    began = time.monotonic()
    for file in files:
        count = counts[file.path] = Counter()
        for test in find_tests(checkout / "test" / file.path):
            if options.part not in f"{file.path}::{test}":
                continue
            started = time.monotonic()
            outcome = run_test(checkout, file, test, options.timeout, options.show_muon)
            count[outcome.kind] += 1
            print(f"{outcome.kind:8} {time.monotonic() - started:5.1f} s  {file.path}::{test}", flush=True)
            if outcome.kind in (FAILED, HUNG):
                bad.append((f"{file.path}::{test}", outcome))
                print(f"         {outcome.reason[:_LONGEST]}", flush=True)
                if options.verbose:
                    print(outcome.output, flush=True)
    gc.unfreeze()  # modules written in C++ complain of what is never freed
    print(f"\n{table(counts)}\n{time.monotonic() - began:.0f} s")
    for name, outcome in bad:
        print(f"{outcome.kind:8} {name}")
    return int(bool(bad))


def find_tests(file: Path) -> list[str]:
    """The ids behind the file's name of all that pytest would collect there, in the order of the file."""
    found = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            found.append(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
            found += [f"{node.name}::{name}" for name in methods if name.startswith("test")]
    return found


def table(counts: Mapping[str, Mapping[str, int]]) -> str:
    """A line for each file, and one for all."""
    kinds = (PASSED, FAILED, HUNG, SKIPPED)
    total = {kind: sum(count.get(kind, 0) for count in counts.values()) for kind in kinds}
    width = max(len(name) for name in [*counts, "all"])
    lines = [" ".join([" " * width, *(f"{kind:>8}" for kind in kinds)])]
    for name, count in [*counts.items(), ("all", total)]:
        lines.append(" ".join([f"{name:{width}}", *(f"{count.get(kind, 0):8}" for kind in kinds)]))
    return "\n".join(lines)


def run_test(checkout: Path, file: File, test: str, seconds: float, shows_muon: bool) -> Outcome:
    """Run one test on all ranks, and leave nothing of it."""
    place = Path(tempfile.mkdtemp(prefix="horovod-conformance-"))  # a TemporaryDirectory would end with a fork's exit
    try:
        name = f"{checkout / 'test' / file.path}::{test}"
        if file.over_mpi:
            has_ended = _run_over_mpi(checkout, file, name, place, seconds, shows_muon)
        else:
            has_ended = _run_forked(file, name, place, seconds)
        return judge(place, file.size, has_ended)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def judge(folder: Path, size: int, has_ended: bool) -> Outcome:
    """What the ranks' reports in `folder` amount to. A rank that has written none has died, or hung."""
    reports: list[dict[str, Any]] = []
    for rank in range(size):
        file = folder / f"report{rank}"
        reports.append(json.loads(file.read_text()) if file.exists() else {"kind": FAILED, "reason": "it died"})
    output = "\n".join(
        f"--- rank {rank}\n{log.read_text(errors='replace')}"
        for rank in range(size)
        if (log := folder / f"log{rank}").exists()
    )
    wrong = [f"rank {rank}: {report['reason']}" for rank, report in enumerate(reports) if report["kind"] == FAILED]
    if not has_ended:
        return Outcome(HUNG, "; ".join(wrong), output)
    if wrong:
        return Outcome(FAILED, "; ".join(wrong), output)
    return Outcome(SKIPPED if all(report["kind"] == SKIPPED for report in reports) else PASSED)


def _prepare(checkout: Path, shows_muon: bool) -> None:
    """Make this process one in which Horovod's tests can run: here, or in children that it forks."""
    from torchring.launch.horovodrun import with_aliases

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # the checkout stays as it is
    sys.dont_write_bytecode = True
    for key in [key for key in os.environ if key.startswith("HOROVOD_")]:
        del os.environ[key]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(checkout), str(ROOT)])
    os.environ.update(with_aliases(os.environ))
    sys.path.insert(0, str(checkout))
    import unittest.mock

    import pytest  # noqa: F401 - children find it imported
    import torch
    import torch._dynamo  # torch.optim imports it when it is first used
    import torch.utils.data

    import torchring.horovod
    import torchring.horovod.aliases

    gc.freeze()  # else a child's garbage collector would copy all that is here
    torchring.horovod.aliases.install()
    if importlib.util.find_spec("mock") is None:  # Horovod's tests import the package of that name
        sys.modules["mock"] = unittest.mock
    if not shows_muon and hasattr(torch.optim, "Muon"):
        torch.optim.Muon.__module__ = "hidden"


def _run_forked(file: File, name: str, folder: Path, seconds: float) -> bool:
    """Run the test on ranks that are forked. Returns whether all have ended in time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(file.size):
        environ = {}
        if file.size > 1:
            environ = {"HOROVOD_RANK": rank, "HOROVOD_SIZE": file.size, "HOROVOD_LOCAL_RANK": rank}
            environ |= {"HOROVOD_LOCAL_SIZE": file.size, "HOROVOD_CROSS_RANK": 0, "HOROVOD_CROSS_SIZE": 1}
            environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setpgid(0, 0)
                os.environ.update({key: str(value) for key, value in environ.items()})
                code = _run_one(name, folder, rank)
                atexit._run_exitfuncs()  # os._exit does not, and shutdown may hang, too
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    return _wait_for(pids, seconds)


def _wait_for(pids: Sequence[int], seconds: float) -> bool:
    """Whether all processes have ended in time. Those that have not print their stacks, and are killed."""
    with _killed_in_the_end(pids):
        if _all_end(pids, seconds):
            return True
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
        _all_end(pids, _KILL_SECONDS)
        return False


def _all_end(pids: Sequence[int], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if all(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in pids):
            return True
        time.sleep(0.02)
    return False


@contextlib.contextmanager
def _killed_in_the_end(pids: Sequence[int]) -> Iterator[None]:
    """Each of the processes leads a group: what it has started ends with it."""
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _run_over_mpi(checkout: Path, file: File, name: str, folder: Path, seconds: float, shows_muon: bool) -> bool:
    """Run the test on ranks that mpirun starts. Returns whether all have ended in time."""
    mpirun = shutil.which("mpirun") or shutil.which("mpirun", path=os.path.dirname(sys.executable))
    if mpirun is None:
        for rank in range(file.size):
            _report(folder, rank, SKIPPED, "there is no mpirun")
        return True
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command = [mpirun, *root, "--oversubscribe", "-np", str(file.size), sys.executable, __file__, _ONE]
    command += [name, str(folder), str(checkout), str(int(shows_muon))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        process.wait(seconds + _SECONDS_MORE_OF_MPIRUN)
    except subprocess.TimeoutExpired:
        process.terminate()  # and mpirun its ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_SECONDS)
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return True


def _run_one(name: str, folder: Path, rank: int) -> int:
    """Run one test as one rank: print into `log`, write `report`. Returns pytest's exit code."""
    log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    faulthandler.enable(all_threads=True)
    import pytest

    class Watch:
        """Notes the worst of a test's phases."""

        kind, reason = "", ""

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.outcome == FAILED:
                text = str(getattr(report.longrepr, "reprcrash", None) or report.longreprtext)
                self.kind, self.reason = FAILED, text.strip()
            elif not self.kind and (report.when == "call" or report.outcome == SKIPPED):
                self.kind = str(report.outcome)

        def pytest_collectreport(self, report: Any) -> None:
            if report.outcome == FAILED:
                self.kind, self.reason = FAILED, report.longreprtext.strip()[-_LONGEST:]

    watch = Watch()
    options = ["--capture=no", "--quiet", "--tb=short", "--assert=plain", "-p", "no:cacheprovider"]
    options += ["-p", "no:unraisableexception"]  # which collects garbage twice, in 0.5 s
    code = int(pytest.main([name, *options], plugins=[watch]))
    _report(folder, rank, watch.kind or FAILED, watch.reason or f"pytest ended with exit code {code}")
    return code


def _report(folder: Path, rank: int, kind: str, reason: str) -> None:
    (folder / f"report{rank}").write_text(json.dumps({"kind": kind, "reason": reason}))


if __name__ == "__main__":
    if sys.argv[1:2] == [_ONE]:
        _name, _folder, _checkout, _shows_muon = sys.argv[2:]
        _prepare(Path(_checkout), _shows_muon == "1")
        sys.exit(_run_one(_name, Path(_folder), int(os.environ["OMPI_COMM_WORLD_RANK"])))
    sys.exit(main(sys.argv[1:]))
