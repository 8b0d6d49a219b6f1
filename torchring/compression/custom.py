"""A script's own compression."""

import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import torch

from torchring.compression.codec import Codec, Contents
from torchring.errors import ranks_in_words
from torchring.memory.host import bytes_of, tensor_of
from torchring.transport.contract import Transfer, Transport

_one_call: Final = threading.Lock()  # buckets are compressed on one thread, and decompressed on another


@dataclass(frozen=True, eq=False)
class Bucket:
    """What a `Compressor` compresses. Where a host has several ranks: the part that this rank sends to other hosts.

    Attributes:
        index: of the bucket, the same on all ranks; counts anew when buckets are laid out anew.
        buffer: 1-D, on the CPU: the gradients of this rank divided by the number of ranks, one after the other, with
            zeros between them; fp32 unless the parameters are fp16 or bf16. Already the sum over the host's ranks.
        names: of the parameters, as `wrap` knows them.
        gradients: 1-D views of `buffer`, one for each name; a part of the gradient where the bucket is a part.
    """

    index: int
    buffer: torch.Tensor
    names: Sequence[str]
    gradients: Sequence[torch.Tensor]


@runtime_checkable
class Compressor(Protocol):
    """An object for `wrap(..., compression=...)`. Each call is on a thread of torchring's, one call at a time.

    Every rank gets what `compress` of every rank has returned, and adds up what `decompress` makes of it in fp32, in
    the order of ranks. An exception ends the reduction on all ranks.
    """

    def compress(self, bucket: Bucket) -> torch.Tensor | bytes:
        """What travels in place of `bucket.buffer`: bytes, or a 1-D tensor of the same dtype on all ranks.

        Its length may differ between ranks. Keep no reference to the buffer, and copy what is to be remembered.
        """

    def decompress(self, data: torch.Tensor | bytes, bucket: Bucket) -> torch.Tensor:
        """The buffer that `data`, of any rank, stands for: 1-D, as long as `bucket.buffer`. With the same bits on all
        ranks, or else they drift apart. `bucket.buffer` holds nothing of use."""


class CustomCodec(Codec):
    """See `Codec`. A message of lengths and dtypes comes before the data."""

    def __init__(self, contents: Contents, compressor: Compressor, num_ranks: int) -> None:
        self._compressor = compressor
        self._name = type(compressor).__name__
        self._contents = contents
        # What this rank sends in the reduction under way
        self._dtype: torch.dtype | None = None  # None for bytes
        self._sent: torch.Tensor  # uint8
        self._told = torch.zeros(num_ranks, 2, dtype=torch.int64, device="cpu").view(torch.uint8)
        self.num_bytes = 0

    def begin(self, tensor: torch.Tensor, weight: float, transport: Transport) -> Transfer:
        with _one_call:
            data = self._compressor.compress(self._bucket(tensor))
            if isinstance(data, bytes):
                self._dtype, self._sent = None, tensor_of(data)
            elif isinstance(data, torch.Tensor) and data.dim() == 1:
                self._dtype, self._sent = data.dtype, bytes_of(data.clone())  # the script may use its tensor again
            else:
                shape = f" of shape {tuple(data.shape)}" if isinstance(data, torch.Tensor) else ""
                got = f"{type(data).__name__}{shape}"
                raise TypeError(f"{self._name}.compress() returns bytes or a 1-D tensor, got {got}")
        self.num_bytes = len(self._sent)
        told = torch.tensor([self.num_bytes, _kind_of(self._dtype)], dtype=torch.int64, device="cpu")
        return transport.start_all_gather(self._told, told.view(torch.uint8))

    def go_on(self, tensor: torch.Tensor, weight: float, transfer: Transfer, transport: Transport) -> Transfer:
        transfer.wait()
        self._lengths, kinds = self._told.view(torch.int64).T.tolist()
        if others := [rank for rank, kind in zip(transport.ranks, kinds, strict=True) if kind != _kind_of(self._dtype)]:
            own = self._dtype or "bytes"
            raise TypeError(f"{self._name}.compress() returned {own} here, and not on {ranks_in_words(others)}")
        most = max(self._lengths)
        self._everybody = torch.empty(len(self._lengths), most, dtype=torch.uint8, device="cpu")
        mine = torch.nn.functional.pad(self._sent, (0, most - self.num_bytes))
        return transport.start_all_gather(self._everybody, mine)

    def end(self, tensor: torch.Tensor, weight: float, transfer: Transfer) -> None:
        transfer.wait()
        total = torch.zeros(len(tensor), dtype=torch.float32, device="cpu")
        for row, length in zip(self._everybody, self._lengths, strict=True):
            data = row[:length].clone()
            with _one_call:
                total += self._decompressed(data.view(self._dtype) if self._dtype else data.numpy().tobytes(), tensor)
        tensor.copy_(total)
        self._contents.clear_padding(tensor)

    def _decompressed(self, data: torch.Tensor | bytes, tensor: torch.Tensor) -> torch.Tensor:
        result = self._compressor.decompress(data, self._bucket(tensor))
        if not isinstance(result, torch.Tensor) or result.shape != tensor.shape:
            got = f"shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
            raise ValueError(f"{self._name}.decompress() returns a tensor of shape {tuple(tensor.shape)}, got {got}")
        return result

    def _bucket(self, tensor: torch.Tensor) -> Bucket:
        pieces = self._contents.pieces
        gradients = [tensor[piece.begin : piece.end] for piece in pieces]
        return Bucket(self._contents.index, tensor, [piece.name for piece in pieces], gradients)


def _kind_of(dtype: torch.dtype | None) -> int:
    return zlib.crc32(str(dtype).encode())
