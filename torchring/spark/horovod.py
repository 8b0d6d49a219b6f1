"""HorovodRunner of Databricks' sparkdl, and `horovod.spark.run`: notebooks and scripts for them run on torchring.

In the function that they start, `import horovod.torch as hvd` finds torchring.horovod.
"""

import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from pyspark import cloudpickle

from torchring.horovod import aliases
from torchring.horovod import run as run_here
from torchring.launch.task import pickled_call
from torchring.spark import barrier_task
from torchring.spark.barrier import run as run_on_spark

_T = TypeVar("_T")
_VERBOSITIES: Final = ("all", "log_callback_only")


class HorovodRunner:
    """Runs a function on several processes: sparkdl's HorovodRunner, which Databricks Runtime 16 ML has no more.

        HorovodRunner(np=2).run(train, lr=0.1)

    Args:
        np: number of ranks, tasks in barrier mode (see `torchring.spark.run`); 0 for all task slots; -n for n processes
            on the driver, without Spark.
        driver_log_verbosity: "all" prints the output of ranks on the driver; "log_callback_only" what ranks pass to
            `log_to_driver`. Processes on the driver print to its own output anyway.
    """

    def __init__(self, *, np: int, driver_log_verbosity: str = "log_callback_only") -> None:
        if driver_log_verbosity not in _VERBOSITIES:
            raise ValueError(f"driver_log_verbosity must be one of {_VERBOSITIES}, got {driver_log_verbosity!r}")
        self.np = np
        self.driver_log_verbosity = driver_log_verbosity

    def run(self, main: Callable[..., _T], **kwargs: Any) -> _T:
        """Call main(**kwargs) on all ranks, and return the result of rank 0.

        Raises:
            ValueError, RuntimeError: see `torchring.spark.run`, for np < 0 `torchring.horovod.run`.
        """
        call = (pickled_call(cloudpickle.dumps, main, (), kwargs),)
        if self.np < 0:
            results: list[_T] = run_here(_with_aliases, call, num_proc=-self.np)
        else:
            is_shown = self.driver_log_verbosity == "all"
            results = run_on_spark(_with_aliases, call, num_proc=self.np or None, show_output=is_shown)
        return results[0]


def _with_aliases(payload: bytes) -> Any:
    aliases.install()
    try:
        fn, args, kwargs = pickle.loads(payload)
        return fn(*args, **kwargs)
    finally:
        aliases.uninstall()


def log_to_driver(message: str) -> None:
    """Print a line on the driver, from any rank: sparkdl.horovod.log_to_driver."""
    if barrier_task.reporter is not None and barrier_task.reporter.socket is not None:
        barrier_task.reporter.say(output=str(message))
    else:
        print(message, flush=True)


def run(
    fn: Callable[..., _T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *ignored: Any,
    env: Mapping[str, str] | None = None,
    verbose: int = 1,
    **more_ignored: Any,
) -> list[_T]:
    """`horovod.spark.run`: `torchring.spark.run`, where `import horovod.torch` finds torchring.

    Other arguments of Horovod's have no meaning here: they are for its own way to start processes. A warning says so.
    """
    if ignored or more_ignored:
        named = ", ".join([*map(repr, ignored), *more_ignored])
        warnings.warn(f"horovod.spark.run: {named}: no meaning here, ignored", stacklevel=2)
    call = pickled_call(cloudpickle.dumps, fn, args, kwargs)
    return run_on_spark(_with_aliases, (call,), None, num_proc, show_output=verbose > 0, env=env)
