"""The addresses of this host: of its network interfaces, for other hosts, and the address at which Gloo listens."""

import contextlib
import fcntl
import socket
import struct
from collections.abc import Mapping, Sequence
from ipaddress import IPv6Address
from pathlib import Path
from typing import Final

from torchring.linux import host_name

_SIOCGIFADDR: Final = 0x8915


def list_interfaces() -> list[list[str]]:
    """[name, address] pairs: the first IPv4 address of each interface, all IPv6 ones."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append([name, socket.inet_ntoa(answer[20:24])])
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found.append([name, str(IPv6Address(bytes.fromhex(digits)))])
    return found


def own_addresses() -> list[str]:
    """The addresses at which other hosts may reach this host, the likeliest first, and the host name last."""
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing, but chooses the interface of the default route
        found.append(str(probe.getsockname()[0]))
    found += [address for _, address in list_interfaces()]
    return [address for address in dict.fromkeys([*found, host_name()]) if is_for_other_hosts(address)]


def is_for_other_hosts(address: str) -> bool:
    """Whether other hosts may reach the address, which is neither loopback nor link-local IPv6."""
    return address != "::1" and not address.startswith(("127.", "fe80:"))


def resolve(host: str) -> list[str]:
    """The IPv4 and IPv6 addresses of a host name, in the resolver's order. Empty if the name is unknown."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def gloo_address(environ: Mapping[str, str], interfaces: Sequence[Sequence[str]], resolved: Sequence[str]) -> str:
    """The address at which Gloo listens, as torch.distributed chooses it.

    GLOO_SOCKET_IFNAME decides if it is set: Gloo takes the address of the first interface that the variable names.
    Otherwise Gloo takes the first address in `resolved` that belongs to this host, or 127.0.0.1 if none does.

    `interfaces` is what `list_interfaces` returns, `resolved` the addresses of this host's name, from `resolve`.

    Returns "" if GLOO_SOCKET_IFNAME names an interface that does not exist.
    """
    if named := environ.get("GLOO_SOCKET_IFNAME"):
        return next((address for name, address in interfaces if name == named.split(",")[0]), "")
    own = {address for _, address in interfaces}
    return next((address for address in resolved if address in own or address.startswith("127.")), "127.0.0.1")
