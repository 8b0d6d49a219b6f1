"""Horovod's timeline: a file for chrome://tracing, in which every operation has a row. Rank 0 writes it.

A row shows when each rank has asked for the operation (NEGOTIATE_...), and when it was carried out. The file is valid
JSON after each event.

Source: the Trace Event Format of Chromium, and the names of Horovod's events.
"""

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from torchring.horovod.negotiation import Request
from torchring.safe_files import create

_END: Final = "\n]\n"


class Timeline:
    """The file, which is overwritten. For any thread."""

    def __init__(self, path: str, *, mark_cycles: bool) -> None:
        self._file = open(create(Path(path)), "w")  # noqa: SIM115 - closed by `close`
        self._mark_cycles = mark_cycles
        self._rows: dict[str, int] = {}
        self._negotiating: set[str] = set()
        self._lock = threading.RLock()  # a signal handler may close this
        self._started_ns = time.monotonic_ns()
        now_us = time.time_ns() // 1000
        first = {"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": now_us}}
        self._file.write(f"[\n{json.dumps(first)}{_END}")

    def submitted(self, request: Request) -> None:
        """This rank asks for an operation."""
        with self._lock:
            if request.name not in self._negotiating:
                self._negotiating.add(request.name)
                self._add(request, "B", name=f"NEGOTIATE_{request.kind.upper()}")

    def cycle(self, submitted: Sequence[Sequence[Request]]) -> None:
        """A negotiation cycle: the new requests of each rank."""
        with self._lock:
            if self._mark_cycles:
                self._write({"name": "CYCLE_START", "ph": "i", "s": "g", "pid": 0, "ts": self._now_us()})
            for rank, requests in enumerate(submitted):
                for request in requests:
                    self.submitted(request)
                    self._add(request, "X", name=str(rank), dur=0)

    def begin(self, requests: Sequence[Request]) -> None:
        """Operations are carried out together from now on."""
        with self._lock:
            for request in requests:
                if request.name in self._negotiating:
                    self._negotiating.discard(request.name)
                    self._add(request, "E")
                self._add(request, "B", name=request.kind.upper())

    def end(self, requests: Sequence[Request]) -> None:
        """Operations have been carried out."""
        with self._lock:
            for request in requests:
                tensors = [f"{dtype} {list(shape)}" for dtype, shape in request.tensors]
                self._add(request, "E", args={"tensors": tensors})

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _add(self, request: Request, phase: str, **event: Any) -> None:
        if (row := self._rows.get(request.name)) is None:
            self._rows[request.name] = row = len(self._rows) + 1
            self._write({"name": "process_name", "ph": "M", "pid": row, "args": {"name": request.name}})
            self._write({"name": "process_sort_index", "ph": "M", "pid": row, "args": {"sort_index": row}})
        self._write({"ph": phase, "pid": row, "ts": self._now_us(), **event})

    def _now_us(self) -> int:
        return (time.monotonic_ns() - self._started_ns) // 1000

    def _write(self, event: dict[str, Any]) -> None:
        if self._file.closed:
            return
        try:
            self._file.seek(self._file.seek(0, os.SEEK_END) - len(_END))
            self._file.write(f",\n{json.dumps(event)}{_END}")
            self._file.flush()
        except OSError as error:  # training goes on without it
            logging.getLogger("torchring").warning("the timeline ends here: %s", error)
            with contextlib.suppress(OSError):
                self._file.close()
