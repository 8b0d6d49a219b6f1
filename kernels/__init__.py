"""Kernels that move gradients: Triton on CUDA, plain torch on CPU, bit-identical results.

Read `reference.py` first: it does in torch what `pack.py`, `accumulate.py` and `unpack.py` do in Triton. `chunks.py`
turns many tensors into equal pieces of work, and `lazy.py` keeps Triton out of processes that only use CPUs.
`direct.py` and `ring.py` reduce across GPUs that can address each other's memory, and synchronise by the signals of
`signals.py`; `multicast.py` lets NVLink's switch add for `direct`. `finite.py` finds NaN and infinity in values that
these kernels write. Nothing here knows about processes, buckets or optimizers.
"""

from .accumulate import accumulate
from .chunks import ChunkTable
from .direct import direct, prepare_direct
from .pack import pack
from .ring import prepare_ring, ring
from .unpack import unpack

__all__ = ["ChunkTable", "accumulate", "direct", "pack", "prepare_direct", "prepare_ring", "ring", "unpack"]
