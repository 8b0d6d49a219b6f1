"""Calls a function in other processes. For horovod/runner.py, in each process of a launch: `python -c PROGRAM FOLDER`.

Another user may exchange the folder where it is in one that others can write to. So each file begins with an HMAC of
its name and its contents, and nothing is unpickled before that was checked. Its key is the secret of the job.
"""

import hmac
import importlib.util
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torchring.launch.jobs import OWN_IMPORTS
from torchring.rendezvous.environment import JOB, read_environment
from torchring.safe_files import reading, replacing

PROGRAM: Final = f"{OWN_IMPORTS}from torchring.launch.task import main; sys.exit(main(sys.argv[1]))"
PAYLOAD: Final = "call"  # names of files in the folder
RESULT: Final = "result"  # and the rank
FAILURE: Final = "failure"  # and the rank


def places_of(hosts: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """For each rank, the process that becomes it, and its variables. Ranks of one host are neighbours.

    Processes on ["b", "a", "b"]: ranks 0, 1 and 2 are the processes 0, 2 and 1.
    """
    places: list[tuple[int, dict[str, str]]] = []
    for number, host in enumerate(dict.fromkeys(hosts)):
        here = [process for process, its_host in enumerate(hosts) if its_host == host]
        for local_rank, process in enumerate(here):
            environ = {"RANK": len(places), "WORLD_SIZE": len(hosts), "LOCAL_RANK": local_rank}
            environ |= {"LOCAL_WORLD_SIZE": len(here), "GROUP_RANK": number}
            places.append((process, {name: str(value) for name, value in environ.items()}))
    return places


def has_cloudpickle() -> bool:
    """Return True if functions of the script itself can be pickled, too."""
    return importlib.util.find_spec("cloudpickle") is not None


def dumps(obj: Any) -> bytes:
    """Pickled, by cloudpickle where it is installed."""
    if not has_cloudpickle():
        return pickle.dumps(obj)
    import cloudpickle

    return bytes(cloudpickle.dumps(obj))


def pickled_call(
    dumps: Callable[[Any], bytes], function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> bytes:
    """A call, for other processes. Raises ValueError."""
    try:
        return bytes(dumps((function, tuple(args), dict(kwargs or {}))))
    except Exception as error:
        raise ValueError(
            f"cannot send {getattr(function, '__qualname__', repr(function))} and its arguments to other processes "
            f"({type(error).__name__}: {error}). Make sessions, connections, open files and locks inside the function, "
            "and import modules there"
        ) from error


def make_call(dumps: Callable[[Any], bytes], call: bytes, rank: str) -> bytes:
    """What a call of `pickled_call` returns, pickled. A script that ends by sys.exit() returns None."""
    function, args, kwargs = pickle.loads(call)
    try:
        returned = function(*args, **kwargs)
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
        returned = None
    try:
        return bytes(dumps(returned))
    except Exception as error:
        raise TypeError(
            f"{rank} returned {type(returned).__name__}, which cannot be pickled ({type(error).__name__}: {error}); "
            "return what the caller needs: numbers, tensors on the CPU, a state_dict() or a path"
        ) from error


def main(folder: str) -> int:
    """Call the function, and write what it returns or raises. Returns the exit code."""
    rank = read_environment(os.environ).rank
    files = Files(folder, os.environ[JOB])
    try:
        search, call = pickle.loads(files.read(PAYLOAD))
        sys.path[:] = search  # where the caller's modules are
        files.write(f"{RESULT}{rank}", make_call(dumps, call, f"rank {rank}"))
    except BaseException as error:
        try:
            pickled = dumps(error)
        except Exception:
            pickled = None
        failure = {"rank": rank, "traceback": traceback.format_exc(), "error": pickled}
        files.write(f"{FAILURE}{rank}", pickle.dumps(failure))
        raise
    return 0


class Files:
    """The files of a call."""

    def __init__(self, folder: str | os.PathLike[str], key: str) -> None:
        self.folder = Path(folder)
        self._key = key.encode()

    def write(self, name: str, data: bytes) -> None:
        """Complete, or not at all, and for this user's eyes only."""
        with replacing(self.folder / name, permissions=0o600) as file:
            file.write(self._sign(name, data) + data)

    def read(self, name: str) -> bytes:
        """What was written. Raises OSError, and RuntimeError for what somebody else has written."""
        with reading(self.folder / name) as file:
            signature, data = file.read(len(self._sign("", b""))), file.read()
        if not hmac.compare_digest(signature, self._sign(name, data)):
            raise RuntimeError(
                f"{self.folder / name} was not written by this job: another user can write to {self.folder.parent}. "
                "Start the job in a folder that others cannot write to"
            )
        return data

    def _sign(self, name: str, data: bytes) -> bytes:
        return hmac.digest(self._key, name.encode() + b"\n" + data, "sha256")
