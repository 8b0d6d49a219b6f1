"""The errors of torchring.

`ValueError` and `TypeError` are for mistakes of one caller. A `RingError` is for what went wrong *between* ranks. Every
surviving rank raises it. Its attributes carry the facts, so that a script can act on them.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Sequence
from typing import Final, TypeVar


class HorovodInternalError(RuntimeError):
    """The error that scripts for Horovod catch: a collective failed on all ranks, which disagree, or one is gone.

    Every RingError is one. Where ranks disagree about a collective, `torchring.horovod` raises this class itself, and
    the library stays usable.
    """


class RingError(HorovodInternalError):
    """Something went wrong between ranks. Every rank that is alive raises it.

    The process stays usable: call `torchring.shutdown()` and `torchring.init()` on all ranks.

    Attributes:
        rank: the rank that raises. This attribute and those below are None, or empty, where unknown.
        peers: the ranks that caused it.
        members: if it happened in a group, the ranks of the job in that group. `rank`, `peers` and `message` then have
            positions in `members`, and the text of the error has ranks of the job.
        bucket: index of the gradient bucket being reduced.
        parameters: names of the parameters concerned.
        step: optimizer step, counted from 0.
        seconds: how long this rank had waited.
        in_step: whether every rank raises at this point, so that ranks can go on together without `shutdown()`.
        explanation: what the ranks in `peers` did last, a sentence each. Empty except in a PeerTimeoutError.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        peers: Sequence[int] = (),
        bucket: int | None = None,
        parameters: Sequence[str] = (),
        step: int | None = None,
        seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.rank = rank
        self.peers = tuple(peers)
        self.bucket = bucket
        self.parameters = tuple(parameters)
        self.step = step
        self.seconds = seconds
        self.members: tuple[int, ...] | None = None
        self.in_step = False
        self.explanation = ""

    def locate(self, *, bucket: int, parameters: Sequence[str], step: int) -> None:
        """Add where in the training step the error happened. The layer that raises it does not know of buckets."""
        if self.bucket is None:
            self.bucket, self.parameters, self.step = bucket, tuple(parameters), step

    def __str__(self) -> str:
        where = []
        if self.rank is not None:
            where.append(f"rank {self.rank}")
        if self.step is not None:
            where.append(f"step {self.step}")
        if self.bucket is not None:
            where.append(f"bucket {self.bucket}")
        if self.bucket is not None and self.parameters:
            first, last = self.parameters[0], self.parameters[-1]
            where.append(f"parameters {first} .. {last}" if first != last else f"parameter {first}")
        if self.seconds is not None:
            where.append(f"after {self.seconds:.2f} s")
        text = f"{self.message} [{', '.join(where)}]" if where else self.message
        return in_group(f"{text}. {self.explanation}" if self.explanation else text, self.members or ())


class PlanMismatchError(RingError):
    """Ranks disagree about what to reduce: other parameters, shapes, dtypes or options, or another collective."""


class PeerLostError(RingError):
    """A peer died, or left while this rank still needed it. `peers` names it."""


class PeerTimeoutError(RingError):
    """A peer is alive but did not arrive within the timeout. `peers` names the late ranks.

    `explanation` says what each of them did last: step, phase (forward, backward, step() or outside), since when, and
    where in the script.
    """


class GradientError(RingError):
    """A gradient that must not be used: it is not reduced, is not finite, or was replaced after its reduction."""


class TopologyError(RingError):
    """The launcher's environment is incomplete or contradicts itself, or ranks do not fit the requested algorithm."""


def ranks_in_words(ranks: Iterable[int]) -> str:
    """[3] -> "rank 3", [1, 2] -> "ranks 1, 2", [0, 1, 2, 5] -> "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'' if len(runs) == 1 == len(runs[0]) else 's'} {', '.join(texts)}"


_POSITIONS: Final = re.compile(
    r"(?<!group of )\b([Rr])ank(?: (\d+)|s (\d+(?:-\d+)?(?:(?:, | and )\d+(?:-\d+)?)*)(?!-\d|, \d| and \d))\b"
    r"(?! \([-\d, and]+ of its group)"  # `in_group` has written these
)


def of_job(text: str, members: Sequence[int]) -> str:
    """`text`, in which ranks are positions in a group of `members`, with the ranks of the job.

    Example: "rank 1 died", members [0, 2] -> "rank 2 (1 of its group) died". Without members, `text`.
    """

    def named(found: re.Match[str]) -> str:
        initial, one, several = found.groups()
        runs = [[*map(int, run.split("-"))] for run in re.split(", | and ", one or several)]
        positions = [position for run in runs for position in range(run[0], run[-1] + 1)]
        if max(positions) >= len(members):
            return found[0]
        return f"{initial}{ranks_in_words(members[each] for each in positions)[1:]} ({one or several} of its group)"

    return _POSITIONS.sub(named, text) if members else text


def in_group(text: str, members: Sequence[int]) -> str:
    """The same for a whole message, at whose end it says which group that is."""
    group = f" (a group of {ranks_in_words(members)})"
    return of_job(text, members) + group * (group not in text) if members else text


class FirstFailure:
    """Keeps the first error of several: the later errors are consequences of the first. For any thread."""

    def __init__(self) -> None:
        self.error: RingError | None = None
        self._lock = threading.RLock()  # a signal handler may fail, too

    def set(self, error: RingError) -> bool:
        """Keep `error` unless an earlier error is kept already. Returns whether `error` is the first one."""
        with self._lock:
            is_first = self.error is None
            self.error = self.error or error
        return is_first

    def raise_if_set(self) -> None:
        """Raise the first error, if there was any."""
        if self.error is not None:
            raise self.error


_E = TypeVar("_E", bound=Exception)


def in_step(error: _E) -> _E:
    """Mark an error that all ranks raise at this point, or one like it: they can go on together afterwards."""
    error.in_step = True  # type: ignore[attr-defined]
    return error


_WAY_OUT: Final = "call torchring.shutdown() and torchring.init() on all ranks"


def with_way_out(text: str) -> str:
    """`text`, about a broken world, followed by what the user can do, unless `text` says so already."""
    return text if _WAY_OUT in text else f"{text}; {_WAY_OUT}"


MAX_MESSAGE_BYTES: Final = 1500  # escaping may double the length, and an error has to fit a page


def encode_error(error: RingError) -> bytes:
    """The error as JSON for the peers, which raise it, too: class, message and the ranks at fault."""
    message = error.message.encode()[:MAX_MESSAGE_BYTES].decode(errors="ignore")
    words = {"error": type(error).__name__, "message": message, "peers": list(error.peers)}
    return json.dumps(words, ensure_ascii=False).encode()


def decode_error(data: bytes, reporter: int | None) -> RingError:
    """The error that rank `reporter` has encoded, as another rank raises it. Never fails: garbage gives a RingError.

    If `reporter` is None, the message has to name the rank.
    """
    try:
        words = json.loads(data)
        kind = _KINDS[words["error"]]
        message, peers = str(words["message"]), [int(peer) for peer in words["peers"]]
    except Exception:  # the bytes may be half-written; that the reporter is failing is certain
        kind, message, peers = RingError, "it reported a failure", [] if reporter is None else [reporter]
    is_signed = message.startswith("rank ") and " stopped: " in message
    if reporter is not None and not is_signed:
        message = f"rank {reporter} stopped: {message}"
    return kind(message, peers=peers)


_KINDS: dict[str, type[RingError]] = {kind.__name__: kind for kind in (*RingError.__subclasses__(), RingError)}
