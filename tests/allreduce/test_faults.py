"""Ranks die, stop, leave, raise and are interrupted: every other rank says who it was, soon, and nothing is left."""

import contextlib
import dataclasses
import functools
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchring
from tests.support.checks import assert_same_everywhere, digest
from tests.support.commands import free_port
from tests.support.grids import grid
from tests.support.harness import patient, ranks, run_ranks, wait_until
from torchring import connection as connection_module
from torchring import initial_state as initial_state_module
from torchring.allreduce.direct import DirectAllReduce
from torchring.allreduce.native import NativeAllReduce
from torchring.collectives import shared_memory as exchange_module
from torchring.default_world import leave
from torchring.errors import PeerLostError, PeerTimeoutError
from torchring.kernels import reference
from torchring.linux import open_process
from torchring.memory import host as host_module
from torchring.transport.c10d import C10dTransport

_VICTIM = 1
_WIDTH = 64
_FATAL_STEP = 3
_TOO_LATE = 3.0  # seconds; a death is noticed in about one, and a loaded machine is given the rest


def _model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(4)]
    return torch.nn.Sequential(*layers)


def _train(
    algorithm: str, num_steps: int, before_step: Callable[[int, torch.nn.Module], None] = lambda step, model: None
) -> torch.nn.Module:
    """Each parameter has a bucket of its own: 8 reductions a step."""
    model = _model()
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model, algorithm=algorithm, bucket_mb=0.0)
    generator = torch.Generator().manual_seed(torchring.rank())
    for step in range(num_steps):
        before_step(step, model)
        optimizer.zero_grad()
        model(torch.randn(8, _WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
    return model


def _start(rank: int, topology: str, timeout_seconds: float = 20.0) -> None:
    if topology == "hosts":
        host_module._host_identity = lambda: f"host {rank}"
    torchring.init(timeout_seconds=timeout_seconds)


def _kill_in_reduction(rank: int, algorithm: str) -> None:
    """Between the two signals of direct: some chunks are there, some are not."""
    if rank == _VICTIM:
        count, add = 0, reference.Accumulation.run

        def fatal(self: reference.Accumulation) -> None:
            nonlocal count
            count += 1
            if count == 40:
                _die()
            add(self)

        reference.Accumulation.run = fatal  # type: ignore[method-assign]
    _train(algorithm, 30)


def _kill_in_backward(rank: int, algorithm: str) -> None:
    def before_step(step: int, model: torch.nn.Module) -> None:
        if rank == _VICTIM and step == _FATAL_STEP:
            # The middle layer's backward: two layers' gradients are on their way, the others' will never be.
            list(model.children())[1].register_full_backward_hook(lambda *_: _die())

    _train(algorithm, 30, before_step)


def _kill_in_collective(rank: int, algorithm: str) -> None:
    data = torch.ones(2**18)
    torchring.all_reduce(data)
    if rank == _VICTIM:
        combine = exchange_module.combine
        count = 0

        def fatal(*args: Any) -> None:
            nonlocal count
            count += 1
            if count == 9:
                _die()
            combine(*args)

        exchange_module.combine = fatal
        if not torchring.default_world.default_world().shares_memory:
            threading.Timer(0.1, _die).start()
    for _ in range(10_000):
        torchring.all_reduce(data)


def _kill_before_collective(rank: int, algorithm: str) -> None:
    torchring.all_reduce(torch.ones(4))
    if rank == _VICTIM:
        time.sleep(0.1)  # the others wait already
        _die()
    torchring.all_gather(torch.ones(4))


def _kill_parent_of_a_worker(rank: int, algorithm: str) -> None:
    """Where no rank sees the others' process ids, and a forked data loader's worker outlives the one that dies."""
    group = torchring.default_world.default_world().host
    group._peers = {peer: dataclasses.replace(link, pidfd=-1) for peer, link in group._peers.items()}
    torchring.all_reduce(torch.ones(4))
    if rank == _VICTIM:
        if os.fork() == 0:
            with contextlib.suppress(AssertionError):
                wait_until(_CLOCK["file"].with_suffix(".noticed").exists, "the others to notice", 8.0)
            os._exit(0)
        _die()
    try:
        torchring.all_gather(torch.ones(4))
    finally:
        if rank == 0:
            time.sleep(0.3)  # the others must not notice by the end of the worker
            _CLOCK["file"].with_suffix(".noticed").touch()


def _kill_on_entry(owner: Any, name: str) -> Callable[[int, str], None]:
    def body(rank: int, algorithm: str) -> None:
        if rank == _VICTIM:
            setattr(owner, name, lambda *_, **__: _die())
        _train(algorithm, 1)

    return body


_DEATHS: dict[str, Callable[[int, str], None]] = {
    "in a reduction": _kill_in_reduction,
    "in backward": _kill_in_backward,
    "in a collective": _kill_in_collective,
    "before a collective": _kill_before_collective,
    "beside a worker": _kill_parent_of_a_worker,
    "wrap: checking options": _kill_on_entry(connection_module, "check_options"),
    "wrap: broadcasting": _kill_on_entry(initial_state_module, "copy_from"),
    "wrap: opening direct": _kill_on_entry(DirectAllReduce, "__init__"),
    "wrap: opening wires": _kill_on_entry(DirectAllReduce, "open_wires"),
    "wrap: opening the transport": _kill_on_entry(C10dTransport, "__init__"),
    "wrap: opening native": _kill_on_entry(NativeAllReduce, "open_wires"),
}
_CLOCK: dict[str, Path] = {}


def _die() -> None:
    _CLOCK["file"].write_text(repr(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def _until_it_fails(rank: int, size: int, death: str, algorithm: str, topology: str, victim: int, file: Path) -> None:
    global _VICTIM
    _VICTIM, _CLOCK["file"] = victim, file
    _start(rank, topology, timeout_seconds=5.0)
    with pytest.raises(PeerLostError) as caught:
        _DEATHS[death](rank, algorithm)
    delay = time.monotonic() - float(file.read_text())
    error, message = caught.value, str(caught.value)
    assert (error.rank, error.peers) == (rank, (victim,)), message
    assert 0.0 <= delay < patient(_TOO_LATE), f"after {delay:.2f} s: {message}"
    if death in ("in a reduction", "in backward"):
        assert error.bucket is not None
        assert error.parameters
        assert set(error.parameters) <= {name for name, _ in _model().named_parameters()}
        assert error.step is not None
        assert death == "in a reduction" or error.step == _FATAL_STEP
        for said in (f"bucket {error.bucket}", f"step {error.step}", error.parameters[0], f"rank {victim}"):
            assert said in message
    torchring.shutdown()


@pytest.mark.parametrize(
    ("death", "algorithm", "topology", "victim"),
    [
        ("in a reduction", "direct", "one host", 1),  # between hosts torchring adds nothing up itself
        ("in backward", "direct", "one host", 1),
        ("in backward", "native", "one host", 2),
        ("in backward", "native", "hosts", 1),
        ("in backward", "direct", "store of rank 0", 0),  # as under mpirun
        ("in backward", "native", "store of rank 0", 0),
        ("in a collective", "auto", "one host", 1),
        ("in a collective", "auto", "hosts", 1),
        ("before a collective", "auto", "one host", 1),
        pytest.param("before a collective", "auto", "hosts", 1, marks=pytest.mark.grid),
        ("beside a worker", "auto", "one host", 1),
        ("wrap: checking options", "direct", "one host", 1),
        ("wrap: broadcasting", "direct", "one host", 1),
        ("wrap: opening direct", "direct", "one host", 1),
        ("wrap: opening wires", "direct", "one host", 1),
        ("wrap: opening the transport", "native", "one host", 1),
        ("wrap: opening native", "native", "one host", 1),
    ],
)
def test_a_death_is_named(death: str, algorithm: str, topology: str, victim: int, tmp_path: Path) -> None:
    """In training also its place."""
    env = {"TORCHELASTIC_USE_AGENT_STORE": None, "MASTER_PORT": str(free_port())} if "store" in topology else {}
    run_ranks(
        _until_it_fails, 3, death, algorithm, topology, victim, tmp_path / "killed",
        expect_exit={victim: -signal.SIGKILL}, deadline=40.0, env=env,
    )  # fmt: skip


_ENDS = {
    "shutdown": "it called torchring.shutdown()",
    "exit": "its script had ended",
    "exception": "its script ended with ZeroDivisionError: too few episodes",
    "return": "its function had returned",  # that of a framework's worker, which lives on
}


@pytest.mark.parametrize(
    ("algorithm", "topology", "end"), [*[("direct", "one host", end) for end in _ENDS], ("native", "hosts", "exit")]
)
@ranks(3, run_ranks)
def test_a_rank_that_has_finished_early_says_so(rank: int, algorithm: str, topology: str, end: str) -> None:
    """With an exception: in the midst of a backward, whose first buckets have gone."""
    _start(rank, topology)

    def stop(*_: object) -> None:
        raise ZeroDivisionError("too few episodes")

    def before_step(step: int, model: torch.nn.Module) -> None:
        if rank == 2 and step == 2:
            if end != "exception":
                stop()
            list(model.children())[1].register_full_backward_hook(stop)

    started = time.monotonic()
    with pytest.raises(ZeroDivisionError if rank == 2 else PeerLostError) as caught:
        _train(algorithm, 5, before_step)
    if isinstance(caught.value, PeerLostError):
        assert time.monotonic() - started < patient(_TOO_LATE)
        assert (caught.value.peers, caught.value.step) == ((2,), 2)
        assert f"rank 2 stopped: {_ENDS[end]}, after 2 reductions of gradients" in str(caught.value)
        assert ("DistributedSampler" in str(caught.value)) is (end != "exception")
    elif end == "shutdown":
        torchring.shutdown()
    elif end == "return":
        leave(_ENDS[end])
        leave("nothing is open")
    elif end == "exception":  # as the interpreter does when nobody catches one
        sys.last_value = caught.value


@pytest.mark.parametrize("algorithm", ["direct", "native"])
@ranks(3)
def test_leaving_after_the_last_step_is_no_error(rank: int, algorithm: str) -> None:
    """All finish together, but rank 2 is slow to look at its last result: those that have left are no loss."""
    torchring.init(timeout_seconds=20.0)
    model = _train(algorithm, 3)
    if rank == 2:
        time.sleep(0.3)
    trained = digest(model.parameters())
    torchring.shutdown()
    assert set(torchring.all_gather_object(trained)) == {trained}  # in a new world


@grid("algorithm", ["direct", "native"], keep=lambda algorithm: algorithm == "direct")
@ranks(3, run_ranks)
def test_a_stopped_rank_is_named_and_told_and_all_can_start_again(rank: int, algorithm: str, tmp_path: Path) -> None:
    torchring.init(timeout_seconds=2.0)
    began = 0.0

    def before_step(step: int, model: torch.nn.Module) -> None:
        nonlocal began
        if step == _FATAL_STEP:
            (tmp_path / f"pid{rank}").write_text(str(os.getpid()))
            began = time.monotonic()
            if rank == 1:
                list(model.children())[1].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGSTOP))

    with pytest.raises((PeerTimeoutError, PeerLostError)) as caught:
        _train(algorithm, _FATAL_STEP + 1, before_step)
    elapsed, error = time.monotonic() - began, caught.value
    (tmp_path / f"done{rank}").touch()
    if rank == 0:
        wait_until((tmp_path / "done2").exists, "rank 2 to be done", 15.0)
        os.kill(int((tmp_path / "pid1").read_text()), signal.SIGCONT)
    if rank != 1:
        assert isinstance(error, PeerTimeoutError)
        assert (error.peers, error.step) == ((1,), _FATAL_STEP)
        assert error.bucket is not None
        assert error.parameters
        assert error.seconds is not None
        assert 1.5 < elapsed < patient(3.5 if algorithm == "direct" else 6.0)
    # All go on, in a new world.
    torchring.shutdown()
    torchring.init(timeout_seconds=10.0)
    assert_same_everywhere(_train(algorithm, 3).parameters())
    assert float(torchring.all_reduce(torch.ones(1), "sum")) == 3.0


def _reduce_ones(num_times: int) -> None:
    for _ in range(num_times):
        assert float(torchring.all_reduce(torch.ones(1))) == 1.0


@ranks(3, run_ranks)
def test_a_late_rank_is_named_in_collectives_and_gets_an_error_itself(rank: int, tmp_path: Path) -> None:
    world = torchring.init(timeout_seconds=20.0)
    torchring.barrier()  # the ranks have met, which takes its time on a busy machine
    world.host.timeout_seconds = 0.5
    if rank == 1:
        wait_until((tmp_path / "done0").exists, "done0", 15.0)
        wait_until((tmp_path / "done2").exists, "done2", 15.0)
    with pytest.raises(PeerTimeoutError) as late:
        _reduce_ones(2 if rank == 1 else 1)  # all inputs are there, so its first result may be had, and right
    (tmp_path / f"done{rank}").touch()
    assert rank == 1 or late.value.peers == (1,)


def _interrupted(marker: Path, wait: Callable[[], Any]) -> float:
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.3, send)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            wait()
        return time.monotonic() - sent[0]
    finally:
        timer.join()
        marker.touch()


@pytest.mark.parametrize("where", ["direct", "native", "collective", "collective over Gloo", "wait", "init"])
@ranks(2, run_ranks)
def test_control_c_interrupts_a_waiting_rank_at_once(rank: int, where: str, tmp_path: Path) -> None:
    wait: Callable[[], Any] = functools.partial(torchring.all_reduce, torch.ones(1))
    if where == "init":
        wait = functools.partial(torchring.init, timeout_seconds=4.0)
    else:
        _start(rank, "hosts" if where == "collective over Gloo" else "one host", timeout_seconds=4.0)
        torchring.barrier()
    if where == "wait":
        wait = lambda: torchring.all_reduce(torch.ones(1), async_op=True).wait()  # noqa: E731
    elif where in ("direct", "native"):
        model = _model()
        _optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, algorithm=where)
        wait = model(torch.ones(1, _WIDTH)).sum().backward
    if rank == 1:
        wait_until((tmp_path / "interrupted").exists, "interrupted", 15.0)
    else:
        assert _interrupted(tmp_path / "interrupted", wait) < patient(1.5)


@ranks(2, run_ranks)
def test_after_control_c_the_process_ends(rank: int, tmp_path: Path) -> None:
    """Rank 0 gives up waiting for its background work, and returns. Rank 1 sees how long its process lives on."""
    torchring.init(timeout_seconds=4.0)
    pid = torchring.broadcast_object(os.getpid())
    marker = tmp_path / "interrupted"
    if rank == 0:
        _interrupted(marker, lambda: torchring.all_reduce(torch.ones(1), async_op=True).wait())
        return
    ending = open_process(pid)
    wait_until(marker.exists, "the interruption", 15.0)
    started = time.monotonic()
    select.select([ending], [], [], 5.0)
    os.close(ending)
    assert time.monotonic() - started < patient(2.0)


# The tests' own instrument
@ranks(3, start=run_ranks)
def test_without_a_death_nothing_is_raised() -> None:
    """The control of all the above: the same training, undisturbed, ends and gives the right result."""
    torchring.init(timeout_seconds=20.0)
    model = _train("direct", 4)
    with contextlib.suppress(PeerLostError):  # nobody is lost before this
        torchring.barrier()
    assert_same_everywhere(model.parameters())
