"""`check`: whether the ranks' samples of an epoch are those of the dataset, each once."""

import copy
import functools
import operator
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from torchring.collectives.service import collectives_of
from torchring.data.sampler import Sampler
from torchring.default_world import world_of
from torchring.errors import ranks_in_words
from torchring.world import Group

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


def check(dataset: Sized, sampler: Iterable[Any], *, group: Group | None = None) -> Coverage:
    """Check that the ranks' samples of an epoch are the samples of `dataset`, each once. Collective.

        torchring.data.check(dataset, sampler)  # once, before training; or loader.batch_sampler

    Goes through the epoch that the sampler is in. Reads no sample, and leaves the sampler as it was. Takes
    some 50 bytes of memory for each sample of the dataset.

    Args:
        dataset: has a length.
        sampler: a sampler or a batch sampler. What `DistributedSampler` repeats, or leaves out with drop_last=True, so
            that ranks have equally many, is no mistake.
        group: the ranks that share the dataset. By default those of a `torchring.data.Sampler`, or all ranks.

    Returns:
        What the ranks draw: the same on all ranks. A warning says so if one of them draws more than another.

    Raises:
        ValueError: samples are missing, come more than once, or come on several ranks. Raised on all ranks.
        PlanMismatchError: ranks disagree about the seed or the length, or another rank cannot go through its samples.
    """
    inner: Any = sampler if isinstance(sampler, Sampler) else getattr(sampler, "sampler", sampler)  # of a BatchSampler
    world = world_of(inner._place.group if group is None and isinstance(inner, Sampler) else group)
    collectives = collectives_of(world)
    with collectives.together("could not go through its samples"):
        length = len(dataset)
        mine = _samples(inner if isinstance(inner, Sampler) else sampler, length)
    said = {name: getattr(inner, name, getattr(inner, f"_{name}", None)) for name in _SHOULD_AGREE}
    collectives.check_equal(
        [f"the length of the dataset: {length}", *(f"the sampler's {name}: {value}" for name, value in said.items())]
    )

    ranks = collectives.all_gather(mine)
    num_times = torch.bincount(torch.cat(ranks), minlength=length)
    num_ranks = functools.reduce(torch.add, (torch.bincount(each, minlength=length).clamp(max=1) for each in ranks))
    missing, repeated, shared = (
        is_such.nonzero().flatten() for is_such in (num_times == 0, num_times > 1, num_ranks > 1)
    )
    drawn = dict(zip(world.ranks, ranks, strict=True))
    some_shared = [(n, tuple(r for r, theirs in drawn.items() if (theirs == n).any())) for n in _some(shared)]
    counts = [len(each) for each in ranks]
    coverage = Coverage(
        *(length, sum(counts), len(missing), len(repeated), len(shared)),
        *(_some(missing), _some(repeated), tuple(some_shared)),
    )
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
        world.warn(
            f"a rank draws {min(counts)} samples of an epoch, another one {max(counts)}: where that makes unequal "
            "numbers of batches, put the loop into a `with torchring.join(optimizer):` block"
        )
    return coverage


def _some(samples: torch.Tensor) -> tuple[int, ...]:
    return tuple(samples[:_NUM_EXAMPLES].tolist())


def _samples(sampler: Any, length: int) -> torch.Tensor:
    """[N] int64: the samples that this rank draws. Raises ValueError if there is no such sample."""
    with torch.random.fork_rng(devices=[]):
        mine = torch.from_numpy(np.fromiter(map(operator.index, _drawn(sampler)), np.int64))
    if (outside := mine[(mine < 0) | (mine >= length)]).numel():
        raise ValueError(f"the sampler draws sample {int(outside[0])}, but the dataset has {length} samples")
    return mine


def _drawn(sampler: Any) -> Iterator[Any]:
    if isinstance(sampler, Sampler):
        whole = sampler._plan(sampler.epoch, 0)
        for batch, samples in enumerate(sampler._draw(whole)):
            yield from samples[: whole.weight(batch)] if sampler._knows_batches else samples
        return
    generator = getattr(sampler, "generator", None)
    before = None if generator is None else generator.get_state()
    for each in copy.copy(sampler):
        yield from each if isinstance(each, list | tuple) else (each,)
    if generator is not None:
        generator.set_state(before)
