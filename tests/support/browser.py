"""A headless Chromium for tests, steered through its DevTools protocol: JSON messages over two pipes."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")

# Chromium takes messages from descriptor 3 and sends its own to descriptor 4. Each message ends with a NUL.
_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
_OPTIONS = [
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # which root cannot have
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # no page reaches a network
]


def find() -> str | None:
    """Path of a Chromium, if one is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of one browser process. All that it does has to end `seconds` after it was opened."""

    def __init__(self, program: str, folder: Path, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        self._num_sent = 0
        self._received = b""
        take, self._write = _pipe()
        self._read, give = _pipe()
        theirs = (take, give)
        launcher = [sys.executable, "-S", "-c", _START, *map(str, theirs)]
        self._process = subprocess.Popen(
            [*launcher, program, *_OPTIONS, f"--user-data-dir={folder}"],
            pass_fds=theirs,
            env={**os.environ, "HOME": str(folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for end in theirs:
            os.close(end)
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        """End the processes of the browser: they are a group of their own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
        os.close(self._write)
        os.close(self._read)

    def send(self, method: str, **parameters: object) -> dict[str, Any]:
        """Have the browser do something; its answer. Events that come before the answer are kept in `events`."""
        self._num_sent += 1
        message = {"id": self._num_sent, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._num_sent:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            left = self.deadline - time.monotonic()
            if left < 0 or not select.select([self._read], [], [], left)[0]:
                raise TimeoutError("the browser has not answered in time")
            chunk = os.read(self._read, 1 << 20)
            assert chunk, "the browser has ended"
            self._received += chunk
        message, _, self._received = self._received.partition(b"\0")
        return dict(json.loads(message))

    def open(self, page: Path) -> None:
        """Load a file, and wait until its scripts have run."""
        self.events.clear()
        self.send("Page.navigate", url=page.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def resize(self, width: int, height: int = 800, *, is_phone: bool = False) -> None:
        """Give the page a window of that many CSS pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )

    def prefer(self, scheme: str) -> None:
        """Let the operating system ask for "light" or "dark"."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression; of a promise, what it resolves to."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_until(self, condition: str, seconds: float = 20.0) -> None:
        """Wait until a JavaScript expression is true. It is looked at before each frame that the page draws."""
        is_true = self.evaluate(
            f"new Promise(done => {{ const end = Date.now() + {1000 * seconds};"
            f" const look = () => ({condition}) ? done(true) : Date.now() > end ? done(false)"
            " : requestAnimationFrame(look); look(); })"
        )
        assert is_true, f"not so within {seconds} s: {condition}"

    def point_at(self, x: float, y: float) -> None:
        """Move the mouse, in CSS pixels from the upper left corner of the window."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str, code: int) -> None:
        """Press a key that writes nothing."""
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def complaints(self) -> list[str]:
        """What the page has written to the console, exceptions, and what its security policy has forbidden."""
        found = []
        for event in self.events:
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(event["params"]["exceptionDetails"]))
            elif event.get("method") == "Log.entryAdded":
                found.append(str(event["params"]["entry"]["text"]))
            elif event.get("method") == "Runtime.consoleAPICalled":
                found.append(str(event["params"]["args"]))
        return found

    def requests(self) -> list[str]:
        """Addresses that the page has asked for, other than data inside it."""
        asked = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith(("data:", "blob:"))]

    def photograph(self, path: Path) -> None:
        """Write a picture of the whole page."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(answer["data"]))


def _pipe() -> tuple[int, int]:
    """A pipe whose descriptors are neither 3 nor 4, which the new process overwrites."""
    low = os.pipe()
    read, write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low)
    for end in low:
        os.close(end)
    return read, write
