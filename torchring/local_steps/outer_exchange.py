"""What ranks send in an outer step, and what they compare before."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchring.collectives import operations
from torchring.collectives.operations import Backend
from torchring.collectives.service import Collectives
from torchring.errors import GradientError, PlanMismatchError, RingError, in_step, ranks_in_words
from torchring.interruption import InterruptionGuard
from torchring.local_steps import delta_codes
from torchring.world import World


@dataclass
class Outgoing:
    """What a rank has for the others in one outer step. Tensors are on the CPU, in fp32 or fp64, and its own."""

    words: dict[str, Any]  # JSON: "step", "fragment", "made", "digest", "not_finite", "problem", and what guests say
    names: Sequence[str]  # of the parameters of the fragment
    digests: list[list[int]]  # of its outer parameters
    deltas: list[torch.Tensor]  # parameters, or what they have changed
    buffers: list[torch.Tensor]
    bits: int | None
    feedback: list[torch.Tensor] | None  # what earlier codes have lost


@dataclass
class Incoming:
    """What has come back."""

    words: list[dict[str, Any]]  # of all ranks
    deltas: list[torch.Tensor]  # means over ranks, weighted by the inner steps that these have made
    buffers: list[torch.Tensor]  # means over ranks
    feedback: list[torch.Tensor] | None


def outer_collectives_of(world: World) -> Collectives:
    """A sequence of its own, whose thread works while ranks step. The first call is collective."""
    return InterruptionGuard(world).run("the first outer step", lambda: Collectives(world, "outer", is_scripts=False))


def exchange(backend: Backend, mine: Outgoing, rank: int) -> Incoming:
    """Collective. Raises GradientError or PlanMismatchError, on all ranks, for what they must not average."""
    words = [json.loads(said) for said in operations.exchange(backend, json.dumps(mine.words).encode())]
    if (error := _find_difference(backend, mine, words, rank)) is not None:
        raise in_step(error)
    made = [each["made"] for each in words]
    shares = [each / (sum(made) or 1) for each in made]
    buffers = [operations.all_reduce(backend, buffer, "mean") for buffer in mine.buffers]
    if mine.bits is None:
        for delta in mine.deltas:
            delta.mul_(shares[rank])
        return Incoming(words, _sum(backend, mine.deltas), buffers, None)
    sent = [delta.float() for delta in mine.deltas]
    if mine.feedback is not None:
        torch._foreach_add_(sent, mine.feedback)
    shapes = [delta.shape for delta in sent]
    means = [torch.zeros_like(delta) for delta in sent]
    codes = delta_codes.encode(sent, mine.bits)
    for other, data in enumerate(operations.all_gather(backend, codes)):
        decoded = delta_codes.decode(data, shapes, mine.bits)
        torch._foreach_add_(means, decoded, alpha=shares[other])
        if other == rank:
            torch._foreach_sub_(sent, decoded)  # what is lost
    return Incoming(words, means, buffers, sent)


def _sum(backend: Backend, deltas: list[torch.Tensor]) -> list[torch.Tensor]:
    """Sums over ranks, in one message for each dtype."""
    for dtype in (torch.float32, torch.float64):
        alike = [delta for delta in deltas if delta.dtype == dtype]
        if alike:
            flat = torch.cat([delta.reshape(-1) for delta in alike])
            operations.all_reduce(backend, flat, "sum")
            for delta, part in zip(alike, torch.split(flat, [delta.numel() for delta in alike]), strict=True):
                delta.copy_(part.view(delta.shape))
    return deltas


def _find_difference(backend: Backend, mine: Outgoing, words: list[dict[str, Any]], rank: int) -> RingError | None:
    """What is wrong on some rank. Collective: all ranks find the same."""
    for other, each in enumerate(words):
        if each["problem"]:
            return PlanMismatchError(f"rank {other} {each['problem']}", rank=rank, peers=[other])
        place, first = ([of["step"], of["fragment"]] for of in (each, words[0]))
        if place != first:
            text = (
                f"rank {other} exchanges fragment {place[1]} after inner step {place[0]}, rank 0 fragment {first[1]} "
                f"after step {first[0]}; call step() equally often on all ranks, and load the same checkpoint"
            )
            return PlanMismatchError(text, rank=rank, peers=[other])
    for other, each in enumerate(words):
        if name := each["not_finite"]:
            text = (
                f"{name} is not finite on rank {other} after {each['step']} inner steps, so it was averaged on no "
                "rank; the outer parameters are as they were. Lower the learning rate, or clip gradients"
            )
            return GradientError(text, rank=rank, peers=[other], parameters=[name])
    if len({each["digest"] for each in words}) > 1:
        everybody = [json.loads(said) for said in operations.exchange(backend, json.dumps(mine.digests).encode())]
        for i, name in enumerate(mine.names):
            if others := [other for other, its in enumerate(everybody) if its[i] != everybody[0][i]]:
                text = (
                    f"the outer value of {name} is not the same on all ranks: {ranks_in_words(others)} differ from "
                    "rank 0. Load the same checkpoint on all ranks, and change parameters in step() only"
                )
                return GradientError(text, rank=rank, peers=others, parameters=[name])
    return None
