"""Numbers as people read them: three digits, a unit, and the spread."""

from __future__ import annotations

from typing import Final

from torchring.report.model.timing import Spread

_SPACE: Final = "\u00a0"  # a number and its unit stay on one line
_JOINED: Final = "\u2060"  # no line ends here


def number(value: float, like: float | None = None) -> str:
    """About three digits, never with an exponent: 1,234 or 12.3 or 0.12. `like`: with as many decimals as this one."""
    size = abs(value if like is None else like)
    decimals = 0 if size >= 100 or size == 0 else 1 if size >= 10 else 2 if size >= 0.1 else 3
    return f"{value:,.{decimals}f}"


def milliseconds(value: float) -> str:
    return f"{number(value)}{_SPACE}ms"


def seconds(value: float) -> str:
    """A duration of that many seconds, in minutes and hours if it is long."""
    if value < 120:
        return f"{number(value)}{_SPACE}s"
    return f"{number(value / 60)}{_SPACE}minutes" if value < 7200 else f"{number(value / 3600)}{_SPACE}hours"


def percent(share: float) -> str:
    """A share, from 0 to 1."""
    if 0 < share < 0.0005:
        return "<0.1%"
    return f"{100 * share:.1f}%" if 0 < share < 0.0995 else f"{100 * share:.0f}%"


def megabytes(num_bytes: float) -> str:
    """Bytes in units of 10**6 bytes."""
    return f"{number(num_bytes / 1e6)}{_SPACE}MB"


def rate(gigabytes_per_s: float) -> str:
    return f"{number(gigabytes_per_s)}{_SPACE}GB/s ({number(8 * gigabytes_per_s)}{_SPACE}Gbit/s)"


def bounds(spread: Spread) -> str:
    """The range of the middle three fifths of the measurements: "98–105"."""
    return f"{number(spread.low, spread.median)}–{_JOINED}{number(spread.high, spread.median)}"


def median(spread: Spread) -> str:
    """The median and its unit: "101 ms"."""
    return f"{number(spread.median)}{_SPACE}{spread.unit}"


def with_spread(spread: Spread) -> str:
    """The median, its unit and its spread: "101 ms (98–105)"."""
    return f"{median(spread)}{_SPACE}({bounds(spread)})"


def mean_with_spread(spread: Spread) -> str:
    """The mean, its unit and the spread of single measurements: "101 ms (98–105)"."""
    around = f"{number(spread.low, spread.mean)}–{_JOINED}{number(spread.high, spread.mean)}"
    return f"{number(spread.mean)}{_SPACE}{spread.unit}{_SPACE}({around})"
