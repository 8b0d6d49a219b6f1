"""Why N ranks are not N times as fast: your own script, with and without waiting for data and for gradients.

    torchring bench scaling -np 8 train.py --epochs 3
    torchring bench scaling -H a:4,b:4 --steps 100 --json results.json train.py

The script runs unchanged for a few steps, in turns, under six conditions:
    given       N ranks, as `torchring run` starts them
    synthetic   the same, but each DataLoader gives its first batch again and again
    silent      the same as given, but ranks do not exchange gradients
    compute     both: N ranks that compute, and do nothing else
    one         one rank alone
    ideal       one rank alone with synthetic data: it computes, and does nothing else
Differences between these say what is lost to input, to communication, to interference (ranks of one machine share its
memory and its cores) and to stragglers (ranks that the others wait for). scaling_losses.py has the arithmetic.

Step times come from traces: of the slowest rank, means over stretches of 10 steps, then the median of all stretches.
Each rank keeps the batch that the script gives it. Samples per second are compared, so the script may give each rank
the same batch as one rank alone (weak scaling), or divide a batch among the ranks (strong scaling). If the model was
not given to torchring.wrap, samples are unknown, and batches are taken to be equal. One rank alone has as many threads
as each of N ranks has.

After the steps the script is ended; code in `finally` does not run. What silent ranks train is worthless, and all runs
are short: if the script saves checkpoints, give it a folder that you do not need. With -H the hosts must share the
working directory. What the script exchanges by itself, such as metrics, is exchanged in silent runs, too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from torchring.bench import measure
from torchring.bench.scaling_losses import (
    COMMUNICATION,
    COMPUTE,
    GIVEN,
    IDEAL,
    INPUT,
    INTERFERENCE,
    ONE,
    SILENT,
    STRAGGLERS,
    SYNTHETIC,
    Losses,
    Measured,
    Stretches,
    in_words,
    losses_of,
    stretches,
)
from torchring.bench.scaling_worker import COMPLAINT, STRETCH_STEPS, Ending, Settings, command, ending_path
from torchring.launch.arguments import hosts_of, setting
from torchring.launch.launcher import LAUNCHERS, Host, LaunchError, is_here, share_out, start
from torchring.launch.output import OutputOptions
from torchring.launch.signals import STOPPING
from torchring.observe.recorder import files
from torchring.observe.recorder.recorder import NUM_STEPS
from torchring.observe.recorder.records import RankTrace
from torchring.rendezvous.environment import TRACE

_LAST_LINES: Final = 20  # of a rank whose run has failed


@dataclass(frozen=True)
class Condition:
    """How the script is run."""

    name: str
    shows: str
    is_alone: bool = False
    repeats_batches: bool = False
    is_silent: bool = False


CONDITIONS: Final = (
    Condition(GIVEN, "the script as it is"),
    Condition(SYNTHETIC, "nobody waits for data", repeats_batches=True),
    Condition(SILENT, "nobody waits for gradients; training is worthless", is_silent=True),
    Condition(COMPUTE, "ranks only compute; training is worthless", repeats_batches=True, is_silent=True),
    Condition(ONE, "one rank alone", is_alone=True),
    Condition(IDEAL, "one rank alone, which only computes", is_alone=True, repeats_batches=True),
)
_MEANING: Final = {
    INPUT: "ranks wait for data",
    COMMUNICATION: "ranks wait for gradients, or for the cores that move them",
    INTERFERENCE: "ranks slow each other down while they compute",
    STRAGGLERS: "ranks wait for the one that is slowest in this step",
}


def main() -> int:
    options = _parse()
    try:
        hosts = hosts_of(options)
        num_ranks = sum(
            host.slots for host in share_out(hosts or [Host("localhost", options.num_proc)], options.num_proc)
        )
        if num_ranks < 2:
            raise LaunchError("it takes two ranks or more to see what they lose")
        experiment = Experiment(options, hosts, num_ranks)
        with measure.stopped_by_signals():
            turns = experiment.run()
    except LaunchError as error:
        print(f"torchring bench scaling: {error}", file=sys.stderr)
        return 2
    measured = measured_in(turns, num_ranks)
    losses, of_turns = losses_of(measured), [losses_of(measured_in([turn], num_ranks)) for turn in turns]
    about = measure.provenance() | {"script": Path(__file__).name, "command": [options.script, *options.arguments]}
    report(measured, losses, of_turns, about)
    measure.write_json(options.json, rows_of(measured, losses, of_turns), about)
    return 0


def _parse() -> argparse.Namespace:
    parser = measure.parser("scaling", __doc__ or "")
    parser.add_argument(
        *("-np", "-n", "--num-proc"), dest="num_proc", type=measure.several, metavar="N", help="number of ranks"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="machines, and how many ranks each takes")
    where.add_argument("--hostfile", metavar="FILE", help="the same, one `host slots=N` or `host:N` a line")
    parser.add_argument("--env", type=setting, action="append", default=[], metavar="NAME=VALUE", help="for all ranks")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="auto", help="what starts them; chosen by default")
    parser.add_argument("--steps", type=measure.positive, default=50, help="optimizer steps that count in a run")
    parser.add_argument("--warm-up", type=measure.positive, default=10, help="steps before these, which do not count")
    parser.add_argument("--turns", type=measure.positive, default=2, help="runs of each condition")
    parser.add_argument("--verbose", action="store_true", help="show what the script prints")
    parser.add_argument("--json", type=measure.writable, metavar="FILE", help="also write the rows to this file")
    parser.add_argument("script", metavar="SCRIPT", help="a script that calls torchring.wrap")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="handed to the script")
    options = parser.parse_args()
    if options.num_proc is None and options.hosts is None and options.hostfile is None:
        parser.error("say how many ranks: -np N, or -H HOST:SLOTS,..., or --hostfile FILE")
    if not os.path.exists(options.script):
        parser.error(f"there is no script {options.script!r}")
    if options.warm_up + options.steps > NUM_STEPS:
        parser.error(f"a trace holds {NUM_STEPS} steps, --warm-up and --steps together")
    return options


class Experiment:
    """Runs the script under all conditions, in turns.

    Args:
        options: of the command.
        hosts: None for this machine.
        num_ranks: of the conditions with several ranks.
    """

    def __init__(self, options: argparse.Namespace, hosts: Sequence[Host] | None, num_ranks: int) -> None:
        self._options = options
        self._hosts = hosts
        self._num_ranks = num_ranks
        self._num_threads: int | None = None  # of each of several ranks

    def run(self) -> list[dict[str, Stretches]]:
        """For each turn the times by condition. Raises LaunchError, and SystemExit if the script fails."""
        options = self._options
        self._say(
            f"{options.script} runs {len(CONDITIONS) * options.turns} times, for {options.warm_up} + {options.steps} "
            "steps each. If it saves checkpoints, those of these runs are worthless"
        )
        return [
            {each.name: self._run_once(each) for each in (CONDITIONS if turn % 2 == 0 else CONDITIONS[::-1])}
            for turn in range(options.turns)
        ]

    def _run_once(self, condition: Condition) -> Stretches:
        options = self._options
        settings = Settings(options.warm_up, options.steps, condition.repeats_batches, condition.is_silent)
        # Other hosts share the working directory, but hardly the folder for temporary files.
        is_local = all(is_here(host.name) for host in self._hosts or ())
        with tempfile.TemporaryDirectory(prefix=".torchring-scaling-", dir=None if is_local else os.getcwd()) as name:
            folder = Path(name)
            env = dict(options.env) | {TRACE: name}
            if condition.is_alone and self._num_threads is not None:
                env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(self._num_threads))} | env
            code = start(
                command(settings, options.script, options.arguments),
                1 if condition.is_alone else self._num_ranks,
                self._hosts,
                env,
                options.launcher,
                OutputOptions(log_dir=name, is_quiet=not options.verbose),
            )
            if code - 128 in STOPPING:
                raise SystemExit(code)
            if code:
                if not options.verbose:
                    _show_last_lines(folder)
                self._say(f"the script has failed, in the condition {condition.name!r}, with exit code {code}")
                raise SystemExit(code)
            traces, endings = self._read(folder, 1 if condition.is_alone else self._num_ranks)
        return self._evaluate(condition, traces, endings)

    def _read(self, folder: Path, num_ranks: int) -> tuple[list[RankTrace], list[Ending]]:
        found = files.find(folder)
        if not found:
            raise LaunchError(
                f"{self._options.script} has made no step with an optimizer that torchring.wrap() has returned"
            )
        if missing := sorted(set(range(num_ranks)) - found.keys()):
            raise LaunchError(
                f"rank {missing[0]} has left no trace in {folder}: a rank has not trained, or hosts do not share the "
                "folder"
            )
        endings = [Ending(**json.loads(ending_path(folder, rank).read_text())) for rank in range(num_ranks)]
        try:
            return [files.read(found[rank]) for rank in range(num_ranks)], endings
        except files.TraceError as error:
            raise LaunchError(str(error)) from error

    def _evaluate(self, condition: Condition, traces: Sequence[RankTrace], endings: Sequence[Ending]) -> Stretches:
        options = self._options
        found = stretches(traces, options.warm_up, STRETCH_STEPS)
        if not found.num_steps:
            raise LaunchError(
                f"{options.script} has ended after {len(traces[0].steps)} steps, and the first {options.warm_up} do "
                "not count; have it train for longer, or give --warm-up"
            )
        if not condition.is_alone:
            self._num_threads = traces[0].about.num_threads
        notes = []
        if not all(ending.was_ended for ending in endings):
            notes.append(f"the script has ended by itself after {found.num_steps} steps that count")
        if condition.repeats_batches and not any(ending.num_loaders for ending in endings):
            notes.append("the script uses no torch DataLoader, so its data is not synthetic")
        step = measure.Spread.of([ms / 1e3 for ms in found.step_ms])
        self._say("; ".join([f"{condition.name}: {step.p50:.1f} ms a step", *notes]))
        return found

    def _say(self, text: str) -> None:
        print(f"torchring bench scaling: {text}", file=sys.stderr)


def _show_last_lines(folder: Path) -> None:
    """Of the ranks that say what is wrong, or else of those that print a traceback, or else of all."""
    texts = {file.stem: file.read_text(errors="replace") for file in sorted(folder.glob("rank*.log"))}
    for sign in (COMPLAINT, "Traceback", ""):
        if guilty := {name: text for name, text in texts.items() if sign in text}:
            break
    for name, text in guilty.items():
        if text:
            print(f"--- the last lines of {name}:", *text.splitlines()[-_LAST_LINES:], sep="\n", file=sys.stderr)


def measured_in(turns: Sequence[dict[str, Stretches]], num_ranks: int) -> dict[str, Measured]:
    """All runs of these turns, by condition."""
    return {
        each.name: Measured.of(1 if each.is_alone else num_ranks, [turn[each.name] for turn in turns])
        for each in CONDITIONS
    }


def rows_of(measured: dict[str, Measured], losses: Losses, turns: Sequence[Losses]) -> list[dict[str, Any]]:
    """All that was measured, as JSON can hold it: a row for each condition, one for the losses, one for each turn's."""
    rows: list[dict[str, Any]] = []
    for name, each in measured.items():
        row = {"condition": name, "ranks": each.num_ranks, "step_ms": vars(each.step)}
        row |= {"typical_ms": each.typical_ms, "slowest_in_each_step_ms": each.in_step_ms}
        rows.append(row | {"samples_per_s": each.samples_per_s or None, "steps": each.num_steps})
    for turn, of_turn in [(None, losses), *enumerate(turns)]:
        rows.append({"condition": "losses", "turn": turn, "efficiency": of_turn.efficiency, **asdict(of_turn)})
    return rows


def report(measured: dict[str, Measured], losses: Losses, turns: Sequence[Losses], about: dict[str, Any]) -> None:
    """Print both tables, and the sentences."""
    cells = []
    for condition in CONDITIONS:
        each = measured[condition.name]
        rate = f"{each.samples_per_s:,.0f}" if each.num_samples else "unknown"
        cells.append([condition.name, str(each.num_ranks), each.step.text(1), rate, condition.shows])
    title = f"{' '.join(about['command'])} {measure.origin(about)}"
    measure.print_table(title, ["condition", "ranks", "step ms", "samples/s", "what it shows"], cells)
    parts: dict[str, tuple[Callable[[Losses], float], str]] = {
        "ideal": (attrgetter("ideal_ms"), "one rank computes as many samples"),
        **{reason: (_lost_to(reason), meaning) for reason, meaning in _MEANING.items()},
        "given": (attrgetter("step_ms"), "all of these together"),
    }
    cells = [
        [name, _with_range(value, losses, turns), f"{value(losses) / losses.step_ms:.0%}", meaning]
        for name, (value, meaning) in parts.items()
    ]
    turns_named = (
        f", in brackets the least and the most of all runs, and of each of {len(turns)} turns" if len(turns) > 1 else ""
    )
    title = f"A step of {losses.num_ranks} ranks{turns_named}"
    measure.print_table(title, ["part", "ms", "share", "what it is"], cells)
    print("", *in_words(losses, turns), sep="\n")


def _lost_to(reason: str) -> Callable[[Losses], float]:
    return lambda losses: losses.lost_ms[reason]


def _with_range(value: Callable[[Losses], float], losses: Losses, turns: Sequence[Losses]) -> str:
    # A difference of medians of all runs may lie outside those of the turns.
    found = list(map(value, [losses, *turns]))
    spread = f" ({min(found):.1f} to {max(found):.1f})" if len(turns) > 1 else ""
    return f"{value(losses):.1f}{spread}"


if __name__ == "__main__":
    sys.exit(main())
