"""Point-to-point transfers between hosts, through an engine that exists."""

from __future__ import annotations

from typing import Protocol

import torch

from torchring.errors import RingError


class Transfer(Protocol):
    """A send or receive under way. The tensor belongs to the transport until `wait` returns."""

    def wait(self) -> None:
        """Block until done. Raises PeerLostError or PeerTimeoutError naming the peer at fault."""


class Transport(Protocol):
    """Ordered point-to-point transfers between the ranks of one world, and the engine's own sum.

    Transfers between a pair of ranks match if they have the same tag, in the order in which they were started. Several
    threads may use a transport at once, each with tags of its own.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def engine(self) -> str:
        """What moves the bytes: "Gloo" or "MPI"."""

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Transfer:
        """Start sending a contiguous tensor of any dtype and size, 0 elements included. 0 <= tag < 2**15."""

    def receive(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Transfer:
        """Start receiving into a contiguous tensor with as many bytes as the peer sends."""

    def sums(self, dtype: torch.dtype) -> bool:
        """Whether `all_reduce` takes this dtype."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Collective: the contiguous `tensor` becomes the sum over ranks, added in its dtype as the engine does it.

        Blocks. All ranks call this and `all_gather` in the same order, one at a time.
        """

    def all_gather(self, number: int) -> list[int]:
        """Collective: every rank's number (64 bits, signed), in rank order."""

    def fail(self, error: RingError) -> RingError:
        """Close every link, leaving `error` for the peers that still wait on them to raise. Returns it."""

    def close(self) -> None:
        """Close every link of this stream; peers that still wait on it raise PeerLostError."""


__all__ = ["Transfer", "Transport"]
