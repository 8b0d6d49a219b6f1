"""A sampler that can stop anywhere: each sample of an epoch once, over any number of ranks, which may change."""

from __future__ import annotations

import bisect
import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Final

import torch

from torchring.data.epoch import Pass, rank_and_size, share_of
from torchring.gradients.weights import unequal_shares

_LINE: Final = (
    "call optimizer.weigh(sampler.weight()) once for each batch of the loop, before its forward and backward: it makes "
    "the mean one over samples, and counts the batch"
)
_NO_BATCHES: Final = (
    "the DataLoader makes the batches, so the sampler does not know them: use DataLoader(dataset, "
    "batch_sampler=torchring.data.Sampler(dataset, batch_size=n))"
)


class Sampler(torch.utils.data.Sampler[Any]):
    """Shares each epoch of a dataset out to the ranks, and can stop and go on anywhere, with any number of ranks.

        sampler = torchring.data.Sampler(dataset, batch_size=32)
        loader = DataLoader(dataset, batch_sampler=sampler)
        for epoch in range(sampler.epoch, num_epochs):
            sampler.set_epoch(epoch)
            for batch in loader:
                optimizer.weigh(sampler.weight())  # once for each batch
                loss = ...
                loss.backward()
                ...

    The k-th batches of all ranks are a global batch: the next samples of one order, which is the same for any number of
    ranks. All ranks draw the same number of batches, and each sample of an epoch is drawn once. Where a global batch
    has fewer samples than there are ranks, the other ranks draw one of them again, which counts with weight 0. Where
    ranks have unequal shares, a backward that is not weighed raises GradientError. Iterations that begin under
    `torch.no_grad()` are taken to be evaluation, and need no weights.

    The sampler counts the batches whose weight was asked for; in an `elastic.State`, those of them that finished steps
    have used. An iteration that is left early is followed by one over the rest of its epoch, and one that has ended by
    the next epoch. After `load_state_dict`, after a change of ranks and after `set_epoch(e)` for the epoch under way,
    an iteration yields nothing if its samples have all been used. An iteration in which no weight was asked for was a
    look: the next one begins where it began, or with the next epoch if the look drew the whole epoch.

    Without `batch_size`, `global_batch` and `batch_sampler`, this is used as torch's `DistributedSampler`:
    `DataLoader(dataset, batch_size=32, sampler=sampler)`. It then yields samples, repeats some so that all ranks get
    equally many, and has no weights and no position within an epoch. In an `elastic.State` with a global batch, it has.

    No method communicates: `torchring.data.check` finds out whether ranks have the same seed and dataset.

    Args:
        dataset: something with a length, which does not change.
        shuffle: shuffle, in an order that depends on `seed` and the epoch.
        seed: equal on all ranks. `load_state_dict` replaces it.
        batch_size: number of samples of a batch of each rank. Stays the same if the number of ranks changes.
        global_batch: number of samples of all ranks' batches together, in place of `batch_size`. Shares differ by one
            at most, and change with the number of ranks.
        batch_sampler: yields the batches of an epoch, such as batches of equal length, as lists of samples; the same on
            all ranks. Ranks take turns. The order is that of `batch_sampler`, whatever `shuffle` says; its `set_epoch`
            is called if it has one.
        rank: this process. By default that of torchring when an iteration begins.
        size: number of ranks, with `rank`.

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
        global_batch: int | None = None,
        batch_sampler: Iterable[Sequence[Any]] | None = None,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        sizes = {"batch_size": batch_size, "global_batch": global_batch, "batch_sampler": batch_sampler}
        given = [name for name, value in sizes.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} both say what a batch is; leave out {given[0]}")
        for name, number in (("batch_size", batch_size), ("global_batch", global_batch)):
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        try:
            self._length = len(dataset)
        except TypeError as error:
            raise TypeError(
                f"a sampler needs a dataset with a length, got {type(dataset).__name__}; for an iterable dataset, use "
                "torchring.data.shard(dataset)"
            ) from error
        self.batch_sampler = batch_sampler
        self._dataset = dataset
        self._shuffle = shuffle
        self._seed = seed
        self._batch_size = batch_size
        self._global_batch = global_batch
        self._yields_batches = bool(given)
        self._place = rank_and_size(rank, size)
        self._batches: tuple[int, list[Sequence[Any]]] | None = None  # of the batch sampler: epoch, and its batches

        # Where the next iteration begins, if none has begun since
        self._epoch = self._start = 0
        self._goes_on = False  # the next iteration belongs to the epoch under way, even at its end

        self._passes: list[Pass] = []  # the newest, and those whose loops are not over
        self._counts_steps = False  # `record` is called
        self._is_counted = False  # the loop asks for weights, or its DataLoader saves the position

    @property
    def epoch(self) -> int:
        """The epoch under way, from 0."""
        current = self._current()
        return self._epoch if current is None else current.epoch

    @property
    def position(self) -> int:
        """Number of samples of the epoch that have been used, on all ranks together.

        Raises:
            ValueError: batches were drawn, and no weight was asked for, so it is not known how many were used.
        """
        current = self._current()
        if current is None:
            return self._start
        if self._counts_steps:
            return current.position(current.num_used)
        if current.num_drawn and not current.num_asked and not self._is_counted:
            raise ValueError(f"how much of the epoch was used is not known: {self._way_out()}")
        return current.position(current.num_asked)

    @property
    def batch_size(self) -> int:
        """Number of samples of this rank's batches. The last batch of an epoch may be smaller.

        Raises:
            ValueError: there is neither a global batch nor a `batch_size`.
        """
        if self._global_batch is not None:
            return share_of(self._global_batch, *self._place())
        if self._batch_size is None:
            raise ValueError("the batch size is not known: set Sampler(batch_size=...) or Sampler(global_batch=...)")
        return self._batch_size

    def set_epoch(self, epoch: int) -> None:
        """The next iteration belongs to this epoch. The one under way goes on; any other starts from the front."""
        if epoch == self.epoch:
            self._goes_on = True
        else:
            self._resume(epoch, 0)

    def weight(self) -> int:
        """Number of samples that count in the loop's next batch, for `optimizer.weigh`: 0 for a sample drawn again.

        Call this once for each batch of the loop, those that are left out included: it counts the batch as used.

        Raises:
            ValueError: that batch has not been drawn, or one before it was left out; or a `DataLoader` makes the
                batches.
        """
        current = self._current()
        if not self._knows_batches:
            raise ValueError(_NO_BATCHES)
        if current is None:
            raise ValueError("weight() is that of a batch, and the sampler has drawn none: call it in the loop")
        number = current.num_asked
        if number >= current.num_drawn:
            raise ValueError(
                f"weight() was asked for batch {number}, counted from 0, of an iteration that has drawn "
                f"{current.num_drawn}: call it once for each batch, in the loop over the DataLoader"
            )
        num_ahead = current.num_drawn - number  # of a DataLoader with workers, or of a loop, the same all the time
        current.num_ahead = current.num_ahead or num_ahead
        if num_ahead > current.num_ahead:
            raise ValueError(
                f"weight() was asked for batch {number}, counted from 0, but the loop has taken a later one: ask for "
                "the weight of each batch, also of one that is left out"
            )
        current.num_asked += 1
        if (draws := current.iterator()) is not None and current.num_asked == current.num_batches:
            unequal_shares.discard(draws)  # workers that stay keep the iterator
        self._is_counted = True
        return current.weight(number)

    def count_steps(self, global_batch: int | None) -> None:
        """Count finished steps, with this global batch if the sampler has none. Called by `elastic.State`.

        Raises:
            ValueError: nothing says what a batch is, or two things do.
        """
        if global_batch is not None and self._yields_batches and self._global_batch != global_batch:
            raise ValueError(
                f"the State has global_batch={global_batch}, and its sampler says something else of a batch; leave out "
                "the State's"
            )
        self._global_batch = global_batch or self._global_batch
        if not self._knows_batches:
            raise ValueError(_NO_BATCHES)
        self._counts_steps = True

    def record(self) -> None:
        """A finished step has used the batches whose weights were asked for. Called by `elastic.State` on all ranks.

        Raises:
            ValueError: no weight was asked for in the loop under way.
        """
        self._counts_steps = True
        if (current := self._current()) is None:
            return
        if current.num_drawn and not current.num_asked and current.iterator() is not None:
            raise ValueError(f"a step was made in a loop over a sampler, and no batch was counted: {self._way_out()}")
        current.num_used = current.num_asked

    def share_out(self, rank: int, size: int) -> None:
        """From the next iteration on, share out what no finished step has used. Called by `elastic.run`."""
        self._place = rank_and_size(rank, size)
        self._resume(self.epoch, self.position)

    def state_dict(self) -> dict[str, int | bool]:
        """The position in the epoch, for a checkpoint. Holds no tensor, and nothing that depends on rank or size.

        Raises:
            ValueError: see `position`.
        """
        return self._state(self.epoch, self.position)

    def load_state_dict(self, state_dict: Mapping[str, int | bool]) -> None:
        """Go on where `state_dict` says, from the next iteration on, in its order: seed and `shuffle` are its.

        Raises:
            ValueError: the state is of a dataset of another length.
        """
        length, position = int(state_dict["length"]), int(state_dict["position"])
        if length != self._length:
            raise ValueError(
                f"the sampler's state is of a dataset of {length} samples, but this one has {self._length}; to train "
                "on another dataset, begin with a new sampler"
            )
        if not 0 <= position <= length:
            raise ValueError(f"the sampler's state says that {position} of {length} samples have been used")
        self._seed = int(state_dict["seed"])
        self._shuffle = bool(state_dict["shuffle"])
        self._resume(int(state_dict["epoch"]), position)

    def __iter__(self) -> Iterator[Any]:
        return _Draws(self)

    def __len__(self) -> int:
        """Number of batches, or else samples, that this rank draws in the iteration under way, or in the next one.

        Raises:
            ValueError: see `load_state_dict`, with a `batch_sampler`.
        """
        current = self._current()
        if current is None or current.iterator() is None:
            current = self._plan(*self._next())
        num_batches = current.num_batches
        if self._yields_batches or not num_batches:
            return num_batches
        return (num_batches - 1) * len(current.share(0)) + len(current.share(num_batches - 1))

    @property
    def _knows_batches(self) -> bool:
        return self._yields_batches or self._global_batch is not None

    def _way_out(self) -> str:
        return _LINE if self._knows_batches else _NO_BATCHES

    def _current(self) -> Pass | None:
        """The newest iteration whose loop is not over, or else the newest. A look may come inside a loop."""
        self._passes = [each for each in self._passes if each.is_under_way()] or self._passes[-1:]
        return self._passes[-1] if self._passes else None

    def _resume(self, epoch: int, position: int) -> None:
        self._epoch, self._start, self._passes, self._goes_on = epoch, position, [], True

    def _next(self) -> tuple[int, int]:
        """Epoch and position at which the next iteration begins."""
        current = self._current()
        if current is None:
            epoch, start, is_over = self._epoch, self._start, self._start == self._length
        else:
            start, is_over = current.position(0), current.is_exhausted and not self._counts_steps
            if current.num_asked or not current.num_batches:
                is_over = current.num_asked == current.num_batches
                start = self._length if is_over else self.position
            epoch = current.epoch
        return (epoch + 1, 0) if is_over and not self._goes_on else (epoch, start)

    def _plan(self, epoch: int, position: int) -> Pass:
        offsets: Sequence[int] = range(self._length + 1)
        if self.batch_sampler is not None:
            offsets = [0, *itertools.accumulate(map(len, self._order(epoch)))]
        first = bisect.bisect_left(offsets, position)
        if first == len(offsets) or offsets[first] != position:
            raise ValueError(
                f"no batch begins after {position} samples of epoch {epoch}, where the sampler is to go on: its "
                "batch_sampler must yield the batches that it had when the state was saved"
            )
        rank, size = self._place()
        unit = self._global_batch or (self._batch_size or 1) * size
        return Pass(epoch, offsets, first, rank, size, unit)

    def _begin(self, draws: _Draws) -> Pass:
        current = self._plan(*self._next())
        current.iterator = weakref.ref(draws)
        self._goes_on = False
        self._passes.append(current)
        if self._knows_batches and torch.is_grad_enabled() and not current.has_equal_shares():
            draws.size = current.size
            unequal_shares.add(draws)
        return current

    def _draw(self, current: Pass) -> Iterator[Any]:
        order = self._order(current.epoch)
        for batch in range(current.num_batches):
            own = current.share(batch)
            part = order[own.start : own.stop : own.step]
            elements = part.tolist() if isinstance(part, torch.Tensor) else list(part)
            current.num_drawn = batch + 1
            if self.batch_sampler is not None or not self._yields_batches:
                yield from elements
            else:
                yield elements
        current.is_exhausted = True

    def _order(self, epoch: int) -> Sequence[Any] | torch.Tensor:
        """The samples of an epoch, or its batches.

        Raises:
            ValueError: the dataset has changed.
        """
        if (length := len(self._dataset)) != self._length:
            raise ValueError(
                f"the dataset had {self._length} samples when its sampler was made, but has {length} in epoch "
                f"{epoch}; make a new sampler for the changed dataset"
            )
        if self.batch_sampler is None:
            if not self._shuffle:
                return range(self._length)
            return torch.randperm(self._length, generator=torch.Generator().manual_seed(self._seed + epoch))
        if self._batches is None or self._batches[0] != epoch:
            if (set_epoch := getattr(self.batch_sampler, "set_epoch", None)) is not None:
                set_epoch(epoch)
            self._batches = epoch, list(self.batch_sampler)
        return self._batches[1]

    def _state(self, epoch: int, position: int) -> dict[str, int | bool]:
        own: dict[str, int | bool] = {"seed": self._seed, "shuffle": self._shuffle, "length": self._length}
        return {"epoch": epoch, "position": position, **own}


class _Draws(Iterator[Any]):
    """One iteration of a sampler. It begins with its first batch, so `set_epoch` may be called before.

    Attributes:
        size: number of ranks that have unequal shares; 0 if shares are equal.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.size = 0
        self._sampler = sampler
        self._pass: Pass | None = None
        self._drawing: Iterator[Any] = iter(())

    def __next__(self) -> Any:
        if self._pass is None:
            self._begin()
        return next(self._drawing)

    def state_dict(self) -> dict[str, int | bool]:
        """The state with all that has been drawn. torchdata's loader keeps it for the batch that was drawn last."""
        self._sampler._is_counted = True
        current = self._pass
        if current is None:
            return self._sampler._state(*self._sampler._next())
        return self._sampler._state(current.epoch, current.position(current.num_drawn))

    def load_state_dict(self, state_dict: Mapping[str, int | bool]) -> None:
        """Go on where `state_dict` says."""
        self._sampler.load_state_dict(state_dict)
        self._begin()

    def _begin(self) -> None:
        self._pass = self._sampler._begin(self)
        self._drawing = self._sampler._draw(self._pass)
