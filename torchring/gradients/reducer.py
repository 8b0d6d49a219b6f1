"""Owns the rounds of one optimizer: begins one with a backward that reduces, ends it, and refuses bad steps.

A backward reduces or it does not, decided when its first gradient arrives: every `accumulate`-th backward outside
`no_sync()` reduces. A round is one reduction of all buckets. What else takes part in a round is a `Participant`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeAlias

import torch

from torchring.collectives.join import Join
from torchring.collectives.service import Collectives, collectives_of, internal_collectives_of
from torchring.devices.stream import OnStream
from torchring.dynamo import is_compiled_backward
from torchring.errors import GradientError, PlanMismatchError, in_step, ranks_in_words, with_way_out
from torchring.gradients.contract import Stats, Sync
from torchring.gradients.hooks import BackwardWatch, attach_hooks, make_hook
from torchring.gradients.launcher import Launcher
from torchring.gradients.layout import BucketLayout, Options
from torchring.gradients.ledger import Ledger, OptimizerLedger, StaleGradients, note_stale
from torchring.gradients.module_wrappers import MODULE_WRAPPERS, explain
from torchring.gradients.plan import ParameterSpec, describe
from torchring.gradients.round import ControlFields, NonFiniteGradient, Participant, RoundPhase, RoundState
from torchring.gradients.weighing import Weighing, unfrozen
from torchring.interruption import InterruptionGuard
from torchring.observer import BACKWARD, BETWEEN, EXPOSED, INPUT, OPTIMIZER
from torchring.participants.buffers import BufferSpec, BufferSync
from torchring.participants.noise import NoiseScale
from torchring.participants.replicas import ReplicaCheck
from torchring.participants.sparse import SparseReduction
from torchring.world import World

_KINDS: Final = (*(Weighing, SparseReduction, BufferSync, ReplicaCheck, NoiseScale),)


def control_fields(world: World, guests: Sequence[Participant]) -> ControlFields:
    """The control bits of a round: those of the participants, and three of the reducer.

    has_unfrozen: a parameter that was frozen requires a gradient. is_absent: the rank takes part without a gradient,
    and does not count. has_ended: the rank has no data left, inside `torchring.join`.
    """
    kinds: Sequence[type[Participant] | Participant] = (*_KINDS, *guests)
    return ControlFields(
        ("has_unfrozen", "is_absent", "has_ended", *(name for kind in kinds for name in kind.bits)),
        tuple(name for kind in kinds for name in kind.numbers),
        tuple(name for kind in kinds for name in kind.by_rank),
        world.rank,
        world.size,
    )


Follow: TypeAlias = weakref.WeakMethod[Callable[[Sequence[bytes]], None]]
ROUND: Final = b"backward()"
"""What a rank announces at the beginning of a round, see `Members.announce`."""


class Members:
    """The reducers of one world, in the order in which their optimizers were wrapped, and what they know together.

    Attributes:
        guard: runs what takes several collectives, and must not be left between two of them.
        has_ended: whether this rank's data has ended, inside `torchring.join`.
        is_skipping: whether this rank takes part in a backward of the others without one of its own.
        skipper: the member whose `skip()` is under way.
        skipped: members that `skip()` of another one has reached, since a step or zero_grad() of any optimizer.
        stale: of an earlier training, or of an optimizer that is closed.
        waiting: see `Launcher`.
    """

    def __init__(self, world: World) -> None:
        self.guard = InterruptionGuard(world)
        MODULE_WRAPPERS.find()
        self.has_ended = False
        self.is_skipping = False
        self.skipper: Reducer | None = None
        self.skipped: set[Reducer] = set()
        self.stale: StaleGradients = {}
        self.waiting: set[Launcher] = set()
        self._world = world
        self._reducers: list[Reducer] = []

    def __iter__(self) -> Iterator[Reducer]:
        return iter(list(self._reducers))

    @property
    def are_several(self) -> bool:
        return len(self._reducers) > 1

    @property
    def followers(self) -> dict[bytes, Follow]:
        """Of the optimizers whose step needs all ranks: what a rank that has ended does then, by name."""
        return dict(each.follower for each in self._reducers if each.follower is not None)

    def advance(self) -> bool:
        """Do this rank's part of the buckets that have left, where nobody is late. Returns whether some still wait."""
        for launcher in tuple(self.waiting):
            launcher.advance()
        return bool(self.waiting)

    def add(self, reducer: Reducer) -> None:
        self._reducers.append(reducer)

    def remove(self, reducer: Reducer) -> None:
        if reducer in self._reducers:
            self._reducers.remove(reducer)
        self.skipped.discard(reducer)
        self.waiting.discard(reducer.launcher)

    @contextmanager
    def skipping(self, skipper: Reducer | None = None) -> Iterator[None]:
        """Members that a backward of other ranks reaches are absent on this rank."""
        self.is_skipping, self.skipper = True, skipper
        try:
            yield
        finally:
            self.is_skipping, self.skipper = False, None

    def announce(self, what: bytes = ROUND) -> list[int]:
        """Collective, inside `torchring.join`, where steps need all ranks: say what comes. Returns who has ended."""
        if self.has_ended or not (self.followers and self._world.shared(Join).is_open):
            return []
        said = internal_collectives_of(self._world).all_gather_bytes(what)
        if others := [rank for rank, theirs in enumerate(said) if theirs not in (b"", what)]:
            theirs = said[others[0]].decode()
            text = f"{ranks_in_words(others)} called {theirs} where this rank called {what.decode()}"
            raise in_step(PlanMismatchError(text, rank=self._world.rank, peers=others))
        return [rank for rank, theirs in enumerate(said) if not theirs]

    def refuse_other_thread(self, thread: int) -> None:
        """Raise GradientError if a backward begins in `thread` while one of another thread is under way.

        Breaks the world, where that other thread may be waiting. A device runs all hooks in one thread.
        """
        if not any(member.in_backward and member.thread not in (0, thread) for member in self._reducers):
            return
        error = GradientError(
            "two threads run backward() at the same time, each with an optimizer of its own; ranks could not tell the "
            "backwards apart. Let one thread train all models, or take turns, in the same order on all ranks",
            rank=self._world.rank,
        )
        self._world.break_off("backward()", error)
        raise error


class Reducer(Sync):
    """The backwards, rounds and steps of one optimizer. Opening it is collective.

    Args:
        world: has more than one rank.
        specs, parameters: those that require a gradient, in registration order.
        options: see `Options`.
        members: the reducers of this world.
        end_backward: called when a backward that has reached this reducer is about to return.
        replicas: says in every round whether somebody wrote to the parameters.
        ownership: looks for parameters that nobody reduces, if there is a model.
        guests: participants that a room sends; they come before the others.
        buffers: those of the model that `options.sync_buffers` is about.
        frozen: parameters of the optimizer that do not require a gradient. Looked at again after each backward.
        spec_of: what the plan needs to know of a parameter.
        owner: the optimizer; referred to weakly.

    Attributes:
        parameters, specs: those that are reduced. They grow with `extend`.
        frozen: parameters that are reduced as soon as they require a gradient.
        progress: says how far the rounds are.
        layout: the buckets.
        launcher: has the round under way, or the last one.
        ledger: what is known about the gradients.
        weighing: gives gradients their weights.
        participants: what takes part in a round, in this order on all ranks.
        follower: see `Members.followers`. Called with what each rank has announced.
        failure: the error that ended the last backward between ranks. Gradients are worth nothing after it.
        num_steps: how many optimizer steps this rank has made.
        in_backward: whether a backward of these parameters is under way.
        thread: runs the hooks of that backward, if its parameters are on the CPU; else 0.
        on_ready: what hooks call, by parameter.
    """

    def __init__(
        self,
        world: World,
        specs: Sequence[ParameterSpec],
        parameters: Sequence[torch.nn.Parameter],
        options: Options,
        members: Members,
        *,
        end_backward: Callable[[Reducer], None],
        replicas: ReplicaCheck,
        ownership: Sequence[Participant] = (),
        guests: Sequence[Participant] = (),
        buffers: Sequence[BufferSpec] = (),
        frozen: Sequence[torch.nn.Parameter] = (),
        spec_of: Callable[[torch.nn.Parameter], ParameterSpec],
        owner: object,
    ) -> None:
        self.world = world
        self.owner = weakref.ref(owner)
        self.num_steps = 0
        self.failure: BaseException | None = None
        self.is_closed = False
        self.follower: tuple[bytes, Follow] | None = None
        self._options = options
        self.frozen = list(frozen)
        self._spec_of = spec_of
        self._guests = guests
        self._members = members
        self._end_backward = end_backward

        # Whether a backward reduces
        self.accumulate = options.accumulate
        self._num_backwards = 0  # since the last reduction, without those inside no_sync()

        self._control = control_fields(world, guests)

        # The round. The script's collectives check: another rank may be calling one of those, instead of wrapping.
        self._check_agreement(specs, collectives_of(world), buffers)
        self.progress = world.observer.open_progress("gradients")
        self.specs: list[ParameterSpec] = []
        self.parameters: list[torch.nn.Parameter] = []
        self._sparse = SparseReduction(
            world, self.specs, self.parameters, options.scale(world.size), is_sum=options.is_sum
        )
        self.layout = BucketLayout(
            *(world, options, self._control, specs, self.specs, self.parameters),
            self._sparse.mark_local,
            self.progress,
            members.waiting,
        )
        self.launcher = self.layout.launcher
        self.ledger = OptimizerLedger(partial(_ledgers, self.launcher, self._sparse))
        self._found_before: NonFiniteGradient | None = None  # as `non_finite`, before the round under way
        self.layout.open(specs, parameters)
        self.weighing = Weighing(
            world,
            self.parameters,
            self.frozen,
            self.ledger,
            is_sum=options.is_sum,
            mark_local=self.launcher.mark_local,
        )
        self._weights = self.weighing.weights
        self._weights.expect(self.layout.wire_dtypes)
        self.participants: list[Participant] = [*guests, self.weighing, self._sparse]
        self._buffers: BufferSync | None = None
        if buffers:
            all_reduce, device = self.layout.all_reduce, specs[0].device
            follow = all_reduce.stream.follow if isinstance(all_reduce, OnStream) else _nothing
            self._buffers = BufferSync(world, buffers, all_reduce, device, follow)
            self.participants.append(self._buffers)
        self.participants += [*ownership, replicas]
        self._noise: NoiseScale | None = None
        if world.size > 1 and options.op in ("mean", "sum"):
            self._noise = NoiseScale(
                *(world, self.specs, self.parameters, self.launcher.holds_result),
                is_sum=options.is_sum,
            )
            self.participants.append(self._noise)

        # The backward under way
        self.in_backward = False
        self.thread = 0
        self._reduces = False
        self._has_round = False  # that backward
        self.on_ready: Sequence[Callable[[int], None]] = ()

        # Hooks and what else calls back
        self.watch = BackwardWatch(partial(end_backward, self), self.abandon_backward)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._hooked: list[int] = []  # what identifies the parameters, which torch.utils.swap_tensors changes
        self._num_wrappers_seen = -1  # MODULE_WRAPPERS.num_built when these parameters were checked last
        members.add(self)
        self._attach()

    @property
    def round(self) -> RoundState:
        """The round under way, or the last one."""
        return self.launcher.round

    @property
    def num_reductions(self) -> int:
        """Number of reductions so far. The last one counts when it is over, or when the next begins."""
        return self.round.number + (self.round.phase is RoundPhase.OVER)

    @property
    def non_finite(self) -> NonFiniteGradient | None:
        """The first NaN or infinity in the last round, if there was one."""
        return self.round.non_finite

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
        return self.weighing.batch_weight(in_backward=self.in_backward)

    def stats(self) -> Stats:
        layout, timing = self.layout, self.layout.timing
        layout.agreement.poll()
        num_timed = max(timing.num_timed, 1)
        hidden = timing.total_busy_ms - timing.total_exposed_ms
        return Stats(
            algorithm=layout.all_reduce.algorithm,
            reason=layout.reason,
            overlap=layout.agreement.overlap,
            num_buckets=len(layout.buckets),
            bytes_per_step=layout.current_plan.num_bytes,
            num_reductions=self.num_reductions,
            communication_ms=timing.last_busy_ms,
            exposed_ms=timing.last_exposed_ms,
            mean_communication_ms=timing.total_busy_ms / num_timed,
            mean_exposed_ms=timing.total_exposed_ms / num_timed,
            overlap_ratio=max(0.0, hidden / timing.total_busy_ms) if timing.total_busy_ms else 0.0,
            num_skipped_steps=self.num_skipped_steps,
            batch_size=0.0 if self._noise is None else self._noise.batch_size,
            noise_scale=None if self._noise is None else self._noise.noise_scale,
        )

    def extend(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.frozen += parameters
        self._adopt_unfrozen()

    def first_gradient(self, index: int) -> None:
        """The gradient of parameter `index` arrived just before its hook was there."""
        make_hook(self, index)(self.parameters[index])

    def close(self) -> None:
        """Remove the hooks, end threads and links. Gradients stay where they are."""
        self.is_closed = True
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._members.remove(self)
        self.launcher.close()
        self.layout.all_reduce.close()
        for participant in self.participants:
            participant.close()
        self.progress.close()
        note_stale(self._members.stale, self.parameters)
        if not self.in_backward:
            self.watch.close()  # the two refer to each other; a closed watch needs no garbage collector

    # Backward

    def begin_backward(self, index: int) -> None:
        """The first gradient of a backward arrives, of this parameter; or of an outer backward, after an inner one."""
        if not self.in_backward:
            for guest in self._guests:
                guest.before_backward()
            self.weighing.refuse_unweighed()
            self.enter(BACKWARD)
            if self._members.are_several and self.specs[0].device.type == "cpu":
                self._members.refuse_other_thread(thread := threading.get_ident())
                self.thread = thread
            self.weighing.arrived = self.parameters[index]
            try:
                if self._options.is_sum and self.ledger.holds_results():
                    self.ledger.notice_zeroing(self.parameters[index])
                self._begin(reduces=self._next_reduces())
            finally:
                self.weighing.arrived = None
        self.watch.arm()

    def launch_own(self) -> None:
        """A backward is over on this rank: launch what needs no other rank, before ranks agree what it has reached."""
        if self.wants_reduction and self._has_round and not self.round.hold:
            self._count_noted()
            with self._failing():
                self.launcher.fill_rest()
                self.launcher.advance()

    def launch_rest(self, backward: object = None) -> None:
        """A backward that is to reduce these parameters on some rank is over on all ranks: launch what has not left.

        Args:
            backward: see `RoundState`.
        """
        if self._members.is_skipping and not self.in_backward:
            self._leave_out()
        if not self.wants_reduction:  # only other ranks got as far as to begin
            self._begin(reduces=True)
        self._count_noted()
        with self._failing():
            if not self._has_round:
                self._begin_round(is_unordered=True)
            self._launch_rest(backward)

    def finish_backward(self, *, reduces: bool) -> None:
        """A backward that reached these parameters on some rank is over. With `reduces`, `launch_rest` was called."""
        members = self._members
        if members.is_skipping and not self.in_backward:
            self._leave_out()
        if reduces:
            with self._failing():
                self._finish_round()
                if self.round.sums["has_unfrozen"]:
                    self._adopt_unfrozen()
                    self._reduce_again()
            self._num_backwards = 0
            self._weights.reset()
        else:
            self._num_backwards += self._no_sync_depth == 0
            self.weighing.accumulated()
        if members.skipper in (None, self):
            members.skipped.discard(self)
        else:
            members.skipped.add(self)
        self.in_backward, self.thread = False, 0
        self.enter(BETWEEN if reduces else INPUT)
        self.weighing.end_zero_weight()
        if reduces:
            for participant in self.participants:
                participant.finished(self.round)

    def abandon_backward(self) -> None:
        """The backward under way has raised (out of memory, an error in a custom function): drop its round."""
        if self.in_backward:
            self.in_backward = False
            if not self._members.is_skipping:
                self._weights.withdraw()
            self.weighing.end_zero_weight()
            if self._reduces and self._has_round:
                self.launcher.abandon()

    def gradient_failed(self, error: BaseException) -> None:
        """A hook has raised. With no bucket sent yet, backward drops the round as after any other error."""
        if self._reduces and self._has_round and self.launcher.has_launched:
            self._fail(error)

    def _count_noted(self) -> None:
        """Backward is over: count the gradients that hooks have noted since a gradient was counted last."""
        try:
            self.launcher.count_noted()
        except BaseException as error:
            self.gradient_failed(error)
            raise

    def forget_gradients(self) -> None:
        self._num_backwards = 0
        self._weights.reset()
        self._members.skipped.clear()

    def weigh(self, weight: float) -> None:
        if self.in_backward:
            raise GradientError("weigh() was called inside backward(); call it before")
        self.weighing.weigh(weight, may_accumulate=self.accumulate > 1 or self._no_sync_depth > 0)

    def skip(self) -> None:
        if self.in_backward:
            raise GradientError("skip() was called inside backward(); call it in place of backward()")
        if self in self._members.skipped:
            raise GradientError(
                "skip() was called on another optimizer before, which stands for a whole backward(): that one has "
                "reached these parameters, too. Call skip() once for each backward() that this rank leaves out, on the "
                "same optimizer if there are several"
            )
        for guest in self._guests:
            guest.before_backward()
        self._leave_out()
        self._take_part(reduces=self._no_sync_depth == 0 and self._num_backwards + 1 >= self.accumulate, skipper=self)

    def _leave_out(self) -> None:
        """This rank has no backward where others have one."""
        self.weighing.note_skip()
        self.weighing.forget_next_backward()

    def _take_part(self, *, reduces: bool, skipper: Reducer | None = None) -> None:
        """Collective: what a backward would do, with what is local already, or nothing."""
        with torch.no_grad(), self._members.skipping(skipper):
            self._begin(reduces=reduces)
            self._end_backward(self)

    def take_part(self) -> None:
        """Collective: reduce what is local, or zeros, in the round of the others' next backward, or of their own call.

        Unlike a rank that skips, this rank counts in the mean.
        """
        if self.in_backward:
            raise GradientError("synchronize() was called inside backward(); call it after backward() has returned")
        self.weighing.ignore_zeros()
        if self._weights.has_skipped and self.ledger.first_unsettled() is None:
            self._take_part(reduces=True)
            return
        self.weighing.add_nothing()
        with torch.no_grad():
            self._begin(reduces=True)
            self._end_backward(self)

    def synchronize(self) -> None:
        if self.in_backward:
            raise GradientError("synchronize() was called inside backward(); call it after backward() has returned")
        if self.world.shared(Join).is_open:  # others may have ended, and meet this with a round
            self.weighing.drop_stale()
            self.weighing.count_local(needs=self._needs_synchronize())
            self._weights.drop_next()
            self.weighing.end_zero_weight()
            self._take_part(reduces=True)
            return
        self.enter(EXPOSED)
        with torch.no_grad():  # a graph on the gradients, of backward(create_graph=True), is cut here
            self._members.guard.run("synchronize()", self._synchronize)
        self.enter(BETWEEN)

    # Step

    def before_step(self) -> None:
        self.enter(OPTIMIZER)
        for participant in self.participants:
            participant.before_step()
        self._members.skipped.clear()

    def accept_parameters(self) -> None:
        self.enter(INPUT)
        for participant in self.participants:
            participant.moved()

    def has_stepped(self) -> None:
        for participant in self.participants:
            participant.moved()
        self.write_buffers()
        self.num_steps += 1
        self._end_step()

    def take_over(self, src: int) -> None:
        """Collective: this rank's parameters have become those of rank `src`, and no gradient is left."""
        observer = self.world.observer
        steps = torch.tensor([self.num_steps, observer.num_steps], device="cpu")
        internal_collectives_of(self.world).broadcast(steps, src)
        self.num_steps, observer.num_steps = map(int, steps.tolist())
        self._num_backwards = 0
        for participant in self.participants:
            participant.take_over(src)

    def write_buffers(self) -> None:
        for participant in self.participants:
            participant.stepping()

    def sync_buffers(self) -> None:
        if self.in_backward:
            raise GradientError("sync_buffers() was called inside backward(); call it after backward() has returned")
        self.world.shared(Join).refuse("sync_buffers()")
        if self._buffers is not None:
            with torch.inference_mode(False):
                self._members.guard.run("sync_buffers()", self._buffers.synchronize)

    def can_skip_alone(self) -> bool:
        return self._options.on_nonfinite != "skip" or self.layout.agreement.knows_at_once

    def check_backward(self) -> None:
        if self.world.is_forked:
            self.world.raise_if_broken()
        if self.failure is not None:
            raise GradientError(f"the last backward did not reduce its gradients: {self.failure}") from self.failure
        self.layout.agreement.poll()
        self._refuse_module_wrappers()
        if self.in_backward:
            raise GradientError(
                "step() was called inside backward(), before all gradients are reduced; call it after backward()"
            )

    def check_gradients(self) -> bool:
        rank, policy = self.world.rank, self._options.on_nonfinite
        for parameter in self.frozen:
            if parameter.requires_grad and parameter.grad is not None:
                name = self._spec_of(parameter).name
                raise GradientError(
                    f"{name} was frozen and has a gradient now that has never been reduced; call "
                    "optimizer.synchronize() before step()",
                    rank=rank,
                    parameters=(name,),
                )
        self.launcher.refuse_lost()
        if unsettled := self.ledger.first_unsettled():
            name, state = unsettled
            advice = "Call optimizer.synchronize() before step() to reduce what is local"
            if self._hooked != [parameter._cdata for parameter in self.parameters]:
                state = "is this rank's own"
                advice = (
                    "torchring's hooks are gone: parameters were exchanged, as load_state_dict() does after "
                    "torch.__future__.set_swap_module_params_on_conversion(True). close() this optimizer and call "
                    "torchring.wrap() again, on all ranks"
                )
            raise GradientError(
                f"the gradient of {name} {state}; stepping on it would let the ranks drift apart. {advice}",
                rank=rank,
                parameters=(name,),
                step=self.num_steps,
            )
        if policy == "ignore":
            return True
        found = self.non_finite
        if found is None and policy == "skip":  # of the last round on a device, too, which is waited for
            found = self.layout.agreement.find_non_finite()
        if found is None or not found.is_still_there():
            return True
        if policy == "skip":
            self.num_skipped_steps += 1
            self.write_buffers()
            self._end_step()
            return False
        culprit, name, _ = found
        raise GradientError(
            f"the gradient of {name} is not finite; {found.origin(self._options.compression)}",
            rank=rank,
            peers=() if culprit is None else (culprit,),
            parameters=(name,),
            step=self.num_steps,
        )

    def enter(self, phase: int) -> None:
        """A phase of a step begins."""
        self.world.observer.phase(phase, self.num_steps)

    def _end_step(self) -> None:
        self.enter(OPTIMIZER)
        self.world.observer.count_step()
        self.enter(INPUT)

    def _next_reduces(self) -> bool:
        """Decide if the backward that begins now reduces. Raises GradientError if it could not be reduced right."""
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
        if self.layout.agreement.is_captured():
            raise GradientError(
                "backward() is being captured into a CUDA graph, whose replays would reduce without torchring's "
                "checks and bookkeeping. Capture the model with torch.cuda.make_graphed_callables, whose gradients "
                "arrive outside the graph, or capture nothing but the forward pass"
            )
        return reduces

    def _refuse_module_wrappers(self) -> None:
        """Raise GradientError if a DDP or FSDP reduces one of these parameters, too, whenever it was built."""
        if self._num_wrappers_seen == MODULE_WRAPPERS.num_built:
            return
        if shared := MODULE_WRAPPERS.first_shared(self.parameters):
            index, kind = shared
            name = self.specs[index].name
            raise GradientError(explain(name, kind), rank=self.world.rank, parameters=(name,), step=self.num_steps)
        self._num_wrappers_seen = MODULE_WRAPPERS.num_built

    def _begin(self, *, reduces: bool) -> None:
        self.launcher.refuse_lost()
        self._reduces, self._has_round = reduces, False
        if not self._members.is_skipping:
            with self._failing():
                self.weighing.begin_backward(reduces=reduces)
        self.on_ready = [self.launcher.mark_local] * len(self.parameters)
        if reduces:
            self.world.raise_if_broken()
            is_unordered = self._members.are_several
            # Other ranks may wait in the round of another optimizer. So with several, ranks agree before they drain.
            if not (is_unordered and self.launcher.num_left_behind):
                with self._failing():
                    self._begin_round(is_unordered=is_unordered)
        self.in_backward = True

    def _begin_round(self, *, is_unordered: bool, is_again: bool = False) -> None:
        """A round begins: its first gradient is about to arrive, or `_reduce` to be called.

        Sends nothing, except before the second round: the first round has shown the order in which gradients become
        ready, so the buckets are rebuilt. At that point zero_grad() has usually dropped the old buffers, so old and new
        buffers need not exist side by side. With `is_unordered` buckets are rebuilt in `_finish_round`.

        Args:
            is_unordered: see `RoundState`.
            is_again: another round for the same backward, which has left its results in `.grad`.
        """
        launcher = self.launcher
        launcher.drain()
        if not is_unordered:
            self._members.announce()
            self.layout.follow_order()
        is_absent = (self._members.is_skipping or self._weights.has_skipped) and not self._weights.num_backwards
        current = RoundState(
            number=self.round.next_number,
            step=self.num_steps,
            hold=is_unordered and not self.layout.starts_at_once,
            is_unordered=is_unordered,
            is_absent=is_absent,
            is_empty=is_absent,
            is_again=is_again,
            bits={
                "has_unfrozen": bool(unfrozen(self.frozen)),
                "is_absent": is_absent,
                "has_ended": self._members.has_ended,
            },
        )
        for participant in self.participants:
            participant.begin(current)
        self.layout.agreement.begin()
        self._found_before = self.non_finite
        launcher.begin(current)
        if current.mark_ready is None:
            self.on_ready = launcher.on_ready(len(self.parameters))
        else:
            self.on_ready = [current.mark_ready] * len(self.parameters)
            current.mark_ready = None  # which refers to what refers to the round
        if current.looks:
            self.on_ready = [*self.on_ready]
            for index, look in current.looks.items():
                self.on_ready[index] = _both(look, self.on_ready[index])
            current.looks = {}
        self._has_round = True

    def _launch_rest(self, backward: object = None) -> None:
        """Backward is over: launch what has not left. In the same order of optimizers on all ranks."""
        current = self.round
        current.backward = backward
        self.enter(EXPOSED)
        for participant in self.participants:
            participant.backward_is_over(current)
        self.layout.agreement.backward_is_over()
        self.launcher.launch_rest()

    def _finish_round(self) -> None:
        """Return when every gradient holds the result. Collective, in the same order of optimizers on all ranks."""
        current, launcher, agreement = self.round, self.launcher, self.layout.agreement
        launcher.wait()
        agreement.agree(current, launcher.buckets)
        for participant in self.participants:
            participant.agreed(current)
        launcher.close_round()
        for participant in self.participants:
            participant.reduced(current)
        if current.sums["is_absent"] == self.world.size:  # all gradients are what they were
            current.non_finite = current.non_finite or self._found_before
        self.world.num_reductions += 1
        if current.is_unordered:
            self.layout.follow_order()
        agreement.end()

    def _reduce_again(self) -> None:
        """A round of its own for what is local, outside backward."""
        self._begin_round(is_unordered=True, is_again=True)
        self._launch_rest()
        self._finish_round()

    def _synchronize(self) -> None:
        collectives = internal_collectives_of(self.world)
        if collectives.any_rank(bool(unfrozen(self.frozen))):
            self._adopt_unfrozen()
        self.weighing.drop_stale()
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
            self.weighing.count_local(needs=needs)
            with self._failing():
                self._reduce_again()
            self._num_backwards = 0
            self._weights.reset()

    def _needs_synchronize(self) -> bool:
        """Whether some gradient on this rank waits to be reduced. Raises GradientError for a weight that is unused."""
        self.weighing.refuse_unused()
        self.weighing.ignore_zeros()
        self.launcher.refuse_lost()
        return self.ledger.needs_synchronize()

    def _adopt_unfrozen(self) -> None:
        """Collective: parameters that have come to require a gradient are reduced from now on, in new buckets."""
        adopted = unfrozen(self.frozen)
        self.frozen[:] = [parameter for parameter in self.frozen if not parameter.requires_grad]
        specs = [self._spec_of(parameter) for parameter in adopted]
        self._check_agreement(specs, internal_collectives_of(self.world))
        self.layout.add(specs, adopted)
        self._weights.expect(self.layout.wire_dtypes)
        self._attach()

    def _check_agreement(
        self, specs: Sequence[ParameterSpec], collectives: Collectives, buffers: Sequence[BufferSpec] = ()
    ) -> None:
        """Raise PlanMismatchError on every rank unless all are about to reduce the same things in the same way."""
        lines = describe(specs, f"{self._options} on {self.world.size} ranks")
        lines += [f"buffer {i}: {spec.describe()}" for i, spec in enumerate(buffers)]
        collectives.check_equal([*lines, self._control.describe()])

    def _attach(self) -> None:
        """Hook the parameters that are reduced and have no hook yet."""
        self._num_wrappers_seen = -1
        self._handles += attach_hooks(self, self.parameters, len(self._handles))
        self._hooked = [parameter._cdata for parameter in self.parameters]

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Inside, an error ends the round on all ranks."""
        try:
            yield
        except BaseException as error:  # Ctrl-C, too: it may have left a reduction half done
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """This round cannot be finished: tell the peers that wait for this rank why."""
        self.failure = error
        self.in_backward = False
        self.weighing.end_zero_weight()
        self.launcher.abandon()
        self.world.break_off("the reduction of gradients", error)


def _ledgers(launcher: Launcher, sparse: Ledger) -> list[Ledger]:
    return [*(bucket.ledger for bucket in launcher.buckets), sparse]


def _nothing() -> None: ...


def _both(first: Callable[[int], None], second: Callable[[int], None]) -> Callable[[int], None]:
    def call(index: int) -> None:
        first(index)
        second(index)

    return call
