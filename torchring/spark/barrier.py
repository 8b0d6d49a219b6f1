"""`run` and `fit`: the driver's side of a job. See barrier_task.py for that of its tasks."""

import functools
import pickle
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pyspark import cloudpickle
from pyspark.sql import SparkSession

from torchring.launch.task import pickled_call
from torchring.spark.barrier_task import FAILED, RankCall, take_part
from torchring.spark.reports import Reports

if TYPE_CHECKING:
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import DataFrame

_T = TypeVar("_T")
_REGISTRATION_SECONDS: Final = 60.0  # of the life of an application, in which its executors come
_POLL_SECONDS: Final = 0.2
_QUIET_SECONDS: Final = 3.0  # without a new executor, after which all are there
_GPU_AMOUNT: Final = "spark.task.resource.gpu.amount"


def run(
    fn: Callable[..., _T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    spark: SparkSession | None = None,
    use_gpu: bool | None = None,
    show_output: bool = True,
    env: Mapping[str, str] | None = None,
) -> list[_T]:
    """Call fn(*args, **kwargs) on `num_proc` ranks, each a task of a Spark job in barrier mode.

    `torchring.wrap`, the collectives and `torch.distributed.init_process_group()` work in `fn` as under any launcher.
    Ranks of a host have consecutive numbers. Function, arguments and results are pickled by cloudpickle. Modules that
    `fn` imports have to be installed where the executors run. Afterwards, environment variables are what they were, and
    `torchring.shutdown()` has been called. If a rank fails, Spark ends the others.

    Args:
        fn: the function to call.
        num_proc: number of ranks. By default one for each task slot that Spark has.
        spark: the session. By default the active one, or a new one.
        use_gpu: by default, ranks see the GPUs that Spark gives its tasks (`spark.task.resource.gpu.amount`), one each.
            If Spark gives none, nothing is changed. True: an error if Spark gives none. False: ranks see no GPUs.
        show_output: print here what the ranks print from Python, with the rank before each line.
        env: environment variables for the ranks.

    Returns the results in the order of ranks. All together must fit into `spark.driver.maxResultSize`.

    Raises:
        ValueError: Spark has not enough task slots, allocates executors dynamically, gives each task more or less than
            one GPU, or the session is one of Spark Connect; or something cannot be pickled.
        RuntimeError: a rank failed, with its traceback, or was killed, or returned what cannot be pickled.
    """
    context = _context(spark or SparkSession.builder.getOrCreate())
    conf = context.getConf()
    is_local = re.fullmatch(r"local(\[.*\])?", context.master) is not None
    _check_conf(conf, is_local, use_gpu)
    num_proc = _check_slots(context, num_proc, is_local)
    payload, host = pickled_call(cloudpickle.dumps, fn, args, kwargs), conf.get("spark.driver.host")
    with Reports(conf.get("spark.driver.bindAddress", host)) as reports:
        driver = host, reports.server_address[1]
        call = RankCall(payload, driver, reports.token, show_output, is_local, use_gpu, dict(env or {}))
        stage = context.parallelize(range(num_proc), num_proc).barrier()
        try:
            found = dict(map(pickle.loads, stage.mapPartitions(functools.partial(take_part, call)).collect()))
            reports.drain()
        except Exception as error:
            if (text := _explained(str(error), reports, num_proc)) is None:
                raise
            raise RuntimeError(text) from None  # Spark's own has pages of Java
    return [pickle.loads(found[rank]) for rank in range(num_proc)]


def fit(
    df: "DataFrame",
    train: Callable[..., _T],
    path: str,
    num_proc: int | None = None,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    mode: str = "error",
    **options: Any,
) -> _T:
    """Write a DataFrame as Parquet files, call train(path, *args, **kwargs) on all ranks, return the result of rank 0.

    `train` reads the rank's share by `torchring.data.RowGroups(path, ...)`, and returns what the driver needs, the
    `state_dict()` of a model for instance.

    Args:
        df: the data.
        train: the function to call.
        path: a new folder that all executors share and that Spark and pyarrow call alike, such as "file:///mnt/x".
        mode: "overwrite" replaces what is there. By default that is an error.
        num_proc: see `run`.
        **options: see `run`.

    Raises:
        ValueError, RuntimeError: see `run`. A RuntimeError also if a rank does not see all rows in `path`.
        pyspark.errors.AnalysisException: `path` exists.
    """
    from pyspark.sql import Observation
    from pyspark.sql.functions import count, lit

    if mode not in ("error", "overwrite"):
        raise ValueError(f"mode must be 'error' or 'overwrite', got {mode!r}")
    written = Observation()
    df.observe(written, count(lit(1)).alias("rows")).write.mode(mode).parquet(path)
    call = functools.partial(_train_on, train, path, written.get["rows"])
    results: list[_T] = run(call, args, kwargs, num_proc, spark=df.sparkSession, **options)
    return results[0]


def _train_on(train: Callable[..., Any], path: str, num_rows: int, *args: Any, **kwargs: Any) -> Any:
    """What a rank does for `fit`. Only rank 0's result travels."""
    from pyarrow import dataset

    import torchring

    seen = dataset.dataset(path, format="parquet").count_rows()
    if seen != num_rows:
        raise ValueError(
            f"rank {torchring.rank()} sees {seen} of the {num_rows} rows that Spark has written to {path}: executors "
            "do not share this path, and each sees what it has written itself; give a path on storage that they share"
        )
    result = train(path, *args, **kwargs)
    return result if torchring.rank() == 0 else None


def _check_conf(conf: "SparkConf", is_local: bool, use_gpu: bool | None) -> None:
    """Raise ValueError if Spark is set up so that a job of ranks cannot run."""
    if not is_local and conf.get("spark.dynamicAllocation.enabled", "false").lower() == "true":
        raise ValueError(
            "spark.dynamicAllocation.enabled=true: Spark runs no barrier stage then, because executors come and go. "
            "Start the application with spark.dynamicAllocation.enabled=false and spark.executor.instances=N"
        )
    amount = float(conf.get(_GPU_AMOUNT, "0"))
    if use_gpu is not False and amount != 1 and (amount or use_gpu):
        raise ValueError(
            f"{_GPU_AMOUNT}={amount:g}, but a rank uses one GPU: start the application with 1 there, and with "
            "spark.executor.resource.gpu.amount; or pass use_gpu=False"
        )


def _context(spark: SparkSession) -> "SparkContext":
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise ValueError(
            "this session is one of Spark Connect, which does not have barrier mode for RDDs. Use a classic "
            "session: on Databricks, compute in dedicated access mode; elsewhere, a master other than sc://"
        )
    return spark.sparkContext


def _check_slots(context: "SparkContext", num_proc: int | None, is_local: bool) -> int:
    """The number of ranks. Raises ValueError if Spark has not as many task slots, and would wait for them for ever."""
    if num_proc is not None and num_proc < 1:
        raise ValueError(f"num_proc must be 1 or more, got {num_proc}")
    java = context._jsc.sc()
    profile = java.resourceProfileManager().defaultResourceProfile()
    while (slots := java.maxNumConcurrentTasks(profile)) < (num_proc or 1):
        if is_local or time.time() - context.startTime / 1000 > _REGISTRATION_SECONDS:
            raise ValueError(
                f"num_proc={num_proc}, but Spark has {slots} task slots (master {context.master}), and a barrier stage "
                "needs all of its slots at once. Lower num_proc, or start the application with more executors, or more "
                "cores for each of them (a slot takes spark.task.cpus)"
            )
        time.sleep(_POLL_SECONDS)
    if num_proc is None and not is_local:  # of a young application, more executors may come
        quiet_since, most = time.monotonic(), slots
        while (
            time.monotonic() - quiet_since < _QUIET_SECONDS
            and time.time() - context.startTime / 1000 < _REGISTRATION_SECONDS
        ):
            time.sleep(_POLL_SECONDS)
            if (slots := java.maxNumConcurrentTasks(profile)) > most:
                quiet_since, most = time.monotonic(), slots
    return num_proc or slots


def _explained(text: str, reports: Reports, size: int) -> str | None:
    """Why a job has failed, in words; None if no rank is to blame. `text`: what Spark says."""
    lost = re.search(r"barrier task ResultTask\(\d+, (\d+)\) finished unsuccessfully\.\s*([^\n]*)", text)
    failures = sorted(reports.failures, key=lambda failure: failure[2])  # stable: else the first one
    said = ""
    if failures:
        name, trace, _ = failures[0]
    elif found := re.search(rf"{FAILED}(.*?) failed:\n(.*?)(?=\n+(?: SQLSTATE|\tat )|\Z)", text, re.DOTALL):
        name, trace = found.groups()
    elif lost:
        partition = int(lost[1])
        name, trace = reports.names.get(partition, f"the rank of partition {partition} (of {size})"), None
        said = f". Spark says: {lost[2]}"
    else:
        return None
    if trace is not None:
        return f"{name} failed:\n{trace}"
    return f"{name} was lost: its process was killed, perhaps for want of memory, or has crashed{said}"
