"""One thread that does things in order, and ends when it is told to."""

import threading
import weakref
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from tests.support.commands import run_python
from tests.support.harness import wait_until
from torchring.threads import SerialThread


def test_in_order_on_one_thread_and_an_error_belongs_to_who_waits() -> None:
    worker = SerialThread("test-worker")
    seen: list[tuple[int, str]] = []

    def work(i: int) -> int:
        seen.append((i, threading.current_thread().name))
        return 9 // (i - 7)

    futures = [worker.submit(lambda i=i: work(i)) for i in range(50)]
    with pytest.raises(ZeroDivisionError):
        futures[7].result(10)
    assert futures[10].result(10) == 3
    futures[-1].result(10)
    assert seen == [(i, "test-worker") for i in range(50)]
    worker.close()


def test_what_has_not_begun_when_it_is_closed_is_cancelled() -> None:
    worker, gate, has_begun = SerialThread("test-worker"), threading.Event(), threading.Event()

    def wait() -> bool:
        has_begun.set()
        return gate.wait(10)

    first, second = worker.submit(wait), worker.submit(lambda: 2)
    assert has_begun.wait(10)
    worker.close()
    worker.close()
    gate.set()
    assert first.result(10)
    for future in (second, worker.submit(lambda: 3)):
        with pytest.raises(CancelledError):
            future.result(10)


def test_whoever_hears_of_a_cancellation_may_close_the_worker() -> None:
    worker = SerialThread("test")
    release = threading.Event()
    worker.submit(release.wait)
    waiting = worker.submit(int)
    waiting.add_done_callback(lambda _: worker.close())
    closing = threading.Thread(target=worker.close, daemon=True)
    closing.start()
    closing.join(10.0)
    assert not closing.is_alive()
    assert waiting.cancelled()
    release.set()
    worker.join(10.0)


def test_what_a_task_refers_to_is_gone_before_anybody_is_woken() -> None:
    """An engine's handle that goes while the interpreter exits ends the process with SIGABRT."""

    class Handle:
        def wait(self) -> None: ...

    worker, handle = SerialThread("test-worker"), Handle()
    gone = weakref.ref(handle)
    future = worker.submit(handle.wait)
    del handle
    future.result(10)
    assert gone() is None
    worker.close()


def test_the_thread_ends() -> None:
    for closes in (True, False):
        worker = SerialThread("a-worker-that-ends")
        worker.submit(lambda: None).result(10)
        if closes:
            worker.close()
        del worker
        wait_until(lambda: "a-worker-that-ends" not in [t.name for t in threading.enumerate()], "the thread to end")


STUCK = """
import sys, time
from datetime import timedelta
from torch.distributed import TCPStore
from torchring.threads import SerialThread

class Slow:
    sleep = time.sleep
    def __del__(self):
        self.sleep(0.9)

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
SerialThread("stuck").submit(lambda: store.wait(["never"], timedelta(seconds=0.5)))
sys.destroyed_late = Slow()
sys.exit(5)
"""


def test_a_thread_that_is_stuck_at_exit_changes_no_exit_code(tmp_path: Path) -> None:
    """The thread returns from C++ while the interpreter is taken down, and is not let back into Python."""
    (script := tmp_path / "stuck.py").write_text(STUCK)
    ran = run_python(script)
    assert ran.returncode == 5, ran.stderr
    assert "terminate" not in ran.stderr
