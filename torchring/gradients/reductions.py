"""The reductions of one optimizer, one after the other: its buckets, the weights, and what else takes part.

`reducer.py` says which backwards are reduced. What takes part beside the gradients is a `Participant`.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from torchring.collectives.operations import Meanwhile
from torchring.collectives.service import Collectives, collectives_of
from torchring.errors import GradientError, in_step
from torchring.gradients.contract import Setup
from torchring.gradients.layout import BucketLayout
from torchring.gradients.plan import ParameterSpec, describe
from torchring.gradients.reduction import (
    MessageFormat,
    NonFiniteGradient,
    Participant,
    Reduction,
    ReductionPhase,
    Said,
    overridden,
)
from torchring.gradients.weights import Weights, result_scale
from torchring.observer import EXPOSED

if TYPE_CHECKING:
    from torchring.gradients.group import OptimizerGroup


class Reductions:
    """Begins and finishes reductions. Opening it is collective.

    For the arguments see `Reducer`.
    """

    def __init__(
        self, setup: Setup, group: "OptimizerGroup", kinds: Sequence[type[Participant]], guests: Sequence[Participant]
    ) -> None:
        self.world = world = setup.world
        self.options = options = setup.options
        self._is_sum = options.is_sum
        self.num_steps = 0  # how many optimizer steps this rank has made
        # Parameters that are reduced as soon as they require a gradient
        self.frozen = [parameter for parameter in setup.names if not parameter.requires_grad]
        # For each parameter, what its hook calls with its index when it has its gradient
        self.on_ready: Sequence[Callable[[int], None]] = ()
        self._names, self._sparse = setup.names, setup.sparse
        self._group = group

        # The script's collectives check: another rank may be calling one of those, instead of wrapping.
        participants: Sequence[type[Participant] | Participant] = (*guests, *kinds)
        self._format = MessageFormat([name for each in participants for name in each.fields])
        parameters = [parameter for parameter in setup.names if parameter.requires_grad]
        specs = list(map(self._spec_of, parameters))
        self._check_agreement(specs, collectives_of(world))
        self.progress = world.observer.open_progress("gradients")  # says how far the reductions are
        self.layout = BucketLayout(world, options, specs, parameters, self.progress, group.waiting)
        self.specs, self.parameters = self.layout.specs, self.layout.parameters  # that are reduced; grow with `extend`
        self.launcher = self.layout.launcher  # has the reduction under way, or the last one
        self.stream_notes = self.layout.agreement.stream_notes  # what hooks call on a device
        self.ledger = self.layout.ledger  # what is known about the gradients
        self._heard: Callable[[Meanwhile], object] | None = None  # waits for the messages of the reduction
        self._found_before: NonFiniteGradient | None = None  # as `non_finite`, before the reduction under way
        trained, frozen = self.parameters, self.frozen
        self.weights = Weights(lambda: [*trained, *newly_trainable(frozen)])  # of this rank's backwards
        self._may_lose_results = False  # of an earlier reduction, if all weights are 0
        self.buffers: Any = None  # the participant that makes the model's buffers equal
        self.noise: Any = None  # the participant that measures the noise scale
        self.compression_error: dict[str, float] = {}  # see `Stats`
        # What takes part in a reduction beside weights, in this order on all ranks
        self.participants: list[Participant] = []
        self.take_in(*guests, *(kind(self, setup) for kind in kinds))

    def take_in(self, *participants: Participant) -> None:
        """These take part from the next reduction on, after the others."""
        self.participants += participants
        self._before_backward = overridden(self.participants, "before_backward")
        self._on_begin = overridden(self.participants, "on_begin")
        self._on_message = overridden(self.participants, "on_message")
        self._on_reduced = overridden(self.participants, "on_reduced")
        self._on_step = overridden(self.participants, "on_step")

    @property
    def reduction(self) -> Reduction:
        """The reduction under way, or the last one."""
        return self.launcher.reduction

    @property
    def num_reductions(self) -> int:
        """Number of reductions so far. The last one counts when it is over, or when the next begins."""
        return self.launcher.reduction.number + (self.launcher.reduction.phase is ReductionPhase.OVER)

    @property
    def non_finite(self) -> NonFiniteGradient | None:
        """The first NaN or infinity in the last reduction, if there was one."""
        return self.launcher.reduction.non_finite

    def begin_reduction(self, *, is_unordered: bool, is_again: bool = False) -> None:
        """A reduction begins: its first gradient is about to arrive.

        Sends nothing, except before the second reduction: the first one has shown the order in which gradients become
        ready, so the buckets are rebuilt. At that point zero_grad() has usually dropped the old buffers, so old and new
        buffers need not exist side by side. With `is_unordered` (see `Reduction`) buckets are rebuilt in
        `finish_reduction`. `is_again`: another reduction for the same backward, which has left its results in `.grad`.
        """
        launcher, weights = self.launcher, self.weights
        launcher.drain()
        if not is_unordered and launcher.ready_order is not None:
            self.layout.follow_order()
        is_absent = (self._group.is_skipping or weights.has_skipped) and not weights.num_backwards
        weight = (0.0 if is_absent else 1.0) if weights.total is None else weights.total
        self._may_lose_results = not (weight or is_absent or is_again) and self.ledger.holds_results()
        current = Reduction(
            number=self.launcher.reduction.next_number,
            step=self.num_steps,
            defers_launch=self._group.are_beside_others and not self.layout.agreement.starts_at_once,
            is_unordered=is_unordered,
            weight=weight,
            is_absent=is_absent,
            is_again=is_again,
            mine={
                "has_newly_trainable": bool(newly_trainable(self.frozen)),
                "weight": weight,
                "is_weighted": weights.total is not None,
            },
        )
        for on_begin in self._on_begin:
            on_begin(current)
        self.layout.agreement.begin(current)
        self._found_before = self.non_finite
        launcher.begin(current)
        if current.mark_ready is None:
            self.on_ready = launcher.on_ready(len(self.parameters))
        else:
            self.on_ready = [current.mark_ready] * len(self.parameters)
            current.mark_ready = None  # which refers to what refers to the reduction

    def launch_all(self) -> None:
        """Backward is over: launch what has not left. In the same order of optimizers on all ranks."""
        current = self.launcher.reduction
        self.world.observer.phase(EXPOSED, self.num_steps)
        self.layout.agreement.backward_is_over()
        self.launcher.launch_rest()
        self.launcher.proceed()
        self._heard = None if current.said is not None else self._group.start_exchange((self,))

    def message(self) -> bytes:
        """What this rank says about the backward that is over. See `reduction.OF_REDUCER`."""
        current, unused = self.launcher.reduction, list[int]()
        mine: dict[str, float] = {"num_aborted": self.launcher.num_aborted, "has_ended": self._group.has_ended}
        if current.is_filled and current.phase is ReductionPhase.UNDER_WAY:
            self.layout.agreement.tell(current, self.launcher.buckets)
            mine |= {**current.mine, "reach": 2, "is_complete": True, "number": current.number}
            unused = [bucket.plan.slots[slot].parameter for bucket in self.launcher.buckets for slot in bucket.unused]
        else:
            mine |= self._reach()
        return self._format.encode(mine, unused)

    def _reach(self) -> dict[str, float]:
        """The fields of the message that say how far the backward has come, where no reduction has begun."""
        raise NotImplementedError

    def hear(self, messages: Sequence[bytes]) -> Said:
        """What all ranks say about this optimizer."""
        return self._format.decode(messages)

    def finish_reduction(self) -> None:
        """Return when every gradient holds the result. Collective, in the same order of optimizers on all ranks."""
        current, launcher, agreement = self.launcher.reduction, self.launcher, self.layout.agreement
        launcher.wait()
        if self._heard is not None:
            self._heard(None)
            self._heard = None
        agreement.agree(current, launcher.buckets)
        scale, sums = result_scale(current.heard, self.world.rank), current.heard.sums
        if not sums["weight"]:
            if self._may_lose_results:
                raise in_step(GradientError(_ALL_WEIGHTS_ZERO, rank=self.world.rank))
            if not sums["is_weighted"]:  # all gradients are what they were
                current.non_finite = current.non_finite or self._found_before
        current.scale = 1.0 if self._is_sum else scale
        for on_message in self._on_message:
            on_message(current)
        launcher.close_reduction()
        self.world.num_reductions += 1
        if current.is_unordered:
            self.layout.follow_order()

    def reduce_again(self) -> None:
        """A reduction of its own for what is local, outside backward."""
        self.begin_reduction(is_unordered=True, is_again=True)
        self.launch_all()
        self.finish_reduction()

    def _spec_of(self, p: torch.nn.Parameter) -> ParameterSpec:
        place, is_sparse = getattr(p, "place", ""), p in self._sparse
        return ParameterSpec(self._names[p], tuple(p.shape), p.stride(), p.dtype, p.device, is_sparse, place)

    def _check_agreement(self, specs: Sequence[ParameterSpec], collectives: Collectives) -> None:
        """Raise PlanMismatchError on every rank unless all are about to reduce the same things in the same way."""
        lines = describe(specs, f"{self.options} on {self.world.size} ranks")
        collectives.check_equal([*lines, self._format.describe()])


_ALL_WEIGHTS_ZERO: Final = (
    "all ranks gave weight 0 to a backward() that adds to gradients of an earlier one; call "
    "optimizer.zero_grad() before it, or leave it out on all ranks"
)


def newly_trainable(frozen: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Those of `frozen` that have come to require a gradient."""
    return [parameter for parameter in frozen if parameter.requires_grad]
