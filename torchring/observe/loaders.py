"""What to do about data that repeats, by the data loaders that this process uses. Looked up when there is an alarm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from torchring.gradients.module_wrappers import living


def remedy_for_equal_ranks(rank: int, size: int) -> str:
    """What gives each rank other samples. Rank `rank` of `size` has those of another one."""
    found = [_remedy_for(loader, rank, size) for loader in _loaders()]
    if any(not remedy for _, remedy in found):  # the training loader; another one may be for validation
        found = [each for each in found if each[0] < 2]
    return min(found, default=(0, ""))[1] or (
        "Give each rank other samples, such as samples[torchring.rank() :: torchring.size()], or another seed: "
        "torch.manual_seed(seed + torchring.rank())"
    )


def _remedy_for(loader: DataLoader[Any], rank: int, size: int) -> tuple[int, str]:
    """(how unlikely it is that this loader is the one, its remedy). No remedy if the loader seems to be right."""
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        own = "datasets.distributed.split_dataset_by_node(dataset, torchring.rank(), torchring.size())"
        also = f", or {own}" if type(dataset).__module__.startswith("datasets") else ""
        if _is_ours(dataset):
            return 4, ""
        return (
            1,
            f"Each rank reads the whole of {_name(dataset)}: pass torchring.data.shard(dataset) to DataLoader{also}",
        )
    samplers = list(_samplers(loader))
    for sampler in samplers:
        if isinstance(sampler, DistributedSampler) and (sampler.rank, sampler.num_replicas) != (rank, size):
            return 0, (
                f"A DistributedSampler was made for rank {sampler.rank} of {sampler.num_replicas}, and this is rank "
                f"{rank} of {size}: pass num_replicas=torchring.size(), rank=torchring.rank()"
            )
        if isinstance(sampler, DistributedSampler) or _is_ours(sampler):
            return 4, ""
    return 2 + isinstance(samplers[0], SequentialSampler), (  # which a loader for validation has
        f"The {_name(samplers[0])} of a DataLoader draws the same samples on each rank: pass "
        "sampler=torchring.data.Sampler(dataset) or a DistributedSampler to DataLoader, without shuffle"
    )


def remedy_for_equal_epochs() -> str:
    """What gives each epoch another order. Empty if no loader shuffles by epochs: then the order may be meant."""
    for loader in _loaders():
        for each in (*_samplers(loader), loader.dataset):
            shuffles = getattr(each, "shuffle", True) is not False and getattr(each, "_shuffling", each) is not None
            if hasattr(each, "set_epoch") and shuffles and not _is_ours(each):
                return f"Call set_epoch(epoch) of the {_name(each)} before each epoch"
    return ""


def remedy_for_equal_workers() -> str:
    """What gives each worker of a loader other samples. Empty if no loader has such workers."""
    for loader in _loaders():
        if isinstance(loader.dataset, IterableDataset) and loader.num_workers > 1 and not _is_ours(loader.dataset):
            return (
                f"Each of the {loader.num_workers} workers of a DataLoader reads the whole of {_name(loader.dataset)}: "
                "pass torchring.data.shard(dataset), which gives each worker its part"
            )
    return ""


def _loaders() -> list[DataLoader[Any]]:
    return living(DataLoader)


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
