"""Gives gradients their weights: before each backward, in the wire buffer, and in the result. See `weights.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchring.errors import GradientError, in_step, ranks_in_words
from torchring.gradients.ledger import OptimizerLedger, SeenGradients, is_zero
from torchring.gradients.reduction import Reduction
from torchring.gradients.weights import FP16, ON_RESULTS, UNWEIGHED, ZEROS_OF_SKIP, Share, Weights, unequal_shares
from torchring.world import World


class Weighing:
    """The weights of one optimizer's backwards.

    Args:
        world: has more than one rank.
        parameters: those that are reduced; may grow.
        frozen: parameters that are not reduced, as they did not require a gradient; may change.
        ledger: of the gradients.
        is_sum: whether gradients are added up over ranks, and not averaged.

    Attributes:
        fields: what weights add to the message.
        weights: this rank's, of the backwards that are reduced together.
        arrived: a parameter that has got its gradient just now, before all others.
    """

    fields = ("is_weighted", "is_unweighted", "weight")

    def __init__(
        self,
        world: World,
        parameters: Sequence[torch.nn.Parameter],
        frozen: Sequence[torch.nn.Parameter],
        ledger: OptimizerLedger,
        *,
        is_sum: bool,
    ) -> None:
        self.weights = Weights()
        self.arrived: torch.nn.Parameter | None = None
        self._world = world
        self._parameters = parameters
        self._frozen = frozen
        self._ledger = ledger
        self._is_sum = is_sum
        self._handles_of_zero_weight: list[torch.utils.hooks.RemovableHandle] = []
        self._local = SeenGradients()  # what backwards with weights have left in `.grad`

        # The reduction
        self._share = Share()
        self._may_lose_results = False  # if all ranks give weight 0
        self._has_weights: bool | None = None  # None until the first reduction in which a rank has a gradient

    def batch_weight(self, *, in_backward: bool) -> float | None:
        """The weight of the backward under way, or else of the one that comes. None if it has none."""
        if self._handles_of_zero_weight:
            return 0.0
        return self.weights.last if in_backward else self.weights.next

    # Between reductions

    def weigh(self, weight: float, *, may_accumulate: bool) -> None:
        """The loss of the next backward is a mean over `weight` samples. See `DistributedOptimizer.weigh`.

        Args:
            may_accumulate: whether that backward may be one of several that are reduced together.
        """
        if self.weights.is_fp16:
            raise GradientError(FP16)
        self.drop_stale()
        if may_accumulate or self.weights.num_backwards > 0:
            self._refuse_results()
        self.end_zero_weight()
        factor = self.weights.give(weight)
        if factor != 1.0:
            self._ledger.scale_local(factor)
            for grad in (p.grad for p in newly_trainable(self._frozen) if p.grad is not None):
                grad.mul_(factor)
            self._local = SeenGradients(self._own_parameters())
        if not weight:
            self._zero_next_backward()

    def refuse_unweighed(self) -> None:
        """Raise GradientError if a backward begins that needs a weight and has none."""
        if not unequal_shares or self.weights.is_given or self._is_sum:
            return
        if any(each.size == self._world.size for each in list(unequal_shares)):
            raise GradientError(UNWEIGHED, rank=self._world.rank)

    def begin_backward(self, *, reduces: bool) -> None:
        """A backward begins, with the weight that was given for it."""
        if self.weights.is_weighted and not torch.is_grad_enabled():  # or autograd leaves another tensor in `.grad`
            self.drop_stale()
        self.weights.begin()
        if self.weights.is_weighted and not reduces:
            self._refuse_results()

    def accumulated(self) -> None:
        """A backward that does not reduce is over."""
        if self.weights.is_weighted:
            self._local = SeenGradients(self._own_parameters())

    def forget_next_backward(self) -> None:
        """The backward that a weight may have been given for does not come."""
        self.weights.drop_next()
        self.end_zero_weight()
        self.drop_stale()

    def note_skip(self) -> None:
        """The others' backward has reached these parameters, or may have, if it sends nothing."""
        self.drop_stale()
        self.weights.has_skipped = True
        if self.weights.is_given:
            self.weights.drop_next()
            self.end_zero_weight()

    def refuse_zeros(self) -> None:
        """Raise GradientError if zeros that the script has written to `.grad` would make a rank count that skipped."""
        has_only_skipped = self.weights.has_skipped and not self.weights.num_backwards
        grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if has_only_skipped and self._ledger.needs_synchronize() and all(map(is_zero, grads)):
            raise GradientError(ZEROS_OF_SKIP)

    def add_nothing(self) -> None:
        """What backwards with weights have left is about to be reduced, without a backward of its own."""
        self.drop_stale()
        if self.weights.is_weighted and self.weights.next is None:
            self.weights.give(0.0)

    def refuse_unused(self) -> None:
        """Raise GradientError if it is not clear what a weight was given for."""
        if self.weights.is_given and self.weights.num_backwards:
            raise GradientError(
                "weigh() was called before synchronize(), and no backward() came in between; call skip() in place of a "
                "backward() that is left out"
            )

    def count_local(self, *, needs: bool) -> None:
        """Gradients that the script has put into `.grad`, and a weight for them, count as those of a backward do."""
        weights = self.weights
        if weights.num_backwards or not (weights.is_given or (needs and weights.next is None)):
            return
        if weights.next == 0:
            for parameter in self._parameters:  # counts as zero, whatever it holds
                parameter.grad = None
        self.end_zero_weight()
        weights.begin()

    def drop_stale(self) -> None:
        """Forget the backwards whose gradients the script has dropped, as model.zero_grad() does. Raises GradientError
        if the script has zeroed them in place.
        """
        weights = self.weights
        if not weights.num_backwards:
            return
        if weights.is_weighted:
            is_gone = self._local.are_gone(self.arrived, were_zero=not weights.total)
        else:
            is_gone = not self._ledger.has_local()
        if is_gone:
            weights.reset()

    def end_zero_weight(self) -> None:
        """The backward of weight 0 is over."""
        for handle in self._handles_of_zero_weight:
            handle.remove()
        self._handles_of_zero_weight = []

    # The reduction

    def begin(self, current: Reduction) -> None:
        self._share = self.weights.share(is_absent=current.is_absent)
        share = self._share
        current.factor = share.factor
        current.is_empty = current.is_empty or share.weight == 0.0
        self._may_lose_results = share.weight == 0.0 and not current.is_again and self._ledger.holds_results()
        current.mine |= {
            "is_weighted": share.weight is not None,
            "is_unweighted": share.is_unweighted,
            "weight": share.weight or 0.0,
        }

    def agreed(self, current: Reduction) -> None:
        """Find the scale of the result.

        Raises GradientError if only some ranks gave weights, which is collective then, or if all weights are 0 where
        gradients of an earlier reduction would get that weight, too.
        """
        sums, size = current.heard.sums, self._world.size
        had_weights = self._has_weights
        if sums["is_weighted"] or (had_weights is None and sums["is_absent"] < size):
            self._has_weights = sums["is_weighted"] > 0
        if sums["is_weighted"] and sums["is_unweighted"]:
            others = [rank for rank, is_one in enumerate(current.heard.by_rank["is_unweighted"]) if is_one]
            raise self._in_step(
                f"{ranks_in_words(others)} did not call "
                "optimizer.weigh() before this backward(), and other ranks did; call it on all ranks",
                others,
            )
        if sums["is_weighted"] and not sums["weight"] and self._may_lose_results:
            raise self._in_step(
                "all ranks gave weight 0 to a backward() that adds to gradients of an earlier one; call "
                "optimizer.zero_grad() before it, or leave it out on all ranks"
            )
        if self._is_sum:
            return
        current.scale = self.weights.result_scale(
            size, int(sums["is_weighted"]), int(sums["is_absent"]), sums["weight"]
        )

    def _in_step(self, message: str, peers: Sequence[int] = ()) -> Exception:
        return in_step(GradientError(message, rank=self._world.rank, peers=peers))

    def _own_parameters(self) -> list[torch.nn.Parameter]:
        return [*self._parameters, *newly_trainable(self._frozen)]

    def _zero_next_backward(self) -> None:
        """Gradients of the next backward are zeros, whatever the loss is, a mean over nothing included."""
        for parameter in self._own_parameters():
            if parameter.requires_grad:
                handle = parameter.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
                self._handles_of_zero_weight.append(handle)

    def _refuse_results(self) -> None:
        """Raise GradientError if weights would be given to results of an earlier step, too."""
        if self._ledger.holds_results():
            raise GradientError(ON_RESULTS)


def newly_trainable(frozen: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Those of `frozen` that have come to require a gradient."""
    return [parameter for parameter in frozen if parameter.requires_grad]
