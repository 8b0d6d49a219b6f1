"""Training that survives lost ranks, and takes new ones in: `State`, `run` and `Sampler`.

torchring run --elastic -np 4 --min-np 2 train.py
"""

from torchring.elastic.loop import run
from torchring.elastic.sampler import Sampler
from torchring.elastic.state import State

__all__ = ["Sampler", "State", "run"]
