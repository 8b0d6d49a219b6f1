"""`make horovod-conformance HOROVOD_SRC=path`: Horovod's own tests, from a checkout of Horovod, against torchring.

    make horovod-conformance HOROVOD_SRC=path                             all that are about PyTorch on a CPU
    make horovod-conformance HOROVOD_SRC=path ARGS="--file test_torch"    one of the files below
    make horovod-conformance HOROVOD_SRC=path ARGS="-k allreduce_grad"    the ids that contain this

Each test runs in processes of its own, one per rank, under the aliases of torchring/horovod/aliases.py, with a
time-out. It has passed if no rank has failed, or left something behind. Exit code 1 if a test failed or hung.

torch.optim.Muon is hidden from tests that try all optimizers: Muon refuses parameters with one dimension, whichever
library reduces them.
"""

import argparse
import ast
import contextlib
import functools
import importlib
import importlib.util
import io
import os
import sys
import time
import unittest.mock
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import torchring.horovod
import torchring.horovod.aliases
import torchring.horovod.builds
from tests.support.commands import free_port
from tests.support.harness import RanksFailed, run_ranks
from tests.support.mpi_job import MISSING, MpiJob
from torchring.launch.horovodrun import with_aliases

ROOT = Path(__file__).resolve().parents[1]
PASSED, SKIPPED, FAILED, HUNG = "passed", "skipped", "failed", "hung"
_LONGEST = 300  # characters of an error in the list


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
    output: str = ""  # of ranks that have failed


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Runs Horovod's own tests against torchring.")
    parser.add_argument("checkout", type=Path, help="a checkout of Horovod")
    parser.add_argument("--file", action="append", choices=[Path(file.path).stem for file in FILES], metavar="NAME")
    parser.add_argument("-k", dest="part", default="", metavar="TEXT", help="tests whose ids contain this")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="for each test")
    parser.add_argument("-v", "--verbose", action="store_true", help="what ranks of failed tests have printed")
    options = parser.parse_args(arguments)
    checkout = options.checkout.resolve()
    if not (checkout / "test" / FILES[0].path).exists():
        parser.error(f"{checkout} is no checkout of Horovod: it has no test/{FILES[0].path}")
    counts: dict[str, Counter[str]] = {}
    bad: list[tuple[str, Outcome]] = []
    began = time.monotonic()
    for file in (file for file in FILES if options.file is None or Path(file.path).stem in options.file):
        count = counts[file.path] = Counter()
        for test in find_tests(checkout / "test" / file.path):
            if options.part not in f"{file.path}::{test}":
                continue
            started = time.monotonic()
            outcome = run_test(checkout, file, test, options.timeout)
            count[outcome.kind] += 1
            print(f"{outcome.kind:8} {time.monotonic() - started:5.1f} s  {file.path}::{test}", flush=True)
            if outcome.kind in (FAILED, HUNG):
                bad.append((f"{file.path}::{test}", outcome))
                print(f"         {outcome.reason[:_LONGEST]}", flush=True)
                if options.verbose:
                    print(outcome.output, flush=True)
    print(f"\n{time.monotonic() - began:.0f} s")
    for path, count in counts.items():
        print(f"{path}: {', '.join(f'{number} {kind}' for kind, number in sorted(count.items()))}")
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


def run_test(checkout: Path, file: File, test: str, seconds: float) -> Outcome:
    """Run one test on all ranks, and leave nothing of it."""
    arguments = f"{checkout / 'test' / file.path}::{test}", checkout
    try:
        if not file.over_mpi:
            env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if file.size > 1 else {}
            with contextlib.redirect_stdout(io.StringIO()):  # what ranks of tests that pass have printed
                kinds = run_ranks(_run_one, file.size, *arguments, deadline=seconds, env=env, launcher_env=False)
        elif MISSING:
            return Outcome(SKIPPED, MISSING)
        else:
            with MpiJob(file.size) as job:
                kinds = job.run(functools.partial(_run_on_mpi, arguments), file.size, deadline=seconds)
    except RanksFailed as failure:
        wrong = [report for report in failure.reports if report.failed]
        has_hung = bool(wrong) and all(report.status.startswith("still running") for report in wrong)
        reasons = [*failure.leftovers, *(f"rank {report.rank}: {report.status}" for report in wrong)]
        return Outcome(HUNG if has_hung else FAILED, "; ".join(reasons), str(failure))
    return Outcome(SKIPPED if all(kind == SKIPPED for kind in kinds) else PASSED)


def _run_on_mpi(arguments: tuple[str, Path], rank: int, _: object, communicator: Any) -> str:
    return _run_one(rank, communicator.size, *arguments)


def _run_one(rank: int, size: int, name: str, checkout: Path) -> str:
    """Run one test as one rank. Returns PASSED or SKIPPED; raises AssertionError if the test has failed."""
    if size > 1 and "OMPI_COMM_WORLD_RANK" not in os.environ:
        environ = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size, "CROSS_RANK": 0, "CROSS_SIZE": 1}
        os.environ |= {f"HOROVOD_{key}": str(value) for key, value in environ.items()}
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # the checkout stays as it is
    sys.dont_write_bytecode = True
    os.environ["PYTHONPATH"] = os.pathsep.join([str(checkout), str(ROOT)])
    os.environ.update(with_aliases(os.environ))
    sys.path.insert(0, str(checkout))
    torchring.horovod.aliases.install()
    # What the tests take from Horovod's launchers
    importlib.import_module("horovod.runner").__path__ = [str(checkout / "horovod" / "runner")]
    util: Any = torchring.horovod.builds
    util._cache, util.extension_available = functools.cache, lambda name, verbose=False: name == "torch"
    util.env = lambda **variables: unittest.mock.patch.dict(os.environ, variables)
    if importlib.util.find_spec("mock") is None:  # Horovod's tests import the package of that name
        sys.modules["mock"] = unittest.mock
    if hasattr(torch.optim, "Muon"):
        torch.optim.Muon.__module__ = "hidden"

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
    if watch.kind not in (PASSED, SKIPPED):
        raise AssertionError(watch.reason or f"pytest ended with exit code {code}")
    return watch.kind
