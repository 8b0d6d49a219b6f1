"""PowerSGD: the gradient of a matrix travels as products of thin matrices.

Source: PowerSGD (Vogels et al. 2019, arXiv 1905.13727), with error feedback and warm start. There a bucket waits for
two all-reduces, one after the other, and the second waits for an orthogonalisation. Here both thin matrices are of the
step before, so that one message has all that is needed, and the orthogonalisation runs after the result is out:

    X = G + what earlier steps have lost                    P [n, k], Q [m, k]: orthonormal columns, alike on all ranks
    all-reduce X Q and P^T X
    result: X less its part outside of both P and Q, which is (X Q) Q^T + P (P^T X - (P^T X Q) Q^T)
    then P and Q of the next step are ready: the result's own, by a power iteration

G [n, m] is the gradient. P and Q of the step before miss what is new in G, so k is twice the rank. Vectors, and
matrices that would not get small enough, travel as they are in the same message.
"""

import math
from dataclasses import dataclass

import torch

from torchring.compression.codec import Codec, Contents, is_vector
from torchring.transport.contract import Transfer, Transport


@dataclass(frozen=True)
class PowerSGD:
    """Send the gradients of matrices as products of thin matrices: `wrap(..., compression=PowerSGD(rank=4))`.

    A parameter of more than two dimensions counts as a matrix of its first dimension. Each rank computes the result
    from the same message, so processors and `torch.get_num_threads()` must be alike.

    Args:
        rank: half the columns of the two thin matrices, so that n rows and m columns become 2 rank (n + m) numbers.
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


class _Matrix:
    """Whole rows of a parameter, as a matrix [n, m]."""

    def __init__(self, begin: int, num_rows: int, num_columns: int, settings: PowerSGD, seed: int) -> None:
        self.begin = begin
        self.end = begin + num_rows * num_columns
        self.shape = num_rows, num_columns
        generator = torch.Generator("cpu").manual_seed(seed)  # alike on all ranks
        start = [torch.empty(length, 2 * settings.rank, dtype=torch.float32, device="cpu") for length in self.shape]
        self.left, self.right = (_basis(each.normal_(generator=generator)) for each in start)  # P^T and Q^T

    def project(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two matrices whose product is the result, given X Q and P^T X."""
        return torch.cat([left, self.left.T], 1), torch.cat([self.right, right - self.left @ left @ self.right])

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """The matrix in fp32; the memory of `buffer` itself if that is fp32."""
        return buffer[self.begin : self.end].view(self.shape).float()


class PowerSGDCodec(Codec):
    """See `Codec`, and the top of this file."""

    def __init__(self, contents: Contents, settings: PowerSGD) -> None:
        self._feedback = contents.feedback
        self._matrices: list[_Matrix] = []
        self._spans: list[tuple[int, int]] = []  # begin and end of what travels as it is
        for piece in contents.pieces:
            columns = math.prod(piece.shape[1:])
            first = math.ceil(piece.first / columns) * columns  # of the first whole row of the parameter
            rows = (piece.first + piece.end - piece.begin - first) // columns
            if is_vector(piece.shape) or 2 * (rows + columns) * settings.rank * settings.min_rate > rows * columns:
                self._spans.append((piece.begin, piece.end))
                continue
            seed = len(self._matrices) + (contents.index << 16)
            self._matrices.append(matrix := _Matrix(piece.begin + first - piece.first, rows, columns, settings, seed))
            self._spans += [(piece.begin, matrix.begin), (matrix.end, piece.end)]
        self._lengths = [end - begin for begin, end in self._spans]
        k = 2 * settings.rank
        lengths = [side * k for matrix in self._matrices for side in matrix.shape]
        self._message = torch.zeros(sum(lengths) + sum(self._lengths), dtype=torch.float32, device="cpu")
        *factors, self._rest = torch.split(self._message, [*lengths, sum(self._lengths)])
        pairs = zip(factors[::2], factors[1::2], strict=True)
        self._factors = [(left.view(-1, k), right.view(k, -1)) for left, right in pairs]  # in the order above
        self.num_bytes = self._message.nbytes

    def begin(self, tensor: torch.Tensor, weight: float, transport: Transport) -> Transfer:
        for values, (begin, end) in zip(torch.split(self._rest, self._lengths), self._spans, strict=True):
            values.copy_(tensor[begin:end])
        for matrix, (left, right) in zip(self._matrices, self._factors, strict=True):
            gradient, feedback = matrix.of(tensor), matrix.of(self._feedback)
            if weight:
                gradient.add_(feedback)
            torch.mm(gradient, matrix.right.T, out=left)
            torch.mm(matrix.left, gradient, out=right)
            if weight and _are_finite(left, right):
                torch.addmm(gradient, *matrix.project(left, right), alpha=-1, out=feedback)
        return transport.start_all_reduce(self._message)

    def end(self, tensor: torch.Tensor, weight: float, transfer: Transfer) -> None:
        transfer.wait()
        for values, (begin, end) in zip(torch.split(self._rest, self._lengths), self._spans, strict=True):
            tensor[begin:end] = values
        for matrix, (left, right) in zip(self._matrices, self._factors, strict=True):
            result = matrix.of(tensor)
            torch.mm(*matrix.project(left, right), out=result)
            if tensor.dtype != torch.float32:
                tensor[matrix.begin : matrix.end] = result.view(-1)

    def prepare(self) -> None:
        for matrix, (left, right) in zip(self._matrices, self._factors, strict=True):
            columns, rows = matrix.project(left, right)
            next_right = _basis((_basis(left) @ columns @ rows).T)
            next_left = _basis(columns @ (rows @ next_right.T))
            if _are_finite(next_left, next_right) and left.any():  # on all ranks, or on none. Else as it was.
                matrix.left, matrix.right = next_left, next_right


def _basis(matrix: torch.Tensor) -> torch.Tensor:
    """[k, n]: an orthonormal basis of the columns of `matrix` [n, k], transposed, as products with it are faster so."""
    basis: torch.Tensor = torch.linalg.qr(matrix)[0]
    return basis.T.contiguous()


def _are_finite(*tensors: torch.Tensor) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)
