"""Keeps gradients that a stream packs until their memory may be used again.

A gradient's memory belongs to the stream on which the gradient was allocated. As soon as nobody refers to the gradient,
that stream's later work gets the memory, maybe before the packing stream has read it. So first the packing must have
been done (the mark is reached), or that stream must have been told to wait for the mark.

Which stream is it? The stream that was current when the gradient was accumulated: either the gradient was allocated
there, or autograd has called `record_stream` for that stream (torch/csrc/autograd/input_buffer.cpp), so that the
allocator itself waits for what is now in that stream. If all gradients of a pack are the current stream's, the current
stream waits for the mark. If there were several streams, the gradients stay until the mark is reached.

Waiting costs the current stream nothing: it has computed another bucket since, and packing, which is a matter of
microseconds, waits for no reduction.
"""

from __future__ import annotations

from collections import deque

import torch

from torchring.accelerators import Accelerator, Mark


class UnreadGradients:
    """Gradients that are packed on one stream, of all buckets; kept until they may be overwritten."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._kept: deque[tuple[dict[int, torch.Tensor], Mark, frozenset[object]]] = deque()

    def keep(self, gradients: dict[int, torch.Tensor], mark: Mark, streams: frozenset[object]) -> None:
        """Keep what is in `gradients` until it is released. At `mark`, the gradients of `streams` have been read."""
        self._kept.append((gradients, mark, streams))

    def release(self) -> None:
        """Empty the dictionaries of gradients that may be overwritten by the current stream's later work."""
        current = frozenset((self._accelerator.current_stream(),))
        while self._kept:
            gradients, mark, streams = self._kept[0]
            if gradients and not mark.is_reached():
                if streams != current:
                    return
                mark.hold_current()
            gradients.clear()
            self._kept.popleft()
