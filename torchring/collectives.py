"""Collectives for scripts: metrics, batch counts, early stopping, objects.

They act on the default world and are called by all its ranks in the same order. Tensors on a GPU travel by way of the
host, which waits for them; gradients do not, see `reduction.py`. A blocking call returns when this
rank's result is there. With `async_op=True` it runs on a background thread: the tensor belongs to torchring until
`Work.wait()` returns; order among collectives, blocking or not, is the order of the calls. Threads of one rank take
turns, in an order that should be the same on all ranks.

What torchring itself tells the other ranks at the end of a backward goes apart from the script's collectives, so that
a thread of the script may call some while another one trains.

Ranks of one host exchange through shared memory; otherwise Gloo does, in a group apart from the script's own.
"""

from __future__ import annotations

import json
import operator
import pickle
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, cast, overload

import torch

from torchring.call import OPS, Call, Op, call_for
from torchring.dynamo import run_eagerly
from torchring.errors import PeerLostError, PlanMismatchError, in_step
from torchring.interruption import InterruptionGuard
from torchring.memory.exchange import HostExchange, combine
from torchring.memory.host import bytes_of
from torchring.plan import fingerprint, first_difference
from torchring.platform import PLATFORMS
from torchring.transport.c10d import C10dTransport
from torchring.transport.exchange import GroupExchange
from torchring.worker import Worker
from torchring.world import World, default_world

_T = TypeVar("_T")
_REDUCIBLE = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip

_BATCH_BYTES = 8 << 20


class Work:
    """A collective under way."""

    def __init__(self, future: Future[torch.Tensor]) -> None:
        self._future = future

    def wait(self) -> torch.Tensor:
        """Block until done; returns the result, or raises what went wrong."""
        try:
            return self._future.result()
        except CancelledError:
            raise PeerLostError("torchring.shutdown() was called before this collective began") from None

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._future.done()


class _Exchange(Protocol):
    def all_reduce(self, data: torch.Tensor, op: str, call: Call) -> None: ...
    def broadcast(self, data: torch.Tensor, src: int, call: Call) -> None: ...
    def all_gather(self, data: torch.Tensor, call: Call) -> list[torch.Tensor]: ...
    def all_to_all(self, pieces: Sequence[torch.Tensor], call: Call) -> list[torch.Tensor]: ...
    def barrier(self, call: Call) -> None: ...
    def close(self) -> None: ...


class _Alone:
    """The exchange of a world of one: everything is there already."""

    def all_reduce(self, data: torch.Tensor, op: str, call: Call) -> None:
        """The mean, sum, minimum, maximum and product of one value is that value."""

    def broadcast(self, data: torch.Tensor, src: int, call: Call) -> None: ...

    def all_gather(self, data: torch.Tensor, call: Call) -> list[torch.Tensor]:
        return [data.clone()]

    def all_to_all(self, pieces: Sequence[torch.Tensor], call: Call) -> list[torch.Tensor]:
        return [piece.clone() for piece in pieces]

    def barrier(self, call: Call) -> None: ...

    def close(self) -> None: ...


class Collectives:
    """One stream of collectives of a world, in the order in which they are called. Opening it is collective.

    Args:
        name: of the stream; unique in this world, the same on every rank.
    """

    def __init__(self, world: World, name: str = "collectives") -> None:
        self.world = world
        self._name = name
        # Between hosts it is opened with the first call: a thread and a connection for each rank.
        self._exchange: _Exchange | None = None
        if world.size == 1:
            self._exchange = _Alone()
        elif world.shares_memory and world.host is not None:
            self._exchange = HostExchange(world.host)
        self._background = Worker(f"torchring-{name}")
        self._calls = InterruptionGuard(world)
        self._in_background = InterruptionGuard(world)
        self._last: Future[Any] | None = None
        world.on_close(self.close)

    @run_eagerly
    def run(self, what: str, operation: Callable[[_Exchange], _T]) -> _T:
        """Now, or after the asynchronous ones that were called before. Error messages call it `what`."""

        def in_turn() -> _T:
            if self._last is not None and not self._last.done():
                return self._start(what, operation).result()
            return operation(self._opened())

        return self._calls.run(what, in_turn)

    @run_eagerly
    def start(self, what: str, operation: Callable[[_Exchange], _T]) -> Future[_T]:
        """On the background thread."""
        return self._calls.run(what, lambda: self._start(what, operation))

    def _start(self, what: str, operation: Callable[[_Exchange], _T]) -> Future[_T]:
        future = self._background.submit(lambda: self._in_background.run(what, lambda: operation(self._opened())))
        self._last = future
        return future

    def _opened(self) -> _Exchange:
        if self._exchange is None:
            world = self.world
            assert world.rendezvous is not None
            transport = C10dTransport(world.rendezvous, self._name, world.host)
            world.on_failure(transport)
            self._exchange = GroupExchange(transport)
        return self._exchange

    def close(self) -> None:
        self._background.close()
        if self._exchange is not None:
            self._exchange.close()
        _of_world.pop(self.world, None)

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        return self.run("all_reduce", lambda exchange: _all_reduce(exchange, tensor, op))

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        return self.run("broadcast", lambda exchange: _broadcast(exchange, tensor, src))

    def broadcast_together(self, tensors: Iterable[torch.Tensor], src: int) -> None:
        """Many at once, in messages of some MiB: between hosts, one message for each of 800 took 2 s."""
        tensors = list(tensors)
        for checked in tensors:
            check_dense(checked)
            check_writable(checked)
        batch: list[torch.Tensor] = []
        num_bytes = 0
        for tensor in [*tensors, None]:
            if batch and (tensor is None or num_bytes + tensor.nbytes > _BATCH_BYTES):
                flat = torch.cat([bytes_of(_plain(small)) for small in batch])
                self.broadcast(flat, src)
                if self.world.rank != src:
                    _hand_out(flat, batch)
                batch, num_bytes = [], 0
            if tensor is not None and tensor.nbytes > _BATCH_BYTES:
                self.broadcast(tensor, src)
            elif tensor is not None:
                batch.append(tensor)
                num_bytes += tensor.nbytes

    def broadcast_bytes(self, data: bytes | None, src: int) -> bytes:
        """`data` of rank `src`, which alone has to pass it."""

        def operation(exchange: _Exchange) -> bytes:
            mine = data if self.world.rank == src and data is not None else b""
            call = Call("broadcast_object", f"src={src}")
            length = torch.tensor([len(mine)], device="cpu")
            exchange.broadcast(bytes_of(length), src, call)
            buffer = (
                _tensor_of(mine)
                if self.world.rank == src
                else torch.empty(int(length), dtype=torch.uint8, device="cpu")
            )
            exchange.broadcast(buffer, src, call)
            return buffer.numpy().tobytes()

        return self.run("broadcast_object", operation)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Everybody's `data`, in rank order."""
        call = Call("all_gather_object")

        def operation(exchange: _Exchange) -> list[bytes]:
            return [part.numpy().tobytes() for part in exchange.all_gather(_tensor_of(data), call)]

        return self.run("all_gather_object", operation)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's tensor, in rank order; sizes of dimension 0 may differ."""
        return self.run("all_gather", lambda exchange: _all_gather(exchange, tensor))

    def check_equal(self, description: Sequence[str]) -> None:
        """Raise PlanMismatchError on every rank, naming the first difference, unless all ranks pass the same lines."""
        if len(set(self.all_gather_bytes(fingerprint(description)))) == 1:
            return
        everybody = [json.loads(text) for text in self.all_gather_bytes(json.dumps(list(description)).encode())]
        others = [rank for rank, theirs in enumerate(everybody) if theirs != everybody[0]]
        raise in_step(PlanMismatchError(first_difference(everybody), rank=self.world.rank, peers=others))

    def raise_together(self, problem: Exception | None, what: str) -> None:
        """Raise `problem`, and PlanMismatchError on ranks that have none where another one has: nobody waits for it.

        `what` goes between that rank's number and its problem: "could not wrap its optimizer".
        """
        text = f"{type(problem).__name__}: {problem}" if problem is not None else ""
        problems = self.all_gather_bytes(text.encode())
        others = [rank for rank, other in enumerate(problems) if other]
        if problem is not None:
            raise in_step(problem)
        if others:
            text = f"rank {others[0]} {what}: {problems[others[0]].decode()}"
            raise in_step(PlanMismatchError(text, rank=self.world.rank, peers=others))

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.run("barrier", lambda exchange: exchange.barrier(Call("barrier")))

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank."""
        return bool(self.all_reduce(torch.tensor([int(flag)], device="cpu"), "max"))


@dataclass(frozen=True)
class _Streams:
    script: Collectives
    internal: Collectives


_of_world: dict[World, _Streams] = {}


def _streams_of(world: World) -> _Streams:
    """Opened together at the first call, which all ranks make; gone when the world is closed."""
    streams = _of_world.get(world)
    if streams is None:
        with world.opening:
            streams = _of_world.get(world)
            if streams is None:
                streams = _of_world[world] = InterruptionGuard(world).run("the first collective", lambda: _open(world))
    return streams


def _open(world: World) -> _Streams:
    return _Streams(Collectives(world), Collectives(world, "internal"))


def collectives_of(world: World) -> Collectives:
    """The script's collectives, which it calls by themselves or by way of `wrap` and `broadcast_parameters`."""
    return _streams_of(world).script


def internal_collectives_of(world: World) -> Collectives:
    """What torchring itself calls, in and after a backward."""
    return _streams_of(world).internal


@overload
def all_reduce(tensor: torch.Tensor, op: Op = "mean", async_op: Literal[False] = False) -> torch.Tensor: ...
@overload
def all_reduce(tensor: torch.Tensor, op: Op = "mean", *, async_op: Literal[True]) -> Work: ...
@overload
def all_reduce(tensor: torch.Tensor, op: Op, async_op: Literal[True]) -> Work: ...
@overload
def all_reduce(tensor: torch.Tensor, op: Op = "mean", async_op: bool = False) -> torch.Tensor | Work: ...


def all_reduce(tensor: torch.Tensor, op: Op = "mean", async_op: bool = False) -> torch.Tensor | Work:
    """Combine `tensor` over all ranks, in place.

    Args:
        tensor: on the CPU or CUDA, any shape and strides, the same on every rank; fp16, bf16, fp32, fp64 or an integer
            dtype. 16-bit values are combined in fp32 and rounded once.
        op: "mean", "sum", "min", "max" or "product". "mean" takes floating point only, like torch.mean.
        async_op: return a `Work` at once.

    Returns `tensor`, with the same bits on every rank, or a `Work` whose `wait()` returns it.

    Raises ValueError for an unknown op or a tensor on another device, TypeError for its dtype, PlanMismatchError
    where ranks differ, PeerLostError and PeerTimeoutError.
    """
    check_dense(tensor)
    check_writable(tensor)
    _check_reducible(tensor, op)
    return _dispatch("all_reduce", lambda exchange: _all_reduce(exchange, tensor, op), async_op, tensor.device)


@overload
def broadcast(tensor: torch.Tensor, src: int = 0, async_op: Literal[False] = False) -> torch.Tensor: ...
@overload
def broadcast(tensor: torch.Tensor, src: int = 0, *, async_op: Literal[True]) -> Work: ...
@overload
def broadcast(tensor: torch.Tensor, src: int, async_op: Literal[True]) -> Work: ...
@overload
def broadcast(tensor: torch.Tensor, src: int = 0, async_op: bool = False) -> torch.Tensor | Work: ...


def broadcast(tensor: torch.Tensor, src: int = 0, async_op: bool = False) -> torch.Tensor | Work:
    """Overwrite `tensor` with that of rank `src`, in place; any dtype, the same shape on every rank.

    Returns `tensor` or a `Work`. Raises ValueError for a rank that does not exist; else as `all_reduce`.
    """
    check_dense(tensor)
    check_writable(tensor)
    _check_rank(src)
    return _dispatch("broadcast", lambda exchange: _broadcast(exchange, tensor, src), async_op, tensor.device)


@overload
def all_gather(tensor: torch.Tensor, async_op: Literal[False] = False) -> torch.Tensor: ...
@overload
def all_gather(tensor: torch.Tensor, async_op: Literal[True]) -> Work: ...
@overload
def all_gather(tensor: torch.Tensor, async_op: bool = False) -> torch.Tensor | Work: ...


def all_gather(tensor: torch.Tensor, async_op: bool = False) -> torch.Tensor | Work:
    """Concatenate everybody's tensor along dimension 0, in rank order; any dtype.

    Sizes of dimension 0 may differ between ranks, the others not. 0-dim tensors become a vector of size().
    Returns a new tensor or a `Work`. Raises PlanMismatchError where ranks differ; else as `all_reduce`.
    """
    check_dense(tensor)
    return _dispatch("all_gather", lambda exchange: torch.cat(_all_gather(exchange, tensor)), async_op, tensor.device)


@overload
def reduce_scatter(tensor: torch.Tensor, op: Op = "mean", async_op: Literal[False] = False) -> torch.Tensor: ...
@overload
def reduce_scatter(tensor: torch.Tensor, op: Op = "mean", *, async_op: Literal[True]) -> Work: ...
@overload
def reduce_scatter(tensor: torch.Tensor, op: Op, async_op: Literal[True]) -> Work: ...
@overload
def reduce_scatter(tensor: torch.Tensor, op: Op = "mean", async_op: bool = False) -> torch.Tensor | Work: ...


def reduce_scatter(tensor: torch.Tensor, op: Op = "mean", async_op: bool = False) -> torch.Tensor | Work:
    """Combine over all ranks and return this rank's share of dimension 0.

    Shares are equal, or one longer on the first ranks where the size is not a multiple of size(), as torch.chunk and
    Horovod deal them out. Combined in rank order, 16-bit values in fp32. `tensor` is left as it is.
    Returns a new tensor or a `Work`. Raises as `all_reduce`, and ValueError for a 0-dim tensor.
    """
    check_dense(tensor)
    _check_reducible(tensor, op)
    if tensor.dim() == 0 or not tensor.shape[1:].numel():
        raise ValueError(f"reduce_scatter deals out rows of at least one element, got {tuple(tensor.shape)}")
    world = default_world()

    def operation(exchange: _Exchange) -> torch.Tensor:
        splits = [len(part) for part in torch.arange(tensor.shape[0], device="cpu").tensor_split(world.size)]
        call = call_for("reduce_scatter", tensor, f"op={op!r}")
        parts = _all_to_all(exchange, tensor, splits, call)[0]
        return _reduce_parts(parts, op)

    return _dispatch("reduce_scatter", operation, async_op, tensor.device)


@overload
def all_to_all(tensor: torch.Tensor, splits: None = None, async_op: Literal[False] = False) -> torch.Tensor: ...
@overload
def all_to_all(
    tensor: torch.Tensor, splits: Sequence[int], async_op: Literal[False] = False
) -> tuple[torch.Tensor, list[int]]: ...
@overload
def all_to_all(tensor: torch.Tensor, splits: Sequence[int] | None = None, *, async_op: Literal[True]) -> Work: ...
@overload
def all_to_all(tensor: torch.Tensor, splits: Sequence[int] | None, async_op: Literal[True]) -> Work: ...
@overload
def all_to_all(
    tensor: torch.Tensor, splits: Sequence[int] | None = None, async_op: bool = False
) -> torch.Tensor | tuple[torch.Tensor, list[int]] | Work: ...


def all_to_all(tensor: torch.Tensor, splits: Sequence[int] | None = None, async_op: bool = False) -> Any:
    """Send a slice of dimension 0 to every rank, and concatenate what they send here, in rank order; any dtype.

    Args:
        tensor: on the CPU or CUDA, at least 1-dim; dimensions but the first the same on every rank.
        splits: rows for each rank, together all of them; default: equal shares.
        async_op: return a `Work`.

    Returns the received rows; with `splits` given, also how many came from each rank (a list, as Horovod's alltoall).

    Raises ValueError for splits that do not fit; else as `all_reduce`.
    """
    check_dense(tensor)
    world = default_world()
    if tensor.dim() == 0 or not tensor.shape[1:].numel():
        raise ValueError(f"all_to_all splits dimension 0 into rows of at least one element, got {tuple(tensor.shape)}")
    rows = tensor.shape[0]
    if splits is None:
        if rows % world.size:
            raise ValueError(f"dimension 0 has {rows} rows, not a multiple of {world.size} ranks; pass splits")
        shares = [rows // world.size] * world.size
    else:
        shares = [operator.index(share) for share in splits]  # TypeError for 3.5
        if len(shares) != world.size or sum(shares) != rows or min(shares) < 0:
            raise ValueError(f"splits need {world.size} counts that add up to {rows} rows, got {shares}")

    def operation(exchange: _Exchange) -> Any:
        call = call_for("all_to_all", tensor, any_rows=True)
        parts, counts = _all_to_all(exchange, tensor, shares, call)
        return torch.cat(parts) if splits is None else (torch.cat(parts), counts)

    return _dispatch("all_to_all", operation, async_op, tensor.device)


def barrier() -> None:
    """Return when every rank has called it."""
    collectives_of(default_world()).barrier()


def broadcast_object(obj: _T | None, src: int = 0) -> _T:
    """The picklable `obj` of rank `src`, on every rank; the others' argument is ignored.

    The bytes of rank `src` are unpickled, which can run code of its choosing: ranks trust each other.
    """
    _check_rank(src)
    world = default_world()
    data = collectives_of(world).broadcast_bytes(pickle.dumps(obj) if world.rank == src else None, src)
    return cast(_T, obj if world.rank == src else pickle.loads(data))


def all_gather_object(obj: _T) -> list[_T]:
    """Everybody's picklable `obj`, in rank order.

    Their bytes are unpickled, which can run code of the sender's choosing: ranks trust each other.
    """
    world = default_world()
    parts = collectives_of(world).all_gather_bytes(pickle.dumps(obj))
    return [obj if rank == world.rank else pickle.loads(part) for rank, part in enumerate(parts)]


def _dispatch(
    what: str, operation: Callable[[_Exchange], torch.Tensor], async_op: bool, device: torch.device
) -> torch.Tensor | Work:
    collectives = collectives_of(default_world())
    if device.type == "cuda":  # on whichever thread, in the stream that computes the tensor
        stream, of_caller = torch.cuda.current_stream(device), operation

        def operation(exchange: _Exchange) -> torch.Tensor:
            with torch.cuda.stream(stream):
                return of_caller(exchange)

    return Work(collectives.start(what, operation)) if async_op else collectives.run(what, operation)


@torch.no_grad()
def _all_reduce(exchange: _Exchange, tensor: torch.Tensor, op: str) -> torch.Tensor:
    flat = _plain(tensor).view(-1)
    exchange.all_reduce(flat, op, call_for("all_reduce", tensor, f"op={op!r}"))
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))
    return tensor


@torch.no_grad()
def _broadcast(exchange: _Exchange, tensor: torch.Tensor, src: int) -> torch.Tensor:
    data = _plain(tensor)
    exchange.broadcast(bytes_of(data), src, call_for("broadcast", tensor, f"src={src}"))
    if data.data_ptr() != tensor.data_ptr():
        tensor.copy_(data)
    return tensor


@torch.no_grad()
def _hand_out(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """The bytes of these tensors, one after the other, become theirs."""
    for tensor, part in zip(tensors, torch.split(flat, [tensor.nbytes for tensor in tensors]), strict=True):
        fresh = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        bytes_of(fresh).copy_(part)
        tensor.detach().copy_(fresh)


@torch.no_grad()
def _all_gather(exchange: _Exchange, tensor: torch.Tensor) -> list[torch.Tensor]:
    data = _plain(tensor.reshape(1) if tensor.dim() == 0 else tensor)
    call = call_for("all_gather", data, any_rows=True)
    if not data.shape[1:].numel():  # rows without bytes: only their number travels
        counts = exchange.all_gather(bytes_of(torch.tensor([len(data)], device="cpu")), call)
        return [tensor.new_empty(int(count.view(torch.int64)), *data.shape[1:]) for count in counts]
    parts = exchange.all_gather(bytes_of(data), call)
    return [_from_bytes(part, data).to(tensor.device) for part in parts]


@torch.no_grad()
def _all_to_all(
    exchange: _Exchange, tensor: torch.Tensor, splits: Sequence[int], call: Call
) -> tuple[list[torch.Tensor], list[int]]:
    data = _plain(tensor)
    parts = exchange.all_to_all([bytes_of(part) for part in torch.split(data, list(splits))], call)
    received = [_from_bytes(part, data).to(tensor.device) for part in parts]
    return received, [len(part) for part in received]


def _reduce_parts(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Combine in rank order, 16-bit values in fp32."""
    total = torch.empty_like(parts[0])
    combine(parts, total, op)
    return total


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The values in row-major order, without history and lazy conjugation: `tensor`'s own memory where that is so.

    Of a tensor on a GPU, a copy in the host's memory, when the current stream has computed it.
    """
    return tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()


def is_movable(device: torch.device) -> bool:
    """Whether tensors there can take part."""
    return device.type in ("cpu", *PLATFORMS)


def check_dense(tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected a torch.Tensor, got {type(tensor).__name__}")
    if not is_movable(tensor.device):
        raise ValueError(f"expected a tensor on the CPU or on CUDA, got one on {tensor.device}")
    if tensor.layout != torch.strided:
        raise ValueError(f"expected a dense tensor, got layout {tensor.layout}; pass tensor.to_dense()")


def check_writable(tensor: torch.Tensor) -> None:
    if any(step == 0 and length > 1 for length, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError("an expanded tensor has elements that share memory and cannot be written; pass tensor.clone()")


def _check_reducible(tensor: torch.Tensor, op: str) -> None:
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(map(repr, OPS))}, got {op!r}")
    if tensor.dtype not in _REDUCIBLE:
        raise TypeError(f"{tensor.dtype} cannot be reduced; these can: {', '.join(map(str, _REDUCIBLE))}")
    if op == "mean" and not tensor.is_floating_point():
        raise TypeError(f"the mean of {tensor.dtype} is not of that dtype; use op='sum', or convert to floating point")


def _check_rank(src: int) -> None:
    size = default_world().size
    if not isinstance(src, int) or not 0 <= src < size:
        raise ValueError(f"src must be a rank, 0 .. {size - 1}, got {src!r}")


def _tensor_of(data: bytes) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def _from_bytes(data: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`data` as rows shaped like those of `like`."""
    return data.view(like.dtype).view(-1, *like.shape[1:])
