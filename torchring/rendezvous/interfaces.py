"""This machine's network interfaces, and at which address Gloo listens for other ranks."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Mapping, Sequence
from ipaddress import IPv6Address
from pathlib import Path
from typing import Final

_SIOCGIFADDR: Final = 0x8915


def list_interfaces() -> list[list[str]]:
    """[name, address] pairs: the first IPv4 address of each interface, all IPv6 ones."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # has none
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append([name, socket.inet_ntoa(answer[20:24])])
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found.append([name, str(IPv6Address(bytes.fromhex(digits)))])
    return found


def resolve(host: str) -> list[str]:
    """Addresses of a name, IPv4 and IPv6, in the resolver's order; none if it is not known."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def gloo_address(environ: Mapping[str, str], interfaces: Sequence[Sequence[str]], resolved: Sequence[str]) -> str:
    """The address at which Gloo listens, as torch.distributed chooses it.

    That of the (first) interface in GLOO_SOCKET_IFNAME; else the first that this machine's name resolves to and that is
    its own; else 127.0.0.1. Returns "" if GLOO_SOCKET_IFNAME names an interface that does not exist.
    """
    if named := environ.get("GLOO_SOCKET_IFNAME"):
        return next((address for name, address in interfaces if name == named.split(",")[0]), "")
    own = {address for _, address in interfaces}
    return next((address for address in resolved if address in own or address.startswith("127.")), "127.0.0.1")
