"""The state of a whole parameter of which this rank keeps some elements, for torch.distributed.checkpoint.

Its planners ask a tensor in a state_dict which boxes of the whole it has, as they ask a DTensor. So a file holds
ordinary tensors, which any number of ranks, and plain optimizers, load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

_aten: Final = torch.ops.aten
_COPIES: Final = (_aten.detach.default, _aten.clone.default, _aten._to_copy.default)

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


def cut_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cut elements [start, stop) of a row-major tensor into boxes, one behind the other in memory.

    Elements 3 to 17 of shape (4, 5) are three boxes. At most 2 * dimensions - 1 are needed.

        . . . a a        a: offsets (0, 3), sizes (1, 2)
        b b b b b        b: offsets (1, 0), sizes (2, 5)
        b b b b b
        c c c . .        c: offsets (3, 0), sizes (1, 3)
    """
    if start == stop:
        return []
    if not shape:
        return [((), ())]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows [first, last)

    def inside(index: int, begin: int, end: int) -> list[Box]:
        found = cut_boxes(shape[1:], begin - index * row, end - index * row)
        return [((index, *offsets), (1, *sizes)) for offsets, sizes in found]

    if first > last:
        return inside(last, start, stop)
    whole: Box = ((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    return [
        *(inside(first - 1, start, first * row) if start < first * row else []),
        *([whole] if first < last else []),
        *(inside(last, last * row, stop) if last * row < stop else []),
    ]


class ShardTensor(torch.Tensor):
    """Looks like the state of a whole parameter, but computes nothing: this rank has `elements` of it only."""

    first: int  # index of the first of the elements, in memory order
    elements: torch.Tensor  # [n]; a copy, if the optimizer steps elements
    origin: Sequence[int] = ()  # where this tensor begins in a DTensor whose local tensor it is
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shape: Sequence[int], stride: Sequence[int], first: int, elements: torch.Tensor) -> ShardTensor:
        tensor: ShardTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=stride, dtype=elements.dtype, device=elements.device
        )
        tensor.first = first
        tensor.elements = elements
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> ShardTensor:
        like, kwargs = args[0], kwargs or {}
        if func in _COPIES:
            elements = func(like.elements, *args[1:], **kwargs)
        elif func is _aten.new_empty.default and list(args[1]) == list(like.shape):  # async_save copies into it
            elements = func(like.elements, like.elements.shape, **kwargs)
        else:
            raise NotImplementedError(
                f"{func}: this tensor is a part of the state of an optimizer with shard=True, for "
                "torch.distributed.checkpoint. Outside of it, use what state_dict(all_ranks=True) of the optimizer "
                "returns"
            )
        result = cls(like.shape, like.stride(), like.first, elements)
        result.origin = like.origin
        return result

    def __repr__(self) -> str:  # type: ignore[override]
        last = self.first + self.elements.numel()
        return f"ShardTensor(elements [{self.first}, {last}) of shape {tuple(self.shape)}, {self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "the state is sharded for torch.distributed.checkpoint, so a rank cannot pickle all of it; save it with "
            "dcp.save(), or pickle what state_dict() of the optimizer returns"
        )

    def whole(self) -> torch.Tensor:
        """An ordinary tensor of all elements. Raises ValueError if this rank does not have them."""
        elements = self.part(0, self.numel())
        return elements.as_strided(self.shape, self.stride(), elements.storage_offset())

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop), in memory order. Raises ValueError if this rank does not have them."""
        if not self.first <= start <= stop <= self.first + self.elements.numel():
            raise ValueError(
                "this rank has only a part of this state, which torchring.sharding.DistributedState has cut for "
                "torch.distributed.checkpoint: save it there, and load it from there, on all ranks; or load what "
                "state_dict() of the optimizer has returned"
            )
        return self.elements[start - self.first : stop - self.first]

    def boxes(self) -> dict[tuple[int, ...], torch.Tensor]:
        """The elements as boxes, by their offsets from the beginning of the whole, or of the DTensor."""
        order = sorted(range(self.dim()), key=self.stride, reverse=True)  # of the dimensions in memory
        places = [order.index(dimension) for dimension in range(self.dim())]
        cut = cut_boxes([self.shape[d] for d in order], self.first, self.first + self.elements.numel())
        parts = torch.split(self.elements, [math.prod(sizes) for _, sizes in cut])
        begin = self.origin or [0] * self.dim()
        return {
            tuple(begin[d] + offsets[i] for d, i in enumerate(places)): part.view(sizes).permute(places)
            for (offsets, sizes), part in zip(cut, parts, strict=True)
        }

    # What the planners of torch.distributed.checkpoint ask

    def __create_write_items__(self, fqn: str, whole: torch.Tensor) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.elements)
        # The writer of files keeps a copy of the last box of each tensor until the file is complete: a small one.
        chunks = sorted(self.__create_chunk_list__(), key=lambda chunk: chunk.sizes.numel(), reverse=True)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=whole.size()),
            )
            for chunk in chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(offsets), box.size()) for offsets, box in self.boxes().items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.boxes()[tuple(index.offset)]
