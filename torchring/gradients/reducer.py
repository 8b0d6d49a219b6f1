"""The backwards and steps of one optimizer: which backwards are reduced, and which steps are refused.

A backward reduces or it does not, decided when its first gradient arrives: every `accumulate`-th backward outside
`no_sync()` reduces.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import torch

from torchring.collectives.service import Join, internal_collectives_of
from torchring.errors import GradientError, RingError, in_step
from torchring.gradients.contract import Setup, Stats, stats_of
from torchring.gradients.hooks import BackwardWatch, attach_hooks, is_compiled_backward
from torchring.gradients.ledger import is_zero
from torchring.gradients.reduction import Participant, overridden
from torchring.gradients.reductions import Reductions, newly_trainable
from torchring.gradients.validation import refuse_backward, refuse_non_finite, refuse_thawed, refuse_unsettled
from torchring.gradients.weights import FP16, ON_RESULTS, ZEROS_OF_SKIP, unequal_shares
from torchring.observer import BACKWARD, BETWEEN, EXPOSED, INPUT, OPTIMIZER

if TYPE_CHECKING:
    from torchring.gradients.group import OptimizerGroup


class Reducer(Reductions):
    """The backwards and steps of one optimizer, beside its reductions. Opening it is collective."""

    def __init__(
        self,
        setup: Setup,  # what is reduced. Its world has more than one rank.
        group: "OptimizerGroup",  # the reducers of that world
        kinds: Sequence[type[Participant]],  # what takes part in a reduction beside weights, in this order
        *,
        guests: Sequence[Participant] = (),  # participants that a room sends; they come before the others
        owner: object,  # the optimizer; referred to weakly
    ) -> None:
        super().__init__(setup, group, kinds, guests)
        self.owner = weakref.ref(owner)
        self.model: Callable[[], object] = weakref.ref(setup.model) if setup.model is not None else lambda: None
        self.num_skipped_steps = 0  # how many steps were left out, because a gradient was not finite
        # The error that ended the last backward between ranks. Gradients are worth nothing after it.
        self.failure: BaseException | None = None
        self.is_closed = False

        # Whether a backward reduces
        self.accumulate = setup.options.accumulate  # backwards per reduction; may change in between, on all ranks alike
        # How many `no_sync()` the script is in. Backwards there only accumulate, and do not count towards `accumulate`.
        self.no_sync_depth = 0
        self._num_backwards = 0  # since the last reduction, without those inside no_sync()

        # The backward under way
        self.in_backward = False  # whether there is one of these parameters
        self.thread = 0  # runs the hooks of that backward, if its parameters are on the CPU; else 0
        self._reduces = False
        self._has_reduction = False  # that backward

        # Hooks and what else calls back
        self.watch = BackwardWatch(partial(group.end_backward, self), self.abort_backward)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._hooked: list[int] = []  # what identifies the parameters, which torch.utils.swap_tensors changes
        group.reducers.append(self)
        self._attach()

    @property
    def wants_reduction(self) -> bool:
        """Whether a backward is under way that reduces."""
        return self.in_backward and self._reduces

    @property
    def is_in_no_sync(self) -> bool:
        """Whether a backward is under way inside `no_sync()`."""
        return self.in_backward and not self._reduces and self.no_sync_depth > 0

    def stats(self) -> Stats:
        """The cost of communication so far."""
        return stats_of(
            *(self.layout, self.num_reductions, self.num_skipped_steps, self.noise, self.world.members),
            error=dict(self.compression_error),
        )

    def extend(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Collective: more parameters, some of which may be frozen for now."""
        self.frozen += parameters
        self._adopt_newly_trainable()

    def close(self) -> None:
        """Remove the hooks, end threads and links. Gradients keep their values."""
        self.is_closed = True
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._group.remove(self)
        self.launcher.close()
        self.layout.all_reduce.close()
        self.weights.end()
        for close in overridden(self.participants, "close"):
            close()
        self.progress.close()
        if not self.in_backward:
            self.watch.close()  # the two refer to each other; a closed watch needs no garbage collector
            with suppress(RuntimeError):  # of a device that has failed
                self.layout.release()

    # Backward

    def begin_backward(self) -> None:
        """The first gradient of a backward arrives; or of an outer backward, after the end of an inner one."""
        try:
            self._enter_backward()
        except RingError as error:
            self.world.note_members(error)
            raise
        self.watch.arm()

    def _enter_backward(self) -> None:
        if not self.in_backward:
            for before_backward in self._before_backward:
                before_backward()
            if self.weights.next is None and not self._is_sum:
                for iteration in list(unequal_shares):
                    iteration.refuse_unweighed(self.world)
            self.enter(BACKWARD)
            if self._group.are_beside_others and self.specs[0].device.type == "cpu":
                self._group.refuse_other_thread(thread := threading.get_ident())
                self.thread = thread
            self._begin(reduces=self._next_reduces())

    def launch_own(self) -> None:
        """A backward is over on this rank: launch what needs no other rank, before ranks agree what it has reached."""
        if self.wants_reduction and self._has_reduction:
            self._count_noted()
            self.run_or_fail(self.launcher.fill_rest, self.launcher.advance)

    def _reach(self) -> dict[str, float]:
        return {"reach": self.in_backward + self.wants_reduction, "is_in_no_sync": self.is_in_no_sync}

    def join_backward(self) -> None:
        """A backward reduces these parameters on some rank, and is over on all ranks. Pack what has not been packed."""
        if self._group.is_skipping and not self.in_backward:
            self.weights.leave_out()
        if not self.wants_reduction:  # only other ranks got as far as to begin
            self._begin(reduces=True)
        self._count_noted()
        if not self._has_reduction:
            self.run_or_fail(partial(self._begin_reduction, is_unordered=True))
        self.run_or_fail(self.launcher.fill_rest)

    def finish_backward(self, *, reduces: bool) -> None:
        """A backward that reached these parameters on some rank is over. With `reduces`, its reduction is finished."""
        group = self._group
        if group.is_skipping and not self.in_backward:
            self.weights.leave_out()
        if reduces:
            if self.reduction.heard.sums["has_newly_trainable"]:
                self.run_or_fail(self._adopt_newly_trainable, self.reduce_again)
            self._num_backwards = 0
            self.weights.reset()
        else:
            self._num_backwards += self.no_sync_depth == 0
            self.weights.note()
        if group.skipper in (None, self):
            group.skipped.discard(self)
        else:
            group.skipped.add(self)
        self.in_backward, self.thread = False, 0
        self.enter(BETWEEN if reduces else INPUT)
        self.weights.end()
        if reduces:
            for on_reduced in self._on_reduced:
                on_reduced(self.reduction)

    def abort_backward(self) -> None:
        """The backward under way has raised (out of memory, an error in a custom function): drop its reduction."""
        if self.in_backward:
            self.in_backward = False
            if not self._group.is_skipping:
                self.weights.withdraw()
            self.weights.end()
            if self._reduces and self._has_reduction:
                self.launcher.abort()

    def gradient_failed(self, error: BaseException) -> None:
        """A hook has raised. With no bucket sent yet, backward drops the reduction as after any other error."""
        if self._reduces and self._has_reduction and self.reduction.num_launched:
            self.fail(error)

    def _count_noted(self) -> None:
        """Backward is over: count the gradients that hooks have noted since a gradient was counted last."""
        try:
            for bucket in self.launcher.count_noted():
                bucket.pack_rest()
        except BaseException as error:
            self.gradient_failed(error)
            raise

    def forget_gradients(self) -> None:
        """The optimizer has dropped or zeroed all gradients, so the next backward begins a group of `accumulate`."""
        self._num_backwards = 0
        self.weights.reset()
        self._group.skipped.clear()

    def weigh(self, weight: float) -> None:
        """The loss of the next backward is a mean over `weight` samples. See `DistributedOptimizer.weigh`."""
        if self.in_backward:
            raise GradientError("weigh() was called inside backward(); call it before")
        if any(bucket.plan.wire_dtype is torch.float16 for bucket in self.layout.buckets):
            raise GradientError(FP16)
        if self.options.scheme is not None:
            self.options.scheme.check_weigh()
        self.weights.drop_stale()
        if (self.accumulate > 1 or self.no_sync_depth or self.weights.num_backwards) and self.ledger.holds_results():
            raise GradientError(ON_RESULTS)
        self.weights.give(weight)

    def begin_unreached(self) -> None:
        """A backward of the model is over, and has reached its optimizers of other groups of ranks only."""
        if self._group.is_skipping:
            self._begin(reduces=self._leave_out())
        else:
            self._enter_backward()

    def _leave_out(self) -> bool:
        """This rank has no backward where others have one. Returns whether that one reduces."""
        for before_backward in self._before_backward:
            before_backward()
        self.weights.leave_out()
        return self.no_sync_depth == 0 and self._num_backwards + 1 >= self.accumulate

    def skip(self) -> None:
        """Collective: take part in the others' next backward without one of this rank's own."""
        if self.in_backward:
            raise GradientError("skip() was called inside backward(); call it in place of backward()")
        if self in self._group.skipped:
            raise GradientError(
                "skip() was called on another optimizer before, which stands for a whole backward(): that one has "
                "reached these parameters, too. Call skip() once for each backward() that this rank leaves out, on the "
                "same optimizer if there are several"
            )
        self._take_part(reduces=self._leave_out(), skipper=self)

    def _take_part(self, *, reduces: bool, skipper: "Reducer | None" = None) -> None:
        """Collective: what a backward would do, with what is local already, or nothing."""
        with torch.no_grad(), self._group.skipping(skipper):
            self._begin(reduces=reduces)
            self._group.end_backward(self)

    def take_part(self) -> None:
        """Collective: contribute what is local, or zeros, to the reduction of the others' next backward or own call.

        Unlike a rank that skips, this rank counts in the mean.
        """
        if self.in_backward:
            raise GradientError("synchronize() was called inside backward(); call it after backward() has returned")
        self.weights.drop_stale()
        self._refuse_zeros()
        if self.weights.has_skipped and self.ledger.first_unsettled() is None:
            self._take_part(reduces=True)
            return
        if self.weights.total is not None and self.weights.next is None:
            self.weights.next = 0.0  # it adds nothing to what backwards have left
        with torch.no_grad():
            self._begin(reduces=True)
            self._group.end_backward(self, is_alone=True)

    def synchronize(self) -> None:
        """Collective: reduce whatever is local on any rank. Does nothing where nothing is local."""
        if self.in_backward:
            raise GradientError("synchronize() was called inside backward(); call it after backward() has returned")
        if self.world.shared(Join).is_open:  # others may have ended, and meet this with a reduction
            self.weights.drop_stale()
            if self._needs_synchronize() or self.weights.next is not None:
                self.weights.count_local()
            self.weights.drop_next()
            self._take_part(reduces=True)
            return
        self.enter(EXPOSED)
        with torch.no_grad():  # a graph on the gradients, of backward(create_graph=True), is cut here
            self._group.guard.run("synchronize()", self._synchronize)
        self.enter(BETWEEN)

    # Step

    def before_step(self) -> None:
        """The optimizer is about to write to the parameters."""
        self.enter(OPTIMIZER)
        for on_step in self._on_step:
            on_step("before")
        self._group.skipped.clear()

    def agree_on_step(self) -> None:
        """All ranks make this step, or all leave it out. May be called several times in a step."""
        for on_step in self._on_step:
            on_step("agreed")

    def accept_parameters(self) -> None:
        """The parameters are as the optimizer has left them: its step is about to evaluate a closure."""
        self.enter(INPUT)
        for on_step in self._on_step:
            on_step("after")

    def has_stepped(self) -> None:
        """The optimizer has made a step."""
        for on_step in self._on_step:
            on_step("after")
        self.agree_on_step()
        self.num_steps += 1
        self._end_step()

    def sync_buffers(self) -> None:
        """Collective: make the model's buffers equal as they are now."""
        if self.in_backward:
            raise GradientError("sync_buffers() was called inside backward(); call it after backward() has returned")
        self.world.shared(Join).refuse("sync_buffers()")
        if self.buffers is not None:
            with torch.inference_mode(False):
                self._group.guard.run("sync_buffers()", self.buffers.synchronize)

    def can_skip_alone(self) -> bool:
        """Whether this rank can decide alone to leave out a step."""
        return self.options.on_nonfinite != "skip" or self.layout.agreement.knows_at_once

    def check_backward(self) -> None:
        """Before a step: raise GradientError if the last backward failed, or is still under way."""
        if self.world.is_forked:
            self.world.raise_if_broken()
        if self.failure is not None:
            raise GradientError(f"the last backward did not reduce its gradients: {self.failure}") from self.failure
        self.layout.agreement.poll()
        if self.in_backward:
            raise GradientError(
                "step() was called inside backward(), before all gradients are reduced; call it after backward()"
            )

    def check_gradients(self) -> bool:
        """Before a step: raise GradientError if a gradient is known to be wrong. Returns whether to make the step."""
        rank, step, policy = self.world.rank, self.num_steps, self.options.on_nonfinite
        for parameter in self.frozen:
            if parameter.requires_grad and parameter.grad is not None:
                refuse_thawed(self._spec_of(parameter).name, rank)
        self.launcher.refuse_lost()
        if unsettled := self.ledger.first_unsettled():
            are_hooked = self._hooked == [parameter._cdata for parameter in self.parameters]
            refuse_unsettled(*unsettled, are_hooked=are_hooked, rank=rank, step=step)
        if policy == "ignore":
            return True
        found = self.non_finite
        if found is None and policy == "skip":  # of the last reduction on a device, too, which is waited for
            found = self.layout.agreement.find_non_finite()
        if found is None or not found.is_still_there():
            return True
        if policy == "raise":
            refuse_non_finite(found, self.options.compression, rank=rank, step=step)
        self.num_skipped_steps += 1
        self.agree_on_step()
        self._end_step()
        return False

    def enter(self, phase: int) -> None:
        """A phase of a step begins."""
        self.world.observer.phase(phase, self.num_steps)

    def _end_step(self) -> None:
        self.enter(OPTIMIZER)
        self.world.observer.count_step()
        self.enter(INPUT)

    def _next_reduces(self) -> bool:
        """Decide if the backward that begins now reduces. Raises GradientError if it could not be reduced right."""
        reduces = self.no_sync_depth == 0 and self._num_backwards + 1 >= self.accumulate
        is_captured = self.layout.agreement.is_captured()
        if self.failure is not None or is_captured or is_compiled_backward() or (reduces and torch.is_grad_enabled()):
            refuse_backward(self.failure, is_captured=is_captured, reduces=reduces)
        return reduces

    def _begin(self, *, reduces: bool) -> None:
        self.launcher.refuse_lost()
        if reduces:
            self.world.raise_if_broken()
        self._reduces, self._has_reduction = reduces, False
        self.on_ready = [self.ledger.mark_local] * len(self.parameters)
        # One backward may reach several groups, in another order on each rank, so beginning must not wait for others.
        is_unordered = self._group.are_several or bool(self.world.members)
        if not self._group.is_skipping:
            self.run_or_fail(self._begin_weights)
        # Other ranks may wait in another optimizer's reduction. So with several, ranks agree before they drain.
        if reduces and not (is_unordered and self.launcher.num_aborted):
            self.run_or_fail(partial(self._begin_reduction, is_unordered=is_unordered))
        self.in_backward = True

    def _begin_weights(self) -> None:
        self.weights.begin()
        if self.weights.total is not None and not self._reduces and self.ledger.holds_results():
            raise GradientError(ON_RESULTS)

    def _begin_reduction(self, *, is_unordered: bool) -> None:
        self.begin_reduction(is_unordered=is_unordered)
        self._has_reduction = True

    def _synchronize(self) -> None:
        collectives = internal_collectives_of(self.world)
        if collectives.any_rank(bool(newly_trainable(self.frozen))):
            self._adopt_newly_trainable()
        problem: GradientError | None = None
        needs = False
        try:
            self.weights.drop_stale()
            needs = self._needs_synchronize()
        except GradientError as error:
            problem = error
        has_weight = self.weights.total is not None or self.weights.next is not None
        mine = torch.tensor([needs, problem is not None, has_weight], dtype=torch.uint8, device="cpu")
        is_needed, is_refused, is_weighted = collectives.all_reduce(mine, "max").tolist()
        if is_refused:
            raise in_step(problem or GradientError("synchronize() was refused on another rank; its error says why"))
        if is_needed:
            if needs or self.weights.next is not None:
                self.weights.count_local()
            elif is_weighted and not self.weights.num_backwards:
                self.weights.has_skipped = True  # no weight is given for nothing
            self.run_or_fail(self.reduce_again)
            self._num_backwards = 0
            self.weights.reset()
            for on_reduced in self._on_reduced:
                on_reduced(self.reduction)

    def _needs_synchronize(self) -> bool:
        """Whether some gradient on this rank waits to be reduced. Raises GradientError for a weight that is unused."""
        weights = self.weights
        if weights.next is not None and weights.num_backwards:
            raise GradientError(
                "weigh() was called before synchronize(), and no backward() came in between; call skip() in place of a "
                "backward() that is left out"
            )
        self._refuse_zeros()
        self.launcher.refuse_lost()
        return self.ledger.needs_synchronize()

    def _refuse_zeros(self) -> None:
        """Raise GradientError if zeros that the script has written to `.grad` would make a rank count that skipped."""
        if self.weights.has_skipped and not self.weights.num_backwards and self.ledger.needs_synchronize():
            grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            if all(map(is_zero, grads)):
                raise GradientError(ZEROS_OF_SKIP)

    def _adopt_newly_trainable(self) -> None:
        """Collective: parameters that have come to require a gradient are reduced from now on, in new buckets."""
        adopted = newly_trainable(self.frozen)
        self.frozen[:] = [parameter for parameter in self.frozen if not parameter.requires_grad]
        specs = list(map(self._spec_of, adopted))
        self._check_agreement(specs, internal_collectives_of(self.world))
        self.layout.add(specs, adopted)
        self._attach()

    def _attach(self) -> None:
        """Hook the parameters that are reduced and have no hook yet."""
        self._handles += attach_hooks(self, len(self._handles))
        self._hooked = [parameter._cdata for parameter in self.parameters]

    def run_or_fail(self, *operations: Callable[[], object]) -> None:
        """Run them in turns. An error in one ends the reduction on all ranks."""
        try:  # not a context manager, whose own lines Ctrl-C could interrupt
            for operation in operations:
                operation()
        except BaseException as error:  # Ctrl-C, too: it may have left a reduction half done
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """This reduction cannot be finished: tell the peers that wait for this rank why."""
        self.failure = error
        self.in_backward = False
        self.weights.end()
        self.launcher.abort()
        self.world.break_off("the reduction of gradients", error)
