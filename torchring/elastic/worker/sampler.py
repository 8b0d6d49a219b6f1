"""A sampler for a number of ranks that changes: each sample of an epoch is used once, to the unit of a global batch.

An epoch is a permutation of the dataset, equal on all ranks. `position` samples at its beginning have been used by
finished steps. `torchring.data.epoch` says how ranks share the others out.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Final

from torch.utils._pytree import tree_leaves

from torchring.data.epoch import EpochSampler, Pass, batch_size_of, drawn, share_of
from torchring.data.loader import Asking, watch
from torchring.errors import GradientError

_NOT_FOLLOWED: Final = (
    "torchring cannot tell from which batch this loss is. The last batch of the epoch is smaller, so the ranks' shares "
    "of it have other weights. The loop has taken several batches before it used one, and the model's arguments are "
    "tensors of none of them, or of several. Take one batch at a time from the DataLoader, whose workers look ahead; "
    "or pass the model the DataLoader's own tensors; or say before each backward() how many samples of its batch "
    "count: optimizer.weigh(sampler.weight(number))"
)


@dataclass(eq=False)
class _Pass(Pass):
    """One iteration over what is left of an epoch.

    Attributes:
        num_used: number of global batches that finished steps have used. While a step is under way that began in the
            pass before, this is minus the number of its batches that came from there.
        is_drawn: all indices have been drawn.
        num_taken: number of batches that the loop has taken. Workers of a `DataLoader` may have drawn more.
        num_ahead: number of batches that the loop seems to hold that are not trained on yet.
    """

    num_used: int = 0
    is_drawn: bool = False
    num_taken: int = 0
    num_ahead: int = 0

    @property
    def position(self) -> int:
        return min(self.start + max(self.num_used, 0) * self.unit, self.length)

    @property
    def has_equal_batches(self) -> bool:
        return self.num_batches == 1 or (self.length - self.start) % self.unit == 0

    @property
    def has_equal_shares(self) -> bool:
        return self.num_batches == 0 or all(
            (end - begin) % self.size == 0 for begin, end in (self.bounds(0), self.bounds(self.num_batches - 1))
        )


class Sampler(EpochSampler):
    """Shares the samples that are left of an epoch out to the ranks that there are. Put it in `elastic.State`.

        sampler = torchring.elastic.Sampler(dataset)
        state = torchring.elastic.State(model=model, optimizer=optimizer, sampler=sampler, epoch=0)

        @torchring.elastic.run
        def train(state):
            loader = DataLoader(dataset, batch_size=32, sampler=sampler)
            for state.epoch in range(state.epoch, num_epochs):
                sampler.set_epoch(state.epoch)
                for batch in loader:
                    ...

    The k-th batches of all ranks are the k-th global batch. All ranks draw the same number of batches. The last global
    batch of an epoch may be smaller. Where fewer samples are left than there are ranks, the other ranks draw one of
    them again, which counts with weight 0. So the mean of the gradients, and an epoch, have each sample once.

    Only finished steps count. A sample that was drawn ahead by a `DataLoader` worker or by the loop, or for a step that
    was lost with a rank, is drawn again.

    Epochs: an iteration goes on at `position`. When all samples of the epoch have been used, the next iteration begins
    the next epoch. There is one exception: the first iteration after a change of ranks, after `load_state_dict` and
    after `set_epoch(e)` for the epoch under way belongs to that epoch, and yields nothing if all its samples have been
    used. So a training function that is called again at the end of an epoch does not train on the epoch twice. A script
    that calls `set_epoch` as above need not think about this.

    The batch size is that of the `DataLoader` (or `BatchSampler`) that draws from this sampler. Under
    `State(global_batch=n)`, pass `batch_size=sampler.batch_size` to the `DataLoader`, and make the `DataLoader` in the
    training function: the share changes with the ranks.

    No method communicates. The state is equal on all ranks if all take the same steps.

    Args:
        dataset: something with a length, which does not change.
        shuffle: shuffle, in an order that depends on `seed` and the epoch.
        seed: equal on all ranks. `load_state_dict` replaces it.
        batch_size: number of samples that a rank draws for a batch, where no `BatchSampler` draws from this sampler and
            there is no global batch.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0, *, batch_size: int | None = None) -> None:
        super().__init__(dataset, shuffle, seed, batch_size)
        self._rank, self._size = 0, 1
        self._global_batch: int | None = None
        self._pass: _Pass | None = None  # the newest one
        self._goes_on = False  # the next iteration belongs to the epoch under way, even at its end
        self._batches_per_step = 0  # of the newest step
        self._num_open = 0  # batches of the epoch before that belong to a step under way
        self._weighs: bool | None = None  # whether batches have weights; None before the first iteration
        self.on_batch: Callable[[], object] | None = None  # called when the loop gets a batch; of `State`

        # Which batch is trained on
        self._trained: tuple[_Pass, int] | None = None  # pass and number of the batch, as far as that is known
        self._is_certain = False
        self._source: object = None  # of the newest iteration's batches
        self._given: dict[int, tuple[weakref.ref[object], _Pass, int]] = {}  # by id: what the loop got, and its batch
        self._seen: tuple[_Pass, int] | None = None  # pass, and number of batches taken, when this was last looked at
        self._sees_forward = False  # since the last backward
        self._follows_forward = False  # a forward has been seen since ranks changed
        self._looks_ahead: bool | None = None  # whether the loop does; None: it may

    @property
    def position(self) -> int:
        """Number of samples of the epoch that finished steps have used, on all ranks together."""
        return self._start if self._pass is None else self._pass.position

    @property
    def batch_size(self) -> int:
        """Number of samples of this rank's batches. The last batch of an epoch may be smaller.

        Raises:
            ValueError: there is neither a global batch nor a `batch_size`.
        """
        if self._global_batch is not None:
            return share_of(self._global_batch, self._rank, self._size)
        if self._own_batch_size is None:
            raise ValueError(
                "the batch size is not known: pass a number to DataLoader(batch_size=...), or set "
                "Sampler(batch_size=...) or State(global_batch=...)"
            )
        return self._own_batch_size

    def set_epoch(self, epoch: int) -> None:
        """The next iteration belongs to this epoch. Nothing changes if it is under way; else it starts from the front.

        An epoch of which all samples have been used yields nothing.
        """
        if epoch == self._epoch:
            self._goes_on = True
        else:
            self._begin(epoch)

    def share_out(self, rank: int, size: int, global_batch: int | None = None) -> None:
        """Share out what is left to other ranks, from the next iteration on. What no finished step used is left.

        Called by `elastic.run` before the training function.

        Args:
            rank, size: this process and its world.
            global_batch: number of samples of all ranks' batches together. The shares differ by one at most. None if
                each rank has the same batch size.

        Raises:
            ValueError: no such rank, or no such global batch.
        """
        if not 0 <= rank < size:
            raise ValueError(f"rank must be in [0, {size}), got {rank}")
        if global_batch is not None and global_batch < 1:
            raise ValueError(f"global_batch must be at least 1, got {global_batch}")
        self._rank, self._size, self._global_batch = rank, size, global_batch
        self._resume(self._epoch, self.position)

    def record(self, num_batches: int = 1) -> None:
        """A finished step has used the next global batches. Called by `elastic.run` on all ranks.

        Args:
            num_batches: number of batches that each rank has drawn for the step.

        Raises:
            ValueError: the epoch has fewer batches left, or no batch has been drawn.
        """
        if num_batches < 0:
            raise ValueError(f"num_batches must not be negative, got {num_batches}")
        if self._pass is None:
            raise ValueError("a step was finished without a batch of the sampler: draw the batches of a step from it")
        left = self._pass.num_batches - self._pass.num_used
        if num_batches > left:
            raise ValueError(
                f"a step has used {num_batches} batches, but epoch {self._epoch} has only {left} left: each step must "
                "draw its batches from the sampler, and with accumulate=n an epoch needs n batches at least"
            )
        self._pass.num_used += num_batches
        self._batches_per_step = num_batches

    def record_step(self, num_batches: int) -> None:
        """A finished step has used the batch that is trained on, and those before it.

        Args:
            num_batches: for a step of which torchring cannot tell which batches it has used.
        """
        current = self._pass
        if current is None:
            return
        if not self._follows_forward:
            self._look()
        self._note_first()
        used = 0
        if self._trained is None:
            used = num_batches
        elif self._trained[0] is current:
            used = self._trained[1] + 1 - current.num_used
            if not self._is_certain:  # a batch that is not lost may come twice
                left = current.num_taken - current.num_used
                used = min(left, max(num_batches, left - current.num_ahead))
        self.record(max(0, used))

    # Which batch a loss is of

    def see_forward(self, inputs: object) -> None:
        """A model that trains is about to get these arguments."""
        if self._pass is not None and self._pass.num_taken:
            self._sees_forward = self._follows_forward = True
            self._look(inputs)

    def begin_backward(self, *, is_weighed: bool, is_skipped: bool) -> None:
        """A backward begins.

        Args:
            is_weighed: the script has said how many samples count.
            is_skipped: the script calls `skip()` in place of `backward()`, perhaps before any forward.

        Raises:
            GradientError: batches have different weights, and torchring cannot tell which of them the loss is of.
        """
        if not self._sees_forward:
            before, changed = self.current_weight(), self._look()
            if self._follows_forward and not is_skipped and changed and self.current_weight() != before:
                self._is_certain = False
        self._sees_forward = False
        self._note_first()
        if self._trained is None or not self._weighs or self._is_certain or is_weighed:
            return
        if not self._trained[0].has_equal_batches:
            raise GradientError(_NOT_FOLLOWED)

    def current_weight(self) -> tuple[float, float] | None:
        """The weight of the batch that is trained on, and the sum of the ranks' weights for it.

        The sum is the same for all batches, the smaller last one included: each is a mean over its samples. None if no
        weights are needed, or the loop has not got a batch.
        """
        if self._trained is None or not self._weighs:
            return None
        current, batch = self._trained
        begin, end = current.bounds(batch)
        unit = float(current.unit)
        return current.weight(batch) * (unit / (end - begin)), unit

    def _look(self, inputs: object = ()) -> bool:
        """Find out which batch is trained on: that of `inputs`, or else the newest. Returns whether some were taken."""
        current = self._pass
        if current is None or not current.num_taken:
            return False
        now = current, current.num_taken
        is_new, self._seen = now != self._seen, now
        if found := {batch for leaf in tree_leaves(inputs) if (batch := self._batch_of(leaf)) is not None}:
            self._trained = max(found, key=lambda batch: (batch[0] is current, batch[1]))
            self._is_certain = len(found) == 1
        elif is_new:
            self._trained = current, current.num_taken - 1
            self._is_certain = self._looks_ahead is False or current.num_taken == 1
            if not self._is_certain:
                current.num_ahead = current.num_ahead or current.num_taken - 1
        return is_new

    def _note_first(self) -> None:
        """A batch has been used. A loop that looks ahead would have taken another batch before it uses its first."""
        if self._seen is not None and self._seen[1] == 1 and self._seen[0].num_batches > 1:
            self._looks_ahead = False

    def _batch_of(self, leaf: object) -> tuple[_Pass, int] | None:
        for each in (leaf, getattr(leaf, "_base", None)):  # a view has a base
            given = self._given.get(id(each))
            if given is not None and given[0]() is each and given[2] >= 0:
                return given[1:]
        return None

    def _end(self) -> None:
        if self._pass is not None:
            self._pass.is_exhausted = True

    def _hand_out(self, source: object, number: int, data: object = None) -> None:
        """The loop gets a batch, or a sample of one."""
        current = self._pass
        if source is not self._source or current is None:
            return
        number = min(number, current.num_batches - 1)
        current.num_taken = number + 1
        self._given = {key: given for key, given in self._given.items() if given[0]() is not None}
        for leaf in tree_leaves(data):
            known = self._given.get(id(leaf))
            is_shared = known is not None and known[1] is current and known[2] != number  # by batches: shows nothing
            with contextlib.suppress(TypeError):  # a number has no weak references
                self._given[id(leaf)] = weakref.ref(leaf), current, -1 if is_shared else number
        if not self._follows_forward:
            self._trained = current, number
        if self.on_batch is not None:
            self.on_batch()

    @property
    def recorded(self) -> int:
        """Number of batches of the newest iteration that finished steps have used: `weight`'s number of the next batch.

        Below 0 while a step is under way for which the iteration before has supplied that many batches.
        """
        return 0 if self._pass is None else self._pass.num_used

    def weight(self, batch: int) -> int | None:
        """Number of samples of one of this rank's batches that count: all, or 0 for a sample that is drawn again.

        Args:
            batch: its number in the newest iteration, from 0.

        Returns:
            None if all ranks have equal shares in each batch until ranks change: then no weight is needed. So is the
            answer on all ranks.

        Raises:
            ValueError: there is no such batch.
        """
        if self._pass is None or not 0 <= batch < self._pass.num_batches:
            raise ValueError(f"there is no batch {batch} in the newest iteration")
        return self._pass.weight(batch) if self._weighs else None

    def __iter__(self) -> Iterator[int]:
        # No generator function: it would run after the BatchSampler has asked, in another frame.
        asking = self._ask()
        unit, loader = self._unit(asking), asking.loader
        self._source = source = object()
        if loader is not None:
            num_samples = 1 if asking.batches is not None else share_of(unit, self._rank, self._size)
            watch(loader, lambda number, data: self._hand_out(source, number // num_samples, data), self._end)
        return self._draw(unit, None if loader is not None else source)

    def __len__(self) -> int:
        """Number of samples that this rank draws in the newest iteration, or in the next one if none has begun.

        Raises:
            ValueError: as `__iter__`.
        """
        return self._new_pass(self._unit(self._ask())).num_samples

    def _resume(self, epoch: int, position: int) -> None:
        self._epoch = epoch
        self._start = position
        self._pass = None
        self._goes_on = True
        self._num_open = 0
        self._weighs = None
        self._source = self._trained = self._seen = None
        self._given = {}
        self._follows_forward = False

    def _begin(self, epoch: int) -> None:
        """Begin an epoch. A step may be under way that uses the last batches of the one before."""
        last = self._pass
        if last is not None and last.is_drawn:
            left = last.num_batches - last.num_used
            # More batches than a step has were not used but given up: the script has broken off its loop.
            self._num_open = left if left < self._batches_per_step else 0
        self._epoch = epoch
        self._start = 0
        self._pass = None

    def _draw(self, unit: int, source: object) -> Iterator[int]:
        last = self._pass
        # Batches of a step under way are all drawn. Otherwise the loop was left early, and goes on.
        is_over = self.position == self._length or (
            last is not None
            and (
                (last.is_exhausted and last.num_used > 0)
                or (last.is_drawn and last.num_batches - last.num_used < self._batches_per_step)
            )
        )
        if is_over and not self._goes_on:
            self._begin(self._epoch + 1)
        elif last is not None:
            self._num_open = max(0, -last.num_used)
            self._start = last.position
        self._goes_on = False
        current = self._pass = self._new_pass(unit)
        self._num_open = 0
        if self._weighs is None:  # decided for all that comes: a step may use batches of two iterations
            whole = _Pass(0, self._length, self._rank, self._size, unit)
            self._weighs = not (current.has_equal_shares and whole.has_equal_shares)
        order = self._order(self._epoch)
        for batch in range(current.num_batches):
            if source is not None:
                self._hand_out(source, batch)
            yield from drawn(order, current.share(batch))
        current.is_drawn = True

    def _new_pass(self, unit: int) -> _Pass:
        return _Pass(self._start, self._length, self._rank, self._size, unit, num_used=-self._num_open)

    def _unit(self, asking: Asking) -> int:
        """Number of samples of a global batch."""
        if self._global_batch is None:
            return (batch_size_of(asking, self._own_batch_size) or self.batch_size) * self._size
        batch_size = batch_size_of(asking)
        if batch_size not in (None, self.batch_size):
            raise ValueError(
                f"the DataLoader's batch_size is {batch_size}, but rank {self._rank} of {self._size} has "
                f"{self.batch_size} samples of a global batch of {self._global_batch}: make the DataLoader in the "
                "training function, with batch_size=sampler.batch_size"
            )
        return self._global_batch
