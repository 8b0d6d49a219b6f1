"""The rooms of the house: features that the core does not import, by name.

The core is what every script needs, from `wrap` to `step()`. Everything else is a room, which imports the core. Where
the core has to reach a room, because a script has asked for the feature, it asks for the room here. A room's module is
imported when it is first asked for. To remove a feature, delete its room and its line here.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Final

_MODULES: Final = {
    "diagnosis": "torchring.transport.diagnosis.culprit",
    "hierarchical": "torchring.allreduce.hierarchical",
    "mpi": "torchring.transport.mpi",
    "buffers": "torchring.participants.buffers",
    "compression": "torchring.compression.schemes",
    "cuda": "torchring.devices.cuda",
    "module wrappers": "torchring.participants.module_wrappers",
    "forward": "torchring.observe.inputs",
    "groups": "torchring.groups",
    "initial state": "torchring.initial_state",
    "device agreement": "torchring.devices.agreement",
    "device all-reduces": "torchring.devices.opening",
    "device collectives": "torchring.devices.collectives",
    "observe": "torchring.observe.services",
    "elastic": "torchring.elastic.worker.generation",
    "meeting": "torchring.meeting",
    "placement": "torchring.placement",
    "mesh": "torchring.mesh",
    "sharding": "torchring.sharding.optimizer",
}


def room(name: str) -> Any:
    """The module of the room `name`, imported now if nobody has asked for it before. KeyError if there is none."""
    return importlib.import_module(_MODULES[name])


# What takes part in reductions: module, class, and whether an optimizer needs it, by its `gradients.contract.Setup`.
_PARTICIPANTS: Final[Sequence[tuple[str, str, Callable[[Any], bool]]]] = (
    ("torchring.participants.sparse", "SparseReduction", lambda setup: bool(setup.sparse)),
    ("torchring.participants.buffers", "BufferSync", lambda setup: setup.has_buffers),
    ("torchring.participants.ownership", "Ownership", lambda setup: True),
    ("torchring.participants.replicas", "ReplicaCheck", lambda setup: True),
    ("torchring.observe.data_check", "DataCheck", lambda setup: setup.model is not None),
    ("torchring.observe.recorder.clocks", "ClockComparison", lambda setup: setup.world.num_nodes > 1),
    ("torchring.participants.noise", "NoiseScale", lambda setup: setup.options.noise_scale),
    ("torchring.compression.check", "CompressionCheck", lambda setup: setup.options.scheme is not None),
    ("torchring.participants.heap", "KeptMemory", lambda setup: next(iter(setup.names)).is_cpu),
)


def participants(setup: Any) -> list[Any]:
    """The classes of what takes part in the reductions of an optimizer. In one order, alike on all ranks."""
    return [getattr(importlib.import_module(module), name) for module, name, wanted in _PARTICIPANTS if wanted(setup)]
