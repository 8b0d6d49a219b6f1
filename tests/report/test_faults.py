"""Faults that are put into real jobs: the first sentence of the report finds each of them."""

import dataclasses
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

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
from torchring.report.verdict.findings import Verdict

_STEPS = 30


def _compute_for(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class _Pause(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return samples


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


def _train(rank: int, size: int, fault: str, num_steps: int = _STEPS) -> RankTrace:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    if fault in ("none", "input"):  # a computation that takes equally long on all ranks, whatever else their cores do
        model.insert(0, _Pause(0.05))
    recorder_of(torchring.init())
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=1e-3), model)
    samples = torch.ones(512 if fault == "straggler" else 16, 256)
    if fault == "straggler":
        with _busy_neighbours() if rank == 1 else nullcontext():
            return _steps(model, optimizer, samples, num_steps, 0.0)
    trace = _steps(model, optimizer, samples, num_steps, 0.05 if fault == "input" and rank == 1 else 0.0)
    # What else keeps this machine busy is no part of the fault.
    unknown = (dataclasses.replace(step, queued_ns=-1, exposed_queued_ns=-1) for step in trace.steps)
    return dataclasses.replace(trace, steps=tuple(unknown))


def _steps(model: nn.Module, optimizer: Any, samples: torch.Tensor, num_steps: int, loading_s: float) -> RankTrace:
    for _ in range(num_steps):
        time.sleep(loading_s)
        optimizer.zero_grad()
        model(samples).square().mean().backward()
        optimizer.step()
    return decoded(*recorder_of(world_module.default_world()).trace())


def _find(fault: str, *expected: tuple[str, int | None], run: Callable[..., list[RankTrace]] = run_pooled) -> Verdict:
    """The verdict on such a job. Where another program keeps a core busy meanwhile, the job runs again."""
    verdicts = []
    for _ in range(3):
        verdicts.append(analyse(merge(run(_train, 2, fault))).verdict)
        if (verdicts[-1].kind, verdicts[-1].rank) in expected:
            return verdicts[-1]
    raise AssertionError(verdicts)


def test_a_slow_loader_on_one_rank() -> None:
    verdict = _find("input", ("input", 1))
    assert "waits for data on rank 1" in verdict.sentence
    (cost_ms,) = re.findall(r"\(([\d.]+) ms of", verdict.sentence)
    assert 30 < float(cost_ms) < 300


def test_a_rank_with_busy_neighbours() -> None:
    _find("straggler", ("cores", 1), ("straggler", 1), run=run_ranks)  # some kernels do not tell that it has no core


@needs_hosts
def test_a_slow_link() -> None:
    with Network(2, rate="100mbit") as network:
        traces = run_on_hosts(network, (1, 1), _train, "link", 15)
    verdict = analyse(merge(traces)).verdict
    assert verdict.kind == "communication", verdict
    assert "GB/s" in verdict.sentence
    (clock, *_) = traces[1].clock
    assert clock.error_ns < 50e6
    assert abs(clock.offset_ns) <= clock.error_ns, "both namespaces have the clock of one kernel"


def test_an_even_job_accuses_no_rank() -> None:
    """On a busy machine, both ranks stand still in communication, and take turns at being late."""
    _find("none", *((kind, None) for kind in ("compute", "communication", "cores", "straggler")))
