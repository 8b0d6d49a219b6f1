"""POSIX semaphores in memory that processes share, by which one rank tells another "I am here".

The futex word of a hand-written barrier needs a release store before the wake and an acquire load after it, which
Python cannot express; on x86 it works by luck of the architecture, on aarch64 it does not. `sem_post` and `sem_wait`
are the same futex with that ordering guaranteed (POSIX.1-2017, XBD 4.12 "Memory Synchronization"): whatever a process
wrote before `sem_post` is visible to the one whose `sem_wait` took that post. A semaphore has no owner, so a process
killed between two calls leaves nothing locked.

Calls that cannot block go through `PyDLL`, which keeps the GIL and so costs 0.1 us; the one that sleeps goes through
`CDLL`, which releases it.
"""

import ctypes
import errno
import math
import time
from typing import Final

SEMAPHORE_STRIDE: Final = 64  # bytes: sem_t is 32 on 64-bit glibc; one cache line each, so neighbours do not collide

_CLOCK_MONOTONIC: Final = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


_quick = ctypes.PyDLL(None, use_errno=True)
_blocking = ctypes.CDLL(None, use_errno=True)

_sem_init = _quick.sem_init
_sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)

post = _quick.sem_post
"""post(address): add one and wake a sleeper, if any. Releases all earlier writes of this process."""
post.argtypes = (ctypes.c_void_p,)

try_wait = _quick.sem_trywait
"""try_wait(address) -> 0 if one was taken (acquires the poster's writes), -1 if there was none."""
try_wait.argtypes = (ctypes.c_void_p,)

_sem_getvalue = _quick.sem_getvalue
_sem_getvalue.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))

give_way = _blocking.sched_yield
"""give_way(): let another thread or process run, if one wants this core. Releases the GIL."""
give_way.argtypes = ()

# sem_clockwait (glibc 2.30) is immune to clock steps. sem_timedwait is not, but callers sleep in short slices and keep
# their own monotonic deadline, so a step can only lengthen or shorten one slice.
_clock_wait = getattr(_blocking, "sem_clockwait", None)
if _clock_wait is not None:
    _clock_wait.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Timespec))
_timed_wait = _blocking.sem_timedwait
_timed_wait.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Timespec))


def initialise(address: int) -> None:
    """Make the 32 bytes at `address` a semaphore of value 0 that processes may share."""
    if _sem_init(address, 1, 0) != 0:
        raise OSError(ctypes.get_errno(), "sem_init failed")


def value(address: int) -> int:
    """Posts not yet taken. A hint for error messages; it orders no memory."""
    count = ctypes.c_int()
    _sem_getvalue(address, ctypes.byref(count))
    return count.value


def wait_for(address: int, seconds: float) -> bool:
    """Sleep until a post arrives, at most `seconds`; True if one was taken. Releases the GIL."""
    now = time.clock_gettime(time.CLOCK_MONOTONIC if _clock_wait is not None else time.CLOCK_REALTIME)
    fraction, whole = math.modf(now + seconds)
    until = _Timespec(int(whole), int(fraction * 1e9))
    if _clock_wait is not None:
        failed = _clock_wait(address, _CLOCK_MONOTONIC, ctypes.byref(until))
    else:
        failed = _timed_wait(address, ctypes.byref(until))
    if not failed:
        return True
    code = ctypes.get_errno()
    if code not in (errno.ETIMEDOUT, errno.EINTR):  # EINTR: a Python signal handler waits to run; the caller loops
        raise OSError(code, "sem_clockwait failed")
    return False
