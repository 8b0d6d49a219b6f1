"""The sharded optimizer step: each rank keeps the optimizer state of its share of the parameters, and steps that share.

`wrap(..., shard=True)`. Gradients are reduced as ever, and whole on every rank when `backward()` returns. What differs:

1. `kinds.py`: does the optimizer treat every element by itself, or every parameter? Others cannot be sharded.
2. `cut.py`: which rank steps which elements. Pure data, the same on all ranks.
3. `parameters.py`: the parameters move to memory in which the ranks of a host write each other's, and are cut into
   shards, which the optimizer steps in their place; `exchange.py` carries what ranks have stepped to the others, within
   a host and between hosts; on GPUs, `device.py` does.
4. `step.py`: a step: enter together, step this rank's shards, spread the results.
5. `checkpoint.py`: ordinary checkpoints, gathered and dealt out parameter by parameter; `distributed_checkpoint.py`:
   the same in parts, one on each rank, for torch.distributed.checkpoint, which `shard_tensor.py` explains them to.
6. `optimizer.py`: `ShardedOptimizer`, which `wrap` returns.

Source: ZeRO stage 1 (Rajbhandari et al., 2020, arXiv:1910.02054).
"""

from torchring.sharding.distributed_checkpoint import DistributedState as DistributedState
