"""Shared memory between ranks: who gets in, who stays out, what is left behind (nothing)."""

import contextlib
import ctypes
import encodings.idna  # noqa: F401  # for the rank that becomes another user, who may not read Python's files
import errno
import fcntl
import gc
import io
import json
import os
import re
import resource
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.harness import RanksFailed, count_open_fds, ranks, run_ranks, run_threads, wait_until
from tests.support.netns import needs_hosts
from torchring import linux
from torchring.allreduce.select import choose, open_all_reduce
from torchring.collectives.service import Collectives
from torchring.errors import PeerLostError, PlanMismatchError
from torchring.memory import host as host_module
from torchring.memory.channel import Channel
from torchring.memory.host import HostGroup, connect, partition
from torchring.memory.noticeboard import Noticeboard, page_bytes
from torchring.rendezvous.rendezvous import Rendezvous
from torchring.world import World

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
_NOBODY = 65534
_CLONE_NEWNET = 0x40000000


def run_groups(size: int, body: Callable[..., Any], *, timeout_seconds: float = 10.0) -> list[Any]:
    def on_rank(rank: int, size: int, store: dist.Store) -> Any:
        group = connect(Rendezvous(store, rank, size, timeout_seconds))
        try:
            return body(group)
        finally:
            group.close()

    return run_threads(on_rank, size)


def shared_mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:torchring" in line]


def launcher_store() -> dist.Store:
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


# ---- who is in a group


@pytest.mark.parametrize(
    ("reachable", "groups"),
    [
        ([], []),
        ([[1], [0], [3], [2]], [(0, 1), (2, 3)]),  # its docstring's example
        ([[1, 2], [0, 2], [0, 1]], [(0, 1, 2)]),
        ([[2], [3], [0], [1]], [(0, 2), (1, 3)]),
        ([[1], [0, 2], [1]], [(0, 1), (2,)]),  # 0 and 2 do not reach each other, so they share no group
        ([[1], []], [(0,), (1,)]),  # one direction is not enough
    ],
)
def test_partition(reachable: list[list[int]], groups: list[tuple[int, ...]]) -> None:
    assert partition(reachable) == groups


@pytest.mark.parametrize(
    ("apart", "how"),
    [
        (None, ""),
        *[pytest.param(rank, "another user", marks=needs_root) for rank in (0, 1)],  # who listens, and who dials
        *[pytest.param(rank, "another network", marks=needs_hosts) for rank in (0, 2)],
    ],
)
@ranks(3, run_ranks)
def test_who_shares_memory(rank: int, apart: int | None, how: str) -> None:
    store = launcher_store()  # its connection stays
    with contextlib.ExitStack() as elsewhere:
        if rank == apart and how == "another user":
            os.setuid(_NOBODY)
        elif rank == apart:
            home = elsewhere.enter_context(open("/proc/self/ns/net"))
            libc = ctypes.CDLL(None)
            assert libc.unshare(_CLONE_NEWNET) == 0
            # Back, for Gloo needs a network between the ranks.
            elsewhere.callback(lambda: libc.setns(home.fileno(), _CLONE_NEWNET))
        world = World(store, rank, 3, timeout_seconds=10.0)
    hosts = ((0, 1, 2),) if apart is None else tuple(sorted([tuple({0, 1, 2} - {apart}), (apart,)]))
    assert (world.hosts, world.shares_memory, world.num_nodes) == (hosts, apart is None, len(hosts))
    before = count_open_fds()
    world.host.allocate(100)
    assert count_open_fds() <= before, "descriptors are closed at once"
    collectives = Collectives(world)
    all_reduce = open_all_reduce(world, choose(world).algorithm, "auto")
    assert all_reduce.algorithm == ("direct" if apart is None else "hierarchical")
    (wire,) = all_reduce.open_wires([(3, torch.float32)])
    wire.tensor.fill_(rank + 1)
    all_reduce.start(wire).wait()
    assert float(wire.tensor[0]) == float(collectives.all_reduce(torch.tensor(rank + 1.0), "sum")) == 6.0
    all_reduce.close()
    world.close()


@needs_root
def test_the_effective_user_counts() -> None:
    os.seteuid(_NOBODY)
    try:
        assert run_groups(2, lambda group: group.ranks) == [(0, 1)] * 2
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(
    ("user", "uid_map", "looks_alike"),
    [
        (65534, "65534 100000 1", True),
        (65534, "0 100000 65536", True),
        (65534, "0 0 4294967295", False),
        (65534, None, True),
        (1000, "1000 1000 1", False),
    ],
)
def test_to_nobody_of_a_user_namespace_users_look_alike(
    monkeypatch: pytest.MonkeyPatch, user: int, uid_map: str | None, looks_alike: bool
) -> None:
    def fake_open(name: str) -> Any:
        if uid_map is None:
            raise FileNotFoundError(name)
        return io.StringIO(uid_map if name.endswith("uid_map") else "65534")

    monkeypatch.setattr(host_module, "open", fake_open, raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    trouble = host_module._why_users_look_alike()
    assert bool(trouble) == looks_alike
    assert not trouble or re.match(rf"runs as user {user} \(nobody\) .*another user of its container", trouble)


def _of_thread() -> str:
    return threading.current_thread().name.split()[1]


@pytest.mark.parametrize(
    ("name", "fake", "said"),
    [
        ("_why_users_look_alike", lambda: "runs as nobody" if _of_thread() == "1" else "", "rank 1 runs as nobody"),
        ("_host_identity", lambda: f"kernel, libc {_of_thread()}", r"their C libraries differ \(libc 0 and libc 1\)"),
    ],
)
def test_ranks_of_one_machine_that_share_no_memory_are_told_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, fake: Callable[[], str], said: str
) -> None:
    """The kernel would show a rank that is nobody every user outside of the namespace as nobody, too."""
    monkeypatch.setattr(host_module, name, fake)
    assert run_groups(2, lambda group: group.ranks) == [(0,), (1,)]
    (text,) = [record.message for record in caplog.records]
    begin = "rank 0 and rank 1 run on one machine, in one network namespace, but cannot share memory: "
    assert re.match(begin + said, text)


# What strangers get is in world/test_security.py
def test_a_listener_that_does_not_answer_is_not_told_the_token_of_another() -> None:
    """Tokens are of one listener: two ranks of a world never publish the same one."""

    def on_rank(rank: int, size: int, store: dist.Store) -> tuple[str, str]:
        connect(Rendezvous(store, rank, size, 10.0)).close()
        card = json.loads(store.get(f"host/0/{rank}"))
        return card["address"], card["token"]

    cards = run_threads(on_rank, 3)
    assert len({address for address, _ in cards}) == len({token for _, token in cards}) == 3
    assert all(len(token) >= 32 for _, token in cards)


# ---- allocation


def test_own_is_prepared_before_any_peer_can_look_and_peers_may_write_it() -> None:
    def body(group: HostGroup) -> int:
        block = group.allocate(8, prepare=lambda part: part.fill_(group.rank + 7))  # type: ignore[arg-type,return-value]
        assert block.own.data_ptr() == block.parts[group.index].data_ptr()
        assert [int(part[0]) for part in block.parts] == [7, 8, 9]
        channel = Channel(group, poll_seconds=0.0)
        channel.barrier()
        block.parts[(group.index + 1) % 3].fill_(10 + group.rank)
        channel.barrier()
        return int(block.own[5])

    assert run_groups(3, body) == [12, 10, 11]


@pytest.mark.parametrize("sizes", [(0, 64), (64, 64, 65)])
def test_different_sizes_are_an_error_on_every_rank(sizes: tuple[int, ...]) -> None:
    def body(group: HostGroup) -> None:
        with pytest.raises(PlanMismatchError, match=f"{sizes[group.rank]} bytes") as caught:
            group.allocate(sizes[group.rank])
        assert caught.value.rank == group.rank
        assert caught.value.peers
        assert all(sizes[peer] != sizes[group.rank] for peer in caught.value.peers)

    gc.collect()
    before = count_open_fds()
    run_groups(len(sizes), body)
    gc.collect()
    assert count_open_fds() <= before


_UNDECLARED = {
    os: ("memfd_create", "MFD_CLOEXEC", "MFD_ALLOW_SEALING", "pidfd_open"),
    fcntl: ("F_ADD_SEALS", "F_SEAL_SHRINK", "F_SEAL_GROW"),
}


@pytest.mark.parametrize("is_declared", [True, False], ids=["", "python built against an old glibc"])
def test_no_peer_can_shrink_or_grow_a_block(monkeypatch: pytest.MonkeyPatch, is_declared: bool) -> None:
    """Shrinking a file under a mapping would crash the other with SIGBUS."""
    if not is_declared:
        for module, names in _UNDECLARED.items():
            for name in names:
                monkeypatch.delattr(module, name)
    refused: list[int] = []
    map_it = host_module.map_block

    def attack(descriptor: int, length: int, **how: bool) -> torch.Tensor:
        for target in (0, length * 2):
            try:
                os.ftruncate(descriptor, target)
            except PermissionError:
                refused.append(target)
        return map_it(descriptor, length, **how)

    monkeypatch.setattr(host_module, "map_block", attack)

    def body(group: HostGroup) -> None:
        group.allocate(page_bytes(2))

    run_groups(2, body)
    assert refused.count(0) == 8  # two blocks (one holds notices) x two ranks x own and peer's
    assert refused.count(2 * page_bytes(2)) == 8
    if is_declared:  # the attack would work without seals
        descriptor = os.memfd_create("torchring-test")
        os.ftruncate(descriptor, 4096)
        os.ftruncate(descriptor, 0)
        os.close(descriptor)


def test_a_limit_on_file_sizes_is_named() -> None:
    """`ulimit -f`, which a script has no reason to connect with its gradients."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, old[1]))
        with pytest.raises(OSError, match=r"cannot reserve 2 MiB of memory to share .* `ulimit -f unlimited`"):
            linux.create_memory("torchring-test", 2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_refused_system_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "memfd_create", refuse)
    expected = "cannot create memory to share .*: Operation not permitted; allow the system call memfd_create"
    with pytest.raises(PermissionError, match=expected):
        linux.create_memory("torchring-test", 4096)


@pytest.mark.parametrize("is_declared", [True, False], ids=["", "python built against an old glibc"])
def test_the_end_of_a_process_shows_in_its_descriptor(monkeypatch: pytest.MonkeyPatch, is_declared: bool) -> None:
    if not is_declared:
        monkeypatch.delattr(os, "pidfd_open")
    end, lives = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(lives)
        os.read(end, 1)  # until the parent closes its end, or is gone
        os._exit(0)
    os.close(end)
    descriptor = linux.open_process(pid)
    assert not os.get_inheritable(descriptor)
    assert not select.select([descriptor], [], [], 0)[0]
    os.close(lives)
    assert select.select([descriptor], [], [], 20)[0] == [descriptor]
    os.waitpid(pid, 0)
    os.close(descriptor)
    with pytest.raises(ProcessLookupError):
        linux.open_process(pid)


def test_ranks_share_memory_where_proc_is_not_mounted(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_proc(file: Any, *args: Any, **kwargs: Any) -> Any:
        return open(f"/nonexistent{file}" if str(file).startswith("/proc/") else file, *args, **kwargs)

    monkeypatch.setattr(linux, "open", without_proc, raising=False)
    monkeypatch.setattr(host_module, "open", without_proc, raising=False)
    assert run_groups(2, lambda group: group.ranks) == [(0, 1), (0, 1)]


# ---- nothing is left behind


def test_a_block_lives_as_long_as_a_tensor_that_views_it() -> None:
    def body(group: HostGroup) -> torch.Tensor:
        block = group.allocate(4096)
        block.own.fill_(group.rank + 1)
        Channel(group, poll_seconds=0.0).barrier()
        return block.parts[1 - group.rank][100:164].view(torch.int32)

    views = run_groups(2, body)
    gc.collect()
    assert len(shared_mappings()) == 2
    assert views[0].tolist() == [0x02020202] * 16
    assert views[1].tolist() == [0x01010101] * 16
    del views
    gc.collect()
    assert shared_mappings() == []


@ranks(2, run_ranks, expect_exit={0: -signal.SIGKILL})
def _hold_memory_and_die(rank: int) -> None:
    world = World(launcher_store(), rank, 2, timeout_seconds=10.0)
    block = world.host.allocate(2**20)
    channel = Channel(world.host, poll_seconds=0.0)
    channel.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError):
        _pass_barriers(channel)
    assert int(block.parts[0].sum()) == 0  # what the dead one shared stays readable


def _pass_barriers(channel: Channel) -> None:
    """The dead one may or may not have let this rank through the barrier that both had come to."""
    while True:
        channel.barrier()


def test_a_killed_rank_leaves_nothing() -> None:
    shm, sockets = set(os.listdir("/dev/shm")), _abstract_sockets()
    _hold_memory_and_die()
    assert {name for name in os.listdir("/dev/shm") if "torchring" in name} <= shm
    left = _abstract_sockets() - sockets  # those of other tests that began meanwhile go, one day
    wait_until(lambda: left.isdisjoint(_abstract_sockets()), f"{left} to go")


def _abstract_sockets() -> set[str]:
    words = Path("/proc/net/unix").read_text().split()
    return {word for word in words if word.startswith("@torchring-")}


# ---- barriers and watching over peers


@pytest.mark.parametrize(("size", "poll_seconds"), [(2, 1e-4), (3, 0.0), (3, 1e-4)])
def test_nobody_leaves_a_barrier_before_all_have_come(size: int, poll_seconds: float) -> None:
    def body(group: HostGroup) -> None:
        counters = group.allocate(8)
        words = [part.view(torch.int64) for part in counters.parts]
        channel = Channel(group, poll_seconds=poll_seconds)
        for turn in range(1, 41):
            if turn % 20 == group.rank:
                time.sleep(0.01)
            words[group.index].fill_(turn)
            channel.barrier()
            assert [int(word) for word in words] == [turn] * size
            channel.barrier()

    run_groups(size, body)


def test_a_missing_barrier_is_noticed_by_the_test_above() -> None:
    def body(group: HostGroup) -> None:
        counters = group.allocate(8)
        channel = Channel(group, poll_seconds=0.0)
        channel.barrier()
        if group.rank == 1:
            time.sleep(0.1)
        counters.own.fill_(1)
        assert [int(part[0]) for part in counters.parts] == [1, 1]

    with pytest.raises(RanksFailed):
        run_groups(2, body)


def test_a_reported_failure_stops_those_who_wait_and_names_its_cause() -> None:
    def body(group: HostGroup) -> None:
        channel = Channel(group, poll_seconds=0.0)
        if group.rank == 1:
            group.report_failure(PlanMismatchError("no such plan", rank=1, peers=(2,)))
            group.report_failure(PeerLostError("an echo of it", rank=1, peers=(0,)))
            time.sleep(0.3)
            return
        with pytest.raises(PlanMismatchError, match="no such plan") as caught:
            channel.barrier()
        assert (caught.value.peers, caught.value.rank) == ((2,), group.rank)

    run_groups(3, body)


def test_a_notice_that_is_seen_in_part_is_not_read_yet() -> None:
    """A CPU that orders memory weakly may show the stores of another core in any order."""
    written, seen = (torch.zeros(page_bytes(1), dtype=torch.uint8) for _ in range(2))
    rendezvous = Rendezvous(dist.HashStore(), 0, 1, 5.0)
    Noticeboard(rendezvous, [0], [written]).post(PeerLostError("no power", peers=(0,)))
    notices = Noticeboard(rendezvous, [0], [seen])
    assert notices.read(0) is None
    for part in (slice(0, 4), slice(4, 8), slice(8, 20)):
        seen[part] = written[part]
        assert notices.read(0) is None
    seen.copy_(written)
    assert "no power" in str(notices.read(0))
