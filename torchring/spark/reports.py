"""What ranks tell the driver while they run, over a connection each, in lines of JSON.

    {"token": ..., "partition": 0, "name": "rank 1 of 2 (pid 71 on host a)", "rank": 1}     first
    {"output": "loss 0.5"}                                                                  any number
    {"failure": traceback, "is_consequence": false}   or   {"done": true}                   last

A connection that ends without the last line is that of a rank that was killed. Spark sees that, too, and ends the job,
but knows partitions only. Without connections, as behind a firewall, jobs run all the same.
"""

import contextlib
import hmac
import json
import secrets
import socket
import socketserver
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Final, cast

_CONNECT_SECONDS: Final = 5.0
_DRAIN_SECONDS: Final = 10.0
# Anybody may connect. A rank shows the token at once, in its first line.
_TOKEN_SECONDS: Final = 10.0
_TOKEN_BYTES: Final = 4096
_MOST_STRANGERS: Final = 64  # connections that have not shown the token


class Reports(socketserver.ThreadingTCPServer):
    """Listens on the driver, and prints the output of ranks, whole lines with the rank before each."""

    daemon_threads = True
    request_queue_size = 128  # many ranks connect at the same moment; socketserver has 5

    def __init__(self, address: str) -> None:
        self.token: Final = secrets.token_hex(16)  # what ranks have to know
        self.names: Final[dict[int, str]] = {}  # by partition, what to call the rank
        # What ended ranks: name, traceback (None if the rank was killed), whether another rank is the cause.
        self.failures: Final[list[tuple[str, str | None, bool]]] = []
        self._changed: Final = threading.Condition()
        self._num_read = 0
        self._strangers: Final[list[socket.socket]] = []
        super().__init__((address, 0), _Listener)
        poll = {"poll_interval": 0.05}  # seconds that its end may take
        threading.Thread(target=self.serve_forever, kwargs=poll, name="torchring-spark", daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        """See socketserver. The stranger who has been here longest makes room."""
        with self._changed:
            self._strangers.append(request)
            if len(self._strangers) > _MOST_STRANGERS:
                with contextlib.suppress(OSError):
                    self._strangers.pop(0).shutdown(socket.SHUT_RD)
        super().process_request(request, client_address)

    def is_rank(self, token: object, request: socket.socket) -> bool:
        """Whether a connection has shown the token."""
        with self._changed, contextlib.suppress(ValueError):
            self._strangers.remove(request)
        return isinstance(token, str) and hmac.compare_digest(token.encode(errors="replace"), self.token.encode())

    def note_end(self) -> None:
        """The last line of a connection was read, and what came before was printed."""
        with self._changed:
            self._num_read += 1
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until the output is printed of all ranks that have connected. For when all have ended well."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_read >= len(self.names), _DRAIN_SECONDS)

    def server_close(self) -> None:
        """End the thread as well."""
        self.shutdown()
        super().server_close()


class _Listener(socketserver.StreamRequestHandler):
    server: Reports

    def handle(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.connection.settimeout(_TOKEN_SECONDS)
        first = self._next(_TOKEN_BYTES)
        if not self.server.is_rank(first.get("token"), self.connection):
            return
        self.connection.settimeout(None)
        self.server.names[first["partition"]] = first["name"]
        while "output" in (said := self._next()):
            # In one piece: print() writes the end of a line by itself, and other ranks' threads may come between.
            print(f"[{first['rank']}] {said['output']}\n", end="", flush=True)
        self.server.note_end()
        if "done" not in said:
            self.server.failures.append((first["name"], said.get("failure"), said.get("is_consequence", False)))

    def _next(self, most_bytes: int = -1) -> dict[str, Any]:
        """The next line; {} at the end, or if the connection breaks or brings something else."""
        try:
            said = json.loads(self.rfile.readline(most_bytes))
        except (OSError, ValueError, RecursionError):
            return {}
        return said if isinstance(said, dict) else {}


class Reporter:
    """A rank's end of the connection. Where there is none, nothing is said."""

    def __init__(self, address: tuple[str, int], **first: Any) -> None:
        self._lock = threading.Lock()
        self.socket: socket.socket | None = None
        try:
            self.socket = socket.create_connection(address, timeout=_CONNECT_SECONDS)
            self.socket.settimeout(None)
        except OSError as error:
            print(f"torchring: the driver shows no output: no connection to {address[0]}:{address[1]} ({error})")
        self.say(**first)

    def say(self, **words: Any) -> None:
        """Send one line."""
        line = json.dumps(words).encode() + b"\n"
        with self._lock, contextlib.suppress(OSError):  # if the driver is gone, Spark ends this task
            if self.socket is not None:
                self.socket.sendall(line)

    def close(self) -> None:
        """Say no more. Also for a forked child, in which nobody would release the lock."""
        self._lock = threading.Lock()
        if self.socket is not None:
            self.socket.close()
            self.socket = None


class _Copied:
    """A stdout or stderr of which the driver gets each line. In local mode `inner` is the driver's, and gets none."""

    def __init__(self, inner: Any, reporter: Reporter, is_local: bool) -> None:
        self._inner, self._reporter, self._is_local = inner, reporter, is_local
        self._line = ""

    def write(self, text: str) -> int:
        if not self._is_local or self._reporter.socket is None:
            self._inner.write(text)
        *lines, self._line = (self._line + text).replace("\r", "\n").split("\n")
        for line in filter(None, lines):
            self._reporter.say(output=line)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def end_line(self) -> None:
        """Send a last line that has no end."""
        if self._line:
            self.write("\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextlib.contextmanager
def copied_output(reporter: Reporter, is_local: bool) -> Iterator[None]:
    """The driver gets what this process prints in this context, but for lines that C or a child process prints."""
    out, error = (cast(Any, _Copied(stream, reporter, is_local)) for stream in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            yield
        finally:
            out.end_line()
            error.end_line()
