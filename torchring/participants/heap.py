"""Keeps memory that every step frees and allocates again with the process, up to a bound.

A gradient that is copied to a wire buffer on arrival is freed at once, and the next gradient takes its place. But glibc
returns the top of the heap to the kernel when 64 MiB of it, or less, are free, and returns blocks of more than 32 MiB
at once. Then the next gradient lies in fresh pages, each of which takes a page fault: 1.5 us per 4 KiB on a virtual
machine (an MLP of 42 M parameters: 30,000 faults, 45 ms of a step of 175 ms). A plain optimizer pays for the faults,
too.

Free memory in the middle of the heap returns to the kernel only on request. If batches vary in size, holes form between
the blocks in use. The holes grow faster, the larger the blocks are that come from the heap. So gradients of more than
64 MiB do not come from the heap, and free memory that has piled up is returned after a backward.
"""

import ctypes
import os
import platform
import time
from collections.abc import Sequence
from typing import Final

from torchring.gradients.contract import Setup
from torchring.gradients.reducer import Reducer
from torchring.gradients.reduction import Participant, Reduction

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_LARGEST: Final = 2**31 - 1  # mallopt takes an int
# glibc raises its threshold up to this value by itself, and stops doing so once a program sets the threshold.
_LEAST_MMAP_BYTES: Final = 32 << 20
_MOST_GRADIENT_BYTES: Final = 64 << 20
_SHORTEST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 60.0

_kept_bytes = 0
_largest_bytes = 0
_bound_bytes: int | None = None  # on free memory at the top of the heap; None: malloc is as it was
_lowest_bytes: int | None = None  # least resident memory after a backward since memory was last returned
_pause_seconds = _SHORTEST_PAUSE_SECONDS  # between two looks
_next_look = 0.0


class KeptMemory(Participant):
    """Keeps the memory of an optimizer's gradients on the CPU with the process."""

    def __init__(self, reducer: Reducer, setup: Setup) -> None:
        self._specs = reducer.specs  # which grow
        self._num_specs = 0
        self._keep()

    def on_reduced(self, current: Reduction) -> None:
        if len(self._specs) > self._num_specs:
            self._keep()
        give_back()

    def _keep(self) -> None:
        self._num_specs = len(self._specs)
        keep_freed([spec.numel * spec.dtype.itemsize for spec in self._specs if not spec.is_sparse])


def keep_freed(gradient_bytes: Sequence[int]) -> None:
    """Make malloc keep the memory of freed gradients for the next gradients. Does nothing without glibc.

    Args:
        gradient_bytes: size of each gradient that every step frees. Blocks up to the size of the largest gradient of at
            most 64 MiB come from the heap. The heap may keep as much free memory at its top as all those gradients
            take.

    After several calls, the largest values hold. A process that was started with thresholds of its own (MALLOC_..._
    variables, GLIBC_TUNABLES) keeps its thresholds.

    Source: mallopt(3).
    """
    global _kept_bytes, _largest_bytes, _bound_bytes
    if platform.libc_ver()[0] != "glibc" or _is_tuned():
        return
    small = [num_bytes for num_bytes in gradient_bytes if num_bytes <= _MOST_GRADIENT_BYTES]
    _kept_bytes = max(_kept_bytes, sum(small))
    _largest_bytes = max(_largest_bytes, *small, 0)
    # The margins are for a block's header and alignment, and for what else is freed while the largest gradient is free.
    largest = max(_LEAST_MMAP_BYTES, _largest_bytes + (1 << 20))
    _bound_bytes = min(_kept_bytes + 2 * largest, _LARGEST)
    mallopt = ctypes.CDLL(None).mallopt
    if not mallopt(_M_MMAP_THRESHOLD, largest):
        mallopt(_M_MMAP_THRESHOLD, _LEAST_MMAP_BYTES)  # the most that older versions of glibc take
    mallopt(_M_TRIM_THRESHOLD, _bound_bytes)


def give_back() -> None:
    """Call after a backward: return free memory to the kernel if more of it has piled up than gradients take.

    Reads the resident size at most ten times a second, which takes up to 70 us. If as much memory has piled up again,
    every step needs the memory and takes page faults for it. So each return doubles the pause until the next reading,
    up to a minute. Source: malloc_trim(3), which also returns pages in the middle of the heap.
    """
    global _lowest_bytes, _next_look, _pause_seconds
    if _bound_bytes is None or time.monotonic() < _next_look:
        return
    resident = _resident_bytes()
    if _lowest_bytes is not None and resident > _lowest_bytes + _bound_bytes:
        trim()
        _lowest_bytes = _resident_bytes()
        _pause_seconds = min(2 * _pause_seconds, _LONGEST_PAUSE_SECONDS)
    else:
        _pause_seconds = max(_pause_seconds / 2, _SHORTEST_PAUSE_SECONDS)
        if _lowest_bytes is None or resident < _lowest_bytes:
            _lowest_bytes = resident
    _next_look = time.monotonic() + _pause_seconds


def trim() -> None:
    """Return all free memory to the kernel, pages in the middle of the heap included. Takes some milliseconds."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def _resident_bytes() -> int:
    """Resident size of this process's private memory; 0 if /proc is not mounted."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            _, resident, shared, *_ = file.read().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * _PAGE_BYTES


def _is_tuned() -> bool:
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
    return any(name in os.environ for name in names) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")


_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
