"""Checkpoints: whole or not there, whatever happens to the writer, the disk or the file."""

import contextlib
import itertools
import multiprocessing
import os
import random
import resource
import shutil
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.checks import assert_bitwise, logged
from torchring.elastic.worker.checkpoint import CheckpointWriter, copy_of, newest, newest_step

_PATIENCE_SECONDS = 60.0
_FORK = multiprocessing.get_context("fork")  # torch is there already


def _state(step: int, numel: int = 8) -> dict[str, Any]:
    return {"weights": torch.full((numel,), float(step)), "numbers": [step, "text", 0.5], "nested": {7: (True, None)}}


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def _write(writer: CheckpointWriter, step: int, state: dict[str, Any]) -> Path:
    writer.write(step, state)
    assert writer.flush(_PATIENCE_SECONDS)
    assert writer.newest is not None
    return writer.newest


class _Gate:
    """Holds the writer up in the middle of a checkpoint."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        self.reached.set()
        assert self.opened.wait(_PATIENCE_SECONDS)
        return OrderedDict, ()


def test_checkpoints_are_files_of_torch_save_with_checksums(tmp_path: Path) -> None:
    directory = tmp_path / "made" / "here"
    writer = CheckpointWriter(directory)
    assert newest(directory) is None
    assert newest_step(directory) is None
    writer.write(123, _state(123))
    assert writer.flush(_PATIENCE_SECONDS)
    assert _names(directory) == ["step-000000123.pt"]
    assert writer.newest == directory / "step-000000123.pt"
    step, state = newest(directory) or (0, {})
    assert step == newest_step(directory) == 123
    for read in (state, torch.load(writer.newest), torch.load(writer.newest, mmap=True)):
        assert_bitwise(read.pop("weights"), torch.full((8,), 123.0))
        assert read == {"numbers": [123, "text", 0.5], "nested": {7: (True, None)}}


def test_old_checkpoints_are_removed_and_newer_ones_stay(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path)
    for step in (1, 2, 10**9, 3, 4, 5):
        _write(writer, step, _state(step))
    (tmp_path / "step-1.pt").touch()  # the user's
    assert _names(tmp_path) == [*(f"step-{n:09}.pt" for n in (3, 4, 5)), "step-1.pt", "step-1000000000.pt"]
    assert newest_step(tmp_path) == 10**9


def test_a_checkpoint_is_written_in_the_background(tmp_path: Path) -> None:
    """Meanwhile another writer takes its place, and leaves the file that is being written alone."""
    writer, gate = CheckpointWriter(tmp_path), _Gate()
    writer.write(1, {"gate": gate, **_state(1)})
    assert gate.reached.wait(_PATIENCE_SECONDS)
    torn = tmp_path / ".step-000000001.pt.0123456789abcdef.tmp"  # of a writer that was killed
    torn.touch()
    os.utime(torn, (0, 0))
    other = CheckpointWriter(tmp_path)
    assert not torn.exists()
    assert len(_names(tmp_path)) == 1
    assert writer.is_busy
    assert not writer.flush(0)
    _write(other, 4, _state(4))
    gate.opened.set()
    assert writer.flush(_PATIENCE_SECONDS)
    assert not writer.is_busy
    assert _names(tmp_path) == ["step-000000001.pt", "step-000000004.pt"]


@contextlib.contextmanager
def _child(run: Callable[[Connection], object]) -> Iterator[tuple[Any, Connection]]:
    """A forked process, and the end of a pipe into which it says something first."""
    ours, theirs = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=run, args=(theirs,), daemon=True)
    child.start()
    theirs.close()
    assert ours.poll(_PATIENCE_SECONDS)
    yield child, ours
    child.join()
    ours.close()


def test_a_writer_that_is_killed_loses_nothing_that_it_has_written(tmp_path: Path) -> None:
    moments = random.Random(0)
    written, num_torn = 0, 0

    def train_until_killed(pipe: Connection) -> None:
        torch.set_num_threads(1)  # the forked child has none of the others
        writer = CheckpointWriter(tmp_path)
        for step in itertools.count(written + 1):
            writer.write(step, _state(step, numel=300_000))
            writer.flush(_PATIENCE_SECONDS)
            pipe.send(step)

    for _ in range(12):
        with _child(train_until_killed) as (child, pipe):
            multiprocessing.connection.wait([child.sentinel], moments.uniform(0, 0.03))
            os.kill(child.pid, signal.SIGKILL)
            child.join()
            with contextlib.suppress(EOFError):
                while True:
                    written = pipe.recv()
        num_torn += any(name.endswith(".tmp") for name in _names(tmp_path))
        step, state = newest(tmp_path) or (0, {})
        assert step in (written, written + 1)
        assert_bitwise(state["weights"], torch.full((300_000,), float(step)))
        written = step
    assert num_torn > 0


def _fill_up(directory: Path) -> None:
    """A file that must not grow fails as a full disk does: in the middle, and torch hides the reason."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))


@pytest.mark.parametrize(("break_it", "reason"), [(_fill_up, "File too large"), (shutil.rmtree, "No such file")])
def test_a_checkpoint_that_cannot_be_written(break_it: Callable[[Path], object], reason: str, tmp_path: Path) -> None:
    """Is named once."""
    directory = tmp_path / "checkpoints"

    def write(pipe: Connection) -> None:
        torch.set_num_threads(1)
        with logged() as lines:
            writer = CheckpointWriter(directory)
            _write(writer, 1, _state(1))
            break_it(directory)
            for step in (2, 3):
                writer.write(step, _state(step, numel=100_000))
                assert writer.flush(_PATIENCE_SECONDS)
        pipe.send(lines)

    with _child(write) as (_, pipe):
        (line,) = pipe.recv()
    assert line.startswith(f"no checkpoint at step 2 in {directory}: ")
    assert reason in line
    assert line.endswith("; training goes on")
    if break_it is _fill_up:
        assert _names(directory) == ["step-000000001.pt"]
        assert (newest(directory) or (0,))[0] == 1


def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with logged() as lines:
        CheckpointWriter(tmp_path / "file")
    assert len(lines) == 1
    assert lines[0].startswith(f"no checkpoint can be written to {tmp_path}/file: ")
    with pytest.raises(NotADirectoryError):
        newest(tmp_path / "file")


def test_damaged_file_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = CheckpointWriter(tmp_path)
    _write(writer, 1, _state(1))
    path = _write(writer, 2, _state(2))
    whole = path.read_bytes()
    size = len(whole)
    assert newest_step(tmp_path) == 2
    for length in [*range(0, size, 97), *range(size - 30, size)]:
        path.write_bytes(whole[:length])
        assert (newest(tmp_path) or (0,))[0] == 1, length
        assert newest_step(tmp_path) == 1, length
        assert caplog.messages[-1].startswith(f"the checkpoint {path} is skipped: it was not written to its end")
    bits = random.Random(0)
    num_skipped = 0
    for position in range(0, size, 8):  # also in padding and in fields that mean nothing
        damaged = bytearray(whole)
        damaged[position] ^= 1 << bits.randrange(8)
        path.write_bytes(damaged)
        step, state = newest(tmp_path) or (0, {})
        num_skipped += step == 1
        assert_bitwise(state.pop("weights"), torch.full((8,), float(step)), str(position))
        assert state["numbers"] == [step, "text", 0.5]
    assert num_skipped > size / 24
    caplog.clear()
    path.write_bytes(whole.replace(torch.full((8,), 2.0).numpy().tobytes(), torch.ones(8).numpy().tobytes()))
    assert (newest(tmp_path) or (0,))[0] == 1
    assert caplog.messages == [f"the checkpoint {path} is skipped: archive/data/0 in it is damaged"]
    path.write_bytes(whole + b"torchring crc32 1f0c9a3e\n")  # as earlier versions wrote it
    assert (newest(tmp_path) or (0,))[0] == newest_step(tmp_path) == 2
    os.mkfifo(tmp_path / "step-999999999.pt")
    assert (newest(tmp_path) or (0,))[0] == newest_step(tmp_path) == 2
    assert caplog.messages[-1].startswith(f"the checkpoint {tmp_path}/step-999999999.pt is skipped: ")


def test_state_that_could_not_be_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """That comes out when it is written, not when it is needed."""
    writer = CheckpointWriter(tmp_path)
    for step in (1, 2):
        writer.write(step, {"path": Path("a")})
        assert writer.flush(_PATIENCE_SECONDS)
    assert len(caplog.messages) == 1
    assert "PosixPath, which torch.load(weights_only=True) does not load" in caplog.messages[0]
    assert _names(tmp_path) == []
    with torch.serialization.safe_globals([type(Path("a"))]):
        path = _write(writer, 3, {"path": Path("a")})
    with pytest.raises(ValueError, match=f"{path} is whole, but torch.load cannot load it"):
        newest(tmp_path)
    torch.save([1], path)  # another program's
    with pytest.raises(ValueError, match=r"is no checkpoint of torchring\.elastic"):
        newest(tmp_path)


def test_copy_is_deep_and_has_each_tensor_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight  # tied: two tensors of a state_dict, one memory
    strided, sparse, numbers = torch.arange(12.0).reshape(3, 4).t(), torch.eye(3).to_sparse(), [1, 2]
    more = [strided, sparse, model[0].bias, torch.empty(0, 2)]
    copied = copy_of({"model": model.state_dict(), "more": more, "numbers": {"a": numbers}})
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    nn.init.zeros_(model[0].weight)
    numbers.append(3)
    for name, value in expected.items():
        assert_bitwise(copied["model"][name], value, name)
    assert copied["model"]["0.weight"] is copied["model"]["1.weight"]
    assert copied["more"][2] is copied["model"]["0.bias"]
    assert type(copied["more"][2]) is torch.Tensor
    assert_bitwise(copied["more"][0], strided)
    assert_bitwise(copied["more"][1].to_dense(), torch.eye(3))
    assert copied["more"][3].shape == (0, 2)
    assert copied["numbers"] == {"a": [1, 2]}
