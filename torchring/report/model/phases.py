"""The phases of a step."""

from __future__ import annotations

from enum import Enum
from typing import Final


class Phase(str, Enum):
    """What a rank does in a step. Phases add up to the duration of the step.

    INPUT, FORWARD, BETWEEN, OPTIMIZER: as `torchring.observer.Phase`.
    BACKWARD: without the time in which communication kept it waiting.
    WAITING: communication cannot go on, because another rank is late.
    COMMUNICATION: the rank stands still while gradients are being reduced; all ranks are there.
    """

    INPUT = "input"
    FORWARD = "forward"
    BACKWARD = "backward"
    WAITING = "waiting for a rank"
    COMMUNICATION = "communication"
    BETWEEN = "between backward and step"
    OPTIMIZER = "optimizer"


PHASES: Final = tuple(Phase)
COMPUTING: Final = (Phase.INPUT, Phase.FORWARD, Phase.BACKWARD, Phase.BETWEEN, Phase.OPTIMIZER)


def column(phase: Phase) -> int:
    """Index of a phase in the last dimension of arrays."""
    return PHASES.index(phase)
