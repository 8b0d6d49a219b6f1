"""A gradient arrives: one public post-accumulate hook per parameter, and the end of each backward.

A backward reduces or it does not, decided when its first gradient arrives: every `accumulate`-th one does, outside
`no_sync()`. A hook does O(1) work: it tells the reduction which parameter is ready.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from torchring.collectives.interruption import InterruptionGuard
from torchring.collectives.service import collectives_of, internal_collectives_of
from torchring.dynamo import is_compiled_backward, run_eagerly
from torchring.errors import GradientError, in_step, with_way_out
from torchring.gradients.backward import BackwardWatch
from torchring.gradients.module_wrappers import ModuleWrappers, explain
from torchring.gradients.plan import ParameterSpec
from torchring.gradients.reduction import Reduction
from torchring.gradients.replicas import ReplicaCheck
from torchring.world import World

Hook = Callable[[torch.Tensor], None]


class GradientHooks:
    """The hooks of one optimizer's parameters, in the order of `reduction.parameters`.

    Args:
        reduction: gets the gradients.
        replicas: is asked in every round whether somebody wrote to the parameters.
        accumulate: backwards per reduction.
        frozen: parameters of the optimizer that do not require a gradient; looked at again after each backward.
        spec_of: what the plan needs to know of one of them.
        owner: the optimizer; referred to weakly.

    Attributes:
        failure: what ended the last backward between ranks; gradients are worth nothing after it.
    """

    def __init__(
        self,
        reduction: Reduction,
        replicas: ReplicaCheck,
        *,
        accumulate: int,
        frozen: Sequence[torch.nn.Parameter],
        spec_of: Callable[[torch.nn.Parameter], ParameterSpec],
        owner: object,
    ) -> None:
        self.failure: BaseException | None = None
        self.num_steps = 0
        self.is_closed = False
        self.reduction = reduction
        self._replicas = replicas
        self.owner = weakref.ref(owner)
        self._accumulate = accumulate
        self._frozen = list(frozen)
        self._spec_of = spec_of
        self._num_backwards = 0  # since the last reduction, those inside no_sync() not counted
        self._no_sync_depth = 0
        self._in_backward = False
        self._reduces = False
        self._accept = reduction.accumulated
        self._num_wrappers_seen = -1  # value of ModuleWrappers.num_built for which these parameters were checked
        self._watch = BackwardWatch(self._end, self.forget)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._optimizer_group = optimizer_group_of(reduction.world)
        self._optimizer_group.join(self)
        self._attach()

    @property
    def in_backward(self) -> bool:
        """Whether a backward of these parameters is under way."""
        return self._in_backward

    def extend(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Collective: more parameters, some of which may be frozen for now."""
        self._frozen += parameters
        self._adopt_thawed()

    def first_thawed(self) -> torch.nn.Parameter | None:
        """A parameter that was frozen, is not any more, and has a gradient which no rank has heard of."""
        return next((p for p in self._frozen if p.requires_grad and p.grad is not None), None)

    def first_gradient(self, index: int) -> None:
        """The gradient of parameter `index` arrived just before its hook was there."""
        self._hook(index)(self.reduction.parameters[index])

    def _attach(self) -> None:
        """Hook the parameters that the reduction has and that have no hook yet."""
        self._num_wrappers_seen = -1
        for index in range(len(self._handles), len(self.reduction.parameters)):
            parameter = self.reduction.parameters[index]
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._hook(index)))  # type: ignore[no-untyped-call]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here only accumulate, and do not count towards `accumulate`."""
        self._no_sync_depth += 1
        try:
            yield
        finally:
            self._no_sync_depth -= 1

    def synchronize(self) -> None:
        """Collective: reduce whatever is local on any rank. Nothing happens where nothing is."""
        if self._in_backward:
            raise GradientError("synchronize() was called inside backward(); call it after backward() has returned")
        with torch.no_grad():  # a graph on the gradients, of backward(create_graph=True), is cut here
            self._optimizer_group.guard.run("synchronize()", self._synchronize)

    def _synchronize(self) -> None:
        collectives = internal_collectives_of(self.reduction.world)
        if collectives.any_rank(self._has_thawed()):
            self._adopt_thawed()
        problem: GradientError | None = None
        needs = False
        try:
            needs = self.reduction.needs_synchronize()
        except GradientError as error:
            problem = error
        wants = collectives.all_reduce(
            torch.tensor([int(needs), int(problem is not None)], device="cpu"), "max"
        ).tolist()
        if wants[1]:
            raise in_step(problem or GradientError("synchronize() was refused on another rank; its error says why"))
        if wants[0]:
            self._guard(self._reduce_now)
            self._num_backwards = 0

    def refuse_module_wrappers(self) -> None:
        """Raise GradientError if a DDP or FSDP, built before or since, reduces one of these parameters, too."""
        wrappers = self._optimizer_group.module_wrappers
        if self._num_wrappers_seen == wrappers.num_built:
            return
        if shared := wrappers.first_shared(self.reduction.parameters):
            index, kind = shared
            name = self.reduction.specs[index].name
            raise GradientError(
                explain(name, kind), rank=self.reduction.world.rank, parameters=(name,), step=self.num_steps
            )
        self._num_wrappers_seen = wrappers.num_built

    def close(self) -> None:
        """Remove the hooks."""
        self.is_closed = True
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._optimizer_group.leave(self)
        self.reduction.close()
        if not self._in_backward:
            self._watch.close()  # the two refer to each other; with the watch closed, no collector is needed

    def _hook(self, index: int) -> Hook:
        @run_eagerly
        def hook(_: torch.Tensor) -> None:
            if not self._watch.is_armed:
                self._enter()
            try:
                self._accept(index)
            except BaseException as error:
                # With nothing sent yet, the round is only broken off, as by any other error in backward.
                if self._reduces and self.reduction.scheduler.has_launched:
                    self._fail(error)
                raise

        return hook

    def _enter(self) -> None:
        """First gradient of a backward, or of an outer one after the end of one inside it."""
        if not self._in_backward:
            if self.failure is not None:
                failure = str(self.failure) or type(self.failure).__name__
                raise GradientError(with_way_out(f"an earlier backward failed: {failure}")) from self.failure
            if is_compiled_backward():
                raise GradientError(
                    "compiled autograd runs this backward() and does not say when it ends, so gradients would never "
                    "be reduced. Set torch._dynamo.config.compiled_autograd = False; torch.compile works without it"
                )
            self.refuse_module_wrappers()
            reduces = self._no_sync_depth == 0 and self._num_backwards + 1 >= self._accumulate
            if reduces and torch.is_grad_enabled():
                raise GradientError(
                    "backward(create_graph=True) leaves a graph on the gradients that averaging would cut. Run it "
                    "inside optimizer.no_sync(), and call optimizer.synchronize() afterwards; or take inner "
                    "gradients with torch.autograd.grad(..., create_graph=True), and call backward() for the outer loss"
                )
            if self.reduction.is_captured():
                raise GradientError(
                    "backward() is being captured into a CUDA graph, whose replays would reduce without torchring's "
                    "checks and bookkeeping. Capture the model with torch.cuda.make_graphed_callables, whose "
                    "gradients arrive outside the graph, or capture nothing but the forward pass"
                )
            self._begin(reduces=reduces)
        self._watch.arm()

    def _begin(self, *, reduces: bool) -> None:
        self._reduces = reduces
        if reduces:
            self.reduction.world.raise_if_broken()
            self._guard(lambda: self._begin_round(hold=self._optimizer_group.are_several))
        self._accept = self.reduction.arrived if reduces else self.reduction.accumulated
        self._in_backward = True

    def _end(self) -> None:
        """The outermost backward is about to return."""
        self._optimizer_group.finish(self)

    def finish(self, *, reduces: bool) -> None:
        """A backward that reached these parameters on some rank is over; reduce if any rank's was to."""
        if reduces:
            if not (self._in_backward and self._reduces):  # only other ranks got as far as to begin
                self._begin(reduces=True)
            self._guard(self._finish_round)
            self._num_backwards = 0
        elif self._no_sync_depth == 0:
            self._num_backwards += 1
        self._in_backward = False
        if reduces:
            odd, changed, _ = self.reduction.heard
            some_but_not_all = 0.5 / self.reduction.world.size
            alarmed = changed > 0 or some_but_not_all < odd < 1 - some_but_not_all
            self._replicas.after_round(alarmed, self.num_steps)

    def forget(self) -> None:
        """A backward under way has raised (out of memory, an error in a custom function): drop its round."""
        if self._in_backward:
            self._in_backward = False
            if self._reduces:
                self.reduction.abandon()

    @property
    def wants_reduction(self) -> bool:
        return self._in_backward and self._reduces

    def _begin_round(self, *, hold: bool) -> None:
        signals = (self.num_steps % 2 == 1, self._replicas.has_changed(), self._has_thawed())
        self.reduction.begin(step=self.num_steps, hold=hold, signals=signals)

    def _finish_round(self) -> None:
        self.reduction.finish()
        if self.reduction.heard[2]:
            self._adopt_thawed()
            self._reduce_now()

    def _reduce_now(self) -> None:
        """A round of its own for what is local, outside backward."""
        self._begin_round(hold=True)
        self.reduction.finish()

    def _has_thawed(self) -> bool:
        return any(parameter.requires_grad for parameter in self._frozen)

    def _adopt_thawed(self) -> None:
        """Collective: parameters that have come to require a gradient are reduced from now on."""
        thawed = [parameter for parameter in self._frozen if parameter.requires_grad]
        self._frozen = [parameter for parameter in self._frozen if not parameter.requires_grad]
        self.reduction.extend([self._spec_of(parameter) for parameter in thawed], thawed)
        self._attach()

    def _guard(self, operation: Callable[[], None]) -> None:
        try:
            operation()
        except BaseException as error:  # Ctrl-C, too: it may have left a reduction half done
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """This round cannot be finished: peers that wait for this rank are told why."""
        self.failure = error
        self._in_backward = False
        self.reduction.abandon()
        self.reduction.world.break_off("the reduction of gradients", error)


class OptimizerGroup:
    """All optimizers of one world, in the order in which they were wrapped.

    With one, its buckets leave during backward. With several (a GAN), one backward may reach the parameters of any of
    them, and not of the same ones on every rank: so buckets wait for the end of backward, ranks agree in one small
    message on who takes part, and those reduce in the order of wrapping.

    Attributes:
        guard: for what takes several collectives, and must not be left between two of them.
        module_wrappers: of this process; none of them may reduce what a member does.
    """

    def __init__(self, world: World) -> None:
        self.module_wrappers = ModuleWrappers()
        self._world = world
        self._members: list[GradientHooks] = []
        self.guard = InterruptionGuard(world)
        world.on_close(self.close)

    @property
    def are_several(self) -> bool:
        return len(self._members) > 1

    def join(self, member: GradientHooks) -> None:
        self._members.append(member)

    def leave(self, member: GradientHooks) -> None:
        if member in self._members:
            self._members.remove(member)

    def finish(self, caller: GradientHooks) -> None:
        """The end of a backward, as told to `caller`: finish all that it touched."""
        is_local = not any(member.wants_reduction for member in (caller, *self._members))
        if is_local and (not self.are_several or self._world.failure is not None):  # nobody to agree with
            for member in self._members:
                if member.in_backward:
                    member.finish(reduces=False)
            return
        self.guard.run("the end of backward()", lambda: self._finish(caller))

    def _finish(self, caller: GradientHooks) -> None:
        if not self.are_several:
            caller.finish(reduces=caller.wants_reduction)
            return
        if not caller.in_backward:  # finished already, on behalf of another
            return
        try:
            # 0: not reached on any rank; 1: accumulates; 2: reduces on some rank, and so on all.
            wants = torch.tensor(
                [member.in_backward + member.wants_reduction for member in self._members], device="cpu"
            )
            internal_collectives_of(self._world).all_reduce(wants, "max")
            for member, want in zip(list(self._members), wants.tolist(), strict=True):
                if want:
                    member.finish(reduces=want == 2)
        except BaseException:
            for member in self._members:
                member.forget()
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
        self.module_wrappers.close()

    def owners_of(self, parameters: Iterable[torch.nn.Parameter]) -> list[GradientHooks]:
        """The members that reduce one of `parameters`."""
        wanted = {id(parameter) for parameter in parameters}
        return [m for m in self._members if not wanted.isdisjoint(map(id, m.reduction.parameters))]


def optimizer_group_of(world: World) -> OptimizerGroup:
    """The optimizers of `world`."""
    return world.shared(OptimizerGroup)
