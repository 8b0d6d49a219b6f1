"""Sparse gradients (embeddings built with sparse=True): gathered, not added up in a bucket.

Every rank gets everybody's indices and values, and adds up what falls on the same row. They come last in a round, in
plan order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchring.collectives import collectives_of
from torchring.errors import GradientError
from torchring.plan import ParameterSpec
from torchring.world import World


class SparseReduction:
    """The sparse parameters of one optimizer.

    Args:
        world: of more than one rank.
        scale: the factor between the sum over ranks and the result.
    """

    def __init__(self, world: World, scale: float) -> None:
        self._world = world
        self._scale = scale
        self._local: set[int] = set()
        self._reduced: dict[int, torch.Tensor] = {}

    def accumulated(self, index: int) -> None:
        """Parameter `index` has a new local gradient. From its hook."""
        self._local.add(index)

    def mark_zeroed(self) -> None:
        """All gradients were zeroed, or set to None, through the optimizer."""
        self._local.clear()

    def has_local(self) -> bool:
        return bool(self._local)

    def unsettled(self, index: int, parameter: torch.nn.Parameter) -> bool:
        """Whether the gradient must not be stepped on."""
        grad = parameter.grad
        return grad is not None and (index in self._local or grad is not self._reduced.get(index))

    def reduce(self, specs: Sequence[ParameterSpec], parameters: Sequence[torch.nn.Parameter]) -> None:
        """Collective: reduce every sparse parameter that any rank used; the others' `.grad` stays as it is."""
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
        collectives = collectives_of(self._world)
        if not collectives.any_rank(index in self._local or self.unsettled(index, parameter)):
            return
        if grad is None:
            grad = torch.zeros(spec.shape, dtype=spec.dtype, layout=torch.sparse_coo)
        grad = grad.coalesce()
        indices = collectives.all_gather(grad.indices().t().contiguous())
        values = collectives.all_gather(grad.values())
        for rank, part in enumerate(values):
            if not bool(torch.isfinite(part).all()):
                raise GradientError(
                    f"the gradient of {spec.name} is not finite on rank {rank}", peers=(rank,), parameters=(spec.name,)
                )
        total = torch.sparse_coo_tensor(torch.cat(indices).t(), torch.cat(values) * self._scale, spec.shape)
        parameter.grad = self._reduced[index] = total.coalesce()
