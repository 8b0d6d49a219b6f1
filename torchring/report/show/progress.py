"""`torchring run --progress`: a line about the job every 10 seconds, from what its ranks write to a folder."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from torchring.report.show.top import Picture, look

_SECONDS: Final = 10.0  # between two lines


@contextlib.contextmanager
def shown(folder: Path, seconds: float = _SECONDS) -> Iterator[None]:
    """Inside, a thread writes a line to standard error each time that a rank has made steps since the last line.

    And one at the end, which a short job may have for its only one.
    """
    is_over = threading.Event()

    def run() -> None:
        last, has_ended = "", False
        while not has_ended:
            has_ended = is_over.wait(seconds)
            try:
                picture = look(folder)
            except Exception as error:  # the job goes on, and the next files may be better
                picture = Picture("", f"there is no progress to show: {type(error).__name__}: {error}")
            if (picture.is_over and not has_ended) or picture.headline in ("", last):
                continue
            last = picture.headline
            with contextlib.suppress(OSError):  # nobody reads
                os.write(sys.stderr.fileno(), f"torchring run: {last}\n".encode())

    thread = threading.Thread(target=run, name="torchring-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
