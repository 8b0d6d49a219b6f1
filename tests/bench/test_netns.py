"""Namespaces that stand in for hosts: they are apart, joined at the rate that was asked for, and leave nothing."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.harness import RanksFailed
from tests.support.netns import HostedWorld, inside, needs_hosts, run_on_hosts, run_worlds
from torchring.bench import netns
from torchring.bench.netns import INTERFACE, Network, NetworkError

BENCH = Path(netns.__file__).parent


def namespaces(pid: int | str = "*") -> set[str]:
    return {path.name for path in Path("/run/netns").glob(f"torchring-{pid}-*")}


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    before = namespaces(os.getpid())
    with Network(2) as network:
        yield network
    assert namespaces(os.getpid()) <= before


def test_rates_mean_what_tc_means_and_the_rest_is_refused() -> None:
    rates = {"1gbit": 10**9, "2.5Gbit": 25 * 10**8, "64kbit": 64_000, "9bit": 9, "1tbit": 10**12}
    assert {rate: netns.bits_per_second(rate) for rate in rates} == rates
    for rate in ("", "1", "gbit", "1gb", "1 gbit", "0gbit", "-1gbit", "1gbps", "1gbit/s"):
        with pytest.raises(ValueError, match="such as '1gbit'"):
            Network(2, rate=rate)


@needs_hosts
def test_hosts_are_apart_from_this_machine(network: Network) -> None:
    with socket.create_server(("127.0.0.1", 0)) as here, inside(network.name(0)):
        assert {name for _, name in socket.if_nameindex()} == {INTERFACE, "lo"}
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(here.getsockname(), timeout=2)
        with socket.create_server(("127.0.0.1", 0)) as listening:  # loopback works on a host
            socket.create_connection(listening.getsockname(), timeout=2).close()

    # So ranks of different hosts share no memory.
    def socket_on(host: int) -> socket.socket:
        with inside(network.name(host)):
            return socket.socket(socket.AF_UNIX)

    with socket_on(0) as server, socket_on(0) as near, socket_on(1) as far:
        server.bind("\0torchring-test")
        server.listen()
        near.connect("\0torchring-test")
        with pytest.raises(ConnectionRefusedError):
            far.connect("\0torchring-test")


@needs_hosts
def test_nothing_is_left_behind_and_processes_are_killed() -> None:
    before = namespaces(os.getpid())
    process = None
    with pytest.raises(KeyboardInterrupt), Network(2) as network:  # noqa: PT012 - what was raised inside
        assert len(namespaces(os.getpid()) - before) == 3
        command = network.command(1, ["sh", "-c", "echo here; exec sleep 60"])
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        process.stdout.readline()  # before, `ip` itself may not have come there yet
        raise KeyboardInterrupt
    assert namespaces(os.getpid()) <= before
    assert process.wait(5) == -signal.SIGKILL
    process.communicate()
    with pytest.raises(NetworkError, match="set port0 up"):  # there is no switch any more
        network.set_link(0, True)


# Ranks on such hosts: tests/support/netns.py
def _look_around(rank: int, size: int, name: str) -> tuple[int, int, str, str, str]:
    if (name, rank) == ("leaves", 1):
        os._exit(3)
    if name == "fails":
        raise ValueError(f"mine, {rank}")
    namespace = os.readlink("/proc/self/ns/net")
    return rank, size, namespace, os.environ["LOCAL_RANK"], f"{name} {os.environ['GROUP_RANK']}"


@needs_hosts
def test_ranks_run_on_their_hosts_and_failures_are_reported(network: Network) -> None:
    names = []
    for host in (0, 1):
        with inside(network.name(host)):
            names.append(os.readlink("/proc/thread-self/ns/net"))
    assert len({*names, os.readlink("/proc/self/ns/net")}) == 3
    worlds = [HostedWorld(network, (2, 1), ("stays",)), HostedWorld(network, (1, 1), ("leaves",), {1: 3})]
    assert run_worlds(worlds, _look_around) == [
        [(0, 3, names[0], "0", "stays 0"), (1, 3, names[0], "1", "stays 0"), (2, 3, names[1], "0", "stays 1")],
        [(0, 2, names[0], "0", "leaves 0"), None],
    ]
    with pytest.raises(RanksFailed, match="_look_around: 2 of 2 ranks failed") as failed:
        run_on_hosts(network, (1, 1), _look_around, "fails")
    assert "ValueError: mine, 1" in str(failed.value)
