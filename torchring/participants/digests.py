"""Digests of tensors, by which ranks find out whether theirs are the same."""

import zlib
from collections.abc import Iterable
from typing import Final

import torch

from torchring.memory.host import bytes_of

_PIECE_WORDS: Final = 1 << 22


def digests(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """[N, 2] int64 on the host: a sum over the bits, which any single change changes, and one that their order changes.

    A device works its own out, and is waited for once.
    """
    found = [_digest(t) if t.device.type == "cpu" else _digest_on_device(t) for t in tensors]
    on_device = [digest for digest in found if isinstance(digest, torch.Tensor)]
    fetched = iter(torch.stack(on_device).tolist() if on_device else [])
    rows = [next(fetched) if isinstance(digest, torch.Tensor) else digest for digest in found]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, 2)


def _digest(parameter: torch.Tensor) -> tuple[int, int]:
    """A sum, and Adler-32, which depends on the order. Runs at memory speed."""
    data = _aligned_bytes(parameter)
    words = data[: data.numel() // 8 * 8].view(torch.int64)
    return int(words.sum()), zlib.adler32(memoryview(data.numpy()))  # type: ignore[arg-type]


def _digest_on_device(parameter: torch.Tensor) -> torch.Tensor:
    """[2] int64 on the device: a sum, and a sum of words times their positions. The host does not wait."""
    data = _aligned_bytes(parameter)
    words = data[: data.numel() // 8 * 8].view(torch.int64)
    rest = data[words.numel() * 8 :].to(torch.int64)  # 0 to 7 bytes
    digest = torch.zeros(2, dtype=torch.int64, device=data.device)
    first = 1
    for piece in (*torch.split(words, _PIECE_WORDS), rest):
        places = torch.arange(first, first + piece.numel(), device=data.device)
        digest += torch.stack([piece.sum(), (piece * places).sum()])  # modulo 2**64
        first += piece.numel()
    return digest


def _aligned_bytes(parameter: torch.Tensor) -> torch.Tensor:
    data = bytes_of(parameter.detach().contiguous())
    return data.clone() if data.data_ptr() % 8 or data.storage_offset() % 8 else data
