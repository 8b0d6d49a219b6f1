"""Clocks for work that a GPU does: turns, spreads, and a queue that never runs dry.

The host takes longer to call for a small kernel than the GPU to run it. So before each timed stretch the GPU sleeps
for as long as the host needs to call for all of it; events before and after then say how long the GPU took. Where the
host still falls behind, because a rival makes thousands of launches, the time holds its delays, too, and is marked.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch

from torchring.bench import measure
from torchring.bench.measure import Spread

_FIRST_LEAD_SECONDS: Final = 0.002
_LONGEST_LEAD_SECONDS: Final = 0.05
_UNKNOWN_CACHE_BYTES: Final = 64 << 20


class Timer(Protocol):
    """A clock for one device.

    Attributes:
        device: what is timed.
        cache_bytes: of its last-level cache.
        late: for each key, how often the host fell behind.
    """

    device: torch.device
    cache_bytes: int
    late: dict[str, int]

    def seconds(self, key: str, work: Callable[[], object]) -> float:
        """What the device takes for `work`, which may be called twice. Returns when it is done.

        key: works of the same key take the host about the same time.
        """

    def reset(self) -> None:
        """Keys are about to mean something else."""

    def evict(self) -> None:
        """Fill the device's cache with something else, none of which has to be written back."""

    def synchronize(self) -> None: ...


class CudaTimer:
    """See `Timer`; by events on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        properties = torch.cuda.get_device_properties(device)
        self.cache_bytes = int(getattr(properties, "L2_cache_size", 0)) or _UNKNOWN_CACHE_BYTES
        self.late: dict[str, int] = {}
        self._leads: dict[str, float] = {}
        self._other = torch.zeros(self.cache_bytes, device=device)  # 4 bytes an element: four times the cache
        self._cycles_per_second = self._calibrate()

    def seconds(self, key: str, work: Callable[[], object]) -> float:
        elapsed, host, is_ahead = self._once(self._leads.setdefault(key, _FIRST_LEAD_SECONDS), work)
        if not is_ahead and self._leads[key] < _LONGEST_LEAD_SECONDS:
            self._leads[key] = min(2 * host + _FIRST_LEAD_SECONDS, _LONGEST_LEAD_SECONDS)
            elapsed, _, is_ahead = self._once(self._leads[key], work)
        self.late[key] = self.late.get(key, 0) + (not is_ahead)
        return elapsed

    def reset(self) -> None:
        self.late.clear()
        self._leads.clear()

    def evict(self) -> None:
        self._other.sum()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def _once(self, lead_seconds: float, work: Callable[[], object]) -> tuple[float, float, bool]:
        """Seconds of the device, seconds of the host, and whether the host was done before the device began."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda._sleep(int(lead_seconds * self._cycles_per_second))  # type: ignore[no-untyped-call]
        begin.record()
        started = time.perf_counter()
        work()
        host = time.perf_counter() - started
        end.record()
        is_ahead = not begin.query()  # type: ignore[no-untyped-call]
        self.synchronize()
        return float(begin.elapsed_time(end)) / 1e3, host, is_ahead

    def _calibrate(self) -> float:
        """Cycles that the GPU sleeps in a second."""
        cycles = 10_000_000
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2):  # the first one warms up
            begin.record()
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            end.record()
            self.synchronize()
        return cycles / max(float(begin.elapsed_time(end)) / 1e3, 1e-6)


class HostTimer:
    """See `Timer`; for dry runs on the CPU."""

    cache_bytes = 1 << 12

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.late: dict[str, int] = {}

    def seconds(self, key: str, work: Callable[[], object]) -> float:
        started = time.perf_counter()
        work()
        self.late.setdefault(key, 0)
        return time.perf_counter() - started

    def reset(self) -> None:
        self.late.clear()

    def evict(self) -> None: ...

    def synchronize(self) -> None: ...


def open_timer(device: torch.device) -> Timer:
    return CudaTimer(device) if device.type == "cuda" else HostTimer()


def take_turns(
    turns: Mapping[str, Callable[[], float]], *, until: float, most: int, warmups: int = 1
) -> dict[str, list[float]]:
    """Have every rival take its turn, which returns its seconds, again and again, in an order that rotates.

    Args:
        until: of time.monotonic(); stop after the repetition in which it is reached, the third at the earliest.
        most: counted repetitions at the most.
        warmups: those that are not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in turns}
    for repetition in range(-warmups, most):
        for name in measure.in_turn(list(turns), repetition):
            seconds = turns[name]()
            if repetition >= 0:
                times[name].append(seconds)
        if repetition >= 2 and time.monotonic() > until:
            break
    return times


def spreads(times: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """As rows carry them: milliseconds."""
    return {name: vars(Spread.of(seconds)) for name, seconds in times.items()}


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """p20, p50 and p80 of plain numbers."""
    if len(values) == 1:
        return dict.fromkeys(("p20", "p50", "p80"), values[0])
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return {"p20": cuts[1], "p50": statistics.median(values), "p80": cuts[7]}


def rates(times: Mapping[str, Sequence[float]], num_bytes: int) -> dict[str, dict[str, float]]:
    """GB/s of each, where `num_bytes` are read and written in a call."""
    return {name: quantiles([num_bytes / seconds / 1e9 for seconds in own]) for name, own in times.items()}


def shares(times: Mapping[str, Sequence[float]], of: str) -> dict[str, dict[str, float]]:
    """How fast each was as a share of rival `of`, repetition by repetition: what slows one down slows both."""
    return {
        name: quantiles([base / seconds for base, seconds in zip(times[of], own, strict=True)])
        for name, own in times.items()
        if name != of
    }
