"""`run`: calls a function on several workers of a Ray cluster, and returns what it returned.

    losses = torchring.ray.run(train, args=(10,), num_workers=4, resources={"CPU": 2})

A placement group reserves the resources, and an actor in each of its bundles is a rank. The driver waits for all of
them, and ends them all if one fails.
"""

import math
import os
import pickle
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import ray
from ray import cloudpickle
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from torchring.errors import PeerLostError, TopologyError
from torchring.launch.task import pickled_call, places_of
from torchring.ray.actor import Rank
from torchring.rendezvous.environment import JOB

_T = TypeVar("_T")
_CAUSE_SECONDS: Final = 1.0  # a rank may hear that another one died before Ray does
_OPTION_OF: Final = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}  # of an actor; others are custom


def run(
    fn: Callable[..., _T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_workers: int,
    resources: Mapping[str, float] | None = None,
    start_timeout_seconds: float = 300.0,
) -> list[_T]:
    """Call fn(*args, **kwargs) on `num_workers` workers of a Ray cluster, each a rank of one world.

    Workers of one node have adjacent ranks, and torchrun's variables are set. Connects to Ray as Ray itself does, if
    `ray.init` was not called. When this returns or raises, workers and resources are released.

    Args:
        fn: the function, in which `torchring.wrap` or a collective joins the world. Function, arguments and results
            are pickled by Ray's cloudpickle.
        num_workers: number of ranks.
        resources: of each worker, in Ray's names, such as {"CPU": 4, "GPU": 1}. Default: {"CPU": 1}. Ray sets
            OMP_NUM_THREADS to the CPUs of a worker, and shows a worker the GPUs that it has only.
        start_timeout_seconds: how long to wait for the resources.

    Returns what fn returned, in the order of ranks.

    Raises:
        ValueError: num_workers or resources are impossible, or something cannot be pickled.
        TopologyError: this was called on a rank.
        TimeoutError: the resources were not free in time.
        PeerLostError: the process of a rank has ended, or its node has. `peers` names the rank.
        RuntimeError: fn raised an exception on a rank. The text has its traceback, and the exception is the cause.
    """
    resources = {"CPU": 1} if resources is None else dict(resources)
    _check(num_workers, resources)
    pickled = pickled_call(cloudpickle.dumps, fn, args, kwargs)
    if not ray.is_initialized():
        ray.init()
    group = placement_group([resources] * num_workers, strategy="PACK")
    ranks: list[Any] = []
    secret = secrets.token_hex(16)
    try:
        _wait_for(group, resources, start_timeout_seconds)
        nodes = placement_group_table(group)["bundles_to_node_id"]
        places = places_of([nodes[bundle] for bundle in range(num_workers)])
        ranks += [_start(group, bundle, {**environ, JOB: secret}, resources) for bundle, environ in places]
        master = ranks[0].host_store.remote(places[-1][1]["GROUP_RANK"] == "0")
        call = ray.put(pickled)
        return _results([rank.call.remote(master, call) for rank in ranks])
    finally:
        for rank in ranks:
            ray.kill(rank)
        remove_placement_group(group)


def _check(num_workers: int, resources: Mapping[str, float]) -> None:
    if num_workers < 1:
        raise ValueError(f"num_workers must be 1 or more, got {num_workers}")
    if not resources or not all(amount > 0 for amount in resources.values()):
        raise ValueError(
            f"resources must be what each worker needs, such as {{'CPU': 4, 'GPU': 1}}, in positive amounts, "
            f"got {resources}"
        )
    if "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        raise TopologyError(
            f"torchring.ray.run was called on rank {os.environ.get('RANK')} of {os.environ['WORLD_SIZE']}, and each "
            "rank would start workers of its own. Call it in the script that starts them; on a rank, torchring.wrap "
            "and the collectives join the world by themselves"
        )


def _wait_for(group: PlacementGroup, resources: Mapping[str, float], seconds: float) -> None:
    ready, _ = ray.wait([group.ready()], timeout=seconds)  # ends on Ctrl-C, as group.wait() does not
    if not ready:
        known = ray.available_resources(), ray.cluster_resources()
        free, whole = ({name: amounts.get(name, 0) for name in resources} for amounts in known)
        raise TimeoutError(
            f"num_workers={group.bundle_count} with {dict(resources)} each did not get these resources within "
            f"{seconds:g} s; the nodes together have {whole}, of which {free} is free. Wait for other jobs, ask "
            "for less, or pass a longer start_timeout_seconds"
        )


def _start(group: PlacementGroup, bundle: int, environ: dict[str, str], resources: Mapping[str, float]) -> Any:
    options: dict[str, Any] = {_OPTION_OF[name]: resources[name] for name in _OPTION_OF if name in resources}
    custom = {name: amount for name, amount in resources.items() if name not in _OPTION_OF}
    place = PlacementGroupSchedulingStrategy(group, bundle)
    options = {"num_cpus": 0, **options, "resources": custom, "scheduling_strategy": place}
    return ray.remote(Rank).options(**options).remote(environ)


def _results(calls: list[Any]) -> list[Any]:
    """What the calls return. Raises the error of the rank that has failed, not of those that only missed it."""
    results: dict[int, Any] = {}
    failed: tuple[int, RayError] | None = None
    pending = list(calls)
    end = math.inf
    while pending:
        timeout = None if end == math.inf else max(0.0, end - time.monotonic())
        ready, pending = ray.wait(pending, timeout=timeout)
        if not ready:
            break
        rank = calls.index(ready[0])
        try:
            results[rank] = pickle.loads(ray.get(ready[0]))
        except RayError as error:
            # What torchring, Gloo and NCCL raise about a peer is a RuntimeError.
            is_cause = not isinstance(error, RayTaskError) or not isinstance(error.cause, RuntimeError)
            if failed is None or is_cause:
                failed = rank, error
            if is_cause:
                break
            end = min(end, time.monotonic() + _CAUSE_SECONDS)
    if failed is None:
        return [results[rank] for rank in range(len(calls))]
    rank, failure = failed
    if isinstance(failure, RayTaskError):
        raise RuntimeError(f"rank {rank} of {len(calls)} failed:\n{failure}") from failure.cause
    raise PeerLostError(f"rank {rank} of {len(calls)} is lost: {failure}", peers=(rank,)) from failure
