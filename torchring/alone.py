"""Warns, when a script ends, that its ranks have trained alone: several were launched, and nothing was wrapped.

This module is imported with torchring if torch was imported before, and otherwise when the script ends.
"""

import os
import sys
from typing import Final

import torch
import torch.distributed as dist

from torchring.errors import TopologyError
from torchring.participants.module_wrappers import MODULE_WRAPPERS, with_subclasses  # which counts from now on
from torchring.rendezvous.environment import JOB, parent_rank, read_environment

_imported_by: Final = os.getpid()


def say_if_alone(has_watched: bool) -> None:
    """At exit of rank 0: print a warning if the processes of this launch have trained, but never joined a world.

    `has_watched`: this module was imported before the script could build a DDP or FSDP.
    """
    world = sys.modules.get("torchring.default_world")
    if world is not None and world._process.pid is not None:
        return  # this process has joined a world
    if os.getpid() != _imported_by or getattr(sys, "last_value", None) is not None or not _has_built_graphs():
        return  # this process is a fork of one that may have joined a world, has failed, or has not trained
    # destroy_process_group() leaves this name set.
    has_group = dist.is_available() and (
        dist.is_initialized() or getattr(dist.distributed_c10d, "_default_pg_init_method", None) is not None
    )
    if has_group and (not has_watched or MODULE_WRAPPERS.num_built or _has_used_fully_shard()):
        return  # the script may reduce gradients without torchring
    try:
        launch = parent_rank(os.environ, os.getpid()) or read_environment(os.environ)
    except TopologyError:
        return
    if launch.size == 1 or launch.rank > 0 or launch.parent_pid is not None:
        return
    launcher = "torchring run" if JOB in os.environ else launch.launcher
    why = (
        "no optimizer was wrapped with torchring.wrap, and no DistributedDataParallel or FSDP was made. Unless the "
        "script reduces gradients by itself, each process has trained alone"
        if has_group
        else "it never met the others. No optimizer was wrapped with torchring.wrap and no collective was called, so "
        "each has trained alone"
    )
    print(f"torchring: {launcher} started this process as one of {launch.size}, but {why}", file=sys.stderr)


def _has_built_graphs() -> bool:
    """Whether this thread has built an autograd graph."""
    count = getattr(torch._C._autograd, "_get_sequence_nr", None)
    return count is None or count() > 0


def _has_used_fully_shard() -> bool:
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    # fully_shard() and replicate() make a class of each module's; replicate()'s own is none of a module.
    return kind is not None and any(issubclass(each, torch.nn.Module) for each in with_subclasses([kind]))
