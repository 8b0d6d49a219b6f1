"""`run`: calls a training function in one generation after the other, until it returns."""

import contextlib
import functools
import gc
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Concatenate, Final, NoReturn, ParamSpec, TypeVar

from torchring.collectives.service import collectives_of
from torchring.default_world import default_world
from torchring.elastic.worker.membership import MembershipChange
from torchring.elastic.worker.state import GenerationOver, State
from torchring.elastic.worker.worker import JobOverError, Worker, worker_of_process
from torchring.errors import GradientError, PeerLostError, PeerTimeoutError, PlanMismatchError, RingError, TopologyError

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Function = Callable[Concatenate[State, _P], _T]
_MOST_RETURNS: Final = 3  # to a commit, without a step in between
_MOST_APART: Final = 5  # generations in a row whose ranks did not reach each other

_log = logging.getLogger("torchring.elastic")


def run(function: _Function[_P, _T]) -> _Function[_P, _T]:
    """Decorator of a training function whose first argument is a `State`.

        @torchring.elastic.run
        def train(state):
            for state.epoch in range(state.epoch, num_epochs):
                for batch in loader:
                    ...

    Under `torchring run --elastic`, the function is called again when ranks have changed: after the loss of one, when
    new ones have come, and when one leaves after SIGTERM. It is called with the same `State`, which is then where the
    furthest rank is. At most the step under way is lost. New ranks get the state from the others, and enter the
    function for the first time. Outside of the function, an elastic job has no ranks that could meet: `wrap` sends
    nothing, and collectives raise TopologyError.

    An exception that is no loss of a rank ends this rank, and so this process. After `State.commit()` it does not: all
    ranks return to the last commit. The third return without a step in between raises the exception.

    SIGTERM lets the step finish, and then ends the process with exit code 143. So does Ctrl-C under `torchring run
    --elastic`, with 130. A second signal acts at once. A script that handles the signal itself keeps its handler.

    Under any other launcher the ranks do not change: the function is called once. SIGTERM on any rank then ends all
    ranks after the step, with a checkpoint. Started again, the job goes on from the newest checkpoint.

    Returns:
        The decorated function. It returns what the function returns, when that has returned on all ranks.

    Raises:
        RingError: a rank was lost, without `torchring run --elastic`.
        ValueError: the checkpoint is of another model.
    """

    @functools.wraps(function)
    def wrapper(state: State, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not isinstance(state, State):
            raise TypeError(f"the first argument must be a torchring.elastic.State, got {type(state).__name__}")
        call = functools.partial(function, state, *args, **kwargs)
        worker = worker_of_process()
        if worker is not None and not default_world().is_provisional:
            raise RuntimeError("an elastic job has one training function; call all training from one function")
        with Signals([signal.SIGTERM] if worker is None else [signal.SIGTERM, signal.SIGINT]) as signals:
            if worker is None:
                return _run_once(state, call, signals)
            with _frozen_heap():
                return _run(state, call, worker, signals)

    return wrapper


def _run_once(state: State, call: Callable[[], _T], signals: "Signals") -> _T:
    """Without a driver."""
    world = default_world()
    change = world.shared(MembershipChange)

    def leave() -> None:
        change.leaves = change.is_wanted = True

    signals.on_signal(leave)
    state._enter(world, None, has_failed=False)
    try:
        result = call()
    except GenerationOver:
        state._part(0)
        if world.rank == 0:
            _say("this job was told to end", state._save_now())
        if world.size > 1:
            collectives_of(world).barrier()  # launchers end the others when the first has ended
        signals.end()
    if world.size > 1:
        collectives_of(world).barrier()
    everything = state._gather()
    if world.rank == 0:
        state._save_now(everything)
    return result


def _run(state: State, call: Callable[[], _T], worker: Worker, signals: "Signals") -> _T:
    """With a driver: in one generation after the other."""
    signals.on_signal(worker.ask_to_leave)
    left: dict[str, Any] = {"reason": ""}  # why this rank has left its generation
    has_failed = False  # this rank returns to its last commit
    saves = False  # this rank writes the last checkpoint, if the job is over
    num_returns, returned_at = 0, -1  # to a commit, with this progress
    num_apart = 0
    while True:
        try:
            world = worker.meet(**left)
            saves = True
            state._enter(world, worker, has_failed=has_failed)
            has_failed = False
            result = call()
            if world.size > 1:
                collectives_of(world).barrier()
            everything = state._gather()
            worker.finish()
            if world.rank == 0:
                state._save_now(everything)
            return result
        except GenerationOver as change:
            left = {"reason": ""}
            saves = world.rank == change.heir  # all ranks are equally far
            state._part(change.heir)
            if world.rank in change.leaving:
                worker.say_goodbye("it was told to end")  # first: the others wait for it
                if saves:
                    _say("this job was told to end", state._save_now())
                worker.close()
                signals.end()
        except JobOverError as over:
            path = state._save_now() if saves else ""
            worker.say_goodbye(str(over))
            worker.close()
            if worker.leaves:
                signals.end()
            if worker.num_steps < 0:  # it came when the others had finished
                sys.exit(0)
            if saves:
                _say(str(over), path)
            sys.exit(1)
        except Exception as error:
            left = {"reason": f"{type(error).__name__}: {error}", "has_lost_peer": isinstance(error, PeerLostError)}
            if isinstance(error, PeerTimeoutError):
                left["given_up"] = error.peers
            # Ranks that do not reach each other may be dying. If they are not, they would try for ever.
            num_apart = num_apart + 1 if isinstance(error, TopologyError) else 0
            is_mistake = isinstance(error, (GradientError, PlanMismatchError))
            # Ranks are lost, and the others go on. Otherwise all ranks raise, or this rank is the cause.
            is_loss = isinstance(error, RingError) and not error.in_step and not is_mistake
            if not is_loss or num_apart > _MOST_APART:
                if state._world is not None:
                    state._world.break_off("the training function", error)
                num_returns = num_returns + 1 if state._progress == returned_at else 1
                returned_at = state._progress
                if state._returns_to() < 0 or num_returns >= _MOST_RETURNS:
                    raise
                has_failed = True
                _log.warning("all ranks return to the last commit, after %s", left["reason"])
        state._leave()
        worker.leave()
        gc.collect()  # buckets, graphs, and iterators with worker processes


@contextlib.contextmanager
def _frozen_heap() -> Iterator[None]:
    """A context in which the garbage collector skips what exists already: torch's half a million objects take 0.1 s."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Signals:
    """A context in which the first signal that would end this process is noted. The second one acts."""

    def __init__(self, numbers: list[signal.Signals]) -> None:
        self._numbers = numbers
        self._before: dict[int, Any] = {}
        self._received: int | None = None
        self._tell: Callable[[], None] | None = None

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():  # Python allows handlers in no other
            for number in self._numbers:
                before = signal.getsignal(number)
                if before in (signal.SIG_DFL, signal.default_int_handler):
                    self._before[number] = before
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            number, before = self._before.popitem()
            signal.signal(number, before)

    def on_signal(self, tell: Callable[[], None]) -> None:
        """Call `tell` at the first signal; at once if it has come already."""
        self._tell = tell
        if self._received is not None:
            tell()

    def end(self) -> NoReturn:
        """End this process as the signal would have."""
        sys.exit(128 + (self._received or signal.SIGTERM))

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._received = number
        self.__exit__()
        if self._tell is not None:
            self._tell()


def _say(reason: str, path: str) -> None:
    where = f"; the newest checkpoint is {path}" if path else ""
    with contextlib.suppress(OSError):  # nobody reads
        print(f"torchring: {reason}{where}", file=sys.stderr, flush=True)
