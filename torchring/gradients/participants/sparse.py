"""Sparse gradients, of embeddings built with sparse=True: ranks gather them, and do not add them up in a bucket.

Every rank gets the indices and values of all ranks, and adds up the values of each row. Sparse gradients are reduced at
the end of a round, in the order of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from torchring.collectives.service import internal_collectives_of
from torchring.errors import GradientError
from torchring.gradients.participants.weights import Share
from torchring.gradients.plan import ParameterSpec
from torchring.world import World


class NonFiniteGradient(NamedTuple):
    """The first NaN or infinity of a round.

    rank: whose gradient had it; None if only the sum over ranks overflowed.
    name: name of the parameter.
    tensor: returns the tensor that shows whether the value is still there: the gradient, or on a device the parameter,
        which may have been trained on it. None if the value has not been looked for since.
    """

    rank: int | None
    name: str
    tensor: Callable[[], torch.Tensor | None] | None


class SparseReduction:
    """The sparse parameters of one optimizer.

    Args:
        world: has more than one rank.
        specs, parameters: all of the optimizer's; both lists may grow.
        scale: the factor between the sum over ranks and the result.
        is_sum: whether the result is the plain sum; see `GradientLedger`.
    """

    def __init__(
        self,
        world: World,
        specs: Sequence[ParameterSpec],
        parameters: Sequence[torch.nn.Parameter],
        scale: float,
        *,
        is_sum: bool,
    ) -> None:
        self._world = world
        self._specs = specs
        self._parameters = parameters
        self._scale = scale
        self._is_sum = is_sum
        self._local: set[int] = set()
        self._zeroed: set[int] = set()
        self._reduced: dict[int, torch.Tensor] = {}

    def mark_local(self, index: int) -> None:
        """Parameter `index` has a gradient that no other rank has seen. From the parameter's hook."""
        grad = self._parameters[index].grad
        added_to_result = grad is not None and grad is self._reduced.get(index) and index not in self._local
        if self._is_sum and added_to_result and index not in self._zeroed:
            raise GradientError(
                "backward added to a sparse gradient which was summed over ranks before; with op='sum' it would be "
                "counted once per rank. Call optimizer.zero_grad() first"
            )
        self._zeroed.discard(index)
        self._local.add(index)

    def mark_zeroed(self) -> None:
        """The optimizer has zeroed all gradients in place, or set them to None."""
        self._local.clear()
        self._zeroed = set(self._reduced)

    def mark_one_zeroed(self, index: int) -> None:
        """This gradient was zeroed in place."""
        self._zeroed.add(index)

    def first_unsettled(self) -> str | None:
        """Name of the first sparse parameter whose gradient must not be stepped on."""
        return next((s.name for i, s in enumerate(self._specs) if s.is_sparse and self._is_unsettled(i)), None)

    def has_local(self) -> bool:
        """Whether a gradient is there that no other rank has seen."""
        return any(self._parameters[index].grad is not None for index in self._local)

    def results(self) -> list[int]:
        """The parameters whose gradient an earlier round has reduced, and that was not zeroed or added to since."""
        since = self._zeroed | self._local
        return [i for i, result in self._reduced.items() if i not in since and self._parameters[i].grad is result]

    def scale_local(self, factor: float) -> None:
        """Multiply the gradients that no other rank has seen."""
        for index in self._local:
            if (grad := self._parameters[index].grad) is not None:
                grad.mul_(factor)

    def reduce(self, share: Share, scale: float) -> NonFiniteGradient | None:
        """Collective: reduce every sparse parameter that any rank used. Other parameters keep their `.grad`.

        Args:
            share: what this rank contributes.
            scale: another factor of the result.

        Returns the first NaN or infinity, if there is any.
        """
        found = None
        for index, spec in enumerate(self._specs):
            if spec.is_sparse:
                in_this_one = self._reduce_one(index, spec, share, scale)
                found = found or in_this_one
        self._local.clear()
        return found

    def _is_unsettled(self, index: int) -> bool:
        grad = self._parameters[index].grad
        return grad is not None and (index in self._local or grad is not self._reduced.get(index))

    def _reduce_one(self, index: int, spec: ParameterSpec, share: Share, scale: float) -> NonFiniteGradient | None:
        parameter = self._parameters[index]
        grad = parameter.grad
        if grad is not None and not grad.is_sparse:
            raise GradientError(
                f"{spec.name} belongs to a layer built with sparse=True but has a dense gradient (it is probably tied "
                "to a dense layer); build the layer with sparse=False",
                parameters=(spec.name,),
            )
        collectives = internal_collectives_of(self._world)
        if not collectives.any_rank(self._is_unsettled(index) and not share.is_absent):
            return None
        if grad is None or share.is_absent:
            device = parameter.device
            indices_of_none = torch.empty((1, 0), dtype=torch.int64, device=device)
            no_rows = torch.empty((0, *spec.shape[1:]), dtype=spec.dtype, device=device)
            grad = torch.sparse_coo_tensor(indices_of_none, no_rows, spec.shape, check_invariants=False)
        grad = grad.coalesce()
        indices = collectives.all_gather(grad.indices().t().contiguous())
        values = collectives.all_gather(grad.values() * share.factor if share.factor != 1.0 else grad.values())
        total = torch.sparse_coo_tensor(
            torch.cat(indices).t(), torch.cat(values) * (self._scale * scale), spec.shape, check_invariants=False
        )
        if parameter.grad is None:
            parameter.grad = total.coalesce()
        else:  # somebody else may have this tensor, too
            parameter.grad.data = total.coalesce()
        self._reduced[index] = parameter.grad
        self._zeroed.discard(index)
        for rank, part in enumerate(values):
            if not bool(torch.isfinite(part).all()):
                return NonFiniteGradient(rank, spec.name, lambda: parameter.grad)
        return None
