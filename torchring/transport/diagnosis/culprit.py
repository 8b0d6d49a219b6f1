"""Finds the rank that is at fault when a transfer fails. Ranks leave messages for each other in the store.

A rank whose wait fails first writes down that it waited (it "suspects" somebody). When the rank has found out the
cause, it puts its error on the noticeboard. So other ranks name the rank that failed first, and not the ranks that
stopped because of it. Both belong to the whole world, because rank a may wait for rank b in one channel while rank b
waits for rank c in another.
"""

import contextlib
import json
import time
from collections.abc import Sequence
from typing import Final

from torchring.errors import PeerLostError, PeerTimeoutError, RingError, encode_error, ranks_in_words
from torchring.memory.host import HostGroup
from torchring.memory.noticeboard import Noticeboard
from torchring.rendezvous.rendezvous import Rendezvous, notice_key
from torchring.transport.diagnosis.endpoints import Endpoint, cannot_connect, check_endpoints, own_endpoint
from torchring.transport.diagnosis.sockets import Links, open_sockets

# After a timeout, how long to look for a notice of the suspect. If the suspect was waiting for another rank, the
# suspect's timeout comes at about the same moment.
_GRACE_SECONDS: Final = 2.0
# After a link broke. The other end may have timed out: then Gloo closes all links before torchring can say why.
_BROKEN_GRACE_SECONDS: Final = 0.5
# How long a store in this process outlives a failure, unless all survivors have found out earlier.
_STAY_SECONDS: Final = _GRACE_SECONDS + 0.5
_PAUSE_SECONDS: Final = 0.02  # between two looks into the store
_NETWORK: Final = (
    "; ranks wait for each other although all of them reach the rendezvous store, so the network may lose what they "
    "send: large packets do not get through where an interface or a switch has a smaller MTU than others (compare "
    "`ip link` on all hosts; `ping -M do -s 1472 HOST` tries it), or a firewall blocks ports"
)


class Culprits:
    """Tells the other ranks of a failure of one channel, and finds out what they tell.

    MPI has no links to look at, and connects by itself.

    Args:
        rendezvous: the world's store.
        name: name of the channel; unique in this world, the same on every rank.
        host: the ranks of this host; known to be alive or not.
        ranks: those of the channel.
    """

    def __init__(self, rendezvous: Rendezvous, name: str, host: HostGroup | None, ranks: Sequence[int]) -> None:
        # With a short timeout: the connection to the store may be cut, too.
        self._rendezvous = rendezvous.with_timeout(_GRACE_SECONDS)
        self._meeting = rendezvous
        self._timeout_seconds = rendezvous.timeout_seconds
        self._name = name
        self._host = host
        self._notices = host.notices if host is not None else Noticeboard(rendezvous)
        self._others = [rank for rank in range(rendezvous.size) if rank != rendezvous.rank]
        self._peers = [rank for rank in ranks if rank != rendezvous.rank]
        self._endpoints: list[Endpoint] = []
        self._before: dict[int, int] = {}
        self._links: Links | None = None
        # Peers whose links were closed when this rank's wait failed, before this rank closed its own. A live rank says
        # whom it suspects before it closes links.
        self._closed: list[int] = []

    def check_endpoints(self) -> None:
        """Collective, before Gloo connects. Raises TopologyError, the same on every rank, if Gloo could not."""
        texts = self._meeting.all_gather(f"transport/{self._name}", json.dumps(own_endpoint()).encode())
        self._endpoints = [Endpoint(*json.loads(text)) for text in texts]
        check_endpoints(self._meeting.rank, self._endpoints)
        self._before = open_sockets()

    def note_links(self) -> None:
        """Collective, when Gloo has connected. No rank has closed a link yet."""
        self._links = Links(self._before)
        ends = self._meeting.all_gather(f"transport/{self._name}/connected", self._links.own_ends())
        self._links.match(self._meeting.rank, ends)

    def cannot_connect(self, failure: BaseException) -> RingError:
        return cannot_connect(self._meeting.rank, self._endpoints, failure)

    def is_open(self, peer: int) -> bool | None:
        """True if the connection to `peer` is open, and leads to that rank. None if its socket is not known."""
        if self.seen_by_the_host([peer]) is not None:  # a child that it has forked may still hold the socket
            return False
        return None if self._links is None else self._links.is_open(peer)

    def seconds_silent(self) -> float:
        """Seconds since any open connection carried something; infinite if none is open."""
        return float("inf") if self._links is None else self._links.seconds_silent()

    def report(self, error: RingError) -> None:
        """Leave `error` for the peers."""
        self._notices.post(error)
        key = notice_key(self._rendezvous.rank)
        with contextlib.suppress(RingError):  # the store may be gone
            self._rendezvous.publish_once(key, encode_error(error))  # on one host, too: the store stays for suspects
        lost = error.peers if isinstance(error, (PeerLostError, PeerTimeoutError)) else ()
        survivors = [rank for rank in self._others if rank not in lost]
        self._rendezvous.stay_until_published([notice_key(rank) for rank in survivors], _STAY_SECONDS)

    def suspect(self, *, timed_out: bool) -> None:
        """Tell the peers that this rank's wait has failed. Call it before this rank closes its links."""
        # Only the first counts: what fails later in other channels is a consequence. A peer that sees a closed link
        # either finds the suspect, or knows that this rank died.
        self._closed = [rank for rank in self._peers if self.is_open(rank) is False]
        with contextlib.suppress(RingError):
            self._rendezvous.publish_once(_suspect_key(self._rendezvous.rank), b"1" if timed_out else b"0")

    def say_goodbye(self) -> None:
        """Tell the peers that this rank has closed its end."""
        with contextlib.suppress(RingError):
            self._rendezvous.publish(self._left_key(self._rendezvous.rank), b"")

    def lost_peer(self) -> RingError | None:
        """The error if a peer has closed its connection. Sends nothing, and breaks nothing. From any thread."""
        self._closed = [rank for rank in self._peers if self.is_open(rank) is False]
        return self.explain(0.0, timed_out=False) if self._closed else None

    def explain(self, seconds: float, *, timed_out: bool) -> RingError:
        """The cause of a failed wait, which took `seconds`. If not `timed_out`, a link broke."""
        only = self._peers if len(self._peers) == 1 else []
        try:
            error = self.seen_by_the_host(self._others)
            if error is None:
                culprits, timed_out = self._silent_ones(timed_out)
                error = self._fault_of(culprits or only, timed_out)
        except RingError as found:  # the notice of a rank, or the store is gone with the rank that hosted it
            error = found
            if not found.peers and only:  # the store is gone, and the launcher hosted it
                error = self._fault_of(only, timed_out)
                error = type(error)(f"{error.message}; and {found.message}", peers=only)
        return self.signed(error, seconds)

    def _fault_of(self, culprits: Sequence[int], timed_out: bool) -> RingError:
        names = ranks_in_words(culprits) if culprits else "some rank"
        if timed_out:
            text = f"{names} did not answer within {self._timeout_seconds:g} s"
            with contextlib.suppress(RingError):
                if all(self._rendezvous.is_published(_suspect_key(rank)) for rank in culprits):
                    text += _NETWORK
            return PeerTimeoutError(text, peers=culprits)
        for rank in culprits:
            with contextlib.suppress(RingError):
                if (notice := self._notices.read(rank)) is not None:
                    return notice
        where: list[str] = []
        with contextlib.suppress(RingError):
            where = sorted({self._rendezvous.host_of(rank) for rank in culprits} - {""})
        return PeerLostError(f"{names}{' on ' * bool(where)}{', '.join(where)} died or exited", peers=culprits)

    def signed(self, error: RingError, seconds: float) -> RingError:
        error.rank, error.seconds = self._rendezvous.rank, seconds
        return error

    def seen_by_the_host(self, suspects: Sequence[int]) -> RingError | None:
        """The failure of one of them on this host, or None. A child of a dead rank may keep its links open."""
        if self._host is None:
            return None
        try:
            self._host.check_peers(suspects)
        except RingError as error:
            return error
        return None

    def heard_from(self, suspects: Sequence[int]) -> RingError | None:
        """The error of a rank of `suspects` that has announced its end, or None.

        Asks the store once or twice per rank, and does not wait. For MPI, where no link closes when a rank stops.
        """
        try:
            for rank in suspects:
                if (notice := self._notices.read(rank)) is not None:
                    return notice
                if self._rendezvous.is_published(self._left_key(rank)):
                    text = f"rank {rank} closed its end; it called shutdown() or close(), or exited"
                    return PeerLostError(text, peers=(rank,))
        except PeerTimeoutError:  # the store does not answer: says nothing about the peers, and may not last
            return None
        except RingError as error:  # the store is gone, and so is the rank that hosted it
            return error if set(error.peers) & set(suspects) else None
        return None

    def _silent_ones(self, timed_out: bool) -> tuple[list[int], bool]:
        """The culprits after a collective failed: the ranks that do not report the failure.

        Also returns whether the wait of any rank was too long. All links are closed by now, so every live rank has
        noticed. Raises the notice of the first rank that has found out the cause, or that all others waited too long
        for this rank.
        """
        waited_too_long = timed_out
        started = time.monotonic()
        silent = list(self._peers)
        while True:
            for rank in self._peers:
                if (notice := self._notices.read(rank)) is not None:
                    raise notice
            answers = {rank: self._suspicion_of(rank) for rank in silent}
            timed_out = timed_out or b"1" in answers.values()
            silent = [rank for rank, answer in answers.items() if answer is None]
            if not silent and timed_out and not waited_too_long:
                raise PeerTimeoutError(
                    f"{ranks_in_words(self._peers)} waited for this rank for {self._timeout_seconds:g} s and "
                    "gave up; it computed for longer, or was stopped (SIGSTOP, a suspended machine)",
                    peers=(self._rendezvous.rank,),
                )
            waited = time.monotonic() - started
            gone = [rank for rank in silent if rank in self._closed or len(self._peers) == 1]
            if gone and not timed_out and waited >= _BROKEN_GRACE_SECONDS:
                return gone, timed_out
            if not silent or waited >= _GRACE_SECONDS:
                return silent, timed_out
            time.sleep(_PAUSE_SECONDS)

    def _suspicion_of(self, rank: int) -> bytes | None:
        key = _suspect_key(rank)
        return self._rendezvous.fetch(key, rank) if self._rendezvous.is_published(key) else None

    def _left_key(self, rank: int) -> str:
        return f"transport/{self._name}/left/{rank}"


def _suspect_key(rank: int) -> str:
    return f"transport/suspect/{rank}"
