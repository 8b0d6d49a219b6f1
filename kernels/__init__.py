"""Kernels that move gradients on accelerators, in Triton. `devices/` launches them.

CPUs load `reference.py` alone: it does in torch what `pack.py` and the sums of `direct.py` do in Triton, bit for bit.
Read it first. `chunks.py` turns many tensors into equal pieces of work. `direct.py` and `ring.py` reduce across GPUs
that can address each other's memory, and synchronise by the signals of `signals.py`. `guard.py` poisons what an aborted
library has left. `quantize.py` makes 8-bit integers of rows, as `reference_quantize.py` does on CPUs. Nothing here
knows about processes, buckets or optimizers.
"""
