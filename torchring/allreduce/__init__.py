"""Reduces full buckets: schedules (pure functions), and the all-reduces that follow them."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NoReturn

from torchring.allreduce.contract import TAGS_PER_REDUCTION, AllReduce, BucketWork, NonFinite, Wire

__all__ = ["TAGS_PER_REDUCTION", "AllReduce", "BucketWork", "NonFinite", "Wire"]


class _Module(ModuleType):
    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("torchring has all_reduce(); Horovod's allreduce() is in torchring.horovod")


sys.modules[__name__].__class__ = _Module
