"""The report of `torchring bench gpu`: a table for each section, aims and whether they were reached, predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from torchring.bench import measure
from torchring.bench.gpu import kernels, predictions
from torchring.bench.gpu.timing import NO_TIME
from torchring.bench.measure import Spread
from torchring.doctor.render import human_bytes

Row = dict[str, Any]
ON_SEVERAL: Final = ("allreduce", "replicas")  # sections that run on several ranks


def report(rows: Sequence[Row], about: Row) -> None:
    """Print a table for each section, the problems, and the aims."""
    where = f"{about['gpu']['name']} {measure.origin(about)}"
    for section, describe in _TABLES.items():
        of_section = [row for row in rows if row["section"] == section and "problem" not in row]
        if of_section:
            describe(of_section, where)
    problems = [row for row in rows if "problem" in row]
    if problems:
        print("\nProblems:")
    for row in problems:
        subject = ", ".join(str(row[key]) for key in _SUBJECT if row.get(key) not in (None, "none"))
        print(f"- {subject}: {row['problem']}")
    lines = verdicts(rows)
    if lines:
        measure.print_table(f"Aims, {where}", ["what", "measured", "aim", ""], lines)
    lines = predictions.compare(rows)
    if lines:
        measure.print_table(f"Predictions, {where}", ["what", "measured", "predicted"], lines)


_SUBJECT: Final = (
    "section", "kind", "op", "load", "source", "target", "model", "algorithm", "ranks", "blocks", "dtype",
    "compression", "size",
)  # fmt: skip


def verdicts(rows: Sequence[Row]) -> list[list[str]]:
    """(what, measured, aim, "kept" or "MISSED") for each aim that has measurements. The worst measurement counts."""
    fine = [row for row in rows if "problem" not in row]
    lines: list[list[str]] = []
    for op, load, aim in _SHARES:
        chosen = [r for r in fine if r["section"] == "kernels" and r["op"] == op and load in ("", r["load"])]
        found = [
            (
                row["of_copy"][way]["p50"],
                f"{row['source']} to {row['target']}{', ' + way if way != 'torchring' else ''}",
            )
            for row in chosen
            for way in kernels.OURS
            if way in row["of_copy"]
        ]
        if found:
            share, which = min(found)
            text = f"{share:.0%} of a copy ({which})"
            lines.append([f"{op} {load}".strip(), text, f"at least {aim:.0%}", _verdict(share >= aim)])
    for moves, what in ((False, "host time per bucket"), (True, "host time per bucket, gradients moved")):
        times = [
            (1e3 * row["ms"]["total"]["p50"], f"{row['load']}, {row['algorithm']}, {row['compression'] or 'fp32'}")
            for row in fine
            if row["section"] == "bucket" and row["addresses_change"] == moves
        ]
        if times:
            most, which = max(times)
            lines.append([what, f"{most:.0f} us ({which})", "at most 60 us", _verdict(most <= 60)])
    for row in fine:
        if row["section"] == "step" and "ring" in row["overhead"]:
            own = row["overhead"]["ring"]["p50"]
            lines.append([f"step of one rank, {row['model']}", f"{own:+.1%}", "at most +2%", _verdict(own <= 0.02)])
    for section in ON_SEVERAL:
        tried = [row for row in rows if row["section"] == section and row.get("problem") != NO_TIME]
        if tried:
            right = sum("problem" not in row for row in tried)
            what = "ranks end with the same bits" if section == "replicas" else "all-reduce is right"
            lines.append([what, f"{right} of {len(tried)}", "all", _verdict(right == len(tried))])
    return lines


_SHARES: Final = (
    ("pack", "resnet50", 0.9), ("pack", "gpt2", 0.9), ("pack", "tiny", 0.7), ("pack", "tiny32", 0.7),
    ("unpack", "resnet50", 0.9), ("unpack", "gpt2", 0.9), ("unpack", "tiny", 0.7), ("unpack", "tiny32", 0.7),
    ("accumulate", "", 0.85),
)  # fmt: skip


def _verdict(is_kept: bool) -> str:
    return "kept" if is_kept else "MISSED"


def _copies(rows: Sequence[Row], where: str) -> None:
    names = list(rows[0]["gb_per_s"])
    table = [[human_bytes(row["size"]), *(_range(row["gb_per_s"].get(name), 0) for name in names)] for row in rows]
    measure.print_table(f"Copies, p50 (p20-p80), {where}", ["size", *(f"{name} GB/s" for name in names)], table)


def _kernels(rows: Sequence[Row], where: str) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row["of_copy"]))
    table = [
        [
            f"{row['op']} {row['load']}",
            f"{row['source']} to {row['target']}",
            f"{row['bytes'] / 2**20:.1f}",
            *(_range(row["gb_per_s"].get(name), 0) for name in ("copy", "torchring")),
            *(f"{row['of_copy'][name]['p50']:.0%}" if name in row["of_copy"] else "" for name in names),
        ]
        for row in rows
    ]
    columns = ["operation", "dtypes", "MiB", "copy GB/s", "torchring GB/s", *(f"{name} / copy" for name in names)]
    measure.print_table(f"Kernels, p50 (p20-p80), {where}", columns, table)


def _buckets(rows: Sequence[Row], where: str) -> None:
    phases = list(rows[0]["ms"])
    table = [
        [
            row["load"],
            row["algorithm"],
            (row["compression"] or "fp32") + (", moved" if row["addresses_change"] else ""),
            str(row["tensors"]),
            *(_range({k: 1e3 * v for k, v in row["ms"][phase].items()}, 0) for phase in phases),
            str(row["launches"]),
        ]
        for row in rows
    ]
    columns = ["bucket", "algorithm", "wire", "tensors", *(f"{phase} us" for phase in phases), "launches"]
    measure.print_table(f"Host time of a bucket, p50 (p20-p80); the total is without arrive, {where}", columns, table)


def _all_reduces(rows: Sequence[Row], where: str) -> None:
    names = list(dict.fromkeys((row["ranks"], row["algorithm"]) for row in rows))
    cells = {(row["size"], row["ranks"], row["algorithm"]): row for row in rows}
    table = []
    for size in sorted({row["size"] for row in rows}):
        found = [cells.get((size, *name)) for name in names]
        table.append([human_bytes(size), *(Spread(**row["ms"]).text(3) if row else "" for row in found)])
    columns = ["size", *(f"{algorithm}, {ranks} ranks ms" for ranks, algorithm in names)]
    measure.print_table(f"All-reduce, fp32, p50 (p20-p80) of the slowest rank, {where}", columns, table)
    if any(row["shares_one_gpu"] for row in rows):
        print("\nRanks that share one GPU take turns in time slices, so these times say nothing about NVLink.")


def _streams(rows: Sequence[Row], where: str) -> None:
    table = []
    for row in rows:
        if row["kind"] == "order":
            continue
        size = human_bytes(row["size"]) if "size" in row else ""
        what = [row["kind"], row.get("op", ""), str(row.get("ranks", "")), str(row.get("blocks", "")), size]
        table.append([*what, *_of_streams(row), "host fell behind" if row.get("host_fell_behind") else ""])
    if table:
        columns = ["what", "", "ranks", "blocks", "size", "us", "", ""]
        measure.print_table(f"Ranks as streams of one process, p50 (p20-p80), {where}", columns, table)
    orders = sum(row["kind"] == "order" for row in rows)
    if orders:
        print(f"\n{orders} results of ranks that came late by random times were right.")


def _of_streams(row: Row) -> list[str]:
    """Two cells: microseconds, and what matters about them."""
    if row["kind"] == "gemm":
        return [f"{1e3 * row['ms_alone']:.0f} alone", f"{row['slower_by']:+.1%} beside waiting blocks"]
    notes = {
        "meeting": lambda: f"{row['us_of_a_meeting']['p50']:.1f} us a meeting",
        "sum": lambda: f"{row['gb_per_s']:.0f} GB/s",
        "alone": lambda: f"{row['of_copy']['p50']:.0%} of a copy",
    }
    return [_range(row["us"], 1), notes.get(row["kind"], lambda: "")()]


def _steps(rows: Sequence[Row], where: str) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row["ms"]))
    table = [
        [
            row["model"],
            str(row["tensors"]),
            *(Spread(**row["ms"][name]).text(2) if name in row["ms"] else "" for name in names),
            *(_percents(row["overhead"].get(name)) for name in names if name != "plain"),
            *(f"{row['peak_bytes'][name] / 2**20:.0f}" if name in row["peak_bytes"] else "" for name in names),
        ]
        for row in rows
    ]
    columns = ["model", "tensors", *(f"{name} ms" for name in names)]
    columns += [f"{name} overhead" for name in names if name != "plain"]
    columns += [f"{name} peak MiB" for name in names]
    measure.print_table(f"Training step of one rank, p50 (p20-p80), {where}", columns, table)


def _replicas(rows: Sequence[Row], where: str) -> None:
    table = [
        [
            f"{row['ranks']} ranks, {row['algorithm']}",
            row["compression"] or "fp32",
            str(row["steps"]),
            "yes" if row["has_the_same_bits"] else "NO",
            f"{row['distance']:.1e}",
            f"{row['distance_of_control']:.1e}",
            f"{row['step_ms']:.1f}",
        ]
        for row in rows
    ]
    columns = ["ranks", "wire", "steps", "same bits", "from one process", "from rank 0's data alone", "step ms"]
    measure.print_table(f"Replicas, {where}", columns, table)


_TABLES: Final[dict[str, Callable[[Sequence[Row], str], None]]] = {
    "copy": _copies,
    "kernels": _kernels,
    "bucket": _buckets,
    "streams": _streams,
    "allreduce": _all_reduces,
    "step": _steps,
    "replicas": _replicas,
}


def _range(values: dict[str, float] | None, digits: int) -> str:
    if values is None:
        return ""
    return f"{values['p50']:.{digits}f} ({values['p20']:.{digits}f}-{values['p80']:.{digits}f})"


def _percents(values: dict[str, float] | None) -> str:
    return "" if values is None else f"{values['p50']:+.1%} ({values['p20']:+.1%} to {values['p80']:+.1%})"
