"""System calls and facts of Linux that some builds of Python, or some containers, lack.

`os` has `memfd_create` and `pidfd_open` only where Python was built against a glibc that declares them. The Pythons of
conda-forge, and those of uv until 2026, were built against glibc 2.17, which declares neither, and so lack both on
every machine that they run on. The system calls are there all the same.
"""

import ctypes
import errno
import fcntl
import os
import platform
import socket
from typing import Final

# Numbers and flags as the kernel's headers give them: `os` and `fcntl` lack the flags' names where they lack the calls.
_MEMFD_CREATE: Final = {"x86_64": 319, "aarch64": 279, "ppc64le": 360, "riscv64": 279, "s390x": 350}
_PIDFD_OPEN: Final = 434  # on all of these
_CLOSE_ON_EXEC, _ALLOW_SEALING = 0x1, 0x2
_ADD_SEALS, _SEAL_SHRINK, _SEAL_GROW = 1033, 0x2, 0x4

BEGAN: Final = 19  # of the words of /proc/PID/stat after the name: when the process began, in ticks
_PIECE_BYTES: Final = 8 << 20  # takes some milliseconds to reserve

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def create_memory(name: str, length: int) -> int:
    """A descriptor of `length` bytes of zeroed memory, `memfd:NAME` in /proc/PID/maps. Nobody can change its length.

    The memory is reserved: running out of it shows here, and not as a SIGBUS in the middle of a step. Raises OSError.
    """
    try:
        descriptor = _create(name)
    except OSError as error:
        why = error.strerror or ""
        if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS):
            why += "; allow the system call memfd_create, as in the seccomp profile of a container"
        text = f"cannot create memory to share with the other ranks of this host: {why}"
        raise OSError(error.errno, text) from error
    try:
        _reserve(descriptor, length)
        # No peer can shrink the file under a mapping and so crash the others.
        fcntl.fcntl(descriptor, _ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _create(name: str) -> int:
    flags = _CLOSE_ON_EXEC | _ALLOW_SEALING
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    if number := _MEMFD_CREATE.get(platform.machine()):
        return _call(number, ctypes.c_char_p(name.encode()), ctypes.c_uint(flags))
    raise OSError(errno.ENOSYS, f"this Python has no os.memfd_create, which {platform.machine()} needs")


def _reserve(descriptor: int, length: int) -> None:
    try:
        # In pieces: older kernels begin a call anew at each signal, and a profiler's timer would never let it end.
        for start in range(0, length, _PIECE_BYTES):
            os.posix_fallocate(descriptor, start, min(_PIECE_BYTES, length - start))
    except OSError as error:
        why = os.strerror(error.errno or 0)
        if error.errno == errno.EFBIG:
            why = "the limit on file sizes counts for it, too, and is lower; raise it with `ulimit -f unlimited`"
        text = f"cannot reserve {length / 2**20:.4g} MiB of memory to share with the other ranks of this host: {why}"
        raise OSError(error.errno, text) from error


def open_process(pid: int) -> int:
    """A descriptor that becomes readable when the process ends. Raises OSError."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _call(_PIDFD_OPEN, ctypes.c_int(pid), ctypes.c_uint(0))


def host_name() -> str:
    """The name of this machine. Bytes that are not UTF-8, which messages cannot carry, read as `\\xff`."""
    return os.fsencode(socket.gethostname()).decode(errors="backslashreplace")


def boot_id() -> str:
    """Equal for all processes that one running kernel runs; "" where /proc is not mounted."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def network_id() -> str:
    """Equal for all processes that share a loopback interface; "" where /proc is not mounted."""
    boot = boot_id()  # two kernels may give a namespace the same number
    try:
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}" if boot else ""
    except OSError:
        return ""


def _call(number: int, *arguments: object) -> int:
    descriptor: int = _libc.syscall(ctypes.c_long(number), *arguments)
    if descriptor < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return descriptor


def process_id() -> str:
    """Names this process among all that there ever are. "" if /proc does not say what that takes."""
    try:
        return f"{boot_id()}/{os.stat('/proc/self/ns/pid').st_ino}/{os.getpid()}/{stat_of('self')[BEGAN]}"
    except (OSError, IndexError):
        return ""


def has_ended(process: str) -> bool:
    """Whether a process, by its `process_id`, has ended. False if it is another machine's, or another container's."""
    place, _, began = process.rpartition("/")
    here, _, number = place.rpartition("/")
    if here != process_id().rsplit("/", 2)[0] or not number.isdecimal():
        return False
    try:
        os.kill(int(number), 0)
        stat = stat_of(number)
    except ProcessLookupError:
        return True
    except OSError:  # another user's process
        return False
    return stat[0] in ("Z", "X") or stat[BEGAN] != began


def stat_of(pid: int | str) -> list[str]:
    """The words of /proc/PID/stat after the name; the first is the state of the process."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()
