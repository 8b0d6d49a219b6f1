"""The contract between an all-reduce and the engine that moves its bytes between hosts."""

from typing import Protocol

import torch

from torchring.errors import PeerLostError, RingError
from torchring.memory.host import bytes_of


class Transfer(Protocol):
    """A collective that has been started. The tensor belongs to the transport until `wait` returns."""

    def wait(self) -> None:
        """Block until the transfer is done. Raises PeerLostError or PeerTimeoutError naming the peer at fault."""


class Transport(Protocol):
    """Collectives of an engine between ranks of one world. Tensors are contiguous, in host memory.

    All ranks start them in the same order. They proceed while nobody waits for them. Only one thread uses a transport
    at a time; `fail` and `close` may be called from any thread.
    """

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that this transport connects, this rank included."""

    @property
    def engine(self) -> str:
        """Name of the engine that moves the bytes: "Gloo" or "MPI"."""

    def sums(self, dtype: torch.dtype) -> bool:
        """True if `start_all_reduce` takes this dtype."""

    def start_all_reduce(self, tensor: torch.Tensor) -> Transfer:
        """`tensor`, of a dtype that the engine `sums`, becomes the sum over ranks, added in its dtype by the engine."""

    def start_nothing(self, tensor: torch.Tensor) -> Transfer:
        """As `start_all_reduce`, but this rank adds nothing, and its `tensor` stays as it is."""

    def start_all_to_all(self, output: torch.Tensor, tensor: torch.Tensor) -> Transfer:
        """Row r of `tensor` goes to the r-th of `ranks`, and row r of `output` comes from there. Both uint8 [N, n]."""

    def start_all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Transfer:
        """Row r of `output`, uint8 [N, n], becomes the `tensor`, uint8 [n], of the r-th of `ranks`."""

    def start_broadcast(self, tensor: torch.Tensor, src: int) -> Transfer:
        """`tensor`, of any dtype, becomes that of rank `src`."""

    def fail(self, error: RingError) -> RingError:
        """Close every link, and leave `error` for the peers that still wait on a link to raise. Returns `error`."""

    def close(self) -> None:
        """Close every link of this transport. A peer that still waits on a link raises PeerLostError."""


def closed(failure: RingError | None, rank: int) -> RingError:
    """The error of a call on a closed transport of `rank`. `failure` closed the transport, maybe on another thread."""
    if failure is not None:
        return type(failure)(failure.message, rank=rank, peers=failure.peers)
    return PeerLostError("this transport is closed; call torchring.shutdown() and torchring.init()")


def contiguous_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8, so that dtypes travel that the engine does not know. Raises ValueError on gaps."""
    if not tensor.is_contiguous():
        raise ValueError(f"a transport moves contiguous tensors, got strides {tensor.stride()}")
    return bytes_of(tensor)
