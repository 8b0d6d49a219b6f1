"""Checks the addresses at which Gloo listens on the ranks, before Gloo connects."""

import functools
import os
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from torch.distributed import ProcessGroupGloo

from torchring.errors import TopologyError
from torchring.linux import host_name, network_id
from torchring.rendezvous.addresses import gloo_address, is_for_other_hosts, list_interfaces, resolve

_VARIABLE: Final = "GLOO_SOCKET_IFNAME"
_SOURCE: Final = re.compile(r"\[[^\[\]]*\.(?:cc|cpp|h):[0-9]+\]( [^.:]* != nullptr\.)? ?")  # of Gloo's code
_MOST_NAMED: Final = 8


class Endpoint(NamedTuple):
    """The address at which Gloo listens on one rank."""

    host: str  # name of the host
    network: str  # equal on ranks that share a loopback interface; "" if unknown
    address: str  # "" if Gloo cannot listen
    interface: str  # GLOO_SOCKET_IFNAME, "" if not set
    usable: str  # interfaces with addresses that other hosts may reach, as text
    problem: str  # the reason why Gloo cannot listen, in Gloo's words; "" if Gloo can

    @property
    def choice(self) -> str:
        """The reason why Gloo listens at `address`."""
        if self.interface:
            return f"{_VARIABLE}={self.interface}"
        return f"{_VARIABLE} is not set, and the name {self.host} leads there or nowhere"


def own_endpoint() -> Endpoint:
    """The endpoint of this rank."""
    return _endpoint(network_id(), os.environ.get(_VARIABLE, ""))


@functools.cache  # a name service may take its time
def _endpoint(network: str, interface: str) -> Endpoint:
    host, interfaces, problem = host_name(), list_interfaces(), ""
    for name in interface.split(",") if interface else []:
        try:
            ProcessGroupGloo.create_device(interface=name)
        except RuntimeError as error:
            problem = problem or gloo_words(error)
    address = gloo_address(os.environ, interfaces, [] if interface else resolve(host))
    usable = [f"{name} ({address})" for name, address in interfaces if is_for_other_hosts(address)]
    return Endpoint(host, network, address, interface, ", ".join(usable) or "none but loopback", problem)


def check_endpoints(rank: int, endpoints: Sequence[Endpoint]) -> None:
    """Raise TopologyError, the same on every rank, if Gloo cannot listen on a rank, or others cannot reach it there."""
    for other, endpoint in enumerate(endpoints):
        if endpoint.problem:
            raise TopologyError(
                f"Gloo cannot listen on rank {other} ({endpoint.host}), where {_VARIABLE}={endpoint.interface}: "
                f"{endpoint.problem}; the interfaces there are {endpoint.usable}",
                rank=rank,
                peers=(other,),
            )
    if len({endpoint.network for endpoint in endpoints if endpoint.network}) < 2:
        return
    for other, endpoint in enumerate(endpoints):
        if endpoint.network and endpoint.address.startswith(("127.", "::1")):
            raise TopologyError(
                f"Gloo on rank {other} ({endpoint.host}) would listen at {endpoint.address}, which other hosts cannot "
                f"reach: {endpoint.choice}; set {_VARIABLE} to the interface that leads to the other hosts, there one "
                f"of: {endpoint.usable}",
                rank=rank,
                peers=(other,),
            )


def cannot_connect(rank: int, endpoints: Sequence[Endpoint], failure: BaseException) -> TopologyError:
    """The error if Gloo on this rank could not reach Gloo on another rank, or could not be reached."""
    listing = [
        f"rank {other} ({endpoint.host}) at {endpoint.address}"
        for other, endpoint in enumerate(endpoints[:_MOST_NAMED])
    ]
    more = ["..."] if len(endpoints) > _MOST_NAMED else []
    return TopologyError(
        f"Gloo on rank {rank} cannot connect to the other ranks: {gloo_words(failure)}. It listens on "
        f"{', '.join([*listing, *more])}. If those are not addresses of one network, set {_VARIABLE} on each host to "
        "the interface that leads to the others; if they are, a firewall may be in between",
        rank=rank,
    )


def gloo_words(failure: BaseException) -> str:
    """The message of Gloo's error, without the file names and line numbers of Gloo's source."""
    first = str(failure).partition("\n")[0]
    return _SOURCE.sub("", first.replace("[enforce fail at ", "[")).strip()
