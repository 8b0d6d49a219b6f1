"""Carries parameters that one rank has stepped to the others, on devices. The host waits for no device.

The work is put into the stream that reduces gradients, behind the step. So the watchdog of that stream notices ranks
that die or are late. Later work on the current stream, such as the next forward, waits. Where devices reach each
other's memory, parameters live there:

    computes   backward, step of own slices ------------------------------ next forward
    reduces                             meeting, own slices to peers, meeting

The first meeting says that no device computes with the parameters any more. Elsewhere torch.distributed's backend
(NCCL) gathers the slices of all ranks, or sends a whole parameter from its owner.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from torchring.devices.engines import DeviceWire, Launch
from torchring.devices.opening import open_on_device
from torchring.devices.stream import OnStream
from torchring.sharding.cut import Flat
from torchring.sharding.parameters import FlatMemory
from torchring.world import World


class DeviceExchange:
    """See `Exchange`. Opened by all ranks of `world` together.

    What reduces the gradients carries the parameters in the same way. Where it is "hierarchical", the backend carries
    them, which knows the network between all ranks.
    """

    def __init__(self, world: World, all_reduce: OnStream) -> None:
        self._rank = world.rank
        self._opened: OnStream | None = None
        if all_reduce.algorithm == "hierarchical":
            all_reduce, _ = open_on_device(world, "native", "auto", (), all_reduce.accelerator)
            world.on_failure(all_reduce)
            self._opened = all_reduce
        self._all_reduce = all_reduce
        self._wires: dict[FlatMemory, DeviceWire] = {}
        self._guard: Launch | None = None  # for all wires
        (self._meeting,) = all_reduce.open_wires([(1, torch.float32)])

    def allocate(self, flats: Sequence[Flat]) -> list[FlatMemory]:
        """Collective: memory, of which nothing is stepped yet."""
        memories = []
        wires = self._all_reduce.open_wires([_spec(flat) for flat in flats])
        for flat, wire in zip(flats, wires, strict=True):
            own = wire.tensor.view(flat.dtype)[: flat.numel]
            memories.append(memory := FlatMemory(flat, own))
            factor = flat.dtype.itemsize // wire.tensor.itemsize
            start, stop = flat.bounds[self._rank]
            self._wires[memory] = replace(wire, bounds=(start * factor, stop * factor))
        self._guard = self._all_reduce.engine.guard(list(self._wires.values())) if self._wires else None
        self.spread(memories)  # zeros: kernels are compiled, and NCCL connects, now and not in a step
        return memories

    def spread(self, memories: Sequence[FlatMemory]) -> None:
        """Give all ranks the slices that each rank has stepped, before later work on the current stream."""
        if memories:
            self._all_reduce.run(lambda: self._launch(memories), self._meeting.report)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def _launch(self, memories: Sequence[FlatMemory]) -> None:
        engine = self._all_reduce.engine
        if engine.backend is None:
            engine.direct(self._meeting, spread=False)
        for memory in memories:
            if engine.backend is None:
                engine.direct(self._wires[memory], gather=False)
            else:
                engine.gather(self._wires[memory], memory.flat.owner)
        if self._guard is not None:
            self._guard()


def _spec(flat: Flat) -> tuple[int, torch.dtype]:
    """(elements, dtype) of a wire for the flat. The backend gathers equally long slices: the last ends in a gap."""
    real = flat.dtype.to_real()
    numel = flat.numel
    if flat.owner is None:
        numel = len(flat.bounds) * (flat.bounds[0][1] - flat.bounds[0][0])
    return numel * flat.dtype.itemsize // real.itemsize, real
