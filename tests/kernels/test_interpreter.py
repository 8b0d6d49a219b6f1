"""Runs the Triton kernels without a GPU: the tests of all of them once more, under TRITON_INTERPRET=1.

Triton reads that variable when a kernel is decorated, and a process cannot take it back. So the tests named here are
written for any device; as they are, they run where CUDA is, and the child process started here sends the very same
tests through the interpreted kernels.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.harness import patient
from torchring.kernels import lazy

KERNELS = ("pack", "quantize", "reducing", "ptx")
# One of each kernel, in one process.
SMOKE = "(pack or quantize) and worked_example or prepared_once or spoils_nothing or an_abort_is_found or what_it_does"


@pytest.mark.sim
@pytest.mark.skipif(lazy.INTERPRETED, reason="this is the child process")
@pytest.mark.parametrize(
    ("names", "at_least"), [("", 62), pytest.param(SMOKE, 9, marks=pytest.mark.smoke)], ids=["all", "smoke"]
)
def test_triton_kernels_under_the_interpreter(names: str, at_least: int, pytestconfig: pytest.Config) -> None:
    here = Path(__file__).parent
    marked = "not gpu and not grid" if "not grid" in pytestconfig.getoption("markexpr") else "not gpu"
    command = [sys.executable, "-m", "pytest", "-q", "-m", marked, "-k", names, "-p", "no:cacheprovider"]
    # Where CI is set, pytest explains each failed assertion in full: for the mutants, that takes a minute.
    environ = {name: value for name, value in os.environ.items() if name not in ("CI", "BUILD_NUMBER")}
    child = subprocess.run(
        [*command, *(str(here / f"test_{name}.py") for name in KERNELS)],
        env={**environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=here.parents[1],
        capture_output=True,
        text=True,
        timeout=patient(150),
    )
    report = child.stdout[-6000:] + child.stderr[-2000:]
    assert child.returncode == 0, report
    passed = re.search(r"(\d+) passed", child.stdout)
    assert passed is not None, report
    assert int(passed[1]) >= at_least, report  # a child that collected almost nothing would pass too
    assert "skipped" not in child.stdout, report
