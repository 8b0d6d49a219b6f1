"""Checkpoints of an elastic job: files that are whole or not there, written while training goes on.

A checkpoint is `step-000000123.pt`, as `torch.save` writes it, and then one line of text:

    torchring crc32 1f0c9a3e

`torch.load` takes no notice of the line. It takes no notice of flipped bits either, so `newest` checks the sum first.
A file gets its name only when all of it is on the disk. Until then its name ends in `.tmp`, and its writer has it
locked: nobody locks the file of a writer that was killed, so the next writer removes that file.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import os
import pickle
import re
import secrets
import threading
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import torch
from torch import Tensor, nn

from torchring.threads import end_at_exit

_log: Final = logging.getLogger("torchring.elastic")
_NAME: Final = re.compile(r"step-(\d{9,})\.pt")
_TEMPORARY: Final = re.compile(r"step-\d{9,}\.\d+-[0-9a-f]{8}\.tmp")
_LAST_LINE: Final = b"torchring crc32 %08x\n"
_LAST_LINE_BYTES: Final = len(_LAST_LINE % 0)
_BLOCK_BYTES: Final = 2**20
_EXIT_SECONDS: Final = 10.0


class CheckpointWriter:
    """Writes checkpoints into a directory, one at a time, on a thread that lives while there is something to write.

    Where a checkpoint cannot be written, training goes on. The first failure of each kind is a warning in
    `logging.getLogger("torchring.elastic")`.

    The methods may be called from any thread of the process that made the writer. Several writers may write to the same
    directory.

    Args:
        directory: is made if it is not there. What writers that were killed have left there is removed.
        keep: number of checkpoints, the newest included, that stay. Older ones go once the newest is on the disk.

    Attributes:
        newest: path of the newest checkpoint that this writer has written.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.directory = Path(directory)
        self._keep = keep
        self.newest: Path | None = None
        self._changed = threading.Condition()  # guards what follows
        self._waiting: tuple[int, dict[str, Any]] | None = None
        self._thread: threading.Thread | None = None  # while there is something to write
        self._spare: dict[str, Any] | None = None  # a copy that nobody reads any more
        self._warned: set[object] = set()
        self._writing = threading.Lock()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            _remove_torn(self.directory)
        except OSError as error:
            self._warn(f"no checkpoint can be written to {self.directory}", error)

    def copy_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Like the function `copy_of`, in the memory of a copy that has been written. Pass the copy to `write` only."""
        with self._changed:
            spare, self._spare = self._spare, None
        return copy_of(state, spare)

    def write(self, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint in the background. Returns at once.

        If another one is being written, this one waits, and replaces an older one that waits.

        Args:
            step: number of finished steps.
            state: belongs to the writer from now on: pass a copy. `torch.load(weights_only=True)` must be able to load
                it: tensors, numbers, strings, and lists and dicts of them.
        """
        with self._changed:
            if self._waiting is not None:
                self._spare = self._waiting[1]
            self._waiting = step, state
            if self._thread is None:
                # A daemon: a disk that hangs must not keep the process from ending.
                self._thread = threading.Thread(target=self._work, name="torchring-checkpoint", daemon=True)
                self._thread.start()
                end_at_exit(self, self._thread)

    def flush(self, seconds: float) -> bool:
        """Wait until nothing is left to write. Returns False if something is, after that many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, seconds)

    def close(self) -> None:
        """The process ends: wait until nothing is left to write, but not long."""
        self.flush(_EXIT_SECONDS)

    def write_now(self, step: int, state: Mapping[str, Any]) -> Path:
        """Write a checkpoint, after the one that is being written if there is one. Returns its path.

        Raises:
            OSError: the disk is full, or the like. The directory is as before.
            TypeError: the state holds what `torch.load(weights_only=True)` would refuse.
        """
        with self._writing:
            path = _write(self.directory, step, state)
            self.newest = path
        with contextlib.suppress(OSError):
            for old in [path for number, path in _found(self.directory) if number < step][self._keep - 1 :]:
                old.unlink(missing_ok=True)
        return path

    def _work(self) -> None:
        while True:
            with self._changed:
                if self._waiting is None:
                    self._thread = None
                    self._changed.notify_all()
                    return
                (step, state), self._waiting = self._waiting, None
            try:
                self.write_now(step, state)
            except Exception as error:
                self._warn(f"no checkpoint at step {step} in {self.directory}", error)
            with self._changed:
                self._spare = state

    def _warn(self, what: str, error: Exception) -> None:
        kind = error.errno if isinstance(error, OSError) else type(error)
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("%s: %s; training goes on", what, error)


def copy_of(state: Mapping[str, Any], spare: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A deep copy of a state, whose tensors are contiguous and in host memory.

    Views of the same memory become views of the same copy only if they are equal, as tied parameters are.

    Args:
        state: anything that can be pickled, by name.
        spare: an earlier copy that is not needed any more: its memory is used again. Fresh memory takes the system
            longer to hand out than the copying takes.

    Raises:
        TypeError: something cannot be pickled. The message names the entry.
    """
    copies = _Copies(spare or {})
    copied: dict[str, Any] = {}
    for name, value in state.items():
        try:
            copied[name] = copies.of(value)
        except Exception as error:  # pickling calls code of the value's class
            raise TypeError(f"{name!r} in the state cannot be copied: {error}") from error
    return copied


def newest(directory: str | os.PathLike[str]) -> tuple[int, dict[str, Any]] | None:
    """Load the newest checkpoint that is whole, into host memory. Those that are not are skipped with a warning.

    Returns:
        The number of finished steps, and the state. None if there is no directory, or no such checkpoint.

    Raises:
        OSError: the directory cannot be read.
        ValueError: the newest whole checkpoint cannot be loaded. To begin without it, remove it.
    """
    for step, path in _found(directory):
        try:
            with path.open("rb") as file:
                _check(file)
                file.seek(0)
                state = torch.load(file, map_location="cpu", weights_only=True)
        except FileNotFoundError:  # a writer has removed it: there is a newer one, or an older one will do
            continue
        except (OSError, _DamagedError) as error:
            _log.warning("the checkpoint %s is skipped: %s", path, error)
            continue
        except Exception as error:
            raise ValueError(f"the checkpoint {path} is whole, but torch.load cannot load it: {error}") from error
        return step, state
    return None


def newest_step(directory: str | os.PathLike[str]) -> int | None:
    """Number of finished steps of the newest checkpoint that was written to its end. Reads one line of it.

    `newest` may load an older one: it also finds bits that have flipped.
    """
    for step, path in _found(directory):
        with contextlib.suppress(OSError, _DamagedError), path.open("rb") as file:
            _sum_at_end(file)
            return step
    return None


class _DamagedError(Exception):
    """The file is not as it was written."""


class _Summed:
    """A file for `torch.save` that sums what it writes, and keeps the error that torch hides behind one of its own."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sum = 0
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        self.sum = zlib.crc32(data, self.sum)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def _write(directory: Path, step: int, state: Mapping[str, Any]) -> Path:
    path = directory / f"step-{step:09}.pt"
    temporary = directory / f"{path.stem}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    try:
        with temporary.open("xb+") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            summed = _Summed(file)
            try:
                torch.save(dict(state), summed)  # type: ignore[arg-type]
            except Exception as error:
                raise (summed.error or error) from None
            file.write(_LAST_LINE % summed.sum)
            file.seek(0)  # flushes
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file)
            if unsafe:
                raise TypeError(
                    f"the state holds {', '.join(sorted(unsafe))}, which torch.load(weights_only=True) does not load; "
                    "keep numbers, strings, tensors, lists and dicts in it"
                )
            os.fsync(file.fileno())
            temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # some file systems cannot
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return path


def _remove_torn(directory: Path) -> None:
    """Remove temporary files that no living process writes."""
    for path in directory.iterdir():
        if _TEMPORARY.fullmatch(path.name):
            with contextlib.suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def _found(directory: str | os.PathLike[str]) -> list[tuple[int, Path]]:
    """Step and path of each checkpoint, the newest first."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    matches = filter(None, map(_NAME.fullmatch, names))
    return sorted(((int(match[1]), Path(directory, match[0])) for match in matches), reverse=True)


def _check(file: BinaryIO) -> None:
    expected, left = _sum_at_end(file)
    file.seek(0)
    found = 0
    while left and (block := file.read(min(left, _BLOCK_BYTES))):
        found = zlib.crc32(block, found)
        left -= len(block)
    if found != expected:
        raise _DamagedError(f"its sum is {found:08x}, but {expected:08x} was written")


def _sum_at_end(file: BinaryIO) -> tuple[int, int]:
    """The sum that the last line holds, and the number of bytes before the line."""
    size = file.seek(0, os.SEEK_END) - _LAST_LINE_BYTES
    if size >= 0:
        file.seek(size)
        line = file.read()
        with contextlib.suppress(ValueError):
            written = int(line[-9:-1], 16)
            if line == _LAST_LINE % written:
                return written, size
    raise _DamagedError("its end is missing")


class _Copies:
    """Pickles a value without its tensors, which it copies instead."""

    def __init__(self, spare: Mapping[str, Any]) -> None:
        self._made: list[Tensor] = []
        self._numbers: dict[_Elements, int] = {}
        self._read: list[Tensor] = []  # as long as they live, no other tensor gets their memory
        self._free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        seen: set[int] = set()
        for tensor in _tensors(spare):
            if _is_plain(tensor) and tensor.device.type == "cpu" and tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                self._free.setdefault((tensor.shape, tensor.dtype), []).append(tensor)

    def of(self, value: Any) -> Any:
        data = io.BytesIO()
        pickler = _Pickler(data)
        pickler.copies = self
        pickler.dump(value)
        data.seek(0)
        unpickler = _Unpickler(data)
        unpickler.copies = self
        return unpickler.load()

    def number(self, tensor: Tensor) -> int:
        tensor = tensor.detach()
        elements = _Elements.of(tensor) if _is_strided(tensor) else None
        number = None if elements is None else self._numbers.get(elements)
        if number is None:
            number = len(self._made)
            self._made.append(self._copy(tensor))
            self._read.append(tensor)
            if elements is not None:
                self._numbers[elements] = number
        return number

    def numbered(self, number: int) -> Tensor:
        return self._made[number]

    def _copy(self, tensor: Tensor) -> Tensor:
        if not _is_strided(tensor):
            return tensor.cpu().clone()
        free = self._free.get((tensor.shape, tensor.dtype))
        own = free.pop() if free else torch.empty(tensor.shape, dtype=tensor.dtype)
        return own.copy_(tensor)


class _Pickler(pickle.Pickler):
    copies: _Copies

    def persistent_id(self, obj: Any) -> int | None:
        return self.copies.number(obj) if isinstance(obj, Tensor) else None


class _Unpickler(pickle.Unpickler):
    copies: _Copies

    def persistent_load(self, pid: int) -> Tensor:
        return self.copies.numbered(pid)


class _Elements(NamedTuple):
    """Equal for views of the same elements."""

    device: torch.device
    address: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Elements | None:
        if tensor.numel() == 0:  # all have the same address
            return None
        return cls(tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized and type(tensor) in (Tensor, nn.Parameter)


def _is_plain(tensor: Tensor) -> bool:
    """Return True if the tensor owns its memory, and has no gaps."""
    is_own = _is_strided(tensor) and tensor.is_contiguous() and not tensor.requires_grad
    return is_own and tensor.numel() > 0 and tensor.untyped_storage().nbytes() == tensor.nbytes


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
