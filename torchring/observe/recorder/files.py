"""A trace is a folder with one file per rank, `rank-00003.npz`: numpy arrays, read without pickle."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from torchring.observe.recorder.records import Arrivals, ClockOffset, ParameterRecord, RankTrace, RunInfo, decode
from torchring.safe_files import reading, replacing

FORMAT: Final = 7


class TraceError(Exception):
    """A file of a trace cannot be read. The text says why."""


def path_of(folder: Path, rank: int) -> Path:
    """Where a rank writes its trace."""
    return folder / f"rank-{rank:05d}.npz"


def find(folder: Path) -> dict[int, Path]:
    """The files of a trace, by rank. Raises OSError."""
    matches = ((re.fullmatch(r"rank-(\d+)\.npz", path.name), path) for path in folder.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def write(path: Path, trace: RankTrace, steps: Sequence[Sequence[int]]) -> Path:
    """Write a file, whole or not at all, over an older one. `steps`: rows of `trace.steps`. Raises OSError."""
    about = {"format": FORMAT, **vars(trace.run_info), "arrivals": trace.arrivals, "clock": trace.clock}
    about["samples"] = trace.samples
    arrays = {
        "about": np.frombuffer(json.dumps(about).encode(), np.uint8),
        "step_lengths": np.array([len(step) for step in steps], np.int64),
        "steps": np.concatenate([np.asarray(step, np.int64) for step in steps] or [np.empty(0, np.int64)]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # numpy's stubs take the arrays for its options
    return path


def read(path: Path) -> RankTrace:
    """Read a rank's file. Raises TraceError if it is torn, or of another version."""
    try:
        with reading(path) as file, np.load(file, allow_pickle=False) as arrays:
            return _parse(_printable(json.loads(bytes(arrays["about"]))), arrays)
    except TraceError:
        raise
    except Exception as error:  # of zipfile, numpy, json and others, which do not say what they raise for damaged files
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceError(f"{path} is torn, or no trace: {_printable(reason)}") from error


def _printable(value: Any) -> Any:
    """The same without characters that a terminal would obey, or that change the direction of text."""
    if isinstance(value, str):
        return "".join(each if each.isprintable() else " " if each.isspace() else "\ufffd" for each in value)
    if isinstance(value, dict):
        return {_printable(key): _printable(each) for key, each in value.items()}
    return [_printable(each) for each in value] if isinstance(value, list) else value


def _parse(about: dict[str, Any], arrays: Mapping[str, Any]) -> RankTrace:
    if about.pop("format") != FORMAT:
        raise TraceError(f"it was written by torchring {about['versions'].get('torchring', '?')}, in another format")
    ends, steps = np.cumsum(arrays["step_lengths"]), arrays["steps"]
    if len(steps) != (ends[-1] if len(ends) else 0):
        raise ValueError("steps are missing")
    arrivals = tuple(Arrivals(length, tuple(ready), optimizer) for length, ready, optimizer in about.pop("arrivals"))
    clock = tuple(ClockOffset(*each) for each in about.pop("clock"))
    samples = tuple(map(tuple, about.pop("samples", ())))
    about["parameters"] = tuple(ParameterRecord(*each) for each in about["parameters"])
    steps = tuple(decode(row.tolist()) for row in np.split(steps, ends[:-1]) if len(row))
    return RankTrace(RunInfo(**about), steps, arrivals, clock, samples)
