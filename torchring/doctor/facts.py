"""What a rank can find out alone: versions, cores, memory, GPUs, network interfaces. Linux."""

from __future__ import annotations

import math
import mmap
import os
import platform
import shutil
import socket
import struct
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from torchring import placement
from torchring.devices.handover import describe_handover
from torchring.doctor.report import RankFacts
from torchring.linux import boot_id, create_memory, host_name
from torchring.releases import installed_version
from torchring.rendezvous.addresses import gloo_address, list_interfaces, resolve

_PACKAGES: Final = ("torchring", "torch", "triton", "numpy", "mpi4py")
_LISTENING: Final = "0A"  # in /proc/net/tcp
_CONTROL_GROUPS: Final = Path("/sys/fs/cgroup")


def gather(rank: int) -> RankFacts:
    """Facts about this process and its machine. Takes about 0.1 s, plus the first use of a GPU.

    What cannot be found out is left unknown.
    """
    interfaces, cores = list_interfaces(), os.sched_getaffinity(0)
    available, limit = memory_bytes()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return RankFacts(
        rank=rank,
        hostname=host_name(),
        uid=os.getuid(),
        boot=boot_id(),
        network_namespace=_read("/proc/self/ns/net"),
        versions={"python": platform.python_version(), **{name: installed_version(name) for name in _PACKAGES}},
        platform=f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        cores=sorted(cores),
        threads_per_core=len(cores) // placement.num_physical(cores),
        topology=_topology(),
        load=os.getloadavg()[0] / (os.cpu_count() or 1),
        core_limit=core_limit(),
        threads=torch.get_num_threads(),
        memory_available_bytes=available,
        memory_limit_bytes=limit,
        gpus=gpus,
        gpu_peers=[
            [i == j or torch.cuda.can_device_access_peer(i, j) for j in range(len(gpus))] for i in range(len(gpus))
        ],
        triton_lacks=triton_lacks(),
        handover=describe_handover(),
        memfd_error=try_memfd(),
        has_gloo=dist.is_gloo_available(),
        has_nccl=dist.is_nccl_available(),
        interfaces=interfaces,
        gloo_address=gloo_address(os.environ, interfaces, resolve(host_name())),
    )


def triton_lacks() -> list[str]:
    """See `RankFacts`. Triton builds a small extension of Python at its first launch."""
    lacks = []
    if "CC" not in os.environ and not any(map(shutil.which, ("clang", "gcc", "cc"))):
        lacks.append("a C compiler")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        lacks.append("the headers of Python (python3-dev)")
    return lacks


def listening_addresses(port: int) -> list[str]:
    """The addresses at which a process of this network namespace listens on the TCP port."""
    found = []
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in _read(file).splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            digits, _, its_port = local.partition(":")
            if state == _LISTENING and int(its_port, 16) == port:
                # Words of 32 bits, each written as a number in this processor's byte order.
                words = [struct.pack("=I", int(digits[i : i + 8], 16)) for i in range(0, len(digits), 8)]
                family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
                found.append(socket.inet_ntop(family, b"".join(words)))
    return found


def _topology() -> str:
    try:
        return placement.describe(os.sched_getaffinity(0))
    except (OSError, ValueError):
        return ""


def core_limit() -> float | None:
    """Processor time that control groups grant to this process, in cores. None without a limit."""
    limits = []
    for folder in _control_groups():
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if quota.isdecimal():
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def memory_bytes() -> tuple[int, int | None]:
    """(bytes that this process may still take, the limit of its control groups in bytes or None)."""
    fields = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    available = int(fields.get("MemAvailable", "0 kB").split()[0]) * 1024
    limits: list[int] = []
    for folder in _control_groups():
        limit = _read(folder / "memory.max")
        if limit.isdecimal():
            limits.append(int(limit))
            # The page cache counts as used, but the kernel gives it back when memory is needed.
            statistics = dict(line.split()[:2] for line in _read(folder / "memory.stat").splitlines())
            used = int(_read(folder / "memory.current") or 0) - int(statistics.get("inactive_file", "0"))
            available = min(available, max(0, int(limit) - used))
    return available, min(limits, default=None)


def try_memfd() -> str | None:
    """Why memfd_create or mapping its memory fails here. None if both work."""
    try:
        descriptor = create_memory("torchring-doctor", mmap.PAGESIZE)
        try:
            mmap.mmap(descriptor, mmap.PAGESIZE).close()
        finally:
            os.close(descriptor)
    except OSError as error:
        return str(error)
    return None


def usable_cores(ranks: Sequence[RankFacts]) -> int:
    """Number of cores that ranks of one machine may use together, within the limits of control groups."""
    together = len({core for rank in ranks for core in rank.cores})
    limits = [rank.core_limit for rank in ranks if rank.core_limit is not None]
    return min([together, *(max(1, math.ceil(limit)) for limit in limits)])


def _control_groups() -> list[Path]:
    """The folders of this process's control group and the groups around it, as far as this process sees them."""
    path = next((line[3:] for line in _read("/proc/self/cgroup").splitlines() if line.startswith("0::")), "/")
    folder = _CONTROL_GROUPS / path.lstrip("/")
    # In a container, the path may exist on the host only. The container's own group is then at the top.
    return [part for part in (folder, *folder.parents) if part.is_relative_to(_CONTROL_GROUPS) and part.is_dir()]


def _read(file: str | Path) -> str:
    """What a file or a link of the kernel's says; "" if there is none."""
    try:
        return os.readlink(file) if os.path.islink(file) else Path(file).read_text().strip()
    except OSError:
        return ""
