"""Who takes part: rank and size from the launcher, the store to meet at, and which ranks share a host."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from torchring.errors import RingError, TopologyError
from torchring.memory.host import HostGroup, connect
from torchring.rendezvous import Rendezvous

DEFAULT_TIMEOUT_SECONDS: Final = 300.0
BACKENDS: Final = ("auto", "gloo")


@dataclass(frozen=True)
class LaunchEnvironment:
    """What the launcher said. `master` is None for a world of one."""

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    master: tuple[str, int] | None
    store_is_hosted: bool  # the launcher runs the TCPStore itself (torchrun), no rank has to


# Where each launcher puts rank, world size and local rank. In this order: torchrun may itself run under mpirun or srun.
_LAUNCHERS: Final = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mpiexec (MPICH)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    # Not SLURM_NTASKS: sbatch sets that for the batch script too, which runs once.
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)


def read_environment(environ: Mapping[str, str]) -> LaunchEnvironment:
    """Find out which launcher started this process, and what it said.

    No launcher is a world of one. Raises TopologyError where a launcher asks for more than one process and leaves out
    something that joining them takes: training on alone would be a silent wrong answer.
    """
    found = next((keys for keys in _LAUNCHERS if keys[2] in environ), None)
    if found is None:
        if "RANK" in environ:
            raise TopologyError("RANK is set but WORLD_SIZE is not; torchrun sets both")
        return LaunchEnvironment("none", 0, 1, None, None, False)
    launcher, rank_key, size_key, local_key = found
    size = _integer(environ, size_key, launcher)
    if size < 1:
        raise TopologyError(f"{launcher} says {size_key}={size}; a world has at least 1 process")
    if size == 1 and environ.get(rank_key, "0") != "0":
        raise TopologyError(
            f"{launcher} says {size_key}=1 but {rank_key}={environ[rank_key]}; a world of one has rank 0 only"
        )
    if size == 1:
        return LaunchEnvironment(launcher, 0, 1, 0, None, False)
    needed = (rank_key, "MASTER_ADDR", "MASTER_PORT")
    if missing := [key for key in needed if key not in environ]:
        raise TopologyError(
            f"{launcher} says {size_key}={size}, but {', '.join(missing)} not set, so the {size} processes cannot find "
            f"each other; start the script with `torchring run -np {size} SCRIPT` or torchrun, or set "
            f"{', '.join(missing)}"
        )
    rank = _integer(environ, rank_key, launcher)
    if not 0 <= rank < size:
        raise TopologyError(f"{launcher} says {rank_key}={rank}, which is not in 0 .. {size - 1} ({size_key}={size})")
    local_rank = _integer(environ, local_key, launcher) if local_key in environ else None
    port = _integer(environ, "MASTER_PORT", launcher)
    if not 0 < port < 65536:
        raise TopologyError(f"MASTER_PORT={port} is not a TCP port, 1 .. 65535")
    master = (environ["MASTER_ADDR"], port)
    hosted = launcher == "torchrun" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return LaunchEnvironment(launcher, rank, size, local_rank, master, hosted)


class World:
    """The ranks that reduce together, as one of them sees it. Opening it is collective.

    Everything that a part of torchring needs to know of other ranks it is handed in a World, so that N worlds can live
    in N threads of one process; the module-level functions use the default one.

    Args:
        store: shared by exactly these ranks, None for a world of one.
        rank, size: this process, and how many there are.
        local_rank: as the launcher says; else the position among the ranks of this host.
        timeout_seconds: how long a live rank may keep the others waiting.
        store_host: the rank whose process hosts the store, None if it is no rank's.

    Attributes:
        host: the ranks that share memory with this one.
        hosts: all ranks, grouped by shared memory, in order of each group's first rank.
        num_cores: processor cores that the ranks of this host may use together.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        size: int,
        *,
        local_rank: int | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        launcher: str = "none",
        store_host: int | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.launcher = launcher
        self.timeout_seconds = timeout_seconds
        self.rendezvous: Rendezvous | None = None
        self.host: HostGroup | None = None
        self.hosts: tuple[tuple[int, ...], ...] = ((rank,),)
        self.num_cores = len(os.sched_getaffinity(0))
        self.is_open = True
        self._num_streams = 0
        self._closing: list[Callable[[], None]] = []
        if store is not None and size > 1:
            try:
                self._meet(Rendezvous(store, rank, size, timeout_seconds), store_host)
            except BaseException:
                self.close()
                raise
        members = self.hosts[self.node_rank]
        self.local_rank = members.index(rank) if local_rank is None else local_rank
        self.local_size = len(members)

    def _meet(self, rendezvous: Rendezvous, store_host: int | None) -> None:
        """Find out who shares memory with whom."""
        self.rendezvous = rendezvous
        rendezvous.store_host = store_host
        rendezvous.agree_on_size()
        self.host = connect(rendezvous)
        rendezvous.watch = self.host.check_peers
        mine = {"host": self.host.ranks, "cores": sorted(os.sched_getaffinity(0))}
        cards = [json.loads(text) for text in rendezvous.exchange("world", json.dumps(mine).encode())]
        self.hosts = tuple(sorted({tuple(card["host"]) for card in cards}))
        self.num_cores = len(set().union(*(cards[peer]["cores"] for peer in self.host.ranks)))

    @property
    def node_rank(self) -> int:
        return next(i for i, members in enumerate(self.hosts) if self.rank in members)

    @property
    def num_nodes(self) -> int:
        return len(self.hosts)

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks are on this host."""
        return self.host is not None and self.host.size == self.size

    def next_stream_name(self) -> str:
        """A name for one more stream of operations; equal on all ranks, which open streams in the same order."""
        self._num_streams += 1
        return f"stream{self._num_streams}"

    def on_close(self, callback: Callable[[], None]) -> None:
        """Have `callback` called before the world closes, the latest first."""
        self._closing.append(callback)

    def report_failure(self, error: RingError) -> None:
        """Let the peers on this host, which may be waiting for this rank, stop with the same error."""
        if self.host is not None:
            self.host.report_failure(error)

    def close(self) -> None:
        """Leave. Peers that still wait for this rank raise PeerLostError."""
        self.is_open = False
        while self._closing:
            self._closing.pop()()
        if self.host is not None:
            self.host.close()
            self.host = None


_default: World | None = None
_num_inits = 0
_own_store: Store | None = None


def init(backend: str = "auto", *, timeout_seconds: float | None = None) -> World:
    """Join the world that the launcher started; collective. `wrap` and the collectives call it themselves.

    A process group that the script already made is used for its rank, size and store, and otherwise left alone; the
    script's own collectives never mix with torchring's. None is made, so the script may still make its own.

    Args:
        backend: "auto" or "gloo": the engine between hosts.
        timeout_seconds: a rank that keeps others waiting longer than this raises PeerTimeoutError on them; 300 unless
            said.

    Returns the default world; a second call returns the same one.

    Raises:
        ValueError: unknown backend, a timeout that is not positive, or another one than the open world has.
        TopologyError: the launcher's environment is incomplete, or ranks were told different world sizes.
        PeerTimeoutError: a rank did not show up.
    """
    global _default, _num_inits
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    if timeout_seconds is not None and not timeout_seconds > 0:
        raise ValueError(f"timeout_seconds must be positive, got {timeout_seconds!r}")
    if _default is not None:
        if timeout_seconds not in (None, _default.timeout_seconds):
            raise ValueError(
                f"the world is open with timeout_seconds={_default.timeout_seconds:g}, got {timeout_seconds!r}; call "
                "init() with it before anything else, or shutdown() first"
            )
        return _default
    timeout_seconds = DEFAULT_TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds
    if dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        local_rank = int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ else None
        launcher = "torch.distributed"
        base: Store | None = dist.distributed_c10d._get_default_store()
        store_host = None
    else:
        launch = read_environment(os.environ)
        rank, size, local_rank, launcher = launch.rank, launch.size, launch.local_rank, launch.launcher
        base = _launcher_store(launch, timeout_seconds)
        store_host = None if launch.store_is_hosted else 0
    store = PrefixStore(f"torchring/{_num_inits}", base) if base is not None else None
    # Counted before opening: a world that failed to open has left keys behind that the next one must not read.
    _num_inits += 1
    _default = World(
        store,
        rank,
        size,
        local_rank=local_rank,
        timeout_seconds=timeout_seconds,
        launcher=launcher,
        store_host=store_host,
    )
    return _default


def shutdown() -> None:
    """Leave the world. `init()` may be called again, by all ranks. Harmless when there is none."""
    global _default
    if _default is not None:
        world, _default = _default, None
        world.close()


def is_initialized() -> bool:
    """Whether this process has joined a world."""
    return _default is not None


def default_world() -> World:
    """The world of the module-level functions, joined now if it was not yet."""
    return _default if _default is not None else init()


def rank() -> int:
    """This process's number, 0 <= rank() < size()."""
    return default_world().rank


def size() -> int:
    """Number of processes that train together."""
    return default_world().size


def local_rank() -> int:
    """This process's number on its host: the launcher's LOCAL_RANK where it gave one."""
    return default_world().local_rank


def local_size() -> int:
    """Number of ranks that share this host's memory, this one included."""
    return default_world().local_size


def node_rank() -> int:
    """Number of this host, 0 <= node_rank() < num_nodes()."""
    return default_world().node_rank


def num_nodes() -> int:
    """Number of hosts; ranks that cannot share memory count as on different hosts."""
    return default_world().num_nodes


def device() -> torch.device:
    """Where this rank should put its model. The CPU: this release reduces CPU tensors only."""
    return torch.device("cpu")


def _launcher_store(launch: LaunchEnvironment, timeout_seconds: float) -> Store | None:
    """The TCPStore at MASTER_ADDR; rank 0 hosts it unless the launcher does. Kept for a later init()."""
    global _own_store
    if launch.master is None:
        return None
    if _own_store is None:
        address, port = launch.master
        try:
            tcp = TCPStore(
                address,
                port,
                is_master=launch.rank == 0 and not launch.store_is_hosted,
                wait_for_workers=False,  # a rank with another WORLD_SIZE would wait here; agree_on_size() finds it
                multi_tenant=True,  # the script may host its own at the same port, as init_process_group does
                timeout=timedelta(seconds=timeout_seconds),
            )
        except dist.DistError as error:
            raise TopologyError(
                f"rank {launch.rank} on {socket.gethostname()} cannot reach the rendezvous store at "
                f"{address}:{port} (MASTER_ADDR:MASTER_PORT): {error}"
            ) from error
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        _own_store = PrefixStore(f"torchring/attempt{attempt}", tcp)
    return _own_store


def _integer(environ: Mapping[str, str], key: str, launcher: str) -> int:
    try:
        return int(environ[key])
    except ValueError:
        raise TopologyError(f"{launcher} says {key}={environ[key]!r}, which is not an integer") from None
