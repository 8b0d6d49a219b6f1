"""Ray Train: `TorchTrainer(loop, torch_config=TorchringConfig())`.

Ray sets all that torchring needs to find the other workers, so a loop works without TorchringConfig, too, if it calls
`prepare_model(model, parallel_strategy=None)` or leaves `prepare_model` out.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray.train
from ray.train.torch import TorchConfig, prepare_model
from ray.train.torch.config import TorchConfigContextManager

from torchring.default_world import leave
from torchring.errors import TopologyError
from torchring.meeting import meetings


@dataclass
class TorchringConfig(TorchConfig):
    """`ray.train.torch.TorchConfig` for training loops that call `torchring.wrap`.

    `ray.train.torch.prepare_model(model)` adds no DistributedDataParallel. A loop that ends on one of several workers
    without having used torchring raises TopologyError: each worker has trained alone. Workers leave the world when
    their loop ends. Its fields are those of TorchConfig, for the process group that Ray makes.
    """

    @property
    def train_func_context(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        return _loop


@contextlib.contextmanager
def _loop() -> Iterator[None]:
    """Around the training loop, in the worker's thread for it."""
    prepare: Any = prepare_model
    defaults = prepare.__defaults__
    # The function itself, because the loop may have imported it by any name.
    prepare.__defaults__ = tuple(None if value == "ddp" else value for value in defaults)
    try:
        with TorchConfigContextManager():
            yield
    finally:
        prepare.__defaults__ = defaults
    # Only where the loop has not failed: otherwise, Ray ends the other workers, so that only the cause is reported.
    num_workers = ray.train.get_context().get_world_size()
    if num_workers > 1 and not meetings.num_worlds:
        raise TopologyError(
            f"the training loop has ended without torchring.wrap, so each of the {num_workers} workers has trained "
            "alone: with TorchringConfig, prepare_model adds no DistributedDataParallel. Wrap the optimizer, or leave "
            "torch_config out"
        )
    leave("its training loop had ended")
