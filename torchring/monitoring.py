"""Figures about training, for the tools where people look at them."""

from __future__ import annotations

import math
from typing import Final

from torchring.default_world import default_world
from torchring.observe.recorder.records import decode
from torchring.observe.recorder.writer import recorder_of
from torchring.observer import Phase

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
    `Stats`.

        torchring_rank  torchring_world_size
        torchring_steps_total  torchring_samples_total  torchring_reduced_bytes_total
        torchring_batch_samples  torchring_noise_scale_samples
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
        "steps_total": world.observer.num_steps,
        "samples_total": recorder.num_samples_before,
        "reduced_bytes_total": recorder.num_bytes,
    }
    if recorder.noise_scale is not None and math.isfinite(recorder.noise_scale):
        found |= {"batch_samples": recorder.batch_size, "noise_scale_samples": recorder.noise_scale}
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
