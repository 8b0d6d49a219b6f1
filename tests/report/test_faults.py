"""Faults that are put into real jobs: the first sentence of the report finds each of them."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import nn

import torchring
from tests.support.harness import run_pooled, run_ranks
from tests.support.netns import needs_hosts, run_on_hosts
from tests.support.traces import decoded
from torchring import default_world as world_module
from torchring.bench.netns import Network
from torchring.observe.recorder.records import RankTrace
from torchring.observe.recorder.writer import recorder_of
from torchring.report.model.merge import merge
from torchring.report.verdict.analysis import analyse
from torchring.report.verdict.findings import Analysis
from torchring.transport.c10d import C10dTransport

_STEPS = 30


class _SlowSGD(torch.optim.SGD):
    """An optimizer whose step takes 30 ms."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        _compute_for(0.03)
        super().step()


def _compute_for(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@contextmanager
def _busy_neighbours() -> Iterator[None]:
    """This rank shares a core with three processes that compute: more than what else may keep the machine busy."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    neighbours = []
    for _ in range(3):
        neighbours.append(os.fork())
        if not neighbours[-1]:
            _compute_for(30)
            os._exit(0)
    try:
        yield
    finally:
        for neighbour in neighbours:
            os.kill(neighbour, signal.SIGKILL)
            os.waitpid(neighbour, 0)
        os.sched_setaffinity(0, cores)


@contextmanager
def _slow_link(bytes_per_s: float) -> Iterator[None]:
    """Reductions sleep for as long as a link of this rate would take: no core is needed for it."""
    start, is_free_at = C10dTransport.start_all_reduce, 0.0

    def slowly(self: C10dTransport, tensor: torch.Tensor) -> Any:
        nonlocal is_free_at
        is_free_at = arrives_at = max(is_free_at, time.monotonic()) + tensor.nbytes / bytes_per_s
        transfer = start(self, tensor)

        def wait() -> None:
            time.sleep(max(0.0, arrives_at - time.monotonic()))
            transfer.wait()

        return mock.Mock(wait=wait)

    with mock.patch.object(C10dTransport, "start_all_reduce", slowly):
        yield


def _train(rank: int, size: int, fault: str, num_steps: int, options: dict[str, Any]) -> RankTrace:
    torch.manual_seed(0)
    widths = [256] * 5
    if fault == "late parameter":
        widths[0] = 20_000
    if fault == "small buckets":
        widths = [16] * 50
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))
    recorder_of(torchring.init())
    kind = _SlowSGD if fault == "optimizer" else torch.optim.SGD
    optimizer = torchring.wrap(kind(model.parameters(), lr=1e-3), model, **options)
    samples = torch.ones(512 if fault in ("", "straggler", "input") else 16, widths[0])
    if fault == "straggler" and rank == 1:
        with _busy_neighbours():
            return _steps(model, optimizer, samples, num_steps, 0.0)
    with _slow_link(0.1e9) if fault == "late parameter" else nullcontext():
        trace = _steps(model, optimizer, samples, num_steps, 0.02 if fault == "input" and rank == 1 else 0.0)
    if fault == "straggler":
        return trace
    # What else keeps this machine busy is no part of the fault.
    unknown = (dataclasses.replace(step, queued_ns=-1, exposed_queued_ns=-1) for step in trace.steps)
    return dataclasses.replace(trace, steps=tuple(unknown))


def _steps(model: nn.Module, optimizer: Any, samples: torch.Tensor, num_steps: int, loading_s: float) -> RankTrace:
    for _ in range(num_steps):
        time.sleep(loading_s)
        optimizer.zero_grad()
        model(samples).square().mean().backward()
        optimizer.step()
    trace = decoded(*recorder_of(world_module.default_world()).trace())
    # The process has run other tests before: it says nothing about how long a start takes.
    return dataclasses.replace(trace, run_info=dataclasses.replace(trace.run_info, process_began=0))


def _analysis(fault: str, num_steps: int = _STEPS, **options: Any) -> Analysis:
    return analyse(merge(run_pooled(_train, 2, fault, num_steps, options)))


def test_a_slow_loader_on_one_rank() -> None:
    verdict = _analysis("input").verdict
    assert (verdict.kind, verdict.rank) == ("input", 1), verdict
    assert "waits for data on rank 1" in verdict.sentence
    assert 15 < verdict.cost.mean < 60


def test_a_rank_with_busy_neighbours() -> None:
    verdicts = []
    for _ in range(3):  # another program may keep the core of rank 0 busy for as long
        verdicts.append(analyse(merge(run_ranks(_train, 2, "straggler", _STEPS, {}))).verdict)
        # Some kernels do not tell that rank 1 has no core.
        if (verdicts[-1].kind, verdicts[-1].rank) in (("cores", 1), ("straggler", 1)):
            return
    raise AssertionError(verdicts)


def test_an_optimizer_that_dominates() -> None:
    verdict = _analysis("optimizer").verdict
    assert verdict.kind == "optimizer", verdict
    assert verdict.cost.mean > 29


def test_too_small_buckets() -> None:
    analysis = _analysis("small buckets", 12, algorithm="ring", overlap="thread", bucket_mb=0.0)
    assert (analysis.verdict.kind, analysis.verdict.detail) == ("communication", "small buckets"), analysis.verdict
    assert "bucket" in analysis.advice[0].what.lower(), analysis.advice


def test_one_huge_late_parameter() -> None:
    analysis = _analysis("late parameter", 15, algorithm="ring", overlap="thread", bucket_mb=1.0)
    assert (analysis.verdict.kind, analysis.verdict.detail) == ("communication", "late parameter"), analysis.verdict
    assert analysis.late_parameters[0].name == "0.weight"


@needs_hosts
def test_a_slow_link() -> None:
    with Network(2, rate="100mbit") as network:
        traces = run_on_hosts(network, (1, 1), _train, "link", 15, {})
    verdict = analyse(merge(traces)).verdict
    assert (verdict.kind, verdict.detail) == ("communication", "slow link"), verdict
    (clock, *_) = traces[1].clock
    assert clock.error_ns < 50e6
    assert abs(clock.offset_ns) <= clock.error_ns, "both namespaces have the clock of one kernel"


def test_an_even_job_computes() -> None:
    """Other programs may take the core of one rank for the whole of one job, and not of three jobs in a row."""
    verdict = next(verdict for i in range(3) if (verdict := _analysis("").verdict).rank is None or i == 2)
    assert verdict.rank is None, verdict
    assert verdict.kind == "compute" or verdict.share < 0.4, verdict  # on a busy machine, ranks do not run all the time
