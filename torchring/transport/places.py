"""The address at which Gloo listens on each rank. Ranks compare addresses before Gloo connects, to report mistakes."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from torch.distributed import ProcessGroupGloo

from torchring.errors import TopologyError
from torchring.linux import host_name, network_id
from torchring.rendezvous.addresses import gloo_address, is_for_other_hosts, list_interfaces, resolve

_VARIABLE: Final = "GLOO_SOCKET_IFNAME"
_SOURCE: Final = re.compile(r"\[[^\[\]]*\.(?:cc|cpp|h):[0-9]+\]( [^.:]* != nullptr\.)? ?")  # of Gloo's code
_MOST_NAMED: Final = 8


@dataclass(frozen=True)
class Place:
    """Where Gloo listens on one rank.

    Attributes:
        host: name of the host.
        network: equal on ranks that share a loopback interface; "" if unknown.
        address: where Gloo listens; "" if Gloo cannot listen.
        interface: GLOO_SOCKET_IFNAME, "" if not set.
        usable: interfaces with addresses that other hosts may reach, as text.
        problem: why Gloo cannot listen, in Gloo's words; "" if Gloo can.
    """

    host: str
    network: str
    address: str
    interface: str
    usable: str
    problem: str

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(text: bytes) -> Place:
        return Place(**json.loads(text))

    @property
    def choice(self) -> str:
        """Why Gloo listens at `address`."""
        if self.interface:
            return f"{_VARIABLE}={self.interface}"
        return f"{_VARIABLE} is not set, and the name {self.host} leads there or nowhere"


def own_place() -> Place:
    """Where Gloo listens on this rank."""
    return _place(network_id(), os.environ.get(_VARIABLE, ""))


@functools.cache  # a name service may take its time
def _place(network: str, interface: str) -> Place:
    host, interfaces, problem = host_name(), list_interfaces(), ""
    for name in interface.split(",") if interface else []:
        try:
            ProcessGroupGloo.create_device(interface=name)
        except RuntimeError as error:
            problem = problem or gloo_words(error)
    address = gloo_address(os.environ, interfaces, [] if interface else resolve(host))
    usable = [f"{name} ({address})" for name, address in interfaces if is_for_other_hosts(address)]
    return Place(host, network, address, interface, ", ".join(usable) or "none but loopback", problem)


def check_places(rank: int, places: Sequence[Place]) -> None:
    """Raise TopologyError, the same on every rank, if Gloo cannot listen on a rank, or others cannot reach it there."""
    for other, place in enumerate(places):
        if place.problem:
            raise TopologyError(
                f"Gloo cannot listen on rank {other} ({place.host}), where {_VARIABLE}={place.interface}: "
                f"{place.problem}; the interfaces there are {place.usable}",
                rank=rank,
                peers=(other,),
            )
    if len({place.network for place in places if place.network}) < 2:
        return
    for other, place in enumerate(places):
        if place.network and place.address.startswith(("127.", "::1")):
            raise TopologyError(
                f"Gloo on rank {other} ({place.host}) would listen at {place.address}, which other hosts cannot reach: "
                f"{place.choice}; set {_VARIABLE} to the interface that leads to the other hosts, there one of: "
                f"{place.usable}",
                rank=rank,
                peers=(other,),
            )


def cannot_connect(rank: int, places: Sequence[Place], failure: BaseException) -> TopologyError:
    """The error if Gloo on this rank could not reach Gloo on another rank, or could not be reached."""
    listing = [f"rank {other} ({place.host}) at {place.address}" for other, place in enumerate(places[:_MOST_NAMED])]
    more = ["..."] if len(places) > _MOST_NAMED else []
    return TopologyError(
        f"Gloo on rank {rank} cannot connect to the other ranks: {gloo_words(failure)}. It listens on "
        f"{', '.join([*listing, *more])}. If those are not addresses of one network, set {_VARIABLE} on each host to "
        "the interface that leads to the others; if they are, a firewall may be in between",
        rank=rank,
    )


def gloo_words(failure: BaseException) -> str:
    """The message of Gloo's error, without file names and lines of Gloo's source."""
    first = str(failure).partition("\n")[0]
    return _SOURCE.sub("", first.replace("[enforce fail at ", "[")).strip()
