"""What a model that trains is given: how many samples, and a digest by which equal batches are recognised."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from torchring.accelerators import accelerator_of
from torchring.world import World

_NUM_VALUES: Final = 256  # of a tensor: images have edges of one colour, and texts end in padding
_MOST_TENSORS: Final = 4  # of the model's arguments
_LAG: Final = 4  # rounds until a digest is read that a device works out: nobody waits for it


_Values = tuple["bytes | torch.Tensor", int]  # sampled values of a tensor, and the size of one in bytes


@dataclass(frozen=True)
class Batch:
    """What forward was given for one reduction.

    Attributes:
        num_samples: length of the first dimension of the first tensor, summed over micro-steps.
        num_tokens: number of elements of the first tensor if it holds integers in two dimensions, as texts are given;
            else `num_samples`.
        digest: of the first batch. None if it is not known, or if nothing has changed since the batch before.
        is_repeated: another tensor than in the batch before, with the same values.
    """

    num_samples: int = 0
    num_tokens: int = 0
    digest: int | None = None
    is_repeated: bool = False


class Switch:
    """Of one world: whether ranks look for mistakes in their data, as `init` was told."""

    def __init__(self, _: World) -> None:
        self.is_on = True


class Inputs:
    """Looks at the arguments of one model. `see` is called in each forward, `take` once for each reduction.

    Nothing is sampled unless `is_on`.

    The digest is that of 256 values of the first tensor that changes from batch to batch, at fixed random places. So
    tensors that are the same in each batch (positions, a mask), or have one value everywhere (a time), show nothing.
    A tensor on a device is sampled there, and read some reductions later, without waiting for the device.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._num_samples = 0
        self._num_tokens = 0
        self._is_seen = False  # the first batch of this reduction
        self._first: weakref.ref[torch.Tensor] | None = None
        self._is_same_tensor = False
        self._values: list[_Values] = []  # of the first batch
        self._waiting: deque[list[_Values]] = deque()
        self._is_on_device = False
        self._before: tuple[int | None, ...] = ()

    def see(self, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> int:
        """The model is about to get these arguments. Returns the number of samples."""
        first = next(_tensors((*inputs, *keywords.values())), None)
        if first is None:
            return 0
        num_samples = int(first.size(0)) if first.dim() else 0  # a nested tensor has no shape
        self._num_samples += num_samples
        is_text = first.dim() == 2 and not (first.is_floating_point() or first.is_complex() or first.is_nested)
        self._num_tokens += first.numel() if is_text else num_samples
        if self.is_on and not self._is_seen:
            self._is_seen = True
            self._is_same_tensor = self._first is not None and self._first() is first
            self._first = weakref.ref(first)
            # Whatever a script passes to its model, this look at it must not end the training.
            with contextlib.suppress(RuntimeError, TypeError, NotImplementedError):
                self._values = self._sample(_tensors((*inputs, *keywords.values())))
        return num_samples

    def take(self) -> Batch:
        """A reduction begins. Returns what was seen since the last call."""
        values, self._values, is_same_tensor = self._values, [], self._is_same_tensor
        num_samples, num_tokens = self._num_samples, self._num_tokens
        self._num_samples = self._num_tokens = 0
        self._is_seen = self._is_same_tensor = False
        if self._is_on_device:
            self._waiting.append(values)
            values = self._waiting.popleft() if len(self._waiting) > _LAG else []
        digests = tuple(map(_digest, values))
        before, self._before = self._before, digests
        changed = (new for i, new in enumerate(digests) if new is not None and (i >= len(before) or new != before[i]))
        digest = next(changed, None)
        is_repeated = digest is None and any(digests) and not is_same_tensor and not self._is_on_device
        return Batch(num_samples, num_tokens, digest, is_repeated)

    def _sample(self, tensors: Iterator[torch.Tensor]) -> list[_Values]:
        """Some values of each tensor. Those of a device are on their way."""
        found: list[_Values] = []
        for _, tensor in zip(range(_MOST_TENSORS), tensors, strict=False):
            if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
                continue
            accelerator = accelerator_of(tensor.device)
            if accelerator is None and tensor.device.type == "cpu":
                found.append((_values_of(tensor.detach()), tensor.itemsize))
            elif accelerator is not None and tensor.numel() > 1:
                if accelerator.is_capturing():
                    return []
                self._is_on_device = True
                values = tensor.detach()[_indices_on(tensor.device, tuple(tensor.shape))]
                found.append((accelerator.fetch(values.view(torch.uint8)), tensor.itemsize))
        return found


def _tensors(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among the arguments, and in dicts, lists and tuples that are arguments."""
    for each in arguments:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, Mapping):
            yield from (value for value in each.values() if isinstance(value, torch.Tensor))
        elif isinstance(each, (list, tuple)):
            yield from (value for value in each if isinstance(value, torch.Tensor))


def _values_of(tensor: torch.Tensor) -> bytes:
    array = (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
    places = _places(array.size)
    if array.flags.c_contiguous:
        return array.reshape(-1).take(places).tobytes()
    return array[np.unravel_index(places, array.shape)].tobytes()


@functools.lru_cache(maxsize=64)
def _places(size: int) -> npt.NDArray[np.int64]:
    """The positions that are looked at in a tensor of `size` elements, the same on all ranks."""
    if size <= _NUM_VALUES:
        return np.arange(size)
    return np.sort(np.random.RandomState(0).randint(size, size=_NUM_VALUES, dtype=np.int64))


@functools.lru_cache(maxsize=16)
def _indices_on(device: torch.device, shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    indices = np.unravel_index(_places(math.prod(shape)), shape)
    return tuple(torch.from_numpy(index.astype(np.int64)).to(device) for index in indices)


def _digest(values: _Values) -> int | None:
    """None if all values are the same: so is what has not come from a device yet."""
    read, size = values
    raw = read if isinstance(read, bytes) else read.numpy().tobytes()
    if raw == raw[:size] * (len(raw) // size):
        return None
    return zlib.crc32(raw) + 1
