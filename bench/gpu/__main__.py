"""One GPU: kernels against a copy, host time per bucket, all-reduce by size, training steps.

On a machine with a GPU, run the tests that need a GPU and then the benchmarks, from a checkout:

    TORCHRING_EXPECT_GPU=1 python -m pytest -m gpu
    torchring bench gpu --output bench/results/h200.json

The benchmarks take less than 8 minutes on one GPU, and 15 minutes on several; `python -m torchring.bench.gpu` runs
them, too. Each section runs in processes of its own, for a limited time, so that no section can spoil or stop another:

    copy       device-to-device copies by size: the rate that the memory reaches
    kernels    pack, unpack and accumulate as a share of a copy of the same bytes, and torch's ways to do the same
    bucket     host time for packing, reducing and unpacking one bucket, and the number of launches and CUDA calls
    streams    2, 4 and 8 ranks as streams of one process: order, meetings, waiting blocks, aborts; see streams.py
    step       a training step of one rank: the plain optimizer, torchring with the algorithms ring and direct, and DDP
               over NCCL; and the memory that each takes at its peak
    allreduce  direct and ring between ranks, and NCCL and nvls if each rank has a GPU. Ranks that share one GPU take
               turns in slices of milliseconds: such times show that all-reduce works, and say nothing about NVLink
    replicas   ranks train; they have to end with the same bits, and near a single process

The last two sections come first if there are several GPUs. Which rows answer which question:

    is direct, nvls or NCCL faster, by size of the wire?       allreduce, 1 to 128 MiB
    how long does a meeting take?                              streams, meeting; allreduce, 1 KiB
    are loads of 8 ranks in flight at once?                    streams, sum, 8 ranks
    what do gradients take beside the wires?                   step, peak
    what does the pass after NCCL cost?                        streams, alone; allreduce, native
    does an abort end a kernel that waits?                     streams, abort
    what do waiting blocks cost backward, by their number?     streams, gemm
    what does a bucket cost the host?                          bucket; streams, host

The last table sets predictions, made before there was a GPU, beside what was measured.

Rates count bytes that are read and bytes that are written. If a section fails, or has no time left, its rows have a
"problem". `--dry-run` runs all sections on the CPU, with tiny inputs and interpreted kernels. It tests this script; its
times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import torch

import torchring
from torchring.allreduce.select import ALGORITHMS, Algorithm
from torchring.bench import measure
from torchring.bench.gpu import buckets, dry, kernels, streams, timing, training
from torchring.bench.gpu.report import ON_SEVERAL, Row, report
from torchring.bench.gpu.timing import NO_TIME
from torchring.bench.measure import Command
from torchring.memory.cuda import OVERLAPPING_DEVICES

SECTIONS: Final = ("copy", "kernels", "bucket", "streams", "step", "allreduce", "replicas")
LISTS: Final = ("resnet50", "gpt2", "tiny", "vgg16", "tiny32")
_TOTAL_SECONDS: Final = 455.0
_TOTAL_SECONDS_IF_SEVERAL: Final = 870.0  # GPUs
_GRACE_SECONDS: Final = 25.0  # added to the time of a job: to start, to compile, and to finish the last repetition
_REPORT_SECONDS: Final = 3.0  # after a failure, for the other ranks to report what they know about it
_PEER_SECONDS: Final = 20.0  # how long a rank waits for another rank
# In a dry run these sections run interpreted kernels; the other sections run on torch.
_INTERPRETED: Final = ("bucket", "streams", "allreduce", "step", "replicas")


@dataclass(frozen=True)
class Job:
    """The work of one set of processes.

    Attributes:
        seconds: time for the measurements, without start-up.
    """

    section: str
    seconds: float
    ranks: int = 1
    algorithm: str = "none"

    @property
    def name(self) -> str:
        return self.section if self.ranks == 1 else f"{self.section}, {self.ranks} ranks, {self.algorithm}"


def main() -> int:
    options = parse()
    if options.worker:
        return work(options)
    if not (options.dry_run or torch.cuda.is_available()):
        print("torchring bench gpu needs a CUDA GPU; --dry-run tries the script on the CPU", file=sys.stderr)
        return 2
    about = measure.provenance() | {"script": "gpu", "dry_run": options.dry_run} | facts(options.dry_run)
    is_whole = not options.dry_run and not options.quick and set(options.sections) == set(SECTIONS)
    output = options.output or (default_output(about["gpu"]["name"]) if is_whole else None)
    rows: list[Row] = []
    num_gpus = 0 if options.dry_run else torch.cuda.device_count()
    end = time.monotonic() + (_TOTAL_SECONDS if num_gpus <= 1 else _TOTAL_SECONDS_IF_SEVERAL)
    ranks = options.ranks or [2, 4, *([8] if num_gpus >= 8 else [])]
    has_multicast = bool(about["gpu"].get("multicast"))
    todo = jobs(
        options.sections, ranks, num_gpus, has_multicast=has_multicast, is_quick=options.quick, is_dry=options.dry_run
    )
    for job in todo:
        started = time.monotonic()
        found = run_job(job, options, min(job.seconds + _GRACE_SECONDS, end - started))
        rows += found
        problems = sum("problem" in row for row in found)
        said = f"{len(found)} rows" + (f", {problems} with a problem" if problems else "")
        print(f"{job.name}: {said}, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        measure.write_rows(output, rows, about)
    if output is not None:
        print(f"All rows are in {output}", file=sys.stderr)
    report(rows, about)
    return int(any("problem" in row and row["problem"] != NO_TIME for row in rows))


def parse() -> argparse.Namespace:
    parser = measure.parser("gpu", __doc__ or "")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument(
        "--ranks",
        type=measure.positive,
        nargs="+",
        help="for the sections that run on several ranks (default: 2, 4, and 8 if there are as many GPUs)",
    )
    parser.add_argument("--quick", action="store_true", help="take a third of the time, with a third of the sizes")
    parser.add_argument(
        "--output",
        "--json",
        type=measure.writable,
        metavar="FILE",
        help="write all rows to this file (default, if the run is complete: bench/results/GPU.json)",
    )
    parser.add_argument("--dry-run", action="store_true", help="run everything on the CPU, with tiny inputs")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # section,algorithm,seconds,file
    return parser.parse_args()


def jobs(
    sections: Sequence[str],
    ranks: Sequence[int],
    num_gpus: int,
    *,
    has_multicast: bool = False,
    is_quick: bool,
    is_dry: bool,
) -> list[Job]:
    """All jobs, in order: sections of several ranks first if there are several GPUs, and last if there is one.

    NCCL takes part if each rank has a GPU, and so does nvls where GPUs have multicast addresses.
    """
    seconds = {"copy": 8.0, "kernels": 90.0, "bucket": 20.0, "streams": 45.0, "allreduce": 11.0, "step": 80.0}
    seconds["replicas"] = 13.0
    of_gpus = ["native", *(["nvls"] if has_multicast and "nvls" in ALGORITHMS else [])]
    sections = sorted(sections, key=lambda section: (section in ON_SEVERAL) != (num_gpus > 1))
    scale = 0.05 if is_dry else 0.35 if is_quick else 1.0
    found = []
    for section in sections:
        limit = scale * seconds[section]
        if section not in ON_SEVERAL:
            found.append(Job(section, limit))
            continue
        for size in ranks:
            algorithms = ["direct", "ring", *(of_gpus if 1 < size <= num_gpus else [])]
            found += [Job(section, limit, size, algorithm) for algorithm in algorithms]
    return found


def run_job(job: Job, options: argparse.Namespace, limit_seconds: float) -> list[Row]:
    """Run a job and return its rows. A job that fails, or takes too long, has a last row with a "problem"."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        flags = [*(["--quick"] if options.quick else []), *(["--dry-run"] if options.dry_run else [])]
        arguments = [*flags, "--worker", f"{job.section},{job.algorithm},{job.seconds},{file.name}"]
        environment = {OVERLAPPING_DEVICES: "1"} if job.ranks > 1 else measure.search_path()
        if job.section == "streams":
            environment |= streams.ENVIRONMENT
        if options.dry_run and job.section in _INTERPRETED:
            environment["TRITON_INTERPRET"] = "1"
        problem = start(job, arguments, environment, limit_seconds) if limit_seconds > 0 else NO_TIME
        rows: list[Row] = []
        for line in Path(file.name).read_text().splitlines():
            with contextlib.suppress(ValueError):  # a terminated process may have written half a line
                rows.append(json.loads(line))
    if problem and not any("rank" in row for row in rows):  # no rank has reported its own failure
        rows.append({"section": job.section, "ranks": job.ranks, "algorithm": job.algorithm, "problem": problem})
    return rows


def start(job: Job, arguments: Sequence[str], environment: dict[str, str], limit_seconds: float) -> str:
    """Run the processes of a job. Returns a description of the failure, or an empty text."""
    if job.ranks == 1:
        return run_until([Command(job.name, [sys.executable, __file__, *arguments], environment, True)], limit_seconds)
    commands = measure.rank_commands(__file__, job.ranks, arguments, mpi=False, rendezvous=measure.free_port())
    ours = [dataclasses.replace(c, environment={**c.environment, **environment}, is_quiet=True) for c in commands]
    return run_until(ours, limit_seconds)


def run_until(commands: Sequence[Command], limit_seconds: float) -> str:
    """Run processes side by side. Returns a description of the failure, or an empty text.

    Processes that still run after `limit_seconds` are terminated. No process outlives the call.
    """
    processes: list[subprocess.Popen[bytes]] = []
    end, failure = time.monotonic() + limit_seconds, f"ended after {limit_seconds:.3g} s, its limit"
    with measure.stopped_by_signals() as held:
        try:
            for command in commands:
                with held():
                    processes.append(command.start())
            has_failed = False
            while time.monotonic() < end:
                codes = [process.poll() for process in processes]
                failed = [i for i, code in enumerate(codes) if code]
                if failed and not has_failed:  # let the other processes report what they know
                    has_failed, end = True, min(end, time.monotonic() + _REPORT_SECONDS)
                    failure = f"{commands[failed[0]].name} ended with exit code {codes[failed[0]]}"
                if None not in codes:
                    return failure if has_failed else ""
                time.sleep(0.02)
            return failure
        finally:
            measure.end(processes)


# A job's processes


def work(options: argparse.Namespace) -> int:
    """Run as one rank of a job. Writes the rows to the file that the first process of this script reads."""
    section, algorithm, seconds, file = options.worker.split(",", 3)
    rank = int(os.environ.get("RANK", "0")) if section in ON_SEVERAL else 0

    def hand_over(row: Row) -> None:
        with open(file, "a") as rows:
            rows.write(json.dumps(row) + "\n")

    try:
        for row in rows_of(section, algorithm, float(seconds), is_quick=options.quick, is_dry=options.dry_run):
            if rank == 0:
                hand_over(row)
        return 0
    except Exception as error:
        traceback.print_exc()
        about = {"section": section, "algorithm": algorithm, "rank": rank}
        hand_over(about | {"problem": f"{type(error).__name__}: {error}"[:2000]})
        return 1


def rows_of(section: str, algorithm: str, seconds: float, *, is_quick: bool, is_dry: bool) -> Iterator[Row]:
    """The rows of one section, each as soon as it is measured."""
    if is_dry:
        torch.set_num_threads(1)
        dry.install()
    if section in ON_SEVERAL:
        torchring.init(timeout_seconds=_PEER_SECONDS)
    device = _device(section, is_dry=is_dry)
    names = () if section != "kernels" else LISTS[: 1 if is_dry else 3 if is_quick else None]
    lists = kernels.lists_of(names, is_dry=is_dry)
    until = time.monotonic() + seconds
    most = 1 if is_dry else 30
    if section == "bucket":
        return buckets.host_times(device, is_dry=is_dry, until=until, most=most)
    if section == "allreduce":
        sizes = _pick(ALL_REDUCE_BYTES, is_quick=is_quick, dry=ALL_REDUCE_BYTES[:2] if is_dry else None)
        return buckets.all_reduces(device, algorithm, sizes, until=until, most=most)
    if section == "replicas":
        return training.replicas(device, cast(Algorithm, algorithm), 2 if is_dry else 20, is_dry=is_dry)
    timer = timing.open_timer(device)
    if section == "copy":
        sizes = _pick(COPY_BYTES, is_quick=is_quick, dry=[1 << 10, 1 << 12] if is_dry else None)
        return kernels.ceilings(timer, sizes, until=until, most=most)
    if section == "streams":
        return streams.ranks_as_streams(timer, is_dry=is_dry, until=until, most=most)
    if section == "step":
        return training.steps(timer, is_dry=is_dry, until=until, most=1 if is_dry else 60)
    return kernels.kernels(timer, lists, 1000 if is_dry else 1 << 24, until=until, most=most)


COPY_BYTES: Final = [1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30]
ALL_REDUCE_BYTES: Final = [1 << 10, 64 << 10, *(mib << 20 for mib in (1, 4, 8, 12, 16, 25, 32, 64, 128, 256))]


def _device(section: str, *, is_dry: bool) -> torch.device:
    if is_dry:
        return torch.device("cpu")
    device = torchring.device() if section in ON_SEVERAL else torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return device


def _pick(sizes: Sequence[int], *, is_quick: bool, dry: Sequence[int] | None) -> Sequence[int]:
    return dry if dry is not None else sizes[1::3] if is_quick else sizes


# The facts and the file of the report


def facts(is_dry: bool) -> Row:
    """The GPU, its driver, and the versions of CUDA and NCCL."""
    if is_dry:
        return {"gpu": {"name": "none, a dry run"}}
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = None
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
        driver = subprocess.run(query, capture_output=True, text=True, timeout=10).stdout.split()[0]
    nccl = None
    with contextlib.suppress(RuntimeError, AttributeError, ImportError):
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    multicast = None
    with contextlib.suppress(RuntimeError, AttributeError):
        memory, kind = torch._C._distributed_c10d._SymmetricMemory, torch._C._autograd.DeviceType.CUDA
        multicast = memory.has_multicast_support(kind, 0)
    gpu = {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "processors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "cache_bytes": getattr(properties, "L2_cache_size", None),
        "driver": driver,
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "multicast": multicast,
    }
    return {"gpu": gpu}


def default_output(gpu: str) -> str:
    """bench/results/h200.json for an "NVIDIA H200". Outside a checkout, the file is in the current folder."""
    words = [word for word in gpu.lower().split() if word not in ("nvidia", "amd", "tesla")]
    folder = Path(__file__).resolve().parent.parent / "results"
    return str((folder if folder.is_dir() else Path()) / f"{'-'.join(words)}.json")


if __name__ == "__main__":
    sys.exit(main())
