"""A reduction: its state, what ranks tell each other about it, and what takes part in it beside the gradients.

A reduction reduces all gradients of an optimizer, once. Each rank tells all ranks one message, in each backward that
reduces. Everything that ranks must agree on is in the message: number of the reduction, which optimizers the backward
has reached, which parameters it has not, weight, NaN, and what participants add. Each of these is a number, 0 where a
rank says nothing. The message leaves behind the last bucket, and is awaited after it. With several optimizers, a
backward has one message about all of them.

Features such as buffers and the replica check are participants: each has a file in `torchring/participants/` and a line
in `rooms.py`, and adds fields to the message. `Reducer` calls the participants, in one order on all ranks.
"""

import enum
import struct
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias

import torch

from torchring.observer import BucketEvents

StepPoint: TypeAlias = Literal["before", "agreed", "after"]
STEPS_BETWEEN_CHECKS: Final = 100  # a check reads every parameter: 70 ms for 42 M on one core


class NonFiniteGradient(NamedTuple):
    """The first NaN or infinity of a reduction.

    rank: whose gradient had it; None if only the sum over ranks overflowed.
    name: name of the parameter.
    tensor: returns the tensor that shows whether the value is still there: the gradient, or on a device the parameter,
        which may have been trained on it. None if the value has not been looked for since.
    """

    rank: int | None
    name: str
    tensor: Callable[[], torch.Tensor | None] | None

    def origin(self, compression: str | None) -> str:
        """Says where the value came from. A finite gradient that is too large for fp16 is infinity in the wire."""
        if compression != "fp16":
            sender = f"NaN or infinity came from rank {self.rank}"
            return "the sum over ranks overflowed" if self.rank is None else sender
        what = "the sum over ranks does not fit fp16"
        if self.rank is not None:
            what = f"NaN, infinity or a number that does not fit fp16 came from rank {self.rank}"
        return f"{what}. fp16 ends at 65504; compression='bf16' holds numbers as large as fp32 does"

    def is_still_there(self) -> bool:
        """Whether the value is still not finite: the script may have mended it."""
        if self.tensor is None:
            return True
        grad = self.tensor()
        values = grad.coalesce().values() if grad is not None and grad.is_sparse else grad
        return values is not None and not bool(torch.isfinite(values).all())


class Reducible(Protocol):
    """A buffer that takes part in a reduction: a bucket's, or that of the model's buffers."""

    index: int
    """Among the buckets; the buffers come last."""

    @property
    def names(self) -> list[str]: ...

    @property
    def wire(self) -> Any: ...

    def begin_reduce(self) -> None:
        """The wire goes to the all-reduce."""

    def end_reduce(self) -> None:
        """The wire comes back reduced."""


class ReductionPhase(enum.Enum):
    """How far a reduction has come."""

    UNDER_WAY = "gradients are arriving, or being reduced"
    OVER = "every gradient has its result"
    ABORTED = "this rank has given the reduction up"


class Said:
    """What all ranks have said about one reduction."""

    def __init__(self, by_rank: Mapping[str, Sequence[float]], unused: Set[int] = frozenset()) -> None:
        self.by_rank = by_rank  # by field, what each rank has said
        self.sums: Counter[str] = Counter()  # by field, the sum over ranks. 0 for a field that nobody has.
        self.sums.update({field: sum(values) for field, values in by_rank.items()})
        self.unused = unused  # indices of the parameters that no rank has used


@dataclass(eq=False)
class Reduction:
    """One reduction on this rank, from the first gradient to the last result."""

    # What this rank is about to do
    number: int  # counts reductions. It is in the message.
    step: int = 0  # number of the optimizer step, for error messages
    # No bucket leaves before backward is over, and ranks have agreed which optimizers it has reached
    defers_launch: bool = False
    # A backward may reach several optimizers, so ranks may begin their reductions in different orders
    is_unordered: bool = False
    weight: float = 1.0  # of this rank, see `weights.py`. Its gradients are multiplied by it in the wire buffer.
    is_absent: bool = False  # this rank takes part without a gradient, and does not count
    is_again: bool = False  # another reduction for the same backward, whose results are in `.grad`
    mine: dict[str, float] = field(default_factory=dict)  # what this rank tells the others, by field of the message
    extra: Reducible | None = None  # leaves after all buckets, if there is anything
    events: BucketEvents | None = None  # if given, hears what happens to each bucket
    # If given, called by all hooks, with the index of a parameter that has its gradient
    mark_ready: Callable[[int], None] | None = None

    # What has become of it
    phase: ReductionPhase = ReductionPhase.UNDER_WAY
    num_launched: int = 0  # buckets that have left
    said: Said | None = None  # by all ranks; None until they are heard
    scale: float = 1.0  # another factor of the result
    non_finite: NonFiniteGradient | None = None  # the first one; on a device, it may be of an earlier reduction

    # Where its time went
    busy_seconds: float = 0.0  # while something was being reduced, waiting for peers included
    exposed_seconds: float = 0.0  # the part of that during which backward stood still
    is_filled: bool = False  # backward is over on this rank, and every bucket has its gradients

    @property
    def heard(self) -> Said:
        """What all ranks have said. Known when all buckets are reduced, with several optimizers before."""
        assert self.said is not None
        return self.said

    @property
    def next_number(self) -> int:
        """If a bucket has left, peers are past this reduction, even if it was aborted here."""
        return self.number + (self.phase is ReductionPhase.OVER or self.num_launched > 0)


OF_REDUCER: Final = (
    "reach", "is_complete", "is_in_no_sync", "num_aborted", "number", "has_ended", "has_newly_trainable", "weight",
    "is_weighted", "non_finite", "overflowed",
)  # fmt: skip
"""reach: 0 if the backward has not reached the optimizer, 1 if it accumulates, 2 if it reduces.

is_complete: the reduction has begun on this rank, and is described. is_in_no_sync: see `Reducer`. num_aborted: see
`Launcher`. number: of the reduction. has_ended: the rank has no data left, inside `torchring.join`.
has_newly_trainable: a parameter that was frozen requires a gradient. weight: of the rank, see `weights.py`.
is_weighted: whether `weigh` gave it.
non_finite, overflowed: 1 + the index of a parameter, see `Agreement`.
"""
_LENGTH: Final = struct.Struct("<I")


class MessageFormat:
    """The fields of the message about one optimizer, equal on all ranks. `fields`: names of what participants add."""

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


class Participant:
    """Takes part in the reductions of one optimizer, on all ranks alike. Only what it overrides is called."""

    fields: tuple[str, ...] = ()  # names of what it adds to the message

    def __init__(self, reducer: Any, setup: Any) -> None:
        """Collective: for a `Reducer` that has its buckets, and no hooks yet. `setup`: a `Setup`."""

    def before_backward(self) -> None:
        """A backward begins, or `skip()`, and nothing is sent. May raise on all ranks."""

    def on_begin(self, current: Reduction) -> None:
        """A reduction begins; nothing has left. Set what this rank tells the others in `current.mine`.

        May be collective, unless `current.is_unordered`.
        """

    def on_message(self, current: Reduction) -> None:
        """All buckets are reduced, and ranks know `current.said`. Gradients are still to be handed out.

        May be collective. May raise an error that all ranks raise together (`errors.in_step`).
        """

    def on_reduced(self, current: Reduction) -> None:
        """Every gradient holds its result, and another backward may begin. May raise an error as `on_message` may."""

    def close(self) -> None:
        """The optimizer is closed."""

    def on_step(self, when: StepPoint) -> None:
        """The optimizer steps.

        "before": `step()` was called; nothing is looked at yet. "agreed": all ranks make this step, or all leave it
        out; may come several times. "after": the parameters are as the optimizer has left them, at the end of a step or
        within one.
        """


def overridden(participants: Iterable[Participant], method: str) -> list[Callable[..., None]]:
    """The `method` of each participant that has one of its own."""
    return [getattr(each, method) for each in participants if getattr(type(each), method) is not _METHODS[method]]


_METHODS: Final = {name: method for name, method in vars(Participant).items() if callable(method)}
