"""`check`: whether the ranks' samples of an epoch are those of the dataset, each once."""

from __future__ import annotations

import array
import copy
import itertools
import logging
import operator
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils.data import DistributedSampler

from torchring.collectives.service import collectives_of
from torchring.data.sampler import Sampler
from torchring.default_world import default_world
from torchring.errors import ranks_in_words

_logger: Final = logging.getLogger("torchring")
_AT_ONCE: Final = 1 << 20  # samples of all ranks, of which a rank holds the numbers
_NUM_EXAMPLES: Final = 5
_SHOULD_AGREE: Final = ("seed", "shuffle", "epoch", "num_replicas", "drop_last")


@dataclass(frozen=True)
class Coverage:
    """What the ranks draw in an epoch.

    Attributes:
        num_samples: number of samples of the dataset.
        num_drawn: number of samples that the ranks draw, all together.
        num_missing, num_repeated, num_shared: number of samples that no rank draws, that come more than once, and that
            several ranks draw.
        missing, repeated, shared: some of these; the last with the ranks.
    """

    num_samples: int
    num_drawn: int
    num_missing: int
    num_repeated: int
    num_shared: int
    missing: tuple[int, ...]
    repeated: tuple[int, ...]
    shared: tuple[tuple[int, tuple[int, ...]], ...]

    def __str__(self) -> str:
        shared = [f"{sample} on {ranks_in_words(ranks)}" for sample, ranks in self.shared]
        kinds = (
            (self.num_missing, "are missing", self.missing),
            (self.num_repeated, "come more than once", self.repeated),
            (self.num_shared, "come on several ranks", shared),
        )
        found = [f"{num} {what}, such as {', '.join(map(str, some))}" for num, what, some in kinds if num]
        return "; ".join([f"the ranks draw {self.num_drawn} samples of {self.num_samples}", *found])


def check(dataset: Sized, sampler: Iterable[Any]) -> Coverage:
    """Check that the ranks' samples of an epoch are the samples of `dataset`, each once. Collective.

        torchring.data.check(dataset, sampler)  # once, before training; or loader.batch_sampler

    Goes through the epoch that the sampler is in. Reads no sample, and leaves the sampler as it was. Each rank holds
    the numbers of its own samples, and those of 2**20 samples of all ranks at a time.

    Args:
        dataset: has a length.
        sampler: a sampler or a batch sampler. What `DistributedSampler` repeats, or leaves out with drop_last=True, so
            that ranks have equally many, is no mistake.

    Returns:
        What the ranks draw: the same on all ranks. A warning says so if one of them draws more than another.

    Raises:
        ValueError: samples are missing, come more than once, or come on several ranks. Raised on all ranks.
        PlanMismatchError: ranks disagree about the seed or the length, or another rank cannot go through its samples.
    """
    world = default_world()
    collectives = collectives_of(world)
    inner: Any = sampler if isinstance(sampler, Sampler) else getattr(sampler, "sampler", sampler)  # of a BatchSampler
    mine, length, problem = torch.empty(0, dtype=torch.int64), 0, None
    try:
        length = len(dataset)
        mine = _samples(inner if isinstance(inner, Sampler) else sampler, length)
    except Exception as error:
        problem = error
    collectives.raise_together(problem, "could not go through its samples")
    said = {name: getattr(inner, name, getattr(inner, f"_{name}", None)) for name in _SHOULD_AGREE}
    collectives.check_equal(
        [f"the length of the dataset: {length}", *(f"the sampler's {name}: {value}" for name, value in said.items())]
    )

    # Range by range of the samples' numbers, so that a rank can hold those of all ranks
    counts = [int(each) for each in collectives.all_gather(torch.tensor([len(mine)], device="cpu"))]
    edges = [*range(0, length, _AT_ONCE), length]
    cuts = [0, *torch.searchsorted(mine, torch.tensor(edges[1:])).tolist()]
    numbers = [0, 0, 0]
    examples: list[list[tuple[int, tuple[int, ...]]]] = [[], [], []]
    for (low, high), (begin, end) in zip(itertools.pairwise(edges), itertools.pairwise(cuts), strict=True):
        ranks = collectives.all_gather(mine[begin:end])
        num_times = torch.bincount(torch.cat(ranks) - low, minlength=high - low)
        num_ranks = sum(torch.bincount(each - low, minlength=high - low).clamp(max=1) for each in ranks)
        for i, is_such in enumerate((num_times == 0, num_times > 1, torch.as_tensor(num_ranks) > 1)):
            found = is_such.nonzero().flatten() + low
            numbers[i] += len(found)
            for sample in found[: _NUM_EXAMPLES - len(examples[i])].tolist():
                examples[i].append((sample, tuple(r for r, theirs in enumerate(ranks) if (theirs == sample).any())))
    missing, repeated = (tuple(sample for sample, _ in each) for each in examples[:2])
    coverage = Coverage(length, sum(counts), numbers[0], numbers[1], numbers[2], missing, repeated, tuple(examples[2]))
    num_allowed = 0
    if isinstance(inner, DistributedSampler):
        num_allowed = (length if inner.drop_last else -length) % inner.num_replicas
    elif isinstance(inner, Sampler) and not inner._knows_batches:
        num_allowed = -length % inner._place()[1]
    if coverage.num_missing + coverage.num_repeated > num_allowed:
        raise ValueError(
            f"{coverage}. The ranks must share one order out, with one seed: torchring.data.Sampler(dataset) does, and "
            "torch's DistributedSampler(dataset)"
        )
    if not isinstance(inner, Sampler) and min(counts) < max(counts) and world.rank == 0:
        _logger.warning(
            "a rank draws %d samples of an epoch, another one %d: where that makes unequal numbers of batches, put the "
            "loop into a `with torchring.join(optimizer):` block",
            *(min(counts), max(counts)),
        )
    return coverage


def _samples(sampler: Iterable[Any], length: int) -> torch.Tensor:
    """[N] int64, in order: the samples that this rank draws. Raises ValueError if there is no such sample."""
    with torch.random.fork_rng(devices=[]):
        found = array.array("q", map(operator.index, _drawn(sampler)))
    if not found:
        return torch.empty(0, dtype=torch.int64)
    mine = torch.frombuffer(found, dtype=torch.int64).sort().values
    for sample in (int(mine[0]), int(mine[-1])):
        if not 0 <= sample < length:
            raise ValueError(f"the sampler draws sample {sample}, but the dataset has {length} samples")
    return mine


def _drawn(sampler: Any) -> Iterator[Any]:
    generator = getattr(sampler, "generator", None)
    before = None if generator is None else generator.get_state()
    sampler = copy.copy(sampler)
    if isinstance(sampler, Sampler):
        sampler._resume(sampler.epoch, 0)
        sampler._is_counted = True
        for each in sampler:
            yield from each[: sampler.weight()] if sampler._yields_batches else (each,)
    else:
        for each in sampler:
            yield from each if isinstance(each, list | tuple) else (each,)
    if generator is not None:
        generator.set_state(before)
