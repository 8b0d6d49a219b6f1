"""A task of a barrier stage becomes a rank, and leaves its Python worker, which Spark uses again, as it was."""

import contextlib
import json
import os
import pickle
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from pyspark import BarrierTaskContext, cloudpickle
from torch.distributed import TCPStore

from torchring import default_world
from torchring.errors import RingError
from torchring.launch.task import make_call, places_of
from torchring.linux import host_name
from torchring.meeting import forget_store
from torchring.rendezvous.environment import CHOICE, JOB
from torchring.rendezvous.store import host
from torchring.spark.reports import Reporter, copied_output

FAILED: Final = "torchring: "  # before a traceback that travels in one of Spark's
_LOOPBACK: Final = "127.0.0.1"
_ENDED: Final = "torchring/ended"  # number of ranks
_GPUS: Final = "CUDA_VISIBLE_DEVICES"

reporter: Reporter | None = None  # of the rank that this process is


def _after_fork() -> None:
    if reporter is not None:
        reporter.close()  # or else the connection would outlive the rank


os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True)
class RankCall:
    """What all ranks are to do."""

    payload: bytes  # function, arguments and keyword arguments, pickled
    driver: tuple[str, int]  # host and port of its `Reports`
    token: str  # of `Reports`; also the secret of the job
    shows_output: bool  # the driver gets the output
    is_local: bool  # the tasks are children of the driver, and have its stdout
    use_gpu: bool | None  # see `torchring.spark.run`
    env: Mapping[str, str]  # more variables


def take_part(call: RankCall, _: object) -> Iterator[bytes]:
    """What a task does, for `mapPartitions`: yields the pickled result of the rank. Partition N is not rank N.

    A rank that fails does not shut down, or else its peers might be the first to fail, and to be named on the driver.
    Its Python worker ends, as the worker of any task that has raised an exception.
    """
    global reporter
    task = BarrierTaskContext.get()
    partition = task.partitionId()
    hosts = [info.address.rpartition(":")[0].strip("[]") for info in task.getTaskInfos()]
    places = places_of(hosts)
    rank, size = [each for each, _ in places].index(partition), len(places)
    name = f"rank {rank} of {size} (pid {os.getpid()} on {host_name()})"
    reporter = Reporter(call.driver, token=call.token, partition=partition, name=name, rank=rank)
    try:
        with _as_rank(call, task, hosts, places):
            result = make_call(cloudpickle.dumps, call.payload, name)
    except BaseException as error:
        text = traceback.format_exc()
        reporter.say(failure=text, is_consequence=isinstance(error, RingError))
        raise RuntimeError(f"{FAILED}{name} failed:\n{text}") from None
    reporter.say(done=True)
    reporter.close()
    reporter = None
    return iter([pickle.dumps((rank, result))])


@contextlib.contextmanager
def _as_rank(
    call: RankCall, task: BarrierTaskContext, hosts: Sequence[str], places: Sequence[tuple[int, Mapping[str, str]]]
) -> Iterator[None]:
    """This process is a rank in this context. A context that ends with an error leaves it one."""
    _leave()  # what a function that Spark ran here before has left open
    partition = task.partitionId()
    order = [each for each, _ in places]
    rank = order.index(partition)
    neighbours = [other for other in order if hosts[other] == hosts[partition]]
    gpu = task.resources()["gpu"].addresses[:1] if call.use_gpu is not False and "gpu" in task.resources() else []
    if call.use_gpu and not gpu:
        raise ValueError("use_gpu=True, but Spark gives this task no GPU")
    # As with torchring.ray: on loopback if all ranks are on this host, else on all interfaces.
    is_local = len(neighbours) == len(order)
    address = _LOOPBACK if is_local else hosts[order[0]]
    # Rank 0 listens from now on, so that nobody else can get the port. init() finds this store there.
    store = host(is_local) if rank == 0 else None
    port = 0 if store is None else store.port
    said = [json.loads(each) for each in task.allGather(json.dumps({"port": port, "gpu": gpu}))]
    variables = {
        **call.env,
        **places[rank][1],
        "MASTER_ADDR": address,
        "MASTER_PORT": said[order[0]]["port"],
        JOB: call.token,
        CHOICE: "torchrun",  # TORCHRING_LAUNCHER=none may have been set for other tasks of the executors
    }
    if call.use_gpu is False:
        variables[_GPUS] = ""
    elif gpu:
        variables[_GPUS] = visible_gpus(gpu[0], [said[other]["gpu"][0] for other in neighbours])
    _refuse_other_gpus(variables.get(_GPUS))
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in variables.items()})
    with contextlib.ExitStack() as redirected:
        if call.shows_output and reporter is not None:
            redirected.enter_context(copied_output(reporter, call.is_local))
        yield
    default_world.leave("its function had returned")
    _leave()
    _wait_for_peers(store, address, said[order[0]]["port"], len(order))
    forget_store()  # or this worker would listen at the port until its next job
    os.environ.clear()
    os.environ.update(before)


def visible_gpus(own: str, of_host: Sequence[str]) -> str:
    """Those of all ranks of this host, so that LOCAL_RANK is the number of this rank's.

    Where executors are isolated (YARN), each calls its only GPU 0, and a rank sees its own.
    """
    return ",".join(of_host) if len(set(of_host)) == len(of_host) else own


def _leave() -> None:
    if "torchring.horovod.context" in sys.modules:
        sys.modules["torchring.horovod.context"].shutdown()
    default_world.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


def _wait_for_peers(store: TCPStore | None, address: str, port: int, size: int) -> None:
    """Keep the store, which rank 0 hosts, until the last rank has done with it. Spark's own barrier takes a second."""
    if store is None:
        TCPStore(address, port, is_master=False, wait_for_workers=False).add(_ENDED, 1)
        return
    while store.add(_ENDED, 0) < size - 1:  # if a rank fails, Spark ends this one
        time.sleep(0.02)


def _refuse_other_gpus(wanted: str | None) -> None:
    """Raise ValueError if this process uses GPUs already, other than those of the task: CUDA does not change over."""
    is_late = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if wanted is not None and is_late and os.environ.get(_GPUS) != wanted:
        raise ValueError(
            f"Spark gives this task the GPUs {wanted!r}, but this Python worker has used {os.environ.get(_GPUS)!r} "
            "before: set spark.python.worker.reuse=false"
        )
