"""Steps a bucket as soon as its gradients are summed, while backward goes on. For buckets that are scattered.

A rank steps its slice while the sum is in the cache, and hands the result on, so peers may write to the parameters of a
bucket that has left. Backward has no use for these parameters any more; if it has one all the same (`weight.detach()`
in forward), autograd refuses it, because their version has changed.

Nothing may stand between the sum and the step. So ranks step early only if the last round was followed by a step on
every rank, and if no rank weighs or skips: the first bucket says so.
"""

from __future__ import annotations

from collections.abc import Callable

from torchring.allreduce import NonFinite
from torchring.errors import GradientError
from torchring.gradients.bucket import Bucket
from torchring.gradients.round import ControlSums, Participant, Reducible, RoundState


class EarlySteps(Participant):
    """For one optimizer with scattered buckets.

    Args:
        size: number of ranks.
        stands_between: whether gradients may change between the sum and the step, by weights for example.
        accept: the optimizer has written to the parameters, see `ReplicaCheck`.

    Attributes:
        step: steps this rank's slice of a bucket.
        may_step: whether the optimizer and its options let it.
        num_stepped: buckets that were stepped in the round under way, or the last one.
    """

    bits = ("may_step_early",)

    def __init__(self, size: int, stands_between: Callable[[], bool], accept: Callable[[], None]) -> None:
        self.step: Callable[[Bucket], None] | None = None
        self.may_step: Callable[[], bool] = bool
        self.num_stepped = 0
        self._size = size
        self._stands_between = stands_between
        self._accept = accept
        self._was_followed = False  # the last round, by a step
        self._summed: list[Bucket] = []  # and not yet stepped
        self._first: tuple[Bucket, Callable[[], bool]] | None = None
        self._agreed: bool | None = None  # None: not known yet

    def begin(self, current: RoundState) -> None:
        if self.num_stepped and not self._was_followed:
            raise GradientError(
                "backward() has stepped a part of the parameters, and step() was not called after it. With "
                "free_gradients=True, call step() after each backward(), or leave free_gradients out"
            )
        is_plain = not (current.is_absent or current.is_again or current.bits["has_ended"] or self._stands_between())
        may = self.step is not None and self._was_followed and is_plain and self.may_step()
        current.bits["may_step_early"] = may
        current.summed = self.summed if may else None
        self._was_followed, self.num_stepped = False, 0
        self._summed, self._first, self._agreed = [], None, None

    def summed(self, launched: Reducible, found: NonFinite | None, is_over: Callable[[], bool]) -> None:
        """See `RoundState.summed`."""
        if not isinstance(launched, Bucket) or not launched.plan.is_scattered:
            return
        if self._first is None:
            self._first = launched, is_over
        if found is None:
            self._summed.append(launched)
        first, is_over = self._first
        if self._agreed is None and is_over():
            self._decide(first.control_sums() if first.index == 0 else ControlSums())
        self._step_summed()

    def agreed(self, current: RoundState) -> None:
        if current.summed is not None and current.non_finite is None:
            self._decide(current.sums)
            self._step_summed()

    def _decide(self, sums: ControlSums) -> None:
        self._agreed = sums["may_step_early"] == self._size and not sums["has_unfrozen"]

    def _step_summed(self) -> None:
        if not self._agreed:
            return
        summed, self._summed = self._summed, []
        for bucket in summed:
            # A parameter that this rank has not used may be used nowhere: `step()` knows.
            if all(bucket.flags.tolist()) and self.step is not None:
                self.num_stepped += 1
                self.step(bucket)

    def finished(self, current: RoundState) -> None:
        if current.summed is not None:
            self._accept()

    def stepped(self) -> None:
        """The script has called `step()`."""
        self._was_followed = True
