"""Lost and new workers: torchring's elastic training against torchrun's restarts, in one run.

    torchring bench elastic                        30 kills of torchring's workers, 15 of torchrun's
    torchring bench elastic --quick                3 kills of each, in one turn
    torchring bench elastic --json results.jsonl

Rivals take turns. In a turn, a rival trains a GPT of 17 M parameters (AdamW) with three workers of one thread each. A
turn begins with undisturbed training. Then workers of all ranks get SIGKILL, and then SIGTERM, one at a time at random
moments of a step. Each lost worker is replaced at once, and the next signal follows when three workers train together
again.
Rivals, at their best settings:
    torchring  torchring.elastic.State with commit() in each step, under `torchring run --elastic -np 3 --min-np 2`
    torchrun   DistributedDataParallel over Gloo, `--max-restarts`, a checkpoint as often as 5 % of the time allow
Workers write the time of each finished step to files, and all times are from these files. Replicas must be equal after
each step, and after each change all of their parameters.

Last, torchring trains one copy of the model with State and commit(), and one without, in turns: the cost of both.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from torchring.bench import measure
from torchring.bench.elastic_job import SIZE, TORCHRUN, Fault, Job, StuckError, check, make_fault
from torchring.bench.elastic_worker import PAIRS_IN_BLOCK, work
from torchring.bench.measure import Spread
from torchring.bench.models import MODELS
from torchring.launch.arguments import duration

RIVALS: Final = ("torchring", "torchrun")
_START_SECONDS: Final = 120.0


def main() -> int:
    parser = measure.parser("elastic", __doc__ or "")
    parser.add_argument("--rivals", nargs="+", choices=RIVALS, default=RIVALS)
    parser.add_argument("--model", choices=sorted(MODELS), default="gpt")
    parser.add_argument("--kills", type=measure.positive, default=30, help="SIGKILLs of torchring's workers")
    parser.add_argument("--rivals-kills", type=measure.positive, default=15, help="SIGKILLs of each rival's workers")
    parser.add_argument("--polite", type=measure.positive, default=6, help="SIGTERMs of each rival's workers")
    parser.add_argument("--turns", type=measure.positive, default=3, help="turns of each rival")
    parser.add_argument("--seconds", type=duration, default=20.0, help="undisturbed training at the start of a turn")
    parser.add_argument("--cost-seconds", type=duration, default=120.0, help="steps with and without State in turns")
    parser.add_argument("--quick", action="store_true", help="3 kills, 1 SIGTERM, 1 turn, 10 s, and 30 s for the cost")
    parser.add_argument("--seed", type=int, default=0, help="of the moments at which signals are sent")
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.model)
        return 0
    if options.quick:
        options.kills = options.rivals_kills = 3
        options.polite = options.turns = 1
        options.seconds, options.cost_seconds = 10.0, 30.0
    about = measure.provenance() | {"script": Path(__file__).name, "seed": options.seed}
    about["settings"] = {"torchrun": TORCHRUN}
    with measure.stopped_by_signals():
        records = compare(options.rivals, options)
        cost = compare_cost(options.cost_seconds, options.model) if "torchring" in options.rivals else None
    rows = [row_of(record) | {"model": options.model} for record in records]
    report(rows, cost, about)
    measure.write_rows(options.json, rows + ([cost] if cost else []), about)
    return 0


@dataclass
class Record:
    """What was measured of one rival.

    Attributes:
        name: the rival.
        faults: what each signal cost.
        failures: why a job did not go on after a signal, and had to be started anew.
        steps: seconds of each undisturbed step.
        savings: for each checkpoint: seconds that it took.
        comparisons: number of digests that were compared with another worker's.
    """

    name: str
    faults: list[Fault] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    savings: list[float] = field(default_factory=list)
    comparisons: int = 0


def compare(rivals: Sequence[str], options: argparse.Namespace) -> list[Record]:
    """Let every rival have its turns."""
    records = {name: Record(name) for name in rivals}
    generators = {name: random.Random(options.seed) for name in rivals}  # the same moments for all
    for turn in range(options.turns):
        for name in measure.in_turn(rivals, turn):
            kills = options.kills if name == "torchring" else options.rivals_kills
            numbers = [
                *[signal.SIGKILL] * len(range(turn, kills, options.turns)),
                *[signal.SIGTERM] * len(range(turn, options.polite, options.turns)),
            ]
            take_turn(records[name], numbers, options, generators[name])
    return list(records.values())


def take_turn(
    record: Record, numbers: Sequence[signal.Signals], options: argparse.Namespace, rng: random.Random
) -> None:
    """Start a job, let it train, and send the signals. After a failure, start another job for the signals left."""
    pending = list(zip(numbers, _ranks(rng), strict=False))
    is_first = True
    while pending or is_first:
        with closing(Job(__file__, record.name, options.model)) as job:
            number = None
            try:
                job.wait(job.is_settled, _START_SECONDS, "the start")
                if is_first:
                    record.steps += undisturbed(job, options.seconds)
                is_first = False
                usual = statistics.median(record.steps)
                while pending:
                    number, rank = pending.pop(0)
                    record.faults.append(fault := make_fault(job, number, rank, usual, rng))
                    print(_told(record.name, fault), file=sys.stderr)
            except StuckError as error:
                if number is None:
                    raise SystemExit(f"{record.name}: {error}; it printed:\n{job.output()}") from error
                record.failures.append(str(error))
                print(f"{record.name}: {error}; it printed:\n{job.output()}", file=sys.stderr)
            lines = [line for each in job.workers.values() for line in each.lines]
            record.savings += [line.seconds for line in lines if line.event == "saved"]
            record.comparisons += check(job)


def undisturbed(job: Job, seconds: float) -> list[float]:
    """Seconds of the steps of one worker, during `seconds`."""
    begin = time.monotonic_ns()
    end = time.monotonic() + seconds
    job.wait(lambda: time.monotonic() > end, 2 * seconds, "training")
    times = [line.ns for line in job.by_rank(0).steps if line.ns > begin]
    return [(b - a) / 1e9 for a, b in itertools.pairwise(times)]


def _ranks(rng: random.Random) -> Iterator[int]:
    """All ranks, again and again, in random order."""
    while True:
        yield from rng.sample(range(SIZE), SIZE)


def compare_cost(seconds: float, model: str) -> dict[str, Any]:
    """The time of a step with State and commit() in relation to a step without, from blocks of some pairs of steps."""
    with closing(Job(__file__, f"cost:{seconds:g}", model)) as job:
        try:
            job.wait_for_end(seconds + 2 * _START_SECONDS)
        except StuckError as error:
            raise SystemExit(f"the cost of State: {error}; it printed:\n{job.output()}") from error
        ranks = [json.loads((job.folder / f"cost{rank}.json").read_text()) for rank in range(SIZE)]
    sums: dict[str, list[tuple[float, float]]] = {"seconds": [], "cpu": []}
    for start in range(0, len(ranks[0]) - PAIRS_IN_BLOCK + 1, PAIRS_IN_BLOCK):
        block = [pair for rows in ranks for pair in rows[start : start + PAIRS_IN_BLOCK]]
        for index, name in enumerate(sums):
            plain, elastic = (sum(pair[which][index] for pair in block) for which in ("plain", "elastic"))
            sums[name].append((plain, elastic))
    row: dict[str, Any] = {"rival": "State and commit()", "pairs": len(ranks[0])}
    for name, blocks in sums.items():
        row[f"{name}_ratio"] = sum(elastic for _, elastic in blocks) / sum(plain for plain, _ in blocks)
        row[f"{name}_ratios"] = vars(Spread.of([elastic / plain / 1e3 for plain, elastic in blocks]))
    row["steps_per_s"] = {
        name: len(ranks[0]) / sum(pair[name][0] for pair in ranks[0]) for name in ("plain", "elastic")
    }
    return row


def row_of(record: Record) -> dict[str, Any]:
    """All that was measured of a rival, as JSON can hold it."""
    return {
        "rival": record.name,
        "ranks": SIZE,
        "steps_per_s": _per_second(record.steps),
        "step_ms": vars(Spread.of(record.steps)),
        "saving_ms": vars(Spread.of(record.savings)) if record.savings else None,
        "faults": [asdict(fault) for fault in record.faults],
        "failures": record.failures,
        "comparisons": record.comparisons,
    }


def _per_second(steps: Sequence[float]) -> float:
    """Steps per second. All time counts, checkpoints included."""
    return len(steps) / sum(steps)


def report(rows: Sequence[dict[str, Any]], cost: dict[str, Any] | None, about: dict[str, Any]) -> None:
    """Print the tables."""
    tables: dict[str, tuple[list[str], dict[str, Callable[[dict[str, Any]], float]]]] = {
        f"A worker gets SIGKILL {measure.origin(about)}": (
            ["SIGKILL"],
            {
                "next step s": lambda fault: fault["pause_s"],
                "new step s": lambda fault: fault["new_s"],
                "lost steps": lambda fault: fault["lost_steps"],
            },
        ),
        "A worker gets SIGTERM": (
            ["SIGTERM"],
            {
                "without a step s": lambda fault: fault["gap_s"],
                "more than a step s": lambda fault: fault["gap_s"] - fault["usual_s"],
                "lost steps": lambda fault: fault["lost_steps"],
            },
        ),
        "The replacement joins": (
            ["SIGKILL", "SIGTERM"],
            {
                "without a step s": lambda fault: fault["join_gap_s"],
                "more than a step s": lambda fault: fault["join_gap_s"] - fault["usual_s"],
                "start-up s": lambda fault: fault["start_s"],
            },
        ),
    }
    for title, (signals, columns) in tables.items():
        joins = title == "The replacement joins"
        cells = []
        for row in rows:
            faults = [
                fault
                for fault in row["faults"]
                if fault["signal"] in signals and not (joins and fault["join_gap_s"] is None)
            ]
            stuck = sum(any(name in failure for name in signals) for failure in row["failures"])
            values = [cell for value in columns.values() for cell in _median_and_worst([value(f) for f in faults])]
            cells.append([row["rival"], str(len(faults)), str(stuck), *values])
        heads = [text for name in columns for text in (name, "worst")]
        measure.print_table(title, ["rival", "times", "stuck", *heads], cells)
    cells = []
    for row in rows:
        spread = Spread(**row["step_ms"])
        saving = "" if row["saving_ms"] is None else Spread(**row["saving_ms"]).text(0)
        cells.append([row["rival"], f"{row['steps_per_s']:.2f}", spread.text(0), saving, str(row["comparisons"])])
    heads = ["rival", "steps/s", "step ms", "checkpoint ms", "equal digests"]
    measure.print_table(f"Without faults, {SIZE} workers", heads, cells)
    if cost:
        cells = [
            [name, f"{100 * (cost[f'{key}_ratio'] - 1):+.2f}%", _percent(Spread(**cost[f"{key}_ratios"]))]
            for name, key in (("time", "seconds"), ("CPU time", "cpu"))
        ]
        title = f"What State and commit() add to a step, {cost['pairs']} pairs of steps"
        measure.print_table(title, ["", "all", f"blocks of {PAIRS_IN_BLOCK} pairs"], cells)


def _median_and_worst(values: Sequence[float]) -> tuple[str, str]:
    """Table cells: the median with its 20 % and 80 % quantiles, and the worst."""
    if not values:
        return "", ""
    digits = 0 if all(isinstance(value, int) for value in values) else 2
    return Spread.of([value / 1e3 for value in values]).text(digits), f"{max(values):.{digits}f}"


def _percent(spread: Spread) -> str:
    p50, p20, p80 = (100 * (value - 1) for value in (spread.p50, spread.p20, spread.p80))
    return f"{p50:+.2f}% ({p20:+.2f}-{p80:+.2f})"


def _told(name: str, fault: Fault) -> str:
    join = "" if fault.join_gap_s is None else f", gap at the join {fault.join_gap_s:.2f} s"
    return (
        f"{name}: {fault.signal} to rank {fault.rank}: a step after {fault.pause_s:.2f} s, {fault.lost_steps} lost"
        f"{join}, {SIZE} again after {fault.whole_s:.1f} s, "
        f"of which {fault.start_s:.1f} for the start"
    )


if __name__ == "__main__":
    sys.exit(main())
