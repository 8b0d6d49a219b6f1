"""Whether an engine's TCP connection to a peer is still open. Nothing is sent to find out.

Sending would do harm: where the peer has exited after its last message, its kernel answers with a reset, and what is
still on its way here is thrown away. An engine that has read everything, the end included, closes its socket; so this
looks whether the socket is still there.

The engine does not say which sockets are its own. Those that appeared while it connected are candidates, and the two
ends of a connection know each other's addresses: each rank tells the others which ends it found.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_DIGEST_BYTES: Final = 8
_LAST_RECEIVED: Final = struct.Struct("=52x2I")  # in Linux's struct tcp_info: milliseconds since data, since an ACK


def open_sockets() -> dict[int, int]:
    """This process's sockets: inode by file descriptor. None where there is no /proc."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found[int(name)] = status.st_ino
    return found


@dataclass(frozen=True)
class _Link:
    """This process's end of a connection; the descriptor is the engine's."""

    descriptor: int
    inode: int

    def is_open(self) -> bool:
        try:
            return os.fstat(self.descriptor).st_ino == self.inode
        except OSError:
            return False

    def seconds_silent(self) -> float | None:
        """Since data came, or what was sent was acknowledged; None if it is closed, or the kernel does not say."""
        try:
            with _borrowed(self.descriptor) as copy:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            milliseconds = min(_LAST_RECEIVED.unpack_from(info))
        except (OSError, struct.error):
            return None
        return milliseconds / 1000 if self.is_open() else None


class Links:
    """The connections that an engine has just made to its peers.

    Args:
        before: `open_sockets()` from before the engine connected.
    """

    def __init__(self, before: Mapping[int, int]) -> None:
        self._ends: dict[tuple[bytes, bytes], _Link] = {}  # by digests of this end and of the other one
        self._of_peer: dict[int, _Link] = {}
        for descriptor, inode in open_sockets().items():
            if before.get(descriptor) != inode and (end := _end(descriptor)) is not None:
                self._ends[end] = _Link(descriptor, inode)

    def own_ends(self) -> bytes:
        """Digests of this process's ends, by which the peers find theirs."""
        return b"".join(mine for mine, _ in self._ends)

    def match(self, rank: int, ends: Sequence[bytes]) -> None:
        """Find out which end is connected to which peer.

        Args:
            rank: this rank.
            ends: `own_ends` of every rank, in rank order.
        """
        owners: dict[bytes, set[int]] = {}
        for other, digests in enumerate(ends):
            for start in range(0, len(digests), _DIGEST_BYTES):
                owners.setdefault(digests[start : start + _DIGEST_BYTES], set()).add(other)
        found: dict[int, list[_Link]] = {}
        for (mine, theirs), link in self._ends.items():
            peers = owners.get(theirs, set()) - {rank}
            # Ranks that are threads of one process see each other's ends, too: whose is whose is not known then.
            if len(peers) == 1 and owners.get(mine) == {rank}:
                found.setdefault(peers.pop(), []).append(link)
        # Another engine may have connected at the same time.
        self._of_peer = {peer: links[0] for peer, links in found.items() if len(links) == 1}

    def is_open(self, peer: int) -> bool | None:
        """Whether the connection to `peer` is open; None where it is not known which one it is."""
        link = self._of_peer.get(peer)
        return None if link is None else link.is_open()

    def seconds_silent(self) -> float:
        """Since a connection that is open carried something; infinite without one."""
        silences = [link.seconds_silent() for link in self._of_peer.values()]
        return min((silence for silence in silences if silence is not None), default=float("inf"))


def _end(descriptor: int) -> tuple[bytes, bytes] | None:
    """Digests of the two addresses of a TCP connection; None if the descriptor is no such thing."""
    try:
        with _borrowed(descriptor) as copy:
            if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
                return None
            here, there = copy.getsockname()[:2], copy.getpeername()[:2]
    except OSError:  # listening, or closed meanwhile
        return None
    return _digest(here, there), _digest(there, here)


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """The socket as Python has it. Only for a moment: with two descriptors, its owner cannot close it."""
    # With a default time-out, Python has a socket not block, for the owner, too. Only then is the mode set back: the
    # owner may itself be changing it, and would wait for ever.
    blocks = None if socket.getdefaulttimeout() is None else os.get_blocking(descriptor)
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        if blocks is not None:
            copy.setblocking(blocks)
        yield copy


def _digest(here: tuple[str, int], there: tuple[str, int]) -> bytes:
    return hashlib.sha256(f"{here} {there}".encode()).digest()[:_DIGEST_BYTES]
