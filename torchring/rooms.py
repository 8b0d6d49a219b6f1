"""The rooms of the house: features that the core does not import, by name.

The core is what every script needs, from `wrap` to `step()`. Everything else is a room, which imports the core. Where
the core has to reach a room, because a script has asked for the feature, it asks for the room here. A room's module is
imported when it is first asked for. To remove a feature, delete its room and its line here.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

_MODULES: Final = {
    "diagnosis": "torchring.transport.diagnosis.gloo",
    "mpi": "torchring.transport.mpi",
    "cuda": "torchring.devices.cuda",
    "data_check": "torchring.observe.data_check",
    "forward": "torchring.observe.forward",
    "observe": "torchring.observe.services",
    "recorder": "torchring.observe.recorder.rounds",
    "elastic": "torchring.elastic.worker.generation",
    "meeting": "torchring.meeting",
    "placement": "torchring.placement",
    "sharding": "torchring.sharding.optimizer",
}


def room(name: str) -> Any:
    """The module of the room `name`, imported now if nobody has asked for it before.

    Raises:
        KeyError: there is no such room.
    """
    return importlib.import_module(_MODULES[name])
