"""The phases of a step, as recorder and flight recorder tell them apart."""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """What a rank does. A step with several micro-steps has several INPUT, FORWARD and BACKWARD.

    INPUT: everything from the end of a step to the beginning of forward: waiting for data, zero_grad(), logging.
    FORWARD: the model that `wrap` was given computes. Without a model, forward is not told apart from INPUT.
    BACKWARD: from the end of forward, so with the loss, until the last gradient is computed. Includes stalls for
        buckets that are reduced meanwhile, see `StepRecord.stall_ns`.
    EXPOSED: all gradients are computed; backward waits for reductions.
    BETWEEN: from the end of a backward that reduces to `step()`: unscaling, clipping, logging.
    OPTIMIZER: inside `step()`.
    """

    INPUT = 0
    FORWARD = 1
    BACKWARD = 2
    EXPOSED = 3
    BETWEEN = 4
    OPTIMIZER = 5


INPUT, FORWARD, BACKWARD, EXPOSED, BETWEEN, OPTIMIZER = map(int, Phase)  # to look up a member of an enum takes 0.1 us
