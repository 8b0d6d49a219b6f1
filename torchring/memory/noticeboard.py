"""Notices of ranks for the ranks that wait for them: the error with which a rank has failed, or why a rank has left.

Only a rank's first notice counts: later errors are consequences. Ranks of one host read a notice in a page of shared
memory, within microseconds. Ranks of other hosts read it in the store.
"""

import contextlib
import struct
import threading
import zlib
from collections.abc import Sequence
from typing import Final

import torch

from torchring.errors import RingError, decode_error, encode_error
from torchring.rendezvous.rendezvous import Rendezvous, notice_key

_PATIENCE_SECONDS: Final = 2.0  # for the store: the way there may be cut
_HEADER: Final = struct.Struct("=2I")  # checksum and length of the notice


def page_bytes(size: int) -> int:
    """For a notice that names all ranks of a world of `size`."""
    return 4096 + 8 * size


class Noticeboard:
    """The notices of all ranks of a world, as one rank reads and writes them. From any thread.

    The ranks of this host have a page of shared memory each, `page_bytes` of uint8.
    """

    def __init__(self, rendezvous: Rendezvous, ranks: Sequence[int] = (), pages: Sequence[torch.Tensor] = ()) -> None:
        self._rendezvous = rendezvous.with_timeout(_PATIENCE_SECONDS)
        self._posting = threading.RLock()  # a signal handler may post, too
        self._pages = {rank: page.numpy() for rank, page in zip(ranks, pages, strict=True)}

    def post(self, error: RingError) -> None:
        """Leave `error` for the other ranks, unless this rank has left an error before."""
        rank, text = self._rendezvous.rank, encode_error(error)
        with self._posting:
            if (page := self._pages.get(rank)) is not None and not page[: _HEADER.size].any():
                cut = text[: len(page) - _HEADER.size]
                page[_HEADER.size : _HEADER.size + len(cut)] = list(cut)
                page[: _HEADER.size] = list(_HEADER.pack(zlib.crc32(cut), len(cut)))
        if len(self._pages) < self._rendezvous.size:
            with contextlib.suppress(RingError):  # the store may be gone
                self._rendezvous.publish_once(notice_key(rank), text)

    def read(self, rank: int) -> RingError | None:
        """The notice of `rank`; None if there is none yet. Raises RingError if the store is gone."""
        if (page := self._pages.get(rank)) is not None:
            # A notice may be on its way: another core may see its bytes in any order.
            checksum, length = _HEADER.unpack(page[: _HEADER.size].tobytes())
            text = page[_HEADER.size : _HEADER.size + length].tobytes()
            return decode_error(text, rank) if length and zlib.crc32(text) == checksum else None
        key = notice_key(rank)
        return decode_error(self._rendezvous.fetch(key, rank), rank) if self._rendezvous.is_published(key) else None
