"""`State` carries models, optimizers and whatever else training changes from one generation to the next.

Replicas are equal after each step. So a survivor has everything, and nothing needs to be saved for the others. When a
rank is lost, some survivors may have finished the step that others have not. The rank that is furthest passes its state
on.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
from torch.optim import Optimizer

from torchring.collectives.initial_state import (
    Stateful,
    broadcast_parameters,
    broadcast_state,
    check_broadcastable,
    check_sendable,
    is_sharded,
)
from torchring.collectives.join import Join
from torchring.collectives.service import collectives_of, internal_collectives_of
from torchring.data.epoch import share_of
from torchring.data.sampler import Sampler
from torchring.elastic.worker.change import Change, ChangeOfRanks
from torchring.elastic.worker.checkpoint import CheckpointWriter, copy_of, newest, newest_step
from torchring.elastic.worker.worker import Worker
from torchring.errors import PeerLostError, PlanMismatchError, RingError, in_step
from torchring.gradients.validation import parameters_of
from torchring.observe.recorder.forward import TransientHook, leave_no_trace
from torchring.optimizer import DistributedOptimizer, names_of, rejoin
from torchring.sharding.checkpoint import gather_state, load_state
from torchring.world import World

_FORMAT: Final = 1  # of checkpoints
_EVERY: Final = timedelta(minutes=5)
_LOST: Final = (
    "with shard=True, a worker that is lost takes its share of the optimizer's state along, and there is no checkpoint "
    "to go back to: all workers end, and new ones start from the beginning. Pass checkpoint= to torchring.elastic.State"
)

_log = logging.getLogger("torchring.elastic")


class GenerationOver(BaseException):
    """Leaves the training function, which is called again with other ranks.

    Not an Exception, so that a script that goes on after errors does not swallow it.

    Attributes:
        all_leave: all ranks were told to end.
    """

    def __init__(self, *, all_leave: bool) -> None:
        super().__init__("the ranks of this elastic job change")
        self.all_leave = all_leave


class State:
    """The state that all ranks share, and a new one gets: models, optimizers, samplers, schedulers, other values.

        state = torchring.elastic.State(model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0)

    Modules and objects with `state_dict()` and `load_state_dict()` are changed in place. Other values are attributes:
    `state.epoch`. They hold numbers, strings, tensors, and lists, tuples and dicts of those.

    A step is a `step()` of the first optimizer. If there are several, the first is the one that steps first in an
    iteration. Change values between this step and the next forward or backward, and call collectives of your own before
    or after all of these changes, so that values and step belong together wherever a rank is lost.

    New ranks, and jobs that start from a checkpoint, also take over which parameters require a gradient, and the
    parameter groups of the optimizers. Parameters that are added to an optimizer later belong to a module of the State.

    A GradScaler forgets `unscale_()` when ranks change. A step of LBFGS that was left half way is undone.

    Args:
        model: a module. Others may have other names.
        optimizer: an optimizer that `torchring.wrap` has returned. Others may have other names.
        global_batch: number of samples of a step, of all ranks together, for a sampler that yields samples; see
            `batch_size`. Others have a `global_batch` or a `batch_size` of their own.
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
        ValueError: an argument is out of range, or a tensor of a module cannot be sent.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: Optimizer | None = None,
        *,
        global_batch: int | None = None,
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
        self._modules = {name: value for name, value in given.items() if isinstance(value, torch.nn.Module)}
        self._stateful = {
            name: value
            for name, value in given.items()
            if name not in self._modules and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
        }
        self._names_of_values = [name for name in given if name not in self._modules and name not in self._stateful]
        self._optimizers = [each for each in self._stateful.values() if isinstance(each, DistributedOptimizer)]
        self._sharded = {
            name: each
            for name, each in self._stateful.items()
            if isinstance(each, DistributedOptimizer) and each._options.shard
        }
        self._samplers = [each for each in self._stateful.values() if isinstance(each, Sampler)]
        self._values = _Fields(self, {name: name for name in self._names_of_values})
        self._check(global_batch, every)
        self._global_batch = global_batch
        self._on_resize = on_resize
        self._folder = None if checkpoint is None else Path(checkpoint)
        self._every: int | timedelta = _EVERY if every is None else every

        # How far the state is
        self._is_fresh = True  # nothing trained, loaded or received
        self._num_steps = 0  # of the first optimizer
        self._progress = 0  # steps of all optimizers: more is further
        self._size = 0  # of the world that trained last; 0 for none
        self._counters = _Fields(self, {name: f"_{name}" for name in ("num_steps", "progress", "size")})
        self._is_between = False  # a step has been made, and values may not have been changed yet
        self._sees_forward = False  # since the last step
        self._is_in_closure = False  # a step is under way that evaluates the model itself
        self._before_closure: dict[str, Any] | None = None  # everything, if such a step changes it bit by bit

        # The generation
        self._worker: Worker | None = None
        self._world: World | None = None
        self._agreed: GenerationOver | None = None
        self._agreed_at = 0  # progress at that time

        # What can be returned to, and checkpoints
        self._committed: tuple[int, dict[str, Any]] | None = None  # progress, and everything
        self._writer: CheckpointWriter | None = None
        self._saved_at = (0, time.monotonic())  # steps, and time

        # Optimizers with shard=True
        self._has_share = False  # their state was dealt out: what this rank has of it is not the whole
        self._whole: dict[str, dict[str, Any]] = {}  # their state_dicts, on the rank that deals them out

        for optimizer_ in self._optimizers:
            is_first = optimizer_ is self._optimizers[0]
            optimizer_.register_step_pre_hook(functools.partial(self._before_step, is_first))
            optimizer_.register_step_post_hook(functools.partial(self._after_step, is_first))
        for module in self._modules.values():
            module.register_forward_pre_hook(_Hook(self._before_forward), with_kwargs=True)
            leave_no_trace(module)

    def _check(self, global_batch: int | None, every: int | timedelta | None) -> None:
        if not self._optimizers:
            raise TypeError("a State needs an optimizer that torchring.wrap() has returned")
        if global_batch is not None and global_batch < 1:
            raise ValueError(f"global_batch must be a number of samples, 1 or more, got {global_batch!r}")
        if every is not None and not (timedelta() < every if isinstance(every, timedelta) else every >= 1):
            raise ValueError(f"every must be a number of steps, 1 or more, or a positive timedelta, got {every!r}")
        for sampler in self._samplers:
            sampler.count_steps(global_batch)
        for name, module in self._modules.items():
            try:
                check_broadcastable(module)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        for stateful in (*self._stateful.values(), self._values):
            if not is_sharded(stateful):
                check_sendable(stateful)

    @property
    def batch_size(self) -> int:
        """This rank's share of `global_batch`, for `DataLoader(batch_size=...)`. 1 for a rank without a share.

        Raises:
            ValueError: there is no `global_batch`, or this is not called from the training function.
        """
        if self._global_batch is None or self._world is None:
            raise ValueError("batch_size is known in the training function, of a State with global_batch")
        return share_of(self._global_batch, self._world.rank, self._world.size)

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
        if self._sharded:
            raise ValueError(
                "commit() does not work with shard=True: no rank has the whole state to return to. Leave commit() out; "
                "a rank that raises an exception ends, and is replaced"
            )
        self._is_between = False
        self._leave_if_agreed()
        self._committed = (self._progress, self._copy())

    # What the training function does

    def _before_forward(self, module: torch.nn.Module, *_: object) -> None:
        if torch.compiler.is_compiling():  # would break the graph
            return
        if module.training and torch.is_grad_enabled() and self._world is not None:
            self._is_between = False
            # With several optimizers, this may be the forward for the second one, in the middle of an iteration.
            if len(self._optimizers) == 1 and (self._agreed is None or self._progress > self._agreed_at):
                self._leave_if_agreed()
                self._sees_forward = True

    def _before_step(
        self, is_first: bool, optimizer: DistributedOptimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._world is None:
            return
        has_closure = kwargs.get("closure", args[1] if len(args) > 1 else None) is not None
        if is_first:
            # A world of one notices no backward. Nothing has changed since the last step.
            if has_closure or (self._world.size == 1 and not self._sees_forward):
                self._leave_if_agreed()
            self._write_if_due()
        self._is_in_closure = has_closure
        self._before_closure = (
            self._copy() if has_closure and isinstance(optimizer.optimizer, torch.optim.LBFGS) else None
        )

    def _after_step(self, is_first: bool, *_: object) -> None:
        self._progress += 1
        self._is_between, self._sees_forward, self._is_in_closure = True, False, False
        if is_first:
            self._num_steps += 1
            if self._worker is not None:
                self._worker.has_stepped(self._num_steps)
            for sampler in self._samplers:
                sampler.record()

    def _leave_if_agreed(self) -> None:
        """Raise GenerationOver if the ranks are to change now, and no step is half done."""
        if self._is_in_closure:
            return
        world = self._world
        if world is not None and world.size == 1 and (change := world.shared(Change)).is_wanted:
            self._agreed = GenerationOver(all_leave=change.leaves)
        if self._agreed is not None:
            raise self._agreed

    def begin_backward(self) -> None:
        """A backward of the first optimizer begins, or its `skip()`. May raise what ends the training function."""
        self._is_between = False
        if self._worker is not None and self._worker.seems_alone() and self._world is not None:
            self._world.shared(Change).is_wanted = True
        self._leave_if_agreed()

    def change_is_agreed(self, *, all_leave: bool) -> None:
        """The ranks are to change at the end of this step, or to leave, all of them: all ranks are told so in it."""
        self._agreed = GenerationOver(all_leave=all_leave)
        self._agreed_at = self._progress

    # Between generations

    def _enter(self, world: World, worker: Worker | None, *, has_failed: bool) -> None:
        """Become what the rank is that is furthest, and have everything reduce with the ranks of `world`. Collective.

        Args:
            has_failed: this rank returns to its last commit, and so do all ranks.

        Raises:
            PlanMismatchError: ranks have states that differ in what they consist of, or a rank could not load.
            RingError: a rank is lost, or a new one does not fit the others.
            ValueError: the checkpoint is of another model.
        """
        self._world, self._worker, self._agreed = world, worker, None
        if self._is_in_closure and self._before_closure is not None:  # ranks were lost at different trial points
            self._become(self._before_closure)
        self._is_in_closure = False
        for each in self._stateful.values():
            if isinstance(each, torch.amp.GradScaler):  # takes a step that was lost for one under way
                getattr(each, "_per_optimizer_states", {}).clear()
        self._become_whole()
        rows = self._compare(world, has_failed=has_failed)
        is_new = [row.progress < 0 for row in rows]
        try:
            if world.size > 1:
                collectives_of(world).check_equal([*self._layout(), *(f"{name}: shard=True" for name in self._sharded)])
            if worker is not None and world.rank == 0:
                worker.publish_layout(json.dumps(self._layout()).encode())
            for optimizer in self._optimizers:
                optimizer.zero_grad()
            uses_commits, src = self._share(world, rows)
            if self._is_fresh or world.rank == src:
                self._whole = {name: each.optimizer.state_dict() for name, each in self._sharded.items()}
            self._has_share = bool(self._sharded) and world.size > 1
            for i, optimizer in enumerate(self._optimizers):
                rejoin(optimizer, world, [ChangeOfRanks(world, self)] if i == 0 else [])
            self._deal_out(world, src)
        except PlanMismatchError as error:
            if is_new[world.rank] or not any(is_new):
                raise
            peers = [rank for rank, new in enumerate(is_new) if new]  # they end, and this rank goes on
            raise PeerLostError(f"a new worker does not fit: {error.message}", rank=world.rank, peers=peers) from error
        self._is_fresh = self._is_between = False
        for sampler in self._samplers:
            sampler.share_out(world.rank, world.size)
        old, self._size = self._size, world.size
        if old not in (0, world.size) and self._on_resize is not None:
            self._on_resize(old, world.size)
        self._committed = (self._progress, self._copy()) if uses_commits else None
        self._saved_at = (self._num_steps, time.monotonic())
        if worker is not None:
            worker.num_steps, worker.num_made = self._num_steps, max(worker.num_made, 0)
        if self._folder is not None and world.rank == 0 and self._writer is None:
            self._writer = CheckpointWriter(self._folder)

    def _compare(self, world: World, *, has_failed: bool) -> list[_Row]:
        """The progress of all ranks. Collective."""
        may_need = self._is_fresh or bool(self._sharded)
        saved = newest_step(self._folder) if may_need and self._folder is not None else None
        progress = -1 if self._is_fresh else self._progress
        saved = -1 if saved is None else saved
        is_certain = not self._is_between
        mine = _Row(self._has_share, progress, is_certain, self._returns_to(), has_failed, saved, self._size)
        if world.size == 1:
            return [mine]
        tensors = collectives_of(world).all_gather(torch.tensor([mine], dtype=torch.int64, device="cpu"))
        return [_Row(*tensor.flatten().tolist()) for tensor in tensors]

    def _become_whole(self) -> None:
        """The ranks have parted: optimizers with shard=True get the whole state, if this rank was given it, or none."""
        for name, optimizer in self._sharded.items():
            if (shards := optimizer._drop_shards()) is not None:
                shards.release()
            if self._has_share:
                optimizer.optimizer.state = defaultdict(dict)
                if self._whole:
                    optimizer.optimizer.load_state_dict(self._whole[name])
        self._has_share = self._has_share and not self._whole
        self._whole = {}

    def _deal_out(self, world: World, src: int) -> None:
        """Collective: give each rank its share of what optimizers with shard=True have on rank `src`."""
        for name, optimizer in self._sharded.items() if world.size > 1 else ():
            assert optimizer._shards is not None
            load_state(optimizer._shards, self._whole[name] if world.rank == src else None, src)
            optimizer._shards.has_said = self._num_steps > 0
        if self._sharded and world.size > 1:
            collectives_of(world).barrier()  # until then, rank `src` may have to do this once more
        self._whole = {}

    def _share(self, world: World, rows: list[_Row]) -> tuple[bool, int]:
        """Give all ranks what one of them has, but for the state of optimizers with shard=True. Collective.

        Returns whether some rank has committed, and the rank that has everything.
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
        else:
            collectives_of(world).raise_together(problem, "could not give the others its state")
        if world.size == 1:
            return max(commits) >= 0, src
        are_equal = len({(row.progress, row.size) for row in rows}) == 1 and not (is_fresh or is_lost)
        if some_failed or not are_equal or not all(row.is_certain for row in rows):
            self._receive(src, world.rank)
        else:  # a step that GradScaler has left out changes more than a forward does, but no parameter
            broadcast_state(_Rest(self), src)
            for module in self._modules.values():
                broadcast_parameters(dict(module.named_buffers()), src)
        return max(commits) >= 0, src

    def _receive(self, src: int, rank: int) -> None:
        """Give all ranks what rank `src` has. Collective."""
        # Rank `src` may be lost on the way. Then this rank may be the furthest, and has to have what it had.
        before = None if self._is_fresh or rank == src else self._copy()
        try:
            broadcast_state(_Rest(self), src)  # first: optimizers load into groups that are alike
            for module in self._modules.values():
                broadcast_parameters(module, src)
            for optimizer in self._optimizers:
                if not optimizer._options.shard:
                    broadcast_state(optimizer, src)
        except BaseException:
            if before is not None:
                self._become(before)
            raise

    def _leave(self) -> None:
        """The generation is over for this rank."""
        self._world = self._agreed = None

    def _check_layout(self, theirs: list[str]) -> None:
        """Raise PlanMismatchError if this state consists of other things than that of the workers that train."""
        mine = self._layout()
        if mine != theirs:
            theirs_has, mine_has = _difference(theirs, mine)
            raise PlanMismatchError(
                f"this worker's State is not that of the workers that train: they have {theirs_has}, it has "
                f"{mine_has}; start the same script everywhere"
            )

    def _layout(self) -> list[str]:
        """Lines that must be equal on all ranks."""
        lines = []
        for name, module in self._modules.items():
            tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            lines += [f"{name}.{key}: {tuple(t.shape)} {t.dtype}" for key, t in tensors.items()]
        lines += [f"{name}: {type(each).__name__}" for name, each in self._stateful.items()]
        lines += [f"{name}: a value" for name in self._names_of_values]
        return [*lines, f"global_batch={self._global_batch}"]

    # Points to return to

    def _returns_to(self) -> int:
        """Progress of the newest commit of this rank; -1 for none."""
        return -1 if self._committed is None else self._committed[0]

    def _return_to_commit(self) -> None:
        assert self._committed is not None
        self._become(copy_of(self._committed[1]))  # loading keeps tensors, and the next exception may come

    def _copy(self) -> dict[str, Any]:
        """A copy of everything, also of buffers that no checkpoint has."""
        buffers = {name: dict(module.named_buffers()) for name, module in self._modules.items()}
        return cast("dict[str, Any]", copy_of({**self._everything(), "buffers": buffers}))

    def _everything(self) -> dict[str, Any]:
        """The whole state as it is now."""
        return {
            "format": _FORMAT,
            "layout": self._layout(),
            "command": _command(),
            "time": time.time(),
            "modules": {name: module.state_dict() for name, module in self._modules.items()},
            "parameters": _Parameters(self).state_dict(),
            "stateful": {name: each.state_dict() for name, each in self._stateful.items()},
            "values": self._values.state_dict(),
            "counters": self._counters.state_dict(),
        }

    def _become(self, everything: dict[str, Any]) -> None:
        if "parameters" in everything:  # older checkpoints have none
            _Parameters(self).load_state_dict(everything["parameters"])
        for name, module in self._modules.items():
            module.load_state_dict(everything["modules"][name])
        for name, buffers in everything.get("buffers", {}).items():
            own = dict(self._modules[name].named_buffers())
            for place in buffers.keys() & own.keys():
                own[place].resize_(buffers[place].shape).copy_(buffers[place])
        for name, each in self._stateful.items():
            each.load_state_dict(everything["stateful"][name])
        self._values.load_state_dict(everything["values"])
        self._counters.load_state_dict(everything["counters"])

    # Checkpoints

    def _load_newest(self, *, is_lost: bool) -> None:
        """Become what the newest checkpoint has, if there is one.

        Args:
            is_lost: there is a way back only.
        """
        found = None if self._folder is None else newest(self._folder)
        if found is None:
            if is_lost:
                raise ValueError(_LOST)
            if self._sharded:  # a rank may be lost before the first checkpoint is due
                self._save_now(self._everything())
            return
        step, everything = found
        if everything.get("format") != _FORMAT:
            raise ValueError(f"the checkpoint of step {step} in {self._folder} is of another version of torchring")
        if everything["layout"] != self._layout():
            saved_has, mine_has = _difference(everything["layout"], self._layout())
            raise ValueError(
                f"the checkpoint of step {step} in {self._folder} is of another model or State: it has {saved_has}, "
                f"the script has {mine_has}; use another folder, or remove the checkpoints"
            )
        if is_lost:
            _log.warning(
                "a worker that is lost took its share of the optimizer's state along (shard=True): all go back to a "
                "checkpoint"
            )
        self._become(everything)
        age = timedelta(seconds=round(time.time() - everything.get("time", 0)))
        is_another = everything.get("command", _command()) != _command()
        doubt = (
            "; a job with another command line has written it: if that job has nothing to do with this one, end this "
            "job, and give it another folder"
        )
        _log.warning(
            "training goes on from the checkpoint of step %d in %s, which is %s old%s",
            *(step, self._folder, age, doubt if is_another else ""),
        )

    def _write_if_due(self) -> None:
        """Collective if an optimizer has shard=True, else of rank 0."""
        world = self._world
        if self._folder is None or world is None or (world.rank != 0 and not self._sharded):
            return
        if self._sharded and world.shared(Join).is_open:  # ranks that have ended do not come here
            return
        steps, at = self._saved_at
        every = self._every
        if isinstance(every, int):
            is_due = self._num_steps >= steps + every
        else:
            is_due = self._num_steps > steps and time.monotonic() >= at + every.total_seconds()
            if self._sharded and world.size > 1:  # by the clock of rank 0
                is_due = internal_collectives_of(world).any_rank(is_due and world.rank == 0)
        if is_due:
            self._saved_at = (self._num_steps, time.monotonic())
            everything = self._everything()
            if self._writer is not None:
                self._writer.write(self._num_steps, copy_of(everything))
        if self._worker is not None and self._writer is not None:
            self._worker.checkpoint = str(self._writer.newest or "")

    def _gather(self) -> dict[str, Any] | None:
        """Collective, at the end: everything, on rank 0, for a checkpoint that it writes. Without shard=True, None."""
        return self._everything() if self._sharded and self._folder is not None else None

    def _part(self, worker: Worker | None, *, all_leave: bool) -> None:
        """Collective, where ranks change: a rank that stays gets the whole state of optimizers with shard=True.

        If the job may be over, rank 0 gets it, which writes the last checkpoint.
        """
        world = self._world
        if not self._sharded or world is None or world.size == 1:
            return
        try:
            leaves = worker is not None and worker.leaves
            is_over = worker is None or all_leave or worker.is_over(asks=leaves)
            said = internal_collectives_of(world).all_gather_bytes(bytes([is_over, leaves]))
            staying = [rank for rank, (_, leaves) in enumerate(said) if not leaves]
            heir = 0 if any(is_over for is_over, _ in said) or not staying else staying[0]
            for name, optimizer in self._sharded.items():
                assert optimizer._shards is not None
                whole = gather_state(optimizer._shards, keeps=world.rank == heir)
                if whole is not None:
                    self._whole[name] = whole
        except RingError as error:  # a rank is lost meanwhile
            self._whole = {}
            _log.warning("ranks part without the optimizer's state: %s", error)

    def _save_now(self, everything: dict[str, Any] | None = None) -> str:
        """Write a checkpoint, unless the newest has this step. Returns its path; "" without a folder, or on failure.

        Args:
            everything: as `_gather` has returned it. By default, what this rank has when the ranks have parted.
        """
        if self._folder is None or (self._is_fresh and everything is None):
            return ""
        if self._writer is None:
            self._writer = CheckpointWriter(self._folder)
        try:
            self._writer.flush(60.0)
            if newest_step(self._folder) != self._num_steps:
                if everything is None:
                    self._become_whole()
                    if self._has_share:
                        raise ValueError("other ranks, which are gone, have the rest of the optimizer's state")
                    everything = self._everything()
                self._writer.write_now(self._num_steps, everything)
        except Exception as error:
            _log.warning("no checkpoint was written to %s: %s", self._folder, error)
            return ""
        return str(self._writer.newest or "")


def _command() -> int:
    """A number for the command line of this job, which may hold secrets."""
    return zlib.crc32("\0".join([Path(sys.argv[0]).name, *sys.argv[1:]]).encode(errors="replace"))


def _difference(theirs: list[str], mine: list[str]) -> tuple[str, str]:
    """The first line that differs, in both."""
    return next(pair for pair in zip_longest(theirs, mine, fillvalue="nothing more") if pair[0] != pair[1])


class _Row(NamedTuple):
    """The progress of a rank, as the other ranks hear of it.

    Attributes:
        has_share: it has less than the whole state of optimizers with shard=True.
        progress: -1 for a rank that has nothing yet.
        is_certain: values belong to this progress.
        returns_to: progress of its newest commit; -1 for none.
        has_failed: it returns to its commit, and so all ranks do.
        saved: step of the newest checkpoint; -1 for none, or if the rank needs none.
        size: size of the world that trained last.
    """

    has_share: bool
    progress: int
    is_certain: bool
    returns_to: int
    has_failed: bool
    saved: int
    size: int


class _Hook(TransientHook):
    """A hook on a module of a State: calls a method of the State."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *arguments: object) -> None:
        self._call(*arguments)


class _Parameters:
    """The parameter groups of a State's optimizers, and which parameters require a gradient. Has a state dict."""

    def __init__(self, state: State) -> None:
        self._optimizers = {
            name: each for name, each in state._stateful.items() if isinstance(each, DistributedOptimizer)
        }
        self._places = {
            parameter: f"{each} of {name}"
            for name, optimizer in self._optimizers.items()
            for parameter, each in names_of(optimizer).items()
        }
        for name, module in state._modules.items():
            self._places |= {parameter: f"{name}.{each}" for each, parameter in module.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "groups": {name: list(map(self._group, each.param_groups)) for name, each in self._optimizers.items()},
            "names": {
                name: [names_of(each).get(parameter, "") for parameter in parameters_of(each)]
                for name, each in self._optimizers.items()
            },
            "requires_grad": {place: parameter.requires_grad for parameter, place in self._places.items()},
        }

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        # A parameter that came past torchring has no place. The next step refuses it.
        return {**group, "params": [self._places.get(parameter, "") for parameter in group["params"]]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        parameters = {place: parameter for parameter, place in self._places.items()}
        for name, optimizer in self._optimizers.items():
            groups = [{**group} for group in state_dict["groups"][name]]
            for group in groups:
                if unknown := [place for place in group["params"] if place not in parameters]:
                    raise ValueError(
                        f"{name} has {unknown[0]} where training goes on, which no module of this State has; build "
                        "the same model, and keep all modules in the State whose parameters are added later"
                    )
                group["params"] = [parameters[place] for place in group["params"]]
            _take_groups(optimizer, groups, state_dict["names"][name])
        for place, requires_grad in state_dict["requires_grad"].items():
            if place in parameters and parameters[place].requires_grad != requires_grad:
                parameters[place].requires_grad_(requires_grad)


def _take_groups(optimizer: DistributedOptimizer, groups: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Take over these groups, options and names of parameters. Existing groups stay, as schedulers refer to them."""
    own = optimizer.param_groups
    of_both = zip(own, groups, strict=False)
    alike = [[*map(id, mine["params"])] == [*map(id, its["params"])] for mine, its in of_both]
    num_alike = [*alike, False].index(False)
    if num_alike < max(len(own), len(groups)):
        for parameter in [parameter for group in own[num_alike:] for parameter in group["params"]]:
            optimizer.state.pop(parameter, None)
        del own[num_alike:]
        for group in groups[num_alike:]:
            optimizer.optimizer.add_param_group(dict(group))
        named = names_of(optimizer)
        named.clear()
        named.update(zip(parameters_of(optimizer), names, strict=True))
    for mine, its in zip(own, groups, strict=True):
        mine.update({key: value for key, value in its.items() if key != "params"})


class _Rest:
    """All of a State but the tensors of its modules and optimizers. Has a state dict."""

    def __init__(self, state: State) -> None:
        self._parts: dict[str, Stateful] = {
            "parameters": _Parameters(state),
            "values": state._values,
            "counters": state._counters,
        }
        for name, each in state._stateful.items():
            if not isinstance(each, DistributedOptimizer):
                self._parts[f"stateful {name}"] = each

    def state_dict(self) -> dict[str, Any]:
        return {name: each.state_dict() for name, each in self._parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, each in self._parts.items():
            each.load_state_dict(state_dict[name])


class _Fields:
    """Attributes of a State, by the names that they have in its state dict."""

    def __init__(self, state: State, attributes: dict[str, str]) -> None:
        self._state = state
        self._attributes = attributes

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self._state, attribute) for name, attribute in self._attributes.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, attribute in self._attributes.items():
            setattr(self._state, attribute, state_dict[name])
