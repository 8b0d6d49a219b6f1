"""Starts the ranks of one host, and passes on what they print.

    python -c BOOT '{"num_proc": 2, ...}' COMMAND...

BOOT imports this module and calls `main`. The first argument is a `HostPlan`. COMMAND has the arguments of `python`: a
script, or -m and a module, and their arguments.

Ranks get the variables that torchrun sets. Agents and ranks meet in a store that the agent of the first host hosts: on
loopback if there is no other host. torchrun's own store listens on all network interfaces.

The import of torch, for the store, takes as long as in a rank. On one host the ranks start meanwhile: they know the
port, where the kernel lets them connect already.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from torchring import placement
from torchring.launch.hosts import HostPlan, LaunchError
from torchring.launch.jobs import open_output
from torchring.launch.output import STDERR, STDOUT
from torchring.launch.signals import noted_signals
from torchring.rendezvous.addresses import is_for_other_hosts, resolve
from torchring.rendezvous.environment import JOB

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_LOOPBACK: Final = "127.0.0.1"
_MEETING_SECONDS: Final = 900  # for the agents to come, as with torchrun
_FOREVER: Final = timedelta(days=365)  # `start` ends the agents if one of them is lost
_PATIENCE_SECONDS: Final = 10.0  # for a rank at fault to end
_END_SECONDS: Final = 30.0  # from the signal to SIGKILL; reaper.py gives this process more
_REPORT_SECONDS: Final = 2.0  # for ranks to report a rank that has failed; they notice within a second
_POLL_SECONDS: Final = 0.02


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code of the rank of this host that failed first; 128 + n if signal n ended it, as in a shell."""
    plan, command = HostPlan.from_json(arguments[0]), arguments[1:]
    try:
        listener = None if plan.number else _listener(plan)
        port = listener.getsockname()[1] if listener else plan.port
        store = ThreadPoolExecutor(1).submit(_store, plan, listener)
        _meet("here", plan, store, timedelta(seconds=_MEETING_SECONDS))
        code = _run(plan, command, store, port)
        with contextlib.suppress(RuntimeError):  # another agent is lost, which `start` sees, too
            if code == 0:
                _meet("done", plan, store, _FOREVER, waits=plan.number == 0)  # the store ends last
        return code
    except (OSError, RuntimeError) as error:  # torch's are RuntimeErrors
        print(f"torchring run: cannot start the ranks: {error}", file=sys.stderr)
    except LaunchError as error:
        print(f"torchring run: {error}", file=sys.stderr)
    return 2


def _meet(what: str, plan: HostPlan, store: Future[TCPStore], timeout: timedelta, *, waits: bool = True) -> None:
    """Say that this agent is here, or done. Wait until all agents have said so."""
    if plan.num_hosts > 1:
        store.result().set(f"torchring/{what}{plan.number}", "")
        if waits:
            store.result().wait([f"torchring/{what}{number}" for number in range(plan.num_hosts)], timeout)


def _store(plan: HostPlan, listener: socket.socket | None) -> TCPStore:
    """The store of all agents and ranks, which the first agent hosts."""
    from torch.distributed import TCPStore

    from torchring.rendezvous.store import host_on

    timeout = timedelta(seconds=_MEETING_SECONDS)
    if listener is None:
        return TCPStore(plan.address, plan.port, is_master=False, wait_for_workers=False, timeout=timeout)
    return host_on(listener, timeout)


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


def _run(plan: HostPlan, command: Sequence[str], store: Future[TCPStore], port: int) -> int:
    output = open_output(plan.output)
    ranks: dict[int, subprocess.Popen[bytes]] = {}
    with noted_signals() as received:
        try:
            for local_rank in range(plan.num_proc):
                environ = _environ(plan, local_rank, port)
                rank = int(environ["RANK"])
                out, err = (output.pipe(stream, rank) for stream in (STDOUT, STDERR))
                words = [sys.executable, "-I", "-S", placement.__file__, plan.bind, sys.executable, "-u", *command]
                ranks[rank] = subprocess.Popen(words, env=environ, stdout=out, stderr=err, start_new_session=True)
                os.close(out)
                os.close(err)
            output.start()
            while not received and not any(codes := [rank.poll() for rank in ranks.values()]) and None in codes:
                time.sleep(_POLL_SECONDS)
                if store.done():
                    store.result()  # raises if it could not be hosted
            if received:
                return 128 + received[0]
            if all(code == 0 for code in codes):
                return 0
            first = _first_to_fail(ranks, store.result())
        finally:
            _end(ranks.values(), received[0] if received else signal.SIGTERM)
            output.close()
    code = ranks[first].returncode
    on = f" on {plan.host}" if plan.num_hosts > 1 else ""
    how = f"with exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
    if code == -signal.SIGKILL:
        how += " (`dmesg` says whether the host was short of memory)"
    print(f"torchring run: rank {first} (pid {ranks[first].pid}{on}) failed first, {how}", file=sys.stderr)
    return code if code >= 0 else 128 - code


def _environ(plan: HostPlan, local_rank: int, port: int) -> dict[str, str]:
    rank = plan.first_rank + local_rank
    of_ranks = {"RANK": rank, "LOCAL_RANK": local_rank, "GROUP_RANK": plan.number, "ROLE_RANK": rank}
    sizes = {"WORLD_SIZE": plan.size, "LOCAL_WORLD_SIZE": plan.num_proc, "ROLE_WORLD_SIZE": plan.size}
    place = (_LOOPBACK, port) if plan.num_hosts == 1 else (plan.address, plan.port)
    own = {**of_ranks, **sizes, "GROUP_WORLD_SIZE": plan.num_hosts, "MASTER_ADDR": place[0], "MASTER_PORT": place[1]}
    own |= {"TORCHELASTIC_RUN_ID": "torchring", "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_ERROR_FILE": ""}
    own |= {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0, "ROLE_NAME": "default"}
    return {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **os.environ, **{name: str(value) for name, value in own.items()}}


def _first_to_fail(ranks: Mapping[int, subprocess.Popen[bytes]], store: TCPStore) -> int:
    """The rank that has failed first. Gives the others a moment for their errors.

    They raise and print their own errors, which name the rank, the step and the bucket.
    """
    failed = {rank: code for rank, process in ranks.items() if (code := process.poll())}
    # Of several ranks that ended together, those that a signal ended are the cause: an error is an exit code.
    first = {rank for rank, code in failed.items() if code < 0} or {*failed}
    _wait(ranks.values(), _REPORT_SECONDS)
    # A rank may have failed before these, and take longer to end.
    blamed = {rank: peers for rank in failed if (peers := _blamed_by(rank, store))}
    at_fault = {*itertools.chain(*blamed.values())} & ranks.keys() - blamed.keys()
    if first <= blamed.keys():
        _wait([ranks[rank] for rank in at_fault], _PATIENCE_SECONDS)
        first = {rank for rank in at_fault if ranks[rank].poll()} or first
    return min(first)


def _blamed_by(rank: int, store: TCPStore) -> list[int]:
    """The ranks of which a rank that has failed says that they failed before."""
    from torchring.rendezvous.rendezvous import within
    from torchring.rendezvous.signed import signed
    from torchring.rendezvous.store import blames_key

    of_ranks = within(signed(store, os.environ.get(JOB, "")), "torchring/attempt0")  # as default_world.py calls it
    key = blames_key(rank)
    # A stranger has written there, or the store has ended with the agent of the first host.
    with contextlib.suppress(RuntimeError):
        return [int(peer) for peer in of_ranks.get(key).decode().split(",")] if of_ranks.check([key]) else []
    return []


def _end(ranks: Iterable[subprocess.Popen[bytes]], number: int) -> None:
    """End the ranks that still run, and what they have started in their sessions. Kill them after a while."""
    for sent, seconds in ((number, _END_SECONDS), (signal.SIGKILL, _PATIENCE_SECONDS)):
        running = [process for process in ranks if process.poll() is None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sent)
        _wait(running, seconds)


def _wait(processes: Iterable[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait until all have ended, but no longer than so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(process.poll() is None for process in processes):
        time.sleep(_POLL_SECONDS)
