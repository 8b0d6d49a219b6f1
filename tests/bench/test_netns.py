"""Namespaces that stand in for hosts: they are apart, joined at the rate that was asked for, and leave nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.harness import RanksFailed
from tests.support.netns import EXPECT, HostedWorld, hosts_of, needs_hosts, run_on_hosts, run_worlds, why_skipped
from torchring.bench import netns
from torchring.bench.netns import INTERFACE, Network, NetworkError

BENCH = Path(netns.__file__).parent


def namespaces(pid: int | str = "*") -> set[str]:
    return {path.name for path in Path("/run/netns").glob(f"torchring-{pid}-*")}


def python(network: Network, host: int, code: str) -> subprocess.Popen[str]:
    """Run code on a host, without torch."""
    command = network.command(host, [sys.executable, "-c", textwrap.dedent(code)])
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def listen(network: Network, host: int) -> subprocess.Popen[str]:
    """A server on the host that counts the bytes of one connection, and prints them and the seconds they took."""
    server = python(
        network,
        host,
        """
        import socket, time
        with socket.create_server(("0.0.0.0", 5000)) as listening:
            print("listens", flush=True)
            connection, _ = listening.accept()
        started, count, buffer = time.perf_counter(), 0, bytearray(1 << 20)
        while size := connection.recv_into(buffer):
            count += size
        print(count, time.perf_counter() - started)
        """,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == "listens\n"
    return server


def send(network: Network, host: int, to: int, num_bytes: int, *, patience: float = 20.0) -> subprocess.Popen[str]:
    """A client that prints "sent", or the name of what kept it from it."""
    return python(
        network,
        host,
        f"""
        import socket
        try:
            with socket.create_connection(("{network.addresses[to]}", 5000), timeout={patience}) as connection:
                connection.sendall(bytes({num_bytes}))
            print("sent")
        except OSError as error:
            print(type(error).__name__)
        """,
    )


def output(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=30)[0].strip()


def gigabytes_per_second(network: Network, num_bytes: int) -> float:
    server = listen(network, 1)
    assert output(send(network, 0, 1, num_bytes)) == "sent"
    count, seconds = output(server).split()
    assert int(count) == num_bytes
    return num_bytes / float(seconds) / 1e9


@pytest.fixture
def network() -> Iterator[Network]:
    before = namespaces(os.getpid())
    with Network(2) as network:
        yield network
    assert namespaces(os.getpid()) <= before


@pytest.mark.parametrize(
    ("rate", "bits"), [("1gbit", 10**9), ("2.5Gbit", 25 * 10**8), ("64kbit", 64_000), ("9bit", 9), ("1tbit", 10**12)]
)
def test_rates_mean_what_tc_means(rate: str, bits: int) -> None:
    assert netns.bits_per_second(rate) == bits


@pytest.mark.parametrize("rate", ["", "1", "gbit", "1gb", "1 gbit", "0gbit", "-1gbit", "1gbps", "1gbit/s"])
def test_what_is_no_rate_is_refused(rate: str) -> None:
    with pytest.raises(ValueError, match="such as '1gbit'"):
        netns.bits_per_second(rate)
    with pytest.raises(ValueError, match="such as '1gbit'"):
        Network(2, rate=rate)


@pytest.mark.parametrize("num_hosts", [0, -1, 251])
def test_the_number_of_hosts_is_checked(num_hosts: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 250, got {num_hosts}"):
        Network(num_hosts)


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(netns.shutil, "which", lambda *_, **__: None)
    assert netns.why_unavailable.__wrapped__() == (
        "`ip` is not installed; Debian and Ubuntu have it in the package iproute2"
    )


def test_root_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert netns.why_unavailable.__wrapped__() == "making network namespaces needs root"


@needs_hosts
def test_hosts_reach_each_other(network: Network) -> None:
    server = listen(network, 1)
    assert output(send(network, 0, 1, 1000)) == "sent"
    assert output(server).split()[0] == "1000"


@needs_hosts
def test_hosts_are_apart_from_this_machine(network: Network) -> None:
    names = output(python(network, 0, "import socket; print(*sorted(name for _, name in socket.if_nameindex()))"))
    assert names == f"{INTERFACE} lo"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        code = f"import socket; socket.create_connection({listening.getsockname()!r}, timeout=2)"
        socket.create_connection(listening.getsockname(), timeout=2).close()
        assert "ConnectionRefusedError" in output(python(network, 0, code))


@needs_hosts
def test_loopback_works_on_a_host(network: Network) -> None:
    code = """
    import socket
    with socket.create_server(("127.0.0.1", 0)) as listening:
        socket.create_connection(listening.getsockname(), timeout=2)
    print("connected")
    """
    assert output(python(network, 0, code)) == "connected"


@needs_hosts
def test_abstract_sockets_stay_on_their_host(network: Network) -> None:
    """So ranks of different hosts share no memory."""
    connect = """
    import socket
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect("\\0torchring-test")
            print("connected")
        except OSError as error:
            print(type(error).__name__)
    """
    server = python(
        network,
        0,
        """
        import socket, time
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind("\\0torchring-test")
            listening.listen()
            print("listens", flush=True)
            time.sleep(60)
        """,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == "listens\n"
    try:
        clients = [python(network, host, connect) for host in (0, 1)]
        assert [output(client) for client in clients] == ["connected", "ConnectionRefusedError"]
    finally:
        server.kill()
        server.communicate()


@needs_hosts
@pytest.mark.grid
def test_a_link_has_its_rate(network: Network) -> None:
    """Checks the fixture; how fast anything is beyond that is none of a test's business."""
    network.set_rate("200mbit")
    assert 0.0125 < gigabytes_per_second(network, 8 << 20) < 0.05
    network.set_rate("800mbit", host=0)  # the other one's link is what counts
    assert gigabytes_per_second(network, 8 << 20) < 0.05
    network.set_rate(None)
    network.set_rate(None)  # harmless
    assert gigabytes_per_second(network, 32 << 20) > 0.05


@needs_hosts
def test_a_link_that_is_down_carries_nothing(network: Network) -> None:
    server = listen(network, 1)
    network.set_link(1, False)
    assert output(send(network, 0, 1, 1000, patience=0.5)) in ("TimeoutError", "OSError")
    network.set_link(1, True)
    assert output(send(network, 0, 1, 1000)) == "sent"
    assert output(server).split()[0] == "1000"


@needs_hosts
@pytest.mark.grid
def test_a_connection_outlives_a_pulled_cable(network: Network) -> None:
    network.set_rate("100mbit")
    server = listen(network, 1)
    client = send(network, 0, 1, 12 << 20)  # a second
    with pytest.raises(subprocess.TimeoutExpired):
        client.wait(0.3)
    network.set_link(0, False)
    with pytest.raises(subprocess.TimeoutExpired):
        client.wait(1.2)
    network.set_link(0, True)
    network.set_rate(None)
    assert output(client) == "sent"
    assert output(server).split()[0] == str(12 << 20)


@needs_hosts
def test_only_hosts_that_exist_are_taken(network: Network) -> None:
    for refused in (lambda: network.command(2, ["true"]), lambda: network.set_link(-1, True)):
        with pytest.raises(ValueError, match="host must be 0 to 1"):
            refused()


@needs_hosts
def test_nothing_is_left_behind_and_processes_are_killed() -> None:
    before = namespaces(os.getpid())
    process = None
    with pytest.raises(KeyboardInterrupt), Network(2) as network:  # noqa: PT012 - what was raised inside
        assert len(namespaces(os.getpid()) - before) == 3
        process = python(network, 1, "import time; print('here', flush=True); time.sleep(60)")
        assert process.stdout is not None
        process.stdout.readline()  # before, `ip` itself may not have come there yet
        raise KeyboardInterrupt
    assert namespaces(os.getpid()) <= before
    assert process is not None
    assert process.wait(5) == -signal.SIGKILL
    process.communicate()
    with pytest.raises(NetworkError, match="set port0 up"):  # there is no switch any more
        network.set_link(0, True)


@needs_hosts
def test_a_network_that_fails_halfway_is_taken_down(monkeypatch: pytest.MonkeyPatch) -> None:
    before = namespaces(os.getpid())
    network = Network(2, rate="1gbit")

    def fail(*_: object) -> None:
        assert len(namespaces(os.getpid()) - before) == 3
        raise NetworkError("no")

    monkeypatch.setattr(network, "set_rate", fail)
    with pytest.raises(NetworkError, match="no"):
        network.__enter__()
    assert namespaces(os.getpid()) <= before


@needs_hosts
def test_the_next_network_removes_what_a_killed_process_left() -> None:
    """And leaves alone what belongs to processes that live."""
    code = f"""
    import os, subprocess, sys
    sys.path.insert(0, {str(BENCH)!r})
    import netns
    network = netns.Network(1).__enter__()
    child = subprocess.Popen(network.command(0, ["sh", "-c", "echo here; exec sleep 60"]), stdout=subprocess.PIPE)
    child.stdout.readline()
    print(network.name(0), child.pid, flush=True)
    os.read(0, 1)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        name, pid = process.stdout.readline().split()
        with Network(1):
            assert name in namespaces()
    finally:
        process.kill()
        process.communicate()
    assert name in namespaces()
    with Network(1):
        assert name not in namespaces()
        status = Path("/proc", pid, "status")
        assert not status.exists() or "Z (zombie)" in status.read_text()


# ---- ranks on them: tests/support/netns.py


def test_hosts_of() -> None:
    assert hosts_of((2, 1, 3)) == [(0, 1), (2,), (3, 4, 5)]


def test_where_namespaces_are_expected_their_tests_do_not_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.netns.why_unavailable", lambda: "no")
    monkeypatch.setenv(EXPECT, "1")
    assert why_skipped() is None
    monkeypatch.delenv(EXPECT)
    assert why_skipped() == "no"


def _look_around(rank: int, size: int, name: str) -> tuple[int, int, str, str, str]:
    if (name, rank) == ("leaves", 1):
        os._exit(3)
    if name == "fails":
        raise ValueError(f"mine, {rank}")
    namespace = os.readlink("/proc/self/ns/net")
    return rank, size, namespace, os.environ["LOCAL_RANK"], f"{name} {os.environ['GROUP_RANK']}"


@needs_hosts
def test_ranks_run_on_their_hosts(network: Network) -> None:
    names = [output(python(network, host, "import os; print(os.readlink('/proc/self/ns/net'))")) for host in (0, 1)]
    assert len({*names, os.readlink("/proc/self/ns/net")}) == 3
    worlds = [HostedWorld(network, (2, 1), ("stays",)), HostedWorld(network, (1, 1), ("leaves",), {1: 3})]
    assert run_worlds(worlds, _look_around) == [
        [(0, 3, names[0], "0", "stays 0"), (1, 3, names[0], "1", "stays 0"), (2, 3, names[1], "0", "stays 1")],
        [(0, 2, names[0], "0", "leaves 0"), None],
    ]


@needs_hosts
def test_a_rank_that_fails_on_its_host_is_reported(network: Network) -> None:
    with pytest.raises(RanksFailed, match="_look_around: 2 of 2 ranks failed") as failed:
        run_on_hosts(network, (1, 1), _look_around, "fails")
    assert "ValueError: mine, 1" in str(failed.value)
