"""Sparse gradients (embeddings built with sparse=True): gathered, not added up in a bucket.

Every rank gets everybody's indices and values, and adds up what falls on the same row. They come last in a round, in
plan order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchring.collectives.service import internal_collectives_of
from torchring.errors import GradientError
from torchring.gradients.plan import ParameterSpec
from torchring.world import World


class SparseReduction:
    """The sparse parameters of one optimizer.

    Args:
        world: of more than one rank.
        scale: the factor between the sum over ranks and the result.
        is_sum: whether the result is the plain sum; see `Bucket`.

    Attributes:
        non_finite: as `Reduction.non_finite`.
    """

    def __init__(self, world: World, scale: float, *, is_sum: bool) -> None:
        self.non_finite: tuple[int | None, str, torch.Tensor | None] | None = None
        self._world = world
        self._scale = scale
        self._is_sum = is_sum
        self._local: set[int] = set()
        self._zeroed: set[int] = set()
        self._reduced: dict[int, torch.Tensor] = {}

    def accumulated(self, index: int, parameter: torch.nn.Parameter) -> None:
        """Parameter `index` has a new local gradient. From its hook."""
        grad = parameter.grad
        added_to_result = grad is not None and grad is self._reduced.get(index) and index not in self._local
        if self._is_sum and added_to_result and index not in self._zeroed:
            raise GradientError(
                "backward added to a sparse gradient which was summed over ranks before; with op='sum' it would be "
                "counted once per rank. Call optimizer.zero_grad() first"
            )
        self._zeroed.discard(index)
        self._local.add(index)

    def mark_zeroed(self) -> None:
        """All gradients were zeroed in place through the optimizer."""
        self._local.clear()
        self._zeroed = set(self._reduced)

    def unsettled(self, index: int, parameter: torch.nn.Parameter) -> bool:
        """Whether the gradient must not be stepped on."""
        grad = parameter.grad
        return grad is not None and (index in self._local or grad is not self._reduced.get(index))

    def reduce(self, specs: Sequence[ParameterSpec], parameters: Sequence[torch.nn.Parameter]) -> None:
        """Collective: reduce every sparse parameter that any rank used; the others' `.grad` stays as it is."""
        self.non_finite = None
        for index, spec in enumerate(specs):
            if spec.is_sparse:
                self._reduce_one(index, spec, parameters[index])
        self._local.clear()

    def _reduce_one(self, index: int, spec: ParameterSpec, parameter: torch.nn.Parameter) -> None:
        grad = parameter.grad
        if grad is not None and not grad.is_sparse:
            raise GradientError(
                f"{spec.name} belongs to a layer built with sparse=True but has a dense gradient (it is probably tied "
                "to a dense layer); build the layer with sparse=False",
                parameters=(spec.name,),
            )
        collectives = internal_collectives_of(self._world)
        if not collectives.any_rank(self.unsettled(index, parameter)):
            return
        if grad is None:
            device = parameter.device
            indices_of_none = torch.empty((1, 0), dtype=torch.int64, device=device)
            no_rows = torch.empty((0, *spec.shape[1:]), dtype=spec.dtype, device=device)
            grad = torch.sparse_coo_tensor(indices_of_none, no_rows, spec.shape, check_invariants=False)
        grad = grad.coalesce()
        indices = collectives.all_gather(grad.indices().t().contiguous())
        values = collectives.all_gather(grad.values())
        total = torch.sparse_coo_tensor(
            torch.cat(indices).t(), torch.cat(values) * self._scale, spec.shape, check_invariants=False
        )
        parameter.grad = self._reduced[index] = total.coalesce()
        for rank, part in enumerate(values):
            if self.non_finite is None and not bool(torch.isfinite(part).all()):
                self.non_finite = (rank, spec.name, parameter.grad)
