"""int8: 8-bit integers with a scale for each 256 elements of a parameter, where fp32 takes four times as much.

An all-reduce cannot add 8-bit values, so each byte crosses the network twice. The buffer is cut into a share for each
rank. Every rank quantizes the shares of the others and sends them (all-to-all); the owner of a share adds up what it
gets in fp32, quantizes the sum, and sends it to all (all-gather). For N ranks each of them sends 2 (N-1)/N of a quarter
of the buffer. Scales travel in the same messages, and so do biases and norms, in fp32: a few large values beside them
would cost most of their precision, and they are few.

    share of rank 0                  rank 0                            rank 1
    q1 = quantized part of rank 1    g0 + q1 -> quantized sum s   <-   q1 = quantize(g1 + e1), e1 = g1 + e1 - q1
                                     e0 = g0 + e0 + q1 - s        ->   s

Both quantizations lose something. Each rank keeps what it has lost, and adds it to its gradient in the next step (error
feedback): e1 and e0 above. The owner's own part is not quantized before the sum, so one fp32 number for each element of
the buffer is enough.

Sources: block-wise scales and the exemption of 1-D parameters as in LoCo (arXiv 2407.04480) and ZeRO++ (arXiv
2306.10209).
"""

import math
from typing import Final, NamedTuple

import torch

from torchring.compression.codec import ROW, Codec, Contents, is_vector
from torchring.kernels.reference_quantize import add_rows, decode_rows, quantize_rows
from torchring.transport.contract import Transfer, Transport

_CODED_BYTES: Final = ROW + 4  # of a row: codes, and the scale
_EXACT_BYTES: Final = 4 * ROW  # of a row that also travels as it is


def cut(is_exact: torch.Tensor, num_shares: int) -> list[int]:
    """Where each share of the rows ends. Shares have as many bytes as each other, to within a row.

    Example: 6 rows, of which the second also travels in fp32, 2 shares: [1, 6], of 260 and 2324 bytes.
    """
    ends = torch.cumsum(_CODED_BYTES + _EXACT_BYTES * is_exact.long(), 0)
    total = int(ends[-1]) if len(ends) else 0
    wanted = torch.tensor([total * (share + 1) // num_shares for share in range(num_shares)], device="cpu")
    return torch.searchsorted(ends, wanted, right=True).tolist()


class _Part(NamedTuple):
    """A share of the rows, and what a message has of it."""

    begin: int
    end: int
    exact: torch.Tensor  # int64: the rows of the buffer that travel as they are
    values: torch.Tensor  # fp32 [len(exact), ROW]: these rows
    scales: torch.Tensor  # fp32 [end - begin]
    codes: torch.Tensor  # int8 [end - begin, ROW]: of the other rows; those of exact ones mean nothing


def _part(message: torch.Tensor, begin: int, end: int, exact: torch.Tensor) -> _Part:
    """`message`: uint8 [P]. In this order all parts are aligned to 16 bytes."""
    sizes = [len(exact) * _EXACT_BYTES, (end - begin) * ROW, (end - begin) * 4]
    values, codes, scales = torch.split(message[: sum(sizes)], sizes)
    values, scales = values.view(torch.float32).view(-1, ROW), scales.view(torch.float32)
    return _Part(begin, end, exact, values, scales, codes.view(torch.int8).view(-1, ROW))


class Int8Codec(Codec):
    """See `Codec`, and the top of this file."""

    def __init__(self, contents: Contents, num_ranks: int, place: int) -> None:
        self._contents = contents
        self._feedback = contents.feedback.view(-1, ROW)
        self._place = place
        is_exact = torch.zeros(len(self._feedback), dtype=torch.bool, device="cpu")
        for piece in contents.pieces:
            is_exact[piece.begin // ROW : math.ceil(piece.end / ROW)] = is_vector(piece.shape)
        ends = cut(is_exact, num_ranks)
        bounds = list(zip([0, *ends], ends, strict=False))
        exact = [begin + is_exact[begin:end].nonzero().flatten() for begin, end in bounds]
        lengths = [
            (end - begin) * _CODED_BYTES + len(e) * _EXACT_BYTES for (begin, end), e in zip(bounds, exact, strict=True)
        ]
        longest = math.ceil(max(lengths) / 64) * 64
        self._sent, self._received = contents.buffer.new_zeros(2, num_ranks, longest, dtype=torch.uint8)
        self._sent_parts = [_part(self._sent[i], *bounds[i], exact[i]) for i in range(num_ranks)]
        self._received_parts = [_part(message, *bounds[place], exact[place]) for message in self._received]
        self.num_bytes = self._sent.numel()

    def begin(self, tensor: torch.Tensor, weight: float, transport: Transport) -> Transfer:
        rows = tensor.view(-1, ROW)
        for rank, part in enumerate(self._sent_parts):
            if rank != self._place:
                part.values.copy_(rows[part.exact])
                self._quantize(rows[part.begin : part.end], part, weight)
        return transport.start_all_to_all(self._received, self._sent)

    def go_on(self, tensor: torch.Tensor, weight: float, transfer: Transfer, transport: Transport) -> Transfer:
        rows, own = tensor.view(-1, ROW), self._received_parts[self._place]
        total = rows[own.begin : own.end].float()  # the same memory, if it is fp32 already
        transfer.wait()
        own.values.copy_(rows[own.exact])
        for rank, part in enumerate(self._received_parts):
            if rank != self._place:
                add_rows(total, part.codes, part.scales)
                own.values.add_(part.values)
        self._quantize(total, own, weight)
        return transport.start_all_gather(self._sent, self._received[self._place])

    def end(self, tensor: torch.Tensor, weight: float, transfer: Transfer) -> None:
        rows = tensor.view(-1, ROW)
        transfer.wait()
        for part in self._sent_parts:
            decode_rows(part.codes, part.scales, rows[part.begin : part.end])
            rows[part.exact] = part.values.to(rows.dtype)
        if not all(part.scales.isfinite().all() for part in self._sent_parts):
            self._contents.clear_padding(tensor)

    def _quantize(self, rows: torch.Tensor, part: _Part, weight: float) -> None:
        quantize_rows(rows, part.codes, part.scales, self._feedback[part.begin : part.end] if weight else None)
        self._feedback[part.exact] = 0.0
