"""Horovod's API on torchring's engine: `import torchring.horovod as hvd` in place of `import horovod.torch as hvd`.

All public names of horovod.torch are here, with Horovod's arguments, results and errors. docs/guides/horovod.md says
what is different. Scripts that cannot be edited start with `torchring run --horovod`.

    optimizer.py            DistributedOptimizer
    functions.py            parameters, optimizer state and objects from one rank to all
    mpi_ops.py              collectives, matched by name, and their gradients
    calls.py                their forms: plain, in place, started
    context.py              init, ranks and sizes, process sets, timeline
    elastic/                training that goes on after a failure, from the last commit
    engine.py               from a call to its result
    execution.py            what collectives compute
    negotiation.py          what is ready on all ranks; plain data
    bells.py                how ranks wake each other
    settings.py             HOROVOD_* variables
    aliases.py, runner.py   `import horovod` in scripts that are not edited, and horovod.run
"""

from torchring.horovod import context, elastic, functions, mpi_ops
from torchring.horovod.compression import Compression
from torchring.horovod.context import *  # noqa: F403
from torchring.horovod.exceptions import HorovodInternalError
from torchring.horovod.functions import *  # noqa: F403
from torchring.horovod.mpi_ops import *  # noqa: F403
from torchring.horovod.optimizer import DistributedOptimizer
from torchring.horovod.runner import run
from torchring.horovod.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Compression", "DistributedOptimizer", "HorovodInternalError", "SyncBatchNorm", "elastic", "run",
    *context.__all__, *functions.__all__, *mpi_ops.__all__,
]  # fmt: skip
