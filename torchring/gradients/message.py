"""The message of a reduction: what each rank tells all ranks, once in each backward that reduces.

Everything that ranks must agree on is in it: number of the reduction, which optimizers the backward has reached, which
parameters it has not, weight, NaN, and what participants add. Each of these is a number, 0 where a rank says nothing.
The message leaves behind the last bucket, and is awaited after it. With several optimizers, a backward has one message
about all of them.
"""

from __future__ import annotations

import struct
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Final

OF_REDUCER: Final = (
    *(
        "reach",
        "is_complete",
        "is_in_no_sync",
        "num_aborted",
        "number",
        "has_ended",
        "has_newly_trainable",
        "weight",
        "is_weighted",
    ),
    *("non_finite", "overflowed"),
)
"""reach: 0 if the backward has not reached the optimizer, 1 if it accumulates, 2 if it reduces.

is_complete: the reduction has begun on this rank, and is described. is_in_no_sync: see `Reducer`. num_aborted: see
`Launcher`. number: of the reduction. has_ended: the rank has no data left, inside `torchring.join`.
has_newly_trainable: a parameter that was frozen requires a gradient. weight: of the rank, see `weights.py`.
is_weighted: whether `weigh` gave it.
non_finite, overflowed: 1 + the index of a parameter, see `Agreement`.
"""
_LENGTH: Final = struct.Struct("<I")


class Said:
    """What all ranks have said about one reduction.

    Attributes:
        by_rank: by field, what each rank has said.
        sums: by field, the sum over ranks. 0 for a field that nobody has.
        unused: indices of the parameters that no rank has used.
    """

    def __init__(self, by_rank: Mapping[str, Sequence[float]], unused: Set[int] = frozenset()) -> None:
        self.by_rank = by_rank
        self.sums: Counter[str] = Counter()
        self.sums.update({field: sum(values) for field, values in by_rank.items()})
        self.unused = unused


class MessageFormat:
    """The fields of the message about one optimizer, equal on all ranks.

    Args:
        fields: names of what participants add.
    """

    def __init__(self, fields: Iterable[str]) -> None:
        self._fields = (*OF_REDUCER, *fields)
        self._numbers = struct.Struct(f"<{len(self._fields)}d")

    def describe(self) -> str:
        """The line that ranks compare."""
        return f"message: {', '.join(self._fields)}"

    def encode(self, values: Mapping[str, float], unused: Iterable[int] = ()) -> bytes:
        """One rank's message. `unused`: indices of parameters."""
        return self._numbers.pack(*[values.get(field, 0.0) for field in self._fields]) + array("I", unused).tobytes()

    def decode(self, messages: Sequence[bytes]) -> Said:
        """What all ranks have said, given the message of each."""
        rows = zip(*map(self._numbers.unpack_from, messages), strict=True)
        rests = [message[self._numbers.size :] for message in messages]
        unused: Set[int] = frozenset()
        if all(rests):
            unused = frozenset.intersection(*(frozenset(memoryview(rest).cast("I")) for rest in rests))
        return Said(dict(zip(self._fields, rows, strict=True)), unused)


def join(messages: Sequence[bytes]) -> bytes:
    """The messages about several optimizers as one."""
    return b"".join([_LENGTH.pack(len(message)) + message for message in messages])


def split(joined: bytes) -> list[bytes]:
    """The inverse of `join`."""
    messages, start = [], 0
    while start < len(joined):
        (length,) = _LENGTH.unpack_from(joined, start)
        start += _LENGTH.size + length
        messages.append(joined[start - length : start])
    return messages
