"""The step of a sharded optimizer whose state outlives any rank: each share is kept by its owner and by one more rank.

Nothing is sent to keep the second copy, the mirror, up to date. After `backward()` every rank has whole gradients, so
the rank that keeps the mirror steps those pieces, too. A step is finished on all ranks or on none:

1. Enter: all ranks have the same gradients. They keep them until the step is over.
2. Each rank steps copies of its pieces, a few at a time, and writes the results to all ranks but the one that keeps the
   mirror. State, and the parameters of a share at its owner and at its mirror, stay as they were.
3. A barrier. A rank that has passed it needs no other rank for the rest: the step counts.
4. Each rank steps its own pieces and its mirror in place.

If a rank is lost, some ranks may have passed the barrier. Then the others finish the step, too, with the gradients that
they have kept. If no rank has, owners and mirrors have all that was before the step. With two ranks there is nothing to
write in 2, so 2 and 3 fall away.

Example, 3 ranks on one host. Rank r keeps the mirror of rank r - 1:

    rank 0 steps copies of share 0, and writes to rank 2. Barrier. It steps shares 0 and 2 in place.
    rank 1 steps copies of share 1, and writes to rank 0. Barrier. It steps shares 1 and 0 in place.
    rank 2 steps copies of share 2, and writes to rank 1. Barrier. It steps shares 2 and 1 in place.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.optim import Optimizer

from torchring.sharding.kinds import HOOKS
from torchring.sharding.pieces import Piece

_BATCH_BYTES: Final = 256 * 1024  # of parameters: they, gradients and state stay in the cache


def keeper_of(rank: int, hosts: Sequence[Sequence[int]]) -> int:
    """The rank that keeps the mirror of `rank`: on another host if there is one. Each rank keeps one.

    Example: hosts [(0, 1), (2, 3)] -> 0: 2, 1: 3, 2: 0, 3: 1. One host (0, 1, 2) -> 0: 1, 1: 2, 2: 0.
    """
    ranks = [each for members in hosts for each in members]
    return ranks[(ranks.index(rank) + _shift(hosts)) % len(ranks)]


def kept_by(rank: int, hosts: Sequence[Sequence[int]]) -> int:
    """The rank whose mirror `rank` keeps."""
    ranks = [each for members in hosts for each in members]
    return ranks[(ranks.index(rank) - _shift(hosts)) % len(ranks)]


def _shift(hosts: Sequence[Sequence[int]]) -> int:
    return max(map(len, hosts)) if len(hosts) > 1 else 1


@contextmanager
def aside(optimizer: Optimizer, tensors: Sequence[Sequence[torch.Tensor]], state: Mapping[Any, Any]) -> Iterator[None]:
    """Inside, the groups of `optimizer` hold these tensors, with this state, and a step calls no hook.

    What a step changes in the optimizer itself or in its groups is as before afterwards.
    """
    before = dict(vars(optimizer))
    optimizer.param_groups = [
        {**group, "params": list(own)} for group, own in zip(optimizer.param_groups, tensors, strict=True)
    ]
    optimizer.state = state  # type: ignore[assignment]
    for name in HOOKS:
        setattr(optimizer, name, OrderedDict())
    try:
        yield
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(before)


def stepped_copies(
    optimizer: Optimizer, pieces: Sequence[Piece], run: Callable[[], object]
) -> Iterator[tuple[Piece, torch.Tensor]]:
    """The pieces that have a gradient, each with a copy of its tensor that has been stepped. State stays as it is."""
    batch: list[Piece] = []
    num_bytes = 0
    for piece in [*pieces, None]:
        if batch and (piece is None or num_bytes > _BATCH_BYTES):
            copies = list(map(_copy_of, batch))
            state: Any = defaultdict(dict)
            tensors: list[list[torch.Tensor]] = [[] for _ in optimizer.param_groups]
            for each, its in zip(batch, copies, strict=True):
                tensors[each.group].append(its)
                if each.tensor in optimizer.state:
                    state[its] = {key: _clone(value) for key, value in optimizer.state[each.tensor].items()}
            with aside(optimizer, tensors, state):
                run()
            yield from zip(batch, [each.detach() for each in copies], strict=True)
            batch, num_bytes = [], 0
        if piece is not None and piece.tensor.grad is not None:
            batch.append(piece)
            num_bytes += piece.tensor.nbytes


def _copy_of(piece: Piece) -> torch.Tensor:
    """A tensor to step in place of the piece's."""
    tensor, grad = piece.tensor.detach().clone(), piece.tensor.grad
    assert grad is not None
    if piece.is_parameter:  # of an optimizer that may write to gradients
        tensor, grad = torch.nn.Parameter(tensor, requires_grad=piece.tensor.requires_grad), grad.detach().clone()
    tensor.grad = grad
    return tensor


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
