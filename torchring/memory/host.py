"""Shared memory between the ranks of one host, without a name in any file system.

Each rank allocates its part of a `SharedBlock` in a `memfd` and hands the descriptor to its peers over an abstract Unix
socket. So a rank that is killed leaves nothing behind, and the 64 MB limit of a container's /dev/shm does not apply.

Two ranks share a host exactly when the hand-over works: both are in the same network namespace, both run as the same
user, and the caller knows the token that the listener put into the rendezvous store (see `links.py`). The sockets stay
open. A peer's death shows at once, because it closes the peer's socket and makes the peer's pidfd readable.

A part of a block belongs to the rank that allocated the part. Peers read and write the part only between two signals of
an algorithm (see `channel.py`). The algorithm says which rank owns which slice at which time.
"""

import contextlib
import json
import logging
import os
import platform
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch

from torchring.errors import PeerLostError, PeerTimeoutError, PlanMismatchError, RingError, in_group, ranks_in_words
from torchring.linux import boot_id, create_memory, network_id, open_process
from torchring.memory.links import Listener, credentials, meet
from torchring.memory.mapping import map_block
from torchring.memory.noticeboard import Noticeboard, page_bytes
from torchring.rendezvous.rendezvous import Rendezvous

_POLL_SECONDS: Final = 0.05  # between two looks of a waiting rank at whether its peers are alive
_GRANT: Final = struct.Struct("=qq")  # serial number of the block, bytes
_NOBODY: Final = 65534  # the kernel's default for users that a namespace does not map
_ALL_USERS: Final = 2**32 - 1
_logger: Final = logging.getLogger("torchring")


@dataclass(frozen=True)
class _Peer:
    """An open socket to a peer. `pidfd` is -1 if the peer's process id is not visible here."""

    rank: int
    link: socket.socket
    pidfd: int
    pid: int


@dataclass(frozen=True)
class SharedBlock:
    """One allocation: `parts[i]` is the memory of the i-th rank of the group, mapped here, as a uint8 tensor.

    The mapping lives as long as a tensor that views it.
    """

    parts: tuple[torch.Tensor, ...]
    index: int

    @property
    def own(self) -> torch.Tensor:
        return self.parts[self.index]


class HostGroup:
    """The ranks of one host that can map each other's memory."""

    def __init__(self, rendezvous: Rendezvous, peers: Sequence[_Peer]) -> None:
        rank = self.rank = rendezvous.rank
        self.ranks = tuple(sorted([rank, *(peer.rank for peer in peers)]))  # world ranks, ascending, with `rank`
        self.index = self.ranks.index(rank)  # position of this rank in `ranks`
        self.timeout_seconds = rendezvous.timeout_seconds
        self.on_wait: Callable[[Sequence[int], float], None] | None = None  # see `Rendezvous`
        self._peers = {peer.rank: peer for peer in peers}
        self._num_blocks = 0
        self._aborted: RingError | None = None
        self.notices = Noticeboard(rendezvous)  # in the store, until every rank has a page
        self.notices = Noticeboard(rendezvous, self.ranks, self.allocate(page_bytes(rendezvous.size)).parts)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def allocate(
        self, num_bytes: int, prepare: Callable[[torch.Tensor], None] | None = None, *, populates: bool = True
    ) -> SharedBlock:
        """Collective: every rank contributes `num_bytes` of zeroed memory and maps the memory of all ranks.

        Args:
            num_bytes: may be 0; the same on every rank.
            prepare: called with this rank's own part before any peer can see it.
            populates: this rank's own part takes its memory at once, and not page by page when it is written.

        Raises PlanMismatchError if ranks ask for different sizes, PeerLostError, PeerTimeoutError.
        """
        serial = self._num_blocks
        self._num_blocks += 1
        length = max(num_bytes, 1)  # a mapping of 0 bytes does not exist
        descriptor = create_memory(f"torchring-{serial}", length)
        try:
            own = map_block(descriptor, length, is_own=True, populates=populates)
            if prepare is not None:
                prepare(own)
            for peer in self._peers.values():
                try:
                    socket.send_fds(peer.link, [_GRANT.pack(serial, num_bytes)], [descriptor])
                except OSError:
                    self._raise_lost(peer)
        finally:
            os.close(descriptor)
        parts: list[torch.Tensor] = []
        mismatch: PlanMismatchError | None = None
        for rank in self.ranks:
            try:
                parts.append(own if rank == self.rank else self._receive_part(rank, serial, num_bytes))
            except PlanMismatchError as error:  # go on: every rank has to learn which ranks differ
                mismatch = mismatch or error
        if mismatch is not None:
            self.report_failure(mismatch)
            raise mismatch
        return SharedBlock(tuple(part[:num_bytes] for part in parts), self.index)

    def check_peers(self, needed: Sequence[int]) -> None:
        """Raise if one of the ranks in `needed` is dead, has left, or has reported a failure.

        The error names the cause and not its victims: a rank that stopped because of another rank's death reports
        that rank. A rank that is gone but not in `needed` is no error. This rank and ranks of other hosts may be in
        `needed`, and are not looked at.
        """
        needed = [rank for rank in needed if rank in self._peers]
        lost = self._lost(needed)
        said = {rank: error for rank in needed if (error := self.notices.read(rank)) is not None}
        died = sorted(lost - said.keys())
        if died:
            names = ", ".join(f"rank {rank} (pid {self._peers[rank].pid})" for rank in died)
            raise PeerLostError(f"{names} on this host died or exited", rank=self.rank, peers=died)
        for error in said.values():
            error.rank = self.rank
            raise error

    def _lost(self, needed: Sequence[int]) -> set[int]:
        """The ranks in `needed` that are gone. Each call makes a poll object, because threads must not share one."""
        poll = select.poll()
        rank_of: dict[int, int] = {}
        for rank in needed:
            peer = self._peers[rank]
            poll.register(peer.link, select.POLLHUP | select.POLLERR | select.POLLRDHUP)
            rank_of[peer.link.fileno()] = rank
            if peer.pidfd >= 0:
                poll.register(peer.pidfd, select.POLLIN)
                rank_of[peer.pidfd] = rank
        return {rank_of[descriptor] for descriptor, _ in poll.poll(0)}

    def report_failure(self, error: RingError) -> None:
        """Leave `error` for ranks that wait, here and on other hosts. They stop, too, and name the same cause."""
        self.notices.post(error)

    def abort(self, error: RingError) -> None:
        """Make the threads of this rank that wait in `wait_until`, now or later, raise `error`. From any thread."""
        self._aborted = self._aborted or error

    def close(self) -> None:
        """Tell the peers that this rank leaves, and close the sockets. A block stays mapped while a tensor views it."""
        self.report_failure(PeerLostError("it called torchring.shutdown()", peers=(self.rank,)))
        self.forget()

    def forget(self) -> None:
        """Close the sockets, and tell the peers nothing. A forked child does so at once: peers would not notice the
        parent's death while the child holds the sockets open."""
        self.abort(PeerLostError("torchring.shutdown() was called while this waited", rank=self.rank))
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            peer.link.close()
            if peer.pidfd >= 0:
                os.close(peer.pidfd)

    def wait_until(
        self, arrived: Callable[[float], bool], needed: Callable[[], Sequence[int]], *, grace_seconds: float = 0.0
    ) -> None:
        """Call `arrived(seconds to sleep at most)` until it returns true. Meanwhile, watch the ranks `needed()`.

        `grace_seconds` are added to the timeout. The ranks may need them to notice that a rank of another host is late.

        Raises what `check_peers` raises, or PeerTimeoutError naming the ranks. Either error is reported to the peers.
        """
        started = time.monotonic()
        try:
            while not arrived(_POLL_SECONDS):
                if self._aborted is not None:
                    raise self._aborted
                late = needed()
                try:
                    self.check_peers(late)
                except RingError:
                    # Between the two looks, the rank may have done its part and left.
                    if arrived(0.0):
                        return
                    if list(needed()) != list(late):
                        continue
                    raise
                waited = time.monotonic() - started
                if late and self.on_wait is not None:
                    self.on_wait(late, waited)
                if late and waited > self.timeout_seconds + grace_seconds:
                    names = ", ".join(f"rank {rank}" for rank in late)
                    raise PeerTimeoutError(f"{names} alive, but did not arrive", rank=self.rank, peers=late)
        except RingError as error:
            error.seconds = time.monotonic() - started
            self.report_failure(error)
            raise
        finally:
            if self.on_wait is not None:
                self.on_wait((), 0.0)

    def process_of(self, rank: int) -> tuple[int, int] | None:
        """(pid, pidfd) of a peer. None if the peer is a thread of this process, or not visible here, or gone."""
        peer = self._peers.get(rank)
        return (peer.pid, peer.pidfd) if peer is not None and peer.pidfd >= 0 else None

    def _receive_part(self, rank: int, serial: int, num_bytes: int) -> torch.Tensor:
        peer = self._peers[rank]
        readable = select.poll()
        readable.register(peer.link, select.POLLIN)
        self.wait_until(lambda seconds: bool(readable.poll(seconds * 1000)), lambda: (rank,))
        try:
            message, descriptors, _, _ = socket.recv_fds(peer.link, _GRANT.size, 1)
        except OSError:
            message, descriptors = b"", []
        if len(message) != _GRANT.size or len(descriptors) != 1:
            for descriptor in descriptors:
                os.close(descriptor)
            self._raise_lost(peer)
        try:
            their_serial, their_bytes = _GRANT.unpack(message)
            if (their_serial, their_bytes) != (serial, num_bytes):
                raise PlanMismatchError(
                    f"rank {rank} allocates block {their_serial} of {their_bytes} bytes "
                    f"where this rank allocates block {serial} of {num_bytes} bytes",
                    rank=self.rank,
                    peers=(rank,),
                )
            return map_block(descriptors[0], max(num_bytes, 1), is_own=False)
        finally:
            os.close(descriptors[0])

    def _raise_lost(self, peer: _Peer) -> NoReturn:
        try:
            self.check_peers((peer.rank,))
            raise PeerLostError(
                f"rank {peer.rank} (pid {peer.pid}) closed its connection", rank=self.rank, peers=(peer.rank,)
            )
        except RingError as error:
            self.report_failure(error)
            raise


def connect(rendezvous: Rendezvous) -> HostGroup:
    """Collective: find the ranks with which this rank can share memory, and open the sockets to them.

    Ranks on another host, of another user, or in another network namespace are not in the group. Logs a warning if
    ranks of one network namespace do not share memory.
    """
    rank = rendezvous.rank
    with Listener() as listener:
        rendezvous.watch = lambda _: listener.accept()
        host, trouble = _host_identity(), _why_users_look_alike()
        card: dict[str, Any] = {"address": listener.address, "token": listener.token, "host": host, "trouble": trouble}
        card["user"] = os.geteuid()
        cards = [json.loads(text) for text in rendezvous.all_gather("host", json.dumps(card).encode())]
        # The same kernel and the same network.
        neighbours = [r for r, other in enumerate(cards) if other["host"].split(",")[0] == host.split(",")[0]]
        if rendezvous.is_signed and len(users := sorted({cards[r]["user"] for r in neighbours})) > 1:
            text = f"{ranks_in_words(neighbours)} run on one machine as users {' and '.join(map(str, users))}"
            rendezvous.refuse(f"{text}, which no launcher does; start all ranks of a machine as one user")
        troubles = {r: f"rank {r} {cards[r]['trouble']}" for r in neighbours if cards[r]["trouble"]}
        candidates = {
            r for r in neighbours if r != rank and cards[r]["host"] == host and not troubles.keys() & {r, rank}
        }
        links, why = meet(rendezvous, listener, cards, candidates)
        rendezvous.watch = None
    mine = {"links": sorted(links), "why": [troubles[rank]] if rank in troubles else list(why.values())}
    said = [json.loads(text) for text in rendezvous.all_gather("reachable", json.dumps(mine).encode())]
    groups = partition([other["links"] for other in said])
    ranks = next(group for group in groups if rank in group)
    if rendezvous.is_one_host and len(ranks) < rendezvous.size and rank not in troubles:
        others = ranks_in_words(set(range(rendezvous.size)) - set(ranks))
        rendezvous.refuse(
            f"the launcher says that all ranks run on this machine, but rank {rank} cannot share memory with {others}: "
            f"{'; '.join(why.values()) or 'it runs elsewhere, or in another network namespace'}. A process of another "
            "user may have come in its place. If ranks are to run in containers with networks or users of their own, "
            "unset LOCAL_WORLD_SIZE, or what the launcher has in place of it"
        )
    if rank == neighbours[0] and len(ranks) < len(neighbours) and network_id():
        reasons = [reason for r in neighbours for reason in said[r]["why"]]
        if len(kinds := sorted({cards[r]["host"].partition(", ")[2] for r in neighbours})) > 1:
            reasons.append(f"their C libraries differ ({' and '.join(kinds)})")
        _warn_of_neighbours([group for group in groups if group[0] in neighbours], reasons, rendezvous.members)
    for r in links.keys() - set(ranks):
        links[r].close()
    peers = [_peer(r, links[r]) for r in ranks if r != rank]
    return HostGroup(rendezvous, peers)


def _warn_of_neighbours(groups: Sequence[Sequence[int]], reasons: Sequence[str], members: Sequence[int]) -> None:
    names = " and ".join(map(ranks_in_words, groups))
    text = (
        f"{names} run on one machine, in one network namespace, but cannot share memory: {'; '.join(reasons[:4])}. "
        "Between them gradients go through the network, which is slower; start all ranks of a machine as one user, and "
        "with one C library"
    )
    _logger.warning("%s", in_group(text, members))


def partition(reachable: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Groups of ranks in which every rank reaches every other. A pure function: every rank computes the same groups.

    `reachable[r]` lists the ranks that rank r has a socket to.

    Example: reachable [[1], [0], [3], [2]] -> [(0, 1), (2, 3)].
    """
    groups: list[list[int]] = []
    for rank in range(len(reachable)):
        for group in groups:
            if all(rank in reachable[other] and other in reachable[rank] for other in group):
                group.append(rank)
                break
        else:
            groups.append([rank])
    return [tuple(group) for group in groups]


def _host_identity() -> str:
    """Equal on ranks that may share memory. They run under the same kernel, reach the same abstract sockets, and have
    the same layout of sem_t.

    Without /proc, the host's name stands for the kernel. If two hosts have the same name, the hand-over fails, which
    does no harm.
    """
    return f"{network_id() or boot_id() or platform.node()}, {platform.machine()} {' '.join(platform.libc_ver())}"


def _why_users_look_alike() -> str:
    """The reason why this process cannot tell other users from its own. "" if it can.

    The kernel shows a process all users that its user namespace does not map as one user, "nobody".
    """
    try:
        with open("/proc/sys/kernel/overflowuid") as nobody, open("/proc/self/uid_map") as users:
            is_nobody = int(nobody.read()) == os.geteuid()
            num_users = sum(int(line.split()[2]) for line in users)
    except OSError:
        is_nobody, num_users = os.geteuid() == _NOBODY, 0
    if not is_nobody or num_users >= _ALL_USERS:
        return ""
    return (
        f"runs as user {os.geteuid()} (nobody) in a user namespace, which shows processes of all users outside as "
        "nobody's, too; run it as another user of its container"
    )


def _peer(rank: int, link: socket.socket) -> _Peer:
    pid, _ = credentials(link)
    pidfd = -1
    # The pid is our own if ranks are threads of one process (in tests). It is 0 if the peer is in another pid
    # namespace: then only the socket shows the peer's death.
    if pid not in (0, os.getpid()):
        with contextlib.suppress(OSError):
            pidfd = open_process(pid)
    link.settimeout(None)
    return _Peer(rank, link, pidfd, pid)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as flat uint8, without a copy."""
    flat = tensor.reshape(-1)
    # A dimension of size 1 may have any stride and still count as contiguous; view() alone would refuse it.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def tensor_of(data: bytes) -> torch.Tensor:
    """A copy of `data` as flat uint8."""
    if not data:  # frombuffer refuses 0 bytes
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def as_words(part: torch.Tensor) -> memoryview:
    """The memory of a uint8 tensor as 64-bit integers. To read one takes 30 ns, a tenth of what a tensor takes."""
    return memoryview(part.numpy()).cast("q")  # type: ignore[arg-type]  # numpy's stubs before 3.12 lack Buffer
