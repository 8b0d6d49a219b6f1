"""Tests on ranks with the fake device: they run one after the other in the same few processes.

    scenario = Scenarios(__name__)

    @scenario(["fp16", "bf16"])
    def test_narrow_wires(compression: str, rank: int) -> str: ...

Each scenario starts a world of its own, in 0.1 s, where an interpreter that has read TRITON_INTERPRET=1 takes 4.
"""

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
    """Those of a module, in which this object is `scenario`."""

    def __init__(self, module: str) -> None:
        self._module = module
        self.bodies: dict[str, Body] = {}
        self._runs: dict[str, tuple[int, bool]] = {}  # how many ranks, and whether `make test` has it
        self._results_of = functools.cache(self._run)

    def __call__(
        self,
        cases: Iterable[Any] | None = None,
        size: int | Callable[[Any], int] = 2,
        check: Callable[[list[Any], Any], None] = same_on_all_ranks,
        smoke: Sequence[Any] = (),
    ) -> Callable[[Body], Callable[..., None]]:
        """body(case, rank), or body(rank) without cases, runs on `size` ranks; `check` gets what it returns there.

        `make test` runs the cases in `smoke`, in processes of their own.
        """

        def decorate(body: Body) -> Callable[..., None]:
            def register(case: Any, own: Body) -> list[pytest.MarkDecorator]:
                name = self._name(body, case)
                num_ranks = size if isinstance(size, int) else size(case)
                self.bodies[name], self._runs[name] = own, (num_ranks, case in smoke)
                return [pytest.mark.smoke] if case in smoke else []

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
                pytest.param(case, id=_words(case), marks=register(case, functools.partial(body, case)))
                for case in cases
            ]
            return pytest.mark.parametrize("case", marked)(test_case)  # type: ignore[no-any-return]

        return decorate

    def _name(self, body: Body, case: Any) -> str:
        return f"{body.__name__} {_words(case)}".strip()

    def _results(self, name: str) -> list[Any]:
        results = [of_rank[name] for of_rank in self._results_of(*self._runs[name])]
        failures = [f"rank {rank}:\n{each.text}" for rank, each in enumerate(results) if isinstance(each, Failure)]
        assert not failures, "\n".join(failures)
        return results

    def _run(self, size: int, is_smoke: bool) -> list[dict[str, Any]]:
        names = [name for name, run in self._runs.items() if run == (size, is_smoke)]
        return run_ranks(_attempts, size, self._module, names, env=INTERPRETED, deadline=150)


def _words(case: Any) -> str:
    """Of a NamedTuple: the values that are no defaults."""
    if not hasattr(case, "_field_defaults"):
        return str(case)
    usual = case._field_defaults
    said = {name: value for name, value in case._asdict().items() if name not in usual or value != usual[name]}
    return ", ".join(f"{name}={value}" if name in usual else str(value) for name, value in said.items())


class Failure:
    def __init__(self, text: str) -> None:
        self.text = text


def _attempts(rank: int, size: int, module: str, names: Sequence[str]) -> dict[str, Any]:
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
