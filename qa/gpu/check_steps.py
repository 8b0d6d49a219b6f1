"""Figures: a training step of one rank against DDP over NCCL. See `qa.gpu.check`."""

from collections.abc import Iterator

from qa.gpu.check import Figure
from torchring.bench.gpu.training import steps


def figures() -> Iterator[Figure]:
    for about, run in steps():
        row = run()
        spread = ", ".join(
            f"{name} {each['p50']:.1f} ({each['p20']:.1f}-{each['p80']:.1f})" for name, each in row["ms"].items()
        )
        yield Figure(f"step of {about['model']}, {spread} ms; torchring's over DDP's", row["of_ddp"], "", 1.02)
        most = max(row["peak_bytes"]["ddp"], row["peak_bytes"]["plain"])
        yield Figure(f"peak memory of {about['model']} over DDP's", row["peak_bytes"]["direct"] / most, "", 1.0)
