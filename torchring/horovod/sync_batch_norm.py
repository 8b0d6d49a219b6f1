"""torchring's SyncBatchNorm, under the name of Horovod's module."""

from torchring.norms import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
