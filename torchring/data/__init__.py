"""Data that ranks share, and that training can stop in and go on with anywhere."""

from torchring.data.coverage import Coverage as Coverage
from torchring.data.coverage import check as check
from torchring.data.rows import RowGroups as RowGroups
from torchring.data.sampler import Sampler as Sampler
from torchring.data.shards import shard as shard

__all__ = ["Coverage", "RowGroups", "Sampler", "check", "shard"]
