"""torchring: one line makes a PyTorch script train data-parallel.

    optimizer = torchring.wrap(torch.optim.AdamW(model.parameters()), model)

Start the script with `torchring run -np 2 script.py` or torchrun. To read the code, begin with `optimizer.py`, then go
through `gradients/`. Imports go one way: a folder imports only from the folders below it.

    lightning.py, transformers.py, accelerate.py, spark/, ray/   frameworks, imported only when used
    horovod/        the API of horovod.torch
    elastic/        training that survives lost ranks, and takes new ones in
    data/           samplers and iterable data sets that ranks share, and that can stop anywhere
    joining.py      ranks with more data than others     cli.py, launch/, doctor/, report/, manifest/   the commands
    monitoring.py   figures for TensorBoard and others   compiled.py                a backend for torch.compile
    local_steps/    ranks that step alone, and average every H steps
    recipes/        optimizers, learning rates and metrics for large batches
    optimizer.py    wrap                                  connection.py              its place among the ranks
    norms.py        SyncBatchNorm                         functions.py, adasum.py    all_reduce, ... for scripts
    initial_state.py   all ranks start alike              broadcasts.py              what rooms send
    gradients/      from autograd to the optimizer's step
    compression/    fewer bytes between hosts
    devices/        the same on GPUs: streams, memory that GPUs share, all-reduces
    allreduce/      sums a bucket over ranks
    participants/   what else takes part in a reduction: buffers, sparse gradients, comparisons of ranks
    collectives/    what ranks tell each other beside gradients
    transport/      messages between hosts                accelerators.py            devices with streams
    default_world.py, world.py   which ranks train together
    observe/        where the time of a step goes, and who keeps the others waiting
    memory/         memory that the ranks of a host share
    alone.py        warns of ranks that never met
    rendezvous/     where ranks find each other           kernels/                   Triton kernels

Words that are used throughout, beside those of PyTorch and MPI:

    wire        the buffer in which the gradients of one bucket are reduced, in the dtype that travels
    slot        a parameter's place in a bucket
    plan        which parameters share a bucket, and at which offset: plain data, equal on all ranks
    all-reduce  reduces wires by one algorithm (direct, ring, hierarchical, native)
    reduction   all buckets of an optimizer, reduced once
    host        a machine, or that part of one whose ranks can share memory
    channel     signals between the ranks of a host
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchring import data as data
    from torchring import elastic as elastic
    from torchring import recipes as recipes
    from torchring.compiled import compile_backend
    from torchring.compression.ddp_hook import ddp_hook
    from torchring.default_world import (
        device,
        init,
        is_initialized,
        local_rank,
        local_size,
        node_rank,
        num_nodes,
        rank,
        shutdown,
        size,
    )
    from torchring.errors import (
        GradientError,
        PeerLostError,
        PeerTimeoutError,
        PlanMismatchError,
        RingError,
        TopologyError,
    )
    from torchring.functions import (
        Work,
        all_gather,
        all_gather_object,
        all_reduce,
        all_to_all,
        barrier,
        broadcast,
        broadcast_object,
        reduce_scatter,
    )
    from torchring.gradients.contract import Stats
    from torchring.initial_state import broadcast_optimizer_state, broadcast_parameters
    from torchring.joining import join
    from torchring.local_steps.local_sgd import DiLoCo, LocalSGD
    from torchring.monitoring import metrics
    from torchring.norms import SyncBatchNorm, convert_sync_batchnorm
    from torchring.observe.recorder.writer import trace
    from torchring.optimizer import DistributedOptimizer, wrap

__version__ = "0.1.0"

__all__ = [
    "DiLoCo", "DistributedOptimizer", "GradientError", "LocalSGD", "PeerLostError", "PeerTimeoutError",
    "PlanMismatchError", "RingError", "Stats", "SyncBatchNorm", "TopologyError", "Work", "all_gather",
    "all_gather_object", "all_reduce", "all_to_all", "barrier", "broadcast", "broadcast_object",
    "broadcast_optimizer_state", "broadcast_parameters", "compile_backend", "convert_sync_batchnorm", "ddp_hook",
    "device", "init", "is_initialized", "join", "local_rank", "local_size", "metrics", "node_rank", "num_nodes", "rank",
    "reduce_scatter", "shutdown", "size", "trace", "wrap",
]  # fmt: skip

if not TYPE_CHECKING:  # else any misspelt name would be of type Any
    import atexit
    import importlib
    import sys

    _has_torch = sys.modules.get("torch") is not None
    if _has_torch:
        importlib.import_module("torchring.alone")  # counts modules that reduce gradients

    @atexit.register
    def _say_if_alone():
        if sys.modules.get("torch") is not None:
            importlib.import_module("torchring.alone").say_if_alone(has_watched=_has_torch)

    # Imported when first used: they import torch, which takes seconds that `torchring --version` need not wait for.
    _HOMES = {
        "functions": "Work all_gather all_gather_object all_reduce all_to_all barrier broadcast "
        "broadcast_object reduce_scatter",
        "compiled": "compile_backend",
        "compression.ddp_hook": "ddp_hook",
        "default_world": "device init is_initialized local_rank local_size node_rank num_nodes rank shutdown size",
        "errors": "GradientError PeerLostError PeerTimeoutError PlanMismatchError RingError TopologyError",
        "gradients.contract": "Stats",
        "joining": "join",
        "local_steps.local_sgd": "DiLoCo LocalSGD",
        "monitoring": "metrics",
        "norms": "SyncBatchNorm convert_sync_batchnorm",
        "optimizer": "DistributedOptimizer wrap",
        "observe.recorder.writer": "trace",
        "initial_state": "broadcast_optimizer_state broadcast_parameters",
    }
    _HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

    def __getattr__(name):
        try:
            if name in _HOME_OF:
                found = getattr(importlib.import_module(f"torchring.{_HOME_OF[name]}"), name)
                globals()[name] = found
                return found
            if not name.startswith("_"):
                return importlib.import_module(f"torchring.{name}")
        except ModuleNotFoundError as error:
            if error.name in ("torch", "numpy"):
                raise importlib.import_module("torchring.requirements").lacking(error.name) from None
            if error.name != f"torchring.{name}":
                raise
        same = [own for own in __all__ if own.replace("_", "") == name]  # as Horovod spells it
        hint = f"; it has {same[0]}(), and Horovod's names are in torchring.horovod" if same else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")

    def __dir__():
        return sorted({*globals(), *__all__})
