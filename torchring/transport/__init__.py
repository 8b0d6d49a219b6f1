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
    """Ordered point-to-point transfers between the ranks of one world.

    Transfers between a pair of ranks match if they have the same tag, in the order in which they were started. Several
    threads may use a transport at once, each with tags of its own.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Transfer:
        """Start sending a contiguous tensor of any dtype and size, 0 elements included. 0 <= tag < 2**15."""

    def receive(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Transfer:
        """Start receiving into a contiguous tensor with as many bytes as the peer sends."""

    def fail(self, error: RingError) -> RingError:
        """Close every link, leaving `error` for the peers that still wait on them to raise. Returns it."""

    def close(self) -> None:
        """Close every link of this stream; peers that still wait on it raise PeerLostError."""


__all__ = ["Transfer", "Transport"]
