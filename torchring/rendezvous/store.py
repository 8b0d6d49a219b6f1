"""The TCPStore through which the ranks of a launch meet: at a given address, or at an address that rank 0 broadcasts
over MPI."""

import json
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import TCPStore

from torchring.errors import PeerTimeoutError, TopologyError
from torchring.linux import host_name
from torchring.rendezvous.addresses import own_addresses
from torchring.rendezvous.environment import CHOICE, LaunchEnvironment

_LOOPBACK: Final = "127.0.0.1"
_ENDPOINT_BYTES: Final = 2048  # of JSON, in which rank 0 says where its store is
_TOKEN_KEY: Final = "torchring/token"
_TRY_SECONDS: Final = 2.0  # per address
_SEARCH_SECONDS: Final = 30.0  # rank 0 listens already: a rank that does not reach it by then hardly ever will
_PAUSE_SECONDS: Final = 0.2  # between two tries to resolve a name, or to connect


def blames_key(rank: int) -> str:
    """The key, in the store of the launch, under which a rank that fails says which ranks it has failed because of."""
    return f"blames/{rank}"


def open_store(launch: LaunchEnvironment, timeout_seconds: float) -> TCPStore | None:
    """Connect to the store, which rank 0 hosts unless the launcher does. None for a world of one.

    Raises TopologyError that says what was tried, or PeerTimeoutError if ranks that should meet over MPI do not come.
    """
    if launch.over_mpi:
        return _over_mpi(launch, timeout_seconds)
    return None if launch.master is None else _at_master(launch, *launch.master, timeout_seconds)


def mpi_world(launcher: str, rank: int, size: int, *, instead: str) -> Any:
    """mpi4py's COMM_WORLD. Raises TopologyError, with a way out, if the launcher started another world than that."""
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
    """Have a rank that ends with an exception abort the others: MPI_Finalize, at its exit, would wait for them.

    `python -m mpi4py` does the same, also for sys.exit().
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
    """Describe this process as a rank of MPI, if the script has started MPI with several processes.

    For a launcher that sets no variables that torchring knows.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or CHOICE in environ or not mpi.Is_initialized() or mpi.Is_finalized() or mpi.COMM_WORLD.size == 1:
        return None
    return LaunchEnvironment("MPI", mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size, over_mpi=True)


def _at_master(launch: LaunchEnvironment, address: str, port: int, timeout_seconds: float) -> TCPStore:
    endpoint = f"{address}:{port} (MASTER_ADDR:MASTER_PORT, or what {launch.launcher} has for them)"
    who = f"rank {launch.rank} on {host_name()}"
    is_host = launch.rank == 0 and not launch.store_is_hosted
    if not is_host and (trouble := _wait_for_listener(address, port, timeout_seconds)):
        raise TopologyError(
            f"{who} cannot reach the rendezvous store at {endpoint} within {timeout_seconds:g} s: {trouble}"
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
        text = f"{who} cannot {verb} the rendezvous store at {endpoint}: {_first_line(error)}"
        if "EADDRINUSE" in text:
            text += "; another job may use that port: give this one another MASTER_PORT"
        raise TopologyError(text) from error


def tries(seconds: float) -> Iterator[float]:
    """Yield the seconds that are left: at once, and then every 0.2 s until the time is over."""
    end = time.monotonic() + seconds
    while True:
        yield max(0.01, end - time.monotonic())
        if time.monotonic() + _PAUSE_SECONDS > end:
            return
        time.sleep(_PAUSE_SECONDS)


def _wait_for_listener(address: str, port: int, timeout_seconds: float) -> str | None:
    """Wait until a process listens at the address. Returns None then, or the last problem after the timeout.

    The name of a pod appears in the name service seconds after the pod, and rank 0 may start later than others.
    TCPStore waits as well, but prints a page for each try, and does not say that a name is unknown.
    """
    trouble = ""
    for left in tries(timeout_seconds):
        try:
            socket.create_connection((address, port), timeout=min(left, _TRY_SECONDS)).close()
            return None
        except socket.gaierror as error:
            trouble = f"the name {address!r} does not resolve ({error.strerror})"
        except OSError as error:
            trouble = f"nobody answers ({error.strerror or error})"
    return trouble


class _MpiEndpoint:
    """Rank 0 hosts a store on a free port, and broadcasts over MPI where that is. Collective.

    After a timeout the object is kept, because an MPI collective that has begun cannot be taken back: the next try goes
    on with the same object.
    """

    def __init__(self, comm: Any, is_local: bool, timeout_seconds: float) -> None:
        self.store: TCPStore | None = None  # rank 0's
        self._comm = comm
        self._text = bytearray(_ENDPOINT_BYTES)
        if comm.rank == 0:
            try:
                self.store, endpoint = _host_store(is_local, timeout_seconds)
            except (OSError, dist.DistError) as error:
                endpoint = {"error": f"rank 0 on {host_name()} cannot host the store: {_first_line(error)}"}
            text = json.dumps(endpoint).encode()
            self._text[: len(text)] = text
        self._request = comm.Ibcast(self._text, root=0)

    def receive(self, timeout_seconds: float) -> dict[str, Any]:
        """Returns the endpoint of rank 0's store (host, port, addresses, token), or {"error": text}."""
        end, pause = time.monotonic() + timeout_seconds, 0.0005
        while not self._request.Test():
            if time.monotonic() > end:
                raise PeerTimeoutError(
                    f"of the {self._comm.size} processes that mpirun started, not all came to torchring.init() (which "
                    "wrap and the collectives call); which ones is not known before all have met once",
                    rank=self._comm.rank,
                    seconds=timeout_seconds,
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        said: dict[str, Any] = json.loads(bytes(self._text).rstrip(b"\0"))
        return said


def host_on(listener: socket.socket, timeout: timedelta, *, multi_tenant: bool = False) -> TCPStore:
    """Host a store on a socket that listens. The store takes the socket over. Raises DistError.

    With `multi_tenant`, this process may host a store at the port again while this one lives: it gets the same store.
    """
    address, port = listener.getsockname()[:2]
    return TCPStore(
        _LOOPBACK if address in ("0.0.0.0", "::") else address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        multi_tenant=multi_tenant,
        master_listen_fd=listener.detach(),
    )


def host(is_local: bool, timeout_seconds: float = 300.0) -> TCPStore:
    """Host a store on a free port: on loopback for ranks of one host, where no other host can connect, else everywhere.

    When this process hosts a store at the port again, it gets the same store. Raises OSError or DistError.
    """
    listener = socket.create_server((_LOOPBACK if is_local else "", 0))
    return host_on(listener, timedelta(seconds=timeout_seconds), multi_tenant=True)


def _host_store(is_local: bool, timeout_seconds: float) -> tuple[TCPStore, dict[str, Any]]:
    """A store, and its endpoint (host, port, addresses, token). Raises OSError or DistError."""
    store = host(is_local, timeout_seconds)
    token = secrets.token_hex(16)
    store.set(_TOKEN_KEY, token)
    addresses = [_LOOPBACK] if is_local else own_addresses()[:16]
    return store, {"host": host_name(), "port": store.port, "addresses": addresses, "token": token}


_unfinished: _MpiEndpoint | None = None  # of COMM_WORLD, of which a process has one


def _over_mpi(launch: LaunchEnvironment, timeout_seconds: float) -> TCPStore:
    global _unfinished
    if _unfinished is None:
        instead = "set MASTER_ADDR and MASTER_PORT to meet without mpi4py"
        comm = mpi_world(launch.launcher, launch.rank, launch.size, instead=instead)
        _unfinished = _MpiEndpoint(comm, launch.is_one_host, timeout_seconds)
    endpoint, store = _unfinished.receive(timeout_seconds), _unfinished.store
    _unfinished = None
    if "error" in endpoint:
        raise TopologyError(endpoint["error"], rank=launch.rank)
    if store is None:
        store = _connect(launch, endpoint, timeout_seconds)
    store.set_timeout(timedelta(seconds=timeout_seconds))
    return store


def _connect(launch: LaunchEnvironment, endpoint: dict[str, Any], timeout_seconds: float) -> TCPStore:
    """Connect to rank 0's store. Raises TopologyError."""
    limit = min(timeout_seconds, _SEARCH_SECONDS)
    store, tried = search(endpoint["addresses"], endpoint["port"], endpoint["token"], limit)
    if store is None:
        raise TopologyError(
            f"rank {launch.rank} on {host_name()} reaches none of rank 0's addresses on "
            f"{endpoint['host']}, port {endpoint['port']}, within {limit:g} s: {', '.join(tried)}; a firewall may "
            "be in between; or set MASTER_ADDR and MASTER_PORT to an address of rank 0 and a port that is open",
            rank=launch.rank,
            peers=(0,),
        )
    return store


def search(
    addresses: Sequence[str], port: int, token: str, seconds: float, key: str = _TOKEN_KEY
) -> tuple[TCPStore | None, list[str]]:
    """Connect to the store that has the token under `key`, at the first address at which it answers.

    A host with several networks has addresses that this process does not reach. Returns the store, None if it has not
    answered within `seconds`; and the addresses where it does not, with reasons.
    """
    tried: list[str] = []
    for _ in tries(seconds):
        tried = []
        for address in addresses:
            try:
                return _try(address, port, token, key), tried
            except (OSError, dist.DistError) as error:
                tried.append(f"{address} ({getattr(error, 'strerror', None) or _first_line(error)})")
    return None, tried


def _try(address: str, port: int, token: str, key: str) -> TCPStore:
    """Connect, and check by the token under `key` that the right store answered: a container bridge has the same
    address on every host. Raises OSError or DistError."""
    socket.create_connection((address, port), timeout=_TRY_SECONDS).close()
    patience = timedelta(seconds=_TRY_SECONDS)
    store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=patience)
    if not store.check([key]) or store.get(key).decode() != token:
        raise ConnectionError("another store answers there")
    return store


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
