"""Who draws from a sampler, and what a `DataLoader` hands to the training loop.

A sampler is not told who iterates over it: a DataLoader and a BatchSampler call iter() without an argument, and
register themselves nowhere. The batch size, `drop_last` and the DataLoader's iterator stand in their frames only. The
public way would be a DataLoader of torchring's own, in place of the script's.
"""

from __future__ import annotations

import itertools
import re
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, SimpleNamespace
from typing import Any, Final

from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

_MAX_FRAMES: Final = 16  # from a sampler's __iter__ to the training loop
_LOADERS: Final = re.compile(r"(torch|torchdata|accelerate|torchring)\.")  # in their frames, a DataLoader iterates


@dataclass
class Asking:
    """Who has called `__iter__` or `__len__` of a sampler.

    Attributes:
        batches: the `BatchSampler` that draws from the sampler, or one that looks like it.
        loader: the iterator of a `DataLoader` that asks; it has not fetched anything yet.
        num_skipped: number of batches that are drawn first and handed to nobody, as after Accelerate's
            `skip_first_batches`.
        num_forwarded: the same for torchdata's `StatefulDataLoader`, which has been given a state.
        sharer: shares the batches out to processes, as Accelerate's `BatchSamplerShard`.
        adapter: Accelerate's `DataLoaderShard`, which takes one batch more than it has given to the loop.
        shares_again: what shares the samples out again: a `DistributedSampler`, such as Lightning puts around samplers,
            or Accelerate's `DataLoaderDispatcher`.
    """

    batches: Any = None
    loader: _BaseDataLoaderIter | None = None
    num_skipped: int = 0
    num_forwarded: int = 0
    sharer: Any = None
    adapter: Any = None
    shares_again: str = ""


def who_asks(sampler: object) -> Asking:
    """Look through the frames that have led to a method of `sampler`."""
    found = Asking()
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame is None or (found.loader is not None and not _LOADERS.match(frame.f_globals.get("__name__", ""))):
            break  # the script's: to look at its variables would keep them alive
        each = frame.f_locals["self"] if frame.f_code.co_varnames[:1] == ("self",) else None
        frame = frame.f_back
        known = getattr(each, "__dict__", {})
        if each is sampler:
            continue
        if found.batches is None and known.get("sampler") is sampler and isinstance(known.get("batch_size"), int):
            found.batches = each
        elif isinstance(each, _BaseDataLoaderIter) and found.loader is None:
            found.loader = each
        elif found.loader is None and isinstance(each, DataLoader):
            break  # for its length; above is the script
        elif found.loader is None and "batch_sampler" in known:
            found.num_skipped += known.get("skip_batches", 0)
            if known.get("num_processes", 1) > 1:
                found.sharer = each
        elif isinstance(each, DistributedSampler) and getattr(each, "num_replicas", 2) > 1:
            found.shares_again = type(each).__name__
        elif "base_dataloader" in known:
            found.adapter = each
            found.shares_again = "DataLoaderDispatcher" if "split_batches" in known else found.shares_again
    if found.loader is not None and found.batches is not None and not hasattr(found.batches, "load_state_dict"):
        found.num_forwarded = vars(found.loader).get("_sampler_iter_yielded", 0)
    return found


def watch(loader: _BaseDataLoaderIter, hand_out: Callable[[int, object], object], end: Callable[[], object]) -> None:
    """Have an iterator of a `DataLoader` tell what it yields, and its number; and that there is nothing more.

    PyTorch has no public way to see that. If the iterator has no workers, it is about to fetch the first batch.
    """
    kind, watched, numbers = type(loader), weakref.ref(loader), itertools.count()
    fetcher = vars(loader).get("_dataset_fetcher")

    def next_data() -> object:
        this, number = watched(), next(numbers)
        try:
            data: object = kind._next_data(this)  # type: ignore[arg-type]
        except StopIteration:
            end()
            raise
        hand_out(number, data)
        return data

    def fetch(index: object) -> object:
        if (this := watched()) is not None:
            this._dataset_fetcher = fetcher  # type: ignore[attr-defined]
        number, data = next(numbers), fetcher.fetch(index)  # type: ignore[union-attr]
        hand_out(number, data)
        return data

    loader._next_data = next_data  # type: ignore[method-assign,assignment]
    if fetcher is not None:
        loader._dataset_fetcher = SimpleNamespace(fetch=fetch)  # type: ignore[attr-defined]


def watch_draws(loader: _BaseDataLoaderIter, before: Callable[[], object]) -> None:
    """Call `before` whenever the iterator of a `DataLoader` is about to draw the indices of another batch."""
    kind, watched = type(loader), weakref.ref(loader)

    def next_index() -> object:
        before()
        return kind._next_index(watched())  # type: ignore[arg-type,no-untyped-call]

    loader._next_index = next_index  # type: ignore[method-assign]
