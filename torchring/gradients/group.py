"""All optimizers of one world. One backward may reach the parameters of several: a GAN has two."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import torch

from torchring.allreduce.contract import aborted
from torchring.collectives.operations import Backend, Meanwhile
from torchring.collectives.service import collectives_of, internal_collectives_of
from torchring.collectives.signature import Signature
from torchring.errors import GradientError, PlanMismatchError, RingError, in_step
from torchring.gradients.launcher import Launcher
from torchring.gradients.reducer import Reducer
from torchring.gradients.reduction import Said, join, split
from torchring.gradients.reductions import Reductions
from torchring.interruption import InterruptionGuard
from torchring.observer import EXPOSED
from torchring.rooms import room
from torchring.world import World

_END: Final = "the end of backward()"
_UNLIKE_NO_SYNC: Final = (
    "a backward() ran inside no_sync() on some ranks only, or reached another optimizer there that was to reduce. "
    "Enter no_sync() on all ranks, of all optimizers whose parameters the backward may reach"
)
_MESSAGE: Final = Signature("backward")


class OptimizerGroup:
    """Drives the reducers of a world, in the order of wrapping. `world.shared(OptimizerGroup)` opens it once.

    Buckets leave during backward. With several optimizers, one backward may reach the parameters of any of them, in any
    order, and not of the same ones on every rank. So each optimizer has an all-reduce of its own: its buckets leave in
    an order of their own, and no rank waits before its backward is over. What ranks do then:

        1. launch the rest of the optimizers that this rank has reached;
        2. tell each other, in one small message, which optimizers they have reached, and meanwhile go on reducing;
        3. join the optimizers that only other ranks have reached, with what is local or zeros;
        4. wait for one optimizer after the other, in the order of wrapping.

    Optimizers of other groups of ranks have worlds of their own, and an `OptimizerGroup` each. One backward may reach
    several worlds, in another order on each rank. So all of them end together, in one order that is the same on all
    ranks, and none waits for another rank before that.

    A backward inside `no_sync()` of all optimizers that it reaches sends nothing, as with a single optimizer. After a
    backward that was aborted, buckets that have left are waited for in step 3: only then have all ranks said that
    the same buckets have left everywhere. Where a bucket cannot leave without a wait for other ranks
    (`Agreement.starts_at_once`), all buckets leave in step 3.
    """

    def __init__(self, world: World) -> None:
        # Runs what takes several collectives, and must not be left between two of them
        self.guard = InterruptionGuard(world)
        # The reducers of the world, in the order in which their optimizers were wrapped
        self.reducers: list[Reducer] = []
        self.has_ended = False  # whether this rank's data has ended, inside `torchring.join`
        self.is_skipping = False  # whether this rank takes part in a backward of the others without one of its own
        self.skipper: Reducer | None = None  # the reducer whose `skip()` is under way
        # Reducers that `skip()` of another one has reached, since a step or zero_grad() of any optimizer
        self.skipped: set[Reducer] = set()
        self.waiting: set[Launcher] = set()  # see `Launcher`
        self._world = world
        # Those of all worlds that this rank is in, in one order on all ranks
        self.of_this_rank = world.outer.shared(_all_groups)
        self.of_this_rank.append(self)
        self.of_this_rank.sort(key=lambda group: group._world.members)
        self._backend: Backend | None = None  # moves messages; opened with the first
        self._progress = world.observer.open_progress("messages")
        world.on_close(self.close)

    @property
    def are_several(self) -> bool:
        return len(self.reducers) > 1

    @property
    def are_beside_others(self) -> bool:
        """Whether this rank has another optimizer, in this world or in that of another group."""
        return sum(len(group.reducers) for group in self.of_this_rank) > 1

    def advance(self) -> bool:
        """Do this rank's part of the buckets that have left, where nobody is late. Returns whether some still wait."""
        for launcher in tuple(self.waiting):
            launcher.advance()
        return bool(self.waiting)

    def remove(self, reducer: Reducer) -> None:
        if reducer in self.reducers:
            self.reducers.remove(reducer)
        self.skipped.discard(reducer)
        self.waiting.discard(reducer.launcher)

    @contextlib.contextmanager
    def skipping(self, skipper: Reducer | None = None) -> Iterator[None]:
        """Reducers that a backward of other ranks reaches are absent on this rank."""
        self.is_skipping, self.skipper = True, skipper
        try:
            yield
        finally:
            self.is_skipping, self.skipper = False, None

    def start_exchange(self, reducers: Sequence[Reductions]) -> Callable[[Meanwhile], list[Said]]:
        """Give all ranks this rank's messages about `reducers`, in the order of wrapping.

        Returns what waits for those of all ranks, before any other collective. Where a reduction has begun on all
        ranks, it gets to know what was said.

        Raises GradientError on all ranks if an optimizer reduces on some ranks and is in `no_sync()` on others,
        PlanMismatchError if a backward was aborted on some ranks only, after buckets had left.
        """
        if self._backend is None:
            self._backend = internal_collectives_of(self._world).opened()
        mine = join([reducer.message() for reducer in reducers])
        return partial(self._hear, reducers, self._backend.start_exchange(mine, _MESSAGE))

    def _hear(
        self, reducers: Sequence[Reductions], wait: Callable[[Meanwhile], list[bytes]], meanwhile: Meanwhile
    ) -> list[Said]:
        with self._progress.operation("backward"):
            everybody = list(map(split, wait(meanwhile)))
        if len(set(map(len, everybody))) > 1:
            raise PlanMismatchError("some ranks have closed an optimizer that others still use", rank=self._world.rank)
        heard = []
        for reducer, messages in zip(reducers, zip(*everybody, strict=True), strict=True):
            heard.append(said := reducer.hear(messages))
            self._check(said)
            if all(said.by_rank["is_complete"]):
                reducer.reduction.said = said
        return heard

    def _check(self, said: Said) -> None:
        rank, by_rank = self._world.rank, said.by_rank
        if len(set(by_rank["num_aborted"])) > 1:
            raise aborted(rank, *(rank for rank, count in enumerate(by_rank["num_aborted"]) if count))
        if said.sums["is_in_no_sync"] and 2 in by_rank["reach"]:
            raise in_step(GradientError(_UNLIKE_NO_SYNC, rank=rank))
        numbers = {n for n, is_there in zip(by_rank["number"], by_rank["is_complete"], strict=True) if is_there}
        if len(numbers) > 1:  # who has gone on with another reduction
            raise aborted(rank, *(rank for rank, number in enumerate(by_rank["number"]) if number == max(numbers)))

    def refuse_other_thread(self, thread: int) -> None:
        """Raise GradientError if a backward begins in `thread` while one of another thread is under way.

        Breaks the world, where that other thread may be waiting. A device runs all hooks in one thread.
        """
        reducers = [reducer for group in self.of_this_rank for reducer in group.reducers]
        if not any(reducer.in_backward and reducer.thread not in (0, thread) for reducer in reducers):
            return
        error = GradientError(
            "two threads run backward() at the same time, each with an optimizer of its own; ranks could not tell the "
            "backwards apart. Let one thread train all models, or take turns, in the same order on all ranks",
            rank=self._world.rank,
        )
        self._world.break_off("backward()", error)
        raise error

    def owners_of(self, parameters: Iterable[torch.nn.Parameter]) -> list[Reducer]:
        """The reducers that reduce one of `parameters`."""
        wanted = {hash(parameter) for parameter in parameters}
        return [reducer for reducer in self.reducers if not wanted.isdisjoint(map(hash, reducer.parameters))]

    def owners(self) -> list[object]:
        """The optimizers that are still there."""
        return [owner for reducer in self.reducers if (owner := reducer.owner()) is not None]

    def follow(self) -> bool:
        """Collective: take part in a reduction of the others, without a backward. Returns whether a rank has data."""
        if self.are_several:
            return self._reduce_together()
        (reducer,) = self.reducers
        self._finish(reducer, reduces=True)
        return reducer.reduction.heard.sums["has_ended"] < self._world.size

    def end_backward(self, caller: Reducer, *, is_alone: bool = False) -> None:
        """A backward that reached `caller` is about to return: finish the reducers that it has reached.

        With `is_alone`, those of this world only.
        """
        if len(self.of_this_rank) > 1 and not is_alone:
            room("groups").end_together(self, caller)
            return
        reached = [reducer for reducer in (caller, *self.reducers) if reducer.in_backward]
        is_local = not any(reducer.wants_reduction for reducer in reached)
        is_silent = not self.are_several or self._world.failure is not None  # nobody to agree with
        if is_local and (is_silent or all(reducer.is_in_no_sync for reducer in reached)):
            for reducer in self.reducers:
                if reducer.in_backward:
                    reducer.finish_backward(reduces=False)
                elif self.is_skipping:
                    reducer.weights.leave_out()
        elif not self.are_several:
            self.guard.run(_END, partial(self._finish, caller, reduces=caller.wants_reduction))
        elif caller.in_backward:  # or else finished already, together with another reducer
            self.guard.run(_END, self._reduce_together)

    def _finish(self, reducer: Reducer, *, reduces: bool) -> None:
        """Collective: finish the only reducer."""
        if reduces:
            reducer.join_backward()
            try:
                reducer.launch_all()
                reducer.finish_reduction()
            except BaseException as error:
                reducer.fail(error)
                raise
        reducer.finish_backward(reduces=reduces)

    def _reduce_together(self) -> bool:
        """Collective: finish all reducers that a backward has reached on any rank. Returns whether a rank has data."""
        reducers = list(self.reducers)
        reducers[0].enter(EXPOSED)
        try:
            for reducer in reducers:
                reducer.launch_own()
            heard = self._agree(reducers)
            reach = [max(said.by_rank["reach"]) for said in heard]
            late = [
                reducer
                for reducer, reached, said in zip(reducers, reach, heard, strict=True)
                if reached == 2 and not all(said.by_rank["is_complete"])
            ]
            for reducer in late:
                reducer.join_backward()
            if late:
                self.start_exchange(late)(self.advance)
            for reducer, reached in zip(reducers, reach, strict=True):
                if reached == 2:
                    reducer.run_or_fail(reducer.launch_all)
            for reducer, reached in zip(reducers, reach, strict=True):
                if reached:
                    reducer.enter(EXPOSED)  # the reducer before has left it
                    if reached == 2:
                        reducer.run_or_fail(reducer.finish_reduction)
                    reducer.finish_backward(reduces=reached == 2)
            return heard[0].sums["has_ended"] < self._world.size
        except BaseException:
            for reducer in reducers:
                reducer.abort_backward()
            raise

    def _agree(self, reducers: Sequence[Reducer]) -> list[Said]:
        """Collective: what all ranks say about each reducer. Goes on reducing meanwhile."""
        own = [reducer.launcher for reducer in reducers if reducer.wants_reduction]
        stood_still, started = sum(launcher.reduction.exposed_seconds for launcher in own), time.perf_counter()
        try:
            heard = self.start_exchange(reducers)(self.advance)
        except RingError as error:
            for launcher in own:
                launcher.locate(error)
            raise
        if own:  # calls of `advance` have been counted already
            counted = sum(launcher.reduction.exposed_seconds for launcher in own) - stood_still
            own[0].stood_still(time.perf_counter() - started - counted)
        return heard

    def release_dead(self) -> None:
        """Collective: close the reducers whose optimizer is gone, on all ranks (garbage is not collected in step)."""
        reducers = list(self.reducers)
        if not reducers:
            return
        gc.collect()  # a learning rate scheduler and its optimizer refer to each other
        alive = torch.tensor([reducer.owner() is not None for reducer in reducers], dtype=torch.uint8, device="cpu")
        collectives_of(self._world).all_reduce(alive, "min")
        for reducer, is_alive in zip(reducers, alive.tolist(), strict=True):
            if not is_alive:
                reducer.close()

    def close(self) -> None:
        """The world is closing: gradients of its optimizers stay local from now on."""
        self.of_this_rank.remove(self)
        for reducer in list(self.reducers):
            reducer.close()


def _all_groups(world: World) -> list[OptimizerGroup]:
    """Those of this rank, in the world of all ranks and in those of its groups."""
    return []


def check_free(names: Mapping[torch.nn.Parameter, str], world: World) -> None:
    """Raise ValueError if another optimizer or a module wrapper reduces one of the parameters."""
    for owner in (owner for group in world.outer.shared(_all_groups) for owner in group.owners_of(names)):
        taken = next(name for p, name in names.items() if any(p is other for other in owner.parameters))
        gone = " (which the script has dropped, but not closed)" if owner.owner() is None else ""
        raise ValueError(f"{taken} belongs to another DistributedOptimizer{gone}; call close() on that one first")
    room("module wrappers").check(names, world)
