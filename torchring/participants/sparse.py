"""Sparse gradients, of embeddings built with sparse=True: ranks gather them, and do not add them up in a bucket.

Every rank gets the indices and values of all ranks, and adds up the values of each row. Sparse gradients are reduced at
the end of a reduction, in the order of the parameters.
"""

import torch

from torchring.collectives.service import internal_collectives_of
from torchring.errors import GradientError
from torchring.gradients.contract import Setup
from torchring.gradients.plan import ParameterSpec
from torchring.gradients.reducer import Reducer
from torchring.gradients.reduction import NonFiniteGradient, Participant, Reduction


class SparseReduction(Participant):
    """The sparse parameters of one optimizer."""

    def __init__(self, reducer: Reducer, setup: Setup) -> None:
        self._world = setup.world
        self._specs = reducer.specs  # all of the optimizer's; may grow, as may the parameters
        self._parameters = reducer.parameters
        self._scale = setup.options.scale(setup.world.size)  # between the sum over ranks and the result
        self._ledger = reducer.ledger

    def on_message(self, current: Reduction) -> None:
        """Collective: reduce every sparse parameter that any rank used. Other parameters keep their `.grad`."""
        found = None
        for index, spec in enumerate(self._specs):
            if spec.is_sparse:
                in_this_one = self._reduce_one(index, spec, current)
                found = found or in_this_one
        current.non_finite = current.non_finite or found

    def _reduce_one(self, index: int, spec: ParameterSpec, current: Reduction) -> NonFiniteGradient | None:
        parameter = self._parameters[index]
        grad = parameter.grad
        if grad is not None and not grad.is_sparse:
            raise GradientError(
                f"{spec.name} belongs to a layer built with sparse=True but has a dense gradient (it is probably tied "
                "to a dense layer); build the layer with sparse=False",
                parameters=(spec.name,),
            )
        collectives, position = internal_collectives_of(self._world), self._ledger.positions[index]
        is_new = grad is not None and not self._ledger.is_settled(position, grad)
        if not collectives.any_rank(is_new and not current.is_absent):
            return None
        if grad is None or current.is_absent:
            device = parameter.device
            indices_of_none = torch.empty((1, 0), dtype=torch.int64, device=device)
            no_rows = torch.empty((0, *spec.shape[1:]), dtype=spec.dtype, device=device)
            grad = torch.sparse_coo_tensor(indices_of_none, no_rows, spec.shape, check_invariants=False)
        grad = grad.coalesce()
        indices = collectives.all_gather(grad.indices().t().contiguous())
        values = collectives.all_gather(grad.values() * current.weight if current.weight != 1.0 else grad.values())
        scaled = torch.cat(values) * (self._scale * current.scale)
        total = torch.sparse_coo_tensor(torch.cat(indices).t(), scaled, spec.shape, check_invariants=False)
        if parameter.grad is None:
            parameter.grad = total.coalesce()
        else:  # somebody else may have this tensor, too
            parameter.grad.data = total.coalesce()
        self._ledger.mark_reduced(slice(position, position + 1))
        self._ledger.settle(position, parameter.grad)
        for rank, part in enumerate(values):
            if not bool(torch.isfinite(part).all()):
                return NonFiniteGradient(rank, spec.name, lambda: parameter.grad)
        return None
