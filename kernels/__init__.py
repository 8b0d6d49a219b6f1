# SPDX-License-Identifier: Apache-2.0
"""Kernels that move gradients: Triton on CUDA, plain torch on CPU, bit-identical results.

Read `reference.py` first: it says in torch what `pack.py`, `accumulate.py` and `unpack.py` do in Triton. `chunks.py`
turns many tensors into equal pieces of work, and `lazy.py` keeps Triton out of processes that only use CPUs.
Nothing here knows about ranks, buckets or optimizers.
"""

from .accumulate import accumulate
from .chunks import ChunkTable
from .pack import pack
from .unpack import unpack

__all__ = ["ChunkTable", "accumulate", "pack", "unpack"]
