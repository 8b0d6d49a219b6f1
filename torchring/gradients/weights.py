"""Weights of gradients: `weigh(n)` says that a loss is a mean over n samples, or tokens.

A reduced gradient is then sum(n_r g_r) / sum(n_r) over ranks r, and over the backwards since the last reduction.

Until a reduction, `.grad` holds sum(n_k g_k) / n, where n is the weight of the last backward: autograd adds gradients
as they are, so what is there already is scaled before each backward. In the wire buffer gradients are multiplied by
n / reference. The reference is a power of two near the mean weight of the last reduction, equal on all ranks, so that
weights in the thousands do not overflow. fp16 has too few exponents for weights that change much from one reduction to
the next, so it takes no weights. The sum of weights is in the message of the reduction, and scales the result.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

from torchring.errors import GradientError

LARGEST: Final = 2.0**28
SMALLEST: Final = 2.0**-10

FP16: Final = (
    "weigh() was called where gradients travel in fp16, which has too few exponents for weights; pass "
    "compression='bf16' to torchring.wrap, or compute gradients in another dtype"
)
ON_RESULTS: Final = (
    "weights were given with gradients of an earlier step in .grad, which would get the weights of this step; call "
    "optimizer.zero_grad() before the first weigh()"
)
ZEROS_OF_SKIP: Final = (
    "this rank has called skip() in place of its backwards, and zeros that were written to .grad past the optimizer "
    "would count as its gradients; call optimizer.zero_grad() in place of writing zeros"
)
UNWEIGHED: Final = (
    "a backward() in a loop over a torchring.data.Sampler was not weighed. Ranks have unequal shares of its batches, "
    "and a plain mean over ranks would be wrong. Call optimizer.weigh(sampler.weight()) once for each batch of the "
    "loop, before its forward and backward. If that loop does not train, let it begin under torch.no_grad()"
)
unequal_shares: Final[weakref.WeakSet[Any]] = weakref.WeakSet()  # iterations over samplers, each with its `size`


class Share(NamedTuple):
    """The contribution of a rank to a reduction.

    weight: of all its backwards together; None if none has been given.
    is_unweighted: the rank has run a backward for which it has given no weight.
    factor: by which gradients are multiplied in the wire buffer.
    is_absent: the rank has no gradient, and does not count.
    """

    weight: float | None = None
    is_unweighted: bool = False
    factor: float = 1.0
    is_absent: bool = False


class Weights:
    """The weights of the backwards of one optimizer, on one rank.

    Attributes:
        num_backwards: how many backwards have contributed since the last reduction, those inside `no_sync()` included.
        reference: see above.
        next: the weight that was given for the backward that comes, if there is one.
        last: the weight of the backward under way, or of the last one.
        is_fp16: whether gradients travel in fp16.
        has_skipped: whether this rank has left out a backward since the last reduction.
    """

    def __init__(self) -> None:
        self.num_backwards = 0
        self.has_skipped = False
        self.reference = 1.0
        self.is_fp16 = False
        self.next: float | None = None
        self._unit: float | None = None  # the weight that local gradients are divided by
        self._total: float | None = None
        self.last: float | None = None

    @property
    def is_weighted(self) -> bool:
        """Whether the backwards since the last reduction have weights."""
        return self._total is not None

    @property
    def total(self) -> float:
        """The weight of all backwards since the last reduction."""
        return self._total or 0.0

    @property
    def is_given(self) -> bool:
        """Whether the next backward has a weight."""
        return self.next is not None

    def expect(self, dtypes: Sequence[torch.dtype]) -> None:
        """Gradients travel in these dtypes."""
        self.is_fp16 = self.is_fp16 or torch.float16 in dtypes

    def give(self, weight: float) -> float:
        """The next backward has this weight. Returns the factor that local gradients have to be scaled by before.

        Raises GradientError if a weight was given already, or an earlier backward had none.
        """
        if self.is_given:
            raise GradientError("weigh() was called twice before one backward(); call it once before each")
        if self.num_backwards and self._total is None:
            raise GradientError(
                "weigh() was called after a backward() without a weight whose gradients are not reduced yet; call "
                "weigh() before each backward(), or zero_grad() first"
            )
        self.next = weight
        if not weight:
            return 1.0
        unit, self._unit = self._unit, weight
        return 1.0 if unit is None else unit / weight

    def begin(self) -> None:
        """A backward begins. Raises GradientError if it has no weight, and an earlier one had one."""
        weight, self.next = self.next, None
        if weight is None and self._total is not None:
            raise GradientError(
                "this backward() has no weight, but an earlier one had one whose gradients are not reduced yet; call "
                "optimizer.weigh() before each backward()"
            )
        self.last = weight
        if weight is not None:
            self._total = (self._total or 0.0) + weight
        self.num_backwards += 1

    def withdraw(self) -> None:
        """The backward under way was aborted."""
        if self.last is not None and self._total is not None:
            self._total -= self.last
        self.num_backwards -= 1
        if not self.num_backwards:
            self.reset()

    def drop_next(self) -> None:
        """The backward that a weight was given for does not come."""
        self.next = None

    def reset(self) -> None:
        """Local gradients are reduced, or gone. A weight that was given for the next backward stays."""
        self.num_backwards = 0
        self.has_skipped = False
        self._total = None
        self._unit = self.next or None

    def share(self, *, is_absent: bool) -> Share:
        """The contribution of this rank to the reduction that begins."""
        if is_absent:
            return Share(is_absent=True)
        if self._total is None:
            return Share(is_unweighted=self.num_backwards > 0)
        return Share(self._total, factor=(self._unit or 0.0) / self.reference)

    def result_scale(self, num_ranks: int, num_weighted: int, num_absent: int, total: float) -> float:
        """The factor for a result that was averaged over all ranks. All arguments are sums over ranks."""
        if not num_weighted:
            present = num_ranks - num_absent
            return num_ranks / present if present else 1.0
        scale = num_ranks * self.reference / total if total else 1.0
        self.refer_to(total / num_ranks)
        return scale

    def refer_to(self, weight: float) -> None:
        """Gradients of about this weight are to keep their size in the next reduction."""
        if weight:
            self.reference = 2.0 ** round(math.log2(weight))


def check_weight(weight: float) -> float:
    """The weight as a float. Raises TypeError for what is no number, ValueError for what cannot be a weight."""
    if isinstance(weight, (bool, str)) or not hasattr(weight, "__float__"):
        raise TypeError(f"a weight is a number of samples or tokens, got {type(weight).__name__}")
    value = float(weight)
    if value != 0 and not SMALLEST <= value <= LARGEST:
        raise ValueError(f"a weight must be 0, or from {SMALLEST:g} to {LARGEST:g}, got {weight!r}")
    return value
