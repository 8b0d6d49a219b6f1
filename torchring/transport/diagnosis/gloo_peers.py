"""The diagnosis of a `C10dTransport`: addresses before Gloo connects, its links, and the rank at fault."""

from __future__ import annotations

from collections.abc import Sequence

from torchring.errors import RingError
from torchring.memory.host import HostGroup
from torchring.rendezvous.rendezvous import Rendezvous
from torchring.transport.diagnosis.culprit import Culprits
from torchring.transport.diagnosis.endpoints import Endpoint, cannot_connect, check_endpoints, own_endpoint
from torchring.transport.diagnosis.sockets import Links, open_sockets


class GlooDiagnosis(Culprits):
    """See `Diagnosis`."""

    def __init__(self, rendezvous: Rendezvous, name: str, host: HostGroup | None, ranks: Sequence[int]) -> None:
        super().__init__(rendezvous, name, host, ranks)
        self._meeting = rendezvous
        self._endpoints: list[Endpoint] = []
        self._before: dict[int, int] = {}  # see `Links`
        self._links: Links | None = None

    def check_endpoints(self) -> None:
        texts = self._meeting.all_gather(f"transport/{self._name}", own_endpoint().encode())
        self._endpoints = [Endpoint.decode(text) for text in texts]
        check_endpoints(self._meeting.rank, self._endpoints)
        self._before = open_sockets()

    def note_links(self) -> None:
        self._links = Links(self._before)
        ends = self._meeting.all_gather(f"transport/{self._name}/connected", self._links.own_ends())
        self._links.match(self._meeting.rank, ends)

    def cannot_connect(self, failure: BaseException) -> RingError:
        return cannot_connect(self._meeting.rank, self._endpoints, failure)

    def is_open(self, peer: int) -> bool | None:
        return None if self._links is None else self._links.is_open(peer)

    def seconds_silent(self) -> float:
        return float("inf") if self._links is None else self._links.seconds_silent()

    def suspect(self, peer: int | None, *, timed_out: bool) -> None:
        self._closed = [rank for rank in self._peers if self.is_open(rank) is False]
        super().suspect(peer, timed_out=timed_out)
