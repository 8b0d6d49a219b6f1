"""PowerSGD: the gradient of a matrix travels as the product of two thin ones.

Sources: PowerSGD (Vogels et al. 2019, arXiv 1905.13727), with error feedback and warm start; and its alternating form,
ACP-SGD (Zhang et al. 2023, arXiv 2306.08881). PowerSGD computes both factors in each step, so a bucket waits for two
all-reduces, one after the other, and the second waits for an orthogonalisation. The alternating form sends one factor
in each step, and takes the other one from the step before:

    even steps: P = M Q, all-reduce P, the result is P Q^T;    then Q's successor is ready: P, orthogonalised
    odd steps:  Q = M^T P, all-reduce Q, the result is P Q^T;  then P's successor is ready: Q, orthogonalised

M is the gradient [n, m] with what earlier steps have lost, Q [m, r] and P [n, r] have orthonormal columns. Each result
is the projection of the sum over ranks, and the orthogonalisation runs after the result is out. Vectors, and matrices
that would not get small enough, travel as they are in the same message.
"""

import math
from dataclasses import dataclass

import torch

from torchring.compression.codec import Contents
from torchring.transport.contract import Transfer, Transport


@dataclass(frozen=True)
class PowerSGD:
    """Send the gradients of matrices as products of thin matrices: `wrap(..., compression=PowerSGD(rank=4))`.

    A parameter of more than two dimensions counts as a matrix of its first dimension. Each rank computes the result
    from the same message with its own processor, so processors should be alike.

    Args:
        rank: columns of the thin matrices.
        start: number of reductions before, in full precision: the first gradients are large, and change fast.
        min_rate: matrices that get smaller by a lower factor travel as they are.
    """

    rank: int = 4
    start: int = 10
    min_rate: float = 2.0

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("start", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number, {least} or more, got {value!r}")
        if not isinstance(self.min_rate, (int, float)) or not 1 <= self.min_rate < math.inf:
            raise ValueError(f"min_rate must be a number, 1 or more, got {self.min_rate!r}")

    def __str__(self) -> str:
        return repr(self)


class _Matrix:
    """Whole rows of a parameter, as a matrix [n, m]."""

    def __init__(self, begin: int, num_rows: int, num_columns: int, settings: PowerSGD, seed: int) -> None:
        self.begin = begin
        self.end = begin + num_rows * num_columns
        self.shape = num_rows, num_columns
        generator = torch.Generator().manual_seed(seed)  # alike on all ranks
        start = torch.randn(num_columns, settings.rank, generator=generator)
        self.basis = torch.linalg.qr(start)[0]  # the factor that is there: Q in even steps, P in odd ones

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """The matrix in fp32; the memory of `buffer` itself if that is fp32."""
        return buffer[self.begin : self.end].view(self.shape).float()


class PowerSGDCodec:
    """See `Codec`, and the top of this file."""

    def __init__(self, contents: Contents, settings: PowerSGD) -> None:
        self._feedback = contents.feedback
        self._matrices: list[_Matrix] = []
        self._spans: list[tuple[int, int]] = []  # begin and end of what travels as it is
        for piece in contents.pieces:
            columns = math.prod(piece.shape[1:])
            first = math.ceil(piece.first / columns) * columns  # of the first whole row of the parameter
            rows = (piece.first + piece.end - piece.begin - first) // columns
            if piece.is_vector or (rows + columns) * settings.rank * settings.min_rate > rows * columns:
                self._spans.append((piece.begin, piece.end))
                continue
            seed = len(self._matrices) + (contents.index << 16)
            self._matrices.append(matrix := _Matrix(piece.begin + first - piece.first, rows, columns, settings, seed))
            self._spans += [(piece.begin, matrix.begin), (matrix.end, piece.end)]
        self._lengths = [end - begin for begin, end in self._spans]
        # For even steps, and for odd ones: the message, and the parts of it.
        self._messages: list[torch.Tensor] = []
        self._parts: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        for side in (0, 1):
            lengths = [matrix.shape[side] * settings.rank for matrix in self._matrices]
            self._messages.append(message := torch.zeros(sum(lengths) + sum(self._lengths), device="cpu"))
            *factors, rest = torch.split(message, [*lengths, sum(self._lengths)])
            self._parts.append((rest, [factor.view(-1, settings.rank) for factor in factors]))
        self._is_odd = False
        self.num_bytes = 4 * max(map(len, self._messages))

    def begin(self, tensor: torch.Tensor, weight: float, transport: Transport) -> Transfer:
        rest, factors = self._parts[self._is_odd]
        for values, (begin, end) in zip(torch.split(rest, self._lengths), self._spans, strict=True):
            values.copy_(tensor[begin:end])
        for matrix, factor in zip(self._matrices, factors, strict=True):
            gradient, feedback = matrix.of(tensor), matrix.of(self._feedback)
            if weight:
                gradient.add_(feedback, alpha=weight)
            torch.mm(gradient.T if self._is_odd else gradient, matrix.basis, out=factor)
            if weight and torch.isfinite(factor).all():
                torch.addmm(gradient, *self._product(matrix, factor), alpha=-1, out=feedback)
                feedback.div_(weight)
        return transport.start_all_reduce(self._messages[self._is_odd])

    def end(self, tensor: torch.Tensor, weight: float, transfer: Transfer, transport: Transport) -> None:
        transfer.wait()
        rest, factors = self._parts[self._is_odd]
        for values, (begin, end) in zip(torch.split(rest, self._lengths), self._spans, strict=True):
            tensor[begin:end] = values
        for matrix, factor in zip(self._matrices, factors, strict=True):
            result = matrix.of(tensor)
            torch.mm(*self._product(matrix, factor), out=result)
            if tensor.dtype != torch.float32:
                tensor[matrix.begin : matrix.end] = result.view(-1)

    def prepare(self) -> None:
        _, factors = self._parts[self._is_odd]
        if not all(torch.isfinite(factor).all() for factor in factors):  # a NaN: the same on all ranks
            return
        self._is_odd = not self._is_odd
        for matrix, factor in zip(self._matrices, factors, strict=True):
            matrix.basis = torch.linalg.qr(factor)[0]

    def _product(self, matrix: _Matrix, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The two matrices whose product is the projection."""
        return (matrix.basis, factor.T) if self._is_odd else (factor, matrix.basis.T)
