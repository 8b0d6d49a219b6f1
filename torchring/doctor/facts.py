"""What a rank can find out alone: versions, cores, GPUs, network interfaces. Linux."""

import contextlib
import os
import platform
import shutil
import socket
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from torchring import placement
from torchring.devices.handover import describe_handover
from torchring.doctor.report import RankFacts
from torchring.linux import boot_id, host_name
from torchring.releases import PRIVATE_NAMES, installed_version, missing_names
from torchring.rendezvous.addresses import gloo_address, list_interfaces, resolve

_PACKAGES: Final = ("torchring", "torch", "triton", "numpy", "mpi4py")
_CONTROL_GROUPS: Final = Path("/sys/fs/cgroup")


def gather(rank: int) -> RankFacts:
    """Facts about this process and its machine. Takes about 0.1 s, plus the first use of a GPU.

    What cannot be found out is left unknown.
    """
    interfaces, cores = list_interfaces(), os.sched_getaffinity(0)
    gpus = range(torch.cuda.device_count())
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
        load=os.getloadavg()[0] / (os.cpu_count() or 1),
        core_limit=core_limit(),
        threads=torch.get_num_threads(),
        gpus=[torch.cuda.get_device_name(i) for i in gpus],
        gpu_peers=[[i == j or torch.cuda.can_device_access_peer(i, j) for j in gpus] for i in gpus],
        torch_lacks=torch_lacks(),
        triton_lacks=triton_lacks(),
        handover=describe_handover(),
        has_gloo=dist.is_gloo_available(),
        has_nccl=dist.is_nccl_available(),
        interfaces=interfaces,
        gloo_address=gloo_address(os.environ, interfaces, resolve(host_name())),
    )


def torch_lacks() -> list[str]:
    """What does not work with this PyTorch, and the private names that it lacks."""
    asked = [what for what in PRIVATE_NAMES if what != "GPUs" or torch.version.cuda or torch.version.hip]
    return [f"{what} (torch.{', torch.'.join(missing)})" for what in asked if (missing := missing_names(what))]


def triton_lacks() -> list[str]:
    """See `RankFacts`. Triton builds a small extension of Python at its first launch."""
    lacks = []
    if "CC" not in os.environ and not any(map(shutil.which, ("clang", "gcc", "cc"))):
        lacks.append("C compiler")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        lacks.append("headers of Python")
    return lacks


def listening(addresses: Sequence[str], port: int) -> list[str]:
    """Those addresses of this machine at which a process listens on the TCP port."""
    found = []
    for address in addresses:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1.0):
            found.append(address)
    return found


def core_limit() -> float | None:
    """Processor time that control groups grant to this process, in cores. None without a limit."""
    limits = [_read(folder / "cpu.max").partition(" ") for folder in _control_groups()]
    return min((int(quota) / int(period) for quota, _, period in limits if quota.isdecimal()), default=None)


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
