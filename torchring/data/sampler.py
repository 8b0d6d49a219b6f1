"""A sampler that can stop anywhere: each sample of an epoch once, over any number of ranks, which may change."""

import itertools
import weakref
from collections.abc import Iterator, Mapping, Sized
from typing import Any, Final

import torch

from torchring.data.epoch import Pass, Place
from torchring.errors import GradientError
from torchring.gradients.weights import unequal_shares
from torchring.world import Group, World

_UNWEIGHED: Final = (
    "a backward() in a loop over a torchring.data.Sampler was not weighed. Ranks have unequal shares of its batches, "
    "and a plain mean over ranks would be wrong. Call optimizer.weigh(sampler.weight()) once for each batch of the "
    "loop, before its forward and backward. If that loop does not train, let it begin under torch.no_grad()"
)
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

    Without `batch_size` and `global_batch`, this is used as torch's `DistributedSampler`: `DataLoader(dataset,
    batch_size=32, sampler=sampler)`. It then yields samples, repeats some so that all ranks get equally many, and has
    no weights and no position within an epoch.

    No method communicates: `torchring.data.check` finds out whether ranks have the same seed and dataset.

    Args:
        dataset: something with a length, which does not change.
        shuffle: shuffle, in an order that depends on `seed` and the epoch.
        seed: equal on all ranks. `load_state_dict` replaces it.
        batch_size: number of samples of a batch of each rank. Stays the same if the number of ranks changes.
        global_batch: number of samples of all ranks' batches together, in place of `batch_size`. Shares differ by one
            at most, and change with the number of ranks.
        rank: this process. By default that of torchring when an iteration begins.
        size: number of ranks, with `rank`.
        group: the ranks that share the dataset, in place of `rank` and `size`: the group that `wrap` was given, where
            that is not all ranks.

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
        rank: int | None = None,
        size: int | None = None,
        group: Group | None = None,
    ) -> None:
        if batch_size is not None and global_batch is not None:
            raise ValueError("batch_size and global_batch both say what a batch is; leave out batch_size")
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
        self._dataset = dataset
        self._shuffle = shuffle
        self._seed = seed
        self._batch_size = batch_size
        self._global_batch = global_batch
        self._knows_batches = batch_size is not None or global_batch is not None
        self._place = Place(rank, size, group)

        # Where the next iteration begins, if none has begun since
        self._epoch = self._start = 0
        self._goes_on = False  # the next iteration belongs to the epoch under way, even at its end

        self._passes: list[Pass] = []  # the newest, and those whose loops are not over
        self._counts_steps = False  # for an `elastic.State`
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
            raise ValueError(
                f"how much of the epoch was used is not known: {_LINE if self._knows_batches else _NO_BATCHES}"
            )
        return current.position(current.num_asked)

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

    def count_steps(self) -> None:
        """The position is that of finished steps from now on. Called by `elastic.State`.

        Raises:
            ValueError: the sampler does not know what a batch is.
        """
        if not self._knows_batches:
            raise ValueError(_NO_BATCHES)
        self._counts_steps = True

    def record(self) -> None:
        """A finished step has used the batches whose weights were asked for. Called by `elastic.State` on all ranks.

        Raises:
            ValueError: no weight was asked for in the loop under way.
        """
        if (current := self._current()) is None:
            return
        if current.num_drawn and not current.num_asked and current.iterator() is not None:
            raise ValueError(f"a step was made in a loop over a sampler, and no batch was counted: {_LINE}")
        current.num_used = current.num_asked

    def share_out(self, rank: int, size: int) -> None:
        """From the next iteration on, share out what no finished step has used. Called by `elastic.run`."""
        self._place = Place(rank, size)
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
        length = int(state_dict["length"])
        if length != self._length:
            raise ValueError(
                f"the sampler's state is of a dataset of {length} samples, but this one has {self._length}; to train "
                "on another dataset, begin with a new sampler"
            )
        self._seed = int(state_dict["seed"])
        self._shuffle = bool(state_dict["shuffle"])
        self._resume(int(state_dict["epoch"]), int(state_dict["position"]))

    def __iter__(self) -> Iterator[Any]:
        return _Draws(self)

    def __len__(self) -> int:
        """Number of batches, or else samples, that this rank draws in the iteration under way, or in the next one."""
        current = self._current()
        if current is None or current.iterator() is None:
            current = self._plan(*self._next())
        num_batches = current.num_batches
        return num_batches if self._knows_batches else sum(len(current.share(batch)) for batch in range(num_batches))

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
        rank, size = self._place()
        return Pass(epoch, self._length, position, rank, size, self._global_batch or (self._batch_size or 1) * size)

    def _draw(self, current: Pass) -> Iterator[list[int]]:
        if (length := len(self._dataset)) != self._length:
            raise ValueError(
                f"the dataset had {self._length} samples when its sampler was made, but has {length} in epoch "
                f"{current.epoch}; make a new sampler for the changed dataset"
            )
        order = torch.arange(length, device="cpu")
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + current.epoch)
            order = torch.randperm(length, generator=generator, device="cpu")
        for batch in range(current.num_batches):
            own = current.share(batch)
            current.num_drawn = batch + 1
            yield order[own.start : own.stop : own.step].tolist()
        current.is_exhausted = True

    def _state(self, epoch: int, position: int) -> dict[str, int | bool]:
        own: dict[str, int | bool] = {"seed": self._seed, "shuffle": self._shuffle, "length": self._length}
        return {"epoch": epoch, "position": position, **own}


class _Draws(Iterator[Any]):
    """One iteration of a sampler. It begins with its first batch, so `set_epoch` may be called before."""

    def __init__(self, sampler: Sampler) -> None:
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

    def refuse_unweighed(self, world: World) -> None:
        """A backward of `world` begins without a weight. Raise GradientError if its ranks have unequal shares here."""
        if self._pass is None:
            return
        ranks, size = world.ranks, self._pass.size
        group = self._sampler._place.group
        sharing = group[0] if group else ranks if size == world.size else range(size if size == world.outer.size else 0)
        if {*ranks} <= {*sharing} and not self._pass.has_equal_shares(map(sharing.index, ranks)):
            raise world.note_members(GradientError(_UNWEIGHED, rank=world.rank))

    def _begin(self) -> None:
        sampler = self._sampler
        self._pass = current = sampler._plan(*sampler._next())
        current.iterator = weakref.ref(self)
        sampler._goes_on = False
        sampler._passes.append(current)
        if sampler._knows_batches and torch.is_grad_enabled() and not current.has_equal_shares(range(current.size)):
            unequal_shares.add(self)
        batches = sampler._draw(current)
        self._drawing = batches if sampler._knows_batches else itertools.chain.from_iterable(batches)
