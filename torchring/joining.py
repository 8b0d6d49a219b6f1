"""`join`: ranks that have more data than others, or stop later, go on. The others take part until all have ended.

A rank that has ended takes part in each reduction of the others, without gradients of its own. So means are over the
ranks that still have data. A rank that has ended makes no steps: a step may depend on clipping, a loss scale or a
schedule, which only the script knows. In the end all ranks take over what the rank that has ended last has.

Source: the idea is that of torch.distributed.algorithms.Join and of Horovod's join().
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from torchring.collectives.service import Join, collectives_of, internal_collectives_of
from torchring.default_world import world_of
from torchring.gradients.group import OptimizerGroup
from torchring.gradients.reducer import Reducer
from torchring.initial_state import broadcast_state, check_broadcastable, check_sendable, copy_from, is_sharded
from torchring.optimizer import DistributedOptimizer, names_of, others_of, sync_of
from torchring.world import World


@contextmanager
def join(*objects: Any) -> Iterator[None]:
    """A context manager for a loop whose ranks may have different numbers of batches. Collective, as is its end.

        with torchring.join(optimizer, scheduler):
            for batch in batches:
                ...

    A rank that leaves the block takes part in the reductions of the others until all have left. Gradients are averaged
    over the ranks that are still inside. At the end, all ranks get parameters, buffers, optimizer state and the number
    of steps from the rank that has left last, and the state of the other `objects`. Gradients are dropped. Buffers
    that `wrap` leaves alone, and that differ between ranks, are left alone here, too.

    Inside the block, only `backward()`, `skip()` and `synchronize()` may need other ranks. `torchring.all_reduce` and
    the other collectives, `SyncBatchNorm` in training, `step(closure)`, `wrap`, `add_param_group` and `close` raise
    ValueError: ranks that have ended would not take part. `synchronize()` always counts as one reduction, which the
    others meet with their next `backward()`. Gradients of `no_sync()`, or of an incomplete group of `accumulate`, that
    a rank leaves behind are reduced with the next ones of the others. An exception that leaves the block ends the block
    on all ranks; so do not yield from inside a block: the end of a generator is an exception.

    Args:
        *objects: all `DistributedOptimizer`s that exist, and whatever else the loop changes in step with them:
            learning rate schedulers, a GradScaler, or anything else with `state_dict()` and `load_state_dict()`. A
            torch.nn.Module, such as an averaged model, stands for its parameters and buffers. The same on all ranks.
            Optimizers of a group of ranks join among the ranks of that group.

    Raises:
        TypeError: an object has no state, or a state that cannot be sent, or none is an optimizer.
        ValueError: an optimizer is missing, is closed, or belongs to a world that was shut down; this rank's optimizers
            are of several groups of ranks; shard=True, or on_nonfinite="skip" on a GPU, where `step()` needs the other
            ranks; the block is inside another one.
        PlanMismatchError: another rank could not enter, or passes other objects.
        RingError: another rank left the block with an exception.
    """
    optimizers = [each for each in objects if isinstance(each, DistributedOptimizer)]
    world = world_of(optimizers[0]._group if optimizers else None)
    problem = _problem_with(objects, world)
    if world.size == 1:
        if (problem := problem or _missing(objects, world)) is not None:
            raise problem
        yield
        for optimizer in optimizers:
            optimizer.zero_grad()
        return
    group = world.shared(OptimizerGroup)
    collectives = collectives_of(world)
    if not world.shared(Join).is_open:
        collectives.raise_together(problem, "could not enter torchring.join()")
        collectives.check_equal([f"object {i} of join(): {type(each).__name__}" for i, each in enumerate(objects)])
        group.release_dead()
        collectives.raise_together(_missing(objects, world), "could not enter torchring.join()")
    elif problem is not None:
        raise problem
    joins = _joins_of(world)
    try:
        for joined in joins:
            joined.is_open = True
        yield
    except BaseException as error:
        if not world.is_in_step(error):
            world.break_off("torchring.join()", error)
        raise
    finally:
        for joined in joins:
            joined.is_open = False
    if not world.is_open:
        raise ValueError("torchring.shutdown() was called inside torchring.join(); call it after the with block")
    src = _last(group.guard.run("torchring.join()", follow_others, group), world, group)
    for each in objects:
        if isinstance(each, DistributedOptimizer):
            _take_over(each, src)
        elif isinstance(each, torch.nn.Module):
            copy_from(world, src, check_broadcastable(each))
        else:
            broadcast_state(each, src, world)


def _take_over(optimizer: DistributedOptimizer, src: int) -> None:
    """Collective: have what it has on rank `src`, with its model's parameters. Drops gradients."""
    sync = sync_of(optimizer)
    assert isinstance(sync, Reducer)
    optimizer.zero_grad()
    own = {name: p.data for p, name in names_of(optimizer).items()}
    copy_from(sync.world, src, {**others_of(optimizer), **own}, optimizer.optimizer)
    observer = sync.world.observer
    steps = torch.tensor([sync.num_steps, observer.num_steps], device="cpu")
    internal_collectives_of(sync.world).broadcast(steps, src)
    sync.num_steps, observer.num_steps = map(int, steps.tolist())
    sync.accept_parameters()
    if sync.buffers is not None:
        sync.buffers.take_over(src)


def _problem_with(objects: Sequence[Any], world: World) -> Exception | None:
    """Returns the error that this rank raises for the arguments, without asking other ranks."""
    try:
        if world.shared(Join).is_open:
            raise ValueError("torchring.join() was called inside torchring.join(); one block is enough")
        if not any(isinstance(each, DistributedOptimizer) for each in objects):
            raise TypeError("torchring.join() takes the optimizers that torchring.wrap() has returned, got none")
        for each in objects:
            if isinstance(each, DistributedOptimizer):
                _check_joinable(each)
            elif not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise TypeError(f"torchring.join() takes objects with state_dict(), got {type(each).__name__}")
            elif not isinstance(each, torch.nn.Module):
                check_sendable(each)
    except Exception as error:
        return error
    return None


def _check_joinable(optimizer: DistributedOptimizer) -> None:
    """Raise ValueError if `optimizer` cannot be used inside `torchring.join`. A copy connects."""
    if not sync_of(optimizer).can_skip_alone():
        raise ValueError('torchring.join() does not work with on_nonfinite="skip" on a GPU')
    if is_sharded(optimizer) or is_sharded(optimizer.optimizer):
        raise ValueError(
            "torchring.join() does not work with shard=True or a ZeroRedundancyOptimizer, whose step() needs all "
            "ranks; make equally many steps on all ranks, and call optimizer.skip() where the data has ended"
        )


def _missing(objects: Sequence[Any], world: World) -> Exception | None:
    group = world.shared(OptimizerGroup)
    if any(other is not group and other.owners() for other in group.of_this_rank):
        return ValueError(
            "torchring.join() takes the optimizers of one group of ranks, and this rank has optimizers of several "
            "groups, where others would wait for a rank that has ended: give all ranks equally many batches, and call "
            "optimizer.skip() where the data has ended"
        )
    missing = [owner for owner in group.owners() if not any(owner is each for each in objects)]
    if not missing:
        return None
    return ValueError(
        f"torchring.join() got {len(objects)} objects, and {len(missing)} DistributedOptimizers are missing; pass all, "
        "or close() those that are not needed"
    )


def _joins_of(world: World) -> list[Join]:
    """Those of all worlds of this rank that have other ranks of `world`, too, which may have ended."""
    groups = [group for members, group in world.outer.groups.items() if len({*world.ranks}.intersection(members)) > 1]
    return [each.shared(Join) for each in (world.outer, *groups)]


def follow_others(group: OptimizerGroup, *, counts: bool = False) -> int:
    """Collective: take part in the reductions of the ranks that still have data, until no rank has.

    With `counts`, this rank counts in their means, with zeros: it drops its gradients. Else its weight is 0.

    Returns the number of reductions that this rank took part in. The last rank to end returns the smallest number.
    """
    num_reductions, has_more = 0, True
    reducers = group.reducers
    group.has_ended = True
    try:
        with torch.no_grad(), nullcontext() if counts else group.skipping():
            for reducer in reducers:
                reducer.weights.drop_next()
            while has_more and reducers:
                for parameter in (p for reducer in reducers if counts for p in reducer.parameters):
                    parameter.grad = None
                has_more = group.follow()
                num_reductions += has_more
    finally:
        group.has_ended = False
    return num_reductions


def _last(num_followed: int, world: World, group: OptimizerGroup) -> int:
    """Collective: the rank that has followed the fewest reductions of others. Of several, the one with most steps."""
    mine = torch.tensor([num_followed, -sum(reducer.num_steps for reducer in group.reducers)], device="cpu")
    everybody = internal_collectives_of(world).all_gather(mine.unsqueeze(0))
    return min(range(world.size), key=lambda rank: everybody[rank].flatten().tolist())
