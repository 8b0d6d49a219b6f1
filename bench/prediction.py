"""Are the report's predictions right? Steps of 1 and of 2 hosts predict those of more hosts, which are then measured.

    torchring bench prediction                          MLP; 1 Gbit/s; 1 and 2 hosts predict 3 and 4
    torchring bench prediction --model gpt --rate 10gbit --json results.jsonl

Network namespaces of this machine stand in for hosts (`netns.py`, which needs root and iproute2), with one rank of
one thread each. Each number of hosts trains for some steps and leaves a trace. `torchring report` makes its
prediction from the trace of 2 hosts alone, and from that of 1 host and the rate of the links, as with `--bandwidth`.
All hosts share the cores of this machine. So where there are more hosts than cores, a host computes for longer than a
machine of its own would, and the prediction cannot know that: choose a model and a rate with which the network takes
most of the time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import torchring
from torchring.bench import measure, netns, step
from torchring.bench.measure import Spread
from torchring.bench.models import MODELS
from torchring.observe import TRACE
from torchring.report.command import network_of
from torchring.report.model.merge import load
from torchring.report.verdict.analysis import analyse
from torchring.report.verdict.findings import Analysis

ORIGINS = (1, 2)


def main() -> int:
    parser = measure.parser("prediction", __doc__ or "")
    parser.add_argument("--model", choices=sorted(MODELS), default="mlp")
    parser.add_argument("--rate", type=netns.rate, default="1gbit", help="of the links, as tc writes it")
    parser.add_argument("--hosts", type=measure.several, nargs="+", default=[3, 4], help="numbers to predict")
    parser.add_argument(
        "--steps", type=measure.positive, default=15, help="of each number of hosts; the first 3 do not count"
    )
    options = parser.parse_args()
    if options.worker:
        train(options.model, options.steps)
        return 0
    if (reason := netns.why_unavailable()) is not None:
        print(f"torchring bench prediction needs network namespaces: {reason}", file=sys.stderr)
        return 2
    about = measure.provenance() | {"script": Path(__file__).name, "rate": options.rate, "model": options.model}
    with measure.stopped_by_signals():  # so that the network is removed
        analyses = {hosts: measured(hosts, options) for hosts in sorted({*ORIGINS, *options.hosts})}
    rows = [
        row_of(analyses[origin], analyses[hosts]) for origin in ORIGINS for hosts in options.hosts if hosts > origin
    ]
    report(rows, about)
    measure.write_rows(options.json, rows, about)
    return 0


def measured(hosts: int, options: argparse.Namespace) -> Analysis:
    """Train on so many hosts, and analyse the trace."""
    with tempfile.TemporaryDirectory() as folder, netns.Network(hosts, rate=options.rate) as network:
        arguments = ["--model", options.model, "--steps", str(options.steps), "--worker", "train"]
        measure.run_on_hosts(network, 1, __file__, arguments, environment={TRACE: folder})
        given = network_of(netns.bits_per_second(options.rate) / 1e9) if hosts == 1 else None
        return analyse(load(Path(folder)), given, sizes=options.hosts)


def train(model: str, steps: int) -> None:
    """As a rank."""
    workload = MODELS[model]()
    torch.set_num_threads(1)
    optimizer = torchring.wrap(step.sgd(workload.model), workload.model)
    batch = workload.batch(seed=torchring.rank())
    for _ in range(steps):
        optimizer.zero_grad()
        workload.loss(workload.model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def row_of(origin: Analysis, target: Analysis) -> dict[str, Any]:
    """What the trace `origin` predicts for the ranks of `target`, and what was measured."""
    predicted = next(each for each in origin.predictions if each.num_ranks == target.size)
    return {
        "from": origin.size,
        "ranks": target.size,
        "predicted_ms": predicted.step_ms,
        "measured_ms": vars(Spread(target.step.low, target.step.median, target.step.high, target.num_steps)),
        "error": predicted.step_ms / target.step.median - 1.0,
        "algorithm": target.run_info.algorithm,
        "network": {"from": vars(origin.network or {}), "to": vars(target.network or {})},
    }


def report(rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    cells = [
        [
            str(row["from"]),
            str(row["ranks"]),
            row["algorithm"],
            f"{row['predicted_ms']:.0f}",
            Spread(**row["measured_ms"]).text(0),
            f"{row['error']:+.1%}",
        ]
        for row in rows
    ]
    title = f"Steps of {about['model']} at {about['rate']}, predicted from fewer hosts {measure.origin(about)}"
    measure.print_table(title, ["from", "hosts", "algorithm", "predicted ms", "measured ms", "error"], cells)


if __name__ == "__main__":
    sys.exit(main())
