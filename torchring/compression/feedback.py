"""What error feedback has kept, in checkpoints."""

from typing import Any

import torch

from torchring.collectives.service import collectives_of
from torchring.compression.schemes import COMPRESSED, CompressedBuckets


def state_dict(optimizer: Any) -> dict[str, torch.Tensor]:
    """What compression has lost and will still add to gradients, summed over ranks. Collective.

    Without it, a job that goes on from a checkpoint loses about as much as one more compressed step does.

    Args:
        optimizer: what `torchring.wrap` returned.

    Returns:
        By parameter name, an fp32 tensor on the CPU, 1-D, as long as the gradient, in the order of its memory. The same
        on all ranks; empty where nothing is compressed.
    """
    sync, all_reduce = _parts_of(optimizer)
    if all_reduce is None:
        return {}
    own, collectives = all_reduce.feedback(), collectives_of(sync.world)
    lengths = {spec.name: spec.num_reals for spec in sync.specs if not spec.is_sparse and spec.real_dtype in COMPRESSED}
    mine = (own.get(name, torch.zeros(n, dtype=torch.float32, device="cpu")) for name, n in lengths.items())
    return {name: collectives.all_reduce(each, "sum") for name, each in zip(lengths, mine, strict=True)}


def load_state_dict(optimizer: Any, state: dict[str, torch.Tensor]) -> None:
    """Go on with what `state_dict` returned, with any number of ranks and hosts. Call this on all ranks.

    Parameters that are not in `state` begin with nothing. Does nothing where nothing is compressed.

    Raises:
        ValueError: a tensor in `state` is not as long as the gradient of its parameter.
    """
    sync, all_reduce = _parts_of(optimizer)
    if all_reduce is None:
        return
    for spec in sync.specs:
        given = state.get(spec.name)
        if given is not None and given.shape != (spec.num_reals,):
            raise ValueError(f"the state of {spec.name} has shape {tuple(given.shape)}, not ({spec.num_reals},)")
    num_owners = len(all_reduce.transport.ranks)  # of each element
    all_reduce.load_feedback({name: given / num_owners for name, given in state.items()})


def _parts_of(optimizer: Any) -> tuple[Any, CompressedBuckets | None]:
    sync = optimizer._live_sync()
    found = sync.layout.all_reduce if hasattr(sync, "layout") else None  # else in a world of one
    return sync, found if isinstance(found, CompressedBuckets) else None
