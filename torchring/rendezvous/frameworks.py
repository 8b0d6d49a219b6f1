"""Worker processes of Spark and Ray: these frameworks start several of them for one job, and set no variables."""

from __future__ import annotations

import logging
import sys
from typing import Any

from torchring.errors import TopologyError
from torchring.rendezvous.environment import CHOICE

_logger = logging.getLogger("torchring")


def refuse_lone_tasks() -> None:
    """Raise TopologyError in a task of a Spark barrier stage, and log a warning in a worker of Ray.

    Call this in a process that no launcher has started. The tasks of a barrier stage run together, so they are meant to
    be ranks. A task or actor of Ray may also be meant to train alone.
    """
    spark: Any = sys.modules.get("pyspark")
    ray: Any = sys.modules.get("ray")
    task = None if spark is None else spark.TaskContext.get()
    if task is not None and isinstance(task, spark.BarrierTaskContext) and (num := len(task.getTaskInfos())) > 1:
        raise TopologyError(
            f"this is task {task.partitionId()} of {num} of a Spark barrier stage, but RANK and WORLD_SIZE are not "
            "set, so each task would train alone. Start the function with pyspark.ml.torch.distributor's "
            "TorchDistributor, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each task. If each task is to "
            f"train alone, set {CHOICE}=none"
        )
    if ray is not None and ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
        _logger.warning(
            "this worker of Ray trains alone, because RANK and WORLD_SIZE are not set. To train on several workers "
            "together, start the function with torchring.ray.run or ray.train.torch.TorchTrainer. To turn this warning "
            f"off, set {CHOICE}=none"
        )
