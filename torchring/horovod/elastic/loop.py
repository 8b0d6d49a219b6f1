"""Runs a training function again after failures and changes of hosts, from the last commit."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, overload

from torchring.errors import GradientError, PeerLostError, PeerTimeoutError, RingError
from torchring.horovod.elastic.state import State
from torchring.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt

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

    - after HorovodInternalError, from the last commit, where all ranks raise and all are alive: they disagreed about a
      collective. Not after the loss of a rank, nor after a rank has kept others waiting for too long: the error is
      raised, and ends the job. Not after the third failure in a row without a commit, which would fail for ever.
    - after HostsUpdatedInterrupt, with the state as it is.

    In between, `shutdown()` and `init()` run, and the callbacks of `state.register_reset_callbacks`.

    Args:
        reset_limit: how often the function may be called again; the next failure is raised. Horovod has this as an
            option of its launcher. None for no limit. Equal on all ranks.

    Raises:
        HorovodInternalError: from the function, if it is not called again.
        ValueError: `reset_limit` is negative.
    """
    if reset_limit is not None and reset_limit < 0:
        raise ValueError(f"reset_limit must be 0 or more, or None for no limit, got {reset_limit}")
    if func is None:
        return lambda function: run_fn(function, _reset, reset_limit=reset_limit)
    return run_fn(func, _reset, reset_limit=reset_limit)


def run_fn(
    func: _Function[_S, _P, _T], reset: Callable[[], object], *, reset_limit: int | None = None
) -> _Function[_S, _P, _T]:
    """`run`, with another way to start anew: `horovod.common.elastic.run_fn`."""

    @functools.wraps(func)
    def wrapper(state: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        num_resets = num_failures = 0
        num_commits = state._num_commits
        needs_sync = True
        while True:
            try:
                if needs_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                num_failures = num_failures + 1 if state._num_commits == num_commits else 1
                num_commits = state._num_commits
                if _is_final(error):
                    raise
                if num_failures >= _MOST_FAILURES:
                    raise HorovodInternalError(f"failed {num_failures} times without a commit: {error}") from error
                _raise_if_over(num_resets, reset_limit, error)
                _log.warning("training starts again from the last commit, after %s", error)
                state.restore()
                needs_sync = True
            except HostsUpdatedInterrupt as interrupt:
                _raise_if_over(num_resets, reset_limit, interrupt)
                needs_sync = not interrupt.skip_sync
            num_resets += 1
            reset()
            state.on_reset()

    return wrapper


def _is_final(error: BaseException) -> bool:
    """Whether a rank is lost, or may be, or the script is wrong. Ranks that raise at the same point of a step are all
    there."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RingError):
            is_lost = isinstance(cause, (PeerLostError, PeerTimeoutError)) and not cause.in_step
            return is_lost or isinstance(cause, GradientError)
        cause = cause.__cause__ or cause.__context__
    return False


def _raise_if_over(num_resets: int, limit: int | None, error: RuntimeError) -> None:
    if limit is not None and num_resets >= limit:
        raise HorovodInternalError(f"the limit of {limit} resets is reached: {error}") from error


def _reset() -> None:
    hvd = importlib.import_module("torchring.horovod")  # which imports this module
    hvd.shutdown()
    hvd.init()
