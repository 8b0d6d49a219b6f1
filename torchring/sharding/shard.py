"""The tensors that an optimizer steps in place of the parameters, and their gradients.

A shard lies in the memory of its parameter, so a step of the shard is a step of these elements. It has at most 512 KiB:
a plain for-loop optimizer, which is PyTorch's default on the CPU, passes over a tensor a dozen times, and finds a small
one in the cache again. (AdamW, 21 M elements on each of 2 cores: 29 ms; in shards of 16 MiB 61 to 79 ms. `fused=True`:
17 and 16 ms.) Small shards that lie side by side are stepped as one tensor, as each tensor costs such an optimizer
60 us. (AdamW, 401 tensors with 223,000 elements: 24 ms; `foreach=True`: 16 ms; as one tensor: 0.6 ms.)
"""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from torchring.errors import GradientError
from torchring.sharding.kinds import is_scalar, scalar
from torchring.sharding.parameters import FlatMemory

_MOST_BYTES: Final = 512 * 1024
_MOST_BYTES_ON_DEVICE: Final = 16 << 20  # few launches

State = dict[torch.Tensor, dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Shard:
    """Elements [start, stop) of a parameter, in memory order, which this rank steps.

    Attributes:
        tensor: what the optimizer sees; the parameter itself if the optimizer needs whole parameters.
        index: of the parameter.
    """

    tensor: torch.Tensor
    memory: FlatMemory
    parameter: torch.nn.Parameter
    index: int
    start: int
    stop: int

    @functools.cached_property
    def is_whole(self) -> bool:
        return self.stop - self.start == self.parameter.numel()

    def gradient(self, name: str, *, keeps_shape: bool = False) -> torch.Tensor | None:
        """The part of the parameter's gradient: [n]. Raises GradientError, with this name, if the gradient is sparse.

        Args:
            keeps_shape: of a whole parameter, return the gradient as it is.
        """
        grad = self.parameter.grad
        if grad is not None and grad.is_sparse:
            raise GradientError(
                f"{name} has a sparse gradient; with shard=True, pass the model to torchring.wrap(optimizer, model), "
                "so that sparse embeddings are found beforehand",
                parameters=(name,),
            )
        if grad is None or (keeps_shape and self.is_whole):
            return grad
        return flat(laid_out_as(grad.detach(), self.parameter))[self.start : self.stop]


class Run:
    """What the optimizer steps as one tensor: a shard, or small shards that lie side by side.

    Attributes:
        tensor: what the optimizer sees. Between shards it has gaps, whose gradients are zeros.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        first, last = shards[0].tensor, shards[-1].tensor
        self.shards = shards
        self.tensor = first
        if len(shards) > 1:
            begin = first.storage_offset()
            self.tensor = first.as_strided((last.storage_offset() + last.numel() - begin,), (1,))
            self._gradient = torch.zeros_like(self.tensor)
            self._gradients = [
                place.as_strided(p.shape, p.stride()) if shard.is_whole else place
                for shard, place in zip(shards, self._places(self._gradient), strict=True)
                for p in (shard.parameter,)
            ]

    def _places(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Where the shards are in memory like the tensor's."""
        begin = self.tensor.storage_offset()
        offsets = [shard.tensor.storage_offset() - begin for shard in self.shards]
        return [memory[i : i + shard.tensor.numel()] for i, shard in zip(offsets, self.shards, strict=True)]

    def take_gradient(self, names: Sequence[str]) -> None:
        if self.tensor is not self.shards[0].parameter:
            has_several = len(self.shards) > 1
            grads = [shard.gradient(names[shard.index], keeps_shape=has_several) for shard in self.shards]
            if has_several and grads[0] is not None:  # then all have one
                torch._foreach_copy_(self._gradients, grads)  # type: ignore[arg-type]
                grads = [self._gradient]
            self.tensor.grad = grads[0]

    def drop_gradient(self) -> None:
        if self.tensor is not self.shards[0].parameter:
            self.tensor.grad = None

    def split_state(self, state: State) -> None:
        """Give each shard its own entry."""
        if len(self.shards) > 1 and (entry := state.pop(self.tensor, None)):
            parts = {
                k: [copy.deepcopy(v) for _ in self.shards] if is_scalar(k, v) else self._places(v)
                for k, v in entry.items()
            }
            for i, shard in enumerate(self.shards):
                state[shard.tensor] = {k: its[i] for k, its in parts.items()}

    def join_state(self, state: State) -> None:
        """Make one entry of those of the shards, which are alike."""
        if len(self.shards) > 1 and state.get(self.shards[0].tensor):
            entries = [state.pop(shard.tensor) for shard in self.shards]
            entry = state[self.tensor] = dict(entries[0])
            for key, value in entries[0].items():
                if not is_scalar(key, value):
                    entry[key] = torch.zeros_like(self.tensor, dtype=value.dtype)
                    torch._foreach_copy_(self._places(entry[key]), [each[key] for each in entries])


def join(shards: Sequence[Shard], state: State, traits: Callable[[Shard], object]) -> list[Run]:
    """Make runs of neighbours that have like traits, and like states, which are joined."""
    found: list[list[Shard]] = []
    last: object = None
    for shard in shards:
        entry = {k: scalar(v) if is_scalar(k, v) else v.dtype for k, v in state.get(shard.tensor, {}).items()}
        its = traits(shard), shard.memory, entry
        stop = shard.tensor.storage_offset() + shard.tensor.numel()
        if its != last or (stop - found[-1][0].tensor.storage_offset()) * shard.tensor.itemsize > _MOST_BYTES:
            found.append([])
        found[-1].append(shard)
        last = its
    runs = list(map(Run, found))
    for run in runs:
        run.join_state(state)
    return runs


def cut_shards(
    memory: FlatMemory, rank: int, parameters: Sequence[torch.nn.Parameter], *, on_device: bool = False
) -> list[Shard]:
    """What a rank steps of the parameters in this memory."""
    step = max(1, (_MOST_BYTES_ON_DEVICE if on_device else _MOST_BYTES) // memory.flat.dtype.itemsize)
    first, last = memory.flat.bounds[rank]
    shards = []
    for index, (begin, end) in memory.flat.spans.items():
        for start in range(max(first, begin), min(last, end), step):
            stop = min(start + step, last, end)
            tensor = memory.own[start:stop]
            shards.append(Shard(tensor, memory, parameters[index], index, start - begin, stop - begin))
    return shards


def whole_shards(memory: FlatMemory, rank: int, parameters: Sequence[torch.nn.Parameter]) -> list[Shard]:
    """As `cut_shards`, for an optimizer that needs whole parameters."""
    first, last = memory.flat.bounds[rank]
    ((index, (start, stop)),) = memory.flat.spans.items()
    return [Shard(parameters[index], memory, parameters[index], index, start, stop)] if first < last else []


def by_parameter(shards: Sequence[Shard]) -> dict[int, list[Shard]]:
    """The shards, by the index of their parameter."""
    found: dict[int, list[Shard]] = {}
    for shard in shards:
        found.setdefault(shard.index, []).append(shard)
    return found


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor without gaps, in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def laid_out_as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy, with its elements in the same order in memory as those of `like`."""
    if tensor.stride() == like.stride() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    return torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class ShardState(defaultdict[torch.Tensor, Any]):
    """The state of an optimizer. `refuse` raises an error for a key whose entry the script may not change.

    To look up such a key gives an empty entry, as torch.distributed.checkpoint expects.
    """

    def __init__(self, entries: Mapping[torch.Tensor, Any], refuse: Callable[[object], None]) -> None:
        super().__init__(dict, entries)
        self._refuse = refuse

    def __missing__(self, key: torch.Tensor) -> Any:
        entry: dict[str, Any] = {}
        dict.__setitem__(self, key, entry)
        return entry

    def __setitem__(self, key: torch.Tensor, entry: Any) -> None:
        self._refuse(key)
        super().__setitem__(key, entry)

    def pop(self, key: torch.Tensor, *default: Any) -> Any:
        self._refuse(key)
        return super().pop(key, *default)

    def __reduce__(self) -> Any:
        """A copy belongs to no optimizer that steps shards."""
        return defaultdict, (dict,), None, None, iter(self.items())


def num_bytes_of(value: Any) -> int:
    """Bytes of all tensors in a state."""
    if isinstance(value, torch.Tensor):
        return value._indices().nbytes + value._values().nbytes if value.is_sparse else value.nbytes
    if isinstance(value, dict):
        return sum(map(num_bytes_of, value.values()))
    return sum(map(num_bytes_of, value)) if isinstance(value, (list, tuple)) else 0
