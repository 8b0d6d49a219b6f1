"""A rank that waits for long says who is missing, where that rank is, and since when."""

import os
import re
import signal
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchring
from tests.support.checks import logged
from tests.support.harness import ranks, wait_until
from torchring.default_world import default_world
from torchring.errors import PeerTimeoutError, RingError
from torchring.memory import host as host_module
from torchring.memory.host import HostGroup
from torchring.observe.flight_recorder import call_sites
from torchring.observe.flight_recorder import monitor as monitor_module
from torchring.observe.flight_recorder.call_sites import call_site_of
from torchring.observe.flight_recorder.entries import (
    MEMORY_BYTES,
    CurrentWait,
    EntryState,
    FlightRecorder,
    RankState,
    read_state,
)
from torchring.observe.flight_recorder.monitor import StallMonitor, is_stopped
from torchring.observe.flight_recorder.stall_report import Peer, describe_ranks, describe_wait, missing_ranks
from torchring.observe.services import monitor_of
from torchring.observer import Phase, Wait
from torchring.rendezvous.rendezvous import Rendezvous

_LIMIT = 0.3
_LATE = 1
_HOSTS = {"one host": [(0, 1, 2)], "hosts": [(0, 1), (2,)], "apart": [(0,), (1,)]}


# ---- stalls of three ranks, on one host and on two


# Where the late rank stands, in which phase and step; and the step in which the others wait.
_STALLS = {
    "load_batch": ("outside of forward, backward and step()", 2, 2),
    "think": ("in forward", 3, 3),
    "reconsider": ("in backward", 4, 4),
    "polish": ("in step()", 5, 6),
    "count": ("outside of forward, backward and step()", 7, 7),
}
_BUCKET = r"in the reduction of gradients \(step (\d+), bucket (\d+), first parameter ([\w.]+)\) for rank 1\. "


@contextmanager
def on_hosts(rank: int, topology: str, **options: float) -> Iterator[None]:
    place = next(i for i, members in enumerate(_HOSTS[topology]) if rank in members)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_module, "_host_identity", lambda: f"host {place}")
        torchring.init(**options)
    yield
    torchring.shutdown()


def _model() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))


@pytest.mark.parametrize("topology", ["one host", "hosts"])
@ranks(3)
def test_who_is_missing(topology: str, tmp_path: Path, rank: int) -> None:
    """In training, and in a collective of the script. The late rank goes on when both others have warned of it."""
    warnings: dict[str, list[str]] = {name: [] for name in _STALLS}
    for name in _STALLS if rank != _LATE else ():
        os.mkfifo(tmp_path / f"{name}{rank}")

    def hear(message: str) -> None:
        for name, heard in warnings.items():  # a loaded machine may cause other waits, and so other warnings
            if f"in {name}" in message:
                heard.append(message)
                if len(heard) == 1:
                    (tmp_path / f"{name}{rank}").write_bytes(b"")

    def late(name: str) -> Callable[..., None]:
        """A function of that name, in which the late rank stands."""

        def stand(*_: Any) -> None:
            for other in (0, 2):
                torch.no_grad()(Path.read_bytes)(tmp_path / f"{name}{other}")  # the decorator is no call site

        stand.__code__ = stand.__code__.replace(co_name=name)
        return stand if rank == _LATE else lambda *_: None

    def others_wait_until(text: str) -> None:
        """The late rank is where it is to be, so what follows in the other ranks waits for it there."""
        monitor = default_world().shared(monitor_of)
        if rank != _LATE and text:
            wait_until(lambda: text in monitor.explain([_LATE]), f"rank {_LATE} to be {text}")

    def train(text: str = "") -> None:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        others_wait_until(text)
        loss.backward()
        optimizer.step()

    with logged(hear), on_hosts(rank, topology, timeout_seconds=40.0, stall_warning_seconds=_LIMIT):
        model = _model()
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        algorithm = "direct" if topology == "one host" else "hierarchical"
        optimizer = torchring.wrap(plain, model, bucket_mb=0.0, algorithm=algorithm)  # a bucket for each parameter
        train()  # steps 0 and 1; then buckets are in their final order
        train()
        late("load_batch")()
        train("load_batch")
        hook = model[1].register_forward_hook(late("think"))
        train("in forward")
        hook.remove()
        hook = model[1].weight.register_hook(late("reconsider"))
        train("in backward")
        hook.remove()
        hook = plain.register_step_pre_hook(late("polish"))
        train()  # step 5, in which the late rank is while others go on to step 6
        hook.remove()
        train("in step()")
        late("count")()
        others_wait_until("count")
        torchring.all_reduce(torch.ones(1))
    if rank == _LATE:
        assert not any(warnings.values())
        return
    parameters = [name for name, _ in model.named_parameters()]
    for name, (phase, late_step, step) in _STALLS.items():
        (message,) = warnings[name]  # one for each wait
        assert message.startswith(f"rank {rank} has waited for ")
        where = rf"Rank 1 \(pid \d+\)(, last heard of .* ago,)? has been {re.escape(phase)} for \d+\.\d s, "
        place = rf"in step {late_step}, at \S*test_flight_recorder\.py:\d+ in {name}"
        assert re.search(where + place, message), message
        assert "All ranks wait" not in message
        if name == "count":
            assert re.search(r"for \d+\.\d s in all_reduce for rank 1\. Rank 1 ", message), message
            continue
        found = re.search(_BUCKET, message)
        assert found, message
        bucket, parameter = int(found[2]), found[3]
        assert int(found[1]) == step
        if name == "reconsider":  # its last layer's buckets have left
            assert bucket >= 2, message
            assert parameter in parameters[:4], message
        else:
            assert bucket == 0, message
            assert parameter in parameters[4:], message


# ---- a rank that cannot run


@ranks(2)
def test_a_stopped_rank_is_said_to_be_stopped(rank: int) -> None:
    said: list[str] = []

    def go_on(message: str) -> None:
        if "process is stopped" in message:
            said.append(message)
            os.kill(pids[1], signal.SIGCONT)

    with logged(go_on):
        torchring.init(stall_warning_seconds=_LIMIT)
        pids = torchring.all_gather_object(os.getpid())
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            wait_until(lambda: is_stopped(pids[1]), "rank 1 to stop")
        torchring.barrier()
    assert len(said) == 1 - rank
    for message in said:
        where = (
            r"in barrier for rank 1\. Rank 1 \(pid .*outside of forward, backward and step\(\).*its process is stopped"
        )
        assert re.search(where, message), message


def test_a_rank_of_another_host_that_sends_nothing_more_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    hosts = [HostGroup(Rendezvous(store, rank, 2, 5.0), []) for rank in range(2)]
    first, second = (
        StallMonitor(Rendezvous(store, rank, 2, 5.0), host, host.allocate(MEMORY_BYTES), 1000.0, {}, [])
        for rank, host in enumerate(hosts)
    )
    assert first.explain([1]) == "Rank 1 has not said yet what it is doing"
    second.recorder.phase(Phase.OPTIMIZER, 8)
    second.tick()
    wait_until(lambda: "in step 8" in first.explain([1]), "the message of rank 1")
    assert "no sign of life" not in first.explain([1])
    second.close()
    clock = types.SimpleNamespace(
        monotonic=lambda: time.monotonic() + 100.0,
        monotonic_ns=time.monotonic_ns,
        clock_gettime=lambda clock: time.clock_gettime(clock) + 100.0,
        CLOCK_BOOTTIME=time.CLOCK_BOOTTIME,
    )
    monkeypatch.setattr(monitor_module, "time", clock)
    said = first.explain([1])
    assert ", last heard of 100 s ago, was then outside of forward, backward and step(), in step 8" in said
    assert "it has shown no sign of life for 100 s" in said
    first.close()
    for host in hosts:
        host.close()


@pytest.mark.parametrize(("topology", "limit"), [("one host", 0.0), ("apart", _LIMIT)])
@ranks(2)
def test_a_timeout_carries_the_same(topology: str, limit: float, tmp_path: Path, rank: int) -> None:
    """Rank 1 stands still in the backward of step 2. Without a timer thread, what the training threads have stamped."""
    pipe = tmp_path / "pipe"
    if rank == 0:
        os.mkfifo(pipe)
    with on_hosts(rank, topology, timeout_seconds=2.0, stall_warning_seconds=limit):
        monitor, host = default_world().shared(monitor_of), default_world().host
        assert monitor is not None
        host.timeout_seconds = 1.0  # where ranks meet, a loaded machine takes its time
        assert ("torchring-stalls" in [thread.name for thread in threading.enumerate()]) is (limit > 0)
        model = _model()
        algorithm = "direct" if topology == "one host" else "ring"
        optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, algorithm=algorithm)
        for _ in range(2):  # after which the buckets are in their final order
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

        def pause(_: torch.Tensor) -> None:
            pipe.read_bytes()

        if rank == 1:
            model[0].weight.register_hook(pause)
        loss = model(torch.ones(2, 4)).sum()
        if rank == 0:
            where = "in pause" if limit else "in backward"
            wait_until(lambda: where in monitor.explain([1]), "rank 1 to pause")
        with logged() as heard, pytest.raises(PeerTimeoutError if rank == 0 else RingError) as caught:
            loss.backward()
        if rank == 0:
            pipe.write_bytes(b"")
        optimizer.close()
    if rank == 1:
        assert heard == [], "the late rank waits for nobody"
        return
    error = caught.value
    assert error.peers == (1,)
    where = r"Rank 1 \(pid \d+\)(, last heard of .* ago,)? has been in backward for \d+(\.\d)? s, in step 2"
    assert re.match(where, error.explanation), error.explanation
    assert ("in pause" in error.explanation) is (limit > 0)
    assert str(error).endswith(f"]. {error.explanation}")
    assert len(heard) <= (1 if limit else 0), heard


@ranks(2)
def test_a_rank_that_does_not_come_to_init_is_named(tmp_path: Path, rank: int) -> None:
    """Rank 1 comes when rank 0 has warned of it."""
    if rank == 1:
        wait_until((tmp_path / "warned").exists, "the warning of rank 0")
        torchring.init()
        return
    with logged(lambda _: (tmp_path / "warned").touch()) as said:
        torchring.init(stall_warning_seconds=_LIMIT)
    (message,) = said
    assert "in torchring.init() for rank 1, which has not come there yet" in message


# ---- entries


def test_what_others_read_of_a_page() -> None:
    memory = memoryview(bytearray(MEMORY_BYTES))
    recorder = FlightRecorder(memory, {})

    def read() -> RankState:
        state = read_state(memory)
        assert state is not None
        return state

    for text, kept in (
        *(("a.py:1 in f", "a.py:1 in f"), ("層" * 400, "層" * 400), ("\x00" * 500, "\x00" * 400)),
        ("train.py:3 in main", "train.py:3 in main"),
    ):
        recorder.write_sample(Phase.INPUT, text, ())
        assert read().call_site == kept
    memory[bytes(memory).index(b"train.py")] = 0
    assert read().call_site == "", "which is torn"
    entries = [entry for _ in range(70) if (entry := recorder.open_progress("gradients"))]
    assert len(read().entries) == len(entries) == 64
    assert read().entries.keys() == {entry.key for entry in entries}
    entries[3].close()
    another = recorder.open_progress("another")
    assert read().entries.keys() == {entry.key for entry in entries if entry is not entries[3]} | {another.key}


def test_a_look_at_a_stack_keeps_no_local_variable_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch switches something off when a local variable ends, which is on again if the end is late."""

    class Local:
        pass

    has_begun, may_return, has_returned = threading.Event(), threading.Event(), threading.Event()
    local: list[weakref.ref[Local]] = []
    is_alive: list[bool] = []

    def function() -> None:
        variable = Local()
        local.append(weakref.ref(variable))
        has_begun.set()
        may_return.wait()

    def run() -> None:
        function()
        has_returned.set()

    def is_internal(code: types.CodeType) -> bool:  # called for each function on the stack
        may_return.set()
        assert has_returned.wait(10)
        is_alive.append(local[0]() is not None)
        return True

    monkeypatch.setattr(call_sites, "_is_internal", is_internal)
    thread = threading.Thread(target=run, name="looked-at")
    thread.start()
    assert has_begun.wait(10)
    call_site_of(thread.ident or 0)
    thread.join()
    assert len(is_alive) > 2
    assert not any(is_alive)


# ---- who is missing, in words


def state(num_begun: int, num_finished: int = 0, *, waits: bool = False, call_site: str = "") -> RankState:
    entries = {5: EntryState(num_begun, num_finished, waits)}
    wait = ("all_reduce", 20.0) if waits else None
    return RankState(77, 12, Phase.FORWARD, 31.2, call_site, 0.5, entries, wait)


def wait_for(*awaited: int, key: int = 5) -> CurrentWait:
    return CurrentWait(key, 3, 0, Wait("barrier"), awaited, True)


def test_missing_ranks() -> None:
    waits = Peer(state(4, waits=True))
    for one, two, awaited, expected in (
        (Peer(state(3)), waits, (), [1]),
        (Peer(state(3)), waits, (2,), [1]),  # which rank 2 waits for, too
        (waits, waits, (2,), [2]),
        (Peer(None), Peer(state(9, 9)), (), [1]),
        (Peer(state(4)), Peer(state(4, 4)), (), [1]),  # has begun, and computes elsewhere
        (waits, waits._replace(is_stopped=True), (), [2]),
        (waits, waits._replace(is_silent=True), (), [2]),
        (waits, Peer(state(5, 4)), (), []),
    ):
        assert missing_ranks(wait_for(*awaited), {1: one, 2: two}) == expected
    assert missing_ranks(wait_for(3, 1, key=0), {1: Peer(None), 3: Peer(None)}) == [1, 3]


def test_words() -> None:
    one = {1: Peer(state(3, call_site="train.py:3 in main"))}
    assert describe_wait(0, wait_for(), one, 30.4, 30.0) == (
        "rank 0 has waited for 30 s in barrier for rank 1. Rank 1 (pid 77) has been in forward for 31 s, in step 12, "
        "at train.py:3 in main"
    )
    text = describe_wait(0, wait_for(), {rank: Peer(state(3)) for rank in range(1, 12)}, 30.0, 30.0)
    assert ["for ranks 1-11. Rank 1 " in text, "Rank 8 " in text, "Rank 9 " in text] == [True, True, False]
    assert "All ranks have come there" in describe_wait(0, wait_for(), {1: Peer(state(5, 4))}, 30.0, 30.0)
    assert describe_ranks([3], {3: Peer(None)}) == "Rank 3 has not said yet what it is doing"
    silent = Peer(state(3)._replace(last_seen=20.5), is_silent=True, message_age=20.0)
    assert describe_ranks([3], {3: silent}) == (
        "Rank 3 (pid 77), last heard of 20 s ago, was then in forward, in step 12; it has shown no sign of "
        "life for 20 s"
    )


def test_only_ranks_that_all_wait_are_locked() -> None:
    waits = Peer(state(3, waits=True))
    for peers, seconds, are_locked in (
        ([waits, waits], 30.0, True),
        ([waits, Peer(state(3))], 30.0, False),
        ([waits], 300.0, False),  # not for long
        ([waits, waits._replace(is_stopped=True)], 30.0, False),
        ([waits, waits._replace(is_silent=True)], 30.0, False),
    ):
        said = describe_wait(0, wait_for(), dict(enumerate(peers, 1)), seconds, seconds)
        assert ("All ranks wait, in different operations, so none of them can go on" in said) is are_locked
        assert "Rank 1 (pid 77) itself has waited for 20 s in all_reduce" in said
