"""Reads what the launcher told this process: its rank, the number of ranks, and where the ranks meet.

    torchrun                RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT; mostly torchrun hosts the store
    Kubernetes and others   RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; rank 0 hosts the store
    mpirun, mpiexec         rank and size; the ranks meet through mpi4py, or at MASTER_ADDR:MASTER_PORT if set
    srun                    SLURM_*; rank 0 hosts the store on the step's first host
    torchring run --elastic TORCHRING_ELASTIC; the driver hosts the store, and says when to meet
    by hand                 HOROVOD_RANK and so on, MASTER_ADDR, MASTER_PORT. Horovod's own launchers are refused, as
                            `torchring run --horovod` takes their options

The innermost launcher counts: torchrun under mpirun is torchrun. horovodrun is taken to be outside torchrun, because
the workers that it starts may live long and start jobs of their own, and inside all others. Processes that were started
together and would each train alone are an error. TORCHRING_LAUNCHER=none allows each process to train alone.
TORCHRING_LAUNCHER=torchrun, horovodrun, mpirun or srun makes only the variables of that launcher count.

A process that a rank starts (a DataLoader's worker, a subprocess) inherits these variables, but is not the rank. A
rank that has met the others sets TORCHRING_PARENT, which its children inherit as well. A child is a rank of its own if
the launcher's variables were set anew for it, by the function that mp.spawn runs or by another launcher.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from torchring.errors import TopologyError

CHOICE: Final = "TORCHRING_LAUNCHER"
PARENT: Final = "TORCHRING_PARENT"
JOB: Final = "TORCHRING_JOB"  # from launchers of torchring: a secret of the job. See `signed.py`
ELASTIC: Final = "torchring run --elastic"
INVITATION: Final = "TORCHRING_ELASTIC"  # from `torchring run --elastic`; an `elastic.protocol.Invitation`
_KEY_VALUES: Final = "HOROVOD_GLOO_RENDEZVOUS_ADDR"  # from Horovod's own launchers: where their key-value server is
_LOCAL_SIZES: Final = {
    "torchrun": "LOCAL_WORLD_SIZE", "horovodrun": "HOROVOD_LOCAL_SIZE", "mpirun": "OMPI_COMM_WORLD_LOCAL_SIZE",
}  # fmt: skip
_PART: Final = re.compile(r"((?:[^,\[\]]|\[[^\[\]]*\])+)(?:,|$)")  # of a host list; commas inside brackets stay
_FIRST_PORT: Final = 15_000  # below those that Linux hands out to clients, 32768 and up
_NUM_PORTS: Final = 15_000


@dataclass(frozen=True)
class LaunchEnvironment:
    """A process, as its launcher describes it."""

    launcher: str  # the name of the launcher, "none" without a launcher
    rank: int
    size: int
    local_rank: int | None = None
    # host and port of the store. None for a world of one, and where the ranks meet through MPI.
    master: tuple[str, int] | None = None
    # whether the launcher runs the TCPStore itself, as torchrun does. Otherwise rank 0 does.
    store_is_hosted: bool = False
    over_mpi: bool = False  # no address was given, so the ranks meet through mpi4py
    # if this process is not the rank but a child of the rank, the process number of the rank
    parent_pid: int | None = None
    # equal on all ranks that were launched together, and on no others. "" if the launcher does not say, or has given a
    # secret instead.
    job: str = ""
    is_one_host: bool = False  # whether the launcher says that all ranks run on one host
    # what all ranks that were launched together know, and nobody else. "" if the launcher gives none.
    secret: str = field(default="", repr=False)


@dataclass(frozen=True)
class _Launcher:
    """The variables in which a launcher puts rank, world size and local rank. No other launcher sets `sign`."""

    kind: str
    name: str
    rank: str
    size: str
    local_rank: str
    sign: str

    def has_started(self, environ: Mapping[str, str]) -> bool:
        return self.sign in environ and self.size in environ


def _mpirun(name: str, stem: str, local_rank: str, sign: str) -> _Launcher:
    return _Launcher("mpirun", name, f"{stem}RANK", f"{stem}SIZE", local_rank, sign)


# The innermost first. Where srun offers PMI-2, srun sets PMI_* as well, but not the variables that mpiexec adds.
_LAUNCHERS: Final = (
    _Launcher("torchrun", "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "WORLD_SIZE"),
    _Launcher("horovodrun", "horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_SIZE"),
    _mpirun("mpirun (Open MPI)", "OMPI_COMM_WORLD_", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    _mpirun("mpirun (MVAPICH)", "MV2_COMM_WORLD_", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE"),
    _mpirun("mpiexec (PALS)", "PMI_", "PALS_LOCAL_RANKID", "PALS_LOCAL_RANKID"),
    _mpirun("mpiexec (MPICH)", "PMI_", "MPI_LOCALRANKID", "MPI_LOCALRANKID"),
    # Not SLURM_NTASKS: sbatch sets it for the batch script too, and the batch script runs once.
    _Launcher("srun", "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
    _mpirun("mpiexec (PMI)", "PMI_", "MPI_LOCALRANKID", "PMI_SIZE"),
)
_KINDS: Final = tuple(dict.fromkeys(launcher.kind for launcher in _LAUNCHERS))


def read_environment(environ: Mapping[str, str]) -> LaunchEnvironment:
    """Find out which launcher started this process, and what the launcher said. Without a launcher: a world of one.

    Raises TopologyError if a launcher started several processes but does not say all that joining them takes, or if a
    second launcher inside the first one started a single process: each process would silently train alone.
    """
    if environ.get(CHOICE) is None and (invited := _invited(environ)):
        return invited
    found = _found(environ)
    if not found:
        if "RANK" in environ and environ.get(CHOICE) != "none":
            raise TopologyError(
                "RANK is set but WORLD_SIZE is not. Set both, start the script with `torchring run -np N SCRIPT`, or "
                "unset RANK if this process is to train alone"
            )
        if "MASTER_ADDR" in environ and environ.get(CHOICE) != "none":
            if "ACCELERATE_USE_CPU" in environ:
                raise TopologyError(
                    "`accelerate launch` has started a single process, as it does on CPUs whatever --num_processes "
                    "says. Use `accelerate launch --multi_gpu --num_processes 2`, which works on CPUs, too, or "
                    f"`torchring run -np 2`. If this process is to train alone, set {CHOICE}=none"
                )
            raise TopologyError(
                "MASTER_ADDR is set but RANK and WORLD_SIZE are not, so this process does not know which of the ranks "
                "that meet there it is, and would train alone. Set RANK and WORLD_SIZE, or call init_process_group "
                "before anything of torchring's; in the function that mp.spawn runs, too. If this process is to train "
                f"alone, set {CHOICE}=none"
            )
        return LaunchEnvironment("none", 0, 1)
    launcher = found[0]
    name = _name(launcher, environ)
    size = _integer(environ, launcher.size, name)
    if launcher.kind == "horovodrun" and _KEY_VALUES in environ:
        raise TopologyError(
            "Horovod's launcher started this process, and torchring does not work under that launcher. Start the job "
            "with `torchring run --horovod`, which takes the same options"
        )
    if size < 1:
        raise TopologyError(f"{name} says {launcher.size}={size}; a world has at least 1 process")
    _refuse_worlds_of_one(environ, found, size)
    if size == 1:
        if (said := environ.get(launcher.rank, "0")) != "0":
            raise TopologyError(
                f"{name} says {launcher.size}=1 but {launcher.rank}={said}; a world of one has rank 0 only"
            )
        return LaunchEnvironment(name, 0, 1, 0)
    over_mpi = launcher.kind == "mpirun" and "MASTER_ADDR" not in environ and "MASTER_PORT" not in environ
    needed = [launcher.rank]
    if launcher.kind != "srun" and not over_mpi:
        needed += ["MASTER_ADDR", "MASTER_PORT"]
    if missing := [key for key in needed if key not in environ]:
        raise TopologyError(_incomplete(launcher, name, size, missing))
    rank = _integer(environ, launcher.rank, name)
    if not 0 <= rank < size:
        raise TopologyError(
            f"{name} says {launcher.rank}={rank}, but the {size} ranks ({launcher.size}) are 0 .. {size - 1}: "
            f"give each process a {launcher.rank} of its own, or start them with `torchring run -np {size} SCRIPT`"
        )
    return LaunchEnvironment(
        name,
        rank,
        size,
        _integer(environ, launcher.local_rank, name) if launcher.local_rank in environ else None,
        master=None if over_mpi else _master(environ, launcher, name, rank),
        store_is_hosted=launcher.kind == "torchrun" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        over_mpi=over_mpi,
        job=_job(environ, launcher),
        secret=environ.get(JOB, ""),
        is_one_host=environ.get(_LOCAL_SIZES.get(launcher.kind, "")) == environ[launcher.size],
    )


def _invited(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """Rank and size of a worker of an elastic job before its first generation: its number, and those of a full job."""
    if INVITATION not in environ:
        return None
    invitation = json.loads(environ[INVITATION])
    worker, size, slot = (int(invitation[key]) for key in ("worker", "size", "slot"))
    # A worker that has come later has a rank of its own, too: scripts let rank 0 alone print, or download.
    return LaunchEnvironment(ELASTIC, worker, max(size, worker + 1), slot, store_is_hosted=True)


def describe_parent(environ: Mapping[str, str], pid: int, rank: int, size: int, local_rank: int) -> str:
    """The value of TORCHRING_PARENT for process `pid`, which is a rank now."""
    return json.dumps(
        {"pid": pid, "rank": rank, "size": size, "local_rank": local_rank, "launch": _launch_variables(environ)}
    )


def parent_rank(environ: Mapping[str, str], pid: int) -> LaunchEnvironment | None:
    """The rank that has started process `pid`; None if the process is a rank itself, or no rank's child."""
    try:
        said = json.loads(environ.get(PARENT, "null"))
    except ValueError:
        return None
    if not isinstance(said, dict) or said["pid"] == pid or said["launch"] != _launch_variables(environ):
        return None
    return LaunchEnvironment("a rank", said["rank"], said["size"], said["local_rank"], parent_pid=said["pid"])


def check_group(environ: Mapping[str, str], size: int) -> None:
    """Raise TopologyError if the script's process group, of `size` ranks, leaves out ranks that were launched."""
    found = [(launcher, _size(launcher, environ)) for launcher in _found(environ)]
    if not found:
        return
    most = max(promised for _, promised in found) if size == 1 else found[0][1]
    if size < most:
        launcher = next(launcher for launcher, promised in found if promised == most)
        raise TopologyError(
            f"the script's torch.distributed process group has {size} {'rank' if size == 1 else 'ranks'}, but "
            f"{_name(launcher, environ)} says {launcher.size}={most}, so others would train without it; give "
            f"init_process_group all {most}, or set {CHOICE}=none if only the ranks of the group are to train together"
        )


def secret_of_group(environ: Mapping[str, str], size: int) -> str:
    """The secret that all ranks of the script's process group have, if they are those of one launch; else ""."""
    is_launch = any(_size(launcher, environ) == size for launcher in _found(environ)[:1])
    return environ.get(JOB, "") if is_launch else ""


def expand_hosts(text: str) -> Iterator[str]:
    """Yield the names in a Slurm host list: a[1-2],b is a1, a2, b. Leading zeros count.

    Raises ValueError if `text` is not a host list.
    """
    end = 0
    for part in _PART.finditer(text):
        if part.start() != end:
            break
        end = part.end()
        yield from _expand(part[1])
    if end != len(text) or not text or text.endswith(","):
        raise ValueError(f"{text!r} is no host list such as 'gpu[003-006,9],login1'")


def _expand(part: str) -> Iterator[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        yield head
        return
    inside, _, tail = rest.partition("]")
    for item in inside.split(","):
        first, dash, last = item.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{item!r} in {part!r} is no number, nor a range such as 003-006")
        for number in range(int(first), int(last or first) + 1):
            for end in _expand(tail):
                yield f"{head}{number:0{len(first)}}{end}"


def _found(environ: Mapping[str, str]) -> list[_Launcher]:
    """The launchers that have set their variables and that TORCHRING_LAUNCHER allows, the innermost first."""
    choice = environ.get(CHOICE)
    if choice is not None and choice not in ("none", *_KINDS):
        raise TopologyError(f"{CHOICE} must be one of none, {', '.join(_KINDS)}, got {choice!r}")
    found = [item for item in _LAUNCHERS if choice in (None, item.kind) and item.has_started(environ)]
    # Batch scripts for Slurm often export WORLD_SIZE, and no RANK, which differs between the processes.
    is_exported = len(found) > 1 and found[0].kind == "torchrun" and "RANK" not in environ
    if is_exported and environ["WORLD_SIZE"] == environ[found[1].size]:
        del found[0]
    if choice in _KINDS and not found:
        sizes = dict.fromkeys(launcher.size for launcher in _LAUNCHERS if launcher.kind == choice)
        raise TopologyError(f"{CHOICE}={choice}, but {choice} did not start this process: no {' or '.join(sizes)}")
    return found


def _launch_variables(environ: Mapping[str, str]) -> dict[str, str]:
    keys = {key for launcher in _LAUNCHERS for key in (launcher.rank, launcher.size, launcher.sign)}
    keys |= {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", CHOICE, JOB}
    keys |= {"SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", INVITATION, _KEY_VALUES}
    return {key: environ[key] for key in sorted(keys) if key in environ}


def _refuse_worlds_of_one(environ: Mapping[str, str], found: Sequence[_Launcher], size: int) -> None:
    """Raise TopologyError if mpirun or srun started several processes and an inner launcher says that each is alone."""
    inner = found[0]
    # Several agents of torchrun make one world together, so the number of agents counts.
    key = "GROUP_WORLD_SIZE" if inner.kind == "torchrun" and "GROUP_WORLD_SIZE" in environ else inner.size
    if _integer(environ, key, inner.name) != 1:
        return
    for outer in found[1:]:
        promised = _size(outer, environ)
        if promised > 1:
            text = "alone" if size == 1 else f"in a world of {size} of its own"
            raise TopologyError(
                f"{outer.name} says {outer.size}={promised}, but in each of these processes {_name(inner, environ)} "
                f"says {key}=1, so each would train {text}; give torchrun --nnodes={promised} and a rendezvous that "
                f"all {promised} share, or start the script without it; if they are to train apart from each other, "
                f"set {CHOICE}={'none' if size == 1 else inner.kind}"
            )


def _master(environ: Mapping[str, str], launcher: _Launcher, name: str, rank: int) -> tuple[str, int]:
    address = environ["MASTER_ADDR"] if "MASTER_ADDR" in environ else _first_host(environ, rank)
    num_hosts = environ.get("SLURM_STEP_NUM_NODES", "1") if launcher.kind == "srun" else "1"
    if num_hosts != "1" and (address == "localhost" or address.startswith("127.")):
        raise TopologyError(
            f"MASTER_ADDR={address}, but {name} started processes on {num_hosts} hosts, and {address} leads each of "
            "them to itself; unset MASTER_ADDR, or set it to the name of the first host"
        )
    if "MASTER_PORT" not in environ:
        return address, _slurm_port(environ)
    port = _integer(environ, "MASTER_PORT", name)
    if not 0 < port < 65536:
        raise TopologyError(f"MASTER_PORT={port} is not a TCP port, 1 .. 65535")
    return address, port


def _first_host(environ: Mapping[str, str], rank: int) -> str:
    """The first host of the Slurm step. Task 0 runs there, unless the user distributed the tasks by hand."""
    keys = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    key = next((key for key in keys if environ.get(key)), None)
    if key is None:
        raise TopologyError(f"srun set none of {', '.join(keys)}, so it is not known where rank 0 is; set MASTER_ADDR")
    try:
        first = next(expand_hosts(environ[key]))
        here = environ.get("SLURMD_NODENAME")
        if rank == 0 and here not in (None, first) and here in expand_hosts(environ[key]):
            raise TopologyError(
                f"rank 0 runs on {here}, but the others look for it on {first}, the first of {key}={environ[key]}; set "
                f"MASTER_ADDR={here} for all of them"
            )
    except ValueError as error:
        raise TopologyError(f"srun says {key}={environ[key]!r}: {error}; set MASTER_ADDR") from None
    return first


def _job(environ: Mapping[str, str], launcher: _Launcher) -> str:
    """The launcher's name for this launch. An outer launcher's name does not count: it may have started each node
    by itself."""
    if JOB in environ:
        return ""
    if launcher.kind == "torchrun":
        run = environ.get("TORCHELASTIC_RUN_ID", "none")
        return "" if run == "none" else run  # torchrun's default
    if launcher.kind == "horovodrun":
        return ""
    if launcher.kind == "srun":
        keys = () if "SLURM_HET_SIZE" in environ else ("SLURM_JOB_ID", "SLURM_STEP_ID")
        return ".".join(environ[key] for key in keys if key in environ)
    return environ.get("PMIX_NAMESPACE", "")


def _slurm_port(environ: Mapping[str, str]) -> int:
    """A port that every rank computes by itself. Steps that share a host get different ports, mostly.

    A job has many steps that may run at once, and jobs have consecutive numbers: such jobs get distant ports.
    """
    job, step = (int(environ.get(key, "0")) for key in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return _FIRST_PORT + (job * 61 + step) % _NUM_PORTS


def _incomplete(launcher: _Launcher, name: str, size: int, missing: Sequence[str]) -> str:
    keys = ", ".join(missing)
    text = f"{name} says {launcher.size}={size}, but {keys} not set, so the {size} processes cannot find each other; "
    if launcher.kind == "mpirun" and launcher.rank not in missing:
        return text + "set both MASTER_ADDR and MASTER_PORT, or none of them and the processes meet through mpi4py"
    return text + f"start the script with `torchring run -np {size} SCRIPT` or torchrun, or set {keys}"


def _name(launcher: _Launcher, environ: Mapping[str, str]) -> str:
    """The launcher's name. torchrun and horovodrun always set more than the variables that others set as well."""
    more = {"torchrun": ("LOCAL_RANK", "TORCHELASTIC_RUN_ID"), "horovodrun": ("HOROVOD_HOSTNAME",)}
    by_hand = launcher.kind in more and not any(key in environ for key in more[launcher.kind])
    return "the environment" if by_hand else launcher.name


def _size(launcher: _Launcher, environ: Mapping[str, str]) -> int:
    return _integer(environ, launcher.size, _name(launcher, environ))


def _integer(environ: Mapping[str, str], key: str, launcher: str) -> int:
    try:
        return int(environ[key])
    except ValueError:
        raise TopologyError(f"{launcher} says {key}={environ[key]!r}, which is not an integer") from None
