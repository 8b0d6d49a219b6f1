"""Who is at fault when a transfer fails: what the ranks of a stream leave in the store for each other, and read there.

A rank that stops leaves its error there ("last words") and before that, while it finds out, the peer that it waited for
(its "suspect"). So the others name the rank that began it and not those that stopped for want of it. Suspects are of
the whole world: a rank may wait in one stream, with nothing to do in another where it is waited for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Final

from torchring.errors import PeerLostError, PeerTimeoutError, RingError, decode_error, encode_error
from torchring.memory.host import HostGroup
from torchring.rendezvous.rendezvous import Rendezvous, ended_key

# After a timeout, how long to look for the last words of the suspect: if it was itself waiting for somebody, its own
# timeout comes at about the same moment as ours.
_GRACE_SECONDS: Final = 2.0
# After a link broke: its other end may have timed out, upon which Gloo closes all links before anybody can say why.
_BROKEN_GRACE_SECONDS: Final = 0.5
# How long the store outlives a failure if it is in this process, unless all survivors have found out before.
_STAY_SECONDS: Final = _GRACE_SECONDS + 0.5
_PAUSE_SECONDS: Final = 0.02  # between two looks into the store


class Culprits:
    """What one rank knows, and tells, of failures of the stream `name`.

    Args:
        rendezvous: the world's store.
        name: of the stream; unique in this world, the same on every rank.
        host: the ranks of this host, if it is known which of them live.
    """

    def __init__(self, rendezvous: Rendezvous, name: str, host: HostGroup | None) -> None:
        # Nobody waits for the store as long as for a rank: this is when the way there may be cut.
        self._rendezvous = rendezvous.with_timeout(_GRACE_SECONDS)
        self._timeout_seconds = rendezvous.timeout_seconds
        self._name = name
        self._host = host
        self._others = [rank for rank in range(rendezvous.size) if rank != rendezvous.rank]

    def report(self, error: RingError) -> None:
        """Leave `error` for the peers."""
        self._leave("last_words", encode_error(error))
        if self._host is not None:
            self._host.report_failure(error)
        lost = error.peers if isinstance(error, (PeerLostError, PeerTimeoutError)) else ()
        survivors = [rank for rank in self._others if rank not in lost]
        self._rendezvous.stay_until_published([self._key("last_words", rank) for rank in survivors], _STAY_SECONDS)

    def suspect(self, peer: int | None, *, timed_out: bool) -> None:
        """Tell the peers for whom this rank waited, None in a collective, and whether too long or its link broke.

        Only the first time: what fails later in other streams does so because of that.
        Before this rank closes its links: whoever sees one closed finds this, or knows that its peer died.
        """
        with contextlib.suppress(RingError):
            text = f"{-1 if peer is None else peer} {int(timed_out)}"
            self._rendezvous.publish_once(self._key("suspect", self._rendezvous.rank), text.encode())

    def say_goodbye(self) -> None:
        """Tell the peers that this rank has closed its end."""
        self._leave("left", b"")

    def explain(self, peer: int | None, seconds: float, *, timed_out: bool) -> RingError:
        """What really happened, as far as this rank can find out.

        Args:
            peer: whose transfer failed; None after a collective, which does not say.
            seconds: how long this rank has waited.
            timed_out: the wait was too long; else a link broke.
        """
        try:
            error = self.seen_by_the_host(self._others)
            if error is None:
                if peer is None:
                    culprits, timed_out = self._silent_ones(timed_out)
                else:
                    culprit, timed_out = self._end_of_chain(peer, timed_out)
                    culprits = [culprit]
                error = self._fault_of(culprits, timed_out)
        except RingError as found:  # somebody's last words, or the end of the store with the rank that hosted it
            error = found
            if not found.peers and peer is not None:  # of a store that the launcher hosts
                error = self._fault_of([peer], timed_out)
                error = type(error)(f"{error.message}; and {found.message}", peers=(peer,))
        return self.signed(error, seconds)

    def _fault_of(self, culprits: Sequence[int], timed_out: bool) -> RingError:
        names = f"rank{'s' if len(culprits) > 1 else ''} {', '.join(map(str, culprits))}"
        if not culprits:
            names = "some rank, although each one was still there to say so,"
        if timed_out:
            return PeerTimeoutError(f"{names} did not answer within {self._timeout_seconds:g} s", peers=culprits)
        for rank in culprits:
            with contextlib.suppress(RingError):
                if (ended := self._said_at_its_end(rank)) is not None:
                    return ended
        return PeerLostError(f"{names} died or exited", peers=culprits)

    def _said_at_its_end(self, rank: int) -> RingError | None:
        """Why a rank's script ended, if it did and said so."""
        key = ended_key(rank)
        return decode_error(self._rendezvous.fetch(key, rank), rank) if self._rendezvous.is_published(key) else None

    def stood_still(self, seconds: float) -> RingError:
        """This rank's wait was too long because it did not run itself."""
        return PeerTimeoutError(
            f"this process did not run for {seconds:.0f} s: it was stopped (SIGSTOP, a suspended machine) or given no "
            f"processor; a rank that keeps the others waiting for {self._timeout_seconds:g} s is given up",
            peers=(self._rendezvous.rank,),
        )

    def _was_late(self, waiting: Sequence[int]) -> RingError:
        """The others' wait was too long, for this rank."""
        names = ", ".join(map(str, waiting))
        return PeerTimeoutError(
            f"rank{'s' if len(waiting) > 1 else ''} {names} waited for this rank for {self._timeout_seconds:g} s and "
            "gave up; it computed for longer, or was stopped (SIGSTOP, a suspended machine)",
            peers=(self._rendezvous.rank,),
        )

    def signed(self, error: RingError, seconds: float) -> RingError:
        """The error, with who noticed it and after how long."""
        error.rank, error.seconds = self._rendezvous.rank, seconds
        return error

    def seen_by_the_host(self, suspects: Sequence[int]) -> RingError | None:
        """Of a rank on this host we know whether it lives, even if a child of its keeps its sockets open."""
        if self._host is None:
            return None
        try:
            self._host.check_peers([rank for rank in suspects if rank in self._host.ranks])
        except RingError as error:
            return error
        return None

    def heard_from(self, suspects: Sequence[int]) -> RingError | None:
        """Whether one of these ranks has said that it stops. Asks the store once or twice per rank; does not wait.

        For engines whose links do not tell by closing.
        """
        try:
            for rank in suspects:
                if (words := self._look_up("last_words", rank, 0.0)) is not None:
                    return decode_error(words, rank)
                if self._look_up("left", rank, 0.0) is not None:
                    if (ended := self._said_at_its_end(rank)) is not None:
                        return ended
                    text = f"rank {rank} closed its end; it called shutdown() or close(), or exited"
                    return PeerLostError(text, peers=(rank,))
        except PeerTimeoutError:  # says nothing of the peers; the way to the store may be back in time
            return None
        except RingError as error:  # no store: only its host is known to have gone
            return error if set(error.peers) & set(suspects) else None
        return None

    def _end_of_chain(self, suspect: int, timed_out: bool) -> tuple[int, bool]:
        """Who keeps everybody waiting: the first in the chain of suspects that suspects nobody itself.

        And whether a wait along the chain was too long: the links that broke did so because of that.
        Raises the last words of one that stopped for another reason, or that somebody waited too long for this rank.
        """
        waited_too_long = timed_out
        lives = self._host is not None and suspect in self._host.ranks  # or else the host would have told
        started = time.monotonic()
        deadline = started + (_GRACE_SECONDS if timed_out or lives else _BROKEN_GRACE_SECONDS)
        seen = {self._rendezvous.rank}
        while True:
            if (words := self._look_up("last_words", suspect, 0.0)) is not None:
                raise decode_error(words, suspect)
            answer = self._look_up("suspect", suspect, deadline)
            seen.add(suspect)
            if answer is None:
                return suspect, timed_out
            following, their_wait_was_too_long = map(int, answer.split())
            if their_wait_was_too_long:
                timed_out, deadline = True, started + _GRACE_SECONDS
            if following == self._rendezvous.rank and timed_out and not waited_too_long:
                raise self._was_late([suspect])
            if following < 0 or following in seen:
                return suspect, timed_out
            suspect = following

    def _silent_ones(self, timed_out: bool) -> tuple[list[int], bool]:
        """After a collective failed, which does not say at whom: the ranks that do not report that it failed.

        And whether anybody's wait in it was too long. All links are closed by now, so that everybody has noticed.
        Raises the last words of the first that has found out, or that all others waited too long for this rank.
        """
        waited_too_long = timed_out
        deadline = time.monotonic() + _GRACE_SECONDS
        silent = list(self._others)
        while True:
            for rank in self._others:
                if (words := self._look_up("last_words", rank, 0.0)) is not None:
                    raise decode_error(words, rank)
            answers = {rank: self._look_up("suspect", rank, 0.0) for rank in silent}
            timed_out = timed_out or any(answer is not None and answer.endswith(b"1") for answer in answers.values())
            silent = [rank for rank, answer in answers.items() if answer is None]
            if not silent and timed_out and not waited_too_long:
                raise self._was_late(self._others)
            if not silent or time.monotonic() >= deadline:
                return silent, timed_out
            time.sleep(_PAUSE_SECONDS)

    def _look_up(self, what: str, rank: int, deadline: float) -> bytes | None:
        key = self._key(what, rank)
        while not self._rendezvous.is_published(key):
            if time.monotonic() >= deadline:
                return None
            time.sleep(_PAUSE_SECONDS)
        return self._rendezvous.fetch(key, rank)

    def _leave(self, what: str, text: bytes) -> None:
        with contextlib.suppress(RingError):  # the store may be gone
            self._rendezvous.publish(self._key(what, self._rendezvous.rank), text)

    def _key(self, what: str, rank: int) -> str:
        return f"transport/suspect/{rank}" if what == "suspect" else f"transport/{self._name}/{what}/{rank}"
