"""Training that survives lost ranks, and takes new ones in: `State`, `run` and `Sampler`.

    torchring run --elastic -np 4 --min-np 2 train.py

Words:

    coordinator  the part of `torchring run --elastic` that decides who starts, and who trains together
    driver       the rest of `torchring run --elastic`, which does what the coordinator decides
    worker       a process that the driver has started. Its number is never used again: a replacement has another one
    generation   the workers that train together, with ranks 0 .. size - 1, until one is lost, leaves or joins. The next
                 generation goes on where this one has stopped
    slot         a place for one worker on a host, numbered from 0

protocol.py has the messages between driver and workers, driver/ the one side, worker/ the other.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchring.data.sampler import Sampler
    from torchring.elastic.worker.loop import run
    from torchring.elastic.worker.state import State

__all__ = ["Sampler", "State", "run"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use: the driver, `torchring run --elastic`, does without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torchring.data.sampler import Sampler
    from torchring.elastic.worker import loop, state

    return {"Sampler": Sampler, "State": state.State, "run": loop.run}[name]
