"""Runs N ranks with a deadline, looks at every exit code, and leaves nothing behind.

    @ranks(2)                      the body of a test runs on 2 ranks
    run_ranks(fn, 2)               fn(rank, world_size) in 2 processes; both results in rank order
    run_pooled(fn, 2)              the same in processes that stay alive from one call to the next
    run_threads(fn, 2)             fn(rank, world_size, store) in 2 threads of this process

Whatever goes wrong arrives as RanksFailed, whose text holds for each rank: exit code or signal, traceback, the end of
what it printed and, after the deadline, the Python stacks of all its threads. A rank that dies after the others have
finished is a failure, and so is a process, a file in /dev/shm or a file in the ranks' TMPDIR that outlives the run.
Linux only.

Ranks are forked from a server that has imported torch, torchring and the modules of tests that start ranks: 0.05 s
each instead of 2 s. Like all forked children they end with os._exit, here after the atexit functions. Pooled ranks save
those 0.05 s, and what torch does once per process.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import pkgutil
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

# torch.optim imports _dynamo on first use: 1 s. torchring imports its parts on first use, and starts no thread then.
_PRELOADED = ["torch", "torch._dynamo", "numpy", "pytest", "torchring.optimizer", "torchring.functions"]
_READ_AT_IMPORT = ("OMP_NUM_THREADS", "TRITON_INTERPRET")  # a forked rank is too late to change these: other servers
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
_SET_BY_LAUNCHERS = (*_TORCHRUN, "HOROVOD_", "OMPI_", "PMI_", "PMIX_", "SLURM_")  # beginnings of names
_CACHES = ("torchinductor_", "torchelastic_")  # PyTorch leaves these in TMPDIR
LEFT_ON_PURPOSE = "torchring_test"  # files that tests of this module leave; their names end with the tests' process id
# Semaphores of multiprocessing and joblib, whose trackers remove them in time; segments of Open MPI, which mpirun
# removes up to 0.6 s after the death of a rank: a test that ends meanwhile, beside this one, must not be blamed.
# CUDA leaves files after SIGKILL, and NCCL after an abort; nothing of torchring's has such a name.
_TRACKED = ("sem.mp-", "sem.loky-", "sm_segment.", "cuda.shm.", "nccl-")
_PATIENCE = 5.0  # seconds that the other ranks get once one has failed
_SETTLE = 0.5  # seconds that processes may take to die, and files to vanish, after the last rank has ended
_TAIL = 12_000  # bytes of each rank's output in an error message
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

_libc = ctypes.CDLL(None)
_servers: dict[tuple[tuple[str, str], ...], forkserver.ForkServer] = {}  # by what they have read while importing


@dataclass
class RankReport:
    """How one rank ended; `status` is one line, such as "ok", "exit code 3", "SIGSEGV" or "ValueError: too small"."""

    rank: int
    status: str
    failed: bool
    exit_code: int | None = None  # negative: minus the signal that ended the process; None for threads
    traceback: str = ""
    output: str = ""

    def __str__(self) -> str:
        text = f"rank {self.rank}: {self.status}"
        if self.failed and self.traceback:
            text += f"\n{self.traceback.rstrip()}"
        if self.failed and self.output:
            text += f"\n--- output of rank {self.rank}:\n{self.output.rstrip()}"
        return text


class RanksFailed(AssertionError):  # noqa: N818 - it says what happened
    """A rank failed, hung, or left something behind. The text says which and how, failed ranks first."""

    def __init__(self, title: str, reports: Sequence[RankReport] = (), leftovers: Sequence[str] = ()) -> None:
        self.reports = list(reports)
        self.leftovers = list(leftovers)
        in_order = sorted(reports, key=lambda report: (not report.failed, report.rank))
        super().__init__("\n".join([title, *(f"left behind: {item}" for item in leftovers), *map(str, in_order)]))


def wait_until(condition: Callable[[], object], what: str, seconds: float = 40.0) -> None:
    """Look again and again until `condition()` is true; fails with `what` it waited for, after `patient(seconds)`."""
    end = time.monotonic() + patient(seconds)
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.02)


def patient(seconds: float) -> float:
    """A deadline against hangs: `seconds`, or more where more processes want to run than there are cores."""
    return seconds * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ranks(
    world_size: int | None = None, start: Callable[..., list[Any]] | None = None, **how: Any
) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """The body of the test runs on each of `world_size` pooled ranks; the test fails if a rank does.

        @pytest.mark.parametrize("op", ["sum", "mean"])
        @ranks(2)
        def test_reduces(op: str, rank: int) -> None: ...

    The parameters `rank`, `world_size` and `monkeypatch` of a body come from its rank, which restores what the body
    replaces by `monkeypatch`. Its other parameters are parameters and fixtures of the test, pickled by value.
    Without `world_size`, the test has a parameter of that name.
    start: `run_ranks` for bodies that break their rank; `how` are its options.
    """

    def decorate(body: Callable[..., object]) -> Callable[..., None]:
        of_rank = {"rank", "monkeypatch"} | ({"world_size"} if world_size else set())
        signature = inspect.signature(body)

        @functools.wraps(body)
        def test(*on_rank: int, **arguments: Any) -> None:
            if not on_rank:  # called by pytest
                (start or run_pooled)(test, world_size or arguments["world_size"], arguments, **how)
                return
            rank, num_ranks, given = on_rank
            with pytest.MonkeyPatch.context() as monkeypatch:
                own = {"rank": rank, "world_size": num_ranks, "monkeypatch": monkeypatch}
                body(**{**given, **{name: value for name, value in own.items() if name in signature.parameters}})

        of_test = [parameter for name, parameter in signature.parameters.items() if name not in of_rank]
        test.__signature__ = signature.replace(parameters=of_test)  # type: ignore[attr-defined]
        return test

    return decorate


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    deadline: float = 60.0,
    env: Mapping[str, str | None] | None = None,
    expect_exit: Mapping[int, int] | None = None,
    launcher_env: bool = True,
) -> list[Any]:
    """Run fn(rank, world_size, *args) in world_size single-threaded processes; return the results in rank order.

    fn is a module-level function; arguments and results are pickled by value. torch is seeded differently on each rank.
    deadline: seconds for all ranks together, stretched by `patient`; once one has failed, the others get 5 s more.
    env: changes to this process's environment, for the ranks; None removes a variable.
    expect_exit: {rank: exit code or minus signal} of ranks that must end that way; their result is None.
    launcher_env: set what torchrun sets, with a store that this process serves. False: as without a launcher.
    """
    expected = dict(expect_exit or {})
    if not expected.keys() <= set(range(world_size)):
        raise ValueError(f"expect_exit names ranks {sorted(expected)}, but there are {world_size}")
    payload = _pickled(fn, args)
    environ: dict[str, str | None] = {**_clean_environ()}
    if launcher_env:
        store = _open_store()  # lives until this returns
        environ |= _launchers_environ(store, world_size)
    context = _start_method({**environ, **(env or {})})

    ranks: list[_Rank] = []
    with _Leftovers() as leftovers:
        try:
            for rank in range(world_size):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if launcher_env else {}
                merged = {**environ, **own, **leftovers.environ, **(env or {})}
                final = {name: value for name, value in merged.items() if value is not None}
                log = Path(leftovers.folder, f"rank{rank}.log")
                ranks.append(_Rank(context, rank, world_size, final, log, payload, expected.get(rank)))
            _wait_for(ranks, deadline)
        finally:
            for process in ranks:
                process.kill()
        reports = [process.report() for process in ranks]
        left = leftovers.sweep()
    _raise_if_failed(fn, reports, left)
    return [None if process.rank in expected else process.result for process in ranks]


def run_pooled(fn: Callable[..., Any], world_size: int, *args: Any, deadline: float = 60.0) -> list[Any]:
    """`run_ranks` in processes that earlier calls have used, and that must be left as they were found.

    After each call the ranks shut torchring down. A file descriptor, thread, exit function or process group left open
    is a failure, and so is a function, class or constant of torchring that was replaced: such tests use `run_ranks`.
    Ranks that have not made the same number of worlds and groups are a failure: no later call would find its peers.
    A pool that has failed in any way is replaced.
    """
    pool = _pools.pop(world_size, None) or _Pool(world_size)
    try:
        results = pool.run(fn, args, deadline)
    except BaseException:
        pool.close()
        raise
    _pools[world_size] = pool
    return results


def run_threads(fn: Callable[..., Any], world_size: int, *args: Any, deadline: float = 60.0) -> list[Any]:
    """Run fn(rank, world_size, store, *args) in threads that share a HashStore; results and failures as in run_ranks.

    Threads cannot be killed: those still running at the deadline are reported with their stacks and stay, as daemons.
    """
    store = dist.HashStore()
    deadline = patient(deadline)
    store.set_timeout(timedelta(seconds=deadline))
    results: list[Any] = [None] * world_size
    reports = [RankReport(rank, f"still running after {deadline} s", failed=True) for rank in range(world_size)]

    def body(rank: int) -> None:
        try:
            results[rank] = fn(rank, world_size, store, *args)
            reports[rank] = RankReport(rank, "ok", failed=False)
        except BaseException as error:
            reports[rank] = RankReport(rank, _summary(error), failed=True, traceback=traceback.format_exc())

    threads = [threading.Thread(target=body, args=(r,), name=f"rank {r}", daemon=True) for r in range(world_size)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + deadline
    while (running := [rank for rank, thread in enumerate(threads) if thread.is_alive()]) and time.monotonic() < end:
        threads[running[0]].join(0.05)
        if any(report.failed and report.rank not in running for report in reports):
            end = min(end, time.monotonic() + patient(_PATIENCE))
    frames = sys._current_frames()
    for rank in running:
        if frame := frames.get(threads[rank].ident or 0):
            reports[rank].traceback = "".join(traceback.format_stack(frame))
    _raise_if_failed(fn, reports, [])
    return results


def count_open_fds() -> int:
    """Number of file descriptors that this process has open, for checking that init and shutdown leak none."""
    return len(os.listdir("/proc/self/fd")) - 1  # one is the listing's own


class _Rank:
    """The parent's end of one rank: process, result pipe, log file."""

    def __init__(
        self,
        context: Any,
        rank: int,
        world_size: int,
        environ: dict[str, str],
        log: Path,
        payload: bytes | None,
        expected: int | None = None,
    ) -> None:
        """payload: what to run before it ends. None: it runs what `begin` sends, again and again."""
        self.rank, self.log, self.expected = rank, log, expected
        self.is_pooled = payload is None
        self.exit_code: int | None = None
        self.num_opened: tuple[int, int] | None = None  # worlds and process groups so far, of a pooled rank
        self._reset()
        self.channel, theirs = context.Pipe(duplex=self.is_pooled)
        arguments = (payload, rank, world_size, environ, str(log), theirs)
        self.process = context.Process(target=_rank_main, args=arguments, name=f"rank {rank}")
        self.process.start()
        theirs.close()

    def _reset(self) -> None:
        self.result: Any = None
        self.error: tuple[str, str] | None = None  # summary, traceback
        self.answered = self.hung = False
        self.started = time.monotonic()
        self.log_begin = self.log.stat().st_size if self.log.exists() else 0

    def begin(self, payload: bytes, environ: dict[str, str]) -> None:
        """Have a pooled rank run something."""
        self._reset()
        with contextlib.suppress(OSError):  # it has ended: `poll` says how
            self.channel.send_bytes(pickle.dumps((payload, environ)))

    def poll(self) -> bool:
        """Whether the rank has ended, or has done what a pooled one was to do. Takes in what it has sent."""
        self.exit_code = self.process.exitcode  # first: what an ended process has sent is complete
        if not self.channel.closed and self.channel.poll():
            try:
                if self.is_pooled:
                    self.num_opened = self.channel.recv()
                message = self.channel.recv_bytes()
                self.result, self.error = pickle.loads(message)
                self.answered = True
            except (EOFError, OSError):
                pass  # the rank has ended without an answer
            except Exception as error:
                self.error = f"its answer does not unpickle here: {_summary(error)}", traceback.format_exc()
            if not (self.is_pooled and self.answered):
                self.channel.close()
        return self.exit_code is not None or (self.is_pooled and self.answered)

    def waitables(self) -> list[Any]:
        return [self.process.sentinel] if self.channel.closed else [self.process.sentinel, self.channel]

    def ask_for_stacks(self) -> None:
        self.hung = True
        self.elapsed = time.monotonic() - self.started
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
            self.process.join(_PATIENCE)
        self.poll()

    def report(self) -> RankReport:
        ending = _exit_text(self.exit_code)
        failed = True
        if self.hung:
            status = f"still running after {self.elapsed:.1f} s, killed"
        elif self.expected is not None:
            failed = self.exit_code != self.expected
            status = ending + (f", expected {_exit_text(self.expected)}" if failed else ", as expected")
        elif self.error:
            status = self.error[0]
        elif self.answered and self.exit_code == (None if self.is_pooled else 0):
            status, failed = "ok", False
        else:
            status = f"{ending} {'after' if self.answered else 'before'} it returned a result"
        text = self.error[1] if self.error else ""
        return RankReport(self.rank, status, failed, self.exit_code, text, _tail(self.log, self.log_begin))


class _Pool:
    """Ranks that stay alive; they end with this process."""

    def __init__(self, world_size: int) -> None:
        self.folder = tempfile.mkdtemp(prefix="torchring-pool-")
        self.store = _open_store()  # one for all: torchring keeps its connection from one world to the next
        environ = _clean_environ()
        context = _start_method(environ)
        logs = [Path(self.folder, f"rank{rank}.log") for rank in range(world_size)]
        self.ranks = [_Rank(context, rank, world_size, environ, log, None) for rank, log in enumerate(logs)]
        self.run(_train_once, (), 60.0)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], deadline: float) -> list[Any]:
        payload = _pickled(fn, args)
        environ = {**_clean_environ(), **_launchers_environ(self.store, len(self.ranks))}
        with _Leftovers() as leftovers:
            for rank in self.ranks:
                own = {"RANK": str(rank.rank), "LOCAL_RANK": str(rank.rank)}
                rank.begin(payload, {**environ, **own, **leftovers.environ})
            _wait_for(self.ranks, deadline)
            reports = [rank.report() for rank in self.ranks]
            if any(report.failed for report in reports):
                self.close()
            left = leftovers.sweep()
            counts = [rank.num_opened for rank in self.ranks if rank.answered]
            if len(set(counts)) > 1:
                left.append(f"other numbers of worlds and groups on the ranks: {counts}")
        _raise_if_failed(fn, reports, left)
        return [rank.result for rank in self.ranks]

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.channel.close()
        shutil.rmtree(self.folder, ignore_errors=True)


_pools: dict[int, _Pool] = {}


@atexit.register  # before multiprocessing waits for its children
def _close_pools() -> None:
    while _pools:
        _pools.popitem()[1].close()


def _open_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _launchers_environ(store: dist.TCPStore, world_size: int) -> dict[str, str]:
    """What torchrun sets for all ranks."""
    # No LOCAL_WORLD_SIZE: ranks that the launcher says are on one machine could not play several.
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(world_size)}
    environ |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "tests"}
    return environ | {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((fn, args))
    except Exception as error:
        raise TypeError(f"ranks need a module-level function and arguments that pickle: {error}") from error


def _rank_main(
    payload: bytes | None, rank: int, world_size: int, environ: dict[str, str], log: str, channel: connection.Connection
) -> None:
    """Body of a rank's process: sets the scene, runs the function, sends the answer; or does so as often as asked."""
    _leave_server()
    log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(log_fd)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # a killed rank cannot flush
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    if "torchring.alone" in sys.modules:
        vars(sys.modules["torchring.alone"])["_imported_by"] = os.getpid()  # this is not the fork of a rank
    if payload is None:
        _serve(rank, world_size, channel)
        return
    answer, exit_code = _answer(payload, rank, world_size, environ)
    channel.send_bytes(answer)
    channel.close()
    atexit._run_exitfuncs()
    sys.exit(exit_code)


def _leave_server() -> None:
    """What a process that the fork server has forked does first."""
    os.setsid()
    # Should the tests be killed, the fork server ends (once no rank holds its pipe open), and with it the ranks.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    server: Any = forkserver._forkserver
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = None
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    multiprocessing.set_start_method(None, force=True)  # as in a script: workers of a DataLoader are forked


def _answer(payload: bytes, rank: int, world_size: int, environ: dict[str, str]) -> tuple[bytes, int]:
    """Run the function as this rank: pickled (result, None) and 0, or (None, (summary, traceback)) and 1."""
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None  # forget the TMPDIR of before
    torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))
    torch.manual_seed(1000 + rank)
    try:
        fn, args = pickle.loads(payload)
        result = fn(rank, world_size, *args)
        try:
            return pickle.dumps((result, None)), 0
        except Exception as error:
            raise TypeError(f"the result, a {type(result).__name__}, cannot be pickled: {error}") from error
    except SystemExit:
        raise
    except BaseException as error:
        # pytest says what the two sides of an assertion were; here, the locals do.
        is_assertion = isinstance(error, AssertionError)
        text = traceback.TracebackException.from_exception(error, capture_locals=is_assertion).format()
        return pickle.dumps((None, (_summary(error), "".join(text)))), 1


def _serve(rank: int, world_size: int, channel: connection.Connection) -> None:
    """Body of a pooled rank: one answer to each request, until the other end of the channel closes."""
    before: dict[str, Any] = {"threads": ["MainThread"], "native threads": 1}  # the rest as the first request leaves it
    with contextlib.suppress(EOFError):
        while True:
            payload, environ = pickle.loads(channel.recv_bytes())
            answer, exit_code = _answer(payload, rank, world_size, environ)
            if exit_code == 0 and (left := _left_in_process(before)):
                answer = pickle.dumps((None, (f"left behind: {'; '.join(left)}", "")))
            meeting: Any = sys.modules["torchring.meeting"]
            channel.send((meeting.meetings.num_worlds, meeting.meetings.num_groups))
            channel.send_bytes(answer)


def _train_once(rank: int, world_size: int) -> None:
    """What torch and torchring do on first use, and keep, is no leak. All modules are there before one is changed."""
    import torchring

    for room in pkgutil.iter_modules(torchring.__path__):
        if room.name not in ("__main__", "bench", "accelerate", "lightning", "ray", "spark", "transformers"):
            path = getattr(importlib.import_module(f"torchring.{room.name}"), "__path__", [])
            for module in pkgutil.walk_packages(path, f"torchring.{room.name}."):
                if not module.name.endswith(".__main__"):
                    importlib.import_module(module.name)
    for algorithm in ("auto", "ring"):
        model = torch.nn.Linear(2, 2)
        optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, algorithm=algorithm)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        torchring.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), every=1).step()
        torchring.all_gather(torch.tensor([rank]))
        torchring.shutdown()
    del model, optimizer
    gc.collect()  # else memory of their world would stay mapped
    gc.freeze()  # what is there now stays: no later call looks through it


def _left_in_process(before: dict[str, Any]) -> list[str]:
    """Shut torchring down; say what of this process is not as `before`, to which modules imported since are added."""
    import torchring

    torchring.shutdown()
    end = time.monotonic() + patient(_SETTLE)  # threads may take a moment, and hold what an error refers to until then
    while True:
        gc.collect()
        now = _state_of_process()
        before.update({what: value for what, value in now.items() if what not in before})
        differing = [what for what, value in before.items() if now.get(what) != value]
        if not differing or time.monotonic() > end:
            return [_difference(what, now.get(what), before[what]) for what in differing]
        time.sleep(0.01)


def _difference(what: str, now: Any, before: Any) -> str:
    if isinstance(before, dict):
        names = [name for name in {**before, **now} if now.get(name) != before.get(name)]
        now, before = ({name: of.get(name) for name in names} for of in (now, before))
    return f"{what} {now!r:.300}, was {before!r:.300}"


def _state_of_process() -> dict[str, Any]:
    """What a test must leave as it was found."""
    fds = Counter(_target(fd) for fd in Path("/proc/self/fd").iterdir())
    return {
        "open files": {target: count for target, count in fds.items() if target},
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "native threads": len(os.listdir("/proc/self/task")),
        "shared memory": "memfd:torchring" in Path("/proc/self/maps").read_text(),
        "exit functions": atexit._ncallbacks(),
        "process group": dist.is_initialized(),
        "working directory": os.getcwd(),
        "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "settings": (gc.isenabled(), torch.get_default_dtype(), torch.is_grad_enabled(), sys.excepthook),
        "default device": torch.get_default_device(),
        "determinism": torch.get_deterministic_debug_mode(),
        "replaced": _replaced(),
    }


def _replaced() -> dict[str, object]:
    """Functions, classes and constants of torchring's modules and classes that are not as when first looked at."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torchring" and name not in _looked_at:
            owners = {name: vars(module)}
            owners |= {f"{name}.{x}": vars(o) for x, o in owners[name].items() if isinstance(o, type)}
            for owner, names in owners.items():
                held = {x: o for x, o in names.items() if isinstance(o, (FunctionType, type)) or x.isupper()}
                _looked_at[owner] = names, held
    return {
        f"{owner}.{x}": names.get(x)
        for owner, (names, held) in _looked_at.items()
        for x, o in held.items()
        if names.get(x) is not o
    }


_looked_at: dict[str, tuple[Mapping[str, object], dict[str, object]]] = {}


def _target(fd: Path) -> str:
    try:
        return os.readlink(fd).partition(":")[0]  # "socket:[4711]": another number each time
    except OSError:
        return ""  # that of the listing itself


def _wait_for(ranks: list[_Rank], deadline: float) -> None:
    """Return when all ranks have ended; at the deadline, ask those still running for their stacks."""
    end = time.monotonic() + patient(deadline)
    while running := [rank for rank in ranks if not rank.poll()]:
        if any(rank not in running and rank.report().failed for rank in ranks):
            end = min(end, time.monotonic() + patient(_PATIENCE))
        remaining = end - time.monotonic()
        if remaining <= 0:
            break
        # Short, because a child of the rank can hold the sentinel open.
        connection.wait([item for rank in running for item in rank.waitables()], timeout=min(remaining, 0.2))
    for rank in running:
        rank.ask_for_stacks()
    if running:
        _wait_until_quiet([rank.log for rank in running])


def _start_method(of_ranks: Mapping[str, str | None]) -> Any:
    """The multiprocessing context to start ranks with; its helper processes are running when this returns."""
    resource_tracker.ensure_running()
    read = {name: of_ranks[name] or "" for name in _READ_AT_IMPORT if of_ranks.get(name) is not None}
    server = _servers.setdefault(tuple(sorted(read.items())), forkserver.ForkServer())
    path = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]
    environ = _clean_environ() | read | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    with mock.patch.dict(os.environ, environ, clear=True):
        interpreted = ["tests.support.interpreted"] if read.get("TRITON_INTERPRET") == "1" else []
        server.set_forkserver_preload([*_PRELOADED, *_modules_of_tests(), *interpreted, "tests.support.frozen"])
        server.ensure_running()
    # What multiprocessing starts processes with; the module has one server, which it takes these functions from.
    vars(forkserver).update(_forkserver=server, connect_to_new_process=server.connect_to_new_process)
    return multiprocessing.get_context("forkserver")


def _modules_of_tests() -> list[str]:
    """Those that this process has imported and that start ranks, which need not import them once more, each."""
    held = {name: getattr(module, "__dict__", {}) for name, module in sys.modules.items()}
    starts = [name for name, of in held.items() if of.get("run_ranks") is run_ranks or of.get("ranks") is ranks]
    return sorted(name for name in starts if not name.startswith("__"))


def _clean_environ() -> dict[str, str]:
    """This process's environment as if no launcher had started it, with one thread per rank."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_SET_BY_LAUNCHERS)}
    return {**kept, "OMP_NUM_THREADS": "1"}


class _Leftovers:
    """Notes what was there before a run, finds what is there after it, and gives the run a temporary folder.

    This process becomes the parent of orphans (a "subreaper"), so that not even a daemonised grandchild gets away.
    """

    def __enter__(self) -> "_Leftovers":
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self.folder = tempfile.mkdtemp(prefix="torchring-test-")
        self.tmpdir = os.path.join(self.folder, "tmp")
        os.mkdir(self.tmpdir)
        self.environ = {"TMPDIR": self.tmpdir}
        self.processes_before = set(_descendants())
        self.shm_before = set(os.listdir("/dev/shm"))
        self.is_clean = False  # all processes have ended, as `sweep` has seen
        return self

    def __exit__(self, *_: object) -> None:
        end = time.monotonic() + _PATIENCE
        while not self.is_clean and (pids := self.processes()) and time.monotonic() < end:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        shutil.rmtree(self.folder, ignore_errors=True)

    def processes(self) -> list[int]:
        """Process ids of the run's processes that are alive; reaps those that have ended."""
        alive = []
        for process, state in _descendants().items():
            if process not in self.processes_before:
                if state != "Z":
                    alive.append(process[0])
                else:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(process[0], os.WNOHANG)
        return alive

    def files(self) -> list[str]:
        """New files in /dev/shm that no process uses (others' programs may be busy there too), and those in TMPDIR."""
        names = set(os.listdir("/dev/shm")) - self.shm_before
        names -= {name for name in names if name.startswith(LEFT_ON_PURPOSE) and not name.endswith(f"_{os.getpid()}")}
        shm = [Path("/dev/shm", name) for name in sorted(names) if not name.startswith(_TRACKED)]
        tmp = [str(path) for path in Path(self.tmpdir).iterdir() if not path.name.startswith(_CACHES)]
        return [str(path) for path in shm if _is_abandoned(path)] + tmp

    def sweep(self) -> list[str]:
        """Describe what the run has left; `__exit__` kills what is a process. Files are named, not deleted."""
        end = time.monotonic() + patient(_SETTLE)
        while True:
            processes, files = self.processes(), self.files()
            self.is_clean = not processes
            if not (processes or files) or time.monotonic() > end:
                break
            time.sleep(0.02)
        return [f"process {pid} ({_command(pid)}), killed" for pid in processes] + [f"file {path}" for path in files]


def _descendants() -> dict[tuple[int, int], str]:
    """{(process id, start time): state} of this process's children, their children, and so on."""
    seen = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb", buffering=0) as stat:
                fields = stat.read(4096).rpartition(b")")[2].split()
                seen[int(name)] = fields[0].decode(), int(fields[1]), int(fields[19])  # state, parent, start
    family = {os.getpid()}
    while more := {pid for pid, (_, parent, _) in seen.items() if parent in family} - family:
        family |= more
    return {(pid, seen[pid][2]): seen[pid][0] for pid in family - {os.getpid()}}


def _is_abandoned(path: Path) -> bool:
    """Whether the file is this user's and no process has it open or mapped."""
    try:
        if path.stat().st_uid != os.getuid():
            return False
    except FileNotFoundError:
        return False
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(path) in (folder / "maps").read_text():
                return False
            if any(os.readlink(link) == str(path) for link in (folder / "fd").iterdir()):
                return False
    return True


def _raise_if_failed(fn: Callable[..., Any], reports: list[RankReport], leftovers: list[str]) -> None:
    num_failed = sum(report.failed for report in reports)
    if num_failed or leftovers:
        raise RanksFailed(f"{fn.__qualname__}: {num_failed} of {len(reports)} ranks failed", reports, leftovers)
    for report in reports:
        if report.output:
            print(f"--- output of rank {report.rank}:\n{report.output}")  # pytest shows it if the test fails later


def _wait_until_quiet(files: list[Path]) -> None:
    """Wait until the files have not grown for 0.3 s, at most 3 s."""
    sizes: list[int] = []
    quiet_since = begin = time.monotonic()
    while time.monotonic() < min(quiet_since + 0.3, begin + 3.0):
        time.sleep(0.05)
        now = [file.stat().st_size if file.exists() else 0 for file in files]
        if now != sizes:
            sizes, quiet_since = now, time.monotonic()


def _exit_text(code: int | None) -> str:
    if code is None:
        return "still running"
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return "gone"


def _summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _tail(file: Path, begin: int) -> str:
    return file.read_bytes()[begin:][-_TAIL:].decode(errors="replace") if file.exists() else ""
