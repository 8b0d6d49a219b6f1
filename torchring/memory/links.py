"""Sockets between the ranks of one host.

Every process of the network namespace sees the name of an abstract socket, and can connect to it, whoever its user is.
So a listener takes calls from the moment it listens, hangs up on other users at once, and never waits for one caller in
particular. A full backlog means "later", and not that a rank is out of reach.
"""

import hmac
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence, Set
from typing import Any, Final

from torchring.errors import PeerTimeoutError
from torchring.rendezvous.rendezvous import Rendezvous

_LOOK_SECONDS: Final = 0.05  # between two looks into the store
_TRY_SECONDS: Final = 0.001  # between two calls, while the backlog of a peer is full
_BACKLOG: Final = 4096  # the kernel's default maximum
_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Listener:
    """Takes the calls of other ranks at an abstract name, `address`. A caller has to know a secret, `token`."""

    def __init__(self) -> None:
        self.address, self.token = f"torchring-{secrets.token_hex(16)}", secrets.token_hex(32)
        self.links: dict[int, socket.socket] = {}  # open sockets to the ranks that have come
        self._silent: list[socket.socket] = []  # processes of this user that have not said yet who they are
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind("\0" + self.address)
        self._socket.listen(_BACKLOG)
        self._socket.setblocking(False)

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_: object) -> None:
        for link in (self._socket, *self._silent):
            link.close()

    @property
    def sources(self) -> tuple[socket.socket, ...]:
        """Readable when there is something to do for `admit`."""
        return self._socket, *self._silent

    def accept(self) -> None:
        """Take the calls that have come, and hang up on other users. Does not wait."""
        for _ in range(_BACKLOG):
            try:
                link, _ = self._socket.accept()
            except BlockingIOError:
                return
            if credentials(link)[1] == os.geteuid():
                link.setblocking(False)
                self._silent.append(link)
            else:
                link.close()

    def admit(self, expected: Set[int]) -> None:
        """Take calls, and let in the callers that say a rank of `expected` and the token. Does not wait."""
        self.accept()
        for link in list(self._silent):
            try:
                rank = self._rank_of(link.recv(4096))
            except BlockingIOError:
                continue
            except OSError:
                rank = None
            self._silent.remove(link)
            if rank is not None and rank in expected and rank not in self.links:
                self.links[rank] = link
            else:
                link.close()

    def _rank_of(self, hello: bytes) -> int | None:
        """None unless the caller knows the token."""
        try:
            said = json.loads(hello)
            rank, token = int(said["rank"]), str(said["token"])
            return rank if hmac.compare_digest(token, self.token) else None
        except Exception:  # the bytes may be a stranger's
            return None


def meet(
    rendezvous: Rendezvous, listener: Listener, cards: Sequence[Mapping[str, Any]], candidates: Set[int]
) -> tuple[dict[int, socket.socket], dict[int, str]]:
    """Call the candidates below this rank, and take the calls of those above.

    The card of every rank has the "address" and "token" of its listener. Returns the open sockets, and a reason for
    each rank that this rank has called in vain. Raises PeerTimeoutError.
    """
    rank = rendezvous.rank
    uncalled, expected = {r for r in candidates if r < rank}, {r for r in candidates if r > rank}
    links: dict[int, socket.socket] = {}
    why: dict[int, str] = {}
    started, look_at = time.monotonic(), 0.0
    while True:
        for peer in sorted(uncalled):
            try:
                link = _call(rank, peer, cards[peer])
            except OSError as error:
                why[peer] = f"rank {rank} cannot connect to rank {peer}: {error.strerror or error}"
                rendezvous.publish(f"unreachable/{rank}/{peer}", b"1")
                continue
            if link is not None:
                links[peer] = link
        uncalled -= links.keys() | why.keys()
        listener.admit(expected)
        missing = sorted(uncalled | (expected - listener.links.keys()))
        if not missing:
            return links | listener.links, why
        now = time.monotonic()
        if now > started + rendezvous.timeout_seconds:
            text = f"ranks {missing} run on this machine, but did not connect to share memory"
            raise PeerTimeoutError(text, rank=rank, peers=missing, seconds=now - started)
        if now > look_at:
            look_at = now + _LOOK_SECONDS
            if (lost := rendezvous.error_of_ended(missing)) is not None:
                raise lost
            expected -= {r for r in set(missing) & expected if rendezvous.is_published(f"unreachable/{r}/{rank}")}
        poll = select.poll()
        for source in listener.sources:
            poll.register(source, select.POLLIN)
        poll.poll(1e3 * (_TRY_SECONDS if uncalled else _LOOK_SECONDS))


def _call(rank: int, peer: int, card: Mapping[str, Any]) -> socket.socket | None:
    """None if the peer's backlog is full. Raises OSError that says why the peer is out of reach."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        link.setblocking(False)
        link.connect("\0" + card["address"])
        if (user := credentials(link)[1]) != os.geteuid():
            raise OSError(f"they are of users {os.geteuid()} and {user}")
        link.send(json.dumps({"rank": rank, "token": card["token"]}).encode())
    except BlockingIOError:
        link.close()
        return None
    except OSError:
        link.close()
        raise
    return link


def credentials(link: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel knows them."""
    pid, uid, _ = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid
