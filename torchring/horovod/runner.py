"""`run`: calls a function on several processes and returns what it returned, for notebooks and scripts.

    losses = torchring.horovod.run(train, args=(10,), np=4)

The function and its results travel through files in a private folder: a temporary one, or one in the working directory
where some processes are on other hosts, which must share that directory. Each process runs launch/task.py, which tells
how the files are protected.
"""

import os
import pickle
import secrets
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from torchring.errors import ranks_in_words
from torchring.launch import task
from torchring.launch.horovodrun import SOCKETS, ssh_options_of
from torchring.launch.hosts import Host, LaunchError, is_here, parse_hostfile, parse_hosts
from torchring.launch.launcher import start
from torchring.launch.output import OutputOptions
from torchring.rendezvous.environment import JOB

_T = TypeVar("_T")
_STOPPED: Final = 128  # and above: the exit code of a program that a signal ended


def run(
    func: Callable[..., _T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[float] | None = None,
    hosts: str | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[_T]:
    """Call func(*args, **kwargs) on `num_proc` processes: `horovod.run`, with Horovod's arguments.

    Function, arguments and results are pickled, by cloudpickle where it is installed; without cloudpickle the function
    must be one that the processes can import. The function calls `init` itself. A warning names arguments that have no
    meaning here. If a process fails, RuntimeError has its traceback, and the function's exception is the cause.

    Returns the results in the order of ranks.
    """
    if hosts is not None and hostfile is not None:
        raise ValueError(f"give hosts or hostfile, not both, got hosts={hosts!r} and hostfile={os.fspath(hostfile)!r}")
    if host_discovery_script is not None:
        raise NotImplementedError("host_discovery_script: nothing is started on hosts that come and go; use hosts")
    ignored = {
        "min_num_proc": min_num_proc, "max_num_proc": max_num_proc, "min_np": min_np, "max_np": max_np, "slots": slots,
        "reset_limit": reset_limit, "cooldown_range": cooldown_range, "start_timeout": start_timeout,
        "disable_cache": disable_cache, "mpi_args": mpi_args, "executable": executable,
        "use_mpi": use_mpi or None,
    }  # fmt: skip
    if given := ", ".join(name for name, value in ignored.items() if value is not None):
        warnings.warn(f"torchring.horovod.run: {given}: no meaning here, ignored", stacklevel=2)
    number = num_proc if np is None else np
    if number < 1:
        raise ValueError(f"num_proc must be 1 or more, got {number}")
    places = _places(hosts, hostfile)
    sockets = network_interfaces or network_interface
    ssh_options = ssh_options_of(ssh_port, ssh_identity_file)
    payload = _pickled(func, args, kwargs or {})
    is_shared = places is not None and not all(is_here(host.name) for host in places)
    folder = Path(tempfile.mkdtemp(prefix=".torchring-run-" if is_shared else None, dir="." if is_shared else None))
    secret = secrets.token_hex(16)
    files = task.Files(folder.resolve(), secret)
    try:
        files.write(task.PAYLOAD, payload)
        command = ["-c", task.PROGRAM, str(files.folder)]
        env = {JOB: secret, **(dict.fromkeys(SOCKETS, sockets) if sockets else {})}
        if verbose:
            print(f"torchring.horovod.run: {number} processes on {hosts or hostfile or 'this machine'}", flush=True)
        output = OutputOptions(log_dir=output_filename)
        return _results(files, number, start(command, number, places, env, output=output, ssh_options=ssh_options))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _places(hosts: str | None, hostfile: str | os.PathLike[str] | None) -> list[Host] | None:
    try:
        if hosts is not None:
            return parse_hosts(hosts)
        return None if hostfile is None else parse_hostfile(Path(hostfile).read_text())
    except LaunchError as error:
        raise ValueError(str(error)) from error


def _pickled(func: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    if task.has_cloudpickle() or getattr(func, "__module__", "__main__") != "__main__":
        return pickle.dumps((sys.path, task.pickled_call(task.dumps, func, args, kwargs)))
    name = getattr(func, "__qualname__", repr(func))
    raise ValueError(f"cannot send {name}, which is not in a module that others can import; pip install cloudpickle")


def _results(files: task.Files, number: int, code: int) -> list[Any]:
    """The results that the ranks have written. Raises RuntimeError if one has failed."""
    failures = sorted(files.folder.glob(f"{task.FAILURE}*"), key=lambda file: file.lstat().st_mtime_ns)
    if failures:
        failed = pickle.loads(files.read(failures[0].name))
        try:
            error = None if failed["error"] is None else pickle.loads(failed["error"])
        except Exception:  # an exception of a class that is not here, say: there is the traceback
            error = None
        raise RuntimeError(f"rank {failed['rank']} of {number} failed:\n{failed['traceback']}") from error
    names = [f"{task.RESULT}{rank}" for rank in range(number)]
    missing = [rank for rank, name in enumerate(names) if not (files.folder / name).exists()]
    if code or missing:
        how = f"signal {code - _STOPPED}" if code > _STOPPED else f"exit code {code}"
        who = f"{ranks_in_words(missing)} returned nothing" if missing else "a process failed"
        raise RuntimeError(f"{who}, of {number} processes; they ended with {how}")
    return [pickle.loads(files.read(name)) for name in names]
