"""The TCPStore that the ranks of a launch meet at: at a given address, or at one that rank 0 tells through MPI."""

from __future__ import annotations

import fcntl
import hashlib
import json
import secrets
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import TCPStore

from torchring.errors import PeerTimeoutError, TopologyError
from torchring.linux import network_id
from torchring.rendezvous.environment import CHOICE, LaunchEnvironment

_LOOPBACK: Final = "127.0.0.1"
_SIOCGIFADDR: Final = 0x8915
_CARD_BYTES: Final = 2048  # what rank 0 tells all others
_DIGEST_BYTES: Final = 32
_TOKEN_KEY: Final = "torchring/token"
_TRY_SECONDS: Final = 2.0  # per address
_SEARCH_SECONDS: Final = 30.0  # rank 0 listens before it says where: who cannot reach it now hardly ever will
_PAUSE_SECONDS: Final = 0.2  # between two looks for a name, or for somebody who listens


def open_store(launch: LaunchEnvironment, timeout_seconds: float) -> TCPStore | None:
    """Reach the store, which rank 0 hosts unless the launcher does; None for a world of one.

    Raises TopologyError that says what was tried, PeerTimeoutError where ranks do not take part in a meeting over MPI.
    """
    if launch.over_mpi:
        return _over_mpi(launch, timeout_seconds)
    return None if launch.master is None else _at_master(launch, *launch.master, timeout_seconds)


def mpi_world(launcher: str, rank: int, size: int, *, instead: str) -> Any:
    """mpi4py's COMM_WORLD, if it is the world that the launcher started; else TopologyError with a way out."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        raise TopologyError(
            f"{launcher} started {size} processes, which need mpi4py to talk over MPI, but it does not work in "
            f"{sys.executable} ({type(error).__name__}: {error}); pip install mpi4py there, for the MPI that their "
            f"mpirun belongs to, or {instead}",
            rank=rank,
        ) from error
    comm = MPI.COMM_WORLD
    if (comm.rank, comm.size) != (rank, size):
        version = MPI.Get_library_version().strip("\0 \n").partition("\n")[0]
        raise TopologyError(
            f"{launcher} says rank {rank} of {size}, but mpi4py says rank {comm.rank} of {comm.size}: it uses an MPI "
            f"that did not start these processes ({version}); start them with the mpirun of that MPI, or install "
            f"mpi4py for the MPI whose mpirun you use, or {instead}",
            rank=rank,
        )
    if size > 1:
        _abort_on_exception()
    return comm


def _abort_on_exception() -> None:
    """Have a rank that ends with an exception end the others: MPI_Finalize, at its exit, would wait for them.

    `python -m mpi4py` sees to that for sys.exit(), too.
    """
    inner = sys.excepthook
    if getattr(inner, "aborts_mpi", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        inner(kind, error, trace)
        from mpi4py.run import set_abort_status

        set_abort_status(128 + signal.SIGINT if issubclass(kind, KeyboardInterrupt) else 1)  # at exit

    hook.aborts_mpi = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def unannounced_mpi(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """Several processes of an MPI whose launcher sets no variables that we know, if the script has started MPI."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or CHOICE in environ or not mpi.Is_initialized() or mpi.Is_finalized() or mpi.COMM_WORLD.size == 1:
        return None
    return LaunchEnvironment("MPI", mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size, None, None, False, True)


def _at_master(launch: LaunchEnvironment, address: str, port: int, timeout_seconds: float) -> TCPStore:
    place = f"{address}:{port} (MASTER_ADDR:MASTER_PORT, or what {launch.launcher} has for them)"
    who = f"rank {launch.rank} on {socket.gethostname()}"
    is_host = launch.rank == 0 and not launch.store_is_hosted
    if not is_host and (trouble := _wait_for_listener(address, port, timeout_seconds)):
        raise TopologyError(
            f"{who} cannot reach the rendezvous store at {place} within {timeout_seconds:g} s: {trouble}"
        )
    try:
        return TCPStore(
            _LOOPBACK if is_host else address,  # rank 0's own name may not resolve yet, nor lead to itself
            port,
            is_master=is_host,
            wait_for_workers=False,  # a rank with another WORLD_SIZE would wait here; agree_on_size() finds it
            multi_tenant=True,  # the script may host its own at the same port, as init_process_group does
            timeout=timedelta(seconds=timeout_seconds),
        )
    except dist.DistError as error:
        verb = "host" if is_host else "reach"
        text = f"{who} cannot {verb} the rendezvous store at {place}: {_first_line(error)}"
        if "EADDRINUSE" in text:
            text += "; another job may use that port: give this one another MASTER_PORT"
        raise TopologyError(text) from error


def _wait_for_listener(address: str, port: int, timeout_seconds: float) -> str | None:
    """Returns None as soon as somebody listens there, what was wrong last if nobody ever does.

    Names of pods appear in the name service seconds after the pods, and rank 0 may be later than others. TCPStore waits
    as well, but prints a page for each try, and does not say that a name is unknown.
    """
    end = time.monotonic() + timeout_seconds
    while True:
        left = max(0.01, end - time.monotonic())
        try:
            socket.create_connection((address, port), timeout=min(left, _TRY_SECONDS)).close()
            return None
        except socket.gaierror as error:
            trouble = f"the name {address!r} does not resolve ({error.strerror})"
        except OSError as error:
            trouble = f"nobody answers ({error.strerror or error})"
        if time.monotonic() + _PAUSE_SECONDS > end:
            return trouble
        time.sleep(_PAUSE_SECONDS)


class _Meeting:
    """Rank 0 hosts a store on a free port and tells all others where; collective over MPI.

    Kept when it times out, because an MPI collective that was begun cannot be taken back: the next try goes on with it.
    """

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.digests = bytearray(_DIGEST_BYTES * comm.size)
        self.card = bytearray(_CARD_BYTES)
        self.store: TCPStore | None = None
        self.request = comm.Iallgather(bytearray(_network_digest()), self.digests)
        self.knows_networks = False

    def attend(self, timeout_seconds: float) -> dict[str, Any]:
        """Returns rank 0's card: host, port, addresses and token of the store, or an error."""
        end = time.monotonic() + timeout_seconds
        if not self.knows_networks:
            self._complete(end, timeout_seconds)
            self.knows_networks = True
            if self.comm.rank == 0:
                networks = {bytes(self.digests[i : i + 32]) for i in range(0, len(self.digests), _DIGEST_BYTES)}
                text = json.dumps(self._host(is_local=len(networks) == 1, timeout_seconds=timeout_seconds)).encode()
                self.card[: len(text)] = text
            self.request = self.comm.Ibcast(self.card, root=0)
        self._complete(end, timeout_seconds)
        card: dict[str, Any] = json.loads(bytes(self.card).rstrip(b"\0"))
        return card

    def _complete(self, end: float, timeout_seconds: float) -> None:
        pause = 0.0005
        while not self.request.Test():
            if time.monotonic() > end:
                raise PeerTimeoutError(
                    f"of the {self.comm.size} processes that mpirun started, not all came to torchring.init() (which "
                    "wrap and the collectives call); which ones is not known before all have met once",
                    rank=self.comm.rank,
                    seconds=timeout_seconds,
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def _host(self, *, is_local: bool, timeout_seconds: float) -> dict[str, Any]:
        """Ranks of one host meet on loopback, where nobody else can connect; those of several need all addresses."""
        try:
            listener = socket.create_server((_LOOPBACK if is_local else "", 0))
            port = listener.getsockname()[1]
            self.store = TCPStore(
                _LOOPBACK,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_seconds),
                master_listen_fd=listener.detach(),
            )
            token = secrets.token_hex(16)
            self.store.set(_TOKEN_KEY, token)
        except (OSError, dist.DistError) as error:
            return {"error": f"rank 0 on {socket.gethostname()} cannot host the store: {_first_line(error)}"}
        addresses = [_LOOPBACK] if is_local else own_addresses()[:16]
        return {"host": socket.gethostname(), "port": port, "addresses": addresses, "token": token}


_meeting: _Meeting | None = None


def _over_mpi(launch: LaunchEnvironment, timeout_seconds: float) -> TCPStore:
    global _meeting
    if _meeting is None:
        _meeting = _Meeting(
            mpi_world(
                launch.launcher,
                launch.rank,
                launch.size,
                instead="set MASTER_ADDR and MASTER_PORT to meet without mpi4py",
            )
        )
    card = _meeting.attend(timeout_seconds)
    store = _meeting.store
    _meeting = None
    if "error" in card:
        raise TopologyError(card["error"], rank=launch.rank)
    if store is None:
        store = _connect(launch, card, timeout_seconds)
    store.set_timeout(timedelta(seconds=timeout_seconds))
    return store


def _connect(launch: LaunchEnvironment, card: dict[str, Any], timeout_seconds: float) -> TCPStore:
    """Take the first of rank 0's addresses where its store answers. On a host with several networks some will not."""
    limit = min(timeout_seconds, _SEARCH_SECONDS)
    end = time.monotonic() + limit
    while True:
        tried = []
        for address in card["addresses"]:
            try:
                return _try(address, card["port"], card["token"])
            except (OSError, dist.DistError) as error:
                tried.append(f"{address} ({getattr(error, 'strerror', None) or _first_line(error)})")
        if time.monotonic() + _PAUSE_SECONDS > end:
            raise TopologyError(
                f"rank {launch.rank} on {socket.gethostname()} reaches none of rank 0's addresses on {card['host']}, "
                f"port {card['port']}, within {limit:g} s: {', '.join(tried)}; a firewall may be in between; or "
                "set MASTER_ADDR and MASTER_PORT to an address of rank 0 and a port that is open",
                rank=launch.rank,
                peers=(0,),
            )
        time.sleep(_PAUSE_SECONDS)


def _try(address: str, port: int, token: str) -> TCPStore:
    """An address such as a container bridge's may exist on every host: the token tells whose store answered."""
    socket.create_connection((address, port), timeout=_TRY_SECONDS).close()
    patience = timedelta(seconds=_TRY_SECONDS)
    store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=patience)
    if not store.check([_TOKEN_KEY]) or store.get(_TOKEN_KEY).decode() != token:
        raise ConnectionError("another store answers there")
    return store


def own_addresses() -> list[str]:
    """Where other hosts may reach this one, the likeliest first, its name last; loopback is not among them."""
    found = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing, but chooses the interface of the default route
        found.append(probe.getsockname()[0])
    for _, interface in socket.if_nameindex():
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            found.append(socket.inet_ntoa(answer[20:24]))
    with suppress(OSError), open("/proc/net/if_inet6") as file:
        for line in file:
            digits, _, _, scope, _, _ = line.split()
            if scope == "00":  # global
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    found.append(socket.gethostname())
    return [address for address in dict.fromkeys(found) if not address.startswith("127.")]


def _network_digest() -> bytes:
    """Equal on processes that share a loopback interface.

    Unique where /proc is not mounted, so that nobody can tell: rank 0 then listens on all of its addresses.
    """
    network = network_id()
    return hashlib.sha256(network.encode()).digest() if network else secrets.token_bytes(_DIGEST_BYTES)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
