"""Elastic jobs: backwards are announced to the job, and ranks change between two steps."""

from __future__ import annotations

from typing import Protocol

from torchring.generation import Change
from torchring.gradients.round import Participant, RoundState
from torchring.world import World


class Batches(Protocol):
    """Callbacks of an elastic job."""

    def begin_backward(self) -> None:
        """A backward is about to begin, its first gradient has come, or `skip()` was called instead.

        May raise what ends the training function.
        """

    def change_is_agreed(self, *, all_leave: bool) -> None:
        """The ranks are to change at the end of this step, or to leave, all of them. All ranks are told so in the same
        step."""


class ElasticJob(Participant):
    """Agrees with the other ranks that the ranks of this world are to change.

    Attributes:
        batches: of the job; None outside of elastic jobs.
    """

    bits = ("wants_change", "leaves")

    def __init__(self, world: World) -> None:
        self.batches: Batches | None = None
        self._size = world.size
        self._change = world.shared(Change)

    def begin_backward(self) -> None:
        if self.batches is not None:
            self.batches.begin_backward()

    def begin(self, current: RoundState) -> None:
        current.bits["wants_change"] = self._change.is_wanted
        current.bits["leaves"] = self._change.leaves

    def finished(self, current: RoundState) -> None:
        num_leaving = current.sums["leaves"]
        if self.batches is not None and (current.sums["wants_change"] or num_leaving):
            self.batches.change_is_agreed(all_leave=num_leaving == self._size)
