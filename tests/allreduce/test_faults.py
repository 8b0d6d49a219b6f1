"""Ranks die, stop, leave, raise and are interrupted: every other rank says who it was, soon, and nothing is left."""

from __future__ import annotations

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
from tests.support.checks import assert_same_everywhere, assert_same_on_all_ranks, digest
from tests.support.commands import free_port
from tests.support.grids import grid
from tests.support.harness import patient, ranks, run_ranks, wait_until
from torchring import connection as connection_module
from torchring import initial_state as initial_state_module
from torchring.allreduce.direct import DirectAllReduce
from torchring.allreduce.native import NativeAllReduce
from torchring.collectives import service as collectives_module
from torchring.collectives import shared_memory as exchange_module
from torchring.errors import PeerLostError, PeerTimeoutError, RingError
from torchring.kernels import reference
from torchring.linux import open_process
from torchring.memory import host as host_module
from torchring.transport.c10d import C10dTransport

_VICTIM = 1
_WIDTH = 64
_FATAL_STEP = 3
_TOO_LATE = 3.0  # seconds; a death is noticed in about one, and a loaded machine is given the rest


# ---- what every rank does


def _model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(4)]
    return torch.nn.Sequential(*layers)


def _train(algorithm: str, num_steps: int, before_step: Callable[[int, torch.nn.Module], None]) -> torch.nn.Module:
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


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _start(rank: int, topology: str, timeout_seconds: float = 20.0) -> None:
    if topology == "hosts":
        host_module._host_identity = lambda: f"host {rank}"
    torchring.init(timeout_seconds=timeout_seconds)


# ---- where the victim dies


def _in_a_reduction(die: Callable[[], None]) -> None:
    """Between the two signals of direct, in the reduce-scatter of ring: some chunks are there, some are not."""
    count = 0
    add = reference.Accumulation.run

    def fatal(self: reference.Accumulation) -> None:
        nonlocal count
        count += 1
        if count == 40:
            die()
        add(self)

    reference.Accumulation.run = fatal  # type: ignore[method-assign]


def _kill_in_reduction(rank: int, algorithm: str) -> None:
    if rank == _VICTIM:
        _in_a_reduction(_die_noting_the_time)
    _train(algorithm, 30, lambda step, model: None)


def _kill_in_backward(rank: int, algorithm: str) -> None:
    def before_step(step: int, model: torch.nn.Module) -> None:
        if rank == _VICTIM and step == _FATAL_STEP:
            # The middle layer's backward: two layers' gradients are on their way, the others' will never be.
            list(model.children())[1].register_full_backward_hook(lambda *_: _die_noting_the_time())

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
                _die_noting_the_time()
            combine(*args)

        exchange_module.combine = fatal
        if not torchring.default_world.default_world().shares_memory:
            threading.Timer(0.1, _die_noting_the_time).start()
    for _ in range(10_000):
        torchring.all_reduce(data)


def _kill_before_collective(rank: int, algorithm: str) -> None:
    torchring.all_reduce(torch.ones(4))
    if rank == _VICTIM:
        time.sleep(0.1)  # the others wait already
        _die_noting_the_time()
    torchring.all_gather(torch.ones(4))


def _kill_parent_of_a_worker(rank: int, algorithm: str) -> None:
    """Where no rank sees the others' process ids, and a forked data loader's worker outlives the one that dies."""
    group = torchring.default_world.default_world().host
    assert group is not None
    group._peers = {peer: dataclasses.replace(link, pidfd=-1) for peer, link in group._peers.items()}
    torchring.all_reduce(torch.ones(4))
    if rank == _VICTIM:
        if os.fork() == 0:
            with contextlib.suppress(AssertionError):
                wait_until(_CLOCK["file"].with_suffix(".noticed").exists, "the others to notice", 8.0)
            os._exit(0)
        _die_noting_the_time()
    try:
        torchring.all_gather(torch.ones(4))
    finally:
        if rank == 0:
            time.sleep(0.3)  # the others must not notice by the end of the worker
            _CLOCK["file"].with_suffix(".noticed").touch()


def _kill_on_entry(owner: Any, name: str) -> Callable[[int, str], None]:
    def body(rank: int, algorithm: str) -> None:
        if rank == _VICTIM:
            setattr(owner, name, lambda *_, **__: _die_noting_the_time())
        _train(algorithm, 1, lambda step, model: None)

    return body


_DEATHS: dict[str, Callable[[int, str], None]] = {
    "in a reduction": _kill_in_reduction,
    "in backward": _kill_in_backward,
    "in a collective": _kill_in_collective,
    "before a collective": _kill_before_collective,
    "beside a worker": _kill_parent_of_a_worker,
    "wrap: checking options": _kill_on_entry(connection_module, "check_options"),
    "wrap: opening collectives": _kill_on_entry(collectives_module.Collectives, "__init__"),
    "wrap: broadcasting": _kill_on_entry(initial_state_module, "copy_from"),
    "wrap: opening direct": _kill_on_entry(DirectAllReduce, "__init__"),
    "wrap: opening wires": _kill_on_entry(DirectAllReduce, "open_wires"),
    "wrap: opening the transport": _kill_on_entry(C10dTransport, "__init__"),
    "wrap: opening native": _kill_on_entry(NativeAllReduce, "open_wires"),
}
_CLOCK: dict[str, Path] = {}


def _die_noting_the_time() -> None:
    _CLOCK["file"].write_text(repr(time.monotonic()))
    _die()


def _until_it_fails(
    rank: int, size: int, death: str, algorithm: str, topology: str, file: str, victim: int = _VICTIM
) -> Any:
    global _VICTIM
    _VICTIM = victim
    _CLOCK["file"] = Path(file)
    _start(rank, topology, timeout_seconds=5.0)
    try:
        _DEATHS[death](rank, algorithm)
    except RingError as error:
        now = time.monotonic()
        facts = type(error).__name__, error.peers, error.rank, error.bucket, error.parameters, error.step, str(error)
        torchring.shutdown()
        return now, facts
    return None


def _kill_and_watch(
    death: str, algorithm: str, topology: str, tmp_path: Path, *, victim: int = 1, **options: Any
) -> list[tuple[str, tuple[int, ...], int, int | None, tuple[str, ...], int | None, str]]:
    """Kill rank `victim` of 3; return the facts of the survivors' errors, after checking when they came."""
    file = tmp_path / "killed"
    results = run_ranks(
        _until_it_fails, 3, death, algorithm, topology, str(file), victim,
        expect_exit={victim: -signal.SIGKILL}, deadline=40.0, **options,
    )  # fmt: skip
    killed = float(file.read_text())
    survivors = [result for rank, result in enumerate(results) if rank != victim]
    assert None not in survivors, "a survivor noticed nothing"
    delays = [now - killed for now, _ in survivors]
    print(f"noticed after {', '.join(f'{delay:.2f}' for delay in delays)} s: {death}, {algorithm}, {topology}")
    for (_, facts), delay in zip(survivors, delays, strict=True):
        assert facts[0] == "PeerLostError", facts[-1]
        assert facts[1] == (victim,), facts[-1]
        assert 0.0 <= delay < patient(_TOO_LATE), f"after {delay:.2f} s: {facts[-1]}"
    assert [facts[2] for _, facts in survivors] == [rank for rank in range(3) if rank != victim]
    return [facts for _, facts in survivors]


@pytest.mark.parametrize(
    ("death", "algorithm", "topology"),
    [
        ("in a reduction", "direct", "one host"),  # between hosts torchring adds nothing up itself
        ("in backward", "direct", "one host"),
        ("in backward", "native", "one host"),
        ("in backward", "native", "hosts"),
    ],
)
def test_a_death_in_training_is_named_with_its_place(death: str, algorithm: str, topology: str, tmp_path: Path) -> None:
    for _, _, _, bucket, parameters, step, message in _kill_and_watch(death, algorithm, topology, tmp_path):
        assert bucket is not None
        assert parameters
        assert set(parameters) <= {name for name, _ in _model().named_parameters()}
        assert step is not None
        if death == "in backward":
            assert step == _FATAL_STEP
        assert f"bucket {bucket}" in message
        assert f"step {step}" in message
        assert parameters[0] in message
        assert "rank 1" in message


@grid(
    "algorithm, victim", ["direct", "ring"], [0, 2], keep=lambda algorithm, victim: (algorithm, victim) == ("ring", 2)
)
def test_any_rank_may_die(algorithm: str, victim: int, tmp_path: Path) -> None:
    _kill_and_watch("in backward", algorithm, "one host", tmp_path, victim=victim)


@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_the_rank_that_hosts_the_store_may_die(algorithm: str, tmp_path: Path) -> None:
    """As under mpirun, where rank 0 does."""
    env = {"TORCHELASTIC_USE_AGENT_STORE": None, "MASTER_PORT": str(free_port())}
    _kill_and_watch("in backward", algorithm, "one host", tmp_path, victim=0, env=env)


@grid(
    "death, topology",
    ["in a collective", "before a collective"],
    ["one host", "hosts"],
    keep=lambda death, topology: (death, topology) != ("before a collective", "hosts"),
)
def test_a_death_in_a_collective_is_named(death: str, topology: str, tmp_path: Path) -> None:
    _kill_and_watch(death, "auto", topology, tmp_path)


def test_a_forked_worker_does_not_hide_the_death_of_its_rank(tmp_path: Path) -> None:
    _kill_and_watch("beside a worker", "auto", "one host", tmp_path)


@pytest.mark.parametrize(
    ("death", "algorithm"),
    [
        ("wrap: checking options", "direct"),
        ("wrap: opening collectives", "direct"),
        ("wrap: broadcasting", "direct"),
        ("wrap: opening direct", "direct"),
        ("wrap: opening wires", "direct"),
        ("wrap: broadcasting", "ring"),
        ("wrap: opening the transport", "ring"),
        ("wrap: opening native", "native"),
    ],
)
def test_a_death_in_wrap_is_named(death: str, algorithm: str, tmp_path: Path) -> None:
    _kill_and_watch(death, algorithm, "one host", tmp_path)


# ---- a rank that leaves, or raises


_ENDS = {
    "shutdown": "it called torchring.shutdown()",
    "exit": "its script had ended",
    "exception": "its script ended with ZeroDivisionError: too few episodes",
}


@grid(
    "where, end",
    [("direct", "one host"), ("ring", "one host"), ("ring", "hosts"), ("auto", "hosts")],
    list(_ENDS),
    keep=lambda where, end: where == ("direct", "one host") or (where, end) == (("ring", "hosts"), "exit"),
)
@ranks(3, run_ranks)
def test_a_rank_that_has_finished_early_says_so(rank: int, where: tuple[str, str], end: str) -> None:
    algorithm, topology = where
    _start(rank, topology)

    class Done(Exception):  # noqa: N818
        pass

    def before_step(step: int, model: torch.nn.Module) -> None:
        if rank == 2 and step == 2:
            raise Done

    with pytest.raises((Done, PeerLostError)) as caught:
        _train(algorithm, 5, before_step)
    if isinstance(caught.value, PeerLostError):
        assert (rank < 2, caught.value.peers, caught.value.step) == (True, (2,), 2)
        assert f"rank 2 stopped: {_ENDS[end]}, after 2 reductions of gradients" in str(caught.value)
        assert ("DistributedSampler" in str(caught.value)) is (end != "exception")
    elif end == "shutdown":
        torchring.shutdown()
    elif end == "exception":  # as the interpreter does when nobody catches one
        sys.last_value = ZeroDivisionError("too few episodes")


def _last_step(rank: int, size: int, algorithm: str) -> str:
    """All finish together, but rank 2 is slow to look at its last result: those that have left are no loss."""
    torchring.init(timeout_seconds=20.0)
    model = _train(algorithm, 3, lambda step, model: None)
    if rank == 2:
        time.sleep(0.3)
    result = digest(model.parameters())
    torchring.shutdown()
    return result


@pytest.mark.parametrize("algorithm", ["direct", "ring", "native"])
def test_leaving_after_the_last_step_is_no_error(algorithm: str) -> None:
    assert_same_on_all_ranks(run_ranks(_last_step, 3, algorithm))


def _raise_in_backward(rank: int, size: int, algorithm: str) -> Any:
    """Rank 1's backward raises at its second layer; two layers' buckets have gone."""
    torchring.init(timeout_seconds=4.0)
    model = _model()
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.0), model, algorithm=algorithm, bucket_mb=0.0)
    data = [torch.randn(8, _WIDTH, generator=torch.Generator().manual_seed(r)) for r in range(size)]

    def gradients(r: int) -> list[torch.Tensor]:
        return list(torch.autograd.grad(model(data[r]).square().mean(), list(model.parameters())))

    expected = [torch.stack(parts).double().mean(0) for parts in zip(*(gradients(r) for r in range(size)), strict=True)]

    def backward() -> None:
        optimizer.zero_grad()
        model(data[rank]).square().mean().backward()
        for parameter, wanted in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad.double(), wanted, rtol=1e-4, atol=1e-7)  # type: ignore[union-attr]
        optimizer.step()

    for _ in range(2):  # the second one with buckets in their final order
        backward()
    torchring.barrier()
    if rank == 1:

        def fail(*_: Any) -> None:
            raise ZeroDivisionError("mine")

        list(model.children())[1].register_full_backward_hook(fail)
        with pytest.raises(ZeroDivisionError, match="mine"):
            backward()
        return None
    started = time.monotonic()
    try:
        for _ in range(3):
            backward()
    except RingError as error:
        return type(error).__name__, error.peers, time.monotonic() - started
    return "right answers"


@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_a_rank_that_raises_in_backward_and_ends_is_named(algorithm: str) -> None:
    results = run_ranks(_raise_in_backward, 3, algorithm)
    assert results[1] is None
    for kind, peers, seconds in (results[0], results[2]):
        assert (kind, peers) == ("PeerLostError", (1,))
        assert seconds < patient(_TOO_LATE)


# ---- a rank that stands still


def _stand_still(rank: int, size: int, algorithm: str, folder: str) -> Any:
    torchring.init(timeout_seconds=2.0)
    times: dict[str, float] = {}

    def before_step(step: int, model: torch.nn.Module) -> None:
        if step != _FATAL_STEP:
            return
        Path(folder, f"pid{rank}").write_text(str(os.getpid()))
        times["began"] = time.monotonic()
        if rank == 1:
            list(model.children())[1].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGSTOP))

    outcome: Any = "no error"
    try:
        _train(algorithm, _FATAL_STEP + 1, before_step)
    except RingError as error:
        facts = type(error).__name__, error.peers, error.bucket, error.parameters, error.step, error.seconds
        outcome = facts, time.monotonic() - times["began"]
    Path(folder, f"done{rank}").touch()
    if rank == 0:
        wait_until(Path(folder, "done2").exists, "rank 2 to be done", 15.0)
        os.kill(int(Path(folder, "pid1").read_text()), signal.SIGCONT)
    # All go on, in a new world.
    torchring.shutdown()
    torchring.init(timeout_seconds=10.0)
    model = _train(algorithm, 3, lambda step, model: None)
    total = float(torchring.all_reduce(torch.ones(1), "sum"))
    torchring.shutdown()
    return outcome, digest(model.parameters()), total


@grid("algorithm", ["direct", "ring"], keep=lambda algorithm: algorithm == "direct")
def test_a_stopped_rank_is_named_and_told_and_all_can_start_again(algorithm: str, tmp_path: Path) -> None:
    results = run_ranks(_stand_still, 3, algorithm, str(tmp_path))
    assert [total for _, _, total in results] == [3.0] * 3
    assert_same_on_all_ranks([trained for _, trained, _ in results])
    for rank in (0, 2):
        outcome = results[rank][0]
        assert outcome != "no error"
        (kind, peers, bucket, parameters, step, seconds), elapsed = outcome
        assert (kind, peers) == ("PeerTimeoutError", (1,)), f"rank {rank}: {outcome}"
        assert bucket is not None
        assert parameters
        assert step == _FATAL_STEP
        assert seconds is not None
        assert 1.5 < elapsed < patient(3.5 if algorithm == "direct" else 6.0)
        print(f"rank {rank} timed out after {elapsed:.2f} s: {algorithm}")
    outcome = results[1][0]
    assert outcome != "no error", "the stopped rank was not told"
    assert outcome[0][0] in ("PeerTimeoutError", "PeerLostError")


def _reduce_ones(num_times: int) -> None:
    for _ in range(num_times):
        assert float(torchring.all_reduce(torch.ones(1))) == 1.0


@ranks(3, run_ranks)
def test_a_late_rank_is_named_in_collectives_and_gets_an_error_itself(rank: int, tmp_path: Path) -> None:
    world = torchring.init(timeout_seconds=20.0)
    torchring.barrier()  # the ranks have met, which takes its time on a busy machine
    assert world.host is not None
    world.host.timeout_seconds = 0.5
    if rank == 1:
        wait_until((tmp_path / "done0").exists, "done0", 15.0)
        wait_until((tmp_path / "done2").exists, "done2", 15.0)
    with pytest.raises(PeerTimeoutError) as late:
        _reduce_ones(2 if rank == 1 else 1)  # all inputs are there, so its first result may be had, and right
    (tmp_path / f"done{rank}").touch()
    assert rank == 1 or late.value.peers == (1,)


# ---- Ctrl-C


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


@pytest.mark.parametrize("where", ["direct", "ring", "native", "collective", "collective over Gloo", "wait", "init"])
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
    elif where in ("direct", "ring", "native"):
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


# ---- the tests' own instruments


@ranks(3, start=run_ranks)
def test_without_a_death_nothing_is_raised() -> None:
    """The control of all the above: the same training, undisturbed, ends and gives the right result."""
    torchring.init(timeout_seconds=20.0)
    model = _train("direct", 4, lambda step, model: None)
    with contextlib.suppress(PeerLostError):  # nobody is lost before this
        torchring.barrier()
    assert_same_everywhere(model.parameters())
