"""Which parts of the library there are: horovod.common.util."""

import importlib.util

import torch
import torch.distributed as dist

from torchring import default_world as worlds

__all__ = [
    "ccl_built", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "rocm_built",
]  # fmt: skip


def mpi_threads_supported() -> bool:
    """True if several threads may call MPI. ValueError unless mpirun has started this process."""
    if not mpi_enabled():
        raise ValueError("MPI is not in use: mpirun has not started this process")
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def mpi_enabled() -> bool:
    """True if mpirun has started this process."""
    return worlds.launcher().startswith(("mpirun", "mpiexec")) and mpi_built()


def mpi_built(verbose: bool = False) -> bool:
    """True if mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def gloo_enabled() -> bool:
    """True: ranks never need MPI."""
    return True


def gloo_built(verbose: bool = False) -> bool:
    """True if this PyTorch has Gloo."""
    return bool(dist.is_available() and dist.is_gloo_available())


def nccl_built(verbose: bool = False) -> int:
    """The version code of PyTorch's NCCL, such as 22703; 0 without NCCL."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return 0
    major, minor, patch = (*torch.cuda.nccl.version(), 0, 0)[:3]  # type: ignore[no-untyped-call]
    return int(major * 10000 + minor * 100 + patch)


def cuda_built() -> bool:
    """True if this PyTorch has CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """True if this PyTorch has ROCm."""
    return torch.version.hip is not None


def ddl_built(verbose: bool = False) -> bool:
    """False: torchring has no support for IBM's DDL and Intel's oneCCL."""
    return False


ccl_built = ddl_built
