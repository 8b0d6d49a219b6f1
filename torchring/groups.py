"""Groups: some of the job's ranks, which reduce among themselves. In a mesh, data parallelism is over one dimension.

A group is a `World` of its own, whose ranks are positions in the group, in the order of the job's ranks. It opens when
it is first used, and closes with the world of the job. Opening it is collective over its ranks alone: each rank says at
the store of the job that it has come, and waits for the others. So groups open at the same time, in any number.
"""

import contextlib
import copy
import json
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from torchring.collectives.service import Join
from torchring.connection import ConnectedOptimizer
from torchring.dynamo import run_eagerly
from torchring.errors import PeerTimeoutError, RingError, TopologyError, decode_error, encode_error, ranks_in_words
from torchring.gradients.group import OptimizerGroup
from torchring.gradients.reducer import Reducer
from torchring.observe.services import observe
from torchring.participants import module_wrappers
from torchring.rendezvous.environment import ELASTIC
from torchring.rendezvous.rendezvous import Rendezvous, within
from torchring.world import Group, World

_LOOK_SECONDS: Final = 0.25  # between two looks at what ranks wait for that have not come
_opening: Final[defaultdict[tuple[int, ...], threading.Lock]] = defaultdict(threading.Lock)


def members_of(group: Group, rank: int, size: int, launcher: str) -> tuple[int, ...]:
    """The ranks of the group that has `rank`, which is one of `size`, in ascending order. Sends nothing.

    Raises:
        TypeError: `group` is something else.
        ValueError: the rank is in no group, lists overlap or name ranks that are not there, a mesh has several
            dimensions, or the job is elastic.
    """
    if launcher == ELASTIC:
        raise ValueError("group does not work in an elastic job: its ranks change, and groups are lists of ranks")
    if isinstance(group, Sequence) and not isinstance(group, str):
        return _of_lists(group, rank, size)
    found: Any = group  # -100 if it has not this rank
    device_mesh = sys.modules.get("torch.distributed.device_mesh")  # which has been imported if there is a mesh
    try:
        if device_mesh is not None and isinstance(group, device_mesh.DeviceMesh):
            if group.ndim != 1:
                names = group.mesh_dim_names or tuple(range(group.ndim))
                raise ValueError(
                    f"group is a mesh of {group.ndim} dimensions, {', '.join(map(str, names))}; pass the one over "
                    f"which ranks reduce, as mesh[{names[0]!r}], or several as one: "
                    f"mesh[{', '.join(map(repr, names[:2]))}]._flatten()"
                )
            found = dist.GroupMember.NON_GROUP_MEMBER if group.get_coordinate() is None else group.get_group()
        ranks = dist.get_process_group_ranks(found) if isinstance(found, dist.ProcessGroup) else []
    except (KeyError, RuntimeError) as error:
        raise ValueError("the process group of group was destroyed; make another, or pass lists of ranks") from error
    if not ranks and found is not dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError(
            "group must be a torch.distributed.ProcessGroup, a DeviceMesh of one dimension, or lists of ranks such as "
            f"[[0, 1], [2, 3]], got {type(group).__name__}"
        )
    if (told := (dist.get_rank(), dist.get_world_size())) != (rank, size):
        raise ValueError(
            f"group belongs to torch.distributed, where this is rank {told[0]} of {told[1]}; for torchring it is rank "
            f"{rank} of {size}. Call init_process_group() before anything of torchring's"
        )
    if rank not in ranks:
        raise ValueError(f"rank {rank} is not in group, so it cannot use it; pass the group that this rank is in")
    return tuple(sorted(ranks))


def _of_lists(group: Sequence[Sequence[int]], rank: int, size: int) -> tuple[int, ...]:
    if not all(isinstance(each, Sequence) and all(isinstance(r, int) for r in each) for each in group):
        raise TypeError(f"group takes lists of ranks, such as [[0, 1], [2, 3]], got {group!r}")
    counts = Counter(r for each in group for r in each)
    if unknown := sorted(r for r in counts if not 0 <= r < size):
        raise ValueError(f"group has {ranks_in_words(unknown)}, but the job has ranks 0-{size - 1}: {group!r}")
    if several := sorted(r for r, count in counts.items() if count > 1):
        raise ValueError(f"group has {ranks_in_words(several)} several times, and lists must not overlap: {group!r}")
    if rank not in counts:
        raise ValueError(f"rank {rank} is in none of the lists of group: {group!r}")
    return tuple(sorted(next(each for each in group if rank in each)))


@run_eagerly
def open_group(job: World, group: Group) -> World:
    """The world of this rank's group, opened now if it is not open. Collective then, over the ranks of the group.

    Raises:
        ValueError: see `members_of`.
        TopologyError: ranks open groups in different orders, and wait for each other.
        RingError: the world of the job is broken, or a rank of the group died or did not come.
    """
    members = members_of(group, job.rank, job.size, job.launcher)
    if len(members) == job.size:
        return job
    with _opening[members]:
        if members not in job.groups:
            job.raise_if_broken()
            job.shared(Join).refuse("opening a group")
            job.groups[members] = _meet(job, members)
    return job.groups[members]


def open_world(job: World, members: tuple[int, ...], name: str) -> World:
    """Collective over `members`: a world of these ranks of `job`. `name`: of its keys in the store of the job."""
    rendezvous = job.rendezvous
    return observe(
        World(
            None if rendezvous is None or len(members) == 1 else within(rendezvous.store, name),
            members.index(job.rank),
            len(members),
            timeout_seconds=job.timeout_seconds,
            launcher=job.launcher,
            backend=job.backend,
            is_one_host=job.shares_memory,
            stall_warning_seconds=job.stall_warning_seconds,
            store_host=members.index(host) if (host := getattr(rendezvous, "store_host", None)) in members else None,
            outer=job,
            members=members,
        )
    )


def _meet(job: World, members: tuple[int, ...]) -> World:
    """Collective over `members`: wait until all have come here, and open their world."""
    meetings = job.shared(_count_meetings)
    name = f"group/{'-'.join(map(str, members))}/{meetings[members]}"
    meetings[members] += 1
    if job.rendezvous is None or len(members) == 1:
        return open_world(job, members, name)
    rendezvous = copy.copy(job.rendezvous)
    rendezvous.on_wait = _Crossing(job.rendezvous).look
    key, what = f"{name}/come/{{}}".format, f"opening the group of {ranks_in_words(members)}"
    operations, thread = job.observer.operations, threading.get_ident()
    is_outermost = operations.setdefault(thread, what) is what
    try:
        rendezvous.publish(_opens(job.rank), json.dumps([members, name]).encode())
        rendezvous.publish(key(job.rank), b"")
        for member in members:
            try:
                failure = rendezvous.fetch(key(member), member)
            except PeerTimeoutError as error:
                opens, _ = _read_opens(rendezvous, member)
                instead = f", and opens the group of {ranks_in_words(opens)} instead" if opens else ""
                error.message = f"rank {member} did not come where this rank is {what}{instead}"
                error.explanation = job.observer.explain((member,))
                raise
            if failure:
                raise decode_error(failure, member)
        world = open_world(job, members, name)
        world.check_data = job.check_data
        return world
    except BaseException as error:
        cause = error if isinstance(error, RingError) else TopologyError(f"{type(error).__name__} in {what}: {error}")
        with contextlib.suppress(RingError):  # the store may be gone
            if not cause.members:
                rendezvous.with_timeout(1.0).publish(key(job.rank), encode_error(cause))
            if cause is not error:  # members that know of this one are opening the world
                store = within(rendezvous.store, name)
                Rendezvous(store, members.index(job.rank), len(members), 1.0).give_up(cause)
        raise
    finally:
        with contextlib.suppress(RingError):
            rendezvous.with_timeout(1.0).publish(_opens(job.rank), json.dumps([[], name]).encode())
        if is_outermost:
            del operations[thread]


def _count_meetings(job: World) -> Counter[tuple[int, ...]]:
    """How often each group has begun to open."""
    return Counter()


def _opens(rank: int) -> str:
    return f"group/opens/{rank}"


def _read_opens(rendezvous: Rendezvous, rank: int) -> tuple[list[int], str]:
    """The members of the group that a rank opens now, which may be none, and the group's name in the store."""
    key = _opens(rank)
    members, name = json.loads(rendezvous.fetch(key, rank)) if rendezvous.is_published(key) else ([], "")
    return members, name


class _Crossing:
    """Looks, while this rank waits, whether ranks wait for each other crosswise, each in a group of its own."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = copy.copy(rendezvous)
        self._rendezvous.on_wait = None  # a look is no wait
        self._tell: Callable[[Sequence[int], float], None] = rendezvous.on_wait or (lambda ranks, seconds: None)
        self._look_at = _LOOK_SECONDS
        self._found: list[Any] = []

    def look(self, ranks: Sequence[int], seconds: float) -> None:
        """Raise TopologyError if two looks in a row find the same ranks waiting for each other."""
        self._tell(ranks, seconds)
        if not ranks or seconds < self._look_at:
            return
        self._look_at = seconds + _LOOK_SECONDS
        before, self._found = self._found, self._circle(self._rendezvous.rank, [])
        if self._found and self._found == before:
            told = ", ".join(f"rank {rank} the group of {ranks_in_words(members)}" for rank, members, _ in self._found)
            error = TopologyError(
                f"ranks open groups that overlap, in different orders, so that each waits for another: {told}. Open "
                "groups in one order on all ranks, and give all ranks of a group the same list",
                rank=self._rendezvous.rank,
                peers=[rank for rank, *_ in self._found],
            )
            for (*_, name), (awaited, *_) in zip(self._found, self._found[1:] + self._found[:1], strict=True):
                self._rendezvous.publish(f"{name}/come/{awaited}", encode_error(error))  # who waits there hears of it
            raise error

    def _circle(self, rank: int, path: list[Any]) -> list[Any]:
        """What each rank opens, of those that wait for each other from `rank` back to the first one of `path`."""
        if path and rank == path[0][0]:
            return path
        if any(rank == earlier for earlier, *_ in path):
            return []
        members, name = _read_opens(self._rendezvous, rank)
        missing = (other for other in members if not self._rendezvous.is_published(f"{name}/come/{other}"))
        return next(filter(None, (self._circle(other, [*path, (rank, members, name)]) for other in missing)), [])


def end_together(own: OptimizerGroup, caller: Reducer) -> None:
    """A backward that reached `caller`, of `own`, is about to return. This rank has optimizers of other groups, too.

    Collective, over one group after the other, in one order on all ranks. Optimizers of the same model take part that
    the backward has not reached on this rank, such as those of experts that have got no token.
    """
    if not caller.in_backward:  # which has ended with that of another group
        return
    models = [reducer.model() for group in own.of_this_rank for reducer in group.reducers if reducer.in_backward]
    with contextlib.ExitStack() as stack:
        for group in own.of_this_rank:
            if own.is_skipping and group is not own:
                stack.enter_context(group.skipping(own.skipper))
            if not any(reducer.in_backward for reducer in group.reducers):
                for reducer in group.reducers:
                    if (model := reducer.model()) is not None and any(model is other for other in models):
                        reducer.begin_unreached()
        try:
            for group in own.of_this_rank:
                if reached := [reducer for reducer in group.reducers if reducer.in_backward]:
                    group.end_backward(caller if caller in reached else reached[0], is_alone=True)
        except BaseException as error:
            for reducer in (reducer for group in own.of_this_rank for reducer in group.reducers if reducer.in_backward):
                reducer.abort_backward()
                if not reducer.world.is_in_step(error):  # the other ranks of its group would wait for this one
                    reducer.world.break_off("backward()", error)
            raise


def left_to_others(
    own: ConnectedOptimizer, names: Mapping[torch.nn.Parameter, str], model: torch.nn.Module | None, world: World
) -> set[torch.Tensor]:
    """The parameters that optimizers of other groups have, and buffers beside them: experts may differ between ranks.

    Raises ValueError if one of these optimizers has copied this one's parameters, too, to ranks of other groups.
    """
    found: set[torch.Tensor] = set()
    for other in module_wrappers.living(ConnectedOptimizer):
        if other is own or other.is_closed or other._group == own._group or not hasattr(other, "_names"):
            continue
        found.update(other._names)
        its_ranks = set(*other._group) if other._group else set(range(world.outer.size))
        is_within = its_ranks <= {*world.ranks}
        model = other._model() if other._has_copied and not is_within else None
        copied = {id(p) for p in model.parameters() if p not in other._ignored} if model is not None else set()
        if (name := next((name for p, name in names.items() if hash(p) in copied), None)) is not None:
            raise ValueError(
                f"{name} was copied to {ranks_in_words(its_ranks)} with the rest of the model, by the wrap() of "
                "another optimizer. Pass ignore=[...] to that wrap(), with what belongs to others; or wrap the "
                "optimizer of fewer ranks first"
            )
    for module in () if model is None else model.modules():
        if any(parameter in found for parameter in module.parameters(recurse=False)):
            found.update(module.buffers(recurse=False))
    return found
