"""Mappings of shared memory, and what becomes of them in a forked child.

A child that shared its parent's mappings would write into the parent's gradients, and take signals that peers sent to
the parent. So the first thing that happens in a child is that every mapping becomes private to the child, at the same
address:

- The rank's own memory keeps its contents. A small block is copied. A large block is mapped again, copy-on-write: the
  child sees the parent's writes to a page until the child itself writes to that page.
- The peers' memory becomes zeros, which take no room until the child writes to them.

A data loader's workers are such children. They never look at this memory, and should cost next to nothing.
"""

import ctypes
import mmap
import os
import weakref
from typing import Final

import torch

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_FAILED: Final = ctypes.c_void_p(-1).value
_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
_FIXED: Final = 0x10  # on all of Linux's architectures that PyTorch runs on
_COPIED_BYTES: Final = 1 << 20  # up to here a block is copied in a child, and no descriptor kept open for it


class _Mapping:
    """One block. `descriptor` is -1 except for a large block of this process's own memory."""

    __slots__ = ("address", "descriptor", "is_own", "length")

    def __init__(self, address: int, length: int, descriptor: int, *, is_own: bool) -> None:
        self.address = address
        self.length = length
        self.descriptor = descriptor
        self.is_own = is_own

    def release(self) -> None:
        # First: another thread may fork now, and the child must not map this block again.
        _mappings.pop(self.address, None)
        _libc.munmap(self.address, self.length)
        self._close()

    def make_private(self) -> None:
        """In a forked child."""
        contents = b""
        kind, descriptor = mmap.MAP_PRIVATE | _FIXED, self.descriptor
        if descriptor < 0:
            kind |= mmap.MAP_ANONYMOUS
            if self.is_own:
                contents = ctypes.string_at(self.address, self.length)
        if _libc.mmap(self.address, self.length, _READ_WRITE, kind, descriptor, 0) == _FAILED:
            # No memory is left. A write must not reach the parent: let it end the child.
            _libc.mprotect(self.address, self.length, mmap.PROT_READ)
        else:
            ctypes.memmove(self.address, contents, len(contents))
        self._close()

    def _close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


_mappings: dict[int, _Mapping] = {}


def map_block(descriptor: int, length: int, *, is_own: bool, populates: bool = False) -> torch.Tensor:
    """Map a descriptor, which the caller closes, as a uint8 tensor.

    The mapping lives as long as a tensor that views it. Python's mmap is not used, because it keeps a descriptor open
    for each mapping.

    With `populates`, the memory is there at once, so that the first step takes no page faults (0.25 to 8 us a page).
    Peers' memory is not: each populated page counts as resident, and a rank may only touch its slice of that memory.
    """
    flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populates else 0)
    address = _libc.mmap(None, length, _READ_WRITE, flags, descriptor, 0)
    if address in (None, _FAILED):
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {length} bytes: {os.strerror(code)}")
    kept = -1
    if is_own and length > _COPIED_BYTES:
        try:
            kept = os.dup(descriptor)
        except OSError:  # too many are open: a forked child copies the block instead
            kept = -1
    mapping = _mappings[address] = _Mapping(address, length, kept, is_own=is_own)
    memory = (ctypes.c_uint8 * length).from_address(address)
    # Tensors that view the memory refer to `memory`. At interpreter exit tensors may outlive finalizers, so there only
    # the end of the process unmaps the memory.
    weakref.finalize(memory, mapping.release).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)


def _after_fork() -> None:
    for address in list(_mappings):  # the garbage collector may release a mapping meanwhile
        if (mapping := _mappings.get(address)) is not None:
            mapping.make_private()
    _mappings.clear()


os.register_at_fork(after_in_child=_after_fork)
