"""`LocalSync`: weights, groups of backwards and skipped steps in a world of one, which reduces nothing."""

import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch

from torchring.errors import GradientError
from torchring.gradients.contract import Stats
from torchring.gradients.hooks import BackwardWatch
from torchring.gradients.validation import is_finite_gradient
from torchring.gradients.weights import ON_RESULTS, Weights
from torchring.observer import INPUT, OPTIMIZER
from torchring.world import World


class LocalSync:
    """Takes the place of a `Reducer` in a world of one, and has its methods.

    Between backwards, `.grad` is the weighted mean over those that several ranks would reduce together: `accumulate` of
    them, and those inside `no_sync()`. A backward after that adds to `.grad`. See `weights.py` for a world of several
    ranks, where a reduction brings about the mean.

    Args:
        parameters: of the optimizer; may grow.
        accumulate: number of backwards that are reduced together.
        skips_non_finite: whether to leave out a step if a gradient is not finite. Otherwise nobody looks.
    """

    world: World  # set before a method is called that records a step

    def __init__(self, parameters: Collection[torch.nn.Parameter], *, accumulate: int, skips_non_finite: bool) -> None:
        self.accumulate = accumulate  # this and the next two: see `Reducer`
        self.no_sync_depth = 0
        self.num_skipped_steps = 0
        self._parameters = parameters
        self._skips_non_finite = skips_non_finite

        # This goes with its optimizer, without the garbage collector.
        begin, end = weakref.WeakMethod(self._begin), weakref.WeakMethod(self._end_backward)
        self._weights = Weights(lambda: parameters, begin)
        self._watch = BackwardWatch(partial(_call, end), partial(_call, end))
        self._num_counted = 0  # backwards with weights, without those inside no_sync()
        self._holds_results = False  # of earlier ones, in `.grad`

    # Backward

    def weigh(self, weight: float) -> None:
        if all(parameter.grad is None for parameter in self._parameters):  # the script has dropped what there was
            self.forget_gradients()
        weights = self._weights
        weights.drop_next()  # its backward has not come, or has reached another optimizer's parameters only
        if self._holds_results and (self.accumulate > 1 or self.no_sync_depth or weights.num_backwards):
            raise GradientError(ON_RESULTS)
        weights.give(weight)

    def skip(self) -> None:
        self._weights.drop_next()
        if self.no_sync_depth == 0:
            self._count()

    def synchronize(self) -> None:
        """End a group of backwards: `.grad` holds their result now."""
        self._holds_results = self._holds_results or self._weights.num_backwards > 0
        self._weights.reset()
        self._num_counted = 0

    def forget_gradients(self) -> None:
        """A weight that was given for the next backward stays."""
        self.synchronize()
        self._holds_results = False

    # Step

    def before_step(self) -> None:
        self.synchronize()
        self._enter(OPTIMIZER)

    def accept_parameters(self) -> None:
        self._enter(INPUT)

    def check_backward(self) -> None:
        self.world.refuse_provisional("step()")

    def check_gradients(self) -> bool:
        """Looks at gradients only where a step may be left out."""
        if not self._skips_non_finite or all(map(is_finite_gradient, self._parameters)):
            return True
        self.num_skipped_steps += 1
        self.world.observer.count_step()
        return False

    def _enter(self, phase: int) -> None:
        observer = self.world.observer
        observer.phase(phase, observer.num_steps)

    def agree_on_step(self) -> None:
        """Nobody else takes part."""

    def sync_buffers(self) -> None:
        """The buffers are this rank's own."""

    def has_stepped(self) -> None:
        self.world.observer.count_step()

    # Otherwise

    def stats(self) -> Stats:
        skipped = self.num_skipped_steps
        return Stats("none", "a world of one sends nothing", "inline", 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, skipped)

    def can_skip_alone(self) -> bool:
        return True

    def extend(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """The parameters are in `parameters` already."""

    def close(self) -> None:
        self._weights.end()

    # Weights

    def _begin(self) -> None:
        self._weights.begin()
        if not self._watch.is_armed:
            self._watch.arm()

    def _end_backward(self) -> None:
        """The backward that a weight was given for is over, or was aborted."""
        self._weights.note()
        self._weights.end()
        if self.no_sync_depth == 0:
            self._count()

    def _count(self) -> None:
        self._num_counted += 1
        if self._num_counted >= self.accumulate:
            self.synchronize()


def _call(method: Callable[[], Callable[[], None] | None]) -> None:
    if (alive := method()) is not None:
        alive()
