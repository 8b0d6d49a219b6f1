"""Sequences of collectives of a world, each in the order of its calls, blocking or not."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch

from torchring.collectives import operations
from torchring.collectives.operations import Backend, SingleRank
from torchring.collectives.shared_memory import SharedMemoryCollectives
from torchring.collectives.signature import Signature, first_difference
from torchring.dynamo import run_eagerly
from torchring.errors import PeerLostError, PlanMismatchError, RingError, in_step
from torchring.interruption import InterruptionGuard
from torchring.threads import SerialThread
from torchring.world import World

_T = TypeVar("_T")
_BARRIER: Final = Signature("barrier")
SHUT_DOWN: Final = "torchring.shutdown() was called before this collective began"
CALLED: Final = (  # instead of `World.advice`
    ". Its own output says whether it failed. If it did not: this rank is in {}(), which every rank has to call "
    "equally often. Is the call in an `if rank() == 0`, or in a loop over batches of which ranks have different "
    "numbers?"
)


class Join:
    """Knows if the script is inside `torchring.join`. A world has one: `world.shared(Join)`.

    There collectives are refused: ranks that have ended only reduce gradients.
    """

    def __init__(self, world: World) -> None:
        self.is_open = False

    def refuse(self, what: str) -> None:
        """Raise ValueError inside `torchring.join`, for what needs all ranks."""
        if self.is_open:
            raise ValueError(
                f"{what} was called inside torchring.join(), where ranks whose data has ended would not take part; "
                "call it before or after the with block"
            )


class Collectives:
    """One sequence of collectives, in the order in which they are called. Opening a sequence is collective.

    Its name is unique in this world, equal on every rank. `is_scripts`: the script decides when to call them; ranks
    that have ended would not.
    """

    def __init__(self, world: World, name: str = "collectives", *, is_scripts: bool = True) -> None:
        self.world = world
        self.name = name
        self._is_scripts = is_scripts
        # Between hosts the first call opens it, because a backend takes a thread and a connection to each rank.
        self._backend: Backend | None = None
        if world.size == 1:
            self._backend = SingleRank()
        elif world.shares_memory and world.host is not None:
            self._backend = SharedMemoryCollectives(world.host)
        self._find_lost_peer: Callable[[], RingError | None] = lambda: None
        self._background = SerialThread(f"torchring-{name}")
        self._calls = InterruptionGuard(world)
        self._in_background = InterruptionGuard(world)
        self._last: Future[Any] | None = None
        self._progress = world.observer.open_progress(name)
        self._join = world.shared(Join)
        world.on_close(self.close)

    @run_eagerly
    def run(self, what: str, operation: Callable[..., _T], *arguments: Any) -> _T:
        """Run `operation(backend, *arguments)` after earlier asynchronous operations. Errors call it `what`."""
        self._check_callable(what)
        result: _T = self._calls.run(what, self._run_in_turn, what, operation, arguments)
        return result

    @run_eagerly
    def start(self, what: str, operation: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """Run `operation(backend, *arguments)` on the background thread."""
        self._check_callable(what)
        return self._calls.run(what, self._start, what, operation, arguments)

    def _run_in_turn(self, what: str, operation: Callable[..., _T], arguments: tuple[Any, ...]) -> _T:
        if self._last is not None:
            try:
                self._last.exception()  # waits; the error is its caller's
            except CancelledError:
                raise PeerLostError(SHUT_DOWN) from None
        return self._operate(what, operation, arguments)

    def _start(self, what: str, operation: Callable[..., _T], arguments: tuple[Any, ...]) -> Future[_T]:
        def in_background() -> _T:
            result: _T = self._in_background.run(what, self._operate, what, operation, arguments)
            return result

        self._last = future = self._background.submit(in_background)
        return future

    def _check_callable(self, what: str) -> None:
        if self._is_scripts:
            self._join.refuse(what)
        self.world.refuse_provisional(what)

    def _operate(self, what: str, operation: Callable[..., _T], arguments: tuple[Any, ...]) -> _T:
        if torch.is_inference_mode_enabled():  # what the backend keeps has to be written outside, too
            with torch.inference_mode(False):
                return self._operate(what, operation, arguments)
        try:
            with self._progress.operation(what):
                return operation(self.opened(), *arguments)
        except PeerLostError as error:
            error.message = error.message.replace(self.world.advice, CALLED.format(what))
            raise

    def opened(self) -> Backend:
        """What moves the bytes, for a caller that is in an operation of an `InterruptionGuard`. May be collective."""
        if self._backend is None:
            from torchring.collectives.gloo import GlooCollectives  # a job on one host does not need it

            self._backend = backend = GlooCollectives(self.world, self.name)
            self._find_lost_peer = backend.lost_peer
        return self._backend

    def lost_peer(self) -> RingError | None:
        """The error if a rank of another host is gone, as far as these collectives know. From any thread."""
        return self._find_lost_peer()

    def close(self) -> None:
        self._background.close()
        if self._backend is not None:
            self._backend.close()

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        return self.run("all_reduce", operations.all_reduce, tensor, op)

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        return self.run("broadcast", operations.broadcast, tensor, src)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """The `data` of all ranks, in rank order. Some hundred bytes travel in one message."""
        return self.run("all_gather_object", operations.exchange, data)

    def all_gather_json(self, mine: Any) -> list[Any]:
        """What all ranks say, in rank order: numbers, strings, and lists and dicts of those."""
        return [json.loads(said) for said in self.all_gather_bytes(json.dumps(mine).encode())]

    def all_gather(self, tensor: torch.Tensor, signature: Signature | None = None) -> list[torch.Tensor]:
        """The tensors of all ranks, in rank order. Sizes of dimension 0 may differ.

        `signature` names the operation in errors, if the collective is a part of another operation.
        """
        what = "all_gather" if signature is None else signature.operation
        return self.run(what, operations.all_gather, tensor, signature)

    def check_equal(self, description: Sequence[str]) -> None:
        """Raise PlanMismatchError, which names the first difference, on every rank unless all pass equal lines."""
        digest = hashlib.sha256(json.dumps(list(description)).encode()).digest()
        if len(set(self.all_gather_bytes(digest))) == 1:
            return
        everybody = self.all_gather_json(list(description))
        others = [rank for rank, theirs in enumerate(everybody) if theirs != everybody[0]]
        error = PlanMismatchError(first_difference(everybody), rank=self.world.rank, peers=others)
        raise self.world.note_members(in_step(error))

    def raise_together(self, problem: Exception | None, what: str) -> None:
        """Raise `problem`, if there is one. Raise PlanMismatchError if only other ranks have one. So no rank waits.

        `what` stands between a rank's number and its problem in the text: "could not wrap its optimizer".
        """
        text = f"{type(problem).__name__}: {problem}" if problem is not None else ""
        problems = self.all_gather_bytes(text.encode())
        others = [rank for rank, other in enumerate(problems) if other]
        if problem is not None:
            raise in_step(problem)
        if others:
            text = f"rank {others[0]} {what}: {problems[others[0]].decode()}"
            raise self.world.note_members(in_step(PlanMismatchError(text, rank=self.world.rank, peers=others)))

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Inside, nothing is collective, and a rank may raise an error: then, at the end, all do (`raise_together`)."""
        problem: Exception | None = None
        try:
            yield
        except Exception as error:
            problem = error
        self.raise_together(problem, what)

    def barrier(self) -> None:
        self.run("barrier", lambda backend: backend.barrier(_BARRIER))

    def any_rank(self, flag: bool) -> bool:
        return bool(self.all_reduce(torch.tensor([int(flag)], device="cpu"), "max"))


def _open(world: World) -> tuple[Collectives, Collectives]:
    """The script's and torchring's: the script may call collectives in one thread while another thread trains."""
    with torch.inference_mode(False):
        return InterruptionGuard(world).run(
            "the first collective", lambda: (Collectives(world), Collectives(world, "internal", is_scripts=False))
        )


def collectives_of(world: World) -> Collectives:
    """The script's collectives. `wrap` and `broadcast_parameters` belong to them. The first call is collective."""
    return world.shared(_open)[0]


def internal_collectives_of(world: World) -> Collectives:
    """The collectives that torchring itself calls, in and after a backward. The first call is collective."""
    return world.shared(_open)[1]
