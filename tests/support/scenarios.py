"""Tests on ranks with the fake device: they run one after the other in the same few processes.

    scenario = Scenarios(__name__)

    @scenario(["fp16", "bf16"])
    def test_narrow_wires(compression: str, rank: int) -> str: ...

Each scenario starts a world of its own, in 0.1 s, where an interpreter that has read TRITON_INTERPRET=1 takes 4.
"""

from __future__ import annotations

import functools
import importlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import torchring
from tests.support.fake_device import FakeAccelerator
from tests.support.harness import run_ranks
from torchring.memory import host as host_module

INTERPRETED = {"TRITON_INTERPRET": "1"}
Body = Callable[..., Any]


@contextmanager
def device(mode: str = "late", **options: Any) -> Iterator[FakeAccelerator]:
    """The fake device; what happened on it was in order."""
    with FakeAccelerator(mode, **options).installed() as accelerator:
        yield accelerator
    assert accelerator.races == []


def same_on_all_ranks(results: list[Any], case: Any) -> None:
    assert results == results[:1] * len(results)


class Scenarios:
    """Those of a module, in which this object is `scenario`.

    smoke: names of scenarios that `make test` runs, in processes of their own; a name is that of the test and its case.
    """

    def __init__(self, module: str, smoke: Iterable[str] = ()) -> None:
        self._module = module
        self._smoke = frozenset(smoke)
        self.bodies: dict[str, Body] = {}
        self._sizes: dict[str, int] = {}
        self._results_of = functools.cache(self._run)

    def __call__(
        self,
        cases: Iterable[Any] | None = None,
        size: int = 2,
        check: Callable[[list[Any], Any], None] = same_on_all_ranks,
    ) -> Callable[[Body], Callable[..., None]]:
        """body(case, rank), or body(rank) without cases, runs on `size` ranks; `check` gets what it returns there."""

        def decorate(body: Body) -> Callable[..., None]:
            def register(case: Any, own: Body) -> list[pytest.MarkDecorator]:
                name = self._name(body, case)
                self.bodies[name], self._sizes[name] = own, size
                return [pytest.mark.smoke] if name in self._smoke else []

            def test_case(case: Any) -> None:
                check(self._results(self._name(body, case)), case)

            def test() -> None:
                test_case("")

            test.__doc__ = test_case.__doc__ = body.__doc__
            if cases is None:
                for mark in register("", body):
                    mark(test)
                return test
            marked = [
                pytest.param(case, id=str(case), marks=register(case, functools.partial(body, case))) for case in cases
            ]
            return pytest.mark.parametrize("case", marked)(test_case)  # type: ignore[no-any-return]

        return decorate

    def _name(self, body: Body, case: Any) -> str:
        return f"{body.__name__} {case}".strip()

    def _results(self, name: str) -> list[Any]:
        results = [of_rank[name] for of_rank in self._results_of(self._sizes[name], name in self._smoke)]
        failures = [f"rank {rank}:\n{each.text}" for rank, each in enumerate(results) if isinstance(each, Failure)]
        assert not failures, "\n".join(failures)
        return results

    def _run(self, size: int, is_smoke: bool) -> list[dict[str, Any]]:
        names = [name for name in self.bodies if self._sizes[name] == size and (name in self._smoke) == is_smoke]
        return run_ranks(_attempts, size, self._module, names, env=INTERPRETED, deadline=150)


class Failure:
    """A scenario that raised on a rank."""

    def __init__(self, text: str) -> None:
        self.text = text


def _attempts(rank: int, size: int, module: str, names: Sequence[str]) -> dict[str, Any]:
    """What each scenario gives on this rank."""
    results: dict[str, Any] = {}
    bodies, identity = importlib.import_module(module).scenario.bodies, host_module._host_identity
    for name in names:
        torch.manual_seed(rank)
        try:
            results[name] = bodies[name](rank=rank)
        except Exception:
            results[name] = Failure(traceback.format_exc())
        torchring.shutdown()
        host_module._host_identity = identity
    return results
