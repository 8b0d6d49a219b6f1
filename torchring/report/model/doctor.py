"""Reads bandwidths that `torchring doctor` has measured between ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from torchring.observe.recorder.files import TraceError
from torchring.report.model.buckets import BETWEEN_HOSTS, WITHIN_HOST, bus_bytes

_SHARED_MEMORY: Final = "shared memory"


def bus_bandwidths(file: Path) -> dict[str, float]:
    """Bus bandwidth in GB/s by path, as `torchring doctor --json > file` has found it: the slowest of each kind.

    Raises TraceError.
    """
    try:
        report = json.loads(file.read_text())
        found: dict[str, float] = {}
        for path in report["paths"]:
            is_shared = path["kind"] == _SHARED_MEMORY
            # In shared memory the doctor has timed an all-reduce, elsewhere messages in both directions.
            factor = bus_bytes(1.0, len(path["ranks"])) if is_shared else 1.0
            name = WITHIN_HOST if is_shared else BETWEEN_HOSTS
            found[name] = min(found.get(name, float("inf")), factor * float(path["gigabytes_per_second"]))
        return found
    except OSError as error:
        raise TraceError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{file} is no report of `torchring doctor --json`: {error}") from error
