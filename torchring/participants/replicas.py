"""Are the replicas still equal? After a change on one rank only, training would go on and be silently wrong.

Ranks compare a digest of every parameter at the end of a reduction, when
- somebody wrote to parameters outside `step()`, as autograd's version counters show,
- not all ranks have stepped equally often,
- after the first step, as most mistakes are made from the beginning,
- and every STEPS_BETWEEN_CHECKS reductions, for changes that leave no trace (`p.data`).
The first two facts are in the message of each reduction. With the digests, ranks compare the
hyperparameters and step counts of their optimizers: where these differ, the next step would make parameters differ.

A script may move parameters between two backwards, on each rank its own way, and put them back before the step, as SAM
does. So where parameters differ at the end of a reduction, ranks compare again in the step, or in the next reduction if
that comes first.

Platforms of two kinds round differently, so parameters drift apart by last bits. Where that is all, a comparison
gives all ranks the parameters of rank 0.
"""

import itertools
import json
import math
import platform
import weakref
import zlib
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from torchring.collectives.service import internal_collectives_of
from torchring.errors import GradientError, in_step, ranks_in_words
from torchring.gradients.contract import Setup
from torchring.gradients.ledger import version_of
from torchring.gradients.reducer import Reducer
from torchring.gradients.reduction import STEPS_BETWEEN_CHECKS, Participant, Reduction, StepPoint
from torchring.participants.digests import digests
from torchring.releases import installed_version
from torchring.world import World

_WATCHED: Final = 64  # parameters at most, evenly spread: reading a version takes up to 1 us
_LEAST_SCALE: Final = 1e-3  # of the elements of a parameter, as differences of rounding do not shrink with them


_SAME_LOSS: Final = (
    "A scheduler that decides by a loss, such as ReduceLROnPlateau, must be given the same loss on all ranks: "
    "scheduler.step(torchring.all_reduce(loss))"
)
_OTHER_STEPS: Final = (
    "{} reduces gradients of an earlier step than others of its group. A backward() of theirs has not reached the "
    "parameters of this optimizer, so they have gone on without it. Pass the model to torchring.wrap() of each of its "
    "optimizers, which then take part in all of its backwards; or run equally many on all ranks"
)
_SAME_STATE: Final = (
    "After wrap(), load a checkpoint on all ranks; or load it on rank 0, and call "
    "torchring.broadcast_optimizer_state(optimizer) on all ranks"
)


class ReplicaCheck(Participant):
    """Watches the parameters of one optimizer. Refers to the optimizer and the model weakly."""

    fields = ("steps", "parameters_changed")

    def __init__(self, reducer: Reducer, setup: Setup) -> None:
        self._world = setup.world
        self._is_sharded = setup.is_sharded
        self._names = setup.names  # of all parameters of the optimizer, in its order; may grow
        self._optimizer = weakref.ref(setup.optimizer)
        self._model = None if setup.model is None else weakref.ref(setup.model)  # for errors
        self._current = Reduction(0)  # that is over
        self._due_at = 0  # number of the reduction after which the replicas are compared
        self._has_stepped = False
        self._num_alarms = 0
        self._are_apart = False  # at the end of the last reduction
        self._watched: list[tuple[torch.nn.Parameter, int]] = []
        self._changed = False

    def has_changed(self) -> bool:
        """Whether a watched parameter was written to since the last `accept`, on this rank."""
        if not self._changed:
            self._changed = [version_of(p) for p, _ in self._watched] != [version for _, version in self._watched]
        return self._changed

    def accept(self) -> None:
        """The optimizer has stepped, or is stepping: the parameters are as they should be."""
        distance = math.ceil(len(self._names) / _WATCHED)
        self._watched = [(p, p._version) for p in list(self._names)[::distance]]

    def on_begin(self, current: Reduction) -> None:
        current.mine["steps"] = current.step
        current.mine["parameters_changed"] = self.has_changed()

    def on_message(self, current: Reduction) -> None:
        """Raise GradientError if ranks of a group are in different steps: a backward has missed it on some rank."""
        steps = current.heard.by_rank["steps"]
        if self._world.members and len({*steps}) > 1 and not current.heard.sums["has_ended"]:
            late = [rank for rank, number in enumerate(steps) if number == min(steps)]
            raise in_step(GradientError(_OTHER_STEPS.format(ranks_in_words(late)), rank=self._world.rank, peers=late))

    def on_reduced(self, current: Reduction) -> None:
        """Compare the replicas if something may have changed, or if it is time to. Collective then.

        A script may change parameters in every step, on all ranks alike. So only the 1st, 2nd, 4th, 8th ... alarm leads
        to a comparison at once. Inside `torchring.join`, ranks without data do not step, so replicas may differ.

        Raises GradientError if the replicas differ.
        """
        self._current = current
        sums, is_due = current.heard.sums, current.number >= self._due_at
        if is_due:
            self._due_at = current.number + STEPS_BETWEEN_CHECKS
        is_due = is_due or (bool(sums["steps"]) and not self._has_stepped)
        self._has_stepped = self._has_stepped or bool(sums["steps"])
        if sums["has_ended"]:
            return
        if sums["parameters_changed"] or len({*current.heard.by_rank["steps"]}) > 1:
            self._num_alarms += 1
            is_due = is_due or self._num_alarms & (self._num_alarms - 1) == 0
            self._changed = False
            self._watched = [(p, p._version) for p, _ in self._watched]
        if is_due or self._are_apart:
            self.compare()

    def on_step(self, when: StepPoint) -> None:
        """Collective if the last reduction left parameters apart, which all ranks know. Raises as `compare` does."""
        if when == "before":
            self.has_changed()  # what is written from now on is no change
        elif when == "after":
            self.accept()
        elif self._are_apart:
            self._are_apart = False
            self.compare(is_step=True)

    def compare(self, *, is_step: bool = False) -> None:
        """Collective: raise GradientError naming the first parameter that is not the same on all ranks, and where.

        If ranks have made equally many steps, the first difference is one for the step, see above.
        """
        platforms = self._world.shared(_other_platforms)
        settings = zlib.crc32(json.dumps(self._settings()).encode())
        mine = torch.cat([torch.tensor([[self._current.step, settings]], device="cpu"), digests(self._names)])
        everybody = torch.stack(internal_collectives_of(self._world).all_gather(mine))
        steps = everybody[:, 0, 0].tolist()
        is_other = (everybody != everybody[0])[:, 1:].any(dim=2)  # [ranks, parameters]
        if is_other.any() and len(set(steps)) == 1 and platforms:
            is_other = self._adopt_first(is_other.any(dim=0))
        if not is_other.any():
            self._are_apart = False
            has_other_settings = (everybody[:, 0, 1] != everybody[0, 0, 1]).any() and len(set(steps)) == 1
            if has_other_settings and (difference := self._first_difference()) is not None:
                rank, text, remedy = difference
                text = f"{text}, so the next step would make their parameters differ. {remedy}"
                raise in_step(GradientError(text, rank=self._world.rank, peers=(rank,)))
            return
        if not (is_step or self._are_apart) and len(set(steps)) == 1:
            self._are_apart = True
            return
        index = int(is_other.any(dim=0).nonzero()[0])
        others = is_other[:, index].nonzero().flatten().tolist()
        parameter, name = list(self._names.items())[index]
        differ = f"{ranks_in_words(others)} {'differs' if len(others) == 1 else 'differ'}"
        cause = self._cause(steps, parameter)
        if platforms:
            cause += f". The ranks' platforms differ, too, but only last bits differ by that: {platforms}"
        text = f"{name} is not the same on all ranks: {differ} from rank 0. {cause}"
        raise in_step(GradientError(text, rank=self._world.rank, peers=others, parameters=(name,)))

    @torch.no_grad()
    def _adopt_first(self, is_other: torch.Tensor) -> torch.Tensor:
        """Collective: take over the parameters of rank 0 that differ by rounding. `is_other`: [parameters] bool.

        Returns [ranks, parameters] bool: where parameters differ by more.
        """
        collectives, is_apart = internal_collectives_of(self._world), torch.zeros_like(is_other, dtype=torch.int64)
        for i, parameter in itertools.compress(enumerate(self._names), is_other.tolist()):
            mine = parameter.data  # whose version counter stays: a graph may be kept for another backward
            first = collectives.broadcast(mine.clone(), 0)
            norm, distance = (float((x.abs().double()).norm()) for x in (first, mine - first))
            scale = max(norm, _LEAST_SCALE * math.sqrt(first.numel()))
            if distance <= math.sqrt(torch.finfo(first.dtype).eps) / 4 * scale:
                mine.copy_(first)
            else:
                is_apart[i] = 1
        return torch.stack(collectives.all_gather(is_apart)) > 0

    def _cause(self, steps: Sequence[int], parameter: torch.nn.Parameter) -> str:
        """Collective: what has probably led to the difference. `steps`: how many steps each rank has made."""
        difference = self._first_difference()
        other = next((rank for rank, count in enumerate(steps) if count != steps[0]), None)
        if other is not None:
            return (
                f"In {self._current.next_number} reductions rank 0 has called optimizer.step() {steps[0]} times, "
                f"rank {other} {steps[other]} times: some rank ran a backward() that the others did not, or left a "
                "step out. Run a backward() that is not for training inside optimizer.no_sync(), or use "
                "torch.autograd.grad()"
            )
        if difference is not None:
            return f"{difference[1]}. {difference[2]}"
        model = None if self._model is None else self._model()
        for module in () if model is None else model.modules():
            if getattr(module, "max_norm", None) is not None and getattr(module, "weight", None) is parameter:
                return (
                    f"It is the weight of an {type(module).__name__} with max_norm, whose forward() rewrites the rows "
                    "that it looks up, on each rank other rows. Leave max_norm out, and limit all rows after "
                    "optimizer.step(): with torch.no_grad(): weight.copy_(weight.renorm(2, 0, max_norm))"
                )
        return (
            "It was changed outside optimizer.step(), or stepped, on some ranks only, or step() computes something "
            "else on each rank (random numbers, or gradients that a zero-bubble pipeline or the script has added to "
            ".grad past backward(): call optimizer.synchronize() before step()). After a change on some ranks, call "
            "torchring.broadcast_parameters(model) on all of them"
        )

    def _first_difference(self) -> tuple[int, str, str] | None:
        """Collective: the first rank whose settings differ from those of rank 0, in what, and what to do."""
        first, *rest = internal_collectives_of(self._world).all_gather_json(self._settings())
        for rank, theirs in enumerate(rest, start=1):
            for place, value in first.items():
                if theirs.get(place, value) != value:
                    remedy = _SAME_STATE if place.startswith("step of") else _SAME_LOSS
                    return rank, f"{place} is {theirs[place]} on rank {rank}, {value} on rank 0", remedy
        return None

    def _settings(self) -> dict[str, str]:
        """What decides the next step, beside gradients: the optimizer's own hyperparameters, and how often it stepped.

        Without what is on a device, for which the host would wait.
        """
        optimizer = self._optimizer()
        found: dict[str, str] = {}
        for index, group in enumerate([] if optimizer is None else optimizer.param_groups):
            assert optimizer is not None
            own = {key: value for key, value in group.items() if key in optimizer.defaults}
            if not self._is_sharded:
                states = (optimizer.state[p] for p in group["params"] if p in optimizer.state)
                own["step"] = next((each.get("step", 0) for each in states if isinstance(each, dict) and each), 0)
            for key, given in own.items():
                value = given.tolist() if isinstance(given, torch.Tensor) and given.device.type == "cpu" else given
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    value = float(value)  # 1 and 1.0 are the same, as are numbers of numpy
                is_plain = (
                    not any(isinstance(each, torch.Tensor) for each in value) if isinstance(value, tuple) else True
                )
                if isinstance(value, (bool, float, tuple)) and is_plain:  # other optimizers may keep anything there
                    found[f"{key} of param_groups[{index}]"] = repr(value)
        return found


def _other_platforms(world: World) -> str:
    """How the platforms of the ranks differ, if they do; else "". Collective: `world.shared(_other_platforms)`."""
    found = differences(internal_collectives_of(world).all_gather_json(_platform()))
    if found and world.rank == 0:
        world.warn(
            f"the ranks do not compute alike: {found}. So the last bits of their parameters may differ, and torchring "
            "gives all ranks the parameters of rank 0 now and then"
        )
    return found


def _platform() -> dict[str, str]:
    """The facts that decide the last bits of a result on the CPU."""
    return {
        "architecture": platform.machine(),
        "CPU capability of PyTorch": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "torchring": installed_version("torchring") or "unknown",
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


def differences(platforms: Sequence[Mapping[str, str]]) -> str:
    """Describes how the platforms of the ranks differ; "" if they do not.

    Example: "torch is 2.12.0 on rank 1, 2.13.0 on rank 0".
    """
    found = []
    for what in platforms[0]:
        first_with = {each[what]: rank for rank, each in reversed([*enumerate(platforms)])}
        if len(first_with) > 1:
            found.append(
                f"{what} is " + ", ".join(f"{value} on rank {first_with[value]}" for value in sorted(first_with))
            )
    return "; ".join(found)
