"""`State` carries models, optimizers and whatever else training changes from one generation to the next.

Replicas are equal after each step. So a survivor has everything, and nothing needs to be saved for the others. When a
rank is lost, some survivors may have finished the step that others have not. The rank that is furthest passes its state
on.
"""

import functools
import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.optim import Optimizer

from torchring.collectives.service import collectives_of
from torchring.data.sampler import Sampler
from torchring.elastic.worker.checkpoint import copy_of
from torchring.elastic.worker.membership import MembershipChange, MembershipVote
from torchring.elastic.worker.parts import Parts
from torchring.elastic.worker.saving import Saving
from torchring.elastic.worker.shares import Shares
from torchring.elastic.worker.worker import Worker
from torchring.errors import PeerLostError, PlanMismatchError, RingError, in_step
from torchring.optimizer import DistributedOptimizer, options_of, rejoin
from torchring.world import World

_LOST: Final = (
    "with shard=True, a worker that is lost takes its share of the optimizer's state along, and there is no checkpoint "
    "to go back to: all workers end, and new ones start from the beginning. Pass checkpoint= to torchring.elastic.State"
)

_log = logging.getLogger("torchring.elastic")


class GenerationOver(BaseException):
    """Leaves the training function, which is called again with other ranks.

    Not an Exception, so that a script that goes on after errors does not swallow it.
    """

    def __init__(self, size: int, leaving: tuple[int, ...]) -> None:
        super().__init__("the ranks of this elastic job change")
        self.leaving = leaving  # the ranks that were told to end
        # the first rank that stays, if one does, else 0. It has the whole state when the ranks part.
        self.heir = next((rank for rank in range(size) if rank not in leaving), 0)


class State:
    """The state that all ranks share, and a new one gets: models, optimizers, samplers, schedulers, other values.

        state = torchring.elastic.State(model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0)

    Modules and objects with `state_dict()` and `load_state_dict()` are changed in place. Other values are attributes:
    `state.epoch`. They hold numbers, strings, tensors, and lists, tuples and dicts of those.

    A step is a `step()` of the first optimizer. If there are several, the first is the one that steps first in an
    iteration. Change values between this step and the next backward, and call collectives of your own before or after
    all of these changes, so that values and step belong together wherever a rank is lost.

    New ranks, and jobs that start from a checkpoint, also take over which parameters require a gradient, and the
    parameter groups of the optimizers. Parameters that are added to an optimizer later belong to a module of the State.

    A GradScaler forgets `unscale_()` when ranks change. LBFGS is refused: its step cannot be left half way.

    Args:
        model: a module. Others may have other names.
        optimizer: of `torchring.wrap`, LocalSGD or DiLoCo. Others may have other names.
        checkpoint: a folder. Rank 0 writes checkpoints there in the background, and a last one when the training
            function has returned. If all ranks were lost, or the job is started anew, the newest valid one is loaded,
            into any number of ranks.
        every: interval of checkpoints: a number of steps, or a timedelta. Default: 5 minutes.
        on_resize: called as `on_resize(old, new)` on all ranks if the number of ranks has changed, before the training
            function is called again: to scale a learning rate, say. `old` is the number with which the state was
            trained last, by other workers and before a checkpoint, too.
        values: whatever else belongs to the state, under the names of the attributes.

    Raises:
        TypeError: a value cannot be sent to other ranks, or there is no optimizer from `torchring.wrap`.
        ValueError: an argument is out of range, a tensor of a module cannot be sent, or an optimizer is LBFGS.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: Optimizer | None = None,
        *,
        checkpoint: str | Path | None = None,
        every: int | timedelta | None = None,
        on_resize: Callable[[int, int], object] | None = None,
        **values: Any,
    ) -> None:
        named = {"model": model, "optimizer": optimizer}
        given = {**{name: value for name, value in named.items() if value is not None}, **values}
        for name, value in given.items():
            if name.startswith("_") or hasattr(type(self), name):
                raise ValueError(f"a State has something else under the name {name!r}; choose another")
            setattr(self, name, value)
        if "global_batch" in values:
            raise ValueError(
                "State takes no global_batch: use DataLoader(data, batch_sampler=Sampler(data, global_batch=n))"
            )
        self._parts = Parts(self, given)
        self._saving = Saving(self._parts, checkpoint, every)
        self._shares = Shares(self._parts.sharded)
        self._optimizers = [*self._parts.optimizers.values()]
        self._samplers = [each for each in given.values() if isinstance(each, Sampler)]
        for sampler in self._samplers:
            sampler.count_steps()
        self._parts.check()
        self._on_resize = on_resize

        # How far the state is, beside its counters
        self._is_fresh = True  # nothing trained, loaded or received
        self._is_between = False  # a step has been made, and values may not have been changed yet
        self._is_in_closure = False  # a step is under way that evaluates the model itself
        self._committed: tuple[int, dict[str, Any]] | None = None  # progress, and everything

        # The generation
        self._worker: Worker | None = None
        self._world: World | None = None
        self._agreed: GenerationOver | None = None

        for i, optimizer_ in enumerate(self._optimizers):
            optimizer_.register_step_pre_hook(functools.partial(self._before_step, i == 0))
            optimizer_.register_step_post_hook(functools.partial(self._after_step, i == 0))

    def commit(self) -> None:
        """Mark a point to return to after an exception: a lack of memory on one rank, a NaN. Not needed otherwise.

        Copies all that the State holds to host memory, at once: parameters, buffers, optimizers, schedulers, and
        values. So each commit takes as long as this copy, and needs memory for the new copy beside the last one. To
        commit every 100 steps costs less than to commit after each. Sends nothing. All ranks call it after the same
        steps.

        Ranks may come and leave at this point.

        Raises:
            ValueError: an optimizer has shard=True.
        """
        if self._shares.sharded:
            raise ValueError(
                "commit() does not work with shard=True: no rank has the whole state to return to. Leave commit() out; "
                "a rank that raises an exception ends, and is replaced"
            )
        self._is_between = False
        self._leave_if_agreed()
        self._committed = (self._parts.counters.progress, self._parts.copy())

    @property
    def _progress(self) -> int:
        return self._parts.counters.progress

    # What the training function does

    def _before_backward(self) -> None:
        self._is_between = False
        if self._worker is not None and self._worker.seems_alone() and self._world is not None:
            self._world.shared(MembershipChange).is_wanted = True
        self._leave_if_agreed()

    def _note_agreed(self, leaving: tuple[int, ...]) -> None:
        assert self._world is not None
        self._agreed = GenerationOver(self._world.size, leaving)

    def _before_step(
        self, is_first: bool, optimizer: DistributedOptimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._world is None:
            return
        has_closure = kwargs.get("closure", args[1] if len(args) > 1 else None) is not None
        if is_first:
            if has_closure or self._world.size == 1:  # a world of one notices no backward
                self._is_between = False
                self._leave_if_agreed()
            self._saving.write_if_due(self._world)
        self._is_in_closure = has_closure

    def _after_step(self, is_first: bool, *_: object) -> None:
        counters = self._parts.counters
        counters.progress += 1
        self._is_between, self._is_in_closure = True, False
        if is_first:
            counters.steps += 1
            if self._worker is not None:
                self._worker.has_stepped(counters.steps)
            for sampler in self._samplers:
                sampler.record()

    def _leave_if_agreed(self) -> None:
        """Raise GenerationOver if the ranks are to change now, and no step is half done."""
        if self._is_in_closure:
            return
        world = self._world
        if world is not None and world.size == 1 and (change := world.shared(MembershipChange)).is_wanted:
            self._agreed = GenerationOver(1, (0,) if change.leaves else ())
        if self._agreed is not None:
            raise self._agreed

    # Between generations

    def _enter(self, world: World, worker: Worker | None, *, has_failed: bool) -> None:
        """Become what the rank is that is furthest, and have everything reduce with the ranks of `world`. Collective.

        With `has_failed`, this rank returns to its last commit, and so do all ranks.

        Raises:
            PlanMismatchError: ranks have states that differ in what they consist of, or a rank could not load.
            RingError: a rank is lost, or a new one does not fit the others.
            ValueError: the checkpoint is of another model.
        """
        self._world, self._worker, self._agreed = world, worker, None
        self._is_in_closure = False
        for each in self._parts.others.values():
            if isinstance(each, torch.amp.GradScaler):  # takes a step that was lost for one under way
                getattr(each, "_per_optimizer_states", {}).clear()
        self._shares.become_whole()
        rows = self._compare(world, has_failed=has_failed)
        is_new = [row.progress < 0 for row in rows]
        try:
            self._meet(world, rows)
        except PlanMismatchError as error:
            if is_new[world.rank] or not any(is_new):
                raise
            peers = [rank for rank, new in enumerate(is_new) if new]  # they end, and this rank goes on
            raise PeerLostError(f"a new worker does not fit: {error.message}", rank=world.rank, peers=peers) from error
        self._is_fresh = self._is_between = False
        for sampler in self._samplers:
            sampler.share_out(world.rank, world.size)
        counters = self._parts.counters
        old, counters.size = counters.size, world.size
        if old not in (0, world.size) and self._on_resize is not None:
            self._on_resize(old, world.size)
        uses_commits = max(row.returns_to for row in rows) >= 0
        self._committed = (self._progress, self._parts.copy()) if uses_commits else None
        self._saving.begin()
        if worker is not None:
            worker.num_steps = counters.steps

    def _compare(self, world: World, *, has_failed: bool) -> "list[_Row]":
        """The progress of all ranks. Collective."""
        progress = -1 if self._is_fresh else self._progress
        saved = self._saving.newest_step() if self._is_fresh or self._shares.sharded else -1
        is_certain, size = not self._is_between, self._parts.counters.size
        mine = _Row(self._shares.is_part, progress, is_certain, self._returns_to(), has_failed, saved, size)
        if world.size == 1:
            return [mine]
        tensors = collectives_of(world).all_gather(torch.tensor([mine], dtype=torch.int64, device="cpu"))
        return [_Row(*tensor.flatten().tolist()) for tensor in tensors]

    def _meet(self, world: World, rows: "list[_Row]") -> None:
        """Collective: have what the rank has that is furthest, and reduce with these ranks."""
        if world.size > 1:
            options = [f"{name}: {options_of(each)}" for name, each in self._parts.optimizers.items()]
            collectives_of(world).check_equal([*self._parts.layout(), *options])
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        src = self._share(world, rows)
        self._shares.cut(world, keeps=self._is_fresh or world.rank == src)
        guests = [MembershipVote(world, self._before_backward, self._note_agreed)]
        for optimizer in self._optimizers:
            rejoin(optimizer, world, guests)
            guests = []
        self._shares.deal_out(world, src)

    def _share(self, world: World, rows: "list[_Row]") -> int:
        """Give all ranks what one of them has, but for the state of optimizers with shard=True. Collective.

        Returns that rank.
        """
        commits = [row.returns_to for row in rows]
        some_failed = any(row.has_failed for row in rows)
        is_fresh = all(row.progress < 0 for row in rows)
        is_lost = not is_fresh and all(row.has_share or row.progress < 0 for row in rows)
        change: Callable[[], object] = lambda: None  # noqa: E731
        if is_lost and max(row.saved for row in rows) < 0:
            raise in_step(RingError(_LOST, rank=world.rank))
        if is_fresh or is_lost:
            saved = [row.saved for row in rows]
            src, change = saved.index(max(saved)), functools.partial(self._load_newest, is_lost=is_lost)
        elif some_failed and max(commits) >= 0:
            src, change = commits.index(max(commits)), self._return_to_commit
        else:
            ends = [(not row.has_share, row.progress, row.is_certain) for row in rows]  # of equals, the first
            src = ends.index(max(ends))
        problem: Exception | None = None
        if world.rank == src:
            try:
                change()
            except Exception as error:
                problem = error
        if world.size == 1:
            if problem is not None:
                raise problem
            return src
        collectives_of(world).raise_together(problem, "could not give the others its state")
        are_equal = len({(row.progress, row.size) for row in rows}) == 1 and not (is_fresh or is_lost)
        if some_failed or not are_equal or not all(row.is_certain for row in rows):
            self._receive(src, world.rank, keeps=not self._is_fresh and not some_failed)
        else:  # a step that GradScaler has left out changes more than a forward does, but no parameter
            self._parts.share(src, parameters=False)
        return src

    def _receive(self, src: int, rank: int, *, keeps: bool) -> None:
        """Give all ranks what rank `src` has. Collective. `keeps`: see `Parts.share`."""
        # Rank `src` may be lost on the way. Then this rank may be the furthest, and has to have what it had.
        before = None if self._is_fresh or rank == src else self._parts.copy()
        try:
            self._parts.share(src, parameters=True, keeps=keeps)
        except BaseException:
            if before is not None:
                self._parts.become(before)
            raise

    def _leave(self) -> None:
        self._world = self._agreed = None

    # Points to return to

    def _returns_to(self) -> int:
        """Progress of the newest commit of this rank; -1 for none."""
        return -1 if self._committed is None else self._committed[0]

    def _return_to_commit(self) -> None:
        assert self._committed is not None
        self._parts.become(copy_of(self._committed[1]))  # loading keeps tensors, and the next exception may come

    def _load_newest(self, *, is_lost: bool) -> None:
        """Become what the newest checkpoint has, if there is one. `is_lost`: there is a way back only."""
        if self._saving.load_newest():
            if is_lost:
                _log.warning(
                    "a worker that is lost took its share of the optimizer's state along (shard=True): all go back to "
                    "a checkpoint"
                )
        elif is_lost:
            raise ValueError(_LOST)
        elif self._shares.sharded and self._saving.folder is not None:
            self._saving.save_now()  # a rank may be lost before the first checkpoint is due

    def _part(self, heir: int) -> None:
        """Collective, where ranks change: rank `heir` gets the whole state."""
        if self._world is not None:
            self._shares.part(self._world, heir)

    def _gather(self) -> dict[str, Any] | None:
        """Everything, at the end, for a checkpoint that rank 0 writes. Collective."""
        return None if self._saving.folder is None else self._parts.everything()

    def _save_now(self, everything: dict[str, Any] | None = None) -> str:
        """Write a checkpoint of what `_gather` has returned, or of what this rank has when the ranks have parted.

        Returns its path; "" without a folder, or on failure.
        """
        if self._is_fresh or self._saving.folder is None:
            return ""
        if everything is None:
            self._shares.become_whole()
            if self._shares.is_part:
                _log.warning("no checkpoint is written: ranks that are gone have the rest of the optimizer's state")
                return ""
        return self._saving.save_now(everything)


class _Row(NamedTuple):
    """The progress of a rank, as the other ranks hear of it."""

    has_share: bool  # it has less than the whole state of optimizers with shard=True
    progress: int  # -1 for a rank that has nothing yet
    is_certain: bool  # values belong to this progress
    returns_to: int  # progress of its newest commit; -1 for none
    has_failed: bool  # it returns to its commit, and so all ranks do
    saved: int  # step of the newest checkpoint; -1 for none, or if the rank needs none
    size: int  # size of the world that trained last
