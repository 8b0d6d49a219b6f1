"""Looks at what compression does to gradients, now and then, and ends it where it does too much.

Every 100th reduction sums up a sample of one bucket exactly, and compares: the norm of the error divided by the norm of
the exact mean, by class of parameters. The sample are up to 64 blocks of 256 elements of each class. All ranks compare
the same bits, so they decide alike.

On a fast network, compression may cost more time than it saves. So of ten early reductions, each second one is in full
precision. Where the others take longer, rank 0 says so.
"""

import logging
import math
import statistics
import time
import warnings
from typing import Final

import torch

from torchring.collectives.service import internal_collectives_of
from torchring.compression.codec import ROW, is_vector
from torchring.compression.schemes import COMPRESSED, CompressedBuckets
from torchring.gradients.bucket import Bucket
from torchring.gradients.contract import Setup
from torchring.gradients.reducer import Reducer
from torchring.gradients.reduction import Participant, Reduction

REDUCTIONS_BETWEEN_CHECKS: Final = 100
_FIRST: Final = 2  # buckets have been laid out anew by then
_MOST_ROWS: Final = 64  # of a class in a sample
TRIAL: Final = range(4, 14)  # the even ones are in full precision
_logger: Final = logging.getLogger("torchring")


class CompressionCheck(Participant):
    """Tells the all-reduce of one optimizer how to compress a reduction, and looks at its error."""

    def __init__(self, reducer: Reducer, setup: Setup) -> None:
        self._reducer = reducer
        self._max_error = setup.options.max_error
        self._is_over = False  # the error was too large
        modules = () if setup.model is None else setup.model.modules()
        weights = {id(m.weight) for m in modules if isinstance(m, (torch.nn.Embedding, torch.nn.EmbeddingBag))}
        self._embeddings = {name for parameter, name in setup.names.items() if id(parameter) in weights}
        self._begun = -1, 0.0  # the last reduction, and when it began
        self._seconds: tuple[list[float], list[float]] = [], []  # of steps in the trial: exact, compressed
        # Of the reduction that is looked at: the rows of each class, and this rank's gradients there
        self._rows: dict[str, list[int]] = {}
        self._bucket: Bucket
        self._sample: torch.Tensor | None = None

    def on_begin(self, current: Reduction) -> None:
        all_reduce = self._reducer.layout.all_reduce
        if not isinstance(all_reduce, CompressedBuckets):  # all ranks are on one host
            return
        transport, number = all_reduce.transport, current.number - all_reduce.scheme.num_exact
        # A share of all weights that grows would make what was kept too large, so nothing is kept with `weigh`.
        transport.weight = float(not (current.is_absent or current.mine["is_weighted"]))
        self._note_time(number)
        transport.is_exact = self._is_over or number < 0 or (number in TRIAL and number % 2 == 0)
        self._sample, all_reduce.sampled = None, None
        if transport.is_exact or number % REDUCTIONS_BETWEEN_CHECKS != _FIRST:
            return
        buckets = self._reducer.launcher.buckets
        if buckets := [each for each in buckets if each.plan.numel and each.plan.wire_dtype in COMPRESSED]:
            # By number: a rank begins a reduction twice, if a backward ends before a bucket has left.
            self._bucket = buckets[number // REDUCTIONS_BETWEEN_CHECKS % len(buckets)]
            self._rows = self._rows_of(self._bucket)
            places = [row for rows in self._rows.values() for row in rows]
            self._places = torch.tensor(places, device=self._bucket.wire.tensor.device)
            all_reduce.sampled, all_reduce.take = self._bucket.wire, self._take

    def _note_time(self, number: int) -> None:
        (before, began), self._begun = self._begun, (number, time.perf_counter())
        if before not in TRIAL or number != before + 1:
            return
        self._seconds[before % 2].append(self._begun[1] - began)
        if number == TRIAL.stop and all(self._seconds) and self._reducer.world.rank == 0:
            exact, compressed = (statistics.median(each) * 1e3 for each in self._seconds)
            if compressed > 1.05 * exact:
                text = "compression=%s does not pay here: a step takes %.0f ms with it, and %.0f ms in full precision"
                _logger.warning(text, self._reducer.options.compression, compressed, exact)

    def on_message(self, current: Reduction) -> None:
        if self._sample is None:
            return
        exact = internal_collectives_of(self._reducer.world).all_reduce(self._sample.cpu(), "sum")
        error, self._sample = self._look(self._bucket.wire.tensor).cpu() - exact, None
        lengths = [len(rows) for rows in self._rows.values()]
        parts = (torch.split(each, lengths) for each in (error, exact))
        for kind, wrong, right in zip(self._rows, *parts, strict=True):
            share = (wrong.norm() / right.norm()).item()
            if math.isfinite(share):
                self._reducer.compression_error[kind] = share
                if self._max_error is not None and share > self._max_error and not self._is_over:
                    self._end(kind, share)

    def _take(self, wire: torch.Tensor) -> None:
        self._sample = self._look(wire)

    def _look(self, wire: torch.Tensor) -> torch.Tensor:
        """The rows of the sample, in fp64: [rows, ROW]."""
        return wire.view(-1, ROW)[self._places].double()

    def _rows_of(self, bucket: Bucket) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for slot, name, parameter in zip(bucket.plan.slots, bucket.names, bucket.parameters, strict=True):
            kind = "embedding" if name in self._embeddings else "1-D" if is_vector(parameter.shape) else "matrix"
            found.setdefault(kind, []).extend(range(slot.offset // ROW, math.ceil((slot.offset + slot.numel) / ROW)))
        return {kind: rows[:: math.ceil(len(rows) / _MOST_ROWS)] for kind, rows in found.items() if rows}

    def _end(self, kind: str, share: float) -> None:
        self._is_over = True
        if self._reducer.world.rank == 0:
            text = f"compression={self._reducer.options.compression} changes the gradients of {kind} parameters by "
            text += f"{share:.3g} of their norm, more than max_error={self._max_error}: from now on all ranks send "
            text += "full precision"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
