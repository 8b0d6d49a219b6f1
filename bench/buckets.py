"""Settings that tune themselves: bucket_mb="auto", compression="auto", or both, against the default, in one run.

    torchring bench buckets                              all models; one host, and 2 hosts at 1 and 10 Gbit/s
    torchring bench buckets --rates none --overlap thread --models resnet small
    torchring bench buckets --tune compression           compression="auto" instead of bucket_mb="auto"

Two copies of a model train in the same processes and take turns, each from the same weights and on the same batches.
"default" has buckets of the default size, which nothing tunes. "auto" first trains until it has decided, without
earlier runs' buckets. "Exposed" is how long backward stood still for communication in a step, on the rank that waited
least: the others waited for that rank, too. Network namespaces stand in for hosts (`netns.py`). At the end both copies
must have the same weights: bit for bit with 2 ranks, whose sums of two do not depend on the buckets. Where gradients
may be rounded, each copy must be the same on all ranks.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch

import torchring
from torchring.bench import measure, step
from torchring.bench.measure import Spread
from torchring.bench.models import MODELS
from torchring.bench.netns import Network
from torchring.bench.step import Trainer
from torchring.default_world import default_world
from torchring.gradients.group import OptimizerGroup
from torchring.gradients.plan import default_bucket_mb
from torchring.launch.arguments import duration

_TUNED: Final[dict[str, dict[str, Any]]] = {
    "buckets": {"bucket_mb": "auto"},
    "compression": {"compression": "auto"},
    "both": {"bucket_mb": "auto", "compression": "auto"},
}
_NUM_WARMUPS: Final = {"default": 3, "auto": 46}  # steps: buckets in ready order; two trials
_STEPS_PER_TURN: Final = 4  # of which the first does not count: the other copy has filled the caches
_LARGEST_DISTANCE: Final = 1e-3  # between the weights, of the distance that training moved them


def main() -> int:
    parser = measure.parser("buckets", __doc__ or "")
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--rates", nargs="+", default=["none", "1gbit", "10gbit"], help='of links; "none": one host')
    parser.add_argument("--ranks", type=measure.several, default=2, help="each on a host of its own if there is a rate")
    parser.add_argument("--overlap", choices=["auto", "inline", "thread"], default="auto")
    parser.add_argument("--tune", choices=sorted(_TUNED), default="buckets", help='what "auto" may change')
    parser.add_argument("--seconds", type=duration, default=10.0, help="time for each model and rate")
    options = parser.parse_args()
    if options.worker is not None:
        return work(options)
    rows = []
    with measure.stopped_by_signals():  # so that the network is removed
        for rate in options.rates:
            rows += [compare(name, rate, options) for name in options.models]
    about = measure.provenance() | {"script": Path(__file__).name, "tune": options.tune}
    measure.write_rows(options.json, rows, about)
    report(rows, about)
    return 0


def compare(name: str, rate: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train one model with both settings. Returns the row that rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "row.json")
        arguments = ["--models", name, "--worker", str(file), "--seconds", str(options.seconds)]
        arguments += ["--overlap", options.overlap, "--tune", options.tune]
        cache = {"TORCHRING_CACHE": folder}
        if rate == "none":
            measure.run_here(__file__, options.ranks, arguments, environment=cache)
        else:
            with Network(options.ranks, rate=rate) as network:
                measure.run_on_hosts(network, 1, __file__, arguments, environment=cache)
        return {"rate": rate, **json.loads(file.read_text())}


def work(options: argparse.Namespace) -> int:
    """Run as one rank. Rank 0 writes the row."""
    torch.set_num_threads(1)
    torchring.init()
    name = options.models[0]
    torch.manual_seed(0)
    workload = MODELS[name]()
    batches = [workload.batch(seed=1000 * torchring.rank() + i) for i in range(8)]
    trainers: dict[str, Trainer] = {}
    world = default_world()
    size = {"bucket_mb": default_bucket_mb(world.size, world.num_nodes, "auto", on_device=False)}
    settings: dict[str, dict[str, Any]] = {"default": size, "auto": size | _TUNED[options.tune]}
    for rival, tuned in settings.items():
        model = copy.deepcopy(workload.model)
        optimizer = torchring.wrap(step.sgd(model), model, overlap=options.overlap, **tuned)
        trainers[rival] = Trainer(model, optimizer, [])
    # With several optimizers in a world, nothing is tuned. So only the optimizer whose turn it is stays in the group,
    # as if it were alone in its process.
    group = default_world().shared(OptimizerGroup)
    members = {rival: group.owners_of(t.model.parameters()) for rival, t in trainers.items()}

    def train(rival: str, steps: int) -> list[tuple[float, float]]:
        """Seconds of each step, and of it exposed."""
        for other in members["default"] + members["auto"]:
            group.members.remove(other)
        for member in members[rival]:
            group.members.add(member)
        times = []
        for _ in range(steps):
            torchring.barrier()
            began = time.perf_counter()
            trainers[rival].step(workload, batches)
            times.append((time.perf_counter() - began, trainers[rival].optimizer.stats().exposed_ms / 1e3))
        return times

    for rival, steps in _NUM_WARMUPS.items():
        train(rival, steps)
    rows: dict[str, list[tuple[float, float]]] = {rival: [] for rival in trainers}
    began = time.perf_counter()
    repetition = 0
    while torchring.broadcast_object(time.perf_counter() - began < options.seconds):
        for rival in measure.in_turn(list(trainers), repetition):
            rows[rival] += train(rival, _STEPS_PER_TURN)[1:]
        repetition += 1
    times = torch.tensor([rows[rival] for rival in trainers], dtype=torch.float64)  # [rival, step, 2]
    slowest, least = (
        torchring.all_reduce(times[..., 0].contiguous(), "max"),
        torchring.all_reduce(times[..., 1].contiguous(), "min"),
    )
    train("default", _NUM_WARMUPS["auto"] - _NUM_WARMUPS["default"])  # as many steps as the other copy
    check_weights(trainers, workload.model, may_round=options.tune != "buckets")
    stats = {rival: vars(trainer.optimizer.stats()) for rival, trainer in trainers.items()}
    if torchring.rank() == 0:
        row = {
            "model": name,
            "ms": {rival: vars(Spread.of(row)) for rival, row in zip(trainers, slowest.tolist(), strict=True)},
            "exposed_ms": {rival: vars(Spread.of(row)) for rival, row in zip(trainers, least.tolist(), strict=True)},
            "buckets_mib": {
                rival: [bucket.plan.num_bytes / 2**20 for bucket in members[rival][0].layout.buckets]
                for rival in trainers
            },
            "stats": stats,
        }
        Path(options.worker).write_text(json.dumps(row))
    torchring.barrier()
    torchring.shutdown()
    return 0


def check_weights(trainers: dict[str, Trainer], start: torch.nn.Module, *, may_round: bool) -> None:
    """Stop the run unless both copies have trained alike. They have made the same number of steps.

    Args:
        may_round: gradients may have been rounded. Then the copies drift apart, as rounding does in deep networks, but
            each copy has to be the same on all ranks.
    """
    default, auto = (step.flat_weights(trainers[rival].model) for rival in ("default", "auto"))
    if may_round:
        if not torch.equal(torchring.all_reduce(auto, "max"), torchring.all_reduce(auto, "min")):
            raise SystemExit("the weights differ between ranks")
        return
    if torchring.size() == 2 and not torch.equal(default, auto):
        raise SystemExit("the buckets have changed the result")
    moved = float((default - step.flat_weights(start)).norm())
    if float((default - auto).norm()) > _LARGEST_DISTANCE * moved:
        raise SystemExit("the copies of the model have trained differently")


def report(rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    columns = ["link", "model", "overlap", "buckets", "auto", "step ms", "auto", "exposed ms", "auto", "ratio"]
    table = []
    for row in rows:
        spreads = {name: Spread(**values) for name, values in row["ms"].items()}
        exposed = {name: Spread(**values) for name, values in row["exposed_ms"].items()}
        stats = row["stats"]
        cells = [row["rate"], row["model"], f"{stats['auto']['algorithm']}, {stats['auto']['overlap']}"]
        cells += [str(stats[rival]["num_buckets"]) for rival in ("default", "auto")]
        cells += [spreads[rival].text(1) for rival in ("default", "auto")]
        cells += [exposed[rival].text(1) for rival in ("default", "auto")]
        ratio = exposed["auto"].p50 / exposed["default"].p50 if exposed["default"].p50 else float("nan")
        table.append([*cells, f"{ratio:.2f}"])
    title = (
        f"Training steps with defaults and with {', '.join(f'{k}={v!r}' for k, v in _TUNED[about['tune']].items())}, "
        f"1 thread a rank on {about['cores']} cores"
    )
    measure.print_table(f"{title}, p50 (p20-p80) {measure.origin(about)}", columns, table)
    print()
    for row in rows:
        sizes = {rival: " ".join(f"{mib:.2g}" for mib in row["buckets_mib"][rival]) for rival in ("default", "auto")}
        print(f"- {row['rate']}, {row['model']}: {row['stats']['auto']['reason']}")
        print(f"  MiB: {sizes['default']} | {sizes['auto']}")


if __name__ == "__main__":
    sys.exit(main())
