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


def ask(server: tuple[str, int], key: str, value: bytes | None = None) -> bytes | None:
    """Set the value of `key`, or return it if none is given: None if nobody has set it yet.

    Raises OSError if the server does not answer, or refuses.
    """
    host, port = server
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/{_SCOPE}/{key}"
    request = urllib.request.Request(url, data=value, method="GET" if value is None else "PUT")
    try:
        with _opener.open(request, timeout=_SECONDS) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        if error.code == 404 and value is None:
            return None
        raise
    except http.client.HTTPException as error:
        raise OSError(f"no answer in HTTP: {type(error).__name__}: {error}") from error
