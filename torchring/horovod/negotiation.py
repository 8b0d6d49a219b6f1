"""A pure state machine: finds the collectives that are ready on all ranks, and differences between ranks.

Horovod matches collectives by name, whatever the order in which ranks call them. All ranks run this state machine on
the same input: in each negotiation cycle, every rank hands every rank the requests that its script has made since the
last cycle. So all ranks come to the same responses, in the same order, and no rank is a coordinator.

Example: 2 ranks; in the first cycle rank 0 requests "a" and "b", rank 1 requests "b"; in the second, rank 1 requests
"a". The first cycle answers "b", and the second answers "a".
"""

import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

ALLREDUCE: Final = "allreduce"
BARRIER: Final = "barrier"
JOIN: Final = "join"
LAYERS: Final = "SyncBatchNorm layers that have run"  # argument of "join"
_FREE_ROWS: Final = ("allgather", "alltoall")  # the size of dimension 0 may differ between ranks


class Request(NamedTuple):
    """One call of a collective on one rank."""

    kind: str  # "allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join", ...
    name: str  # by which ranks match their calls
    process_set: int = 0
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()  # dtype and shape of each; several in a grouped call
    # What must be equal on all ranks, beside dtype and shape: op, scale factors, root rank, device.
    arguments: tuple[tuple[str, Any], ...] = ()
    splits: tuple[int, ...] = ()  # rows for each rank, of alltoall; may differ between ranks

    @property
    def key(self) -> tuple[int, str]:
        return self.process_set, self.name

    @property
    def num_bytes(self) -> int:
        return sum(dtype_of(dtype).itemsize * math.prod(shape) for dtype, shape in self.tensors)

    def argument(self, name: str) -> Any:
        return dict(self.arguments)[name]


@functools.cache
def dtype_of(name: str) -> torch.dtype:
    """ "float32" -> torch.float32."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@functools.lru_cache(maxsize=4096)
def _encoded(request: Request) -> str:
    return json.dumps(request, separators=(",", ":"))


def encode_requests(requests: Sequence[Request]) -> bytes:
    return f"[{','.join(map(_encoded, requests))}]".encode() if requests else b""


def decode_requests(data: bytes) -> list[Request]:
    return [Request(*_as_tuples(words)) for words in json.loads(data)] if data else []


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class Response:
    """A collective that all ranks carry out now."""

    requests: Mapping[int, Request]  # by rank; ranks that have joined are missing
    error: str = ""  # why the ranks do not fit together, for all of them to raise
    last_to_join: int = -1  # the rank that has joined last, in the response to "join"

    @property
    def first(self) -> Request:
        return next(iter(self.requests.values()))

    @property
    def fuses_as(self) -> object:
        """Responses for which this is equal can be carried out as one reduction. None: it is carried out alone."""
        first = self.first
        dtypes = {dtype for dtype, _ in first.tensors}
        if first.kind != ALLREDUCE or self.error or len(dtypes) != 1 or ("op", "Adasum") in first.arguments:
            return None
        return first.process_set, first.arguments, dtypes, self.requests.keys()


class Negotiation:
    """The requests that are waiting for other ranks."""

    def __init__(self, process_sets: Mapping[int, Sequence[int]]) -> None:
        self._process_sets = process_sets  # id -> global ranks, ascending; may change between cycles. 0: all ranks.
        self._waiting: dict[tuple[int, str], dict[int, Request]] = {}
        self.joined: list[int] = []  # in the order of joining; those of one cycle by rank

    def layers_before_join(self) -> int | None:
        """LAYERS of the ranks that have joined. None if no rank has joined."""
        joins = self._waiting.get((0, JOIN))
        return None if joins is None else int(next(iter(joins.values())).argument(LAYERS))

    def waiting(self) -> Mapping[tuple[int, str], Sequence[int]]:
        """(process set, name) -> the ranks whose requests are missing, for warnings about stalls."""
        return {key: self._missing(key, requests) for key, requests in self._waiting.items()}

    def forget(self, process_set: int) -> None:
        """Drop the requests of a process set that exists no more."""
        self._waiting = {key: requests for key, requests in self._waiting.items() if key[0] != process_set}

    def advance(self, submitted: Sequence[Sequence[Request]]) -> list[Response]:
        """One cycle. `submitted[r]`: the new requests of rank r. Returns what is ready, in the order to carry out."""
        touched: dict[tuple[int, str], None] = {}  # in order
        num_joined = len(self.joined)
        for rank, requests in enumerate(submitted):
            for request in requests:
                if request.kind == JOIN:
                    self.joined.append(rank)
                self._waiting.setdefault(request.key, {})[rank] = request
                touched[request.key] = None
        keys = touched if len(self.joined) == num_joined else self._waiting  # whoever joins is not waited for any more
        # "join" is last: until then, what other ranks have asked for needs nothing from those that have joined.
        ready = [
            key for key in sorted(keys, key=lambda key: key[1] == JOIN) if not self._missing(key, self._waiting[key])
        ]
        return [self._answer(self._waiting.pop(key)) for key in ready]

    def _missing(self, key: tuple[int, str], requests: Mapping[int, Request]) -> list[int]:
        is_join = any(request.kind == JOIN for request in requests.values())
        excused = () if is_join else self.joined
        ranks = self._process_sets.get(key[0], ())
        return [rank for rank in ranks if rank not in requests and rank not in excused]

    def _answer(self, requests: dict[int, Request]) -> Response:
        in_order = dict(sorted(requests.items()))
        first = next(iter(in_order.values()))
        if error := mismatch(in_order):
            return Response(in_order, error)
        if first.kind == JOIN:
            last = self.joined[-1]
            self.joined.clear()
            return Response(in_order, last_to_join=last)
        if self.joined and first.kind not in (ALLREDUCE, BARRIER):
            ranks = ", ".join(map(str, sorted(self.joined)))
            error = (
                f"{first.kind} {first.name!r}: not supported while a rank has called join(), as rank {ranks} has; "
                "sparse gradients, too, need sparse_as_dense=True then"
            )
        return Response(in_order, error)


def mismatch(requests: Mapping[int, Request]) -> str:
    """The first difference between requests of one name, as a sentence for users. "" if there is none."""
    (one, first), *others = requests.items()
    for rank, other in others:
        for what, mine, theirs in _facts(first, other):
            if mine != theirs:
                return (
                    f"ranks disagree about the {what} of {first.name!r}: {_said(what, mine)} on rank {one}, "
                    f"{_said(what, theirs)} on rank {rank}"
                )
    return ""


def _facts(first: Request, other: Request) -> Iterator[tuple[str, Any, Any]]:
    yield "collective", first.kind, other.kind
    yield "number of tensors", len(first.tensors), len(other.tensors)
    for name, value in first.arguments:
        yield name, value, dict(other.arguments).get(name)
    start = 1 if first.kind in _FREE_ROWS else 0
    for i, ((dtype, shape), (their_dtype, their_shape)) in enumerate(zip(first.tensors, other.tensors, strict=False)):
        of = f" of tensor {i}" if len(first.tensors) > 1 else ""
        yield f"dtype{of}", dtype, their_dtype
        free = ("*",) * min(start, len(shape))
        yield f"shape{of}", (*free, *shape[start:]), (*free, *their_shape[start:])


def _said(what: str, value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if what.startswith("shape") else str(value)
