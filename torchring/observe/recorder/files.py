"""A trace is a folder with one file per rank, `rank-00003.npz`: numpy arrays, read without pickle."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from torchring.observe.recorder.records import Arrivals, ClockOffset, ParameterRecord, RankTrace, RunInfo, decode
from torchring.safe_files import reading, replacing

FORMAT: Final = 3

_TYPES: Final[dict[str, type | tuple[type, ...]]] = {
    "int": int,
    "str": str,
    "float": (float, int),
    "dict[str, str]": dict,
}
_Record = TypeVar("_Record", RunInfo, ParameterRecord)


class TraceError(Exception):
    """A file of a trace cannot be read. The text says why."""


def path_of(folder: Path, rank: int, *, live: bool = False) -> Path:
    """Where a rank writes its trace; `live`: its newest steps, while it trains."""
    return folder / f"{'live' if live else 'rank'}-{rank:05d}.npz"


def find(folder: Path, *, live: bool = False) -> dict[int, Path]:
    """The files of a trace, by rank; `live`: those that ranks write while they train. Raises OSError."""
    pattern = re.compile(rf"{'live' if live else 'rank'}-(\d+)\.npz")
    matches = ((pattern.fullmatch(path.name), path) for path in folder.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def write(path: Path, trace: RankTrace, steps: Sequence[Sequence[int]]) -> Path:
    """Write a file, whole or not at all, over an older one. `steps`: rows of `trace.steps`. Raises OSError."""
    # Parameters may have been added since.
    arrivals = [each for each in trace.arrivals if len(each.ready_ns) == len(trace.run_info.parameters)]
    run_info = {"format": FORMAT, "num_dropped": trace.num_dropped, **dataclasses.asdict(trace.run_info)}
    arrays = {
        "about": np.frombuffer(json.dumps(run_info).encode(), np.uint8),
        "step_lengths": np.array([len(step) for step in steps], np.int64),
        "steps": np.concatenate([np.asarray(step, np.int64) for step in steps] or [np.empty(0, np.int64)]),
        "arrivals": np.array([(a.step, a.backward_ns, *a.ready_ns) for a in arrivals], np.int64),
        "clock": np.array([dataclasses.astuple(each) for each in trace.clock], np.int64),
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


def _parse(run_info: dict[str, Any], arrays: Mapping[str, Any]) -> RankTrace:
    if run_info.pop("format") != FORMAT:
        raise TraceError(f"it was written by torchring {run_info['versions'].get('torchring', '?')}, in another format")
    ends = np.cumsum(arrays["step_lengths"])
    steps = arrays["steps"]
    if len(steps) != (ends[-1] if len(ends) else 0):
        raise ValueError("steps are missing")
    num_dropped = run_info.pop("num_dropped")
    run_info["parameters"] = tuple(_typed(ParameterRecord(**each)) for each in run_info["parameters"])
    return RankTrace(
        _typed(RunInfo(**run_info)),
        tuple(decode(part.tolist()) for part in np.split(steps, ends[:-1]) if len(part)),
        num_dropped,
        tuple(Arrivals(step, length, tuple(ready)) for step, length, *ready in arrays["arrivals"].tolist()),
        tuple(ClockOffset(*each) for each in arrays["clock"].tolist()),
    )


def _typed(record: _Record) -> _Record:
    """The record. Raises TypeError if a text, a number or a dictionary of it is something else."""
    for each in dataclasses.fields(record):
        value, type_ = getattr(record, each.name), _TYPES.get(str(each.type))
        if type_ is not None and (not isinstance(value, type_) or isinstance(value, bool)):
            raise TypeError(f"{each.name} is {value!r:.40}")
    return record
