"""Does this backward reduce? Begins and finishes the round of one that does, and refuses steps on bad gradients.

A backward reduces or it does not, decided when its first gradient arrives: every `accumulate`-th backward outside
`no_sync()` reduces.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from torchring.collectives.join import Join
from torchring.collectives.service import internal_collectives_of
from torchring.dynamo import is_compiled_backward
from torchring.errors import GradientError, in_step, with_way_out
from torchring.generation import Change
from torchring.gradients.backward import BackwardWatch
from torchring.gradients.group import OptimizerGroup
from torchring.gradients.hooks import attach_hooks, make_hook
from torchring.gradients.ledger import SeenGradients
from torchring.gradients.module_wrappers import explain
from torchring.gradients.participants.buffers import Place
from torchring.gradients.participants.replicas import ReplicaCheck
from torchring.gradients.participants.sparse import NonFiniteGradient
from torchring.gradients.participants.weights import ON_RESULTS, OTHER_BATCH
from torchring.gradients.plan import ControlBits, ParameterSpec
from torchring.gradients.reduction import Reduction
from torchring.observe.phases import BACKWARD, BETWEEN, EXPOSED, INPUT, OPTIMIZER
from torchring.observe.services import flight_recorder_of, recorder_of
from torchring.world import World


class Batches(Protocol):
    """What an elastic job wants to know of the backwards, and knows of the batches."""

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


class GradientSync:
    """The backwards and steps of one optimizer.

    Args:
        reduction: gets the gradients.
        replicas: says in every round whether somebody wrote to the parameters.
        accumulate: number of backwards per reduction.
        on_nonfinite: what to do about NaN and infinities; see `wrap`.
        frozen: parameters of the optimizer that do not require a gradient. Looked at again after each backward.
        spec_of: what the plan needs to know of a parameter.
        owner: the optimizer; referred to weakly.

    Attributes:
        accumulate: see above; may change between reductions, on all ranks alike.
        failure: the error that ended the last backward between ranks. Gradients are worth nothing after it.
        num_steps: how many optimizer steps this rank has made.
        num_skipped_steps: how many steps were left out, because a gradient was not finite.
        in_backward: whether a backward of these parameters is under way.
        thread: which runs the hooks of that backward, if its parameters are on the CPU; else 0.
        batches: of an elastic job.
        has_been_skipped: by `skip()` of another optimizer, and no optimizer has made a step or zeroed gradients since.
    """

    def __init__(
        self,
        reduction: Reduction,
        replicas: ReplicaCheck,
        *,
        accumulate: int,
        on_nonfinite: str,
        frozen: Sequence[torch.nn.Parameter],
        spec_of: Callable[[torch.nn.Parameter], ParameterSpec],
        owner: object,
    ) -> None:
        self.reduction = reduction
        self.owner = weakref.ref(owner)
        self.num_steps = 0
        self.num_skipped_steps = 0
        self.failure: BaseException | None = None
        self.is_closed = False
        self._replicas = replicas
        self._recorder = recorder_of(reduction.world)
        self._progress = flight_recorder_of(reduction.world)
        self._on_nonfinite = on_nonfinite
        self._frozen = list(frozen)
        self._spec_of = spec_of

        # Whether a backward reduces
        self.accumulate = accumulate
        self._num_backwards = 0  # since the last reduction, without those inside no_sync()
        self._no_sync_depth = 0
        self._weights = reduction.weights
        self.batches: Batches | None = None
        self._change = reduction.world.shared(Change)
        self._join = reduction.world.shared(Join)
        self._handles_of_zero_weight: list[torch.utils.hooks.RemovableHandle] = []

        self.has_been_skipped = False

        # The backward under way
        self.in_backward = False
        self.thread = 0
        self._arrived: torch.nn.Parameter | None = None  # has got its gradient just now, before all others
        self._local = SeenGradients()  # what backwards with weights have left in `.grad`
        self._reduces = False
        self.mark_ready: Callable[[int], None] = reduction.scheduler.mark_local  # or `mark_ready`

        # Hooks and what else calls back
        self.watch = BackwardWatch(self._backward_ended, self.abandon_backward)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._hooked: list[int] = []  # what identifies the parameters, which torch.utils.swap_tensors changes
        self._num_wrappers_seen = -1  # ModuleWrappers.num_built when these parameters were checked last
        self._group = reduction.world.shared(OptimizerGroup)
        self._group.add(self)
        self._attach()

    @property
    def world(self) -> World:
        return self.reduction.world

    @property
    def is_weighed_by_script(self) -> bool:
        """Whether the script has weighed the backward under way, or the next one."""
        return self._weights.is_by_script

    @property
    def wants_reduction(self) -> bool:
        """Whether a backward is under way that reduces."""
        return self.in_backward and self._reduces

    @property
    def is_in_no_sync(self) -> bool:
        """Whether a backward is under way inside `no_sync()`."""
        return self.in_backward and not self._reduces and self._no_sync_depth > 0

    @property
    def batch_weight(self) -> float | None:
        """The weight of the backward under way, or else of the one that comes. None if it has none."""
        if self._handles_of_zero_weight:
            return 0.0
        return self._weights.last if self.in_backward else self._weights.next

    def extend(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Collective: more parameters, some of which may be frozen for now."""
        self._frozen += parameters
        self._adopt_thawed()

    def first_gradient(self, index: int) -> None:
        """The gradient of parameter `index` arrived just before its hook was there."""
        make_hook(self, index)(self.reduction.parameters[index])

    def close(self) -> None:
        """Remove the hooks."""
        self.is_closed = True
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._end_zero_weight()
        self._group.remove(self)
        self.reduction.close()
        if not self.in_backward:
            self.watch.close()  # the two refer to each other; a closed watch needs no garbage collector

    # Backward

    def begin_backward(self, index: int) -> None:
        """The first gradient of a backward arrives, of this parameter; or of an outer backward, after an inner one."""
        if not self.in_backward:
            if self.batches is not None:
                self._begin_batch(self.batches)
            self._enter(BACKWARD)
            if self._group.are_several and self.reduction.specs[0].device.type == "cpu":
                self._group.refuse_other_thread(thread := threading.get_ident())
                self.thread = thread
            self._arrived = self.reduction.parameters[index]
            try:
                if self.reduction.is_sum and self.reduction.holds_results():
                    self.reduction.notice_zeroing(self._arrived)
                self._begin(reduces=self._next_reduces())
            finally:
                self._arrived = None
        self.watch.arm()

    def finish_backward(self, *, reduces: bool, carried: set[Place] | None = None) -> None:
        """A backward that reached these parameters on some rank is over. It reduces if any rank's was to reduce.

        Args:
            carried: see `Reduction.finish`.
        """
        if self._group.is_skipping and not self.in_backward:
            self._leave_out()
        if reduces:
            if not self.wants_reduction:  # only other ranks got as far as to begin
                self._begin(reduces=True)
            self._or_fail(lambda: self._finish_round(carried))
            self._num_backwards = 0
            self._weights.reset()
        else:
            self._num_backwards += self._no_sync_depth == 0
            if self._weights.is_weighted:
                self._local = SeenGradients(self._own_parameters())
        self.has_been_skipped = self._group.skipper not in (None, self)
        self.in_backward, self.thread = False, 0
        self._enter(BETWEEN if reduces else INPUT)
        self._end_zero_weight()
        if reduces:
            sums = self.reduction.control_sums
            steps_differ = bool(sums.on_some_but_not_all(self.reduction.world.size).odd_steps)
            is_alarmed = steps_differ or sums.parameters_changed > 0
            self._replicas.after_round(is_alarmed, self.num_steps, is_apart=sums.has_ended > 0)
            if self.batches is not None and (sums.wants_change or sums.leaves):
                self.batches.change_is_agreed(all_leave=sums.leaves == self.reduction.world.size)
        self.weigh_batch()

    def abandon_backward(self) -> None:
        """The backward under way has raised (out of memory, an error in a custom function): drop its round."""
        if self.in_backward:
            self.in_backward = False
            if not self._group.is_skipping:
                self._weights.withdraw()
            self._end_zero_weight()
            if self._reduces:
                self.reduction.scheduler.abandon()
            self.weigh_batch()

    def gradient_failed(self, error: BaseException) -> None:
        """A hook has raised. With no bucket sent yet, backward drops the round as after any other error."""
        if self._reduces and self.reduction.scheduler.has_launched:
            self._fail(error)

    def forget_gradients(self) -> None:
        """The optimizer has dropped or zeroed all gradients, so the next backward begins a group of `accumulate`."""
        self._num_backwards = 0
        self._weights.reset()
        self._group.forget_skips()

    def weigh(self, weight: float) -> None:
        """The loss of the next backward is a mean over `weight` samples. See `DistributedOptimizer.weigh`."""
        if self.in_backward:
            raise GradientError("weigh() was called inside backward(); call it before")
        self._drop_stale_weights()
        may_accumulate = self.accumulate > 1 or self._no_sync_depth > 0 or self._weights.num_backwards > 0
        if may_accumulate:
            self._refuse_results()
        self._weigh(weight)

    def weigh_batch(self) -> None:
        """In an elastic job: give the next backward the weight of its batch, unless the script has given another."""
        if self.batches is None or self._weights.is_given or (current := self.batches.current_weight()) is None:
            return
        weight, whole = current
        if self.reduction.is_sum:
            self._end_zero_weight()
            if not weight:
                self._zero_next_backward()
        elif not self._weights.expects(weight, whole):
            self._weigh(weight, whole)

    def _begin_batch(self, batches: Batches) -> None:
        """In an elastic job, a backward begins. Raises GradientError if it has the weight of another batch."""
        batches.begin_backward(is_weighed=self._weights.is_given)
        current = None if self._weights.is_given or self.reduction.is_sum else batches.current_weight()
        if current is not None and not self._weights.expects(*current):
            raise GradientError(OTHER_BATCH)

    def _weigh(self, weight: float, whole: float | None = None) -> None:
        reduction, weights = self.reduction, self._weights
        self._end_zero_weight()
        weight = weights.representable(weight)
        factor = weights.give(weight, whole)
        if factor != 1.0:
            reduction.scale_local(factor)
            for grad in (p.grad for p in self._thawed() if p.grad is not None):
                grad.mul_(factor)
            self._local = SeenGradients(self._own_parameters())
        if not weight:
            self._zero_next_backward()

    def _zero_next_backward(self) -> None:
        """Gradients of the next backward are zeros, whatever the loss is, a mean over nothing included."""
        for parameter in self._own_parameters():
            if parameter.requires_grad:
                handle = parameter.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
                self._handles_of_zero_weight.append(handle)

    def skip(self) -> None:
        """Collective: take part in the reduction of the others' next backward. See `DistributedOptimizer.skip`."""
        if self.in_backward:
            raise GradientError("skip() was called inside backward(); call it in place of backward()")
        if self.has_been_skipped:
            raise GradientError(
                "skip() was called on another optimizer before, which stands for a whole backward(): that one has "
                "reached these parameters, too. Call skip() once for each backward() that this rank leaves out, on the "
                "same optimizer if there are several"
            )
        if self.batches is not None:
            self.batches.begin_backward(is_weighed=self._weights.is_given, is_skipped=True)
        self._leave_out()
        self._take_part(reduces=self._no_sync_depth == 0 and self._num_backwards + 1 >= self.accumulate, skipper=self)

    def _leave_out(self) -> None:
        """This rank has no backward where others have one."""
        self.note_skip()
        self.weigh_batch()
        self.forget_next_backward()

    def note_skip(self) -> None:
        """The others' backward has reached these parameters, or may have, if it sends nothing."""
        self._drop_stale_weights()
        self._weights.has_skipped = True
        if self._weights.is_given:
            self._weights.drop_next()
            self._end_zero_weight()

    def _take_part(self, *, reduces: bool, skipper: GradientSync | None = None) -> None:
        """Collective: what a backward would do, with what is local already, or nothing."""
        with torch.no_grad(), self._group.skipping(skipper):
            self._begin(reduces=reduces)
            self._group.finish_backward(self)

    def take_part(self) -> None:
        """Collective: reduce what is local, or zeros, in the round of the others' next backward, or of their own call.

        Unlike a rank that skips, this rank counts in the mean.
        """
        if self.in_backward:
            raise GradientError("synchronize() was called inside backward(); call it after backward() has returned")
        self._ignore_zeros()
        if self._weights.has_skipped and self.reduction.first_unsettled() is None:
            self._take_part(reduces=True)
            return
        self._drop_stale_weights()
        if self._weights.is_weighted and self._weights.next is None:
            self._weights.give(0.0)  # this call adds nothing to what the backwards before have
        with torch.no_grad():
            self._begin(reduces=True)
            self._group.finish_backward(self)

    def forget_next_backward(self) -> None:
        """The backward that a weight may have been given for does not come."""
        self._weights.drop_next()
        self._end_zero_weight()
        self._drop_stale_weights()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here only accumulate, and do not count towards `accumulate`."""
        self._no_sync_depth += 1
        try:
            yield
        finally:
            self._no_sync_depth -= 1

    def synchronize(self) -> None:
        """Collective: reduce whatever is local on any rank. Does nothing where nothing is local."""
        if self.in_backward:
            raise GradientError("synchronize() was called inside backward(); call it after backward() has returned")
        if self._join.is_open:  # others may have ended, and meet this with a round
            self._drop_stale_weights()
            self._count_local(needs=self._needs_synchronize())
            self._weights.drop_next()
            self._end_zero_weight()
            self._take_part(reduces=True)
            return
        self._recorder.enter(EXPOSED)
        with torch.no_grad():  # a graph on the gradients, of backward(create_graph=True), is cut here
            self._group.guard.run("synchronize()", self._synchronize)
        self._recorder.enter(BETWEEN)

    # Step

    def before_step(self) -> None:
        """The optimizer is about to write to the parameters: note whether somebody else has."""
        self._enter(OPTIMIZER)
        self._replicas.has_changed()
        self._group.forget_skips()

    def accept_parameters(self) -> None:
        """The parameters are as the optimizer has left them: its step is about to evaluate a closure."""
        self._enter(INPUT)
        self._replicas.accept()

    def has_stepped(self) -> None:
        """The optimizer has made a step."""
        self._replicas.accept()
        self.write_buffers()
        self.num_steps += 1
        self._end_step()

    def take_over(self, src: int) -> None:
        """Collective: this rank's parameters have become those of rank `src`, and no gradient is left."""
        if self.reduction.buffers is not None:
            self.reduction.buffers.take_over(src)
        steps = torch.tensor([self.num_steps, self._recorder.num_steps], device="cpu")
        internal_collectives_of(self.reduction.world).broadcast(steps, src)
        self.num_steps, self._recorder.num_steps = map(int, steps.tolist())
        self._num_backwards = 0
        self._weights.reset()
        self._replicas.accept_all()

    def write_buffers(self) -> None:
        """All ranks make a step, or all leave one out: the model's buffers get what the last round has found."""
        if self.reduction.buffers is not None:
            self.reduction.buffers.write()

    def can_skip_alone(self) -> bool:
        """Whether `step()` needs no other rank to find out whether to make the step."""
        return self._on_nonfinite != "skip" or self.reduction.rounds.knows_at_once

    def check_backward(self) -> None:
        """Before a step: raise GradientError if the last backward failed, or is still under way."""
        world = self.reduction.world
        if world.is_forked:
            world.raise_if_broken()
        if self.failure is not None:
            raise GradientError(f"the last backward did not reduce its gradients: {self.failure}") from self.failure
        self.reduction.rounds.poll()
        self._refuse_module_wrappers()
        if self.in_backward:
            raise GradientError(
                "step() was called inside backward(), before all gradients are reduced; call it after backward()"
            )

    def check_gradients(self) -> bool:
        """Before a step: raise GradientError if a gradient is known to be wrong. Returns whether to make the step."""
        world = self.reduction.world
        for parameter in self._frozen:
            if parameter.requires_grad and parameter.grad is not None:
                name = self._spec_of(parameter).name
                raise GradientError(
                    f"{name} was frozen and has a gradient now that has never been reduced; call "
                    "optimizer.synchronize() before step()",
                    rank=world.rank,
                    parameters=(name,),
                )
        if found := self.reduction.first_unsettled():
            name, state = found
            advice = "Call optimizer.synchronize() before step() to reduce what is local"
            if self._hooked != [parameter._cdata for parameter in self.reduction.parameters]:
                state = "is this rank's own"
                advice = (
                    "torchring's hooks are gone: parameters were exchanged, as load_state_dict() does after "
                    "torch.__future__.set_swap_module_params_on_conversion(True). close() this optimizer and call "
                    "torchring.wrap() again, on all ranks"
                )
            raise GradientError(
                f"the gradient of {name} {state}; stepping on it would let the ranks drift apart. {advice}",
                rank=world.rank,
                parameters=(name,),
                step=self.num_steps,
            )
        if self._on_nonfinite == "ignore":
            return True
        reduction, skips = self.reduction, self._on_nonfinite == "skip"
        non_finite = reduction.find_non_finite() if skips else reduction.non_finite
        if non_finite is None or not is_still_there(non_finite):
            return True
        if skips:
            self.num_skipped_steps += 1
            self.write_buffers()
            self._end_step()
            return False
        rank, name, _ = non_finite
        origin = "the sum over ranks overflowed" if rank is None else f"NaN or infinity came from rank {rank}"
        raise GradientError(
            f"the gradient of {name} is not finite; {origin}",
            rank=world.rank,
            peers=() if rank is None else (rank,),
            parameters=(name,),
            step=self.num_steps,
        )

    def _enter(self, phase: int) -> None:
        """Record that a phase of a step begins. Other ranks see that, too."""
        self._recorder.enter(phase)
        if self._progress is not None:
            self._progress.enter(phase, self.num_steps)

    def _end_step(self) -> None:
        self._recorder.enter(OPTIMIZER)
        self._recorder.end_step()
        if self._progress is not None:
            self._progress.enter(INPUT, self.num_steps)

    def _next_reduces(self) -> bool:
        """Whether the backward that begins now is to reduce. Raises GradientError if it could not be reduced right."""
        if self.failure is not None:
            failure = str(self.failure) or type(self.failure).__name__
            raise GradientError(with_way_out(f"an earlier backward failed: {failure}")) from self.failure
        if is_compiled_backward():
            raise GradientError(
                "compiled autograd runs this backward() and does not say when it ends, so gradients would never be "
                "reduced. Set torch._dynamo.config.compiled_autograd = False; torch.compile works without it"
            )
        self._refuse_module_wrappers()
        reduces = self._no_sync_depth == 0 and self._num_backwards + 1 >= self.accumulate
        if reduces and torch.is_grad_enabled():
            raise GradientError(
                "backward(create_graph=True) leaves a graph on the gradients that averaging would cut. Run it inside "
                "optimizer.no_sync(), and call optimizer.synchronize() afterwards; or take inner gradients with "
                "torch.autograd.grad(..., create_graph=True), and call backward() for the outer loss"
            )
        if self.reduction.rounds.is_captured():
            raise GradientError(
                "backward() is being captured into a CUDA graph, whose replays would reduce without torchring's "
                "checks and bookkeeping. Capture the model with torch.cuda.make_graphed_callables, whose gradients "
                "arrive outside the graph, or capture nothing but the forward pass"
            )
        return reduces

    def _refuse_module_wrappers(self) -> None:
        """Raise GradientError if a DDP or FSDP reduces one of these parameters, too, whenever it was built."""
        wrappers = self._group.module_wrappers
        if self._num_wrappers_seen == wrappers.num_built:
            return
        if shared := wrappers.first_shared(self.reduction.parameters):
            index, kind = shared
            name = self.reduction.specs[index].name
            raise GradientError(
                explain(name, kind), rank=self.reduction.world.rank, parameters=(name,), step=self.num_steps
            )
        self._num_wrappers_seen = wrappers.num_built

    def _begin(self, *, reduces: bool) -> None:
        self._reduces = reduces
        if not self._group.is_skipping:
            self._or_fail(lambda: self._begin_weight(reduces=reduces))
        if reduces:
            self.reduction.world.raise_if_broken()
            self._or_fail(lambda: self._begin_round(hold=self._group.are_several))
        self.mark_ready = self.reduction.mark_ready if reduces else self.reduction.scheduler.mark_local
        self.in_backward = True

    def _backward_ended(self) -> None:
        """The outermost backward is about to return."""
        self._group.finish_backward(self)

    def _begin_round(self, *, hold: bool, is_again: bool = False) -> None:
        bits = ControlBits(
            odd_steps=self.num_steps % 2,
            parameters_changed=int(self._replicas.has_changed()),
            has_thawed=int(self._has_thawed()),
            has_ended=int(self._group.has_ended),
            wants_change=int(self._change.is_wanted),
            leaves=int(self._change.leaves),
        )
        is_absent = (self._group.is_skipping or self._weights.has_skipped) and not self._weights.num_backwards
        self.reduction.begin(step=self.num_steps, hold=hold, control_bits=bits, is_absent=is_absent, is_again=is_again)

    def _finish_round(self, carried: set[Place] | None) -> None:
        self.reduction.finish(carried)
        if self.reduction.control_sums.has_thawed:
            self._adopt_thawed()
            self._reduce_now()

    def _reduce_now(self) -> None:
        """A round of its own for what is local, outside backward."""
        self._begin_round(hold=True, is_again=True)
        self.reduction.finish()

    def _synchronize(self) -> None:
        collectives = internal_collectives_of(self.reduction.world)
        if collectives.any_rank(self._has_thawed()):
            self._adopt_thawed()
        self._drop_stale_weights()
        problem: GradientError | None = None
        needs = False
        try:
            needs = self._needs_synchronize()
        except GradientError as error:
            problem = error
        wants = collectives.all_reduce(
            torch.tensor([int(needs), int(problem is not None)], device="cpu"), "max"
        ).tolist()
        if wants[1]:
            raise in_step(problem or GradientError("synchronize() was refused on another rank; its error says why"))
        if wants[0]:
            self._count_local(needs=needs)
            self._or_fail(self._reduce_now)
            self._num_backwards = 0
            self._weights.reset()

    def _needs_synchronize(self) -> bool:
        """As `Reduction.needs_synchronize`. Raises GradientError if it is not clear what a weight was given for."""
        if self._weights.is_given and self._weights.num_backwards:
            raise GradientError(
                "weigh() was called before synchronize(), and no backward() came in between; call skip() in place of a "
                "backward() that is left out"
            )
        self._ignore_zeros()
        return self.reduction.needs_synchronize()

    def _ignore_zeros(self) -> None:
        """Zeros that the script has written to `.grad` do not make this rank count if it has skipped."""
        if self._weights.has_skipped and not self._weights.num_backwards:
            self.reduction.ignore_zeros()

    def _count_local(self, *, needs: bool) -> None:
        """Gradients that the script has put into `.grad`, and a weight for them, count as those of a backward do."""
        weights = self._weights
        if weights.num_backwards or not (weights.is_given or (needs and weights.next is None)):
            return
        if weights.next == 0:
            for parameter in self.reduction.parameters:  # counts as zero, whatever it holds
                parameter.grad = None
        self._end_zero_weight()
        weights.begin()

    def _own_parameters(self) -> list[torch.nn.Parameter]:
        return [*self.reduction.parameters, *self._thawed()]

    def _thawed(self) -> list[torch.nn.Parameter]:
        """Parameters that require a gradient by now, and are not adopted yet."""
        return [parameter for parameter in self._frozen if parameter.requires_grad]

    def _begin_weight(self, *, reduces: bool) -> None:
        if self._weights.is_weighted and not torch.is_grad_enabled():  # or autograd leaves another tensor in `.grad`
            self._drop_stale_weights()
        self._weights.begin()
        if self._weights.is_weighted and not reduces:
            self._refuse_results()

    def _refuse_results(self) -> None:
        """Raise GradientError if weights would be given to results of an earlier step, too."""
        if self.reduction.holds_results():
            self.reduction.notice_zeroing(self._arrived)
        if self.reduction.holds_results():
            raise GradientError(ON_RESULTS)

    def _drop_stale_weights(self) -> None:
        """Forget the backwards whose gradients the script has dropped or zeroed, as model.zero_grad() does."""
        weights = self._weights
        if not weights.num_backwards:
            return
        if weights.is_weighted:
            is_gone = self._local.is_gone(self._arrived, were_zero=not weights.total)
        else:
            is_gone = not self.reduction.has_local()
        if is_gone:
            weights.reset()

    def _end_zero_weight(self) -> None:
        """The backward of weight 0 is over."""
        for handle in self._handles_of_zero_weight:
            handle.remove()
        self._handles_of_zero_weight = []

    def _has_thawed(self) -> bool:
        return any(parameter.requires_grad for parameter in self._frozen)

    def _adopt_thawed(self) -> None:
        """Collective: parameters that have come to require a gradient are reduced from now on."""
        thawed = self._thawed()
        self._frozen = [parameter for parameter in self._frozen if not parameter.requires_grad]
        self.reduction.extend([self._spec_of(parameter) for parameter in thawed], thawed)
        self._attach()

    def _attach(self) -> None:
        """Hook the parameters that the reduction has and that have no hook yet."""
        self._num_wrappers_seen = -1
        self._handles += attach_hooks(self, self.reduction.parameters, len(self._handles))
        self._hooked = [parameter._cdata for parameter in self.reduction.parameters]

    def _or_fail(self, operation: Callable[[], None]) -> None:
        try:
            operation()
        except BaseException as error:  # Ctrl-C, too: it may have left a reduction half done
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """This round cannot be finished: tell the peers that wait for this rank why."""
        self.failure = error
        self.in_backward = False
        self._end_zero_weight()
        self.reduction.scheduler.abandon()
        self.reduction.world.break_off("the reduction of gradients", error)


def is_still_there(found: NonFiniteGradient) -> bool:
    """Whether the value is still not finite: the script may have mended it."""
    if found.tensor is None:
        return True
    grad = found.tensor()
    values = grad.coalesce().values() if grad is not None and grad.is_sparse else grad
    return values is not None and not bool(torch.isfinite(values).all())
