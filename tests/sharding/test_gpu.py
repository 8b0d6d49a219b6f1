"""Sharded steps on a real GPU, which several ranks share: `test_on_device.py` has a stand-in, here is what may differ.

TORCHRING_EXPECT_GPU=1 python -m pytest -m gpu tests/sharding
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchring
from tests.devices.test_gpu import DEADLINE, SHARED, pretend_hosts
from tests.sharding import test_step
from tests.sharding.test_step import assert_equal_states
from tests.support.harness import ranks, run_ranks

pytestmark = pytest.mark.gpu

_SHAPES = ((3000, 700), (40, 3, 3, 3), (9001,), (), (512, 513), (2, 5))  # the first would be several shards on the CPU
_KINDS: dict[str, Callable[[Any], Any]] = {
    **test_step.KINDS,
    "AdamW for-loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "AdamW capturable": lambda p: torch.optim.AdamW(p, lr=0.01, capturable=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "Muon": lambda p: torch.optim.Muon([each for each in p if each.dim() == 2], lr=0.02),
}


def _compare(rank: int, size: int, algorithm: str, hosts: Sequence[int] = ()) -> list[str]:
    """Trains twins, one of them sharded, with checkpoints in between. Returns what differs."""
    if hosts:
        pretend_hosts(rank, hosts)
    problems = []
    for kind, make in _KINDS.items():
        outcomes = []
        for shard in (False, True):
            draw = torch.Generator().manual_seed(1)
            parameters = [nn.Parameter(torch.randn(shape, generator=draw).cuda()) for shape in _SHAPES]
            optimizer = torchring.wrap(make(parameters), algorithm=algorithm, shard=shard)
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            draw = torch.Generator().manual_seed(100 + rank)
            for step in range(6):
                if step == 3:
                    state = optimizer.state_dict()
                    assert (state is None) == (shard and rank > 0)
                    optimizer.load_state_dict(state)
                optimizer.zero_grad()
                # The same gradients for both twins, bit for bit.
                torch.stack([(p * torch.randn(p.shape, generator=draw).cuda()).sum() for p in trained]).sum().backward()
                optimizer.step()
            state = optimizer.state_dict(all_ranks=shard)
            if shard and any(v.is_cuda for e in state["state"].values() for v in e.values() if torch.is_tensor(v)):
                problems.append(f"{kind}: the checkpoint is on the GPU")
            outcomes.append(([p.detach().cpu() for p in parameters], torch.utils._pytree.tree_map(_on_cpu, state)))
            optimizer.close()
        (plain, expected), (sharded, found) = outcomes
        problems += [f"{kind}: {s}" for s, a, b in zip(_SHAPES, plain, sharded, strict=True) if not torch.equal(a, b)]
        try:
            assert_equal_states(expected, found)
        except AssertionError as error:
            problems.append(f"{kind}, state: {error}")
    torchring.shutdown()
    return problems


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


@pytest.mark.timeout(3 * DEADLINE)
@pytest.mark.parametrize(
    ("algorithm", "hosts"),
    [("direct", (0, 0)), ("direct", (0, 0, 0, 0)), ("native", (0, 0)), ("hierarchical", (0, 0, 1))],
)
def test_the_same_bits_as_without_shard(algorithm: str, hosts: Sequence[int]) -> None:
    backend = () if algorithm == "direct" else (hosts,)
    results = run_ranks(_compare, len(hosts), algorithm, *backend, env=SHARED, deadline=2 * DEADLINE)
    assert results == [[]] * len(hosts)


@ranks(2, start=run_ranks, env=SHARED, deadline=DEADLINE)
def test_state_and_checkpoints_take_little_of_the_gpu() -> None:
    layers = nn.Sequential(*(nn.Linear(2000, 2000) for _ in range(8))).cuda()
    optimizer = torchring.wrap(torch.optim.AdamW(layers.parameters()), layers, shard=True)
    layers(torch.ones(1, 2000, device="cuda")).sum().backward()
    optimizer.step()
    own = sum(v.nbytes for e in optimizer.state.values() for v in e.values() if v.is_cuda)
    assert own < 0.52 * 8 * 2 * 4 * 2000 * 2001
    state = None
    for saves in (True, False):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if saves:
            state = optimizer.state_dict()
        else:
            optimizer.load_state_dict(state)
        peak = torch.cuda.max_memory_allocated() - before  # beside the rank's state
        assert peak < 64 << 20
