"""All optimizers of one world. One backward may reach the parameters of several: a GAN has two."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable
from functools import partial
from typing import Final, NoReturn

import torch

from torchring.collectives.service import collectives_of, internal_collectives_of
from torchring.errors import GradientError, in_step
from torchring.gradients.hooks import BackwardWatch
from torchring.gradients.reducer import Members, Reducer
from torchring.interruption import InterruptionGuard
from torchring.observe.phases import EXPOSED
from torchring.observe.services import recorder_of
from torchring.world import World

_END: Final = "the end of backward()"
_UNLIKE_NO_SYNC: Final = (
    "a backward() ran inside no_sync() on some ranks only, or reached another optimizer there that was to reduce. "
    "Enter no_sync() on all ranks, of all optimizers whose parameters the backward may reach"
)


class OptimizerGroup:
    """Drives the reducers of a world, in the order of wrapping. `world.shared(OptimizerGroup)` opens it once.

    The buckets of a single optimizer leave during backward. With several optimizers, one backward may reach the
    parameters of any of them, and not of the same ones on every rank. So buckets wait for the end of backward, ranks
    agree in one small message on which optimizers take part, and these reduce in the order of wrapping. A backward
    inside `no_sync()` of all optimizers that it reaches sends nothing, as with a single optimizer.

    Attributes:
        members: the reducers. They know of each other what `Members` says, and never call the group.
    """

    def __init__(self, world: World) -> None:
        self.members = Members(world)
        self._world = world
        self._recorder = recorder_of(world)
        self._norm_weights: set[float | None] = set()  # that SyncBatchNorm has used in the backward under way
        self._norm_watch = BackwardWatch(self._norms_ended, self._norm_weights.clear)
        world.on_close(self.close)

    @property
    def guard(self) -> InterruptionGuard:
        """Runs what takes several collectives, and must not be left between two of them."""
        return self.members.guard

    def owners_of(self, parameters: Iterable[torch.nn.Parameter]) -> list[Reducer]:
        """The members that reduce one of `parameters`."""
        wanted = {id(parameter) for parameter in parameters}
        return [member for member in self.members if not wanted.isdisjoint(map(id, member.parameters))]

    def owners(self) -> list[object]:
        """The optimizers that are still there."""
        return [owner for member in self.members if (owner := member.owner()) is not None]

    def num_steps(self) -> int:
        """Number of steps that this rank has made, with all optimizers."""
        return sum(member.num_steps for member in self.members)

    def batch_weights(self) -> set[float]:
        """The weights that optimizers have for the batch whose forward or backward runs: several if they differ."""
        return {weight for member in self.members if (weight := member.batch_weight) is not None}

    def note_norm(self, weight: float | None) -> None:
        """SyncBatchNorm's backward has reckoned with this weight, where ranks have different ones."""
        self._norm_weights.add(weight)
        if not self._norm_watch.is_armed:
            self._norm_watch.arm()

    def _norms_ended(self) -> None:
        self._check_norms()
        self._norm_weights.clear()

    def _check_norms(self) -> None:
        """Raise GradientError if the backward under way has reached an optimizer that has another weight."""
        for weight in self._norm_weights:
            for member in self.members:
                if member.in_backward and member.batch_weight != weight:
                    self.refuse(
                        _END,
                        f"SyncBatchNorm has used the weight {weight} in a backward() that reaches "
                        f"{member.specs[0].name}, too, whose optimizer has the weight {member.batch_weight}. "
                        "Before each backward(), call weigh() on all optimizers that it reaches, with one weight; or "
                        "freeze the other parameters meanwhile (requires_grad_(False))",
                    )

    def refuse(self, what: str, reason: str) -> NoReturn:
        """Raise GradientError in the midst of `what`, which other ranks may wait for. They hear of it."""
        error = GradientError(reason, rank=self._world.rank)
        try:
            self._world.break_off(what, error)
            raise error
        finally:
            del error  # its traceback refers to this frame

    def follow_others(self, *, counts: bool = False) -> int:
        """Collective: take part in the rounds of the ranks that still have data, until no rank has.

        Args:
            counts: whether this rank counts in their means, with zeros. Else means are over the ranks with data. To
                contribute zeros, this rank drops its gradients.

        Returns the number of rounds that this rank took part in. The last rank to end returns the smallest number.
        """
        num_rounds = 0
        members = self.members
        members.has_ended = True
        try:
            with torch.no_grad(), contextlib.nullcontext() if counts else members.skipping():
                for member in members:
                    member.weighing.forget_next_backward()
                while list(members) and self._follow_round(drops_gradients=counts):
                    num_rounds += 1
        finally:
            members.has_ended = False
        return num_rounds

    def _follow_round(self, *, drops_gradients: bool) -> bool:
        """Take part in one round of the others. Returns whether there was any rank with data."""
        if drops_gradients:
            for parameter in (p for member in self.members for p in member.parameters):
                parameter.grad = None
        if self.members.are_several:
            return self._reduce_together()
        (member,) = self.members
        member.finish_backward(reduces=True)
        return member.round.sums["has_ended"] < self._world.size

    def end_backward(self, caller: Reducer) -> None:
        """A backward that reached `caller` is about to return: finish the members that it has reached."""
        members = self.members
        self._check_norms()
        reached = [member for member in (caller, *members) if member.in_backward]
        is_local = not any(member.wants_reduction for member in reached)
        is_silent = not members.are_several or self._world.failure is not None  # nobody to agree with
        if is_local and (is_silent or all(member.is_in_no_sync for member in reached)):
            for member in members:
                if member.in_backward:
                    member.finish_backward(reduces=False)
                elif members.is_skipping:
                    member.weighing.note_skip()
        elif not members.are_several:
            self.guard.run(_END, partial(caller.finish_backward, reduces=caller.wants_reduction))
        elif caller.in_backward:  # or else finished already, together with another member
            self.guard.run(_END, self._reduce_together)

    def _reduce_together(self) -> bool:
        """Collective: finish all members that a backward has reached on any rank. Returns whether any rank has data."""
        members = list(self.members)
        self._recorder.enter(EXPOSED)
        try:
            # 0: not reached on any rank; 1: accumulates; 2: reduces on some rank, and so on all.
            wants = [member.in_backward + member.wants_reduction for member in members]
            in_no_sync = [member.is_in_no_sync for member in members]
            agreed = torch.tensor([not self.members.has_ended, *wants, *in_no_sync], dtype=torch.int64, device="cpu")
            internal_collectives_of(self._world).all_reduce(agreed, "max")
            some_have_data, *both = agreed.tolist()
            wants, in_no_sync = both[: len(wants)], both[len(wants) :]
            if any(want == 2 and is_in for want, is_in in zip(wants, in_no_sync, strict=True)):
                raise in_step(GradientError(_UNLIKE_NO_SYNC, rank=self._world.rank))
            backward = object()
            for member, want in zip(members, wants, strict=True):
                if want:
                    member.finish_backward(reduces=want == 2, backward=backward)
            return bool(some_have_data)
        except BaseException:
            for member in members:
                member.abandon_backward()
            raise

    def release_dead(self) -> None:
        """Collective: close the members whose optimizer is gone, on all ranks (garbage is not collected in step)."""
        members = list(self.members)
        if not members:
            return
        gc.collect()  # a learning rate scheduler and its optimizer refer to each other
        alive = torch.tensor([member.owner() is not None for member in members], dtype=torch.uint8, device="cpu")
        collectives_of(self._world).all_reduce(alive, "min")
        for member, is_alive in zip(members, alive.tolist(), strict=True):
            if not is_alive:
                member.close()

    def close(self) -> None:
        """The world is closing: gradients of its optimizers stay local from now on."""
        for member in self.members:
            member.close()
        self._norm_watch.close()
        self.members.module_wrappers.close()
