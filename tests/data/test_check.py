"""`torchring.data.check` finds samples that are missing, repeated or shared between ranks; `shard` with `join`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

import torchring
from tests.support.checks import assert_same_everywhere, logged
from tests.support.harness import ranks, run_pooled
from tests.support.training import attempt, small_model
from torchring.data import Coverage, Sampler, check, shard


class _Own(torch.utils.data.Sampler[int]):
    """Samples of this rank's own choice."""

    def __init__(self, samples: list[int]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        return iter(self.samples)


def _checks(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    data = range(11)
    sampler = Sampler(data, seed=3, batch_size=2)
    sampler.load_state_dict({**sampler.state_dict(), "position": 4})
    before, random_state = sampler.state_dict(), torch.get_rng_state()
    found["ours"] = check(data, sampler)
    found["batches"] = check(data, Sampler(data, global_batch=3))
    found["padded"] = check(data, DistributedSampler(data, size, rank))
    found["dropped"] = check(data, DistributedSampler(data, size, rank, drop_last=True))
    found["ours by samples"] = check(data, BatchSampler(Sampler(data), 2, False))
    found["in batches"] = check(data, BatchSampler(DistributedSampler(data, size, rank), 2, False))  # type: ignore[arg-type]
    found["random"] = attempt(lambda: check(data, RandomSampler(data)))  # type: ignore[arg-type]
    found["seeds"] = attempt(lambda: check(data, Sampler(data, seed=rank)))
    found["lengths"] = attempt(lambda: check(range(10 + rank), Sampler(range(10 + rank))))
    found["own"] = attempt(lambda: check(data, _Own([0, 1, 1, 2, 7] if rank else [3, 4, 5, 6, 7])))
    found["outside"] = attempt(lambda: check(data, _Own([11] if rank else [0])))
    found["no length"] = attempt(lambda: check(iter([1]), _Own([0])))
    with logged() as found["uneven"]:
        check(data, _Own([*range(7)] if rank == 0 else [*range(7, 11)]))
    with logged() as found["even"]:
        check(data, sampler)
        check(data, DistributedSampler(data, size, rank))
    found["untouched"] = sampler.state_dict() == before and torch.equal(torch.get_rng_state(), random_state)
    return found


def test_check() -> None:
    both = run_pooled(_checks, 2)
    for found in both:
        own = ("seeds", "lengths", "outside", "no length", "uneven")
        assert found == {**both[0], **{name: found[name] for name in own}}
        assert found["untouched"]
        assert found["ours"] == found["batches"] == Coverage(11, 11, 0, 0, 0, (), (), ())
        padded, dropped = found["padded"], found["dropped"]
        assert (padded.num_drawn, padded.num_missing, padded.num_repeated) == (12, 0, 1)
        assert (found["ours by samples"].num_drawn, found["ours by samples"].num_repeated) == (12, 1)
        assert (dropped.num_drawn, dropped.num_missing, dropped.num_repeated) == (10, 1, 0)
        assert found["in batches"] == padded
        assert found["random"].startswith(
            "ValueError: the ranks draw 22 samples of 11; 11 come more than once, such as 0, 1, 2, 3, 4; 11 come on "
            "several ranks, such as 0 on ranks 0, 1, 1 on ranks 0, 1"
        )
        assert found["own"].startswith(
            "ValueError: the ranks draw 10 samples of 11; 3 are missing, such as 8, 9, 10; 2 come more than once, such "
            "as 1, 7; 1 come on several ranks, such as 7 on ranks 0, 1. The ranks must share one order out"
        )
        assert "ranks disagree about the sampler's seed: rank 0 has 0; rank 1 has 1" in found["seeds"]
        assert "ranks disagree about the length of the dataset: rank 0 has 10; rank 1 has 11" in found["lengths"]
    assert both[1]["uneven"] == both[0]["even"] == []
    (uneven,) = both[0]["uneven"]
    assert uneven.startswith("a rank draws 4 samples of an epoch, another one 7: where that makes unequal")
    assert "the sampler draws sample 11, but the dataset has 11" in both[1]["outside"]
    assert both[0]["outside"].startswith("PlanMismatchError: rank 1 could not go through its samples: ValueError")
    assert both[0]["no length"].startswith("TypeError")


@ranks(3)
def test_uneven_ends_with_join(rank: int) -> None:
    """Elements 0 to 6 on three ranks in batches of 2: rank 0 has 2 batches, the others have one."""
    inputs, targets = torch.randn(7, 4, dtype=torch.float64), torch.randn(7, 2, dtype=torch.float64)
    loader = DataLoader(shard([*zip(inputs, targets, strict=True)]), batch_size=2)
    model = small_model()
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    num_batches = 0
    with torchring.join(optimizer):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            num_batches += 1
    assert num_batches == (2, 1, 1)[rank]
    assert_same_everywhere(list(model.parameters()))
