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

import itertools
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from torchring.compression.codec import ROW, Contents
from torchring.kernels.reference_quantize import add_rows, decode_rows, quantize_rows
from torchring.transport.contract import Transfer, Transport

_SCALE_BYTES: Final = 4


class _Run(NamedTuple):
    """Rows of a share, one after the other, that are treated alike."""

    begin: int  # of the rows of the buffer
    end: int
    is_exact: bool


def cut(is_exact: Sequence[bool], num_shares: int) -> list[list[tuple[int, int, bool]]]:
    """For each share its runs of rows (begin, end, exact?). Shares have as many bytes as each other, to within a row.

    Example: rows [int8, fp32, int8, int8, int8, int8] of 260 and 1024 bytes, 2 shares of 1162 bytes:
    [[(0, 1, False), (1, 2, True)], [(2, 6, False)]].
    """
    costs = [ROW * 4 if exact else ROW + _SCALE_BYTES for exact in is_exact]
    ends = list(itertools.accumulate(costs))
    shares: list[list[tuple[int, int, bool]]] = [[] for _ in range(num_shares)]
    for row, (cost, end, exact) in enumerate(zip(costs, ends, is_exact, strict=True)):
        runs = shares[min(num_shares - 1, int((end - cost / 2) * num_shares / ends[-1]))]
        if runs and runs[-1][2] == exact:
            runs[-1] = (runs[-1][0], row + 1, exact)
        else:
            runs.append((row, row + 1, exact))
    return shares


class _Payload(NamedTuple):
    """Views of one rank's share of a message, for each run of rows of the share."""

    codes: list[torch.Tensor]  # int8 [rows, ROW]; empty where rows are exact
    scales: list[torch.Tensor]  # fp32 [rows]
    exact: list[torch.Tensor]  # fp32 [rows, ROW]; empty where rows are quantized


def _payload(data: torch.Tensor, runs: Sequence[_Run]) -> _Payload:
    """`data`: uint8 [P]. Exact rows come first, then scales, then codes, so that all are aligned."""
    num_exact = sum(run.end - run.begin for run in runs if run.is_exact)
    num_coded = sum(run.end - run.begin for run in runs if not run.is_exact)
    sizes = [num_exact * ROW * 4, num_coded * _SCALE_BYTES, num_coded * ROW]
    exact, scales, codes = torch.split(data[: sum(sizes)], sizes)
    rows = exact.view(torch.float32).view(-1, ROW), scales.view(torch.float32), codes.view(torch.int8).view(-1, ROW)
    found, place, exact_place = _Payload([], [], []), 0, 0
    for run in runs:
        here = 0 if run.is_exact else run.end - run.begin
        there = run.end - run.begin - here
        found.codes.append(rows[2][place : place + here])
        found.scales.append(rows[1][place : place + here])
        found.exact.append(rows[0][exact_place : exact_place + there])
        place, exact_place = place + here, exact_place + there
    return found


class Int8Codec:
    """See `Codec`, and the top of this file."""

    def __init__(self, contents: Contents, num_ranks: int, place: int) -> None:
        is_exact = [True] * (contents.buffer.numel() // ROW)  # what is padding, too
        for piece in contents.pieces:
            first, last = piece.begin // ROW, math.ceil(piece.end / ROW)
            is_exact[first:last] = [piece.is_vector] * (last - first)
        self._shares = [[_Run(*run) for run in share] for share in cut(is_exact, num_ranks)]
        self._place = place
        self._contents = contents
        self._feedback = contents.feedback.view(-1, ROW)
        share_bytes = [
            sum((run.end - run.begin) * (ROW * 4 if run.is_exact else ROW + _SCALE_BYTES) for run in share)
            for share in self._shares
        ]
        longest = math.ceil(max(share_bytes) / 64) * 64
        self._sent, self._received = torch.zeros(2, num_ranks, longest, dtype=torch.uint8, device="cpu")
        self._sent_parts = [_payload(row, share) for row, share in zip(self._sent, self._shares, strict=True)]
        own = self._shares[place]
        self._received_parts = [_payload(row, own) for row in self._received]
        self.num_bytes = longest * num_ranks

    def begin(self, tensor: torch.Tensor, weight: float, transport: Transport) -> Transfer:
        rows = tensor.view(-1, ROW)
        for rank, (share, part) in enumerate(zip(self._shares, self._sent_parts, strict=True)):
            if rank != self._place:
                self._encode(rows, share, part, weight)
        return transport.start_all_to_all(self._received, self._sent)

    def end(self, tensor: torch.Tensor, weight: float, transfer: Transfer, transport: Transport) -> None:
        rows, own = tensor.view(-1, ROW), self._received_parts[self._place]
        transfer.wait()
        for i, run in enumerate(self._shares[self._place]):
            total = rows[run.begin : run.end].float()  # the same memory, if it is fp32 already
            for rank, part in enumerate(self._received_parts):
                if rank != self._place:
                    if run.is_exact:
                        total.add_(part.exact[i])
                    else:
                        add_rows(total, part.codes[i], part.scales[i])
            if run.is_exact:
                own.exact[i].copy_(total)
            else:
                quantize_rows(total, own.codes[i], own.scales[i], self._feedback[run.begin : run.end], weight)
        transport.start_all_gather(self._sent, self._received[self._place]).wait()
        for share, part in zip(self._shares, self._sent_parts, strict=True):
            for i, run in enumerate(share):
                if run.is_exact:
                    rows[run.begin : run.end] = part.exact[i]
                else:
                    decode_rows(part.codes[i], part.scales[i], rows[run.begin : run.end])
        if not all(scales.isfinite().all() for part in self._sent_parts for scales in part.scales):
            self._contents.clear_padding(tensor)

    def prepare(self) -> None: ...

    def _encode(self, rows: torch.Tensor, share: Sequence[_Run], part: _Payload, weight: float) -> None:
        for i, run in enumerate(share):
            own = rows[run.begin : run.end]
            if run.is_exact:
                part.exact[i].copy_(own)
            else:
                quantize_rows(own, part.codes[i], part.scales[i], self._feedback[run.begin : run.end], weight)
