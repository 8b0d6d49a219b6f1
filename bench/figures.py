"""The table of figures in README.md: training steps on one machine and between machines. Runs what it needs.

    torchring bench figures                  all benchmarks (as root)
    torchring bench figures --only-print     tables from rows of the last runs

Rows are appended to the files in `--results`, and the table is made from these.
"""

import sys
from pathlib import Path
from typing import Any

from torchring.bench import measure
from torchring.bench.measure import Spread
from torchring.bench.options import parser

Row = dict[str, Any]

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
    options = parser("figures").parse_args()
    for run in () if options.only_print else RUNS:
        name, *arguments = run.split()
        command = [sys.executable, str(BENCH / f"{name}.py"), *arguments]
        command += ["--json", str(options.results / f"{name}.jsonl")]
        if code := measure.run_together([measure.Command(name, command, {})]):
            return code
    steps, network = (measure.read_runs(options.results / f"{name}.jsonl") for name in ("step", "network"))
    # The network's rows are from several runs, of which the first to have a row counts.
    rows: dict[tuple[str, str, str], Row] = {}
    for about, found in network:
        if about["commit"] == network[-1][0]["commit"]:
            for row in found:
                rows.setdefault((row["layout"], row["model"], row["rate"]), row)
    print_table(*steps[-1], rows)
    print_network(rows, network[-1][0])
    return 0


def print_table(about: dict[str, Any], steps: list[Row], network: dict[tuple[str, str, str], Row]) -> None:
    """Print the table of README.md."""

    def cells(row: Row) -> list[str]:
        ms = [row["ms"][rival]["p50"] for rival in ("torchring", "ddp")]
        return [*(f"{each:.{digits(row)}f}" for each in ms), f"{ms[1] / ms[0]:.2f}"]

    columns = ["ms", "torchring", "DDP", "DDP / torchring", *(f"at {rate[:-4]} Gbit/s" for rate in RATES)]
    table = []
    for row in steps:
        ratios = [cells(network["2x1", row["model"], rate])[-1] for rate in RATES]
        table.append([MODELS[row["model"]], *cells(row), *ratios])
    title = f"Steps in ms on {about['cores']} cores with torch {about['versions']['torch']} {measure.origin(about)}"
    measure.print_table(title, columns, table)


def print_network(rows: dict[tuple[str, str, str], Row], about: dict[str, Any]) -> None:
    """Print torchring beside DDP between all numbers of hosts."""
    columns = ["hosts x ranks", "model", "rate", "torchring ms", "ddp ms", "alone ms", "ratio to ddp"]
    table = []
    for (layout, model, rate), row in rows.items():
        spreads = [Spread(**row["ms"][rival]) for rival in ("torchring", "ddp", "alone")]
        ours, ddp, alone = (spread.p50 for spread in spreads)
        cells = [layout, model, rate, *(spread.text(digits(row)) for spread in spreads)]
        table.append([*cells, f"{(ours - alone) / (ddp - alone):.2f}"])
    measure.print_table(f"Steps between hosts, p50 (p20-p80) {measure.origin(about)}", columns, table)


def digits(row: Row) -> int:
    return 1 if row["ms"]["alone"]["p50"] < 50 else 0


if __name__ == "__main__":
    sys.exit(main())
