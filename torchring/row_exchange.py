"""Collectives that deal out the rows of a tensor, for scripts and for `torchring.horovod`."""

from collections.abc import Sequence

import torch

from torchring.collectives.operations import Backend, combine, plain, rows_from
from torchring.collectives.signature import Signature
from torchring.memory.host import bytes_of


@torch.no_grad()
def all_to_all(
    backend: Backend, tensor: torch.Tensor, splits: Sequence[int], signature: Signature
) -> tuple[list[torch.Tensor], list[int]]:
    data = plain(backend, tensor)
    parts = backend.all_to_all([bytes_of(part) for part in torch.split(data, list(splits))], signature)
    received = [rows_from(part, data).to(tensor.device) for part in parts]
    return received, [len(part) for part in received]


def even_shares(num_rows: int, size: int) -> list[int]:
    """Number of rows for each rank. If `num_rows` is not a multiple of `size`, the first ranks get one row more.

    Example: 5 rows, 3 ranks -> [2, 2, 1].
    """
    share, rest = divmod(num_rows, size)
    return [share + (rank < rest) for rank in range(size)]


@torch.no_grad()
def reduce_scatter(backend: Backend, tensor: torch.Tensor, size: int, op: str, signature: Signature) -> torch.Tensor:
    """This rank's share of the rows, of `size` ranks, combined in rank order; 16-bit values in fp32."""
    parts, _ = all_to_all(backend, tensor, even_shares(len(tensor), size), signature)
    total = torch.empty_like(parts[0])
    combine(parts, total, op)
    return total
