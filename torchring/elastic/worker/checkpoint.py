"""Checkpoints of an elastic job: files that are whole or not there, written while training goes on.

A checkpoint is `step-000000123.pt`, as `torch.save` writes it: a zip archive, with checksums. `torch.load` takes no
notice of flipped bits, so `newest` checks the sums first. A file gets its name only when all of it is on the disk.
Until then its name ends in `.tmp`. The next writer removes what a writer that was killed an hour ago has left.
"""

import contextlib
import copy
import functools
import logging
import os
import re
import time
import zipfile
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import torch
from torch.utils._pytree import tree_map

from torchring.safe_files import reading, replacing, warn_of_owner
from torchring.threads import SerialThread, at_last, is_done_within

_log: Final = logging.getLogger("torchring.elastic")
_NAME: Final = re.compile(r"step-(\d{9,})\.pt")
_EXIT_SECONDS: Final = 10.0
_TORN_SECONDS: Final = 3600.0  # after which nobody writes a temporary file any more
_KEPT: Final = 3  # checkpoints, the newest included. Older ones go once the newest is on the disk.


class CheckpointWriter:
    """Writes checkpoints into a directory, which it makes, one at a time, on a thread of its own.

    Where a checkpoint cannot be written, training goes on. The first failure of each kind is a warning in
    `logging.getLogger("torchring.elastic")`. Several writers may write to the same directory.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.newest: Path | None = None  # path of the newest checkpoint that this writer has written
        self._thread = SerialThread("torchring-checkpoint")  # a daemon: a disk may hang
        self._last: Future[Any] | None = None  # the one that was begun last
        self._warned: set[object] = set()
        at_last(self.close)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            warn_of_owner(self.directory)
            _remove_torn(self.directory)
        except OSError as error:
            self._warn(f"no checkpoint can be written to {self.directory}", error)

    @property
    def is_busy(self) -> bool:
        """True while a checkpoint is being written."""
        return self._last is not None and not self._last.done()

    def write(self, step: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint, after `step` finished steps, in the background. Returns at once.

        The state belongs to the writer until it is written: pass a copy. `torch.load(weights_only=True)` must be able
        to load it: tensors, numbers, strings, and lists and dicts of them.
        """
        self._last = self._thread.submit(functools.partial(self._write, step, state))

    def flush(self, seconds: float) -> bool:
        """Wait until nothing is left to write. Returns False if something is, after that many seconds."""
        return self._last is None or is_done_within(self._last, seconds)

    def close(self) -> None:
        """The process ends: wait until nothing is left to write, but not long."""
        self.flush(_EXIT_SECONDS)

    # On the thread

    def _write(self, step: int, state: Mapping[str, Any]) -> None:
        try:
            self.newest = _write(self.directory, step, state)
        except Exception as error:
            self._warn(f"no checkpoint at step {step} in {self.directory}", error)
            return
        with contextlib.suppress(OSError):
            for old in [path for number, path in _found(self.directory) if number < step][_KEPT - 1 :]:
                old.unlink(missing_ok=True)

    def _warn(self, what: str, error: Exception) -> None:
        kind = error.errno if isinstance(error, OSError) else type(error)
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("%s: %s; training goes on", what, error)


def copy_of(state: Any) -> Any:
    """A deep copy, whose tensors are in host memory. Tied parameters, which are one tensor, are one in the copy."""
    copies: dict[tuple[Any, ...], torch.Tensor] = {}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return copy.deepcopy(leaf)
        if leaf.layout is not torch.strided or not leaf.numel():
            return leaf.detach().to("cpu", copy=True)
        place = (leaf.device, leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype)
        if place not in copies:
            copies[place] = leaf.detach().to("cpu", copy=True)
        return copies[place]

    whole = tree_map(copied, state)
    if hasattr(state, "_metadata"):  # versions of the modules, by which `load_state_dict` converts older states
        whole._metadata = copy.deepcopy(state._metadata)
    return whole


def newest(directory: str | os.PathLike[str]) -> tuple[int, dict[str, Any]] | None:
    """Load the newest checkpoint that is whole, into host memory. Those that are not are skipped with a warning.

    Returns the number of finished steps, and the state; None if there is no directory, or no such checkpoint. Raises
    OSError if the directory cannot be read, ValueError if the newest whole checkpoint cannot be loaded. To begin
    without it, remove it.
    """
    for step, path in _found(directory):
        try:
            with reading(path) as file:
                _check(file)
                state = torch.load(file, map_location="cpu", weights_only=True)
        except FileNotFoundError:  # a writer has removed it: there is a newer one, or an older one will do
            continue
        except Exception as error:
            # torch reads a few words of the archive that zipfile takes no notice of.
            if not isinstance(error, (OSError, zipfile.BadZipFile)) and "PytorchStreamReader" not in str(error):
                raise ValueError(f"the checkpoint {path} is whole, but torch.load cannot load it: {error}") from error
            _log.warning("the checkpoint %s is skipped: %s", path, str(error).partition("\n")[0])
            continue
        if not isinstance(state, dict):
            raise ValueError(f"{path} is no checkpoint of torchring.elastic; remove it, or use another folder")
        return step, state
    return None


def newest_step(directory: str | os.PathLike[str]) -> int | None:
    """Number of finished steps of the newest checkpoint that was written to its end.

    `newest` may load an older one: it also finds bits that have flipped.
    """
    for step, path in _found(directory):
        with contextlib.suppress(OSError), reading(path) as file:
            if zipfile.is_zipfile(file):
                return step
    return None


def _check(file: BinaryIO) -> None:
    """Raises BadZipFile if the file is damaged."""
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except Exception as error:  # of many kinds, where bits have flipped
        raise zipfile.BadZipFile(f"it was not written to its end, or is damaged ({error})") from error
    if damaged:
        raise zipfile.BadZipFile(f"{damaged} in it is damaged")
    file.seek(0)


def _write(directory: Path, step: int, state: Mapping[str, Any]) -> Path:
    path = directory / f"step-{step:09}.pt"
    with replacing(path, "wb+") as file:
        has_sums = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(True)
        try:
            torch.save(dict(state), file)
        except RuntimeError as error:  # torch's, in place of the system's own
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
        finally:
            torch.serialization.set_crc32_options(has_sums)
        file.seek(0)  # flushes
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(cast("BinaryIO", file))
        if unsafe:
            raise TypeError(
                f"the state holds {', '.join(sorted(unsafe))}, which torch.load(weights_only=True) does not load; "
                "keep numbers, strings, tensors, lists and dicts in it"
            )
        os.fsync(file.fileno())
    with contextlib.suppress(OSError):  # some file systems cannot
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return path


def _remove_torn(directory: Path) -> None:
    """Remove temporary files that nobody writes any more."""
    for path in directory.glob(".step-*.pt.*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _TORN_SECONDS:
                path.unlink()


def _found(directory: str | os.PathLike[str]) -> list[tuple[int, Path]]:
    """Step and path of each checkpoint, the newest first."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    matches = filter(None, map(_NAME.fullmatch, names))
    return sorted(((int(match[1]), Path(directory, match[0])) for match in matches), reverse=True)
