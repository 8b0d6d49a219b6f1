"""Describes the run for the trace: the process, the options, the plan."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from torchring.gradients.layout import BucketLayout
from torchring.gradients.participants.recording import parameter_records
from torchring.linux import host_name, process_began_ns
from torchring.observe.recorder.records import ParameterRecord, RunInfo
from torchring.releases import installed_version
from torchring.world import World


def about(
    world: World,
    names: Mapping[torch.nn.Parameter, str],
    options: Mapping[str, str],
    layout: BucketLayout | None,
    wrapped_at: int,
) -> RunInfo:
    """Describe this rank, and the optimizer that has these parameters."""
    devices = {parameter.device for parameter in names}
    device = next((each for each in devices if each.type != "cpu"), torch.device("cpu"))
    found = RunInfo(
        rank=world.rank,
        size=world.size,
        local_rank=world.local_rank,
        local_size=world.local_size,
        node_rank=world.node_rank,
        host=host_name(),
        pid=os.getpid(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        num_cores=world.num_cores,
        num_threads=torch.get_num_threads(),
        process_began=process_began_ns(),
        wrapped=wrapped_at,
        reason="a world of one sends nothing",
        options=dict(options),
        parameters=tuple(_records(names.items())),
        versions={
            "torchring": installed_version("torchring") or "unknown",
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    )
    if layout is None:
        return found
    return replace(
        found,
        algorithm=layout.mover.algorithm,
        reason=layout.reason,
        overlap=layout.agreement.overlap,
        bucket_bytes=tuple(bucket.plan.num_bytes for bucket in layout.buckets),
        parameters=tuple(parameter_records(layout.buckets, layout.specs)),
    )


def _records(named: Iterable[tuple[torch.nn.Parameter, str]]) -> list[ParameterRecord]:
    return [
        ParameterRecord(name, p.numel() * p.element_size(), -1, str(p.dtype).removeprefix("torch."))
        for p, name in named
        if p.requires_grad
    ]
