"""Figures about training, for the tools where people look at them: TensorBoard, MLflow, Prometheus."""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torchring.default_world import default_world
from torchring.observe.recorder.records import decode
from torchring.observe.recorder.writer import recorder_of
from torchring.observer import Phase

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_NUM_STEPS: Final = 100
_PHASES: Final = {
    "input": Phase.INPUT,
    "forward": Phase.FORWARD,
    "backward": Phase.BACKWARD,
    "other": Phase.BETWEEN,
    "optimizer": Phase.OPTIMIZER,
}


def metrics() -> dict[str, float]:
    """Figures about this rank's training, by name. Sends nothing. Takes 2 to 15 ms, more with many buckets.

    Names are those of Prometheus, with the unit at the end. Seconds are means over the last 100 steps at most, and
    those of the phases add up to `torchring_step_seconds`. The first call begins to record, unless the job is traced:
    there are no seconds before the next step, and samples and bytes count from there on. Steps count since `init()`; in
    an elastic job, since ranks have changed. The noise scale is left out as long as it is unknown or not finite, see
    `Stats`; and so are errors of `compression`, see `Stats.compression_error`. Optimizers of all groups of ranks count.

        torchring_rank  torchring_world_size
        torchring_steps_total  torchring_samples_total  torchring_reduced_bytes_total
        torchring_batch_samples  torchring_noise_scale_samples
        torchring_1d_compression_error_ratio  torchring_embedding_compression_error_ratio
        torchring_matrix_compression_error_ratio
        torchring_steps_per_second  torchring_samples_per_second
        torchring_step_seconds  torchring_input_seconds  torchring_forward_seconds  torchring_backward_seconds
        torchring_exposed_communication_seconds  torchring_other_seconds  torchring_optimizer_seconds

    Forward is told apart from input only if `wrap` was given the model. `torchring report` says what the times mean.
    """
    world = default_world()
    recorder = recorder_of(world)
    found: dict[str, float] = {
        "rank": world.rank,
        "world_size": world.size,
        "steps_total": world.num_steps,
        "samples_total": recorder.num_samples_before,
        "reduced_bytes_total": recorder.num_bytes,
    }
    if recorder.noise_scale is not None and math.isfinite(recorder.noise_scale):
        found |= {"batch_samples": recorder.batch_size, "noise_scale_samples": recorder.noise_scale}
    for kind, share in recorder.compression_error.items():
        found[f"{kind.lower().replace('-', '')}_compression_error_ratio"] = share
    steps = [decode(step) for step in recorder.last_steps(_NUM_STEPS)]
    if steps:
        seconds = sum(step.end - step.begin for step in steps) / 1e9
        found["steps_per_second"] = len(steps) / seconds
        found["samples_per_second"] = sum(step.num_samples for step in steps) / seconds
        found["step_seconds"] = seconds / len(steps)
        exposed = sum(step.exposed_ns for step in steps) / 1e9 / len(steps)
        stalls = sum(step.stall_ns for step in steps) / 1e9 / len(steps)
        for name, phase in _PHASES.items():
            found[f"{name}_seconds"] = sum(step.ns_in(phase) for step in steps) / 1e9 / len(steps)
        found["backward_seconds"] -= stalls
        found["exposed_communication_seconds"] = exposed
    return {f"torchring_{name}": value for name, value in found.items()}


def log_to_tensorboard(writer: "SummaryWriter", step: int) -> None:
    """Write `metrics()` to TensorBoard.

    Args:
        writer: of torch.utils.tensorboard.
        step: number of the step.
    """
    for name, value in metrics().items():
        writer.add_scalar(name, value, step)


def log_to_mlflow(step: int) -> None:
    """Log `metrics()` to the active run of MLflow. Raises ModuleNotFoundError without MLflow."""
    import mlflow

    mlflow.log_metrics(metrics(), step=step)


def write_prometheus(path: str | os.PathLike[str]) -> None:
    """Write `metrics()` in Prometheus' text format, for the textfile collector of its node exporter.

    The file is replaced as a whole. Give each rank of a host a file of its own; the samples carry the rank as a label.

    Args:
        path: ends in ".prom", for the collector to find it.

    Raises:
        ModuleNotFoundError: prometheus_client is not installed.
        OSError: the file cannot be written.
    """
    from prometheus_client import CollectorRegistry, Counter, Gauge, write_to_textfile

    registry = CollectorRegistry()
    figures = metrics()
    rank = str(int(figures.pop("torchring_rank")))
    text = "torchring.metrics() says what this is."
    for name, value in figures.items():
        if name.endswith("_total"):
            Counter(name, text, ["rank"], registry=registry).labels(rank=rank).inc(value)
        else:
            Gauge(name, text, ["rank"], registry=registry).labels(rank=rank).set(value)
    write_to_textfile(str(Path(path)), registry)
