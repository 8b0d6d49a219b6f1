"""The table of figures in README.md: training steps on one machine and between machines. Runs what it needs.

    torchring bench figures                   all benchmarks of the table, and of bench/README.md (as root)
    torchring bench figures --only-print      the table, from the rows of the last run

Rows are appended to the files in `--results`, and the table is made from these.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from torchring.bench import measure

BENCH = Path(__file__).resolve().parent
MODELS = {
    "mlp": "MLP, 42 million parameters",
    "gpt": "GPT, 17 million parameters",
    "small": "802 small tensors",
    "vgg": "VGG-16",
    "resnet": "ResNet-50",
}
RATES = ("25gbit", "10gbit", "1gbit")
RUNS = (
    "step",
    "allreduce",
    f"network --models {' '.join(MODELS)} --layouts 2x1 --rates {' '.join(RATES)} --rivals --seconds 25",
    f"network --models gpt small --layouts 3x1 4x1 --rates {' '.join(RATES)} --rivals --seconds 15",
    "network --models gpt --layouts 2x1 3x1 4x1 2x2 --rates 1gbit",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="torchring bench figures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=BENCH / "results", metavar="DIR", help="of the files of rows")
    parser.add_argument("--only-print", action="store_true")
    parser.add_argument("--environments", nargs="+", default=[], metavar="DIR", help="see torchring bench allreduce")
    options = parser.parse_args()
    for run in () if options.only_print else RUNS:
        name, *arguments = run.split()
        if name == "allreduce" and options.environments:
            arguments += ["--environments", *options.environments]
        command = [sys.executable, str(BENCH / f"{name}.py"), *arguments]
        if code := subprocess.run([*command, "--json", str(options.results / f"{name}.jsonl")]).returncode:
            return code
    print_table(measure.read_runs(options.results / "step.jsonl"), measure.read_runs(options.results / "network.jsonl"))
    return 0


def print_table(steps: list[tuple[dict[str, Any], list[Any]]], network: list[tuple[dict[str, Any], list[Any]]]) -> None:
    """Print the rows of the last step run, and those of all network runs at the commit of the last."""
    about, rows = steps[-1]
    cells: dict[tuple[str, str | None], Any] = {(row["model"], None): row["ms"] for row in rows}
    for found, rows in network:
        if found["commit"] == network[-1][0]["commit"]:
            for row in rows:
                if row["layout"] == "2x1":
                    cells.setdefault((row["model"], row["rate"]), row["ms"])

    def cell(model: str, rate: str | None) -> str:
        ms = cells[model, rate]
        return " / ".join(f"{ms[rival]['p50']:.{int(ms['alone']['p50'] < 50)}f}" for rival in ("torchring", "ddp"))

    columns = ["torchring / DDP, ms", "one machine", *(f"{rate[:-4]} Gbit/s" for rate in RATES), "no communication"]
    table = [
        [text, *(cell(model, rate) for rate in (None, *RATES)), f"{cells[model, None]['alone']['p50']:.0f}"]
        for model, text in MODELS.items()
    ]
    title = f"Steps on {about['cores']} cores with torch {about['versions']['torch']} {measure.origin(about)}"
    measure.print_table(title, columns, table)


if __name__ == "__main__":
    sys.exit(main())
