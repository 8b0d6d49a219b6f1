"""Calls a function in each process of a launch: `python -m torchring.launch.task FOLDER`. See horovod/runner.py."""

from __future__ import annotations

import importlib.util
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any, Final

from torchring.rendezvous.environment import read_environment

PAYLOAD: Final = "call"  # names of files in the folder
RESULT: Final = "result"  # and the rank
FAILURE: Final = "failure"  # and the rank


def has_cloudpickle() -> bool:
    """Return True if functions of the script itself can be pickled, too."""
    return importlib.util.find_spec("cloudpickle") is not None


def dumps(obj: Any) -> bytes:
    """Pickled, by cloudpickle where it is installed."""
    if not has_cloudpickle():
        return pickle.dumps(obj)
    import cloudpickle

    return bytes(cloudpickle.dumps(obj))


def main(folder: Path) -> int:
    """Call the function, and write what it returns or raises. Returns the exit code."""
    rank = read_environment(os.environ).rank
    try:
        search, call = pickle.loads((folder / PAYLOAD).read_bytes())
        sys.path[:] = search  # where the caller's modules are
        func, args, kwargs = pickle.loads(call)
        _write(folder, f"{RESULT}{rank}", dumps(func(*args, **kwargs)))
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            _write(folder, f"{RESULT}{rank}", dumps(None))
            return 0
        try:
            pickled = dumps(error)
        except Exception:
            pickled = None
        failure = {"rank": rank, "traceback": traceback.format_exc(), "error": pickled}
        _write(folder, f"{FAILURE}{rank}", pickle.dumps(failure))
        raise
    return 0


def _write(folder: Path, name: str, data: bytes) -> None:
    """Complete, or not at all."""
    part = folder / f".{name}"
    part.write_bytes(data)
    part.rename(folder / name)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
