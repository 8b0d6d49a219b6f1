"""How ranks of a world agree to change: one of them wants it, and all hear of it in the same round."""

from __future__ import annotations

from typing import Protocol

from torchring.gradients.round import Participant, RoundState
from torchring.world import World


class Change:
    """A change of ranks that this rank has heard of. `world.shared(Change)` is that of a world.

    Attributes:
        is_wanted: at the end of a step, the ranks of this world are to meet anew, or to end.
        leaves: this rank is about to end, and does not meet the others anew.
    """

    def __init__(self, world: World) -> None:
        self.is_wanted = False
        self.leaves = False


class Job(Protocol):
    """What `ChangeOfRanks` tells of backwards, see `State`."""

    def begin_backward(self) -> None: ...

    def change_is_agreed(self, *, all_leave: bool) -> None: ...


class ChangeOfRanks(Participant):
    """Agrees with the other ranks that the ranks of this world are to change."""

    bits = ("wants_change", "leaves")

    def __init__(self, world: World, job: Job) -> None:
        self._job = job
        self._size = world.size
        self._change = world.shared(Change)

    def before_backward(self) -> None:
        self._job.begin_backward()

    def begin(self, current: RoundState) -> None:
        current.bits["wants_change"] = self._change.is_wanted
        current.bits["leaves"] = self._change.leaves

    def finished(self, current: RoundState) -> None:
        num_leaving = current.sums["leaves"]
        if current.sums["wants_change"] or num_leaving:
            self._job.change_is_agreed(all_leave=num_leaving == self._size)
