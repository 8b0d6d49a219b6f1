"""`horovod.common.util`, under which scripts and Horovod's launchers ask which parts of the library there are."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from torchring.horovod import context

_T = TypeVar("_T")
_cache = functools.cache  # Horovod's launcher imports it from here


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """True for "torch", the framework that torchring supports."""
    return ext_base_name == "torch"


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """True if the framework is "torch" and PyTorch sees a GPU."""
    return ext_base_name == "torch" and torch.cuda.is_available()


def _as_of_context(function: Callable[[], _T]) -> Callable[..., _T]:
    @functools.wraps(function)
    def ask(verbose: bool = False) -> _T:
        return function()

    return ask


mpi_built = _as_of_context(context.mpi_built)
gloo_built = _as_of_context(context.gloo_built)
nccl_built = _as_of_context(context.nccl_built)
ddl_built = _as_of_context(context.ddl_built)
ccl_built = _as_of_context(context.ccl_built)


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ImportError for a framework that is not supported."""
    if ext_name.rpartition(".")[2] != "torch":
        raise ImportError(f"torchring has no {ext_name}: it is for PyTorch only")


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables inside the `with` block. None leaves a variable as it is."""
    changes = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def split_list(l: Sequence[_T], n: int) -> list[Sequence[_T]]:  # noqa: E741 - Horovod's name
    """Cut a list into `n` parts whose lengths differ by one at most, the longer ones first."""
    short, num_longer = divmod(len(l), n)
    ends = [short * (part + 1) + min(part + 1, num_longer) for part in range(n)]
    return [l[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def num_rank_is_power_2(num_rank: int) -> bool:
    """True for a power of two: Adasum takes no other number of ranks."""
    return num_rank.bit_count() == 1


def is_iterable(x: object) -> bool:
    """True if `iter(x)` works."""
    try:
        iter(x)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True
