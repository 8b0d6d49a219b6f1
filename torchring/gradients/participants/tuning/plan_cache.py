"""Keeps the buckets that were found for a model, so that the next start has them at once. One small file for each.

The name of a file is a digest of all that the buckets were found for: parameters, options, ranks, versions, cores. What
is read is not trusted: a file may be torn, or changed by hand, so whoever reads it checks that it fits.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from torchring.releases import installed_version

_logger: Final = logging.getLogger("torchring")
_FORMAT: Final = 2


@dataclass(frozen=True)
class FoundBuckets:
    """What was found out about the buckets of a model.

    Attributes:
        groups: parameters of each bucket, by index; None if the default is as good.
        compression: the 16-bit dtype in which gradients travel, as in `wrap`; None: their own dtype.
        text: what was measured, as a clause.
    """

    groups: list[list[int]] | None
    compression: str | None
    text: str

    def encode(self) -> bytes:
        return json.dumps({"format": _FORMAT, **asdict(self)}).encode()

    @staticmethod
    def decode(data: bytes) -> FoundBuckets:
        """Raises ValueError unless `encode` may have written this."""
        content: Any = json.loads(data)
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError("it has another format")
        groups, compression, text = (content.get(name) for name in ("groups", "compression", "text"))
        are_groups = isinstance(groups, list) and all(
            isinstance(group, list) and all(type(index) is int for index in group) for group in groups
        )
        if not isinstance(text, str) or not (groups is None or are_groups):
            raise ValueError("it has no buckets")
        if compression is not None and not isinstance(compression, str):
            raise ValueError("its compression is no name")
        return FoundBuckets(groups, compression, text)


def folder_of_plans() -> Path:
    """`$TORCHRING_CACHE/plans`; by default, `~/.cache/torchring/plans`. Raises RuntimeError if there is no home."""
    own, shared = os.environ.get("TORCHRING_CACHE"), os.environ.get("XDG_CACHE_HOME")
    base = Path(own) if own else (Path(shared) if shared else Path.home() / ".cache") / "torchring"
    return base / "plans"


def file_for(lines: Sequence[str]) -> Path:
    """Where the buckets are kept that were found for what `lines` describe. Raises RuntimeError if there is no home."""
    digest = hashlib.sha256(json.dumps([installed_version("torchring") or "", *lines]).encode()).hexdigest()
    return folder_of_plans() / f"{digest[:32]}.json"


def read(lines: Sequence[str]) -> bytes:
    """What was kept; empty if there is nothing."""
    try:
        return file_for(lines).read_bytes()
    except FileNotFoundError:
        return b""
    except (OSError, RuntimeError) as error:
        _logger.debug("buckets of earlier runs cannot be read: %s", error)
        return b""


def write(lines: Sequence[str], found: FoundBuckets) -> None:
    """Keep what was found, if that is possible. Another process sees the whole file or none."""
    temporary = ""
    try:
        file = file_for(lines)
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".")
        with os.fdopen(handle, "wb") as stream:
            stream.write(found.encode())
        Path(temporary).replace(file)
    except (OSError, RuntimeError) as error:
        _logger.debug("buckets cannot be kept for the next run: %s", error)
        if temporary:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
