"""Elastic jobs: backwards are announced to the job, batches have weights, and ranks change between two steps."""

from __future__ import annotations

from typing import Protocol

from torchring.generation import Change
from torchring.gradients.round import Participant, RoundState
from torchring.world import World


class Batches(Protocol):
    """Callbacks of an elastic job: notified of each backward, asked for the weight of each batch."""

    def begin_backward(self, *, is_weighed: bool, is_skipped: bool = False) -> None:
        """A backward is about to begin, or its first gradient has come. May raise what ends the training function.

        Args:
            is_weighed: the script has given a weight. Otherwise, raises GradientError if the weight is not known.
            is_skipped: this rank takes part without a backward of its own.
        """

    def current_weight(self) -> tuple[float, float] | None:
        """The weight of this rank's batch that is trained on, and the sum of the weights that all ranks have for it.

        None if no batch has a weight, on any rank.
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

    def begin(self, current: RoundState) -> None:
        current.bits["wants_change"] = self._change.is_wanted
        current.bits["leaves"] = self._change.leaves

    def finished(self, current: RoundState) -> None:
        num_leaving = current.sums["leaves"]
        if self.batches is not None and (current.sums["wants_change"] or num_leaving):
            self.batches.change_is_agreed(all_leave=num_leaving == self._size)
