"""A pure state machine: finds the collectives that are ready on all ranks, and differences between ranks.

Horovod matches collectives by name, whatever the order in which ranks call them. All ranks run this state machine on
the same input: in each negotiation cycle, every rank hands every rank the requests that its script has made since the
last cycle. So all ranks come to the same responses, in the same order, and no rank is a coordinator.

Example: 2 ranks; in the first cycle rank 0 requests "a" and "b", rank 1 requests "b"; in the second, rank 1 requests
"a". The first cycle answers "b", and the second answers "a".
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

ALLREDUCE: Final = "allreduce"
BARRIER: Final = "barrier"
JOIN: Final = "join"
ADD_SET: Final = "add_process_set"
REMOVE_SET: Final = "remove_process_set"
LAYERS: Final = "SyncBatchNorm layers that have run"  # argument of "join"
_FREE_ROWS: Final = ("allgather", "alltoall")  # the size of dimension 0 may differ between ranks


@dataclass(frozen=True)
class Request:
    """One call of a collective on one rank."""

    kind: str  # "allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join", ...
    name: str  # by which ranks match their calls
    process_set: int = 0
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()  # dtype and shape of each; several in a grouped call
    # What must be equal on all ranks, beside dtype and shape: op, scale factors, root rank, device.
    arguments: Mapping[str, Any] = field(default_factory=dict)
    splits: tuple[int, ...] = ()  # rows for each rank, of alltoall; may differ between ranks

    @property
    def key(self) -> tuple[int, str]:
        return self.process_set, self.name

    @functools.cached_property
    def num_bytes(self) -> int:
        """Size of the values."""
        return sum(dtype_of(dtype).itemsize * math.prod(shape) for dtype, shape in self.tensors)

    @functools.cached_property
    def encoded(self) -> bytes:
        """The request as JSON."""
        return json.dumps(dataclasses.astuple(self), separators=(",", ":")).encode()

    @staticmethod
    def decode(words: Sequence[Any]) -> Request:
        kind, name, process_set, tensors, arguments, splits = words
        shapes = tuple((dtype, tuple(shape)) for dtype, shape in tensors)
        return Request(kind, name, process_set, shapes, arguments, tuple(splits))


@functools.cache
def dtype_of(name: str) -> torch.dtype:
    """ "float32" -> torch.float32."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@functools.lru_cache(maxsize=4096)
def request_of(
    kind: str,
    name: str,
    process_set: int,
    tensors: tuple[tuple[torch.dtype, torch.Size], ...],
    arguments: tuple[tuple[str, Any], ...],
    splits: tuple[int, ...],
) -> Request:
    """A Request, kept for the next call of the same name."""
    described = tuple((str(dtype).removeprefix("torch."), tuple(shape)) for dtype, shape in tensors)
    return Request(kind, name, process_set, described, dict(arguments), splits)


def encode_requests(requests: Sequence[Request]) -> bytes:
    return b"[%b]" % b",".join([request.encoded for request in requests]) if requests else b""


def decode_requests(data: bytes) -> list[Request]:
    return [Request.decode(words) for words in json.loads(data)] if data else []


@dataclass(frozen=True)
class Response:
    """A collective that all ranks carry out now."""

    requests: Mapping[int, Request]  # by rank; ranks that have joined are missing
    error: str = ""  # why the ranks do not fit together, for all of them to raise
    last_to_join: int = -1  # the rank that has joined last, in the response to "join"

    @property
    def first(self) -> Request:
        return next(iter(self.requests.values()))

    def fuses_with(self, other: Response) -> bool:
        """True if both can be carried out as one reduction."""
        mine, theirs = self.first, other.first
        return (
            mine.kind == theirs.kind == ALLREDUCE
            and not self.error
            and not other.error
            and mine.process_set == theirs.process_set
            and mine.arguments == theirs.arguments
            and mine.arguments.get("op") != "Adasum"
            and len({dtype for dtype, _ in (*mine.tensors, *theirs.tensors)}) == 1
            and self.requests.keys() == other.requests.keys()
        )


class Negotiation:
    """The requests that are waiting for other ranks.

    Args:
        process_sets: id -> global ranks, ascending; may change between cycles. 0 is the set of all ranks.
    """

    def __init__(self, process_sets: Mapping[int, Sequence[int]]) -> None:
        self._process_sets = process_sets
        self._waiting: dict[tuple[int, str], dict[int, Request]] = {}
        self.joined: list[int] = []  # in the order of joining; those of one cycle by rank

    def layers_before_join(self) -> int | None:
        """LAYERS of the ranks that have joined. None if no rank has joined."""
        joins = self._waiting.get((0, JOIN))
        return None if joins is None else int(next(iter(joins.values())).arguments[LAYERS])

    def waiting(self) -> Mapping[tuple[int, str], Sequence[int]]:
        """(process set, name) -> the ranks whose requests are missing, for warnings about stalls."""
        return {key: self._missing(key, requests) for key, requests in self._waiting.items()}

    def forget(self, process_set: int) -> None:
        """Drop the requests of a process set that exists no more."""
        self._waiting = {key: requests for key, requests in self._waiting.items() if key[0] != process_set}

    def advance(self, submitted: Sequence[Sequence[Request]]) -> list[Response]:
        """One cycle. `submitted[r]`: the new requests of rank r. Returns what is ready, in the order to carry out."""
        touched: dict[tuple[int, str], None] = {}  # in order
        has_joined = False
        for rank, requests in enumerate(submitted):
            for request in requests:
                if request.kind == JOIN:
                    self.joined.append(rank)
                    has_joined = True
                self._waiting.setdefault(request.key, {})[rank] = request
                touched[request.key] = None
        responses = []
        # "join" is last: until then, what other ranks have asked for needs nothing from those that have joined.
        for key in sorted(self._waiting if has_joined else touched, key=lambda key: key[1] == JOIN):
            if not self._missing(key, self._waiting[key]):
                responses.append(self._answer(self._waiting.pop(key)))
        return responses

    def _missing(self, key: tuple[int, str], requests: Mapping[int, Request]) -> list[int]:
        is_join = any(request.kind == JOIN for request in requests.values())
        excused = () if is_join else self.joined
        ranks = self._process_sets.get(key[0], ())
        return [rank for rank in ranks if rank not in requests and rank not in excused]

    def _answer(self, requests: dict[int, Request]) -> Response:
        in_order = dict(sorted(requests.items()))
        error = mismatch(in_order)
        kind = next(iter(in_order.values())).kind
        if kind == JOIN and not error:
            last = self.joined[-1]
            self.joined.clear()
            return Response(in_order, last_to_join=last)
        if self.joined and not error and kind not in (ALLREDUCE, BARRIER):
            ranks = ", ".join(map(str, sorted(self.joined)))
            error = (
                f"{kind} {next(iter(in_order.values())).name!r}: not supported while a rank has called join(), as rank "
                f"{ranks} has; sparse gradients, too, need sparse_as_dense=True then"
            )
        return Response(in_order, error)


def mismatch(requests: Mapping[int, Request]) -> str:
    """The first difference between requests of one name, as a sentence for users. "" if there is none."""
    ranks = list(requests)
    first = requests[ranks[0]]
    for rank in ranks[1:]:
        other = requests[rank]
        for what, mine, theirs in (
            ("collective", first.kind, other.kind),
            ("number of tensors", len(first.tensors), len(other.tensors)),
            *((name, first.arguments.get(name), other.arguments.get(name)) for name in first.arguments),
            *_tensor_facts(first, other),
        ):
            if mine != theirs:
                return (
                    f"ranks disagree about the {what} of {first.name!r}: {_said(what, mine)} on rank {ranks[0]}, "
                    f"{_said(what, theirs)} on rank {rank}"
                )
    return ""


def _tensor_facts(first: Request, other: Request) -> list[tuple[str, Any, Any]]:
    facts: list[tuple[str, Any, Any]] = []
    for i, ((dtype, shape), (their_dtype, their_shape)) in enumerate(zip(first.tensors, other.tensors, strict=False)):
        of = f" of tensor {i}" if len(first.tensors) > 1 else ""
        facts.append((f"dtype{of}", dtype, their_dtype))
        start = 1 if first.kind in _FREE_ROWS else 0
        free = ("*",) * min(start, len(shape))
        facts.append((f"shape{of}", (*free, *shape[start:]), (*free, *their_shape[start:])))
    return facts


def _said(what: str, value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if what.startswith("shape") else str(value)
