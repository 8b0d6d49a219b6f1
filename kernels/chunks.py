"""ChunkTable: many tensors of very different sizes as equal pieces of work, one row for each program of a launch.

Example: numels [5000, 3], wire offsets [0, 5008], chunks of 4096, fp32

    row            0      1      2
    tensor_index   0      0      1     the tensor that the chunk belongs to
    source_offset  0      4096   0     the chunk's first element, counted from the tensor's first
    wire_offset    0      4096   5008  the place of the chunk's first element in the wire buffer
    numel          4096   904    3     the number of elements
    address        base0  base0  base1 the address of the chunk's first element, in bytes: the only column that
                          + 16384      changes, and only when a tensor has moved

A gradient usually keeps its address from step to step; `zero_grad(set_to_none=True)` may move the gradient. `point_at`
looks at every tensor (0.4 us for each), and copies the column to the device again only if an address differs.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter

import torch
from torch import Tensor

CHUNK_NUMEL = 4096  # elements per program
NUM_WARPS = 4  # one for 1024 elements
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Layout = tuple[tuple[int, int], ...]
_KIND = attrgetter("dtype", "device")


def layout(tensor: Tensor) -> Layout:
    """(size, stride) of every dimension whose size is not 1. Equal layouts mean equal memory order."""
    return tuple((n, s) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1)


class ChunkTable:
    """Which elements of which tensor each program copies, and where in the wire buffer they belong.

    numels, wire_offsets: elements per tensor, and the first element of each in the wire buffer. Offsets are multiples
        of 64 bytes and ranges are disjoint.
    device: where the columns live, and the tensors.
    layouts: `layout(view)` of each tensor's view of the wire buffer. The kernels copy in memory order, so a
        channels_last gradient needs a channels_last view: `point_at` insists on it.

    Columns are int64, and filled on the current stream: on CUDA from pinned memory, so that the host does not wait. (A
    copy from pageable memory does: it would synchronise the stream.) The table, and every launch that reads it, must be
    on one stream or ordered by events.
    """

    def __init__(
        self,
        numels: Sequence[int],
        wire_offsets: Sequence[int],
        *,
        device: torch.device | str,
        layouts: Sequence[Layout],
    ) -> None:
        self.layouts = tuple(layouts)
        # What `point_at` saw last: sizes, strides, (dtype, device) and addresses.
        self._sizes: list[torch.Size] | None = None
        self._strides: list[tuple[int, ...]] = []
        self._kinds: list[tuple[torch.dtype, torch.device]] = []
        self._addresses: list[int] = []
        self._source_dtype: torch.dtype | None = None

        sizes = torch.tensor(tuple(numels), dtype=torch.int64, device="cpu")
        chunks = (sizes + CHUNK_NUMEL - 1) // CHUNK_NUMEL
        first_row = chunks.cumsum(0) - chunks
        self.num_chunks = int(chunks.sum())
        # The two columns that only the host needs stay there: they are folded into `address`.
        self.tensor_index = torch.arange(len(self.layouts), device="cpu").repeat_interleave(chunks)
        self.source_offset = (torch.arange(self.num_chunks, device="cpu") - first_row[self.tensor_index]) * CHUNK_NUMEL
        starts = torch.tensor(tuple(wire_offsets), dtype=torch.int64, device="cpu")[self.tensor_index]
        counts = (sizes[self.tensor_index] - self.source_offset).clamp(max=CHUNK_NUMEL)
        columns = torch.stack([starts + self.source_offset, counts, torch.zeros_like(counts)])
        self.wire_offset, self.numel, self.address = sent(columns, torch.device(device)).unbind()
        self.device = self.address.device  # "cuda" has become "cuda:0"

    def point_at(self, tensors: Sequence[Tensor]) -> None:
        """Make row i of the table read or write tensors[i]; all have one dtype, whatever the wire's is.

        Does not synchronise: on CUDA the column is copied from pinned memory on the current stream. The tensors must
        stay alive until the launches that use the table have run.
        """
        # Compare lists of all tensors, which is faster than a check of each tensor: tensors that passed the check last
        # time need no check if sizes, strides, dtypes and devices are the same. At the same addresses they are.
        sizes, strides = list(map(Tensor.size, tensors)), list(map(Tensor.stride, tensors))
        addresses = list(map(Tensor.data_ptr, tensors))
        dtype = tensors[0].dtype if tensors else None
        is_same_place = addresses == self._addresses and dtype == self._source_dtype
        is_alike = sizes == self._sizes and strides == self._strides
        if not (is_alike and is_same_place):
            kinds = list(map(_KIND, tensors))
            if not is_alike or kinds != self._kinds:
                self.check_tensors(tensors)
                self._sizes, self._strides, self._kinds = sizes, strides, kinds
        if is_same_place:
            return
        if dtype is not None:
            bases = torch.tensor(addresses, dtype=torch.int64, device="cpu")
            rows = bases[self.tensor_index] + self.source_offset * dtype.itemsize
            self.address.copy_(_pinned(rows, self.device), non_blocking=True)
        self._addresses, self._source_dtype = addresses, dtype

    def launch_at(self, tensors: Sequence[Tensor], dtype: torch.dtype, launch: Callable[[], None]) -> None:
        """`point_at(tensors)`, then call `launch`, which was prepared for tensors of `dtype`, if there is work."""
        if tensors and tensors[0].dtype != dtype:
            raise TypeError(f"the launch was prepared for tensors of {dtype}, got {tensors[0].dtype}")
        self.point_at(tensors)
        if self.num_chunks:
            launch()

    def tensor_of(self, chunk: int) -> int:
        """The index of the tensor that a chunk belongs to. Names the gradient in which `pack` found NaN or infinity."""
        return int(self.tensor_index[chunk])

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise TypeError unless kernels copy tensors of this dtype."""
        if dtype not in DTYPES:
            raise TypeError(f"tensors must have one of {DTYPES}, got {dtype}")

    def check_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Raise unless the tensors have the sizes, dtype, device and memory order that the table describes."""
        if len(tensors) != len(self.layouts):
            raise ValueError(f"the table describes {len(self.layouts)} tensors, got {len(tensors)}")
        if not tensors:
            return
        dtype, device = tensors[0].dtype, self.device
        self.check_dtype(dtype)
        for i, (tensor, expected) in enumerate(zip(tensors, self.layouts, strict=True)):
            if tensor.dtype != dtype:
                raise TypeError(f"one launch takes one dtype: tensor 0 has {dtype}, tensor {i} has {tensor.dtype}")
            if tensor.device != device:
                raise ValueError(f"tensor {i} should be on {device}, got {tensor.device}")
            if layout(tensor) != expected:
                raise ValueError(
                    f"tensor {i} has (size, stride) {layout(tensor)}, its wire view {expected}: memory order is what "
                    "is copied, so they have to be equal"
                )


def sent(columns: Tensor, device: torch.device) -> Tensor:
    """The columns on `device`, copied on the current stream. Does not synchronise."""
    return _pinned(columns, device).to(device, non_blocking=True)


def _pinned(columns: Tensor, device: torch.device) -> Tensor:
    """A copy that the device may read while the host goes on.

    Nobody has to keep the copy alive: `Tensor.copy_` records an event for the stream that reads pinned memory, and
    torch does not use the memory again until the event is reached (ATen/native/cuda/Copy.cu, `record_event`).
    """
    return columns if device.type == "cpu" else columns.pin_memory()
