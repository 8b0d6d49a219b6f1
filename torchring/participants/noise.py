"""The gradient noise scale: how large a batch still pays. Measured while gradients are reduced.

The gradient of a rank is that of b samples, and the mean of R ranks is that of R b. With S = tr(covariance of the
gradient of one sample), squared norms are on average |G|^2 + S / b and |G|^2 + S / (R b). Both unknowns follow, and the
noise scale is S / |G|^2. Below it, twice the batch takes nearly half the steps; far above it, hardly fewer.

Source: S. McCandlish et al., "An Empirical Model of Large-Batch Training", 2018 (arXiv 1812.06162), appendix A.1.

Every 16th reduction, and after 512 every 32nd, looks at one window of the parameters, of at most 4 tensors and 65,536
elements: at a rank's own gradient when autograd has computed it, and at the mean when it is there. What a
rank has found travels in the message of a later reduction, as a ratio to the norm of the mean, which all ranks
know. Windows take turns in an order that spreads over the model. S and |G|^2 are sums over windows of what each has
shown on average.

Example: two ranks with gradients [3, 1] and [1, 3] and mean [2, 2]. The squared norms are 10 and 8, so |G|^2 = 2 * 8 -
10 = 6, S / b = (10 - 8) * 2 = 4, and the noise scale is 4 / 6 of a rank's batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple, cast

import numpy as np
import torch

from torchring.accelerators import accelerator_of
from torchring.gradients.contract import Setup
from torchring.gradients.plan import ParameterSpec
from torchring.gradients.reducer import Reducer
from torchring.gradients.reduction import Participant, Reduction
from torchring.world import World

REDUCTIONS_BETWEEN_SAMPLES: Final = 16
_NUM_OFTEN: Final = 32  # samples; after them, twice as many reductions lie between two
_MOST_TENSORS: Final = 4
_MOST_ELEMENTS: Final = 65_536
_DEVICE_LAG: Final = 4  # reductions until the host reads what a device has found, without waiting for it
_LEAST_SHARE: Final = 0.1  # of the newest sample in the mean of a window: older ones are forgotten
_LEAST_SAMPLES: Final = 8
_MOST_RATIO: Final = 2.0**28


class Rows(NamedTuple):
    """Rows `start` to `stop` of a parameter, along its first dimension; all of a parameter without one."""

    parameter: int
    start: int
    stop: int


class _Sample(NamedTuple):
    """What this rank has found in a reduction, to be told to the others in that with number `due`.

    batch: samples of a rank, on average.
    factor: of this rank's squared norm, by how much its gradient counts in the mean.
    norms: [2, tensors], of this rank's gradient and of the result. From a device, a copy that is -1 until it has come.
    """

    window: int
    due: int
    batch: float
    factor: float
    norms: torch.Tensor | list[list[float]]

    def squares(self) -> tuple[float, float] | None:
        """Squared norms of this rank's gradient, as it counts, and of the result. None if the device is far behind."""
        norms: list[list[float]] = self.norms.tolist() if isinstance(self.norms, torch.Tensor) else self.norms
        own, result = (sum(norm * norm for norm in each) for each in norms)
        return None if any(norm < 0 for each in norms for norm in each) else (self.factor * own, result)


class NoiseScale(Participant):
    """Measures the noise scale of one optimizer's gradients.

    Args:
        world: has more than one rank.
        specs, parameters: those that are reduced; may grow.
        holds_result: whether a parameter has a gradient that was reduced before.
        is_sum: whether gradients are added up over ranks, and not averaged.

    Attributes:
        batch_size: samples of all ranks in a reduction, smoothed.
    """

    fields = ("has_norm", "norm_ratio")

    def __init__(
        self,
        world: World,
        specs: Sequence[ParameterSpec],
        parameters: Sequence[torch.nn.Parameter],
        holds_result: Callable[[int], bool],
        *,
        is_sum: bool,
    ) -> None:
        self._size = world.size
        self._specs = specs
        self._parameters = parameters
        self._holds_result = holds_result
        self._scale = 1 / world.size if is_sum else 1.0
        self._num_specs = 0  # of which the windows are
        self._windows: list[list[Rows]] = []
        self._order: list[int] = []
        self._num_samples = 0
        self._num_seen = np.zeros(0)  # by window: samples
        self._signal = np.zeros(0)  # by window: mean estimate of |G|^2
        self._noise = np.zeros(0)  # by window: mean estimate of S
        self.batch_size = 0.0

        # The reduction, and the sample that waits to be told
        self._window: int | None = None
        self._own: dict[int, torch.Tensor] = {}  # by parameter: the norm of this rank's gradient
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._sample: _Sample | None = None

    @property
    def noise_scale(self) -> float | None:
        """In samples. Infinite if noise hides the gradient; None as long as little is known."""
        if self._num_samples < _LEAST_SAMPLES:
            return None
        signal, noise = float(self._signal.sum()), max(0.0, float(self._noise.sum()))
        return noise / signal if signal > 0 else math.inf

    @classmethod
    def open(cls, reducer: Reducer, setup: Setup) -> NoiseScale:
        world, holds_result = setup.world, reducer.launcher.holds_result
        own = cls(
            *(world, reducer.specs, reducer.parameters, holds_result),
            is_sum=setup.options.is_sum,
        )
        reducer.noise = own
        return own

    def on_begin(self, current: Reduction) -> None:
        self._window, self._own = None, {}
        self._remove_hooks()
        sample = self._sample
        if sample is not None and current.number == sample.due:
            own, result = sample.squares() or (0.0, 0.0)
            if own <= result * _MOST_RATIO and result:
                current.mine["has_norm"], current.mine["norm_ratio"] = True, own / result
        index = _index_of(current.number)
        if index is None or not self.batch_size or current.is_again or current.is_absent:
            return
        if self._num_specs != len(self._specs):
            self._cut()
        if not self._windows:
            return
        window = self._order[index % len(self._order)]
        rows = self._windows[window]
        if not any(self._holds_result(each.parameter) for each in rows):
            self._window = window
            for each in rows:
                parameter = self._parameters[each.parameter]
                if parameter.grad is not None:  # of a micro-step, and maybe of no later one
                    self._own[each.parameter] = _norm(parameter.grad, each)
                if parameter.requires_grad:  # it may have been frozen since
                    look = partial(self._look, each)
                    self._handles.append(parameter.register_hook(look))  # type: ignore[no-untyped-call]

    def on_reduced(self, current: Reduction) -> None:
        self._remove_hooks()
        sums, sample = current.heard.sums, self._sample
        if sample is not None and current.number >= sample.due:
            self._sample = None
            if sums["has_norm"] == self._size and current.number == sample.due:
                self._add(sample, sums["norm_ratio"] / self._size)
        if sums["num_samples"]:
            self.batch_size += (sums["num_samples"] - self.batch_size) * (0.1 if self.batch_size else 1.0)
        is_whole = sums["num_samples"] and not (sums["is_absent"] or sums["has_ended"])
        if self._window is None or current.non_finite is not None or not is_whole:
            return
        # The mean is that of factor * gradient; by the weights, of gradients that are means of so many samples.
        counts = current.mine["weight"] * self._size / sums["weight"] if sums["is_weighted"] else 1.0
        factor = (current.factor * current.scale) ** 2 / counts if counts else 0.0
        rows = self._windows[self._window]
        grads = [self._parameters[each.parameter].grad for each in rows]
        zero = torch.zeros((), device=self._parameters[rows[0].parameter].device)
        results = [zero if grad is None else _norm(grad, each) for grad, each in zip(grads, rows, strict=True)]
        found = [[self._own.get(each.parameter, zero) for each in rows], results]
        accelerator = accelerator_of(zero.device)
        norms: torch.Tensor | list[list[float]] = (
            [[*map(float, each)] for each in found]
            if accelerator is None
            else accelerator.fetch(torch.stack([torch.stack(each) for each in found]))
        )
        due = current.number + (1 if accelerator is None else _DEVICE_LAG)
        self._sample = _Sample(self._window, due, sums["num_samples"] / self._size, factor, norms)

    def close(self) -> None:
        self._remove_hooks()

    def _look(self, rows: Rows, gradient: torch.Tensor) -> None:
        """Autograd is about to add `gradient` to that of micro-steps, in `.grad`, if there is one."""
        earlier = self._parameters[rows.parameter].grad
        self._own[rows.parameter] = _norm(gradient, rows, earlier)

    def _remove_hooks(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _add(self, sample: _Sample, ratio: float) -> None:
        """All ranks know how the squared norms of their gradients compare with that of the mean, on average."""
        _, result = sample.squares() or (0.0, 0.0)
        small, large = ratio * result, result * self._scale**2
        window, size = sample.window, self._size
        self._num_samples += 1
        self._num_seen[window] += 1
        share = max(1 / self._num_seen[window], _LEAST_SHARE)
        self._signal[window] += ((size * large - small) / (size - 1) - self._signal[window]) * share
        noise = (small - large) * size / (size - 1) * sample.batch
        self._noise[window] += (noise - self._noise[window]) * share

    def _cut(self) -> None:
        self._num_specs = len(self._specs)
        self._windows = list(_windows(self._specs))
        # Bit by bit from the highest one on, so that a few windows are from all over the model.
        width = max(1, len(self._windows) - 1).bit_length()
        reversed_ = (int(f"{i:0{width}b}"[::-1], 2) for i in range(2**width))
        self._order = [i for i in reversed_ if i < len(self._windows)]
        self._num_samples, self._sample = 0, None
        self._num_seen, self._signal, self._noise = (np.zeros(len(self._windows)) for _ in range(3))


def _index_of(number: int) -> int | None:
    """The number of the sample that is taken in a reduction. None if it takes none."""
    if number < _NUM_OFTEN * REDUCTIONS_BETWEEN_SAMPLES:
        return None if number % REDUCTIONS_BETWEEN_SAMPLES or not number else number // REDUCTIONS_BETWEEN_SAMPLES
    rest = number - _NUM_OFTEN * REDUCTIONS_BETWEEN_SAMPLES
    return None if rest % (2 * REDUCTIONS_BETWEEN_SAMPLES) else _NUM_OFTEN + rest // (2 * REDUCTIONS_BETWEEN_SAMPLES)


def _windows(specs: Sequence[ParameterSpec]) -> Iterator[list[Rows]]:
    """Parts of the parameters, of up to `_MOST_TENSORS` tensors and `_MOST_ELEMENTS` elements, or one row."""
    window: list[Rows] = []
    room = _MOST_ELEMENTS
    for index, spec in enumerate(specs):
        num_rows = spec.shape[0] if spec.shape else 1
        if spec.is_sparse or not spec.numel:
            continue
        row, start = spec.numel // num_rows, 0
        while start < num_rows:
            if window and (len(window) == _MOST_TENSORS or room < row or window[-1].parameter == index):
                yield window
                window, room = [], _MOST_ELEMENTS
            stop = min(num_rows, start + max(1, room // row))
            window.append(Rows(index, start, stop))
            room -= (stop - start) * row
            start = stop
    if window:
        yield window


@torch.no_grad()
def _norm(grad: torch.Tensor, rows: Rows, earlier: torch.Tensor | None = None) -> torch.Tensor:
    """The norm of a part of a gradient and what was there before, in fp32 at least. 0-dim, on the gradient's device."""
    dtype = torch.promote_types(grad.dtype, torch.float32)
    part, *rest = (
        each.detach()[rows.start : rows.stop] if each.dim() else each.detach()
        for each in (grad, earlier)
        if each is not None
    )
    if rest:
        part = part + rest[0]
    return cast(torch.Tensor, torch.linalg.vector_norm(part, dtype=dtype)).to(torch.float32)
