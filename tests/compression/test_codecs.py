"""Codecs on ranks that are threads: what is compressed, what is kept, and what all ranks get."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.checks import assert_same_on_all_ranks
from tests.support.harness import RanksFailed, run_threads
from torchring.compression import custom
from torchring.compression.codec import ROW, Contents, Piece, is_vector
from torchring.compression.custom import Bucket, CustomCodec
from torchring.compression.int8 import Int8Codec, cut
from torchring.compression.powersgd import PowerSGD, PowerSGDCodec


class _Transport:
    """Collectives of ranks that are threads; they are over when they return. The n-th one of all ranks is one."""

    def __init__(self, sent: list[torch.Tensor], barrier: threading.Barrier, rank: int) -> None:
        self._sent, self._barrier, self._rank = sent, barrier, rank
        self.ranks = range(len(sent))

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._barrier.wait()
        self._sent[self._rank] = tensor.clone()
        self._barrier.wait()
        return list(self._sent)

    def start_all_to_all(self, output: torch.Tensor, tensor: torch.Tensor) -> Any:
        output.copy_(torch.stack([sent[self._rank] for sent in self._gather(tensor)]))
        return self

    def start_all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Any:
        output.copy_(torch.stack(self._gather(tensor)))
        return self

    def start_all_reduce(self, tensor: torch.Tensor) -> Any:
        tensor.copy_(torch.stack(self._gather(tensor)).sum(0))
        return self

    def wait(self) -> None: ...


SHAPES = ((40, 30), (300,), (2, 3, 100), (7, 7))


def _contents(dtype: torch.dtype = torch.float32, shapes: Any = SHAPES, first: int = 0) -> Contents:
    """A buffer of whole parameters; of the first one, elements from `first` on."""
    pieces, end = [], 0
    for i, shape in enumerate(shapes):
        numel = torch.Size(shape).numel() - (first if i == 0 else 0)
        pieces.append(Piece(f"p{i}", shape, end, end + numel, first if i == 0 else 0))
        end = -(-(end + numel) // ROW) * ROW
    return Contents(0, torch.zeros(end, dtype=dtype), pieces, torch.zeros(end))


def _fill(contents: Contents, rank: int, step: int) -> torch.Tensor:
    """This rank's gradient, as it was before it is compressed. Sizes of parameters differ by far."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    contents.buffer.zero_()
    for i, piece in enumerate(contents.pieces):
        values = torch.randn(piece.end - piece.begin, generator=generator) * 10.0 ** (-3 * (i % 2))
        contents.buffer[piece.begin : piece.end] = values
    return contents.buffer.double()


def _reduce(codec: Any, contents: Contents, transport: _Transport, weight: float = 1.0) -> torch.Tensor:
    first = codec.begin(contents.buffer, weight, transport)
    codec.end(contents.buffer, weight, codec.go_on(contents.buffer, weight, first, transport))
    codec.prepare()
    return contents.buffer.clone()


def _run(size: int, body: Callable[[int, _Transport], Any]) -> list[Any]:
    sent, barrier = [torch.empty(0)] * size, threading.Barrier(size, timeout=20)
    return run_threads(lambda rank, size, store: body(rank, _Transport(sent, barrier, rank)), size)


def _steps(
    make: Callable[[Contents, int, int], Any], size: int, dtype: torch.dtype = torch.float32, weight: float = 1.0
) -> list[tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]]:
    """Of each rank: its gradients, the results, and what it keeps in the end."""

    def body(rank: int, transport: _Transport) -> Any:
        contents = _contents(dtype)
        codec = make(contents, size, rank)
        gradients, results = [], []
        for step in range(6):
            gradients.append(_fill(contents, rank, step))
            results.append(_reduce(codec, contents, transport, weight))
        return gradients, results, contents.feedback

    return _run(size, body)


MAKERS: dict[str, Callable[[Contents, int, int], Any]] = {
    "int8": Int8Codec,
    "powersgd": lambda contents, size, rank: PowerSGDCodec(contents, PowerSGD(rank=2)),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_what_is_lost_comes_later(kind: str) -> None:
    """All results and what ranks keep add up to all gradients. All ranks get the same bits."""
    for size in (1, 2, 3, 5):
        for weight in (1.0, 0.0):
            ranks = _steps(MAKERS[kind], size, weight=weight)
            assert_same_on_all_ranks([torch.stack(results) for _, results, _ in ranks])
            exact = sum(sum(gradients) for gradients, _, _ in ranks)
            kept = sum(feedback.double() for _, _, feedback in ranks) * weight
            error = sum(result.double() for result in ranks[0][1]) + kept - exact
            distance = (error.norm() / exact.norm()).item()
            assert distance < 1e-5 if weight else distance > 1e-3, (size, weight)  # weight 0: nothing is kept
            vector = ranks[0][1][0][1280:1580].double() - sum(gradients[0] for gradients, _, _ in ranks)[1280:1580]
            assert vector.norm() <= 1e-6 * size  # 1-D parameters travel as they are


def test_int8_of_a_small_tensor_beside_a_large_one() -> None:
    for dtype, most in ((torch.float32, 0.02), (torch.bfloat16, 0.02), (torch.float16, 0.02)):
        ranks = _steps(Int8Codec, 3, dtype)
        for piece in _contents().pieces:
            place = slice(piece.begin, piece.end)
            exact = sum(gradients[0] for gradients, _, _ in ranks)[place]
            error = ranks[0][1][0].double()[place] - exact
            assert 0 < error.norm() / exact.norm() < most or (is_vector(piece.shape) and dtype == torch.float32)


def test_int8_of_rows_that_are_not_ordinary() -> None:
    """NaN and infinity make their own block not finite, and are not kept. Zeros and denormal numbers are kept."""

    def body(rank: int, transport: _Transport) -> Any:
        contents = _contents(shapes=((5 * ROW, 2),))
        codec = Int8Codec(contents, 2, rank)
        rows = contents.buffer.view(-1, ROW)
        rows.fill_(1.0)
        rows[0], rows[1] = 0.0, 1e-40
        if rank == 1:
            rows[2, 7], rows[3, 7], rows[8, 7] = float("nan"), float("inf"), float("-inf")
        first = _reduce(codec, contents, transport)
        assert contents.feedback.isfinite().all()
        rows.fill_(1.0)
        return first, _reduce(codec, contents, transport)

    (first, second), (other, _) = _run(2, body)
    assert first.view(torch.int32).tolist() == other.view(torch.int32).tolist()  # bits, as NaN equals nothing
    finite = first.view(-1, ROW).isfinite()
    assert [row for row in range(10) if not finite[row].all()] == [2, 3, 8]
    assert not finite[[2, 3, 8], 7].any()
    assert first[: 2 * ROW].eq(0).all()
    torch.testing.assert_close(second, torch.full_like(second, 2.0), rtol=0.02, atol=0)


def test_shares_have_as_many_bytes() -> None:
    assert cut(torch.tensor([False, True, False, False, False, False]), 2) == [1, 6]
    assert cut(torch.tensor([False]), 3) == [0, 0, 1]
    assert cut(torch.tensor([], dtype=torch.bool), 2) == [0, 0]


def test_powersgd_of_a_part_of_a_matrix_and_nan() -> None:
    """Of a part of a matrix, whole rows: what is left of the first one, and of the last one, travels as it is."""

    def body(rank: int, transport: _Transport) -> Any:
        contents = _contents(shapes=((40, 30), (20, 25)), first=37)
        codec = PowerSGDCodec(contents, PowerSGD(rank=2))
        generator = torch.Generator().manual_seed(rank)
        whole = torch.randn(40, 1, generator=generator) @ torch.ones(1, 30)  # the sum over ranks has rank 1
        results = []
        for step in range(8):
            contents.buffer.zero_()
            contents.buffer[: 1200 - 37] = whole.flatten()[37:]
            if step == 3 and rank == 1:
                contents.buffer[600] = float("nan")
            results.append(_reduce(codec, contents, transport))
        return whole.flatten()[37:], results, contents.feedback

    ranks = _run(2, body)
    exact = ranks[0][0] + ranks[1][0]
    assert_same_on_all_ranks([results[-1] for _, results, _ in ranks])
    assert ranks[0][1][3].isnan().any()
    assert all(feedback.isfinite().all() for *_, feedback in ranks)
    assert ranks[0][1][2][: len(exact)].sub(exact).norm() < 0.5 * exact.norm()
    torch.testing.assert_close(ranks[0][1][-1][: len(exact)], exact, rtol=1e-3, atol=1e-3)  # the gradient has rank 1
    torch.testing.assert_close(ranks[0][1][0][:23], exact[:23], rtol=0, atol=0)  # the rest of the first row


class _Halves:
    """As bfloat16, in memory that is used again; on rank 1 with something behind, as variable-length codes have."""

    def __init__(self, rank: int = 0, *, as_bytes: bool = False) -> None:
        self._rank = rank
        self._as_bytes = as_bytes
        self._sent = torch.zeros(4096, dtype=torch.bfloat16)

    def compress(self, bucket: Bucket) -> torch.Tensor | bytes:
        assert [view.numel() for view in bucket.gradients] == [1200, 300, 600, 49]
        assert custom._one_call.locked()
        data = self._sent[: len(bucket.buffer) + self._rank]
        data[: len(bucket.buffer)] = bucket.buffer
        return data.view(torch.uint8).numpy().tobytes() if self._as_bytes else data

    def decompress(self, data: torch.Tensor | bytes, bucket: Bucket) -> torch.Tensor:
        assert custom._one_call.locked()
        if isinstance(data, bytes):
            data = torch.frombuffer(bytearray(data), dtype=torch.bfloat16)
        return data[: len(bucket.buffer)].float()


@pytest.mark.parametrize("as_bytes", [False, True])
def test_a_compressor_of_the_script(as_bytes: bool) -> None:
    """Two buckets under way share it: the second is compressed before the data of the first one leave."""

    def body(rank: int, transport: _Transport) -> Any:
        both, compressor = (_contents(), _contents()), _Halves(rank, as_bytes=as_bytes)
        sent = [_fill(contents, rank, i) for i, contents in enumerate(both)]
        codecs = [CustomCodec(contents, compressor, 3) for contents in both]
        begun = [codec.begin(contents.buffer, 1.0, transport) for codec, contents in zip(codecs, both, strict=True)]
        for codec, contents, transfer in zip(codecs, both, begun, strict=True):
            codec.end(contents.buffer, 1.0, codec.go_on(contents.buffer, 1.0, transfer, transport))
        return sent, [contents.buffer for contents in both]

    ranks = _run(3, body)
    for i in range(2):
        expected = sum(sent[i].bfloat16().float() for sent, _ in ranks)
        assert [torch.equal(results[i], expected) for _, results in ranks] == [True] * 3


def test_a_compressor_that_returns_something_else() -> None:
    class Wrong(_Halves):
        returned: Any

        def compress(self, bucket: Bucket) -> Any:
            return self.returned

        def decompress(self, data: Any, bucket: Bucket) -> torch.Tensor:
            return bucket.buffer[:3]

    contents = _contents()
    for Wrong.returned, said in (
        ((1, 2), r"Wrong\.compress\(\) returns bytes or a 1-D tensor, got tuple"),
        (torch.zeros(2, 2), r"got Tensor of shape \(2, 2\)"),
        (b"12", r"Wrong\.decompress\(\) returns a tensor of shape \(\d+,\), got shape"),
    ):
        with pytest.raises(RanksFailed, match=said):
            _run(1, lambda rank, transport: _reduce(CustomCodec(contents, Wrong(), 1), contents, transport))
    with pytest.raises(RanksFailed, match=r"compress\(\) returned torch\.bfloat16 here, and not on rank 1"):
        _steps(lambda c, size, rank: CustomCodec(c, _Halves(as_bytes=rank == 1), size), 2)
