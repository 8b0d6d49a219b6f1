"""A page in Markdown about a first run on a GPU: what was measured, and what it means.

    python -m torchring.bench.gpu.results FOLDER

Reads `rows.jsonl` and `summary.txt`, as far as `bench/gpu_first_run.sh` has written them, and writes `results.md`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

from torchring.bench import measure
from torchring.bench.gpu.timing import Row, text_of

# The rows to show, and what they mean
_QUESTIONS: Final[tuple[tuple[str, Row, str], ...]] = (
    (
        "What does torchring add to a training step?",
        {"section": "step"},
        "`overhead` is a share of the plain optimizer's step, of one rank that has no other to send to: the aim is "
        "2 %. DDP's is beside it. `peak_bytes` is what a step takes beside what is in use between steps.",
    ),
    (
        "What does a bucket cost the host?",
        {"section": "bucket"},
        "The aim is 60 us. A host that is slower than its GPU holds backward up by this much for each bucket.",
    ),
    (
        "Do packing and unpacking run at the rate of memory?",
        {"section": "kernels"},
        "`of_copy` is the share of the rate of a copy of the same bytes. The aims: 0.9 (2,000 tiny tensors: 0.7). "
        "`foreach` is what PyTorch offers. The pass after NCCL is given by its number of blocks.",
    ),
    (
        "Does all-reduce work between processes?",
        {"section": "allreduce"},
        "Ranks that share a GPU take turns: such times show that it works, and say nothing about NVLink.",
    ),
)


def page(runs: list[tuple[Row, list[Row]]], summary: str) -> str:
    """The page, from the rows of benchmarks (see `measure.read_runs`) and the lines about all parts."""
    lines = ["# The first run of torchring on a GPU", ""]
    if runs:
        about = runs[0][0]
        lines += [f"{about['date']}, commit {about['commit']}, {about.get('gpu')}, {about['versions']}", ""]
    lines += ["## Parts", "", "```", summary.rstrip(), "```"]
    rows = [{"script": about["script"], **row} for about, run in runs for row in run]
    for question, wanted, meaning in _QUESTIONS:
        found = [text_of(row) for row in rows if wanted.items() <= row.items()]
        lines += ["", f"## {question}", "", meaning, "", "```", *(found or ["not measured"]), "```"]
    problems = [text_of(row) for row in rows if "problem" in row]
    return "\n".join([*lines, "", "## What failed", "", "```", *(problems or ["no measurement"]), "```", ""])


def main(folder: Path) -> None:
    def text(name: str) -> str:
        return (folder / name).read_text() if (folder / name).exists() else ""

    runs: list[Any] = measure.read_runs(folder / "rows.jsonl") if text("rows.jsonl") else []
    (folder / "results.md").write_text(page(runs, text("summary.txt")))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
