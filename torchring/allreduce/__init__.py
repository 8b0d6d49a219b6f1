"""Reduces full buckets: schedules (pure functions), and the all-reduces that follow them."""

import sys
from types import ModuleType
from typing import Any, NoReturn

from torchring.allreduce.contract import AllReduce, BucketWork, Wire

__all__ = ["AllReduce", "BucketWork", "Wire"]


class _Module(ModuleType):
    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("torchring has all_reduce(); Horovod's allreduce() is in torchring.horovod")


sys.modules[__name__].__class__ = _Module
