"""Which plans are worth a trial, by prediction: other buckets, gradients in 16 bits, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torchring.gradients.participants.tuning.best_plan import find_groups, predict
from torchring.gradients.participants.tuning.boundaries import ReductionCost
from torchring.gradients.plan import AUTO_COMPRESSION, COMPRESSIONS, ParameterSpec, Plan, plan_of

LEAST_GAIN_OF_ROUNDING: Final = 0.05  # of a backward: rounding gradients has to pay
_LEAST_GAIN: Final = 0.03  # of the exposed time, predicted: less is not tried, because it would drown in noise


@dataclass(frozen=True)
class Tuned:
    """What the user has left to torchring.

    Attributes:
        buckets: whether buckets are cut for the model.
        bucket_bytes: size of default buckets. Others are not larger: large ones leave late.
        compressions: see `build_plan`. The first one is used until another has won.
    """

    buckets: bool
    bucket_bytes: int
    compressions: tuple[str | None, ...]


@dataclass(frozen=True)
class Candidate:
    """A plan that is worth a trial.

    Attributes:
        groups: parameters of each bucket, by index; None: those of the default.
        compression: see `build_plan`. The default plan has the compression that the user has asked for, or none.
        exposed: seconds that are predicted.
        default_exposed: seconds that are predicted for the default plan.
        is_rounded: whether gradients lose precision that they keep with the default plan.
    """

    groups: list[list[int]] | None
    compression: str | None
    exposed: float
    default_exposed: float
    is_rounded: bool

    @property
    def subject(self) -> str:
        """What is tried, such as "4 buckets of bf16"."""
        buckets = "" if self.groups is None else f"{len(self.groups)} buckets found for this model"
        if not self.is_rounded:
            return buckets
        return f"{buckets}, of {self.compression}" if buckets else f"gradients in {self.compression}"


def what_to_tune(*, buckets: bool, bucket_bytes: int, compression: str | None) -> Tuned:
    """What these arguments of `wrap` leave to torchring."""
    assert compression in COMPRESSIONS or compression == "auto"
    if compression != "auto":
        return Tuned(buckets, bucket_bytes, (compression,))
    return Tuned(buckets, bucket_bytes, (None, AUTO_COMPRESSION))


def worth_trying(
    tuned: Tuned,
    current: Plan,
    specs: Sequence[ParameterSpec],
    ready: Sequence[float],
    computed: float,
    costs: Sequence[ReductionCost],
) -> tuple[list[Candidate], list[str]]:
    """The plans that are worth a trial, those that round first; and why others are not.

    Args:
        current: the default plan.
        ready: for each parameter when its gradient is ready, in seconds from the begin of backward.
        computed: when all gradients are ready.
        costs: what reductions take, for each of `tuned.compressions`.
    """
    default = max(predict(current, ready, costs[0]) - computed, 0.0)
    best = default  # without rounding
    candidates: list[Candidate] = []
    reasons: list[str] = []
    for number, (compression, cost) in enumerate(zip(tuned.compressions, costs, strict=True)):
        is_rounded = number > 0
        if not (is_rounded or tuned.buckets):
            continue
        groups = groups_of(current)
        if tuned.buckets:
            groups = find_groups(specs, current, ready, cost, tuned.bucket_bytes, compression)
        exposed = max(predict(plan_of(specs, groups, compression=compression), ready, cost) - computed, 0.0)
        kept = groups if tuned.buckets else None
        if is_rounded:
            is_worth_it = exposed <= best - LEAST_GAIN_OF_ROUNDING * (computed + best)
        else:
            is_worth_it = default > 0.0 and exposed <= default - _LEAST_GAIN * default
            best = min(best, exposed)
        candidate = Candidate(kept, compression, exposed, default, is_rounded)
        if is_worth_it:
            candidates.insert(0, candidate)
        else:
            what = f"{compression} is" if is_rounded else "other buckets are"
            expected = f"{milliseconds(exposed)} exposed instead of {milliseconds(default)}"
            reasons.append(f"{what} not expected to do much better: {expected}")
    return candidates, reasons


def groups_of(plan: Plan) -> list[list[int]]:
    """The parameters of each bucket, by index."""
    return [[slot.parameter for slot in bucket.slots] for bucket in plan.buckets]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
