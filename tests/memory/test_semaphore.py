"""POSIX semaphores in shared memory: counting, sleeping, order between processes."""

import mmap
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from tests.support.harness import patient
from torchring.memory import semaphore


@pytest.fixture
def page() -> Iterator[torch.Tensor]:
    """A page that forked processes share, with two semaphores at its start."""
    memory = torch.frombuffer(mmap.mmap(-1, 4096), dtype=torch.uint8)
    for i in range(2):
        semaphore.initialise(memory.data_ptr() + i * semaphore.SEMAPHORE_STRIDE)
    return memory


def test_posts_are_counted_and_taken_one_by_one(page: torch.Tensor) -> None:
    address, neighbour = page.data_ptr(), page.data_ptr() + semaphore.SEMAPHORE_STRIDE
    assert semaphore.value(address) == 0
    assert semaphore.try_wait(address) == -1
    for _ in range(4):
        semaphore.post(address)
    assert (semaphore.value(address), semaphore.value(neighbour)) == (4, 0)
    assert semaphore.wait_for(address, 0.0) is True
    assert [semaphore.try_wait(address) for _ in range(4)] == [0, 0, 0, -1]
    assert semaphore.value(address) == 0
    assert not page[2 * semaphore.SEMAPHORE_STRIDE :].any(), "nothing is written behind the last one"
    semaphore.post(address)
    semaphore.initialise(address)
    assert semaphore.value(address) == 0


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.3])
def test_wait_for_gives_up_in_time(page: torch.Tensor, seconds: float) -> None:
    started = time.monotonic()
    assert semaphore.wait_for(page.data_ptr(), seconds) is False
    assert seconds - 0.005 <= time.monotonic() - started < seconds + patient(1.0)


def test_wait_for_releases_the_gil(page: torch.Tensor) -> None:
    """The poster is a thread of this process, which could not run if the sleeper kept the interpreter."""
    timer = threading.Timer(0.1, lambda: semaphore.post(page.data_ptr()))
    timer.start()
    started = time.monotonic()
    assert semaphore.wait_for(page.data_ptr(), 60.0) is True
    assert 0.05 < time.monotonic() - started < patient(5.0)
    timer.join()


def test_a_signal_interrupts_the_sleep(page: torch.Tensor) -> None:
    caught: list[int] = []
    previous = signal.signal(signal.SIGALRM, lambda number, _: caught.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        started = time.monotonic()
        assert semaphore.wait_for(page.data_ptr(), 60.0) is False
        assert time.monotonic() - started < patient(5.0)
        assert caught == [signal.SIGALRM]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
