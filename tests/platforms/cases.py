"""The tests of a file that share one job of two ranks, because importing a framework takes each rank seconds.

    case = Cases(__name__, deadline=240)

    @case
    def test_something(rank: int) -> None: ...

Bodies run on both ranks one after the other, in a folder of the job's. Behind one that fails, none is run.
"""

from __future__ import annotations

import functools
import importlib
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torchring
from tests.support.harness import run_ranks

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
    """What each body has failed with, or ""."""
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
