"""A sampler that can stop anywhere: each sample of an epoch once, over any number of ranks."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Final, NamedTuple

import torch

from torchring.data.epoch import EpochSampler, Pass, batch_size_of, drawn, rank_and_size
from torchring.data.loader import Asking, watch, watch_draws

_AT_ONCE: Final = 4096  # samples that are Python numbers


class Sampler(EpochSampler):
    """Shares each epoch of a dataset out to the ranks, and can stop and go on anywhere, with any number of ranks.

        sampler = torchring.data.Sampler(dataset)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)
        for epoch in range(sampler.epoch, num_epochs):
            sampler.set_epoch(epoch)
            for batch in loader:
                ...
                optimizer.weigh(sampler.weight())  # the last batch of an epoch may be smaller, and not on all ranks
                loss.backward()
                ...

    The k-th batches of all ranks are the next samples of one order, which is the same for any number of ranks. All
    ranks draw the same number of batches, and each sample of an epoch is drawn once. Where fewer samples are left than
    there are ranks, the other ranks draw one of them again, which counts with weight 0.

    `state_dict()` is the same on all ranks: the epoch, the seed, and the number of samples that the ranks' loops have
    been handed. What workers of the `DataLoader` have drawn ahead is not in it. A loop that itself takes batches ahead
    of the one that it trains on is ahead by these, unless it is Accelerate's. torchdata's `StatefulDataLoader` saves
    the sampler with its own state; load either that or the sampler's.

    An iteration that ends is followed by the next epoch. One that is left early starts again, as it does after a look
    at the first batch by `next(iter(loader))`. `set_epoch(e)` begins any epoch; the one under way goes on, or starts
    again if it has ended. Right after `load_state_dict`, an epoch goes on, and yields nothing if its samples have all
    been used.

    No method communicates: `torchring.data.check` finds out whether ranks have the same seed and dataset. In an elastic
    job, use `torchring.elastic.Sampler`, which counts finished steps.

    Args:
        dataset: something with a length, which does not change.
        shuffle: shuffle, in an order that depends on `seed` and the epoch.
        seed: equal on all ranks. `load_state_dict` replaces it.
        batch_size: number of samples that a rank draws for a batch, where no `BatchSampler` draws from this sampler.
        batch_sampler: yields the batches of an epoch, such as batches of equal length, as lists of samples; the same on
            all ranks. Ranks take turns, and pass this sampler on: `DataLoader(dataset, batch_sampler=sampler)`. The
            order is that of `batch_sampler`, whatever `shuffle` says; its `set_epoch` is called if it has one.
        rank: this process. By default that of torchring when an iteration begins.
        size: number of processes that share the samples. By default that of torchring when an iteration begins.

    Raises:
        TypeError: the dataset has no length.
        ValueError: arguments that cannot be.
    """

    def __init__(
        self,
        dataset: Sized,
        shuffle: bool = True,
        seed: int = 0,
        *,
        batch_size: int | None = None,
        batch_sampler: Iterable[Sequence[Any]] | None = None,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        super().__init__(dataset, shuffle, seed, batch_size)
        if batch_sampler is not None and batch_size is not None:
            raise ValueError(f"the batch_sampler decides the batch size; leave out batch_size={batch_size}")
        self.batch_sampler = batch_sampler
        self._rank_and_size = rank_and_size(rank, size)
        self._batches: tuple[int, list[Sequence[Any]]] | None = None  # of the batch sampler: epoch, and its batches
        self._newest: _Draws | None = None  # the newest iteration that has begun; None: the next one goes on at _start

    @property
    def position(self) -> int:
        """Number of samples of the epoch that the loops of all ranks together have been handed.

        Raises:
            ValueError: a batch sampler holds samples back, so those that were handed out are not the first ones.
        """
        return self._start if self._newest is None else self._newest.position()

    def set_epoch(self, epoch: int) -> None:
        """The next iteration belongs to this epoch: see the class. A batch sampler is told, too."""
        if epoch != self._epoch or (self._newest is not None and self._newest.is_over):
            self._resume(epoch, 0)

    def weight(self) -> int:
        """Number of samples that count in the batch that the loop has been handed last, for `optimizer.weigh`.

        It is the length of the batch, or 0 for a sample that another rank has, too.

        Raises:
            ValueError: the loop has no batch, or Accelerate shares the batches out, which repeats some.
        """
        if self._newest is None:
            raise ValueError("weight() is that of a batch, and no batch has been handed out")
        return self._newest.weight()

    def __iter__(self) -> Iterator[Any]:
        # No generator function: it would run after the BatchSampler has asked, in another frame.
        return _Draws(self, self._ask())

    def __len__(self) -> int:
        """Number of samples (with a `batch_sampler`: batches) that this rank draws in the iteration under way, or next.

        Raises:
            ValueError: as `__iter__`.
        """
        if (newest := self._newest) is not None and not newest.plan.share.is_exhausted:
            return newest.plan.share.num_samples
        return self._plan(self._ask(), *self._next()).share.num_samples

    def _resume(self, epoch: int, position: int) -> None:
        self._epoch, self._start, self._newest = epoch, position, None

    def _next(self) -> tuple[int, int]:
        """Epoch and position at which the next iteration begins."""
        is_over = self._newest is not None and self._newest.is_over
        return (self._epoch + 1, 0) if is_over else (self._epoch, self._start)

    def _plan(self, asking: Asking, epoch: int, start: int) -> _Plan:
        batch_size = batch_size_of(asking, self._own_batch_size)
        offsets: Sequence[int]
        if self.batch_sampler is None:
            if batch_size is None:
                raise ValueError(
                    "the batch size is not known: pass a number to DataLoader(batch_size=...), set "
                    "Sampler(batch_size=...), or give the batch sampler to Sampler(dataset, batch_sampler=...)"
                )
            offsets = range(self._length + 1)
        else:
            if batch_size is not None:
                raise ValueError("a Sampler with a batch_sampler yields batches: DataLoader(batch_sampler=sampler)")
            batch_size = 1
            offsets = [0, *itertools.accumulate(map(len, self._order(epoch)))]
        first = bisect.bisect_left(offsets, start)
        if first == len(offsets) or offsets[first] != start:
            raise ValueError(
                f"no batch begins after {start} samples of epoch {epoch}, where the sampler is to go on: its "
                "batch_sampler must yield the batches that it had when the state was saved"
            )
        rank, size = self._rank_and_size() if asking.sharer is None else (0, 1)
        return _Plan(offsets, Pass(first, len(offsets) - 1, rank, size, batch_size * size))

    def _order(self, epoch: int) -> Sequence[Any] | torch.Tensor:
        if self.batch_sampler is None:
            return super()._order(epoch)
        if self._batches is None or self._batches[0] != epoch:
            if (set_epoch := getattr(self.batch_sampler, "set_epoch", None)) is not None:
                set_epoch(epoch)
            self._batches = epoch, list(self.batch_sampler)
        return self._batches[1]


class _Plan(NamedTuple):
    """What an iteration draws.

    Attributes:
        offsets: number of samples that stand before each element of the order, and the number of all.
        share: which elements this rank draws.
    """

    offsets: Sequence[int]
    share: Pass


class _Draws(Iterator[Any]):
    """One iteration of a sampler. It begins with its first sample, so `set_epoch` may be called before.

    What the sampler draws for a DataLoader, the loop gets later. All counts are of this rank, in samples (with a batch
    sampler, in batches).
    """

    def __init__(self, sampler: Sampler, asking: Asking) -> None:
        self._sampler = sampler
        self._asking = dataclasses.replace(asking, loader=None, adapter=None)  # their workers should end in time
        self._has_loader, self._looks_ahead = asking.loader is not None, asking.adapter is not None
        self._has_workers = getattr(asking.loader, "_num_workers", 0) > 0
        self._plan: _Plan | None = None  # None before it begins
        self._drawing: Iterator[Any] = iter(())
        self._num_drawn = 0
        self._num_asked = 0  # batches of the DataLoader that have been drawn
        self._num_handed = 0  # and that it has handed out
        self._holds_back = False
        self._stride = 1 if asking.batches is None else int(asking.batches.batch_size)  # drawn for each batch
        if asking.sharer is not None and not asking.sharer.split_batches:
            self._stride *= asking.sharer.num_processes
        if asking.loader is not None:
            watch(asking.loader, self._hand_out, self._end)
            watch_draws(asking.loader, self._before_draw)

    @property
    def plan(self) -> _Plan:
        """Raises ValueError: the iteration has not begun."""
        assert self._plan is not None
        return self._plan

    def __next__(self) -> Any:
        if self._plan is None:
            self._begin(*self._sampler._next())
        drawn = next(self._drawing)
        self._num_drawn += 1
        return drawn

    def state_dict(self) -> dict[str, int | bool]:
        """The state with all that has been drawn. torchdata's loader keeps it for the batch that was drawn last."""
        if self._plan is None:
            return self._sampler._state(*self._sampler._next())
        return self._sampler._state(self._epoch, self._position(self._num_drawn))

    def load_state_dict(self, state_dict: Mapping[str, int | bool]) -> None:
        """Go on where `state_dict` says."""
        self._sampler.load_state_dict(state_dict)
        self._begin(*self._sampler._next())

    @property
    def num_taken(self) -> int:
        """What the loop has been handed."""
        share = self.plan.share
        if not self._has_loader:
            return self._num_drawn
        if share.is_exhausted:
            return share.num_samples
        num_batches = self._num_handed - self._looks_ahead
        return self._num_drawn_for(num_batches) if num_batches > 0 else 0

    @property
    def is_over(self) -> bool:
        """The loop has been handed the whole epoch."""
        return self._position(self.num_taken) == self.plan.offsets[-1]

    def position(self) -> int:
        """Number of samples of the epoch that all ranks' loops have been handed, if ranks go on alike."""
        if self._holds_back and not self.plan.share.is_exhausted:
            raise ValueError(
                "the batch sampler holds samples back, or its batches differ in size: the samples that have been "
                "handed out are not the first ones of the epoch, and training could not go on from here. Give it to "
                "the sampler: Sampler(dataset, batch_sampler=...) and DataLoader(batch_sampler=sampler)"
            )
        return self._position(self.num_taken)

    def weight(self) -> int:
        share, num_taken = self.plan.share, self.num_taken
        if self._asking.sharer is not None:
            raise ValueError("Accelerate shares the batches out; weigh(len(batch)) says how many samples one has")
        if not num_taken:
            raise ValueError("weight() is that of a batch, and the iteration under way has handed out none")
        per_batch = share.unit // share.size
        batch = (num_taken - 1) // per_batch
        weight = share.weight(batch)
        if self._sampler.batch_sampler is None:
            return weight
        begin = share.share(batch).start
        return weight * (self.plan.offsets[begin + 1] - self.plan.offsets[begin])

    def _begin(self, epoch: int, start: int) -> None:
        sampler = self._sampler
        if self._asking.num_forwarded and start:
            raise ValueError(
                f"the sampler goes on after {start} samples, and its StatefulDataLoader leaves out another "
                f"{self._asking.num_forwarded} batches: load the state of one of them only"
            )
        self._plan = sampler._plan(self._asking, epoch, start)
        self._epoch = sampler._epoch = epoch
        sampler._start, sampler._newest = start, self
        self._drawing = self._draw()

    def _draw(self) -> Iterator[Any]:
        order, share = self._sampler._order(self._epoch), self.plan.share
        if not share.num_batches:
            return
        last = share.share(share.num_batches - 1)  # before it, all batches are full, so all shares are equal
        for positions in (range(share.start + share.rank, share.bounds(share.num_batches - 1)[0], share.size), last):
            for i in range(0, len(positions), _AT_ONCE):
                yield from drawn(order, positions[i : i + _AT_ONCE])

    def _position(self, num: int) -> int:
        """Number of samples at the front of the epoch, once each rank has `num`."""
        offsets, share = self.plan
        return offsets[-1 if num >= share.num_samples else min(share.start + num * share.size, share.length)]

    def _num_drawn_for(self, num_batches: int) -> int:
        asking = self._asking
        num_batches += asking.num_skipped + asking.num_forwarded
        return min(num_batches * self._stride, self.plan.share.num_samples)

    def _before_draw(self) -> None:
        if self._num_drawn:
            self._num_asked += 1
            self._check_drawn(self._num_asked)

    def _check_drawn(self, num_batches: int) -> None:
        self._holds_back |= self._num_drawn != self._num_drawn_for(num_batches)

    def _hand_out(self, number: int, _data: object) -> None:
        self._num_handed = number + 1
        if not self._has_workers:
            self._check_drawn(number + 1)

    def _end(self) -> None:
        if self._plan is not None:
            self.plan.share.is_exhausted = True
