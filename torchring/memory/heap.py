"""Memory that is freed and wanted again in every step stays with the process.

A gradient that is copied to a wire buffer is freed the moment it has arrived, and the next one takes its place. But
glibc hands the top of the heap back to the kernel once 64 MiB or less of it are free, and blocks of more than 32 MiB at
once, so the next gradient finds zeroed pages that have to be faulted in: 1.5 us per 4 KiB on a virtual machine (MLP of
42 M parameters: 30,000 faults, 45 ms of a step of 175; a plain optimizer suffers from it, too).
"""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_LARGEST: Final = 2**31 - 1  # mallopt takes an int
# What glibc works its own way up to. Setting a threshold ends that, so less would be a step back.
_LEAST_MMAP_BYTES: Final = 32 << 20

_kept_bytes = 0
_largest_bytes = 0


def keep_freed(total_bytes: int, largest_bytes: int) -> None:
    """Have malloc keep gradients that are freed, for the next ones. Does nothing without glibc.

    Args:
        total_bytes: of all gradients that come and go. As much free memory may stay at the top of the heap.
        largest_bytes: of one of them. Blocks up to this size come from the heap.

    Called again, the larger values hold. A process that was started with thresholds of its own (MALLOC_..._ variables,
    GLIBC_TUNABLES) keeps those.

    Source: mallopt(3).
    """
    global _kept_bytes, _largest_bytes
    if platform.libc_ver()[0] != "glibc" or _is_tuned():
        return
    _kept_bytes = max(_kept_bytes, total_bytes)
    _largest_bytes = max(_largest_bytes, largest_bytes)
    # The block's header and alignment come on top, and what else is freed while the largest is free.
    largest = max(_LEAST_MMAP_BYTES, _largest_bytes + (1 << 20))
    mallopt = ctypes.CDLL(None).mallopt
    if not mallopt(_M_MMAP_THRESHOLD, min(largest, _LARGEST)):
        mallopt(_M_MMAP_THRESHOLD, _LEAST_MMAP_BYTES)  # the most that older versions take
    mallopt(_M_TRIM_THRESHOLD, min(_kept_bytes + 2 * largest, _LARGEST))


def _is_tuned() -> bool:
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
    return any(name in os.environ for name in names) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
