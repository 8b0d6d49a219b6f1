"""Network namespaces as stand-ins for hosts: N hosts on one switch, with links of a given rate.

    with Network(2, rate="1gbit") as network:
        process = subprocess.Popen(network.command(1, ["python", "train.py"]))

      torchring-4711-0-host0                torchring-4711-0-host1          namespaces, named after this process
      eth0 10.77.0.1                        eth0 10.77.0.2                  tbf: what the host sends
           |                                     |                          veth pairs
         port0 ------------ switch ----------- port1                        tbf: what the host receives
                torchring-4711-0-switch                                     also a namespace

The switch is a bridge in a namespace of its own. So the machine's interfaces stay as they are, the machine's firewall
does not apply, and the whole network goes when the namespaces are deleted. Abstract Unix sockets do not reach into
another namespace: as on different hosts, ranks in different namespaces cannot share memory. The hosts share everything
else, such as the processor and the file system.

Needs Linux, root and iproute2; `why_unavailable` says which one is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

INTERFACE: Final = "eth0"  # the network interface of every host; for GLOO_SOCKET_IFNAME
_FOLDER: Final = Path("/run/netns")  # where `ip netns` keeps the names
_NAME: Final = re.compile(r"torchring-(\d+)-(\d+)-(?:switch|host\d+)")
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
# How much a link may send at once after a pause, in seconds of its rate. At 1 Gbit/s a TCP connection moved 0.087 GB/s
# with bursts of 0.1 ms, 0.098 GB/s with 0.3 ms, and 0.1195 GB/s with 1 ms. Headers take the rest.
_BURST_SECONDS: Final = 1e-3
_SMALLEST_BURST_BYTES: Final = 128 << 10  # two packets of the kernel's largest size
_QUEUE_SECONDS: Final = 25e-3  # how long packets may wait at a port; others are dropped
_LARGEST_NUM_HOSTS: Final = 250
_KILL_SECONDS: Final = 3.0  # how long to wait until killed processes are gone

_serial_numbers = itertools.count()
_open_here: set[str] = set()  # prefixes of the names that this process uses now


class NetworkError(RuntimeError):
    """A network could not be built or changed. The text has the command that failed, and its output."""


class Network:
    """N hosts on one switch. A context manager: the hosts exist inside it.

    Leaving the context, also by an exception, kills the processes that still run on the hosts, and deletes the
    namespaces. If the process is killed, the next `Network` on the machine deletes the namespaces that it has left.
    """

    def __init__(self, num_hosts: int, *, rate: str | None = None) -> None:
        if not 1 <= num_hosts <= _LARGEST_NUM_HOSTS:
            raise ValueError(f"num_hosts must be 1 to {_LARGEST_NUM_HOSTS}, got {num_hosts!r}")
        if rate is not None:
            bits_per_second(rate)
        self.addresses = tuple(f"10.77.0.{host + 1}" for host in range(num_hosts))
        self._rate = rate
        self._limited = [False] * num_hosts
        self._stem = f"torchring-{os.getpid()}-{next(_serial_numbers)}"

    def __enter__(self) -> Network:
        _remove_abandoned()
        _open_here.add(self._stem)
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._remove()

    @property
    def num_hosts(self) -> int:
        return len(self.addresses)

    def name(self, host: int) -> str:
        """The name of the host's namespace, as `ip netns` shows it."""
        if not 0 <= host < self.num_hosts:
            raise ValueError(f"host must be 0 to {self.num_hosts - 1}, got {host!r}")
        return f"{self._stem}-host{host}"

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """A command line that runs `command` on the host, in the same process: process id and signals stay."""
        return [_tool("ip"), "netns", "exec", self.name(host), *command]

    def set_rate(self, rate: str | None, *, host: int | None = None) -> None:
        """Limit both directions of one link, or of all links.

        Args:
            rate: a rate such as "1gbit", "200mbit" or "64kbit" (see `bits_per_second`); None removes the limit.
            host: the host of the link; None means all links.
        """
        bits = None if rate is None else bits_per_second(rate)
        for index in range(self.num_hosts) if host is None else [host]:
            for namespace, interface in ((self.name(index), INTERFACE), (self._switch, f"port{index}")):
                if bits is not None:
                    burst = max(_SMALLEST_BURST_BYTES, int(bits / 8 * _BURST_SECONDS))
                    limits = f"rate {bits}bit burst {burst}b latency {_QUEUE_SECONDS * 1e3:g}ms"
                    _run("tc", f"-n {namespace} qdisc replace dev {interface} root tbf {limits}")
                elif self._limited[index]:
                    _run("tc", f"-n {namespace} qdisc delete dev {interface} root")
            self._limited[index] = bits is not None

    def set_link(self, host: int, up: bool) -> None:
        """Take the host's link down, or up again. Connections stall while the link is down, but do not break."""
        self.name(host)  # raises for a host that does not exist
        _run("ip", f"-n {self._switch} link set port{host} {'up' if up else 'down'}")

    @property
    def _switch(self) -> str:
        return f"{self._stem}-switch"

    def _build(self) -> None:
        _run("ip", f"netns add {self._switch}")
        _run("ip", f"-n {self._switch} link add bridge type bridge")
        # No automatic IPv6 addresses: the messages of neighbour discovery would disturb the measurements.
        _run("ip", f"-n {self._switch} link set bridge addrgenmode none up")
        for host, address in enumerate(self.addresses):
            name = self.name(host)
            _run("ip", f"netns add {name}")
            _run("ip", f"-n {self._switch} link add port{host} type veth peer name {INTERFACE} netns {name}")
            _run("ip", f"-n {self._switch} link set port{host} addrgenmode none master bridge up")
            _run("ip", f"-n {name} link set {INTERFACE} addrgenmode none")
            _run("ip", f"-n {name} address add {address}/24 dev {INTERFACE}")
            _run("ip", f"-n {name} link set {INTERFACE} up")
            _run("ip", f"-n {name} link set lo up")
        if self._rate is not None:
            self.set_rate(self._rate)

    def _remove(self) -> None:
        with _undisturbed():
            _remove_namespaces(lambda name: name.startswith(f"{self._stem}-"))
            _open_here.discard(self._stem)


@functools.cache
def why_unavailable() -> str | None:
    """Why this process cannot build a `Network`, as a clause such as "making network namespaces needs root".

    Returns None where it can. The first call tries to build a network, and later calls return the same answer.
    """
    if not sys.platform.startswith("linux"):
        return "network namespaces are a part of Linux"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    try:
        with Network(1, rate="1gbit"):
            return None
    except NetworkError as error:
        return str(error)


def bits_per_second(rate: str) -> int:
    """Parse a rate as `tc` writes it: "1gbit" -> 1000000000. Raises ValueError unless it is N[k|m|g|t]bit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)bit", rate.lower())
    bits = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not bits:
        raise ValueError(f"a rate is a number and bit, kbit, mbit, gbit or tbit, such as '1gbit', got {rate!r}")
    return bits


def rate(text: str) -> str:
    """Parse a rate on a command line."""
    try:
        bits_per_second(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _remove_abandoned() -> None:
    """Delete namespaces of processes that have ended, also of an earlier process with this process's id."""

    def is_abandoned(name: str) -> bool:
        match = _NAME.fullmatch(name)
        if match is None:
            return False
        if int(match[1]) == os.getpid():
            return name.rpartition("-")[0] not in _open_here
        return not Path("/proc", match[1]).exists()

    _remove_namespaces(is_abandoned)


def _remove_namespaces(is_meant: Callable[[str], bool]) -> None:
    """Delete namespaces. First kills the processes in them, which would keep the namespaces alive."""
    names = [path.name for path in _FOLDER.glob("torchring-*") if is_meant(path.name)]
    for name in names:
        deadline = time.monotonic() + _KILL_SECONDS
        while (pids := _processes_in(name)) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
    for name in names:
        with contextlib.suppress(NetworkError):  # another process may be deleting it, too
            _run("ip", f"netns delete {name}")


def _processes_in(name: str) -> list[int]:
    try:
        return [int(pid) for pid in _run("ip", f"netns pids {name}").split()]
    except NetworkError:  # the name exists, but the namespace was never completed
        return []


def _run(tool: str, arguments: str) -> str:
    command = [_tool(tool), *arguments.split()]
    # In a session of its own, so that Ctrl-C does not kill the command halfway through a change.
    result = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
    if result.returncode != 0:
        raise NetworkError(f"`{tool} {arguments}` failed: {result.stderr.strip() or result.returncode}")
    return result.stdout


def _tool(name: str) -> str:
    path = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if path is None:
        raise NetworkError(f"`{name}` is not installed; Debian and Ubuntu have it in the package iproute2")
    return path


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM wait until the end of the context."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread handles signals
        yield
        return
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(number, lambda number, _: received.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if received:
            signal.raise_signal(received[0])
