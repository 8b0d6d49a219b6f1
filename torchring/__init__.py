"""torchring: one line makes a PyTorch script train data-parallel.

    optimizer = torchring.wrap(torch.optim.AdamW(model.parameters()), model)

Start the script with `torchring run -np 2 script.py` or torchrun. To read the code, begin with `optimizer.py`.
"""

from torchring.collectives import (
    Work,
    all_gather,
    all_gather_object,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    broadcast_object,
    reduce_scatter,
)
from torchring.errors import (
    GradientError,
    PeerLostError,
    PeerTimeoutError,
    PlanMismatchError,
    RingError,
    TopologyError,
)
from torchring.optimizer import DistributedOptimizer, Stats, wrap
from torchring.state import broadcast_optimizer_state, broadcast_parameters
from torchring.world import (
    device,
    init,
    is_initialized,
    local_rank,
    local_size,
    node_rank,
    num_nodes,
    rank,
    shutdown,
    size,
)

__version__ = "0.1.0"

__all__ = [
    "DistributedOptimizer",
    "GradientError",
    "PeerLostError",
    "PeerTimeoutError",
    "PlanMismatchError",
    "RingError",
    "Stats",
    "TopologyError",
    "Work",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "device",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "node_rank",
    "num_nodes",
    "rank",
    "reduce_scatter",
    "shutdown",
    "size",
    "wrap",
]
