"""Every microbenchmark runs on one thread, as a rank does, and may add remarks to the summary."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

Remark = Callable[[str, object], None]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def remark(benchmark: BenchmarkFixture, record_property: Remark) -> Remark:
    """remark(name, value) adds a value to the JSON file (as `extra_info`) and to the end of the output."""

    def remark(name: str, value: object) -> None:
        benchmark.extra_info[name] = value
        record_property(name, value)

    return remark


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    remarked = [report for report in terminalreporter.getreports("passed") if report.user_properties]
    if remarked:
        terminalreporter.section("remarks")
    for report in remarked:
        remarks = ", ".join(f"{name} {value}" for name, value in report.user_properties)
        terminalreporter.line(f"{report.nodeid.rpartition('::')[2]}: {remarks}")
