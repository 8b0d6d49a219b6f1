"""Memory that is freed and wanted again in every step stays with the process, up to a bound.

A gradient that is copied to a wire buffer is freed the moment it has arrived, and the next one takes its place. But
glibc hands the top of the heap back to the kernel once 64 MiB or less of it are free, and blocks of more than 32 MiB at
once, so the next gradient finds zeroed pages that have to be faulted in: 1.5 us per 4 KiB on a virtual machine (MLP of
42 M parameters: 30,000 faults, 45 ms of a step of 175; a plain optimizer suffers from it, too).

Memory in the middle of the heap goes back to the kernel only if somebody asks for it. Where batches vary in size, holes
form between what is in use, and the larger the blocks that come from the heap, the faster they grow. So gradients of
more than 64 MiB do not come from the heap, and what has piled up all the same is given back after a backward.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Sequence
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_LARGEST: Final = 2**31 - 1  # mallopt takes an int
# What glibc works its own way up to. Setting a threshold ends that, so less would be a step back.
_LEAST_MMAP_BYTES: Final = 32 << 20
_MOST_GRADIENT_BYTES: Final = 64 << 20
_SHORTEST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 60.0

_kept_bytes = 0
_largest_bytes = 0
_bound_bytes: int | None = None  # of free memory; None: malloc is as it was
_lowest_bytes: int | None = None  # resident after a backward, at the least, since memory was last given back
_pause_seconds = _SHORTEST_PAUSE_SECONDS  # between two looks
_next_look = 0.0


def keep_freed(gradient_bytes: Sequence[int]) -> None:
    """Have malloc keep gradients that are freed, for the next ones. Does nothing without glibc.

    Args:
        gradient_bytes: of each gradient that comes and goes. Blocks up to the largest of at most 64 MiB come from the
            heap, and as much free memory as all of those take may stay at its top.

    Called again, the larger values hold. A process that was started with thresholds of its own (MALLOC_..._ variables,
    GLIBC_TUNABLES) keeps those.

    Source: mallopt(3).
    """
    global _kept_bytes, _largest_bytes, _bound_bytes
    if platform.libc_ver()[0] != "glibc" or _is_tuned():
        return
    small = [num_bytes for num_bytes in gradient_bytes if num_bytes <= _MOST_GRADIENT_BYTES]
    _kept_bytes = max(_kept_bytes, sum(small))
    _largest_bytes = max(_largest_bytes, *small, 0)
    # The block's header and alignment come on top, and what else is freed while the largest is free.
    largest = max(_LEAST_MMAP_BYTES, _largest_bytes + (1 << 20))
    _bound_bytes = min(_kept_bytes + 2 * largest, _LARGEST)
    mallopt = ctypes.CDLL(None).mallopt
    if not mallopt(_M_MMAP_THRESHOLD, largest):
        mallopt(_M_MMAP_THRESHOLD, _LEAST_MMAP_BYTES)  # the most that older versions take
    mallopt(_M_TRIM_THRESHOLD, _bound_bytes)


def give_back() -> None:
    """Call after a backward: return free memory to the kernel if more of it has piled up than gradients take.

    Looks no more than ten times a second; a look takes up to 70 us. Where a look after giving back finds as much again,
    every step needs the memory, and faults it in again. So the pause until the next look doubles each time, up to a
    minute. Source: malloc_trim(3), which gives back pages in the middle of the heap, too.
    """
    global _lowest_bytes, _next_look, _pause_seconds
    if _bound_bytes is None or time.monotonic() < _next_look:
        return
    resident = _resident_bytes()
    if _lowest_bytes is not None and resident > _lowest_bytes + _bound_bytes:
        ctypes.CDLL(None).malloc_trim(0)
        _lowest_bytes = _resident_bytes()
        _pause_seconds = min(2 * _pause_seconds, _LONGEST_PAUSE_SECONDS)
    else:
        _pause_seconds = max(_pause_seconds / 2, _SHORTEST_PAUSE_SECONDS)
        if _lowest_bytes is None or resident < _lowest_bytes:
            _lowest_bytes = resident
    _next_look = time.monotonic() + _pause_seconds


def _resident_bytes() -> int:
    """Of this process's own memory; 0 where /proc is not mounted."""
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
