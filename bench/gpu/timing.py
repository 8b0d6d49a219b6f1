"""Timers for work on a GPU, and turns of rivals on one device.

The host takes longer to launch a small kernel than the GPU takes to run the kernel. So the GPU sleeps before each timed
section, until the host has launched the whole section. Events before and after the section then give the GPU's time. If
a rival makes thousands of launches, the host may still fall behind: such times include the host's delays, and are
marked.

The sleep is given in clock cycles, and an idle GPU lowers its clock to a fifth. So the GPU multiplies matrices before
the first calibration, and each comparison of rivals begins with a calibration of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch

from torchring.bench import measure
from torchring.bench.measure import Spread

NO_TIME: Final = "there was no time left"  # the "problem" of rows that were not measured
_FIRST_LEAD_SECONDS: Final = 0.002
_LONGEST_LEAD_SECONDS: Final = 0.05
_UNKNOWN_CACHE_BYTES: Final = 64 << 20
_WARM_UP_SECONDS: Final = 0.3
_WARM_UP_SIZE: Final = 4096
_CALIBRATION_CYCLES: Final = 10_000_000


class Timer(Protocol):
    """Times work on one device.

    Attributes:
        device: the device.
        cache_bytes: size of the device's last-level cache.
        late: for each key, how often the host fell behind the device.
    """

    device: torch.device
    cache_bytes: int
    late: dict[str, int]

    def seconds(self, key: str, work: Callable[[], object]) -> float:
        """Run `work` and wait for it. Returns the seconds that the device took. May run `work` twice.

        key: name of the rival. The host should take about the same time for all work with the same key.
        """

    def reset(self) -> None:
        """Forget all keys, before they are used for other rivals. Calibrates again."""

    def evict(self) -> None:
        """Fill the device's cache with other data, which need not be written back."""

    def synchronize(self) -> None: ...


class CudaTimer:
    """A `Timer` that records events on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        properties = torch.cuda.get_device_properties(device)
        self.cache_bytes = int(getattr(properties, "L2_cache_size", 0)) or _UNKNOWN_CACHE_BYTES
        self.late: dict[str, int] = {}
        self._leads: dict[str, float] = {}
        self._other = torch.zeros(self.cache_bytes, device=device)  # fp32, so four times the size of the cache
        warm_up(device)
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
        self._cycles_per_second = self._calibrate()

    def evict(self) -> None:
        self._other.sum()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def _once(self, lead_seconds: float, work: Callable[[], object]) -> tuple[float, float, bool]:
        """(seconds of the device, seconds of the host, whether the host was done before the device began)."""
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
        """The number of cycles that make the GPU sleep for a second."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2):  # the first round warms up
            begin.record()
            torch.cuda._sleep(_CALIBRATION_CYCLES)  # type: ignore[no-untyped-call]
            end.record()
            self.synchronize()
        return _CALIBRATION_CYCLES / max(float(begin.elapsed_time(end)) / 1e3, 1e-6)


def warm_up(device: torch.device) -> None:
    """Multiply matrices until the clock of a GPU has risen. Does nothing for a CPU."""
    if device.type != "cuda":
        return
    matrix = torch.ones(_WARM_UP_SIZE, _WARM_UP_SIZE, dtype=torch.float16, device=device)
    end = time.perf_counter() + _WARM_UP_SECONDS
    while time.perf_counter() < end:
        for _ in range(10):
            matrix @ matrix
        torch.cuda.synchronize(device)


class Stopwatch:
    """The time from now until `stop`, on the current stream of a GPU, or on the host. Waits for nothing else."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._begin = self._now()

    def stop(self) -> Stopwatch:
        self._end = self._now()
        return self

    def seconds(self) -> float:
        """Waits until the stream has come to `stop`."""
        if not self._is_cuda:
            return float(self._end - self._begin)
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1e3

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class HostTimer:
    """A `Timer` for dry runs on the CPU."""

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
    """Let every rival have a turn, again and again, in an order that rotates. Returns the seconds of all turns.

    Args:
        turns: functions that run a turn and return its seconds, by the name of the rival.
        until: a time of time.monotonic(). Stop after the repetition that reaches it, and not before the third.
        most: largest number of repetitions that count.
        warmups: first repetitions, which do not count.
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
    """The spread of each rival's times in milliseconds, as rows carry it."""
    return {name: vars(Spread.of(seconds)) for name, seconds in times.items()}


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """The quantiles p20, p50 and p80 of the values."""
    if len(values) == 1:
        return dict.fromkeys(("p20", "p50", "p80"), values[0])
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return {"p20": cuts[1], "p50": statistics.median(values), "p80": cuts[7]}


def rates(times: Mapping[str, Sequence[float]], num_bytes: int) -> dict[str, dict[str, float]]:
    """GB/s of each rival, if a call reads and writes `num_bytes` in all."""
    return {name: quantiles([num_bytes / seconds / 1e9 for seconds in own]) for name, own in times.items()}


def shares(times: Mapping[str, Sequence[float]], of: str) -> dict[str, dict[str, float]]:
    """The speed of each rival divided by the speed of rival `of` in the same repetition, where load slows both."""
    return {
        name: quantiles([base / seconds for base, seconds in zip(times[of], own, strict=True)])
        for name, own in times.items()
        if name != of
    }
