"""Forks Spark's Python workers, as pyspark.daemon does, from a process that has imported torch: 2 s less for each."""

import torch._dynamo
from pyspark import daemon

import torchring.horovod
import torchring.optimizer
import torchring.spark  # noqa: F401

if __name__ == "__main__":
    torch.set_num_threads(1)
    daemon.manager()
