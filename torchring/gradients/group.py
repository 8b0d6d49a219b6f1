"""All optimizers of one world. One backward may reach the parameters of several: a GAN has two."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NoReturn

import torch

from torchring.collectives.service import collectives_of, internal_collectives_of
from torchring.errors import GradientError, in_step
from torchring.gradients.backward import BackwardWatch
from torchring.gradients.module_wrappers import ModuleWrappers
from torchring.gradients.participants.buffers import Place
from torchring.interruption import InterruptionGuard
from torchring.observe.phases import EXPOSED
from torchring.observe.services import recorder_of
from torchring.world import World

if TYPE_CHECKING:
    from torchring.gradients.sync import GradientSync

_UNLIKE_NO_SYNC: Final = (
    "a backward() ran inside no_sync() on some ranks only, or reached another optimizer there that was to reduce. "
    "Enter no_sync() on all ranks, of all optimizers whose parameters the backward may reach"
)


class OptimizerGroup:
    """The optimizers of a world, in the order in which they were wrapped. `world.shared(OptimizerGroup)` opens it once.

    The buckets of a single optimizer leave during backward. With several optimizers, one backward may reach the
    parameters of any of them, and not of the same ones on every rank. So buckets wait for the end of backward, ranks
    agree in one small message on which optimizers take part, and these reduce in the order of wrapping. A backward
    inside `no_sync()` of all optimizers that it reaches sends nothing, as with a single optimizer.

    Attributes:
        guard: runs what takes several collectives, and must not be left between two of them.
        is_skipping: whether this rank takes part in a backward of the others without one of its own.
        skipper: the member whose `skip()` is under way.
        has_ended: whether this rank's data has ended, inside `torchring.join`.
        module_wrappers: the DDP and FSDP instances of this process. None of them may reduce a member's parameters.
    """

    def __init__(self, world: World) -> None:
        self.module_wrappers = ModuleWrappers()
        self.guard = InterruptionGuard(world)
        self.is_skipping = False
        self.skipper: GradientSync | None = None
        self.has_ended = False
        self._world = world
        self._recorder = recorder_of(world)
        self._members: list[GradientSync] = []
        self._norm_weights: set[float | None] = set()  # that SyncBatchNorm has used in the backward under way
        self._norm_watch = BackwardWatch(self._norms_ended, self._norm_weights.clear)
        world.on_close(self.close)

    @property
    def are_several(self) -> bool:
        return len(self._members) > 1

    def refuse_other_thread(self, thread: int) -> None:
        """Raise GradientError if a backward begins in `thread` while one of another thread is under way.

        Breaks the world, where that other thread may be waiting. A device runs all hooks in one thread.
        """
        if not any(member.in_backward and member.thread not in (0, thread) for member in self._members):
            return
        error = GradientError(
            "two threads run backward() at the same time, each with an optimizer of its own; ranks could not tell the "
            "backwards apart. Let one thread train all models, or take turns, in the same order on all ranks",
            rank=self._world.rank,
        )
        self._world.break_off("backward()", error)
        raise error

    def add(self, member: GradientSync) -> None:
        self._members.append(member)

    def remove(self, member: GradientSync) -> None:
        if member in self._members:
            self._members.remove(member)

    def owners_of(self, parameters: Iterable[torch.nn.Parameter]) -> list[GradientSync]:
        """The members that reduce one of `parameters`."""
        wanted = {id(parameter) for parameter in parameters}
        return [m for m in self._members if not wanted.isdisjoint(map(id, m.reduction.parameters))]

    @contextmanager
    def skipping(self, skipper: GradientSync | None = None) -> Iterator[None]:
        """Members that a backward of other ranks reaches are absent on this rank."""
        self.is_skipping, self.skipper = True, skipper
        try:
            yield
        finally:
            self.is_skipping, self.skipper = False, None

    def forget_skips(self) -> None:
        """An optimizer makes a step, or zeroes its gradients: the next backward is another one."""
        for member in self._members:
            member.has_been_skipped = False

    def owners(self) -> list[object]:
        """The optimizers that are still there."""
        return [owner for member in self._members if (owner := member.owner()) is not None]

    def num_steps(self) -> int:
        """How many steps this rank has made, with all optimizers."""
        return sum(member.num_steps for member in self._members)

    def batch_weights(self) -> set[float]:
        """The weights that optimizers have for the batch whose forward or backward runs: several if they differ."""
        return {weight for member in self._members if (weight := member.batch_weight) is not None}

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
            for member in self._members:
                if member.in_backward and member.batch_weight != weight:
                    self.refuse(
                        "the end of backward()",
                        f"SyncBatchNorm has used the weight {weight} in a backward() that reaches "
                        f"{member.reduction.specs[0].name}, too, whose optimizer has the weight {member.batch_weight}. "
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

        Returns how many rounds that were: fewest on the ranks that were last.
        """
        num_rounds = 0
        self.has_ended = True
        try:
            with torch.no_grad(), contextlib.nullcontext() if counts else self.skipping():
                for member in self._members:
                    member.forget_next_backward()
                while self._members and self._follow_round(drops_gradients=counts):
                    num_rounds += 1
        finally:
            self.has_ended = False
        return num_rounds

    def _follow_round(self, *, drops_gradients: bool) -> bool:
        """Take part in one round of the others. Returns whether there was any rank with data."""
        if drops_gradients:
            for parameter in (p for member in self._members for p in member.reduction.parameters):
                parameter.grad = None
        if self.are_several:
            return self._reduce_together()
        (member,) = self._members
        member.finish_backward(reduces=True)
        return member.reduction.control_sums.has_ended < self._world.size

    def finish_backward(self, caller: GradientSync) -> None:
        """A backward that reached `caller` is about to return: finish the members that it has reached."""
        self._check_norms()
        reached = [member for member in (caller, *self._members) if member.in_backward]
        is_local = not any(member.wants_reduction for member in reached)
        is_silent = not self.are_several or self._world.failure is not None  # nobody to agree with
        if is_local and (is_silent or all(member.is_in_no_sync for member in reached)):
            for member in self._members:
                if member.in_backward:
                    member.finish_backward(reduces=False)
                elif self.is_skipping:
                    member.note_skip()
            return
        self.guard.run("the end of backward()", lambda: self._finish_backward(caller))

    def _finish_backward(self, caller: GradientSync) -> None:
        if not self.are_several:
            caller.finish_backward(reduces=caller.wants_reduction)
            return
        if caller.in_backward:  # or else finished already, together with another member
            self._reduce_together()

    def _reduce_together(self) -> bool:
        """Collective: finish all members that a backward has reached on any rank. Returns whether any rank has data."""
        self._recorder.enter(EXPOSED)
        try:
            # 0: not reached on any rank; 1: accumulates; 2: reduces on some rank, and so on all.
            wants = [member.in_backward + member.wants_reduction for member in self._members]
            in_no_sync = [member.is_in_no_sync for member in self._members]
            agreed = torch.tensor([not self.has_ended, *wants, *in_no_sync], dtype=torch.int64, device="cpu")
            internal_collectives_of(self._world).all_reduce(agreed, "max")
            some_have_data, *both = agreed.tolist()
            wants, in_no_sync = both[: len(wants)], both[len(wants) :]
            if any(want == 2 and is_in for want, is_in in zip(wants, in_no_sync, strict=True)):
                raise in_step(GradientError(_UNLIKE_NO_SYNC, rank=self._world.rank))
            carried: set[Place] = set()
            for member, want in zip(list(self._members), wants, strict=True):
                if want:
                    member.finish_backward(reduces=want == 2, carried=carried)
            return bool(some_have_data)
        except BaseException:
            for member in self._members:
                member.abandon_backward()
            raise

    def release_dead(self) -> None:
        """Collective: close the members whose optimizer is gone, on all ranks (garbage is not collected in step)."""
        if not self._members:
            return
        gc.collect()  # a scheduler and its optimizer refer to each other
        alive = torch.tensor([member.owner() is not None for member in self._members], dtype=torch.uint8, device="cpu")
        collectives_of(self._world).all_reduce(alive, "min")
        for member, is_alive in zip(list(self._members), alive.tolist(), strict=True):
            if not is_alive:
                member.close()

    def close(self) -> None:
        """The world is closing: gradients of its optimizers stay local from now on."""
        for member in list(self._members):
            member.close()
        self._norm_watch.close()
        self.module_wrappers.close()
