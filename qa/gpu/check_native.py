"""Figures: NCCL alone with one rank, in memory that is registered with it. See `qa.gpu.check`.

It runs in a process of its own, because abort, exit and what they print are looked at, too.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist

from qa.gpu.check import Figure
from torchring.bench import measure
from torchring.devices import nccl
from torchring.devices.cuda import Backend, CudaAccelerator
from torchring.devices.engines import Engine, all_reduce

_SPECS: Final = [(1000, torch.float32), (5_000_003, torch.float32), (5_000_003, torch.bfloat16)]
_NUM_GENERATIONS: Final = 5
_COMPLAINT: Final = "destroy_process_group"


def figures() -> Iterator[Figure]:
    found, errors = _in_a_process()
    yield Figure(f"registering wires with NCCL {found['nccl']} took", found["registering_s"], "s", 1.0)
    yield Figure("sums of one rank that are no copies", found["wrong"], "wires", 0)
    names = ", ".join(found["kernels"]) or "none"
    yield Figure(f"kernels behind NCCL but the guard: {names}", len(found["kernels"]), "", 0)
    yield Figure("kernels that guard the wires", found["guards"], "", 1, at_least=True)
    yield Figure(f"memory after {_NUM_GENERATIONS} sets of wires", found["growth_mib"], "MiB", 2.0)
    yield Figure("abort returns after", found["abort_s"], "s", 5.0)
    yield Figure("wires that an abort leaves without NaN", found["not_poisoned"], "", 0)
    yield Figure("exit code", abs(found["code"]), "", 0)
    yield Figure(f"lines of {_COMPLAINT} at the end", errors.count(_COMPLAINT), "", 0)


def _in_a_process() -> tuple[dict[str, Any], str]:
    """What it found, and what it printed to stderr."""
    command = [sys.executable, "-m", "qa.gpu.check_native"]
    environment = os.environ | measure.search_path()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"it ended with exit code {done.returncode}: {done.stderr[-500:]}")
    return json.loads(lines[-1]) | {"code": done.returncode}, done.stderr


def _connected() -> tuple[CudaAccelerator, Backend]:
    accelerator = CudaAccelerator(torch.device("cuda", 0))
    backend = accelerator.open_backend(dist.HashStore(), 0, 1, 30.0)
    all_reduce(backend, torch.zeros(1, device=accelerator.device))
    accelerator.synchronize()
    return accelerator, backend


def engine() -> dict[str, Any]:
    accelerator, backend = _connected()
    with mock.patch.object(nccl, "_LEAST_NCCL", 0):  # no other rank can be lost, so an older one will do
        group = accelerator.register(0, backend)
    native = Engine("native", group, accelerator, 1, backend)
    free: list[int] = []
    began = time.perf_counter()
    wires = native.open_wires(_SPECS)
    registering = time.perf_counter() - began
    for _ in range(_NUM_GENERATIONS):
        native.release(wires)
        del wires
        wires = native.open_wires(_SPECS)
        free.append(torch.cuda.mem_get_info(accelerator.device)[0])
    guard = native.guard(wires)
    assert guard is not None

    def reduce() -> None:
        for wire in wires:
            native.launch(wire)
        guard()

    patterns = [torch.arange(wire.buffer.numel(), device=accelerator.device).remainder_(251) for wire in wires]
    for wire, pattern in zip(wires, patterns, strict=True):
        wire.buffer.copy_(pattern)
    reduce()  # compiles
    accelerator.synchronize()
    kernels = _kernels_of(reduce, accelerator)
    wrong = sum(
        not torch.equal(wire.buffer, pattern.to(wire.buffer.dtype))
        for wire, pattern in zip(wires, patterns, strict=True)
    )
    began = time.perf_counter()
    native.abort()
    abort = time.perf_counter() - began
    guard()
    accelerator.synchronize()
    native.close()
    return {
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        "registering_s": registering,
        "growth_mib": (free[0] - free[-1]) / 2**20,
        "wrong": wrong,
        "guards": sum("_guard_kernel" in name for name in kernels),
        "kernels": [name for name in kernels if "_guard_kernel" not in name and not name.startswith("nccl")],
        "abort_s": abort,
        "not_poisoned": sum(not bool(wire.buffer.isnan().all()) for wire in wires),
    }


def _kernels_of(work: Any, accelerator: CudaAccelerator) -> list[str]:
    """Names of the kernels that it launches. A copy is none: NCCL copies what one rank reduces."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        work()
        accelerator.synchronize()
    events = [event for event in profiler.events() or () if event.device_type.name == "CUDA"]
    return [event.name for event in events if not event.name.startswith(("Memcpy", "Memset"))]


if __name__ == "__main__":
    print(json.dumps(engine()), flush=True)
