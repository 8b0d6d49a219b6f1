"""quantize, add and decode in plain torch: the CPU path, and the oracle for the Triton kernels.

A row of 256 values becomes 8-bit integers and one scale: code = round(x * 127 / max|x|), scale = max|x| / 127.

Example, rows of 2 for short: x = [1.0, -0.3], scale 1/127 = 0.007874, codes [127, -38]. They stand for [1.0, -0.29921],
and feedback keeps [0, -0.00079].
"""

import torch
from torch import Tensor

_CHUNK_ROWS = 512  # 512 KiB of fp32, which stay in cache between two operations
_LEAST = 1e-30  # a row with no larger value becomes zero: 127 divided by it would overflow


def quantize_rows(rows: Tensor, codes: Tensor, scales: Tensor, feedback: Tensor | None = None) -> None:
    """codes, scales <- rows + feedback; feedback <- what is lost.

    rows: [R, 256] fp32, fp16 or bf16; overwritten.
    codes, scales: int8 [R, 256] and fp32 [R], contiguous.
    feedback: fp32 [R, 256]. A row that is not finite has a scale that is not finite, and its feedback stays as it was.
    """
    scratch = torch.empty(min(len(rows), _CHUNK_ROWS), rows.shape[1], dtype=torch.float32, device=rows.device)
    for begin in range(0, len(rows), _CHUNK_ROWS):
        chunk = slice(begin, begin + _CHUNK_ROWS)
        x, scale = rows[chunk].float(), scales[chunk].unsqueeze(1)
        values = scratch[: len(x)]
        if feedback is not None:
            x.add_(feedback[chunk])
        torch.amax(torch.abs(x, out=values), 1, keepdim=True, out=scale)
        scale.mul_(1 / 127).masked_fill_(scale < _LEAST / 127, 0.0)
        torch.mul(x, scale.reciprocal().masked_fill_(scale == 0, 0.0), out=values).round_()
        codes[chunk].copy_(values)
        if feedback is None:
            continue
        if scale.isfinite().all():
            torch.addcmul(x, values, scale, value=-1, out=feedback[chunk])
        else:
            lost = torch.addcmul(x, values, scale, value=-1)
            feedback[chunk] = torch.where(scale.isfinite(), lost, feedback[chunk])


def add_rows(total: Tensor, codes: Tensor, scales: Tensor) -> None:
    """total += codes * scales. total: fp32 [R, 256]; codes, scales: as `quantize_rows` leaves them."""
    for begin in range(0, len(total), _CHUNK_ROWS):
        chunk = slice(begin, begin + _CHUNK_ROWS)
        total[chunk].addcmul_(codes[chunk].float(), scales[chunk].unsqueeze(1))


def decode_rows(codes: Tensor, scales: Tensor, rows: Tensor) -> None:
    """rows <- codes * scales, rounded once to the dtype of `rows`, which is [R, 256]."""
    for begin in range(0, len(rows), _CHUNK_ROWS):
        chunk = slice(begin, begin + _CHUNK_ROWS)
        rows[chunk] = codes[chunk].float().mul_(scales[chunk].unsqueeze(1))
