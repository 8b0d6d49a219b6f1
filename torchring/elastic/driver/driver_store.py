"""The store of an elastic job, which the driver hosts.

The socket is there before torch is: workers can be started at once, and import torch while the driver does.
"""

import contextlib
import secrets
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from torchring.elastic.driver.host_list import Hosts
from torchring.elastic.protocol import ORDERS, TOKEN, Card, Orders, card_key, world_prefix
from torchring.errors import PeerLostError, TopologyError, encode_error
from torchring.launch.hosts import LaunchError, address_towards, is_here
from torchring.rendezvous.addresses import list_interfaces, own_addresses

if TYPE_CHECKING:
    from torch.distributed import Store

_LOOPBACK: Final = "127.0.0.1"
_MOST_ADDRESSES: Final = 16
_BACKLOG: Final = 1024  # workers may connect before torch is there
_TIMEOUT: Final = timedelta(seconds=60)
_KEPT: Final = 2  # generations whose keys stay


class Listener:
    """A socket for the store.

    It listens on loopback if this host is the only one and no others can come. Otherwise it listens at the address
    through which this host reaches the other hosts. It listens everywhere if there are several such addresses, or if
    the hosts may change.

    Args:
        hosts: where workers start.
        interface: the name of the network interface to listen at; "" to choose.

    Raises LaunchError.
    """

    def __init__(self, hosts: Hosts, interface: str = "") -> None:
        self.secret = secrets.token_hex(16)  # of the driver and its workers. It signs what they say in the store.
        address, self.addresses = _choose(hosts, interface)  # where workers can reach the store, the likeliest first
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self.socket = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise LaunchError(f"cannot listen at {address or 'any address'}: {error.strerror or error}") from error
        self.port = int(self.socket.getsockname()[1])  # of the store
        self.own_address = address or _LOOPBACK

    def close(self) -> None:
        """Close the socket, unless a store has taken it over."""
        self.socket.close()


def _choose(hosts: Hosts, interface: str) -> tuple[str, tuple[str, ...]]:
    """The address to listen at, "" for all, and the addresses to tell workers."""
    remote = [host.name for host in hosts.known or () if not is_here(host.name)]
    if not remote and not hosts.may_change:
        return _LOOPBACK, (_LOOPBACK,)
    if interface:
        address = next((address for name, address in list_interfaces() if name == interface), None)
        if address is None:
            raise LaunchError(f"this host has no network interface {interface!r} with an address")
        return address, (address,)
    towards = list(dict.fromkeys(address_towards(name) for name in remote))
    if not hosts.may_change and len(towards) == 1:
        return towards[0], (towards[0],)
    addresses = [address for address in dict.fromkeys([*towards, *own_addresses()]) if ":" not in address]
    return "", tuple(addresses[:_MOST_ADDRESSES])


class DriverStore:
    """The driver's side of protocol.py. The store's server runs in threads of its own, from the constructor on.

    Imports torch, which takes seconds.
    """

    def __init__(self, listener: Listener) -> None:
        from torchring.rendezvous.signed import signed
        from torchring.rendezvous.store import host_on

        self._server = host_on(listener.socket, _TIMEOUT)
        self._store: Store = signed(self._server, listener.secret)
        self._told = Orders()
        self._set(TOKEN, b"")
        self._set(ORDERS, self._told.encode())

    def add_worker(self, worker: int) -> None:
        """Reading this worker's card waits no more. A worker that was started before the store may have set it."""
        self._store.compare_set(card_key(worker), "", Card("starting").encode().decode())

    def forget_worker(self, worker: int) -> None:
        self._store.delete_key(card_key(worker))

    def read(self, keys: list[str]) -> list[bytes]:
        """The values of keys that are there. Raises TopologyError if a stranger has changed one, or the orders."""
        every = [*keys, ORDERS]
        if not self._server.check(every):  # to read what is not there would wait
            raise TopologyError("the rendezvous store lacks a value that was there: a stranger has removed it")
        return list(self._store.multi_get(every))[: len(keys)]

    def tell(self, orders: Orders) -> None:
        """Tell the workers, also those that are opening a world that is broken. The keys of old generations go."""
        if orders == self._told:
            return
        self._set(ORDERS, orders.encode())
        if orders.how != self._told.how:
            error = PeerLostError(orders.how, peers=orders.lost)
            self._set(f"{world_prefix(orders.broken)}/gave_up", encode_error(error))
        if (old := orders.generation - _KEPT) >= 1:
            begin = f"{world_prefix(old)}/"
            with contextlib.suppress(RuntimeError):
                for key in self._server.list_keys():
                    if key.startswith(begin):
                        self._server.delete_key(key)
        self._told = orders

    def _set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # takes bytes, too
