"""The gradient noise scale: how large a batch still pays. Measured while gradients are reduced.

The gradient of a rank is that of b samples, and the mean of R ranks is that of R b. With S = tr(covariance of the
gradient of one sample), squared norms are on average |G|^2 + S / b and |G|^2 + S / (R b). Both unknowns follow, and the
noise scale is S / |G|^2. Below it, twice the batch takes nearly half the steps; far above it, hardly fewer.

Source: S. McCandlish et al., "An Empirical Model of Large-Batch Training", 2018 (arXiv 1812.06162), appendix A.1.

Every 16th reduction looks at a rank's own gradients when autograd has computed them, and at the means when they are
there. What a rank has found travels in the message of a later reduction, as a ratio to the norm of the mean, which all
ranks know. S and |G|^2 are means over the latest such reductions.

Example: two ranks with gradients [3, 1] and [1, 3] and mean [2, 2]. The squared norms are 10 and 8, so |G|^2 = 2 * 8 -
10 = 6, S / b = (10 - 8) * 2 = 4, and the noise scale is 4 / 6 of a rank's batch.
"""

import math
from typing import Final, NamedTuple, cast

import torch

from torchring.accelerators import accelerator_of
from torchring.gradients.contract import Setup
from torchring.gradients.reducer import Reducer
from torchring.gradients.reduction import Participant, Reduction

REDUCTIONS_BETWEEN_SAMPLES: Final = 16
_DEVICE_LAG: Final = 4  # reductions until the host reads what a device has found, without waiting for it
_LEAST_SHARE: Final = 0.1  # of the newest sample in the mean: older ones are forgotten
_LEAST_SAMPLES: Final = 8
_MOST_RATIO: Final = 2.0**28


class _Sample(NamedTuple):
    """What this rank has found in a reduction, to be told to the others in that with number `due`."""

    due: int
    batch: float  # samples of a rank, on average
    factor: float  # of this rank's squared norm, by how much its gradients count in the means
    # [2], of this rank's gradients and of the means. From a device, a copy that is -1 until it has come.
    norms: torch.Tensor

    def squares(self) -> tuple[float, float]:
        """Squared norms of this rank's gradients, as they count, and of the means. 0 if the device is far behind."""
        own, result = (max(0.0, norm) for norm in self.norms.tolist())
        return self.factor * own * own, result * result


class NoiseScale(Participant):
    """Measures the noise scale of one optimizer's gradients."""

    fields = ("has_norm", "norm_ratio")

    def __init__(self, reducer: Reducer, setup: Setup) -> None:
        reducer.noise = self
        self._launcher, self._ledger = reducer.launcher, reducer.ledger
        self._specs = reducer.specs  # may grow, as may the parameters
        self._parameters = reducer.parameters
        self._size = size = setup.world.size
        self._scale = 1 / size if setup.options.is_sum else 1.0
        self._num_samples = 0
        self._signal = self._noise = 0.0  # mean estimates of |G|^2 and S
        self.batch_size = 0.0  # samples of all ranks in a reduction, smoothed

        # The reduction, and the sample that waits to be told
        self._own: dict[int, torch.Tensor] | None = None  # by parameter: the norm of this rank's gradient
        self._sample: _Sample | None = None

    @property
    def noise_scale(self) -> float | None:
        """In samples. Infinite if noise hides the gradient; None as long as little is known."""
        if self._num_samples < _LEAST_SAMPLES:
            return None
        return max(0.0, self._noise) / self._signal if self._signal > 0 else math.inf

    def on_begin(self, current: Reduction) -> None:
        self._own = None
        if self._sample is not None and current.number == self._sample.due:
            own, result = self._sample.squares()
            if own <= result * _MOST_RATIO and result:
                current.mine["has_norm"], current.mine["norm_ratio"] = True, own / result
        is_due = current.number and current.number % REDUCTIONS_BETWEEN_SAMPLES == 0
        if not is_due or not self.batch_size or current.is_again or current.is_absent:
            return
        if self._ledger.holds_results():
            return
        self._own = {}
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:  # of a micro-step, and maybe of no later one
                self._look(index)
        mark_ready = current.mark_ready or self._launcher.mark_ready

        def look(index: int) -> None:
            self._look(index)
            mark_ready(index)

        current.mark_ready = look

    def on_reduced(self, current: Reduction) -> None:
        sums, sample = current.heard.sums, self._sample
        if sample is not None and current.number >= sample.due:
            self._sample = None
            if sums["has_norm"] == self._size and current.number == sample.due:
                self._add(sample, sums["norm_ratio"] / self._size)
        if sums["num_samples"]:
            self.batch_size += (sums["num_samples"] - self.batch_size) * (0.1 if self.batch_size else 1.0)
        own, self._own = self._own, None
        is_whole = sums["num_samples"] and all(current.heard.by_rank["weight"]) and not sums["has_ended"]
        if own is None or current.non_finite is not None or not is_whole:
            return
        # The mean is that of factor * gradient; by the weights, of gradients that are means of so many samples.
        factor = current.weight * self._size / sums["weight"]
        dense = [i for i, p in enumerate(self._parameters) if p.grad is not None and not self._specs[i].is_sparse]
        if not dense:
            return
        results = [_norm(self._parameters[i]) for i in dense]
        found = [list(own.values()) or [torch.zeros_like(results[0])], results]
        norms = torch.stack([torch.stack(each).square().sum().sqrt() for each in found])
        if (accelerator := accelerator_of(norms.device)) is not None:
            norms = accelerator.fetch(norms)
        due = current.number + (1 if accelerator is None else _DEVICE_LAG)
        self._sample = _Sample(due, sums["num_samples"] / self._size, factor, norms)

    def _look(self, index: int) -> None:
        """This rank's gradient of a parameter is there, with that of earlier micro-steps."""
        if self._own is not None and not self._specs[index].is_sparse:
            self._own[index] = _norm(self._parameters[index])

    def _add(self, sample: _Sample, ratio: float) -> None:
        """All ranks know how the squared norms of their gradients compare with that of the mean, on average."""
        _, result = sample.squares()
        small, large, size = ratio * result, result * self._scale**2, self._size
        self._num_samples += 1
        share = max(1 / self._num_samples, _LEAST_SHARE)
        self._signal += ((size * large - small) / (size - 1) - self._signal) * share
        self._noise += ((small - large) * size / (size - 1) * sample.batch - self._noise) * share


@torch.no_grad()
def _norm(parameter: torch.Tensor) -> torch.Tensor:
    """The norm of the gradient. 0-dim fp32, on its device."""
    assert parameter.grad is not None
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    norm = torch.linalg.vector_norm(parameter.grad, dtype=dtype)
    return cast(torch.Tensor, norm).to(torch.float32)
