"""The key-value server of Horovod's launchers, as a client: plain HTTP, as of Horovod 0.28.

PUT http://address:port/scope/key    sets a value
GET http://address:port/scope/key    returns it; 404: nobody has set it yet
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from typing import Final

_SCOPE: Final = "torchring"  # the server takes any word
_SECONDS: Final = 5.0  # for one request
# Not through the proxy that http_proxy may name: the server is in the cluster.
_opener: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def put(server: tuple[str, int], key: str, value: bytes) -> None:
    """Set the value of `key`. Raises OSError if the server does not answer, or refuses."""
    _request(server, key, value)


def get(server: tuple[str, int], key: str) -> bytes | None:
    """The value of `key`; None if nobody has set it yet. Raises OSError if the server does not answer, or refuses."""
    try:
        return _request(server, key, None)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


def _request(server: tuple[str, int], key: str, value: bytes | None) -> bytes:
    host, port = server
    name = f"[{host}]" if ":" in host else host
    method = "GET" if value is None else "PUT"
    request = urllib.request.Request(f"http://{name}:{port}/{_SCOPE}/{key}", data=value, method=method)
    try:
        with _opener.open(request, timeout=_SECONDS) as answer:
            return bytes(answer.read())
    except http.client.HTTPException as error:
        raise OSError(f"no answer in HTTP: {type(error).__name__}: {error}") from error
