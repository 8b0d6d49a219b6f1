"""The service through which the driver of Horovod's elastic jobs tells a worker that hosts have changed.

A worker listens at a port, and tells the driver where, with a key that only the two know. The driver then asks whether
the worker is there, and later announces changes to the worker of rank 0. Each message, either way, is

    HMAC-SHA256 of the body with the key, 32 bytes      length of the body, 4 bytes      body, a pickled object

The objects are of classes of Horovod's, of which this process has none. So those that come are read as the classes
below, those that go are written by hand, and a message that names any other class is refused. Nothing is unpickled
before its HMAC has been checked. Source: horovod.runner.common.util.network, horovod.runner.elastic.worker (0.28).
"""

from __future__ import annotations

import base64
import enum
import hashlib
import hmac
import io
import logging
import pickle
import secrets
import socketserver
import struct
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

from torchring.rendezvous.addresses import list_interfaces
from torchring.rendezvous.key_values import put

_NETWORK: Final = "horovod.runner.common.util.network"
_WORKER: Final = "horovod.runner.elastic.worker"
_SERVICE: Final = "worker notification service"
_KEY_BYTES: Final = 32
_LENGTH: Final = struct.Struct("=i")
_MOST_BYTES: Final = 64 * 1024  # of a body; those of the driver have a few hundred
_MESSAGE_SECONDS: Final = 5.0  # for a whole message
_ANNOUNCE_SECONDS: Final = 90.0  # the driver answers when it has tried all addresses, of each 3 times for 20 s

_log = logging.getLogger("torchring.horovod.elastic")


class NoticeService:
    """Listens for announcements, on a thread of its own, and tells the driver where.

    Args:
        server: host and port of the driver's key-value server.
        name: "HOST:LOCAL_RANK", under which the driver knows this worker.
        interface: name of the network interface to listen at; None for all.
        hear: called on the service's thread with a time in seconds since the epoch, and the bits 1 (hosts were
            removed) and 2 (hosts were added).
    """

    def __init__(
        self, server: tuple[str, int], name: str, interface: str | None, hear: Callable[[float, int], None]
    ) -> None:
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._hear = hear
        places = [(each, address) for each, address in list_interfaces() if ":" not in address]
        wanted = [(each, address) for each, address in places if interface in (None, "", each)] or places
        at = wanted[0][1] if len(wanted) == 1 else ""
        me = weakref.ref(self)

        class Handler(socketserver.StreamRequestHandler):
            timeout = _MESSAGE_SECONDS

            def handle(self) -> None:
                service = me()
                if service is not None:
                    service._answer(self.rfile, self.wfile, str(self.client_address[0]))

        self._server = _Server((at, 0), Handler)
        port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="torchring-notices", daemon=True).start()
        addresses: dict[str, list[tuple[str, int]]] = {}
        for each, address in wanted:
            addresses.setdefault(each, []).append((address, port))
        value = base64.b64encode(pickle.dumps((addresses, self._key), protocol=4))
        try:
            put(server, name, value, scope="worker_addresses", seconds=_ANNOUNCE_SECONDS)
        except OSError as error:
            _log.warning(
                "horovodrun's driver will not tell %s when hosts are added or removed: it does not reach this worker "
                "at %s (%s)",
                name,
                ", ".join(f"{address}:{port}" for _, address in wanted),
                error,
            )

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, incoming: io.BufferedIOBase, outgoing: io.BufferedIOBase, peer: str) -> None:
        try:
            request = _loads(read_message(incoming, self._key))
        except (OSError, ValueError, pickle.UnpicklingError) as error:
            _log.warning("a message from %s is not one of the driver's: %s", peer, error)
            return
        if isinstance(request, _Updated):
            self._hear(float(request.timestamp), int(request.res))
            body = _dumps("AckResponse", {})
        else:
            body = _dumps("PingResponse", {"service_name": _SERVICE, "source_address": peer})
        write_message(outgoing, self._key, body)


def read_message(incoming: io.BufferedIOBase, key: bytes) -> bytes:
    """The body of the next message. Raises ValueError if it is cut off, too long, or the key is another."""
    digest = incoming.read(_KEY_BYTES)
    head = incoming.read(_LENGTH.size)
    if len(digest) < _KEY_BYTES or len(head) < _LENGTH.size:
        raise ValueError("cut off")
    length = _LENGTH.unpack(head)[0]
    if not 0 <= length <= _MOST_BYTES:
        raise ValueError(f"a body of {length} bytes; {_MOST_BYTES} are allowed")
    body = incoming.read(length)
    if not hmac.compare_digest(digest, hmac.digest(key, body, hashlib.sha256)):
        raise ValueError("it was not written with the key of this worker")
    return body


def write_message(outgoing: io.BufferedIOBase, key: bytes, body: bytes) -> None:
    """Write a message."""
    outgoing.write(hmac.digest(key, body, hashlib.sha256) + _LENGTH.pack(len(body)) + body)
    outgoing.flush()


class _Server(socketserver.TCPServer):
    """One message at a time, each within _MESSAGE_SECONDS."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a connection from %s broke off", client_address, exc_info=True)


class _Ping:
    """PingRequest: are you there?"""


class _Updated:
    """HostsUpdatedRequest.

    Attributes:
        timestamp: seconds since the epoch.
        res: what has changed.
    """

    timestamp: float = 0.0
    res: int = 0


class _Change(enum.IntFlag):
    """HostUpdateResult."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


def _member(kind: object, name: str) -> _Change:
    """In place of `getattr`, by which Python 3.11 pickles members of an enum."""
    if kind is not _Change:
        raise pickle.UnpicklingError("getattr of something else than HostUpdateResult")
    return _Change[name]


def _either(first: object, second: object) -> _Change:
    """In place of `operator.or_`, by which Python 3.11 pickles members of several bits."""
    if not (isinstance(first, int) and isinstance(second, int)):
        raise pickle.UnpicklingError("or of something else than HostUpdateResult")
    return _Change(first | second)


_CLASSES: Final[dict[tuple[str, str], Any]] = {
    (_NETWORK, "PingRequest"): _Ping,
    (_WORKER, "HostsUpdatedRequest"): _Updated,
    (_WORKER, "HostUpdateResult"): _Change,
    ("builtins", "getattr"): _member,
    ("_operator", "or_"): _either,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _CLASSES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a message of the driver's") from None


def _loads(body: bytes) -> _Ping | _Updated:
    try:
        found = _Unpickler(io.BytesIO(body)).load()
    except (pickle.UnpicklingError, OSError):
        raise
    except Exception as error:  # pickle raises nearly anything
        raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from error
    if not isinstance(found, _Ping | _Updated):
        raise pickle.UnpicklingError(f"a {type(found).__name__}")
    return found


def _dumps(name: str, attributes: dict[str, str]) -> bytes:
    """What pickling an object of a class of _NETWORK gives, with protocol 2."""
    state = pickle.dumps(attributes, protocol=2)[2:-1]
    make = pickle.GLOBAL + f"{_NETWORK}\n{name}\n".encode() + pickle.EMPTY_TUPLE + pickle.NEWOBJ
    return pickle.PROTO + b"\x02" + make + state + pickle.BUILD + pickle.STOP
