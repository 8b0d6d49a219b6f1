"""`check`: whether the ranks' samples of an epoch are the dataset, each once."""

from __future__ import annotations

import array
import copy
import hashlib
import itertools
import json
import operator
import pickle
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DistributedSampler

from torchring.collectives.service import Collectives, collectives_of
from torchring.data.sampler import Sampler
from torchring.default_world import default_world
from torchring.errors import ranks_in_words
from torchring.memory.host import bytes_of

_AT_ONCE: Final = 1 << 20  # samples of all ranks that a rank holds
_NUM_EXAMPLES: Final = 5
_SHOULD_AGREE: Final = ("seed", "shuffle", "epoch", "num_replicas", "drop_last", "batch_size")


@dataclass(frozen=True)
class Coverage:
    """What the ranks draw in an epoch. Examples are numbers of samples, or hashes where there is no sampler.

    Attributes:
        num_samples: number of samples of the dataset; None if it has no length.
        num_drawn: number of samples that the ranks draw, all together.
        num_missing, num_repeated, num_shared: of samples that no rank draws; that come more than once; and of those of
            them that several ranks draw.
        missing, repeated, shared: the first of these. The latter with the ranks.
    """

    num_samples: int | None
    num_drawn: int
    num_missing: int
    num_repeated: int
    num_shared: int
    missing: tuple[int, ...]
    repeated: tuple[int, ...]
    shared: tuple[tuple[int, tuple[int, ...]], ...]

    def __str__(self) -> str:
        found = [f"the ranks draw {self.num_drawn} samples" + (f" of {self.num_samples}" if self.num_samples else "")]
        if self.num_missing:
            found.append(f"{self.num_missing} are missing, such as {_some(self.missing)}")
        if self.num_repeated:
            found.append(f"{self.num_repeated} come more than once, such as {_some(self.repeated)}")
        if self.num_shared:
            where = _some(f"{sample} on {ranks_in_words(ranks)}" for sample, ranks in self.shared)
            found.append(f"{self.num_shared} come on several ranks, such as {where}")
        return "; ".join(found)


def check(
    dataset: Sized | Iterable[Any], sampler: Iterable[Any] | None = None, *, key: Callable[[Any], Any] | None = None
) -> Coverage:
    """Check that the ranks' samples of an epoch are the samples of `dataset`, each once. Collective.

        torchring.data.check(dataset, sampler)  # once, before training; or loader.batch_sampler

    Goes through the epoch that the sampler is in, reads no sample, and leaves the sampler as it was. Without a sampler,
    for iterable datasets, goes through the dataset, and compares hashes of its elements: what was forgotten cannot be
    found so. Equal elements count as repeated, unless `key` tells them apart.

    A rank holds the numbers of its own samples, and those of 2**20 of all ranks at a time.

    Args:
        dataset: the dataset, in each rank.
        sampler: a sampler, or a batch sampler. What `DistributedSampler` repeats, or leaves out with drop_last=True, so
            that ranks have equally many, is no mistake.
        key: what identifies an element of an iterable dataset: `lambda element: element["id"]`.

    Returns:
        What the ranks draw.

    Raises:
        ValueError: samples are missing, come more than once, or on several ranks; or ranks disagree about the seed or
            the length of the dataset. On all ranks.
        TypeError: `dataset` has no length, or without a sampler is no iterable.
    """
    world = default_world()
    collectives = collectives_of(world)
    problem: Exception | None = None
    mine = torch.empty(0, dtype=torch.int64, device="cpu")
    length = None
    inner: Any = sampler if isinstance(sampler, Sampler) else getattr(sampler, "sampler", sampler)  # of a BatchSampler
    try:
        if sampler is not None:
            length = len(dataset)  # type: ignore[arg-type]
        mine = _samples(dataset, inner if isinstance(inner, Sampler) else sampler, key, length)
    except Exception as error:
        problem = error
    collectives.raise_together(problem, "could not go through its samples")
    _raise_if_ranks_disagree(collectives, inner, length)
    found = _compare(collectives, mine, length)
    num_allowed = 0
    if isinstance(inner, DistributedSampler) and length:
        num_allowed = (length if inner.drop_last else -length) % inner.num_replicas
    if found.num_missing + found.num_repeated > num_allowed:
        raise ValueError(
            f"{found}. The ranks must share one order out, with one seed: by torchring.data.Sampler(dataset) or "
            "DistributedSampler(dataset), and iterable datasets by torchring.data.shard(dataset)"
        )
    return found


def _samples(
    dataset: Any, sampler: Iterable[Any] | None, key: Callable[[Any], Any] | None, length: int | None
) -> torch.Tensor:
    """[N] int64, sorted: what this rank draws."""
    found = array.array("q")
    if sampler is None:
        found.extend(_hash(element if key is None else key(element)) for element in dataset)
    else:
        with torch.random.fork_rng(devices=[]):
            found.extend(map(operator.index, _drawn(sampler)))
    mine = torch.frombuffer(found, dtype=torch.int64).sort().values if found else torch.empty(0, dtype=torch.int64)
    if length is not None and len(mine) and not 0 <= mine[0] <= mine[-1] < length:
        wrong = int(mine[0] if mine[0] < 0 else mine[-1])
        raise ValueError(f"the sampler draws sample {wrong}, but the dataset has {length} samples")
    return mine


def _drawn(sampler: Any) -> Iterator[Any]:
    generator = getattr(sampler, "generator", None)
    before = None if generator is None else generator.get_state()
    sampler = copy.copy(sampler)
    if isinstance(sampler, Sampler):
        sampler._resume(sampler.epoch, 0)
        batches = (
            sampler if sampler.batch_sampler is not None else BatchSampler(sampler, sampler._own_batch_size or 1, False)
        )
        for batch in batches:
            yield from batch[: sampler.weight()]
    else:
        for each in sampler:
            yield from each if isinstance(each, list | tuple) else (each,)
    if generator is not None:
        generator.set_state(before)


def _hash(element: Any) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves(element):
        if isinstance(leaf, torch.Tensor):
            digest.update(f"{leaf.dtype} {leaf.shape}".encode())
            digest.update(memoryview(bytes_of(leaf.detach().cpu().contiguous()).numpy()))  # type: ignore[arg-type]
        else:
            digest.update(pickle.dumps(leaf))
    return int.from_bytes(digest.digest(), "little", signed=True)


def _raise_if_ranks_disagree(collectives: Collectives, sampler: Any, length: int | None) -> None:
    mine = {"length of the dataset": str(length)}
    for name in _SHOULD_AGREE:
        mine[name] = str(getattr(sampler, name, getattr(sampler, f"_{name}", None)))
    everybody = [json.loads(each) for each in collectives.all_gather_bytes(json.dumps(mine).encode())]
    for name in mine:
        for rank, theirs in enumerate(everybody):
            if theirs[name] != everybody[0][name]:
                raise ValueError(
                    f"the {name} is {everybody[0][name]} on rank 0, but {theirs[name]} on rank {rank}: the ranks share "
                    "one order out, so give all of them the same"
                )


def _compare(collectives: Collectives, mine: torch.Tensor, length: int | None) -> Coverage:
    """Compare the ranks' samples, range by range of their numbers, so that a rank can hold those of all ranks."""
    counts = [int(each) for each in collectives.all_gather(torch.tensor([len(mine)], device="cpu"))]
    lowest, highest = (-(2**63), 2**63) if length is None else (0, length)
    num_ranges = max(1, -(-max(sum(counts), length or 0) // _AT_ONCE))
    edges = [lowest + (highest - lowest) * n // num_ranges for n in range(num_ranges + 1)]
    cuts = [0, *torch.searchsorted(mine, torch.tensor(edges[1:-1], dtype=torch.int64)).tolist(), len(mine)]
    numbers = [0, 0, 0]
    missing: list[int] = []
    repeated: list[int] = []
    shared: list[tuple[int, tuple[int, ...]]] = []
    for (low, high), (begin, end) in zip(itertools.pairwise(edges), itertools.pairwise(cuts), strict=True):
        ranks = collectives.all_gather(mine[begin:end])
        values, times = torch.unique(torch.cat(ranks), return_counts=True)
        on_ranks, num_ranks = torch.unique(torch.cat([torch.unique(each) for each in ranks]), return_counts=True)
        is_missing = torch.ones(0 if length is None else high - low, dtype=torch.bool)
        if length is not None:
            is_missing[values - low] = False
        found = (is_missing.nonzero().flatten() + low, values[times > 1], on_ranks[num_ranks > 1])
        numbers = [number + len(each) for number, each in zip(numbers, found, strict=True)]
        first = [each[:_NUM_EXAMPLES].tolist() for each in found]
        missing += first[0]
        repeated += first[1]
        shared += [(s, tuple(rank for rank, theirs in enumerate(ranks) if (theirs == s).any())) for s in first[2]]
    examples = tuple(missing[:_NUM_EXAMPLES]), tuple(repeated[:_NUM_EXAMPLES]), tuple(shared[:_NUM_EXAMPLES])
    return Coverage(length, sum(counts), numbers[0], numbers[1], numbers[2], *examples)


def _some(found: Iterable[object]) -> str:
    return ", ".join(map(str, found))
