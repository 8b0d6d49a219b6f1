"""Weights of gradients: `weigh(n)` says that a loss is a mean over n samples, or tokens.

In a reduction each rank has one weight: n after `weigh(n)`, 1 without, and 0 if it has skipped or its data has ended. A
reduced gradient is sum(w g) / sum(w) over ranks. The wire buffer holds w g, and the message has w, so the sum of the
weights scales the result. fp32 and bf16 hold any gradient times a weight. fp16 has too few exponents.

Several backwards may be reduced together. Their weights add up, and `.grad` holds the weighted mean over those that
were. Autograd adds gradients as they are. So each gets its share of the mean before that, and with the first one, what
is there already is scaled.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from torchring.errors import GradientError, in_step, ranks_in_words
from torchring.gradients.ledger import is_zero
from torchring.gradients.reduction import Said
from torchring.gradients.views import whole_of

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
_ZEROED: Final = (
    "gradients that have a weight and are not reduced yet were zeroed past the optimizer, so their weight would count "
    "for zeros; call optimizer.zero_grad() in place of that, or model.zero_grad() with set_to_none=True"
)
_ASSIGNED: Final = (
    "weigh() takes one weight above 0 for each reduction here: fully_shard() assigns gradients past autograd, where "
    "weights of several backwards, and 0, do not reach them"
)
unequal_shares: Final[weakref.WeakSet[Any]] = weakref.WeakSet()  # iterations over samplers, which `refuse_unweighed`


class Weights:
    """The weights of the backwards of one optimizer, on one rank."""

    def __init__(
        self,
        parameters: Callable[[], Iterable[torch.Tensor]],  # returns those that may get gradients
        # Returns what the first gradient of a backward with a weight calls. None: others call `begin`.
        on_first: Callable[[], Callable[[], None] | None] | None = None,
    ) -> None:
        self.next: float | None = None  # the weight that was given for the backward that comes, if there is one
        self.last: float | None = None  # the weight of the backward under way, or of the last one
        self._parameters = parameters
        self._on_first = on_first
        self._hooked: dict[int, tuple[Node, RemovableHandle]] = {}  # by id: for the next backward, or that under way
        self._share: float | None = None  # of the backward under way, in the mean
        self.reset()

    def reset(self) -> None:
        """Local gradients are reduced, or gone. A weight that was given for the next backward stays."""
        self.num_backwards = 0  # how many have contributed since the last reduction, those inside `no_sync()` included
        self.has_skipped = False  # whether this rank has left out a backward since the last reduction
        self.total: float | None = None  # the weight of these backwards, if they have one
        self._left: tuple[weakref.ref[torch.Tensor], int] | None = None  # a gradient that is there, and its version

    def give(self, weight: float) -> None:
        """The next backward has this weight.

        Raises GradientError if a weight was given already, or an earlier backward had none.
        """
        if self.next is not None:
            raise GradientError("weigh() was called twice before one backward(); call it once before each")
        if self.num_backwards and self.total is None:
            raise GradientError(
                "weigh() was called after a backward() without a weight whose gradients are not reduced yet; call "
                "weigh() before each backward(), or zero_grad() first"
            )
        if (self.total or not weight) and any(getattr(each, "is_assigned", False) for each in self._parameters()):
            raise GradientError(_ASSIGNED)
        self.end()
        self.next = weight
        if not weight or self.total or self._on_first is not None:
            trainable = [parameter for parameter in self._parameters() if parameter.requires_grad]
            # Of the node that adds to `.grad`: a hook of the tensor would change what torch.autograd.grad() returns.
            with torch.inference_mode(False):
                nodes = {id(parameter): get_gradient_edge(whole_of(parameter)).node for parameter in trainable}
            self._hooked = {key: (node, node.register_prehook(self._weigh)) for key, node in nodes.items()}

    def begin(self) -> None:
        """A backward begins. Raises GradientError if it has no weight, and an earlier one had one."""
        weight, self.next = self.next, None
        if weight is None and self.total is not None:
            raise GradientError(
                "this backward() has no weight, but an earlier one had one whose gradients are not reduced yet; call "
                "optimizer.weigh() before each backward(), or optimizer.zero_grad() if those gradients are gone"
            )
        if self._hooked and any(p.requires_grad and id(p) not in self._hooked for p in self._parameters()):
            raise GradientError("a parameter was unfrozen between weigh() and backward(); unfreeze it before weigh()")
        self.last = weight
        if weight is not None:
            self.total = (self.total or 0.0) + weight
        self.num_backwards += 1

    def end(self) -> None:
        """The backward that a weight was given for is over, or does not come."""
        while self._hooked:
            _, (_, handle) = self._hooked.popitem()
            handle.remove()
        self._share = None

    def withdraw(self) -> None:
        """The backward under way was aborted."""
        if self._share and self._share < 1.0:
            self._scale(1.0 / (1.0 - self._share))
        if self.last is not None and self.total is not None:
            self.total -= self.last
        self.num_backwards -= 1
        self.note()
        if not self.num_backwards:
            self.reset()

    def note(self) -> None:
        """A backward is over, and its gradients stay local."""
        if self.total:
            grads = (parameter.grad for parameter in self._parameters())
            self._left = next(((weakref.ref(g), g._version) for g in grads if g is not None), None)

    def drop_next(self) -> None:
        """The backward that a weight may have been given for does not come."""
        self.next = None
        self.end()
        self.drop_stale()

    def leave_out(self) -> None:
        """This rank has no backward where others have one."""
        self.drop_next()
        self.has_skipped = True

    def drop_stale(self) -> None:
        """Forget the backwards whose gradients the script has set to None, as model.zero_grad() does.

        Raises GradientError if it has written zeros in their place.
        """
        if not self.num_backwards:
            return
        grads = [parameter.grad for parameter in self._parameters() if parameter.grad is not None]
        if not grads and (self._left is not None or not self.total):  # else backwards reached experts of others only
            self.reset()
        if self._left is not None and all(map(is_zero, grads)):
            left, version = self._left
            if not any(grad is left() and grad._version == version for grad in grads):
                raise GradientError(_ZEROED)

    def count_local(self) -> None:
        """Gradients that the script has put into `.grad`, and a weight for them, count as those of a backward do."""
        if not self.num_backwards:
            if self.next == 0:
                for parameter in self._parameters():  # counts as zero, whatever it holds
                    parameter.grad = None
            self.end()
            self.begin()

    def _weigh(self, gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """A gradient of the backward that a weight was given for, before autograd adds it to `.grad`."""
        if self._share is None:
            self.drop_stale()
            weight, before = self.next or 0.0, self.total or 0.0
            self._share = weight / (before + weight) if weight else 0.0
            if before and weight:
                self._scale(1.0 - self._share)
            if self._on_first is not None and (begin := self._on_first()) is not None:
                begin()
        if self._share == 1.0:
            return gradients
        # 0 is 0 whatever the loss is, a mean over nothing included.
        return tuple(each * self._share if self._share else torch.zeros_like(each) for each in gradients)

    @torch.no_grad()
    def _scale(self, factor: float) -> None:
        for parameter in self._parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def result_scale(said: Said, rank: int) -> float:
    """The factor for a result that was summed with weights, and scaled by 1 / (number of ranks).

    Raises GradientError on all ranks if only some have given weights.
    """
    weights, are_given = said.by_rank["weight"], said.by_rank["is_weighted"]
    if any(are_given):
        others = [i for i, weight in enumerate(weights) if weight and not are_given[i]]
        if others:
            text = (
                f"{ranks_in_words(others)} did not call optimizer.weigh() before this backward(), and other ranks did; "
                "call it on all ranks"
            )
            raise in_step(GradientError(text, rank=rank, peers=others))
    total = sum(weights)
    return len(weights) / total if total else 1.0


def check_weight(weight: float) -> float:
    """The weight as a float. Raises TypeError for what is no number, ValueError for what cannot be a weight."""
    if isinstance(weight, (bool, str)) or not hasattr(weight, "__float__"):
        raise TypeError(f"a weight is a number of samples or tokens, got {type(weight).__name__}")
    value = float(weight)
    if value != 0 and not SMALLEST <= value <= LARGEST:
        raise ValueError(f"a weight must be 0, or from {SMALLEST:g} to {LARGEST:g}, got {weight!r}")
    return value
