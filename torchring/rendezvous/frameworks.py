"""Processes that train alone, although there is a job of several: tasks of Spark, workers of Ray, scripts of Slurm."""

import logging
import os
import sys
from typing import Any

from torchring.errors import TopologyError
from torchring.rendezvous.environment import CHOICE

_logger = logging.getLogger("torchring")


def refuse_lone_tasks() -> None:
    """Raise TopologyError in a task of a Spark barrier stage. Log a warning in another task of Spark, in a worker of
    Ray, and in a batch script of Slurm whose job has several tasks.

    Call this in a process that no launcher has started. The tasks of a barrier stage run together, so they are meant to
    be ranks. The others may also be meant to train alone.
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
        _warn(f"this task of Spark, of partition {task.partitionId()}, trains alone", "in several tasks", "spark.run")
    if ray is not None and ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
        _warn("this worker of Ray trains alone", "on several workers", "ray.run or ray.train.torch.TorchTrainer")
    if (num_tasks := os.environ.get("SLURM_NTASKS", "1")) != "1":
        _logger.warning(
            f"this process trains alone, although its Slurm job has {num_tasks} tasks (SLURM_NTASKS): Slurm runs a "
            "batch script once. To train on all tasks together, start Python with srun, as in `srun python train.py`. "
            f"To turn this warning off, set {CHOICE}=none"
        )


def _warn(what: str, where: str, how: str) -> None:
    _logger.warning(
        f"{what}, because RANK and WORLD_SIZE are not set. To train {where} together, start the function with "
        f"torchring.{how}. To turn this warning off, set {CHOICE}=none"
    )
