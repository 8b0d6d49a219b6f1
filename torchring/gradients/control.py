"""Control bits: what ranks tell each other in every round, in the wire buffer of the first bucket.

Each participant of a round registers the names of its bits, see `Participant`. The order of the names is the order on
the wire, so ranks compare the names together with their parameters before the first round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

FRACTION_BITS: Final = 16  # of a number in a wire of 16 bits
NUMBER_BITS: Final = 48


class ControlSums(dict[str, float]):
    """For each name the sum over ranks: of a bit, how many ranks have set it. 0 for a name that nobody has."""

    def __missing__(self, name: str) -> float:
        return 0


@dataclass(frozen=True)
class ControlFields:
    """The names, in the order on the wire.

    Attributes:
        bits: 0 or 1 on each rank.
        numbers: 0, or from 2**-10 to 2**28. In a wire of 16 bits, a multiple of 2**-16.
    """

    bits: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()

    def describe(self) -> str:
        """The line that ranks compare."""
        return f"control bits: {', '.join((*self.bits, *self.numbers))}"

    def num_elements(self, wire: torch.dtype) -> int:
        """Number of elements that the fields take in a wire buffer of dtype `wire`."""
        return len(self.bits) + len(self.numbers) * _width(wire)

    def encode(self, values: Mapping[str, float], wire: torch.dtype) -> list[float]:
        """The elements, which ranks add up. A field without a value is 0."""
        elements = [float(values.get(name, 0)) for name in self.bits]
        for name in self.numbers:
            elements += encode_number(values.get(name, 0.0), wire)
        return elements

    def decode(self, elements: Sequence[float], wire: torch.dtype) -> ControlSums:
        """The sums, given the sums of the elements."""
        sums = ControlSums(zip(self.bits, map(round, elements), strict=False))
        width, start = _width(wire), len(self.bits)
        for name in self.numbers:
            sums[name] = decode_number(elements[start : start + width], wire)
            start += width
        return sums


def encode_number(number: float, wire: torch.dtype) -> list[float]:
    """16 bits do not hold a number, so there each element is a binary digit, whose sum counts ranks."""
    if wire.itemsize > 2:
        return [number]
    digits = round(number * 2**FRACTION_BITS)
    return [float(digits >> i & 1) for i in range(NUMBER_BITS)]


def decode_number(elements: Sequence[float], wire: torch.dtype) -> float:
    """The sum of the numbers whose elements were added up."""
    if wire.itemsize > 2:
        return float(elements[0])
    return float(sum(round(count) << i for i, count in enumerate(elements)) / 2**FRACTION_BITS)


def _width(wire: torch.dtype) -> int:
    return NUMBER_BITS if wire.itemsize == 2 else 1
