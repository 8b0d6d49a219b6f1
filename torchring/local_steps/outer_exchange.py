"""What ranks send in an outer step, and what they compare before."""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from torchring.collectives import operations
from torchring.collectives.operations import Backend, Meanwhile
from torchring.collectives.service import Collectives
from torchring.collectives.signature import Signature
from torchring.errors import GradientError, PlanMismatchError, RingError, in_step, ranks_in_words
from torchring.groups import open_group
from torchring.interruption import InterruptionGuard
from torchring.local_steps import delta_codes
from torchring.memory.host import bytes_of, tensor_of
from torchring.world import World


@dataclass
class Outgoing:
    """What a rank has for the others in one outer step."""

    words: dict[str, Any]  # JSON: "step", "fragment", "made", "digest", "not_finite", "guests"
    names: Sequence[str]  # of the parameters of the fragment
    digests: list[list[int]]  # of its outer parameters
    tensors: Sequence[torch.Tensor]  # what its parameters have changed, then buffers. Real, on the CPU.
    bits: int | None
    feedback: torch.Tensor | None  # what earlier codes have lost


@dataclass
class Incoming:
    """What has come back."""

    words: list[dict[str, Any]]  # of all ranks
    values: torch.Tensor  # 1-D: the mean of all tensors over ranks, weighted by the inner steps that these have made
    feedback: torch.Tensor | None


def _open(world: World) -> Collectives:
    """A sequence of its own, whose thread works while ranks step. The first call is collective."""
    return InterruptionGuard(world).run("the first outer step", lambda: Collectives(world, "outer", is_scripts=False))


class _BetweenHosts:
    """The collectives of an exchange among the first ranks of all hosts, which tell the other ranks of their host."""

    on_cpu = True

    def __init__(self, within: Backend, between: Collectives | None) -> None:
        self._within = within
        self._between = between  # on the first rank of a host

    def all_reduce(self, data: torch.Tensor, op: str, signature: Signature) -> None:
        if self._between is not None:
            self._between.run("all_reduce", lambda backend: backend.all_reduce(data, op, signature))
        self._within.broadcast(bytes_of(data), 0, signature)

    def all_gather(self, data: torch.Tensor, signature: Signature) -> list[torch.Tensor]:
        return [tensor_of(part) for part in self.start_exchange(data.numpy().tobytes(), signature)(None)]

    def start_exchange(self, data: bytes, signature: Signature) -> Callable[[Meanwhile], list[bytes]]:
        parts: list[bytes] = []
        if self._between is not None:
            parts = self._between.run("exchange", lambda backend: backend.start_exchange(data, signature)(None))
        sizes = json.dumps([len(part) for part in parts]).encode()
        found = [self._within.start_exchange(told, signature)(None)[0] for told in (sizes, b"".join(parts))]
        ends = [*itertools.accumulate(json.loads(found[0]))]
        return lambda meanwhile: [found[1][begin:end] for begin, end in itertools.pairwise([0, *ends])]


class Link:
    """The ranks that exchange, as one of them sees it. Opening it is collective."""

    def __init__(self, world: World, *, between_hosts: bool) -> None:
        self.ranks: Sequence[int] = range(world.size)  # that have a part of their own
        self.index = world.rank  # of this rank, or of the first one of its host, among these
        self.num_ranks = 1  # for which it speaks
        self._between: Collectives | None = None
        self._is_between_hosts = between_hosts
        if between_hosts:
            hosts = [list(ranks) for ranks in world.hosts]
            self.ranks, self.index, self.num_ranks = [ranks[0] for ranks in hosts], world.node_rank, world.local_size
            if world.rank in self.ranks:
                self._between = open_group(world, [self.ranks]).shared(_open)
            world = open_group(world, hosts)
        self.collectives = world.shared(_open)

    def exchange(self, backend: Backend, mine: Outgoing) -> Incoming:
        """Collective. Raises GradientError or PlanMismatchError, on all ranks, for what they must not average."""
        if self._is_between_hosts:
            backend = cast(Backend, _BetweenHosts(backend, self._between))
        words = [json.loads(said) for said in operations.exchange(backend, json.dumps(mine.words).encode())]
        if (error := _find_difference(backend, mine, words, self.ranks)) is not None:
            error.rank, error.members = self.ranks[self.index], ()  # numbers of the job's ranks
            raise in_step(error)
        made = [each["made"] for each in words]
        shares = [each / sum(made) if any(made) else 1 / len(made) for each in made]
        values, feedback = torch.cat([tensor.reshape(-1) for tensor in mine.tensors]), mine.feedback
        if mine.bits is None:
            return Incoming(words, operations.all_reduce(backend, values.mul_(shares[self.index]), "sum"), None)
        sent, shapes = values.float(), [tensor.shape for tensor in mine.tensors]
        if feedback is not None:
            sent += feedback
        mean = torch.zeros_like(sent)
        for rank, data in enumerate(operations.all_gather(backend, delta_codes.encode(sent, shapes, mine.bits))):
            decoded = delta_codes.decode(data, shapes, mine.bits)
            mean.add_(decoded, alpha=shares[rank])
            if rank == self.index and shares[rank]:
                feedback = (sent - decoded).nan_to_num_(0.0)  # a buffer need not be finite
        return Incoming(words, mean, feedback)


def _find_difference(
    backend: Backend, mine: Outgoing, words: list[dict[str, Any]], ranks: Sequence[int]
) -> RingError | None:
    """What is wrong on some rank. Collective: all ranks find the same."""
    for other, each in zip(ranks, words, strict=True):
        place, first = (f"the fragment of {of['fragment']} after inner step {of['step']}" for of in (each, words[0]))
        if place != first:
            text = (
                f"rank {other} exchanges {place}, rank 0 {first}; call step() equally often and in the same order on "
                "all ranks, and load the same checkpoint"
            )
            return PlanMismatchError(text, peers=[other])
        if names := each["not_finite"]:
            text = (
                f"{names[0]} is not finite on rank {other} after {each['step']} inner steps, so it was averaged on no "
                "rank; the outer parameters are as they were. Lower the learning rate, or clip gradients"
            )
            return GradientError(text, peers=[other], parameters=names)
    if len({each["digest"] for each in words}) > 1:
        everybody = [json.loads(said) for said in operations.exchange(backend, json.dumps(mine.digests).encode())]
        for name, *of_ranks in zip(mine.names, *everybody, strict=False):
            if others := [rank for rank, its in zip(ranks, of_ranks, strict=True) if its != of_ranks[0]]:
                text = (
                    f"the outer value of {name} is not the same on all ranks: {ranks_in_words(others)} differ from "
                    "rank 0. Load the same checkpoint on all ranks, and change parameters in step() only"
                )
                return GradientError(text, peers=others, parameters=[name])
    return None
