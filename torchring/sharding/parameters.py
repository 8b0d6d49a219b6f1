"""Moves parameters to memory in which ranks write each other's copies, and cuts them into shards there.

Every rank keeps parameters of its own: a script may write to them on all ranks alike (`p.mul_(0.9)`), which would count
once for each rank if the ranks had one copy together. The memory takes the place of what the parameters had.

A shard has at most 512 KiB: a plain for-loop optimizer, which is PyTorch's default on the CPU, passes over a tensor a
dozen times, and finds a small one in the cache again. (AdamW, 21 M elements on each of 2 cores: 29 ms; in shards of
16 MiB 61 to 79 ms. `fused=True`: 17 and 16 ms.)
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from torchring.accelerators import accelerator_of
from torchring.gradients.views import gradient_view, num_owners, storage_of, whole_of
from torchring.kernels.chunks import DTYPES
from torchring.sharding.cut import Flat
from torchring.sharding.kinds import Kind

_MOST_BYTES: Final = 512 * 1024  # of a shard on the CPU
_NUM_OWNERS: Final = num_owners(storage_of(torch.nn.Parameter(torch.empty(1, device="cpu"))))


@dataclass(frozen=True, eq=False)
class FlatMemory:
    """The memory of one `Flat`."""

    flat: Flat
    own: torch.Tensor  # [numel] of its dtype; this rank's parameters
    peers: Sequence[torch.Tensor] = ()  # the same of the other ranks of the host, where the host writes them


@dataclass(frozen=True, eq=False)
class Shard:
    """Elements [start, stop) of a parameter, in memory order, which this rank steps."""

    # what the optimizer steps, in the memory of the parameter. The parameter itself if the optimizer needs whole
    # parameters.
    tensor: torch.Tensor
    parameter: torch.nn.Parameter
    index: int  # of the parameter
    start: int
    stop: int

    def gradient(self) -> torch.Tensor | None:
        """The part of the parameter's gradient."""
        grad = self.parameter.grad
        if grad is None or self.tensor is self.parameter:
            return grad
        return flat(laid_out_as(grad.detach(), self.parameter))[self.start : self.stop]


def is_cut(parameter: torch.Tensor) -> bool:
    """Whether a rank steps elements of the parameter: integers have no gradients."""
    return parameter.is_floating_point() or parameter.is_complex()


def check_movable(parameters: Mapping[torch.nn.Parameter, str]) -> None:
    """Raise ValueError, with its name, for a parameter that cannot move to other memory by itself."""
    num_users = Counter(storage_of(parameter) for parameter in parameters)
    for parameter, name in parameters.items():
        if not parameter.numel():
            raise ValueError(f"shard=True takes no parameters without elements, such as {name}; leave them out")
        if is_cut(parameter) and not (_fills_storage(parameter) and num_users[storage_of(parameter)] == 1):
            raise ValueError(
                f"shard=True moves parameters to memory that ranks share, and cannot move {name}: it is a part of a "
                "larger tensor, has gaps, or is in memory that the script shares. Make it a parameter of its own "
                "(torch.nn.Parameter(p.detach().clone())), or leave shard out"
            )


def _fills_storage(parameter: torch.Tensor) -> bool:
    """Whether the parameter fills a storage of its own without gaps, in any order of dimensions."""
    return (
        parameter.layout == torch.strided
        and (accelerator_of(parameter.device) is None or parameter.dtype.to_real() in DTYPES)  # which kernels copy
        and type(parameter.data) is torch.Tensor
        and not (parameter.is_cpu and parameter.is_shared())  # type: ignore[no-untyped-call]  # with other processes
        and parameter.storage_offset() == 0
        and parameter.untyped_storage().nbytes() == parameter.numel() * parameter.dtype.itemsize
        and not (parameter.is_conj() or parameter.is_neg())
    )


@torch.no_grad()
def move(parameters: Sequence[torch.nn.Parameter], memories: Sequence[FlatMemory]) -> list[torch.Tensor]:
    """Move parameters to these memories. Tensors that share their memory move with them.

    Returns what has to stay allocated: numpy's arrays may still point there.
    """
    kept = []
    for memory in memories:
        for index, (start, stop) in memory.flat.spans.items():
            parameter = parameters[index]
            view = gradient_view(memory.own[start:stop], parameter.shape, parameter.stride(), parameter.dtype)
            has_others = num_owners(storage_of(parameter)) > _NUM_OWNERS + (parameter is not whole_of(parameter))
            view.copy_(parameter)
            parameter.untyped_storage()._swap_data_ptr_(view.untyped_storage())  # type: ignore[attr-defined]
            if has_others and parameter.is_cpu:
                kept.append(view)  # has the memory that the parameter had
    return kept


def cut_shards(memory: FlatMemory, rank: int, parameters: Sequence[torch.nn.Parameter], kind: Kind) -> list[Shard]:
    """What a rank steps of the parameters in this memory."""
    first, last = memory.flat.bounds[rank]
    step = max(1, _MOST_BYTES // memory.flat.dtype.itemsize)
    if kind is Kind.WHOLE or accelerator_of(memory.own.device):
        step = max(1, memory.flat.numel)
    shards = []
    for index, (begin, end) in memory.flat.spans.items():
        parameter = parameters[index]
        for start in range(max(first, begin), min(last, end), step):
            stop = min(start + step, last, end)
            tensor = parameter if kind is Kind.WHOLE else memory.own[start:stop]
            shards.append(Shard(tensor, parameter, index, start - begin, stop - begin))
    return shards


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor without gaps, in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def laid_out_as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy, with its elements in the same order in memory as those of `like`."""
    if tensor.stride() == like.stride() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    return torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
