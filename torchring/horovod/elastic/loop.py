"""Runs a training function again after failures and changes of hosts, from the last commit."""

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any, Concatenate, Final, Literal, ParamSpec, TypeVar, overload

import torchring.horovod as hvd
from torchring.errors import GradientError, PeerLostError, PeerTimeoutError, RingError
from torchring.horovod.elastic.state import State
from torchring.horovod.elastic.worker import agree, current_worker
from torchring.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from torchring.optimizer import rejoin

_P = ParamSpec("_P")
_T = TypeVar("_T")
_S = TypeVar("_S", bound=State)
_Function = Callable[Concatenate[_S, _P], _T]
_MOST_FAILURES: Final = 3  # in a row, without a commit in between

_log = logging.getLogger("torchring.horovod.elastic")


@overload
def run(func: _Function[_S, _P, _T]) -> _Function[_S, _P, _T]: ...
@overload
def run(*, reset_limit: int | None = None) -> Callable[[_Function[_S, _P, _T]], _Function[_S, _P, _T]]: ...
def run(func: Any = None, *, reset_limit: int | None = None) -> Any:
    """Decorator of a training function whose first argument is a `State`.

    Each call of the function starts with `state.sync()`, so that all ranks have what rank 0 has. The function is called
    again

    - after HorovodInternalError, from the last commit. Not after the third failure in a row without a commit that
      leaves all ranks alive, such as a disagreement about a collective: it would fail for ever.
    - after HostsUpdatedInterrupt, with the state as it is.

    In between, `shutdown()` and `init()` run, and the callbacks of `state.register_reset_callbacks`.

    Under `torchring run --elastic`, those that are left go on, and `init()` waits for new ones, or ends the process:
    the job is over, or goes on without it. SIGTERM lets the worker leave at its next commit, with exit code 143. Under
    any other launcher, the loss of a rank ends the job, and so does a rank that has kept others waiting for too long.

    Args:
        reset_limit: how often the function may be called again, equal on all ranks. None for no limit.
    """
    if reset_limit is not None and reset_limit < 0:
        raise ValueError(f"reset_limit must be 0 or more, or None for no limit, got {reset_limit}")
    if func is None:
        return functools.partial(run, reset_limit=reset_limit)

    @functools.wraps(func)
    def wrapper(state: State, /, *args: Any, **kwargs: Any) -> Any:
        worker = current_worker()
        with contextlib.nullcontext() if worker is None else worker.training():
            return _run(state, functools.partial(func, state, *args, **kwargs), reset_limit)

    return wrapper


def _run(state: State, call: Callable[[], _T], reset_limit: int | None) -> _T:
    worker = current_worker()
    num_resets = num_failures = 0
    num_commits = state._num_commits
    needs_sync, needs_reset = True, False
    while True:
        try:
            if needs_reset:
                _reset()
                state.on_reset()
                needs_reset = False
            if worker is not None:
                # New ranks need it, and go on counting where the others are.
                said = agree("elastic.needs_sync", needs_sync, state._num_commits)
                needs_sync, state._num_commits = bool(said[0]), int(said[1])
                worker.elastic.num_steps = state._num_commits
            if needs_sync:
                state.sync()
            result = call()
            if worker is not None:
                worker.finish()
            return result
        except HorovodInternalError as error:
            kind = _kind_of(error, is_worker=worker is not None)
            if kind == "final" or (worker is None and (kind == "loss" or needs_reset)):
                raise
            if kind == "failure":
                num_failures = num_failures + 1 if state._num_commits == num_commits else 1
                num_commits = state._num_commits
                if num_failures >= _MOST_FAILURES:
                    raise HorovodInternalError(f"failed {num_failures} times without a commit: {error}") from error
            _raise_if_over(num_resets, reset_limit, error)
            _log.warning("training starts again from the last commit, after %s", error)
            if worker is not None:
                worker.reason, worker.has_lost_peer = f"{type(error).__name__}: {error}", kind == "loss"
            state.restore()
            needs_sync = True
        except HostsUpdatedInterrupt as interrupt:
            if worker is not None:
                worker.reason, worker.has_lost_peer = "", False
                worker.end_if_told()
            _raise_if_over(num_resets, reset_limit, interrupt)
            needs_sync = not interrupt.skip_sync
        num_resets += 1
        needs_reset = True


def _kind_of(error: BaseException, *, is_worker: bool) -> Literal["loss", "failure", "final"]:
    """ "loss": a rank is lost, or may be. "final": the script is wrong. "failure": something else, and all ranks that
    raise it at the same point of a step are there."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RingError):
            if isinstance(cause, GradientError):
                return "final"
            is_loss = isinstance(cause, (PeerLostError, PeerTimeoutError)) or (is_worker and type(cause) is RingError)
            return "loss" if is_loss and not cause.in_step else "failure"
        cause = cause.__cause__ or cause.__context__
    return "failure"


def _raise_if_over(num_resets: int, limit: int | None, error: RuntimeError) -> None:
    if limit is not None and num_resets >= limit:
        raise HorovodInternalError(f"the limit of {limit} resets is reached: {error}") from error


def _reset() -> None:
    hvd.shutdown()
    hvd.init()
    for optimizer in hvd.optimizer.live_optimizers():
        rejoin(optimizer)
