"""How ranks of a world agree on a membership change: one of them wants it, and all hear of it in the same reduction."""

from collections.abc import Callable

from torchring.gradients.reduction import Participant, Reduction
from torchring.world import World


class MembershipChange:
    """A change of ranks that this rank has heard of. `world.shared(MembershipChange)` is that of a world."""

    def __init__(self, world: World) -> None:
        self.is_wanted = False  # at the end of a step, the ranks of this world are to meet anew, or to end
        self.leaves = False  # this rank is about to end, and does not meet the others anew


class MembershipVote(Participant):
    """Agrees with the other ranks that the ranks of this world are to change.

    `before_backward` is called before each backward, and before `skip()`. It may raise what ends the training function.
    `agreed` is called on all ranks in the same reduction, when the ranks are to change, with the ranks that leave.
    """

    fields = ("wants_change", "leaves")

    def __init__(
        self, world: World, before_backward: Callable[[], object], agreed: Callable[[tuple[int, ...]], object]
    ) -> None:
        self._before_backward = before_backward
        self._agreed = agreed
        self._change = world.shared(MembershipChange)

    def before_backward(self) -> None:
        self._before_backward()

    def on_begin(self, current: Reduction) -> None:
        current.mine["wants_change"] = self._change.is_wanted
        current.mine["leaves"] = self._change.leaves

    def on_reduced(self, current: Reduction) -> None:
        heard = current.heard
        leaving = tuple(rank for rank, leaves in enumerate(heard.by_rank["leaves"]) if leaves)
        if heard.sums["wants_change"] or leaving:
            self._agreed(leaving)
