"""Ranks as tasks of Spark: a function that trains, started from the driver in barrier mode.

losses = torchring.spark.run(train, args=(10,), num_proc=4)

barrier.py       run, fit: on the driver
barrier_task.py  a task becomes a rank, and stops being one
reports.py       what the ranks tell the driver: output, tracebacks, and by their silence that they are dead
horovod.py       HorovodRunner, and run as horovod.spark has it
"""

import importlib
import importlib.util

from torchring.requirements import check_release

# Clusters have pyspark on PYTHONPATH, not from pip.
_version = importlib.import_module("pyspark").__version__ if importlib.util.find_spec("pyspark") else None
check_release("pyspark", (3, 5), (4, 4), "spark", _version)

from torchring.spark.barrier import fit, run  # noqa: E402
from torchring.spark.horovod import HorovodRunner, log_to_driver  # noqa: E402

__all__ = ["HorovodRunner", "fit", "log_to_driver", "run"]
