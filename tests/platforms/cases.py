"""The tests of a file that share one job of two ranks, because importing a framework takes each rank seconds.

    case = Cases(__name__, deadline=240)

    @case
    def test_something(rank: int) -> None: ...

Bodies run on both ranks one after the other, in a folder of the job's. Behind one that fails, none is run.
"""

import contextlib
import functools
import importlib
import io
import os
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchring
from tests.support.documents import blocks
from tests.support.harness import run_ranks
from tests.support.training import attempt

Body = Callable[[int], None]


class Cases:
    """Those of a module, in which this object is `case`. `how`: options of `run_ranks`."""

    def __init__(self, module: str, **how: Any) -> None:
        self.bodies: dict[str, Body] = {}
        self._found = functools.cache(lambda: _found(module, **how))

    def __call__(self, body: Body) -> Callable[[], None]:
        name = body.__name__
        self.bodies[name] = body

        def test() -> None:
            failed = [f"rank {rank}:\n{said[name]}" for rank, said in enumerate(self._found()) if said[name]]
            assert not failed, "\n".join(failed)

        test.__doc__ = body.__doc__
        return test


def _found(module: str, **how: Any) -> list[dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(_run, 2, module, folder, **how)


def _run(rank: int, size: int, module: str, folder: str) -> dict[str, str]:
    os.chdir(folder)
    bodies: dict[str, Body] = importlib.import_module(module).case.bodies
    found = dict.fromkeys(bodies, "not run, because an earlier one has failed")
    for name, body in bodies.items():
        try:
            body(rank)
        except Exception as error:
            text = traceback.TracebackException.from_exception(error, capture_locals=isinstance(error, AssertionError))
            return {**found, name: "".join(text.format())}
        found[name] = ""
    return found


def same(value: Any) -> Any:
    """All ranks have this value. All ranks call it."""
    every = torchring.all_gather_object(value)
    assert every == every[:1] * len(every)
    return value


def flat(tensors: Iterable[torch.Tensor]) -> list[float]:
    values: list[float] = torch.cat([tensor.detach().double().flatten() for tensor in tensors]).tolist()
    return values


def close(value: Any, rel: float = 1e-5, abs: float = 1e-6) -> Any:
    return pytest.approx(value, rel=rel, abs=abs)


def too_large_scale() -> torch.amp.GradScaler:
    """As fp16 has on GPUs. The first steps are left out."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-60)


@contextlib.contextmanager
def without_torchrun() -> Iterator[None]:
    """As under srun, or as the only process: without the variables that frameworks read."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            patch.delenv(name, raising=False)
        yield


def run_page(page: Path, line: str, plain: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The names of the page's script as pasted, and with the framework's own `plain` in place of torchring's `line`."""
    block = blocks(page, "python")[0]
    found: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    assert line in block.code
    for names, code in zip(found, (block.code, block.code.replace(line, plain)), strict=True):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(code, block.place, "exec"), names)
    return found


def assert_refused(*rows: tuple[Any, ...]) -> None:
    """Each row: what raises an error, and parts of its text."""
    for act, *texts in rows:
        said = attempt(act)
        assert all(text in said for text in texts), said
