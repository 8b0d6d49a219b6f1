"""The oldest PyTorch that torchring works with, and what is said below it."""

import importlib.metadata
import importlib.util
import re
from pathlib import Path

import pytest
import torch

from torchring import world
from torchring.releases import LEAST_TORCH, check_torch, release_of
from torchring.requirements import check_release

ROOT = Path(__file__).resolve().parent.parent


def test_an_older_one_is_refused_before_anything_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the module that everything needs that speaks to other ranks; here it is imported once more."""
    monkeypatch.setattr(torch, "__version__", "2.10.0+cu128")
    spec = importlib.util.spec_from_file_location("another_world", world.__file__)
    assert spec.loader is not None
    with pytest.raises(ImportError, match=r"needs PyTorch 2\.11 or newer, and PyTorch 2\.10\.0\+cu128 is installed"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_releases_are_compared_as_numbers() -> None:
    assert release_of("2.10.1") > release_of("2.9.0+cu126") > (2, 8)
    for version in ("2.11.0", "2.12.1+cu128", "2.13.0+cpu", "2.14.0a0+git029e473", "3.0", torch.__version__):
        check_torch(version)


def test_what_pip_is_told_is_what_is_checked() -> None:
    floor = re.search(r'"torch>=(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert tuple(map(int, floor.groups())) == LEAST_TORCH


def test_frameworks_in_releases_that_were_not_tested_are_refused() -> None:
    version = importlib.metadata.version("torch")  # torch.__version__ may have "+cu130", too
    major, minor = release_of(version)
    check_release("torch", (major, minor), (major, minor + 1), "lightning")
    for package, least, said in [
        ("torch", (major, minor + 1), f"and torch {re.escape(version)} is installed"),
        ("torch-of-nobody", (1, 0), "and torch-of-nobody is not installed"),
    ]:
        with pytest.raises(ImportError, match=rf"{said}; run `pip install 'torchring\[lightning\]'`"):
            check_release(package, least, (major + 1, 0), "lightning")
    with pytest.raises(ImportError, match=f"torch {major}.0 and newer, up to but not including {major}.{minor}, and "):
        check_release("torch", (major, 0), (major, minor), "lightning")
