"""Mistakes in how ranks read their data are found within 20 steps, and loaders that are right are not accused."""

import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, TensorDataset

import torchring
from tests.support.checks import logged
from tests.support.harness import ranks, run_ranks
from torchring.observe.inputs import Inputs

_BATCH = 4
Batches = Iterator[tuple[Any, ...]]


def table(length: int = 400, seed: int = 0) -> TensorDataset:
    return TensorDataset(torch.randn(length, 8, generator=torch.Generator().manual_seed(seed)))


class Noisy(Dataset[Tensor]):
    """Samples that a random generator makes up, in whatever process."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(8)


class Stream(IterableDataset[Tensor]):
    """Reads every `of`-th sample; with `by_worker`, each worker of a loader reads its part of those."""

    def __init__(self, *, by_worker: bool = False, first: int = 0, of: int = 1) -> None:
        self.by_worker, self.first, self.of = by_worker, first, of

    def __iter__(self) -> Iterator[Tensor]:
        samples = table().tensors[0][self.first :: self.of]
        info = torch.utils.data.get_worker_info()
        yield from samples[info.id :: info.num_workers] if self.by_worker and info else samples


class Chunks:
    """A batch sampler of the script's own, which knows of epochs and ranks, if it is told."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.epoch = rank, size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(400, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for start in range(0, 20 * _BATCH, _BATCH):
            yield order[self.rank :: self.size][start : start + _BATCH]


def sharded(dataset: Dataset[Any], **options: Any) -> DataLoader[Any]:
    options = {"num_replicas": torchring.size(), "rank": torchring.rank()} | options
    return DataLoader(dataset, _BATCH, sampler=DistributedSampler(dataset, **options))


def epochs(loader: Any, num_epochs: int = 1, *, tell: Any = None) -> Batches:
    for epoch in range(num_epochs):
        if tell is not None:
            tell.set_epoch(epoch)
        yield from loader


def seeded(seed: int) -> torch.Generator:
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)


def wrong_workers_seed(*, by_rank: bool) -> Batches:
    seeded(torchring.rank() if by_rank else 0)
    yield from epochs(sharded(Noisy()))


# How rank r of n reads, and words of the warning.
MISTAKES: dict[str, tuple[Callable[[int, int], Batches], str]] = {
    "no sampler": (lambda r, n: epochs(DataLoader(table(), _BATCH)), "ranks 0, 1 .* SequentialSampler"),
    "equal seeds": (
        lambda r, n: epochs(DataLoader(table(), _BATCH, shuffle=True, generator=seeded(0))),
        "ranks 0, 1 .* RandomSampler .*torchring.data.Sampler",
    ),
    "rank 0 everywhere": (
        lambda r, n: epochs(sharded(table(), rank=0)),
        "made for rank 0 of 2, and this is rank 1 of 2",
    ),
    "iterable read whole": (lambda r, n: epochs(DataLoader(Stream(), _BATCH)), "whole of Stream.*torchring.data.shard"),
    "iterable read whole by two workers": (
        lambda r, n: epochs(DataLoader(Stream(), _BATCH, num_workers=2)),
        "Each of the 2 workers .*whole of Stream",
    ),
    "workers repeat a rank's part": (
        lambda r, n: epochs(DataLoader(Stream(first=r, of=n), _BATCH, num_workers=2)),
        "each batch comes several times in a row.*torchring.data.shard",
    ),
    "batch sampler without rank": (lambda r, n: epochs(DataLoader(table(), batch_sampler=Chunks(0, 1))), "The Chunks"),
    "made-up data, equal seeds": (lambda r, n: wrong_workers_seed(by_rank=False), "another seed"),
    "no loader, equal seeds": (
        lambda r, n: ((torch.randn(_BATCH, 8, generator=g),) for g in [seeded(0)] * 20),
        "another seed",
    ),
    "set_epoch forgotten": (
        lambda r, n: epochs(sharded(table(80)), 3),
        "ranks 0, 1, an epoch .*set_epoch.* DistributedSampler",
    ),
}


def by_rank(r: int, n: int) -> Batches:
    return epochs(sharded(table()))


HARMLESS: dict[str, Callable[[int, int], Batches]] = {
    "DistributedSampler": lambda r, n: epochs(loader := sharded(table(80)), 3, tell=loader.sampler),
    "without shuffling": lambda r, n: epochs(sharded(table(80), shuffle=False), 3),
    "short epochs": lambda r, n: epochs(loader := sharded(table(24)), 8, tell=loader.sampler),
    "sampling with replacement": lambda r, n: epochs(
        DataLoader(table(20), _BATCH, sampler=RandomSampler(table(20), True, 100, generator=seeded(r)))
    ),
    "one fixed batch on all ranks": lambda r, n: itertools.repeat((torch.randn(4, 8, generator=seeded(0)),), 24),
    "two fixed batches in turns": lambda r, n: itertools.islice(
        itertools.cycle([(torch.randn(4, 8, generator=seeded(i)),) for i in (1, 2)]), 24
    ),
    "constant inputs": lambda r, n: ((torch.full((4, 8), float(i)),) for i in range(24)),
    "zeros": lambda r, n: itertools.repeat((torch.zeros(4, 8),), 24),
    "equal times first": lambda r, n: (
        (torch.full((4,), float(i)), torch.randn(4, 8)) for i in range(24) if seeded(99 * i + r)
    ),
    "iterable by rank": lambda r, n: epochs(DataLoader(Stream(first=r, of=n), _BATCH)),
    "iterable by rank and worker": lambda r, n: epochs(
        DataLoader(Stream(by_worker=True, first=r, of=n), _BATCH, num_workers=2)
    ),
    "batch sampler with rank": lambda r, n: epochs(DataLoader(table(), batch_sampler=(c := Chunks(r, n))), 3, tell=c),
    "made-up data, own seeds": lambda r, n: wrong_workers_seed(by_rank=True),
    "list of batches, epoch after epoch": lambda r, n: epochs(list(by_rank(r, n))[:10], 3),
    "augmented by rank": lambda r, n: ((x + torch.randn(4, 8),) for (x,) in by_rank(r, n)),
    "nested": lambda r, n: (({"mask": torch.ones(4, 8), "x": x},) for (x,) in by_rank(r, n)),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, *inputs: Any) -> Tensor:
        last = inputs[-1]
        return self.linear(last["x"] if isinstance(last, dict) else last)


# As MISTAKES; of the last two nothing is said.
UNEVEN: dict[str, tuple[Callable[[int, int], Batches], str]] = {
    "samples": (lambda r, n: ((torch.randn(4 + 8 * r, 8),) for _ in range(20)), "4 samples.*8 on average"),
    "tokens": (
        lambda r, n: ((torch.randint(9, (4, 8 + 32 * r)), torch.randn(4, 8)) for _ in range(20)),
        "32 samples or tokens.*96 on average",
    ),
    "now and then": (lambda r, n: ((torch.randn(4 + 8 * (r and i % 5 == 0), 8),) for i in range(60)), ""),
    "weighed": (lambda r, n: ((torch.randn(4 + 8 * r, 8),) for _ in range(20)), ""),
}


def train(rank: int, world_size: int, name: str, batches: Batches) -> tuple[list[str], int]:
    """(this rank's warnings, after how many steps the first came)."""
    torch.manual_seed(rank)
    model = Net()
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model)
    came = 0
    with logged() as lines:
        for step, batch in enumerate(itertools.islice(batches, 60), start=1):
            optimizer.zero_grad()
            if name == "weighed":
                optimizer.weigh(len(batch[0]))
            model(*batch).sum().backward()
            optimizer.step()
            came = came or (step if lines else 0)
    optimizer.close()
    return lines, came


@ranks(2, start=run_ranks)
def test_mistakes_are_found_and_others_are_not_accused(rank: int) -> None:
    def read(name: str, make: Callable[[int, int], Batches]) -> list[tuple[str, int]]:
        """The warnings of both ranks, each with the step at which its rank's first came."""
        found = torchring.all_gather_object(train(rank, 2, name, make(rank, 2)))
        return [(line, came) for lines, came in found for line in lines]

    for name, (make, words) in MISTAKES.items():
        found = read(name, make)
        assert any(re.search(words, line) for line, _ in found), (name, found)
        assert len({line[:20] for line, _ in found}) == len(found), "each mistake once, on one rank"
        assert all(came <= 20 for _, came in found), name
    for name, make in HARMLESS.items():
        assert read(name, make) == [], name
    for name, (make, words) in UNEVEN.items():
        lines = [line for line, _ in read(name, make)]
        assert len(lines) == bool(words), (name, lines)
        assert all(re.search(words, line) and "optimizer.weigh(" in line for line in lines), lines
    with pytest.raises(ValueError, match="the world is open with check_data=True, got False"):
        torchring.init(check_data=False)
    torchring.shutdown()
    torchring.init(check_data=False)
    assert read("", MISTAKES["no sampler"][0]) == []  # on purpose


@ranks(3)
def test_all_ranks_that_read_the_same_are_named_in_one_warning(rank: int) -> None:
    lines, _ = train(rank, 3, "", epochs(DataLoader(table(seed=rank % 2), _BATCH)))
    assert [line.startswith("ranks 0, 2 got the same batch") for line in lines] == [True] * (rank == 2)


class Closed(dict[str, Tensor]):
    def values(self) -> Any:
        raise LookupError("no batch is open")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_a_look_at_inputs_leaves_them_as_they_are() -> None:
    """And raises nothing, whatever a model gets."""
    x = torch.randn(40, 30)
    x.requires_grad_()
    odd: list[Any] = [
        *(x, x.t(), x.detach().t().contiguous().t(), torch.empty(0, 3), torch.ones(1).expand(9, 9)),
        *(x.detach().bfloat16(), x.detach().to(torch.float8_e4m3fn), x.detach() > 0, torch.ones(9, dtype=torch.uint16)),
        *(torch.randn(9, dtype=torch.complex64).conj(), torch.randn(9, device="meta"), torch.eye(9).to_sparse()),
        *(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), Closed(), {"x": x}, [x, None], "text", None),
    ]
    inputs = Inputs()
    inputs.is_on = True
    digests = []
    for each in odd:
        inputs.see((torch.zeros(4) if isinstance(each, Tensor) else 3, each), {})
        digests.append(inputs.take().digest)
        inputs.see((), {"x": torch.zeros(3)})
        inputs.take()
    assert digests[0] == digests[2] == digests[14] == digests[15] != digests[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a slow vmap
        torch.vmap(lambda row: inputs.see((row,), {}) * row.sum())(x)
    again = x.detach()
    inputs.take()
    inputs.see((again,), {})
    again.resize_(50, 50)
