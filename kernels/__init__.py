"""Kernels that move gradients: Triton on CUDA, plain torch on CPU, bit-identical results.

Read `reference.py` first: it does in torch what `pack.py`, `unpack.py` and the sums of `direct.py` do in Triton.
Processes that only use CPUs load nothing else. `chunks.py` turns many tensors into equal pieces of work. `direct.py`
and `ring.py` reduce across GPUs that can address each other's memory, and synchronise by the signals of `signals.py`.
`guard.py` poisons what an aborted library has left. Nothing here knows about processes, buckets or optimizers.
"""
