"""Real jobs into which a known fault is put: what the report says of each, beside what the ranks have measured.

    python qa/report_faults_job.py [FAULT ...]     all faults, each on two ranks: 10 minutes
    python qa/report_faults_job.py --list

No part of `make test`: durations are those of this machine, at this moment. Compare the two texts. Of other programs on
the same cores, the report should say that they take time, and accuse no rank.

Each rank measures its phases itself, and prints medians, the mean step and its speed: the truth.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import torchring

_WIDTH: Final = 256
_BATCH: Final = 32
_JOB: Final = "--job"  # this process is a rank


@dataclass(frozen=True)
class Fault:
    """A rank sleeps in one place.

    Attributes:
        place: "load", "input", "forward", "backward", "between", "step", "after step", "raise" or "kill".
        ms: for how long. More than half a second are pauses.
        rank: which one; None means all.
        every: in each n-th step only.
        first: from this step on.
        num_steps: of the job.
        has_model: whether `wrap` is given the model.
        has_loader: whether data come from a DataLoader.
        scale: of the batch.
        wanted: words of the sentence.
    """

    place: str
    ms: float
    wanted: str
    rank: int | None = 1
    every: int = 1
    first: int = 0
    num_steps: int = 120
    has_model: bool = True
    has_loader: bool = True
    scale: int = 1

    def strikes(self, place: str, step: int) -> bool:
        """Whether this rank has the fault in this step."""
        is_mine = self.rank in (None, torchring.rank())
        return place == self.place and is_mine and step >= self.first and step % self.every == self.every - 1


_FAULTS: Final = {
    "nothing": Fault("", 0, "no rank, no data"),
    "loader": Fault("load", 30, "waits for data on rank 1 ("),
    "loaders": Fault("load", 30, "waits for data on all ranks (", None),
    "loader, no model": Fault("load", 30, "waits for data on rank 1 (", has_model=False),
    "unknown loader": Fault("input", 30, "rank 1, or for other code", has_loader=False),
    "unknown loader, no model": Fault(
        "input", 30, "rank 1, which takes longer ... for forward, or waits", has_model=False, has_loader=False
    ),
    "other code": Fault("input", 30, "code between step() and forward on all ranks", None),
    "forward": Fault("forward", 30, "waits for rank 1, which computes more slowly"),
    "frozen backbone, no model": Fault("forward", 30, "forward, or code around it", None, has_model=False),
    "backward": Fault("backward", 30, "waits for rank 1, which computes more slowly"),
    "between": Fault("between", 30, "rank 1, which does more between backward and step()"),
    "step": Fault("step", 30, "rank 1, whose optimizer's step() takes longer"),
    "batches": Fault("", 0, "rank 1, whose batches have 3 times as many", scale=3),
    "pauses before forward": Fault("input", 800, "3 pauses of rank 1 from step() to forward", every=40),
    "pauses in forward": Fault("forward", 1500, "pauses of each rank in forward", None, every=50, num_steps=160),
    "pauses in step()": Fault("step", 1500, "pauses of rank 1 in step()", every=50, num_steps=160),
    "pauses before step()": Fault("between", 1500, "pauses between backward and step()", every=50, num_steps=160),
    "pauses after step()": Fault("after step", 800, "pauses of rank 1 from step() to forward", every=40),
    "one pause": Fault("input", 3000, "one pause, in step 99", None, every=100),
    "often late": Fault("between", 300, "of the time waits for rank 0", 0, every=10),
    "crash": Fault("raise", 0, "Rank 1 ended with an error", every=20, first=10, num_steps=40),
    "kill": Fault("kill", 0, "Rank 1 was killed", every=30, first=20, num_steps=60),
    "few steps": Fault("", 0, "start-up; no advice", num_steps=3),
}  # fmt: skip


class _Data(Dataset[Any]):
    def __init__(self, sleep_s: float) -> None:
        self.sleep_s = sleep_s

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.sleep_s:
            time.sleep(self.sleep_s)
        return torch.randn(_WIDTH)


class _Sleep(torch.autograd.Function):
    """Does nothing forward, and sleeps backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradient, None


class _Net(nn.Module):
    """Sleeps as a device that computes would: this needs no core. `ahead` and `back` are seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(4)))
        self.ahead = self.back = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.ahead)
        x = self.layers[0](x)  # the gradient of what the network is given is not computed
        return self.layers[1:](_Sleep.apply(x, self.back))  # type: ignore[no-untyped-call, no-any-return]


class _SGD(torch.optim.SGD):
    sleep_s = 0.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        time.sleep(self.sleep_s)
        super().step(closure)


def _train(fault: Fault) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torchring.init()
    net = _Net()
    inner = _SGD(net.parameters(), lr=1e-4)
    optimizer = torchring.wrap(inner, *([net] if fault.has_model else []))
    sleep_s = fault.ms / 1e3
    batch = _BATCH * (fault.scale if fault.rank == torchring.rank() else 1)
    loader = iter(DataLoader(_Data(sleep_s / batch if fault.strikes("load", 0) else 0.0), batch_size=batch))
    times: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        times.setdefault(name, []).append((time.perf_counter() - began) * 1e3)
        return result

    def load(step: int) -> torch.Tensor:
        if fault.strikes("raise", step):
            raise RuntimeError("injected")
        if fault.strikes("kill", step):
            time.sleep(3)  # the last steps are written every other second
            os.kill(os.getpid(), 9)
        time.sleep(sleep_s * (fault.strikes("input", step) or fault.strikes("after step", step - 1)))
        return next(loader) if fault.has_loader else torch.randn(batch, _WIDTH)

    began = time.perf_counter()
    for step in range(fault.num_steps):
        net.ahead = 0.01 * batch / _BATCH + sleep_s * fault.strikes("forward", step)
        net.back = 0.01 * batch / _BATCH + sleep_s * fault.strikes("backward", step)
        inner.sleep_s = sleep_s * fault.strikes("step", step)
        x = timed("input", lambda step=step: load(step))  # type: ignore[misc]
        optimizer.zero_grad()
        y = timed("forward", lambda x=x: net(x))  # type: ignore[misc]
        timed("backward", y.square().mean().backward)
        timed("between", lambda step=step: time.sleep(sleep_s * fault.strikes("between", step)))  # type: ignore[misc]
        timed("step()", optimizer.step)
    seconds = time.perf_counter() - began
    medians = ", ".join(f"{name} {statistics.median(each):.1f}" for name, each in times.items())
    mean_ms = seconds / fault.num_steps * 1e3
    print(f"TRUTH rank {torchring.rank()}: medians {medians}; mean step {mean_ms:.1f} ms, {1e3 / mean_ms:.2f} steps/s")


def _show(name: str) -> None:
    print(f"\n=== {name}: {_FAULTS[name].wanted}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-m", "torchring", "run", "-np", "2", "--trace", folder, __file__, _JOB, name]
        done = subprocess.run(run, capture_output=True, text=True, check=False)
        print("\n".join(line[line.index("TRUTH") :] for line in done.stdout.splitlines() if "TRUTH" in line))
        report = [sys.executable, "-m", "torchring", "report", folder, "--no-html"]
        shown = subprocess.run(report, capture_output=True, text=True, check=False)
        print(shown.stdout.partition("\nMilliseconds")[0].strip() or shown.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description="Put known faults into real jobs, and print what the report says.")
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="all by default")
    parser.add_argument("--list", action="store_true", help="print the names of all faults")
    parser.add_argument(_JOB, choices=_FAULTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        _train(_FAULTS[options.job])
    elif options.list:
        print("\n".join(_FAULTS))
    else:
        for name in options.faults or _FAULTS:
            _show(name)


if __name__ == "__main__":
    main()
