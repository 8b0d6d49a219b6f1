"""What a rank can find out alone: versions, cores, memory, GPUs, network interfaces, MPI. Linux."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import mmap
import os
import platform
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from torchring.doctor.report import RankFacts
from torchring.linux import boot_id, create_memory
from torchring.rendezvous.addresses import gloo_address, list_interfaces, resolve

_PACKAGES: Final = ("torchring", "torch", "triton", "numpy", "mpi4py")
_LISTENING: Final = "0A"  # in /proc/net/tcp
_UNLIMITED_BYTES: Final = 1 << 60  # control groups of the first version write a number close to 2**63 for "none"
_MPI_SECONDS: Final = 20.0
# In a process of its own: a library that does not fit may crash, and one that is initialised twice will. This call
# is allowed without MPI_Init.
_ASK_MPI: Final = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(json.dumps(MPI.Get_library_version().strip(chr(0) + " \\n")))
"""


def gather(rank: int) -> RankFacts:
    """Takes about 0.1 s, plus what the first touch of a GPU takes. Never fails: what cannot be found out is unknown."""
    interfaces = list_interfaces()
    available, limit = memory_bytes()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return RankFacts(
        rank=rank,
        hostname=socket.gethostname(),
        pid=os.getpid(),
        uid=os.getuid(),
        boot=boot_id(),
        network_namespace=_link("/proc/self/ns/net"),
        versions={"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        platform=f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        cores=sorted(os.sched_getaffinity(0)),
        core_limit=core_limit(),
        threads=torch.get_num_threads(),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        memory_available_bytes=available,
        memory_limit_bytes=limit,
        gpus=gpus,
        gpu_peers=[
            [i == j or torch.cuda.can_device_access_peer(i, j) for j in range(len(gpus))] for i in range(len(gpus))
        ],
        memfd_error=try_memfd(),
        has_gloo=dist.is_gloo_available(),
        has_nccl=dist.is_nccl_available(),
        mpi=ask_mpi(),
        interfaces=interfaces,
        gloo_interface=os.environ.get("GLOO_SOCKET_IFNAME"),
        gloo_address=gloo_address(os.environ, interfaces, resolve(socket.gethostname())),
    )


def listening_addresses(port: int) -> list[str]:
    """Where some process on this machine (in this network namespace) listens at the TCP port."""
    found = []
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in _read(file).splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            digits, _, its_port = local.partition(":")
            if state == _LISTENING and int(its_port, 16) == port:
                # Words of 32 bits, each written as a number of this processor's.
                words = [struct.pack("=I", int(digits[i : i + 8], 16)) for i in range(0, len(digits), 8)]
                family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
                found.append(socket.inet_ntop(family, b"".join(words)))
    return found


def core_limit() -> float | None:
    """Processor time that this process's control group, or one above it, grants: cores, None without a limit."""
    limits = []
    for folder in _control_groups("cpu"):
        quota, period = (_read(folder / "cpu.max").split() or ["max", "1"])[:2]
        if not (folder / "cpu.max").exists():
            quota, period = _read(folder / "cpu.cfs_quota_us") or "-1", _read(folder / "cpu.cfs_period_us") or "1"
        if quota not in ("max", "-1"):
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def memory_bytes() -> tuple[int, int | None]:
    """(what this process may still take, the limit of its control group or None)."""
    fields = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    available = int(fields.get("MemAvailable", "0 kB").split()[0]) * 1024
    limits: list[int] = []
    for folder in _control_groups("memory"):
        for most, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit = _read(folder / most)
            if limit.isdecimal() and int(limit) < _UNLIMITED_BYTES:
                limits.append(int(limit))
                # The page cache counts as used, and is given back when needed.
                statistics = dict(line.split()[:2] for line in _read(folder / "memory.stat").splitlines())
                cache = int(statistics.get("inactive_file", statistics.get("total_inactive_file", "0")))
                available = min(available, max(0, int(limit) - int(_read(folder / used) or 0) + cache))
    return available, min(limits, default=None)


def try_memfd() -> str | None:
    """Why memory without a name in a file system cannot be made and mapped here; None if it can."""
    try:
        descriptor = create_memory("torchring-doctor", mmap.PAGESIZE)
        try:
            mmap.mmap(descriptor, mmap.PAGESIZE).close()
        finally:
            os.close(descriptor)
    except OSError as error:
        return str(error)
    return None


def ask_mpi() -> str | None:
    """What the MPI library calls itself; see `RankFacts`."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    command = [sys.executable, "-c", _ASK_MPI]
    # As if no launcher had started it: this process takes part in no MPI job.
    beginnings = ("OMPI_", "PMIX_", "PMI_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(beginnings)}
    try:
        ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_MPI_SECONDS, check=True)
        version: str = json.loads(ran.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return ""
    return version.split(", package")[0].splitlines()[0]


def usable_cores(ranks: Sequence[RankFacts]) -> int:
    """Cores that ranks of one machine may use together, a control group's limit included."""
    together = len({core for rank in ranks for core in rank.cores})
    limits = [rank.core_limit for rank in ranks if rank.core_limit is not None]
    return min([together, *(max(1, math.ceil(limit)) for limit in limits)])


def _control_groups(controller: str) -> list[Path]:
    """Folders of this process's control group and those around it, of either version, as far as they can be seen."""
    found: list[Path] = []
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = Path("/sys/fs/cgroup", *([controller] if controllers else []))
        folder = top / path.lstrip("/")
        # In a container the path may be one that only the host has; the container's own group is then at the top.
        found += [part for part in (folder, *folder.parents) if part.is_relative_to(top)]
    return [folder for folder in found if folder.is_dir()]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read(file: str | Path) -> str:
    return _or_nothing(lambda: Path(file).read_text().strip())


def _link(file: str) -> str:
    return _or_nothing(lambda: os.readlink(file))


def _or_nothing(read: Callable[[], str]) -> str:
    try:
        return read()
    except OSError:
        return ""
