"""`torchring.data.check` finds samples that are missing, repeated or shared between ranks."""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

from tests.support.checks import logged
from tests.support.harness import ranks
from tests.support.training import attempt
from torchring.data import Coverage, Sampler, check


class _Own(torch.utils.data.Sampler[int]):
    """Samples of this rank's own choice."""

    def __init__(self, samples: list[int]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        return iter(self.samples)


@ranks(2)
def test_check(rank: int) -> None:
    data = range(11)
    sampler = Sampler(data, seed=3, batch_size=2)
    sampler.load_state_dict({**sampler.state_dict(), "position": 4})
    before, random_state = sampler.state_dict(), torch.get_rng_state()
    with logged() as lines:
        found = [
            check(data, each)
            for each in (
                sampler,
                Sampler(data, global_batch=3),
                DistributedSampler(data, 2, rank),
                BatchSampler(DistributedSampler(data, 2, rank), 2, False),
                BatchSampler(Sampler(data), 2, False),
                DistributedSampler(data, 2, rank, drop_last=True),
            )
        ]
    assert lines == []
    assert found[0] == found[1] == Coverage(11, 11, 0, 0, 0, (), (), ())
    assert found[2] == found[3]
    numbers = [(each.num_drawn, each.num_missing, each.num_repeated) for each in found[2:]]
    assert numbers == [(12, 0, 1), (12, 0, 1), (12, 0, 1), (10, 1, 0)]
    assert sampler.state_dict() == before
    assert torch.equal(torch.get_rng_state(), random_state)

    def refused(said: str, samples: Any, sampler: Any) -> None:
        error = attempt(lambda: check(samples, sampler))
        assert re.search(said, error), error

    twice = "11 come more than once, such as 0, 1, 2, 3, 4; 11 come on several ranks, such as 0 on ranks 0, 1, 1 on"
    refused(f"^ValueError: the ranks draw 22 samples of 11; {twice} ranks 0, 1", data, RandomSampler(data))
    mixed = "3 are missing, such as 8, 9, 10; 2 come more than once, such as 1, 7; 1 come on several ranks, such as 7"
    mixed += " on ranks 0, 1. The ranks must share one order out"
    own = _Own([0, 1, 1, 2, 7] if rank else [3, 4, 5, 6, 7])
    refused(f"^ValueError: the ranks draw 10 samples of 11; {mixed}", data, own)
    refused("disagree about the sampler's seed: rank 0 has 0; rank 1 has 1", data, Sampler(data, seed=rank))
    other = range(10 + rank)
    refused("disagree about the length of the dataset: rank 0 has 10; rank 1 has 11", other, Sampler(other))
    outside = "the sampler draws sample 11, but the dataset has 11"
    gone = "^PlanMismatchError: rank 1 could not go through its samples: ValueError"
    refused(outside if rank else gone, data, _Own([11] if rank else [0]))
    refused("^TypeError", iter([1]), _Own([0]))
    with logged() as lines:
        check(data, _Own([*range(7)] if rank == 0 else [*range(7, 11)]))
    assert len(lines) == (rank == 0)
    for line in lines:
        assert line.startswith("a rank draws 4 samples of an epoch, another one 7: where that makes unequal")
