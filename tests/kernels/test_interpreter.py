"""Runs the Triton kernels without a GPU: the tests of all of them once more, under TRITON_INTERPRET=1.

Triton reads that variable when a kernel is decorated, and a process cannot take it back. So the tests of FILES are
written for any device; as they are, they go through the torch path (and CUDA where there is one), and the child process
started here sends the very same tests through the interpreted Triton kernels. What torch has no other way to do, as
signals between ranks, is skipped outside the child and on CUDA runs on streams.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.harness import patient
from torchring.kernels import lazy

FILES = [f"test_{name}.py" for name in ("pack", "unpack", "accumulate", "direct", "ring", "multicast")]
needs_interpreter = pytest.mark.skipif(not lazy.INTERPRETED, reason="runs in test_interpreter's child process")
_CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ["cpu", _CUDA]
TRITON_DEVICES = [pytest.param("cpu", marks=needs_interpreter), _CUDA]  # for what torch has no other way to do
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def truncate_to_bfloat16(values: torch.Tensor) -> torch.Tensor:
    """Drops the lower 16 bits of fp32, as the interpreter does where a GPU (and torch) round to nearest even."""
    return (values.to(torch.float32).view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)


def cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`values.to(dtype)` as whatever runs these tests rounds it."""
    if lazy.INTERPRETED and dtype == torch.bfloat16 and values.dtype != torch.bfloat16:
        return truncate_to_bfloat16(values)
    return values.to(dtype)


def test_truncating_is_not_rounding() -> None:
    values = torch.tensor(
        [1.0, 1.0 + 2**-8 + 2**-20, -1.0 - 2**-8 - 2**-20]
    )  # just above the middle of two bf16 values
    assert truncate_to_bfloat16(values).tolist() == [1.0, 1.0, -1.0]
    assert values.to(torch.bfloat16).tolist() == [1.0, 1.0 + 2**-7, -1.0 - 2**-7]


@pytest.mark.sim
@pytest.mark.skipif(lazy.INTERPRETED, reason="this is the child process")
def test_triton_kernels_under_the_interpreter(pytestconfig: pytest.Config) -> None:
    here = Path(__file__).parent
    marked = "not gpu and not grid" if "not grid" in pytestconfig.getoption("markexpr") else "not gpu"
    command = [sys.executable, "-m", "pytest", "-q", "-m", marked, "-p", "no:cacheprovider"]
    child = subprocess.run(
        [*command, *(str(here / name) for name in FILES)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=here.parents[1],
        capture_output=True,
        text=True,
        timeout=patient(150),
    )
    report = child.stdout[-6000:] + child.stderr[-2000:]
    assert child.returncode == 0, report
    passed = re.search(r"(\d+) passed", child.stdout)
    assert passed is not None, report
    assert int(passed[1]) >= 50, report  # a child that collected almost nothing would pass too
    assert "skipped" not in child.stdout, report
