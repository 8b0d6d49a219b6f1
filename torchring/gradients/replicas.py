"""Are the replicas still equal? After a change on one rank only, training would go on and be silently wrong.

Ranks compare a digest of every parameter at the end of a round, when
- somebody wrote to parameters outside `step()`, as autograd's version counters show,
- not all ranks have stepped equally often (modulo 2),
- and every STEPS_BETWEEN_CHECKS rounds, for changes that leave no trace (`p.data`).
The first two facts travel as control bits of the round, so they cost no message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from torchring.collectives.digests import digests
from torchring.collectives.service import internal_collectives_of
from torchring.errors import GradientError, in_step
from torchring.world import World

STEPS_BETWEEN_CHECKS: Final = 100  # a check reads every parameter: 70 ms for 42 M on one core
_WATCHED: Final = 64  # how many parameters are watched at a time, in turn: reading a version takes up to 1 us


class ReplicaCheck:
    """Watches the parameters of one optimizer.

    Args:
        world: has more than one rank.
        names: the name of every parameter of the optimizer, in its order; may grow.
    """

    def __init__(self, world: World, names: Mapping[torch.nn.Parameter, str]) -> None:
        self._world = world
        self._names = names
        self._num_rounds = 0
        self._num_steps = 0
        self._num_alarms = 0
        self._num_accepted = 0
        self._watched: list[tuple[torch.nn.Parameter, int]] = []
        self._changed = False

    def has_changed(self) -> bool:
        """Whether a watched parameter was written to since the last `accept`, on this rank."""
        if not self._changed:
            self._changed = any(p._version != version for p, version in self._watched)
        return self._changed

    def accept(self) -> None:
        """The optimizer has stepped, or is stepping: the parameters are as they should be."""
        parameters = list(self._names)
        num_windows = math.ceil(len(parameters) / _WATCHED)
        start = self._num_accepted % num_windows * _WATCHED
        self._num_accepted += 1
        self._watched = [(p, p._version) for p in parameters[start : start + _WATCHED]]

    def accept_all(self) -> None:
        """The parameters are those of another rank now, on all ranks."""
        self._changed = False
        self.accept()

    def after_round(self, alarmed: bool, num_steps: int = 0, *, is_apart: bool = False) -> None:
        """Compare the replicas if something may have changed, or if it is time to. Collective then.

        A script may change parameters in every step, on all ranks alike. So only the 1st, 2nd, 4th, 8th ... alarm leads
        to a comparison at once.

        Args:
            alarmed: whether something may have changed; equal on all ranks.
            num_steps: how many steps this rank has made, for the error.
            is_apart: some ranks have no data left and do not step, so replicas may differ; equal on all ranks.

        Raises GradientError if the replicas differ.
        """
        due = self._num_rounds % STEPS_BETWEEN_CHECKS == 0
        self._num_rounds += 1
        self._num_steps = num_steps
        if is_apart:
            return
        if alarmed:
            self._num_alarms += 1
            due = due or self._num_alarms & (self._num_alarms - 1) == 0
            self._changed = False
            self._watched = [(p, p._version) for p, _ in self._watched]
        if due:
            self.compare()

    def compare(self) -> None:
        """Collective: raise GradientError naming the first parameter that is not the same on all ranks, and where."""
        mine = torch.cat([torch.tensor([[self._num_steps, 0]], device="cpu"), digests(self._names)])
        everybody = internal_collectives_of(self._world).all_gather(mine)
        steps = [int(rows[0, 0]) for rows in everybody]
        everybody = [rows[1:] for rows in everybody]
        first = everybody[0]
        differing = [rank for rank, digest in enumerate(everybody) if not torch.equal(digest, first)]
        if not differing:
            return
        index = min(int((everybody[rank] != first).any(dim=1).nonzero()[0]) for rank in differing)
        others = [rank for rank in differing if not torch.equal(everybody[rank][index], first[index])]
        name = list(self._names.values())[index]
        differ = f"rank {others[0]} differs" if len(others) == 1 else f"ranks {', '.join(map(str, others))} differ"
        raise in_step(
            GradientError(
                f"{name} is not the same on all ranks: {differ} from rank 0. {self._cause(steps)}",
                rank=self._world.rank,
                peers=others,
                parameters=(name,),
            )
        )

    def _cause(self, steps: Sequence[int]) -> str:
        """What has probably led to the difference. `steps`: how many steps each rank has made."""
        other = next((rank for rank, count in enumerate(steps) if count != steps[0]), None)
        if other is None:
            return (
                "It was changed outside optimizer.step(), or stepped, on some ranks only; call "
                "torchring.broadcast_parameters(model) on all of them after such a change"
            )
        return (
            f"In {self._num_rounds} reductions rank 0 has called optimizer.step() {steps[0]} times, rank {other} "
            f"{steps[other]} times: some rank ran a backward() that the others did not, or left a step out. Run a "
            "backward() that is not for training inside optimizer.no_sync(), or use torch.autograd.grad()"
        )
