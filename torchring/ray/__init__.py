"""Training on a Ray cluster: `run` calls a function on several workers, and `TorchringConfig` is for Ray Train.

job.py     run
actor.py   the actor that is a rank
train.py   TorchringConfig, imported when used: ray.train takes seconds
"""

from typing import TYPE_CHECKING, Any

from torchring.requirements import check_release

check_release("ray", (2, 55), (2, 61), "ray")

from torchring.ray.job import run  # noqa: E402 - imports ray

if TYPE_CHECKING:
    from torchring.ray.train import TorchringConfig

__all__ = ["TorchringConfig", "run"]


def __getattr__(name: str) -> Any:
    if name == "TorchringConfig":
        from torchring.ray.train import TorchringConfig

        return TorchringConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
