"""Peak memory of training: torchring against DistributedDataParallel, each rival in processes of its own.

    torchring bench memory                                 mlp, vgg and gpt, 2 ranks
    torchring bench memory --models gpt --rivals torchring alone --ranks 4 --json results.jsonl

Rivals, one after the other, with plain SGD, which keeps no state for parameters:
    torchring      torchring.wrap(optimizer, model)
    ddp            DistributedDataParallel(model, gradient_as_bucket_view=True) over Gloo
    ddp, no views  DistributedDataParallel(model): gradients and buckets are separate
    alone          no communication at all; its processes import the same modules and open the same connections

Memory is measured in two ways, from when model and optimizer exist:
    RSS   all pages that a rank's process has touched. The peak is the kernel's. A page that two ranks share counts in
          both, so the sum over ranks is more than the machine spends.
    PSS   a page that n processes share counts 1/n in each, so the sum over ranks is what the machine spends. Sampled
          about 40 times a second, at the end of each backward, and after each step.
"steady" leaves out the first two steps, in which torchring and DDP build their buckets, and rebuild them once in the
order in which gradients became ready.

A rival's cost is the memory of its worst rank, minus that of the worst rank of "alone", which holds one copy of the
gradients. The claim: by RSS and by PSS, torchring costs at most one more copy of the gradients. The cost has these
parts:

- Gradients lie in torchring's wire buffers, so they cost no more than those of "alone".
- A rank reads and writes its own slice of its peers' wire buffers, and never touches the rest. With N ranks this adds
  (N-1)/N of a copy to the RSS of each rank. It adds nothing to PSS, as the owner of a shared page counts less of it.
- A gradient that autograd has just made needs memory until it is copied into the wire buffer, and the allocator keeps
  some of this memory for later gradients. Large tensors decide how much: it differs by 0.1 or 0.2 copies from run to
  run.
- torchring plans its buckets a second time. It opens the new wire buffers after zero_grad() has freed the old ones, so
  the two sets never exist at the same time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchring
from torchring.bench import measure, step
from torchring.bench.models import MODELS
from torchring.bench.step import Trainer

NUM_BUILDING_STEPS = 2
MOST_COPIES = 1.0
PAUSE_SECONDS = 0.02  # between two samples; a sample takes 5 ms in a process of 800 MiB
MEASURES = {"peak_rss": "peak RSS", "peak_pss": "peak PSS", "steady_rss": "steady RSS", "steady_pss": "steady PSS"}


class PssSampler(threading.Thread):
    """Samples the PSS of this process, in bytes: all the time, and whenever `sample` is called."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[int] = []
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(PAUSE_SECONDS):
            self.sample()

    def sample(self) -> None:
        self.samples.append(pss_bytes())

    def stop(self) -> None:
        self._is_over.set()
        self.join()


def main() -> int:
    parser = measure.parser("memory", __doc__ or "")
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["mlp", "vgg", "gpt"])
    parser.add_argument("--rivals", nargs="+", choices=list(RIVALS), default=list(RIVALS))
    parser.add_argument("--ranks", type=measure.several, default=2)
    parser.add_argument("--steps", type=measure.positive, default=6, help=f"more than {NUM_BUILDING_STEPS} steps")
    options = parser.parse_args()
    if options.steps <= NUM_BUILDING_STEPS:
        parser.error(f"--steps must be more than {NUM_BUILDING_STEPS}, got {options.steps}")
    if options.worker is not None:
        return work(options)
    rows = [measure_rival(model, rival, options) for model in options.models for rival in options.rivals]
    about = measure.provenance() | {"ranks": options.ranks, "steps": options.steps, "script": Path(__file__).name}
    measure.write_rows(options.json, rows, about)
    report(rows, about)
    return 0


def measure_rival(model: str, rival: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train one rival in new processes. Returns the row that rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "row.json")
        arguments = ["--models", model, "--rivals", rival, "--steps", str(options.steps), "--worker", str(file)]
        measure.run_here(__file__, options.ranks, arguments)
        row: dict[str, Any] = json.loads(file.read_text())
        return row


def work(options: argparse.Namespace) -> int:
    """Train as one rank of one rival. Rank 0 writes the row."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torchring.barrier()
    (name,), (rival,) = options.models, options.rivals
    torch.manual_seed(0)
    workload = MODELS[name]()
    parameters = list(workload.model.parameters())
    batches = [workload.batch(seed=1000 * torchring.rank() + i) for i in range(options.steps)]
    peak_is_exact = reset_peak()
    sampler = PssSampler()
    sampler.start()
    trainer = RIVALS[rival](workload.model)
    building_rss, num_building_samples = 0, 0
    for i, batch in enumerate(batches):
        if i == NUM_BUILDING_STEPS:
            building_rss, num_building_samples = peak_rss_bytes(), len(sampler.samples)
            reset_peak()
        trainer.optimizer.zero_grad()
        workload.loss(trainer.model, batch).backward()  # type: ignore[no-untyped-call]
        sampler.sample()
        trainer.optimizer.step()
        sampler.sample()
        torchring.barrier()  # no rank ends before all ranks have touched their slices
    sampler.stop()
    steady_rss = peak_rss_bytes()
    mine = {
        "peak_rss": max(building_rss, steady_rss),
        "peak_pss": max(sampler.samples),
        "steady_rss": steady_rss,
        "steady_pss": max(sampler.samples[num_building_samples:]),
        "last_pss": sampler.samples[-1],
    }
    of_all = torchring.all_gather_object(mine)
    if torchring.rank() == 0:
        row = {
            "model": name,
            "rival": rival,
            "ranks": torchring.size(),
            "bytes": sum(p.numel() * p.element_size() for p in parameters),
            "peak_is_exact": peak_is_exact,
            "memory_bytes": {key: [of_rank[key] for of_rank in of_all] for key in mine},
        }
        Path(options.worker).write_text(json.dumps(row))
    torchring.barrier()
    return 0


def with_ddp_without_views(model: torch.nn.Module) -> Trainer:
    ddp = DistributedDataParallel(model)
    return Trainer(ddp, step.sgd(ddp), [])


RIVALS: dict[str, Callable[[torch.nn.Module], Trainer]] = {
    "torchring": step.with_torchring,
    "ddp": step.with_ddp,
    "ddp, no views": with_ddp_without_views,
    "alone": step.without_communication,
}


def pss_bytes() -> int:
    """The PSS of this process now."""
    return _kilobytes("/proc/self/smaps_rollup", "Pss:") * 1024


def peak_rss_bytes() -> int:
    """The largest RSS of this process since `reset_peak`."""
    return _kilobytes("/proc/self/status", "VmHWM:") * 1024


def reset_peak() -> bool:
    """Reset the kernel's peak. False where the kernel refuses: then the peak includes building the model."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _kilobytes(file: str, field: str) -> int:
    return next(int(line.split()[1]) for line in Path(file).read_text().splitlines() if line.startswith(field))


def above_alone(row: dict[str, Any], rows: Sequence[dict[str, Any]], key: str) -> int | None:
    """By how many bytes a rival's worst rank exceeds the worst rank of "alone"; None if "alone" was not measured."""
    for other in rows:
        if (other["model"], other["rival"]) == (row["model"], "alone"):
            return int(max(row["memory_bytes"][key]) - max(other["memory_bytes"][key]))
    return None


def verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Whether torchring keeps its claim: a line for each model, for RSS and for PSS."""
    lines = []
    for row in rows:
        for key in ("peak_rss", "peak_pss"):
            above = above_alone(row, rows, key)
            if row["rival"] == "torchring" and above is not None:
                copies = above / row["bytes"]
                verdict = "kept" if copies <= MOST_COPIES else "BROKEN"
                lines.append(f"- {row['model']}, {MEASURES[key]}: {verdict}, {copies:.2f} copies")
    return lines


def report(rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    table = []
    for row in rows:
        cells = [row["model"], _mib(row["bytes"]), row["rival"]]
        for key in MEASURES:
            cells.append(_mib(max(row["memory_bytes"][key])))
            above = above_alone(row, rows, key)
            if row["rival"] != "alone" and above is not None:
                cells[-1] += f" ({above / 2**20:+.1f}, {above / row['bytes']:+.2f}x)"
        table.append([*cells, _mib(max(row["memory_bytes"]["last_pss"]))])
    columns = ["model", "gradients", "rival", *MEASURES.values(), "PSS at the end"]
    title = f"Memory of training, MiB of the worst of {about['ranks']} ranks (above alone: MiB, gradients), "
    title += f"{about['steps']} steps"
    measure.print_table(f"{title} {measure.origin(about)}", columns, table)
    if not all(row["peak_is_exact"] for row in rows):
        print("\nThe kernel refused to reset its peak, so peak RSS and steady RSS both include building the model.")
    if lines := verdicts(rows):
        print("\ntorchring claims to cost at most one copy of the gradients more than alone:\n")
        print("\n".join(lines))


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f}"


if __name__ == "__main__":
    sys.exit(main())
