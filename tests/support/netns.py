"""Runs ranks on the hosts of a `torchring.bench.netns.Network`, one namespace a host; otherwise `harness.run_ranks`.

    with Network(3) as network:
        results = run_on_hosts(network, (2, 1, 1), train)     # train(rank, world_size): ranks 0 and 1 on host 0, ...

A rank is forked as ever, and enters its namespace before it opens a socket. So deadlines, exit codes, output, stacks
and the search for leftovers are the harness's. Ranks may be given the network, too, and pull cables themselves: then
they do so in a known place of the training.
"""

import contextlib
import ctypes
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import run_ranks
from torchring.bench.netns import INTERFACE, Network, why_unavailable

EXPECT = "TORCHRING_EXPECT_NETNS"  # "1": a machine that should have namespaces; a test without them fails
_CLONE_NEWNET = 0x40000000
_NAMES = Path("/run/netns")

_libc = ctypes.CDLL(None, use_errno=True)
_ports = itertools.count(29500)  # in namespaces nobody else has taken any


def why_skipped() -> str | None:
    """Why tests with hosts do not run here. None where they do, or where they have to, and then fail with the cause."""
    return None if os.environ.get(EXPECT) == "1" else why_unavailable()


needs_hosts = pytest.mark.skipif(why_skipped() is not None, reason=f"no network namespaces: {why_skipped()}")


def hosts_of(ranks_per_host: Sequence[int]) -> list[tuple[int, ...]]:
    """The ranks of each host, numbered host by host: (2, 1) -> [(0, 1), (2,)]."""
    ends = list(itertools.accumulate(ranks_per_host))
    return [tuple(range(end - count, end)) for count, end in zip(ranks_per_host, ends, strict=True)]


@dataclass(frozen=True)
class HostedWorld:
    network: Network
    ranks_per_host: tuple[int, ...]  # as for `hosts_of`
    args: tuple[Any, ...] = ()  # what each rank is called with, after rank and world size
    expect_exit: Mapping[int, int] = field(default_factory=dict)  # {rank: exit code or minus signal}, without a result


def run_on_hosts(network: Network, ranks_per_host: tuple[int, ...], fn: Callable[..., Any], *args: Any) -> list[Any]:
    """`run_ranks(fn, sum(ranks_per_host), *args)` with each rank on its host."""
    return run_worlds([HostedWorld(network, ranks_per_host, args)], fn)[0]


def run_worlds(worlds: Sequence[HostedWorld], fn: Callable[..., Any], *, deadline: float = 60.0) -> list[list[Any]]:
    """Run fn(rank, world size, *args) on all ranks of all worlds at the same time; results by world and rank.

    The worlds know nothing of each other. They share networks only if given the same ones. Rank 0 hosts its world's
    store, as under mpirun: the store goes when rank 0, its host, or the way there does. What the harness says of ranks
    numbers them through all worlds.
    """
    starts, expect_exit = [], {}
    for world in worlds:
        hosts = hosts_of(world.ranks_per_host)
        expect_exit.update({len(starts) + rank: code for rank, code in world.expect_exit.items()})
        port = next(_ports)
        for host, ranks in enumerate(hosts):
            for rank in ranks:
                environ = {"RANK": rank, "WORLD_SIZE": sum(world.ranks_per_host), "GROUP_RANK": host}
                environ |= {"LOCAL_RANK": rank - ranks[0], "LOCAL_WORLD_SIZE": len(ranks)}
                environ |= {"GROUP_WORLD_SIZE": len(hosts), "MASTER_PORT": port}
                texts = {name: str(value) for name, value in environ.items()}
                texts |= {"MASTER_ADDR": world.network.addresses[0], "GLOO_SOCKET_IFNAME": INTERFACE}
                starts.append((world.network.name(host), texts, world.args))
    env = {"TORCHELASTIC_USE_AGENT_STORE": None}
    results = iter(run_ranks(_OnHost(fn, starts), len(starts), deadline=deadline, env=env, expect_exit=expect_exit))
    return [list(itertools.islice(results, sum(world.ranks_per_host))) for world in worlds]


class _OnHost:
    """`fn`, run where each rank belongs: (namespace, environment, arguments). Goes by fn's name in messages."""

    def __init__(self, fn: Callable[..., Any], starts: Sequence[tuple[str, dict[str, str], tuple[Any, ...]]]) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._starts = starts

    def __call__(self, index: int, _: int) -> Any:
        namespace, environ, args = self._starts[index]
        enter(namespace)
        os.environ.update(environ)
        return self._fn(int(environ["RANK"]), int(environ["WORLD_SIZE"]), *args)


def enter(namespace: str) -> None:
    """Move this thread, and what it starts from now on, to a network namespace. Sockets stay where they were made."""
    _enter(_NAMES / namespace)


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """`enter`, and go back at the end: what is in a namespace when its network goes is killed."""
    with Path("/proc/thread-self/ns/net").open() as before:
        enter(namespace)
        try:
            yield
        finally:
            _enter(Path(f"/proc/self/fd/{before.fileno()}"))


def _enter(path: Path) -> None:
    with path.open() as file:
        if _libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {path.name}")
