"""What only MPI has: its launcher, its ranks, its thread levels, and its errors.

The contract of transports is in transport/test_contract.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import torchring
from tests.support import mpi_job
from tests.support.harness import RanksFailed, patient
from tests.support.mpi_job import job, job_ends  # noqa: F401  # a fixture
from tests.support.training import Side, assert_as_one_process, momentum, small_model, train, values
from torchring.errors import RingError, TopologyError
from torchring.rendezvous.rendezvous import Rendezvous
from torchring.transport import mpi as mpi_transport
from torchring.transport.c10d import C10dTransport, open_transport
from torchring.transport.mpi import MpiTransport
from torchring.world import World

needs_mpi = pytest.mark.skipif(bool(mpi_job.MISSING), reason=mpi_job.MISSING)


def run_ranks(body: Any) -> list[Any]:
    """body(rendezvous, communicator) on two ranks of an MPI job."""
    return job.run(partial(_on_rank, body=body), 2)


def _on_rank(rank: int, store: dist.Store, communicator: Any, body: Any) -> Any:
    rendezvous = Rendezvous(store, rank, communicator.size, 20.0)
    result = body(rendezvous, communicator)
    rendezvous.all_gather("finished", b"")
    return result


# ---- opening


def _crossed_ranks(rendezvous: Rendezvous, communicator: Any) -> Any:
    crossed = Rendezvous(dist.PrefixStore("crossed", rendezvous.store), 1 - rendezvous.rank, 2, 20.0)
    return _refused(crossed, communicator)


def _without_mpi4py(rendezvous: Rendezvous, communicator: Any) -> Any:
    with mock.patch.dict(sys.modules, {"mpi4py": None} if rendezvous.rank else {}):
        return _refused(rendezvous, communicator)


def _funneled(rendezvous: Rendezvous, communicator: Any) -> Any:
    from mpi4py import MPI

    with mock.patch.object(MPI, "Query_thread", return_value=MPI.THREAD_FUNNELED):
        return _refused(rendezvous, communicator)


def _refused(rendezvous: Rendezvous, communicator: Any) -> Any:
    with pytest.raises(TopologyError) as caught:
        MpiTransport(rendezvous, "stream", communicator=communicator)
    return str(caught.value), caught.value.peers


@needs_mpi
@pytest.mark.parametrize(
    ("body", "says", "culprit"),
    [
        (_crossed_ranks, "rank 0 of this world of 2 is rank 1 of 2 in MPI", 0),
        (_without_mpi4py, r"rank 1 cannot load MPI.*pip install torchring\[mpi\]", 1),
        (_funneled, r"mpi4py\.rc\.thread_level = 'multiple'", 0),
    ],
)
def test_a_rank_that_mpi_does_not_fit_is_named_on_all_of_them(body: Any, says: str, culprit: int) -> None:
    for text, peers in run_ranks(body):
        assert re.search(says, text), text
        assert peers == (culprit,)


@needs_mpi
def test_mpi_is_called_by_one_thread_at_a_time() -> None:
    run_ranks(_serialised)


def _serialised(rendezvous: Rendezvous, communicator: Any) -> None:
    from tests.transport.test_contract import _STEPS, _in_threads

    now = 0
    real = mpi_transport._lock

    class Counting:
        """Counts who is inside, so that a call outside of the lock shows."""

        def __enter__(self) -> None:
            nonlocal now
            real.acquire()
            now += 1

        def __exit__(self, *_: object) -> None:
            nonlocal now
            now -= 1
            real.release()

    outside: list[str] = []

    def checked(name: str) -> Any:
        method = getattr(mpi_transport.MpiTransport, name)

        def inner(self: Any, *args: Any) -> Any:
            if now < 1:
                outside.append(name)
            return method(self, *args)

        return inner

    with (
        mock.patch.object(mpi_transport, "_lock", Counting()),
        mock.patch.object(mpi_transport.MpiTransport, "_guard", checked("_guard")),
    ):
        first = MpiTransport(rendezvous, "first", communicator=communicator)
        second = MpiTransport(rendezvous, "second", communicator=communicator)
        third = MpiTransport(rendezvous, "third", communicator=communicator)
        seen = _in_threads(lambda: None, first, second, third)
        rendezvous.all_gather("done", b"")
        for transport in (first, second, third):
            transport.close()
    assert not outside, outside
    assert seen == _STEPS


@needs_mpi
def test_open_transport_picks_the_backend_of_the_world() -> None:
    assert run_ranks(_opened) == [["MPI", "Gloo"]] * 2


def _opened(rendezvous: Rendezvous, communicator: Any) -> Any:
    with mock.patch.object(sys.modules["mpi4py.MPI"], "COMM_WORLD", communicator):
        world = World(dist.PrefixStore("world", rendezvous.store), rendezvous.rank, 2, timeout_seconds=20.0)
        world.backend = "mpi"  # type: ignore[misc, assignment, unused-ignore]
        first = open_transport(world)
        world.backend = "gloo"  # type: ignore[misc, assignment, unused-ignore]
        second = open_transport(world)
        assert isinstance(first, MpiTransport)
        assert isinstance(second, C10dTransport)
        result = [first.engine, second.engine]
        rendezvous.all_gather("done", b"")
        first.close()
        second.close()
        world.close()
    return result


# ---- errors


@needs_mpi
def test_an_error_of_mpis_is_a_ring_error() -> None:
    text = run_ranks(_without_a_root)[0]
    assert "MPI reports" in text
    assert "ROOT" in text.upper()


def _without_a_root(rendezvous: Rendezvous, communicator: Any) -> str:
    transport = MpiTransport(rendezvous, "stream", communicator=communicator)
    data, said = torch.ones(8), ""
    if rendezvous.rank == 0:  # another rank that fails after it would name it
        with pytest.raises(RingError) as caught:
            transport._start(lambda: transport._communicator.Ibcast(transport._buffer(data), 99), data)
        said = str(caught.value)
    rendezvous.all_gather("done", b"")
    return said


def start_script(folder: Path, text: str) -> tuple[int, str, float]:
    """Exit code, output and seconds of a script on two ranks under a plain mpirun."""
    script = folder / "script.py"
    script.write_text(SCENE + text)
    started = time.monotonic()
    process = mpi_job.mpirun([script], 2, env={"TESTS_STORE": str(folder / "store")})
    try:
        output, _ = process.communicate(timeout=patient(60))
    except subprocess.TimeoutExpired:
        mpi_job.stop(process)
        raise
    return process.returncode, output, time.monotonic() - started


SCENE = """
import os, signal, sys, time
import torch, torch.distributed as dist
from mpi4py import MPI
from torchring.transport.mpi import MpiTransport
from torchring.world import World
rank = MPI.COMM_WORLD.rank
world = World(dist.FileStore(os.environ["TESTS_STORE"]), rank, 2, timeout_seconds=60.0)
transport = MpiTransport(world.rendezvous, "stream", world.host)
"""


@needs_mpi
def test_a_rank_that_stops_with_an_exception_stops_the_others(tmp_path: Path) -> None:
    """MPI_Finalize waits for all: without a goodbye the one would wait there, and the other one for its message."""
    code, output, seconds = start_script(
        tmp_path,
        """
if rank == 0:
    raise KeyError("of the script")
transport.start_all_reduce(torch.ones(4)).wait()
""",
    )
    assert code != 0
    assert "KeyError: 'of the script'" in output
    assert "PeerLostError: rank 0" in output
    assert seconds < 55.0, "that was the time-out"


@needs_mpi
@pytest.mark.grid
def test_exit_with_transfers_under_way(tmp_path: Path) -> None:
    code, output, _ = start_script(
        tmp_path,
        """
other = MpiTransport(world.rendezvous, "other", world.host)
transport.start_broadcast(torch.empty(4 << 20), 1 - rank)
other.start_broadcast(torch.ones(4 << 20), rank)  # neither has a counterpart
print("leaves")
if rank == 0:
    transport.close()
    other.close()
    world.close()
""",
    )
    assert code == 0, output
    assert output.count("leaves") == 2


# ---- and what it is all for


def _script(side: Side) -> list[torch.Tensor]:
    model = small_model()
    train(side, model, side.wrap(momentum(model), model, algorithm="native"), range(5))
    return values(model)


@needs_mpi
def test_training_over_mpi_is_training_in_one_process() -> None:
    assert_as_one_process(_script, world_size=job.num_ranks, run=lambda *_: job.run(_train_over_mpi, job.num_ranks))


def _train_over_mpi(rank: int, store: dist.Store, communicator: Any) -> list[torch.Tensor]:
    start = MpiTransport.start_all_reduce
    with mock.patch.object(MpiTransport, "start_all_reduce", autospec=True, side_effect=start) as summed:
        torchring.init(backend="mpi")
        assert (torchring.rank(), torchring.size()) == (rank, communicator.size)
        parameters = _script(Side((rank,), True))
        torchring.shutdown()
    assert summed.called, "nothing went through MPI"
    return parameters


# ---- the job itself


@needs_mpi
def test_the_job_tells_which_rank_failed_and_why() -> None:
    with pytest.raises(RanksFailed) as caught:
        job.run(_fails_on_rank_1, 2)
    assert [report.failed for report in caught.value.reports] == [False, True]
    assert "rank 1: ValueError: on purpose" in str(caught.value)
    assert "said before" in str(caught.value)


def _fails_on_rank_1(rank: int, store: dist.Store, communicator: Any) -> None:
    if rank == 1:
        print("said before", flush=True)
        raise ValueError("on purpose")
