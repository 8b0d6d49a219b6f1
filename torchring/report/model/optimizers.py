"""A job with several optimizers, such as a GAN: which of them has which buckets."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Final

from torchring.observe.recorder.records import OptimizerRecord, ParameterRecord, RunInfo
from torchring.report.model.merge import Job
from torchring.report.model.timing import Array, Steps

_ALIKE: Final = 0.01  # compression makes all buckets smaller, by the same factor


def of_optimizer(job: Job, timing: Steps) -> Job:
    """The same job, with the parameters of the optimizer whose buckets these are, and when their gradients came."""
    numbers = set(timing.numbers[timing.has_buckets].tolist())
    traces = []
    for trace in job.traces:
        arrivals = tuple(each for each in trace.arrivals if each.step in numbers)
        traces.append(dataclasses.replace(trace, run_info=_run_info_of(trace.run_info, timing), arrivals=arrivals))
    return dataclasses.replace(job, traces=tuple(traces))


def _run_info_of(run_info: RunInfo, timing: Steps) -> RunInfo:
    """The same facts, with the parameters of each reduction, one reduction after the other."""
    parameters: list[ParameterRecord] = []
    for first, stop in itertools.pairwise([*timing.reductions, len(timing.bucket_indices)]):
        found = _find(run_info, timing.bucket_bytes[first:stop])
        parameters += (dataclasses.replace(p, bucket=p.bucket + first) for p in found.parameters if p.bucket >= 0)
    bucket_bytes = tuple(map(int, timing.bucket_bytes))
    return dataclasses.replace(run_info, bucket_bytes=bucket_bytes, parameters=tuple(parameters))


def _find(run_info: RunInfo, sent: Array) -> OptimizerRecord:
    """The optimizer with buckets of these sizes; an optimizer without parameters if none has them."""
    all_of_them = (OptimizerRecord(run_info.bucket_bytes, run_info.parameters), *run_info.others)
    found = [(factor, each) for each in all_of_them if (factor := _factor(each.bucket_bytes, sent)) is not None]
    if not found:
        return OptimizerRecord((), ())
    return min(found, key=lambda pair: abs(math.log(pair[0])))[1]


def _factor(bucket_bytes: tuple[int, ...], sent: Array) -> float | None:
    """Factor by which the buckets of a step are larger; None if they are others. Buffers of the model may follow."""
    if not 0 < len(bucket_bytes) <= len(sent) <= len(bucket_bytes) + 1 or min(bucket_bytes) <= 0:
        return None
    factors = sorted(float(a / b) for a, b in zip(sent, bucket_bytes, strict=False))
    return factors[0] if 0 < factors[0] >= (1.0 - _ALIKE) * factors[-1] else None
