"""Finds out whether Gloo's TCP connection to a peer is still open, without sending anything.

Sending would do harm: if the peer has exited after its last message, the peer's kernel answers with a reset, and bytes
that are still on their way here are thrown away. Gloo closes its socket when it has read everything, the end included
(gloo/transport/tcp/pair.cc). So this module looks whether the socket is still there.

Gloo does not say which sockets are its own. The sockets that appeared while Gloo connected are candidates. Each rank
tells the others the addresses of the candidates, and the two ends of a connection have the same two addresses.
"""

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
    """The sockets of this process: inode by file descriptor. Empty where there is no /proc."""
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
    """This process's end of a connection. Gloo owns the descriptor."""

    descriptor: int
    inode: int

    def is_open(self) -> bool:
        try:
            return os.fstat(self.descriptor).st_ino == self.inode
        except OSError:
            return False

    def seconds_silent(self) -> float | None:
        """Seconds since data or an acknowledgement came; None if the link is closed, or the kernel does not say."""
        try:
            with _borrowed(self.descriptor) as copy:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            milliseconds = min(_LAST_RECEIVED.unpack_from(info))
        except (OSError, struct.error):
            return None
        return milliseconds / 1000 if self.is_open() else None


class Links:
    """The connections that Gloo has just made to the peers: those that were not there `before`, in `open_sockets()`."""

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
        """Find out which end is connected to which peer, by the `own_ends` of every rank, in rank order."""
        owners: dict[bytes, set[int]] = {}
        for other, digests in enumerate(ends):
            for start in range(0, len(digests), _DIGEST_BYTES):
                owners.setdefault(digests[start : start + _DIGEST_BYTES], set()).add(other)
        found: dict[int, list[_Link]] = {}
        for (mine, theirs), link in self._ends.items():
            peers = owners.get(theirs, set()) - {rank}
            # Ranks that are threads of one process see each other's ends, too. Then a link's owner is not known.
            if len(peers) == 1 and owners.get(mine) == {rank}:
                found.setdefault(peers.pop(), []).append(link)
        # Another group may have connected at the same time.
        self._of_peer = {peer: links[0] for peer, links in found.items() if len(links) == 1}

    def is_open(self, peer: int) -> bool | None:
        """True if the connection to `peer` is open. None if its socket is not known."""
        link = self._of_peer.get(peer)
        return None if link is None else link.is_open()

    def seconds_silent(self) -> float:
        """Seconds since any open connection carried something; infinite if none is open."""
        silences = [link.seconds_silent() for link in self._of_peer.values()]
        return min((silence for silence in silences if silence is not None), default=float("inf"))


def _end(descriptor: int) -> tuple[bytes, bytes] | None:
    """Digests of both ends of a TCP connection, this end first; None if the descriptor is no TCP connection."""
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
    """A socket object for Gloo's descriptor. Use it briefly: Gloo cannot close while there are two descriptors."""
    # If Python has a default timeout, it makes the socket non-blocking, for Gloo, too. Only then is the mode set back:
    # Gloo may itself be changing the mode, and would wait for ever.
    blocks = None if socket.getdefaulttimeout() is None else os.get_blocking(descriptor)
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        if blocks is not None:
            copy.setblocking(blocks)
        yield copy


def _digest(here: tuple[str, int], there: tuple[str, int]) -> bytes:
    return hashlib.sha256(f"{here} {there}".encode()).digest()[:_DIGEST_BYTES]
