"""How the benchmarks of a GPU time work, and the rows that they give."""

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from torchring.bench import measure
from torchring.bench.measure import Spread

Row = dict[str, Any]
Case = tuple[Row, Callable[[], Row]]
"""What a row is about, and a function that measures the rest of the row."""

_CYCLES_PER_SECOND: Final = 2e9  # about
_REPETITIONS: Final = 15


def measured(cases: Iterable[Case]) -> Iterator[Row]:
    """The rows of all cases. The row of a case that fails has a "problem"."""
    for row, run in cases:
        try:
            yield row | run()
        except Exception as error:  # Triton's are of many kinds
            traceback.print_exc()
            yield row | {"problem": f"{type(error).__name__}: {error}"}


def text_of(row: Row) -> str:
    """A row as a line: p50 (p20-p80) for quantiles."""

    def text(value: Any) -> str:
        if not isinstance(value, dict):
            return f"{value:.4g}" if isinstance(value, float) else str(value)
        if "p50" in value:
            return f"{value['p50']:.4g} ({value['p20']:.4g}-{value['p80']:.4g})"
        return "{" + ", ".join(f"{key} {text(each)}" for key, each in value.items()) + "}"

    hidden = ("script", "stats", "reason")
    return "  ".join(f"{key}={text(value)}" for key, value in row.items() if key not in hidden)


def sleep(seconds: float) -> None:
    """Have the current stream sleep for about so long."""
    torch.cuda._sleep(int(seconds * _CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]


def event() -> torch.cuda.Event:
    """An event that the current stream has just been given."""
    made = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    made.record()
    return made


def gpu_seconds(works: Mapping[str, Callable[[], object]], lead: float = 2e-3) -> dict[str, list[float]]:
    """The seconds that the GPU takes for each of `works`, by name, with a cold cache. Works take turns.

    lead: seconds that the host has for launching a work.

    The host takes longer to launch a small kernel than the GPU takes to run it. So the GPU first sleeps, until the host
    has launched all work, and events before and after the work give the GPU's time.
    """
    cache = torch.empty(4 * torch.cuda.get_device_properties().L2_cache_size, dtype=torch.int8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in works}
    for repetition in range(-2, _REPETITIONS):
        for name in measure.in_turn(list(works), repetition):
            cache.zero_()
            sleep(lead)
            begin = event()
            works[name]()
            end = event()
            torch.cuda.synchronize()
            if repetition >= 0:
                times[name].append(float(begin.elapsed_time(end)) / 1e3)
    return times


def host_seconds(work: Callable[[], object], calls: int) -> float:
    """The host's seconds for each of several calls, until the GPU is done."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / calls


def spreads(times: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """The spread of each list of seconds, in milliseconds."""
    return {name: vars(Spread.of(seconds)) for name, seconds in times.items()}


def microseconds(seconds: Sequence[float]) -> dict[str, Any]:
    return vars(Spread.of([1e3 * each for each in seconds]))


def shares(times: Mapping[str, Sequence[float]], of: str) -> dict[str, float]:
    """The speed of each work divided by the speed of work `of` in the same repetition: the median."""
    return {
        name: Spread.of([base / each / 1e3 for base, each in zip(times[of], own, strict=True)]).p50
        for name, own in times.items()
        if name != of
    }
