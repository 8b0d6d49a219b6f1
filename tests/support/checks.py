"""Inputs whose sums are exact, and comparisons that say where two results differ."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

import torchring

_LARGEST = 16  # 8 ranks: |sum| <= 128, and bf16 holds every integer up to 256


def exact_inputs(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """1-d tensor of integers in [-16, 16]: sums over up to 8 ranks are exact in every order, in fp16 and bf16 too.

    Pass the rank in `seed`. Any two seeds in 0..32 differ in the first element at least, however short the tensor.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-_LARGEST, _LARGEST + 1, (numel,), generator=generator)
    values[:1] = (5 * seed + _LARGEST + 1) % (2 * _LARGEST + 1) - _LARGEST  # seed 0: 1, seed 1: 6, seed 2: 11, ...
    return values.to(dtype)


def assert_bitwise(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Same shape, dtype and bytes. So 0.0 is not -0.0, and a NaN equals only the same NaN. Strides may differ."""
    where = f"{what}: " if what else ""
    for name, value in (("actual", actual), ("expected", expected)):
        if not isinstance(value, Tensor):
            raise AssertionError(f"{where}{name} is no tensor but {value!r}")
    if actual.shape != expected.shape:
        raise AssertionError(f"{where}shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if actual.dtype != expected.dtype:
        raise AssertionError(f"{where}dtype {actual.dtype}, expected {expected.dtype}")
    actual_bytes, expected_bytes = _bytes(actual), _bytes(expected)
    differs = (actual_bytes != expected_bytes).any(dim=1).nonzero().flatten()
    if differs.numel() == 0:
        return
    first = int(differs[0])
    raise AssertionError(
        f"{where}{differs.numel()} of {actual.numel()} elements differ, first at {_index(first, actual.shape)}: "
        f"{_show(actual, actual_bytes, first)}, expected {_show(expected, expected_bytes, first)}"
    )


def assert_same_on_all_ranks(per_rank: Sequence[Tensor | str]) -> None:
    """per_rank[r] is rank r's tensor or digest; all must equal rank 0's bit for bit."""
    if not per_rank:
        raise ValueError("nothing to compare: pass one tensor or digest per rank")
    for rank, value in enumerate(per_rank):
        if isinstance(value, Tensor) and isinstance(per_rank[0], Tensor):
            assert_bitwise(value, per_rank[0], f"rank {rank} against rank 0")
        elif not isinstance(value, str) or not isinstance(per_rank[0], str):
            raise TypeError(f"rank {rank} has {value!r}, rank 0 {per_rank[0]!r}: not both tensors or both digests")
        elif value != per_rank[0]:
            raise AssertionError(f"rank {rank} has {value}, rank 0 has {per_rank[0]}")


def assert_same_everywhere(tensors: Iterable[Tensor]) -> None:
    """On a rank: all ranks have the same bits. All ranks call it."""
    assert_same_on_all_ranks(torchring.all_gather_object(digest(tensors)))


def assert_within_rounding(
    actual: Tensor, expected_fp64: Tensor, parts_abs_sum: Tensor, num_roundings: int, dtype: torch.dtype
) -> None:
    """|actual - expected| <= num_roundings * u * sum|x_r| + u * |expected|, element by element.

    The first-order bound for a sum of parts x_r that is rounded num_roundings times on its way and once more at the
    end, in `dtype` (fp16, bf16, fp32 or fp64) with unit roundoff u = 2^-11, 2^-8, 2^-24 or 2^-53. For a mean, pass
    sum|x_r / world_size|. No other tolerance, save that the bound is never below the smallest subnormal of `dtype`.
    NaN and infinity must be met exactly.

    Example: 1 + 2^-11 in fp16, rounded once at the end: expected 1.00048828125, actual 1.0, error 2^-11, bound
    0 * u * 1.0005 + 2^-11 * 1.0005: passes. 1 + 2^-9 given back as 1.0 has error 2^-9: fails.
    """
    if expected_fp64.dtype != torch.float64 or parts_abs_sum.dtype != torch.float64:
        raise TypeError(f"reference and bound must be float64, got {expected_fp64.dtype} and {parts_abs_sum.dtype}")
    if not actual.shape == expected_fp64.shape == parts_abs_sum.shape:
        shapes = [tuple(t.shape) for t in (actual, expected_fp64, parts_abs_sum)]
        raise AssertionError(f"shapes of actual, expected and parts_abs_sum differ: {shapes}")
    result, expected, parts = (t.detach().cpu().double().reshape(-1) for t in (actual, expected_fp64, parts_abs_sum))
    if bool((parts < expected.abs() * (1 - 1e-9)).any()):
        raise ValueError("parts_abs_sum is below |expected| somewhere: it must be the sum of parts' absolute values")
    info = torch.finfo(dtype)
    unit = info.eps / 2
    bound = (num_roundings * unit * parts + unit * expected.abs()).clamp(min=info.smallest_normal * info.eps)
    error = (result - expected).abs()
    same = (result == expected) | (result.isnan() & expected.isnan())
    wrong = ~(same | (expected.isfinite() & (error <= bound)))
    if not bool(wrong.any()):
        return
    worst = int(torch.where(wrong, (error / bound).nan_to_num(nan=torch.inf), -1.0).argmax())
    raise AssertionError(
        f"{int(wrong.sum())} of {wrong.numel()} elements are off by more than {num_roundings} + 1 {dtype} roundings, "
        f"worst at {_index(worst, actual.shape)}: {result[worst].item()!r}, expected {expected[worst].item()!r}, "
        f"error {error[worst].item():.3g}, bound {bound[worst].item():.3g}"
    )


def digest(tensors: Tensor | Iterable[Tensor | None] | None) -> str:
    """sha256 over shape, dtype and bytes of one tensor or several, in order; None (no gradient) counts as itself."""
    listed = [tensors] if tensors is None or isinstance(tensors, Tensor) else list(tensors)
    if not listed:
        raise ValueError("nothing to digest: the iterable is empty (or used up)")
    sha = hashlib.sha256()
    for tensor in listed:
        if tensor is None:
            sha.update(b"None;")
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"digest takes tensors, got {tensor!r}")
        sha.update(f"{tensor.dtype}{tuple(tensor.shape)};".encode())
        sha.update(_bytes(tensor).numpy().tobytes())
    return sha.hexdigest()


def _bytes(tensor: Tensor) -> Tensor:
    """uint8 tensor of shape (numel, bytes per element)."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(flat.numel(), flat.element_size())


def _index(flat: int, shape: torch.Size) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), shape))


def _show(tensor: Tensor, raw: Tensor, flat: int) -> str:
    value = tensor.detach().reshape(-1)[flat].item()
    return f"{value!r} (0x{bytes(raw[flat].tolist())[::-1].hex()})"  # most significant byte first


@contextmanager
def logged(hear: Callable[[str], object] = lambda text: None) -> Iterator[list[str]]:
    """What this process logs for torchring meanwhile; `hear` is called with each message."""
    texts: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("torchring")

    def emit(record: logging.LogRecord) -> None:
        texts.append(record.getMessage())
        hear(texts[-1])

    handler.emit = emit  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
