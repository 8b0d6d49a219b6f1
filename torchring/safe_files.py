"""Files in folders where another user may have made files before: nothing is written or read through a link.

A new file gets a random name and replaces an older one whole, or it is made after the older one was removed. So a link
or a FIFO with the name of a file can neither redirect what is written, nor stop who opens it.
"""

import contextlib
import errno
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, Final

_warned: Final[set[Path]] = set()


def reading(path: Path) -> BinaryIO:
    """The file, open to be read. Raises OSError if it is no regular file, and does not wait for a FIFO's writer."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:  # these two are what a link, and a socket, give
        raise _special(path) if error.errno in (errno.ELOOP, errno.ENXIO) else error from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _special(path)
    return open(descriptor, "rb")


def create(path: Path) -> int:
    """A descriptor of a new file in place of an older one. Raises OSError, if `path` is no regular file, too."""
    _check(path)
    path.unlink(missing_ok=True)
    return _new(path, 0o666)


@contextlib.contextmanager
def replacing(path: Path, mode: str = "wb", newline: str | None = None, permissions: int = 0o666) -> Iterator[IO[Any]]:
    """A new file, which replaces an older one when the block ends without an error.

    Raises OSError, if `path` is no regular file, too.
    """
    _check(path)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    descriptor = _new(unfinished, permissions)
    try:
        with open(descriptor, mode, newline=newline) as file:
            yield file
            file.flush()
            unfinished.replace(path)  # a lock of the file is held until then
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def warn_of_owner(folder: Path) -> None:
    """Log a warning if the folder belongs to another user than this one and root: once, and once on each host."""
    if folder in _warned or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    _warned.add(folder)
    with contextlib.suppress(OSError):  # what comes next says so
        if (owner := folder.stat().st_uid) not in (0, os.geteuid()):
            logging.getLogger("torchring").warning(
                "the folder %s belongs to user %d, who can exchange the files in it; use a folder of your own",
                folder,
                owner,
            )


def _new(path: Path, permissions: int) -> int:
    warn_of_owner(path.parent)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, permissions)


def _check(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise _special(path)


def _special(path: Path) -> OSError:
    what = "it is a link, a pipe, a device or a folder; name another file"
    return OSError(errno.EEXIST, what, str(path))
