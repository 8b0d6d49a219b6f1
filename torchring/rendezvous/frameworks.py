"""Worker processes of Spark and Ray: these frameworks start several of them for one job, and set no variables."""

from __future__ import annotations

import logging
import sys
from typing import Any

from torchring.errors import TopologyError
from torchring.rendezvous.environment import CHOICE

_logger = logging.getLogger("torchring")


def refuse_lone_tasks() -> None:
    """Raise TopologyError in a task of a Spark barrier stage. Log a warning in another task of Spark or worker of Ray.

    Call this in a process that no launcher has started. The tasks of a barrier stage run together, so they are meant to
    be ranks. Another task of Spark, or a task or actor of Ray, may also be meant to train alone.
    """
    spark: Any = sys.modules.get("pyspark")
    ray: Any = sys.modules.get("ray")
    task: Any = None if spark is None else spark.TaskContext.get()
    is_in_barrier = task is not None and isinstance(task, spark.BarrierTaskContext)
    if is_in_barrier and (num := len(task.getTaskInfos())) > 1:
        raise TopologyError(
            f"this is task {task.partitionId()} of {num} of a Spark barrier stage, but RANK and WORLD_SIZE are not "
            "set, so each task would train alone. Start the function with torchring.spark.run, which sets them. To "
            f"let each task train alone, set {CHOICE}=none"
        )
    if task is not None and not is_in_barrier:
        _logger.warning(
            f"this task of Spark, of partition {task.partitionId()}, trains alone, because RANK and WORLD_SIZE are not "
            "set. To train in several tasks together, start the function with torchring.spark.run. To turn this "
            f"warning off, set {CHOICE}=none"
        )
    if ray is not None and ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
        _logger.warning(
            "this worker of Ray trains alone, because RANK and WORLD_SIZE are not set. To train on several workers "
            "together, start the function with ray.train.torch.TorchTrainer. To turn this warning off, set "
            f"{CHOICE}=none"
        )
