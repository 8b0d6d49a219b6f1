"""Training that survives lost ranks, and takes new ones in: `State`, `run` and `Sampler`.

torchring run --elastic -np 4 --min-np 2 train.py
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchring.elastic.loop import run
    from torchring.elastic.sampler import Sampler
    from torchring.elastic.state import State

__all__ = ["Sampler", "State", "run"]

if not TYPE_CHECKING:
    # Imported when first used: the driver imports `protocol`, and does not need torch.
    _HOMES = {"run": "loop", "Sampler": "sampler", "State": "state"}

    def __getattr__(name):
        import importlib

        if name in _HOMES:
            found = getattr(importlib.import_module(f"torchring.elastic.{_HOMES[name]}"), name)
            globals()[name] = found
            return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__all__})
