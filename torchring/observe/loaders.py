"""What to do about data that repeats, by the DataLoader that gave the last batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler


def remedy_for_equal_ranks(loader: DataLoader[Any] | None, rank: int, size: int) -> str:
    """What gives each rank other samples. Rank `rank` of `size` has those of another one."""
    if loader is not None and isinstance(dataset := loader.dataset, IterableDataset) and not _is_ours(dataset):
        own = "datasets.distributed.split_dataset_by_node(dataset, torchring.rank(), torchring.size())"
        also = f", or {own}" if type(dataset).__module__.startswith("datasets") else ""
        return f"Each rank reads the whole of {_name(dataset)}: pass torchring.data.shard(dataset) to DataLoader{also}"
    samplers = [] if loader is None or isinstance(loader.dataset, IterableDataset) else list(_samplers(loader))
    for sampler in samplers:
        if isinstance(sampler, DistributedSampler) and (sampler.rank, sampler.num_replicas) != (rank, size):
            return (
                f"A DistributedSampler was made for rank {sampler.rank} of {sampler.num_replicas}, and this is rank "
                f"{rank} of {size}: pass num_replicas=torchring.size(), rank=torchring.rank()"
            )
    if samplers and not any(isinstance(each, DistributedSampler) or _is_ours(each) for each in samplers):
        return (
            f"The {_name(samplers[0])} of a DataLoader draws the same samples on each rank: pass "
            "sampler=torchring.data.Sampler(dataset) or a DistributedSampler to DataLoader, without shuffle"
        )
    return (
        "Give each rank other samples, such as samples[torchring.rank() :: torchring.size()], or another seed: "
        "torch.manual_seed(seed + torchring.rank())"
    )


def remedy_for_equal_epochs(loader: DataLoader[Any] | None) -> str:
    """What gives each epoch another order. Empty if the loader does not shuffle by epochs: the order may be meant."""
    for each in () if loader is None else (*_samplers(loader), loader.dataset):
        shuffles = getattr(each, "shuffle", True) is not False and getattr(each, "_shuffling", each) is not None
        if hasattr(each, "set_epoch") and shuffles and not _is_ours(each):
            return f"Call set_epoch(epoch) of the {_name(each)} before each epoch"
    return ""


def remedy_for_equal_workers(loader: DataLoader[Any] | None) -> str:
    """What gives each worker of a loader other samples. Empty if the loader has no such workers."""
    if loader is None or not isinstance(loader.dataset, IterableDataset) or _is_ours(loader.dataset):
        return ""
    return (
        f"Each of the {loader.num_workers} workers of a DataLoader reads the whole of {_name(loader.dataset)}: "
        "pass torchring.data.shard(dataset), which gives each worker its part"
    )


def _samplers(loader: DataLoader[Any]) -> Iterator[Any]:
    """The samplers of a loader that chooses samples by index, a batch sampler of the script's own first."""
    outer: Any = loader.batch_sampler
    while outer is not None:
        if type(outer) is not BatchSampler:
            yield outer
        outer = getattr(outer, "sampler", None)
    if loader.batch_sampler is None:
        yield loader.sampler


def _is_ours(each: object) -> bool:
    return any(kind.__module__.startswith("torchring.") for kind in type(each).__mro__)


def _name(each: object) -> str:
    return type(each).__name__
