"""Starts the ranks of one host through torchrun's agent, and passes on what they print.

    python -c BOOT '{"num_proc": 2, ...}' COMMAND...

BOOT imports this module and calls `main`. The first argument is a `HostPlan`. COMMAND has the arguments of `python`: a
script, or -m and a module, and their arguments. All hosts need the same version of torch.

The agents meet in a store of this module's, not in torchrun's: that one listens on all network interfaces, and what
strangers write to it is unpickled. The first agent hosts the store: on loopback if there is no other host.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Final

from torch.distributed import DistError, Store, TCPStore
from torch.distributed.elastic import multiprocessing as elastic_multiprocessing
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SignalException, SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from torchring.errors import RingError
from torchring.launch.hosts import HostPlan, LaunchError
from torchring.launch.jobs import bound, open_output
from torchring.launch.output import STDERR, STDOUT, Output
from torchring.rendezvous.addresses import is_for_other_hosts, resolve
from torchring.rendezvous.environment import JOB
from torchring.rendezvous.rendezvous import blames_key
from torchring.rendezvous.signed import signed, within
from torchring.rendezvous.store import host_on

_LOOPBACK: Final = "127.0.0.1"
_MEETING_SECONDS: Final = 900  # for the agents to come, as with torchrun
_PATIENCE_SECONDS: Final = 10.0  # for the agents to tell each other that they are done, and for a rank at fault to end
_REPORT_SECONDS: Final = 2.0  # for ranks to report a rank that has failed; they notice within a second


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code of the rank of this host that failed first; 128 + n if signal n ended it, as in a shell."""
    plan, command = HostPlan.from_json(arguments[0]), arguments[1:]
    try:
        store = _store(plan)
        code = _run(plan, command, store)
    except (OSError, DistError) as error:
        print(f"torchring run: cannot start the ranks: {error}", file=sys.stderr)
        return 2
    except LaunchError as error:
        print(f"torchring run: {error}", file=sys.stderr)
        return 2
    if code == 0:
        # The first agent must end last: an agent that loses the store prints a page.
        with contextlib.suppress(DistError):
            if plan.number > 0:
                store.set(f"torchring/done{plan.number}", "")
            elif plan.num_hosts > 1:
                others = [f"torchring/done{other}" for other in range(1, plan.num_hosts)]
                store.wait(others, timedelta(seconds=_PATIENCE_SECONDS))
    return code


def _store(plan: HostPlan) -> TCPStore:
    """The store of all agents and ranks, which the first agent hosts."""
    timeout = timedelta(seconds=_MEETING_SECONDS)
    if plan.number > 0:
        return TCPStore(plan.address, plan.port, is_master=False, wait_for_workers=False, timeout=timeout)
    return host_on(_listener(plan), timeout)


def _listener(plan: HostPlan) -> socket.socket:
    """Listens on loopback if there is no other host. Otherwise at the address that the others are told.

    Everywhere if that may be another address for them: a name of several addresses, or that of a router.
    """
    if plan.num_hosts == 1:
        return socket.create_server((_LOOPBACK, 0))
    own = resolve(plan.address)
    if len(own) == 1 and is_for_other_hosts(own[0]):
        with contextlib.suppress(OSError):
            family = socket.AF_INET6 if ":" in own[0] else socket.AF_INET
            return socket.create_server((own[0], plan.port), family=family)
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    return socket.create_server(("", plan.port), family=family, dualstack_ipv6=is_dual)


class _Meeting(StaticTCPRendezvous):
    """The agents of a job, whose number and order are known before they start. They meet in a store of ours."""

    def __init__(self, plan: HostPlan, store: TCPStore) -> None:
        address, port = (_LOOPBACK, store.port) if plan.num_hosts == 1 else (plan.address, plan.port)
        super().__init__(address, port, plan.number, plan.num_hosts, "torchring", _MEETING_SECONDS)
        self._agents = within(signed(store, os.environ.get(JOB, "")), "torchring/agents")

    def next_rendezvous(self) -> RendezvousInfo:
        place = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(self._agents, self.rank, self.world_size, place)


def _run(plan: HostPlan, command: Sequence[str], store: TCPStore) -> int:
    """Start this host's ranks and wait for them."""
    output = open_output(plan.output)
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):  # failures are reported below, in fewer lines
            logging.getLogger(name).setLevel(logging.CRITICAL)
    elastic_multiprocessing.SubprocessContext = _Ranks  # type: ignore[misc]
    _Ranks.store = within(signed(store, os.environ.get(JOB, "")), "torchring/attempt0")  # as default_world.py calls it
    python, *binding = bound(plan.bind)
    rank = (*binding, sys.executable, "-u", *command)
    spec = WorkerSpec("default", plan.num_proc, _Meeting(plan, store), entrypoint=python, args=rank, max_restarts=0)
    try:
        result = LocalElasticAgent(spec, _Pipes(output)).run()
    except SignalException as error:
        return 128 + int(error.sigval)
    finally:
        output.close()
    if not result.is_failed():
        return 0
    # torch knows the times of failures in whole seconds only.
    rank_number, first = min(
        result.failures.items(), key=lambda item: (item[1].pid not in _Ranks.failed, item[1].timestamp)
    )
    on = f" on {plan.host}" if plan.num_hosts > 1 else ""
    code: int = first.exitcode
    how = f"with exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
    print(f"torchring run: rank {rank_number} (pid {first.pid}{on}) failed first, {how}", file=sys.stderr)
    return code if code >= 0 else 128 - code


class _Pipes(LogsSpecs):
    """Has torch's agent connect the stdout and stderr of each rank to pipes of `output`, and write no files."""

    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        ends: dict[int, dict[int, Any]] = {STDOUT: {}, STDERR: {}}  # torch calls open(), which accepts a descriptor
        for local_rank, environ in envs.items():
            environ["TORCHELASTIC_ERROR_FILE"] = ""
            for stream, of_ranks in ends.items():
                of_ranks[local_rank] = self._output.pipe(stream, int(environ["RANK"]))
        self._output.start()
        no_files = dict.fromkeys(envs, os.devnull)
        return LogsDest(stdouts=ends[STDOUT], stderrs=ends[STDERR], error_files=no_files)

    @property
    def root_log_dir(self) -> str:
        return os.devnull


class _Ranks(SubprocessContext):
    """The processes of this host's ranks, as torch runs them, but with a moment for their errors.

    When a rank fails, torch ends the others at once. Here they have time to raise and print their own errors, which
    name the rank, the step and the bucket.
    """

    failed: ClassVar[set[int]] = set()  # process ids of the ranks that failed first
    store: ClassVar[Store]  # of the ranks

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        if death_sig is None and not self.failed:
            ranks = {int(self.envs[i]["RANK"]): handler.proc for i, handler in self.subprocess_handlers.items()}
            failed = {rank: code for rank, process in ranks.items() if (code := process.poll())}
            # Of several ranks that ended together, those that a signal ended are the cause: an error is an exit code.
            first = {rank for rank, code in failed.items() if code < 0} or {*failed}
            _wait(ranks.values(), _REPORT_SECONDS)
            # A rank may have failed before these, and take longer to end.
            blamed = {rank: peers for rank in failed if (peers := self._blamed_by(rank))}
            at_fault = {*itertools.chain(*blamed.values())} & ranks.keys() - blamed.keys()
            if first <= blamed.keys():
                _wait([ranks[rank] for rank in at_fault], _PATIENCE_SECONDS)
                first = {rank for rank in at_fault if ranks[rank].poll()} or first
            self.failed.update(ranks[rank].pid for rank in first)
        super().close(death_sig, timeout)
        for handler in self.subprocess_handlers.values():  # torch leaves these files open
            for file in (handler._stdout, handler._stderr):
                if file is not None:
                    file.close()

    def _blamed_by(self, rank: int) -> list[int]:
        """The ranks of which a rank that has failed says that they failed before."""
        key = blames_key(rank)
        # A stranger has written there, or the store has ended with the agent of the first host.
        with contextlib.suppress(RingError, DistError):
            return [int(peer) for peer in self.store.get(key).decode().split(",")] if self.store.check([key]) else []
        return []


def _wait(processes: Iterable[subprocess.Popen[Any]], seconds: float) -> None:
    """Wait until all have ended, but no longer than so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(process.poll() is None for process in processes):
        time.sleep(0.02)
