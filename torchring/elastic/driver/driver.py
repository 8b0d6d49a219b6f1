"""Runs an elastic job: processes, signals, and the loop around the decisions of coordinator.py.

    driver --- lifeline --- reaper --- worker        this host
           --- ssh's stdin - reaper --- worker       another; or srun's, or kubectl's

The loop reads what workers say, looks which processes have ended, and carries out what `Coordinator` decides: when a
process ends, and every 50 ms, or every 10 ms while workers meet.

When the driver ends, even by SIGKILL, the lifelines close, and the reapers (launch/reaper.py) tell the workers to end:
workers finish their step, save, and end. Nothing here imports torch before the first workers are started. Then a thread
imports torch and opens the store, while workers do the same.
"""

import contextlib
import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from torchring.elastic.driver.coordinator import Coordinator
from torchring.elastic.driver.driver_store import DriverStore, Listener
from torchring.elastic.driver.endings import Slot
from torchring.elastic.driver.host_list import Hosts
from torchring.elastic.driver.workers import Limits
from torchring.elastic.protocol import Card, Invitation, card_key
from torchring.errors import TopologyError
from torchring.launch.hosts import LaunchError, is_here, why_no_loopback
from torchring.launch.jobs import HEARTBEAT_SECONDS, KILL_SECONDS, HostJob, host_job, open_output
from torchring.launch.output import Output, OutputOptions
from torchring.launch.signals import noted_signals
from torchring.rendezvous.environment import INVITATION, JOB

# A tick takes 0.2 ms of a core, most of which is to wake the store's thread and this one.
_TICK_SECONDS: Final = 0.05
_BUSY_TICK_SECONDS: Final = 0.01  # while workers meet
_PATIENCE_SECONDS: Final = 120.0  # for a worker to finish its step and save, after it was told to end
_SILENCE_SECONDS: Final = 60.0  # without a heartbeat, after which reapers of other hosts end their workers
_CONNECT_SECONDS: Final = 20  # for ssh
# What an outer launcher has told the driver must not reach workers: they would take it for themselves.
_OTHERS: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OTHERS_BEGIN: Final = ("GROUP_", "ROLE_", "TORCHELASTIC_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MV2_COMM_WORLD_",
                        "PALS_", "MPI_LOCAL", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "HOROVOD_RANK",
                        "HOROVOD_SIZE", "HOROVOD_LOCAL_", "HOROVOD_CROSS_", "HOROVOD_GLOO_RENDEZVOUS_",
                        "TORCHRING_PARENT", "TORCHRING_LAUNCHER", INVITATION)  # fmt: skip


def start_elastic(
    command: Sequence[str],  # the arguments of `python`: a script, or `-m` and a module, and their arguments
    limits: Limits,  # the number of workers, and how long to wait for them
    hosts: Hosts,  # where workers start. `start_elastic` starts and closes it.
    # variables to set for the workers, on every host. Other hosts get these variables, PYTHONPATH, OMP_NUM_THREADS and
    # HOROVOD_*, and no others.
    env: Mapping[str, str] | None = None,
    output: OutputOptions | None = None,  # how to show the output of the workers. Log files are written on this host.
    ssh_options: Sequence[str] = (),  # arguments for ssh, such as -p and a port
    # what starts workers of other hosts: "srun" inside an allocation of Slurm, "kubectl" in pods, else ssh.
    launcher: str = "ssh",
) -> int:
    """Run `python COMMAND...` in workers that come and go, until the training has finished.

    Call this from the main thread: after the first SIGINT, SIGTERM or SIGHUP all workers finish their step, save and
    end. They get the same signal, but SIGTERM for SIGHUP. A second signal kills them.

    Returns 0 if the training has finished and no worker of the last generation failed, otherwise the exit code of the
    first that failed; 1 if the job was given up; 128 + n if signal n ended the job.

    Raises LaunchError if nothing was started.
    """
    if trouble := why_no_loopback():
        raise LaunchError(trouble)
    env = {JOB: secrets.token_hex(16), **(env or {})}
    interface = (env.get("GLOO_SOCKET_IFNAME") or os.environ.get("GLOO_SOCKET_IFNAME", "")).split(",")[0]
    shown = open_output(output or OutputOptions(), "worker{}.log")
    with contextlib.ExitStack() as stack:
        stack.callback(shown.close)
        listener = Listener(hosts, interface)
        stack.callback(listener.close)
        shown.start()
        hosts.start()
        stack.callback(hosts.close)
        received = stack.enter_context(noted_signals())
        driver = Driver(command, limits, hosts, env, shown, ssh_options, listener, launcher)
        stack.callback(driver.close)
        return driver.run(received)


@dataclass
class _Process:
    """A worker's process, or the reaper or ssh in front of it."""

    worker: int
    job: HostJob
    card: bytes = b""  # as read last
    kill_at: float = float("inf")
    code: int | None = None  # once it has ended
    is_noted: bool = False  # the coordinator knows


@dataclass
class Driver:
    """See `start_elastic`. The hands of its coordinator."""

    command: Sequence[str]
    limits: Limits
    hosts: Hosts
    env: Mapping[str, str]
    output: Output
    ssh_options: Sequence[str]
    listener: Listener
    launcher: str = "ssh"

    def __post_init__(self) -> None:
        self._environ = {  # a copy, because the driver sets variables for torch
            key: value for key, value in os.environ.items() if key not in _OTHERS and not key.startswith(_OTHERS_BEGIN)
        }
        # The workers
        self._coordinator = Coordinator(self.limits, time.monotonic(), self)
        self._processes: dict[int, _Process] = {}  # by number of the worker
        self._heartbeat_at = time.monotonic() + HEARTBEAT_SECONDS  # for reapers of other hosts
        # The store
        self._opening: Future[DriverStore] | None = None  # while torch is imported
        self._store: DriverStore | None = None
        self._num_signals = 0  # that the coordinator knows
        self._problem = ""  # of the hosts, that the user knows

    def run(self, received: Sequence[int]) -> int:
        """Run the job. Signals that this process gets are appended to `received`."""
        with ThreadPoolExecutor(1, "torchring-store") as executor:
            while self._coordinator.code is None:
                try:
                    self.tick(received)
                except TopologyError as error:  # `close` kills the workers
                    self.say(f"this job ends, because {error.message}")
                    return 1
                if self._opening is None and self._processes:
                    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # workers that are killed are no news
                    self._opening = executor.submit(DriverStore, self.listener)
                self._sleep()
        return self._coordinator.code

    def close(self) -> None:
        """Kill what is left. Does nothing after a regular end."""
        for process in self._processes.values():
            if process.code is None:
                process.job.tell(signal.SIGKILL)
        end = time.monotonic() + KILL_SECONDS
        for process in self._processes.values():
            while process.code is None and process.job.process.poll() is None and time.monotonic() < end:
                time.sleep(_BUSY_TICK_SECONDS)
            if process.code is None:
                process.job.close()

    def tick(self, received: Sequence[int]) -> None:
        """Look once at what has happened, and do what follows."""
        now = time.monotonic()
        for number in received[self._num_signals :]:
            self._num_signals += 1
            self._coordinator.note_signal(number)
        if self.hosts.known is not None:
            self._coordinator.set_hosts(self.hosts.known)
        before, self._problem = self._problem, self.hosts.problem
        if self._problem not in ("", before):
            self.say(self._problem)
        ended = [process for process in self._processes.values() if process.code is not None and not process.is_noted]
        self._look_at_processes(now)
        if self._store is None and self._opening is not None and self._opening.done():
            self._store = self._opening.result()
            for worker in self._processes:
                self._store.add_worker(worker)
        if self._store is not None:
            self._read(self._store)
        # What a worker said last may reach the store a moment after its process has ended.
        killed = [process for process in self._processes.values() if process.code is not None and process.code > 128]
        for process in [*ended, *killed]:
            if not process.is_noted:
                assert process.code is not None
                process.is_noted = True
                self._coordinator.note_end(process.worker, process.code)
        self._coordinator.tick(now)
        if self._store is not None:  # without a store, no worker has come
            self._store.tell(self._coordinator.orders)

    def _sleep(self) -> None:
        is_settled = self._coordinator.is_settled and all(
            process.code is None or process.is_noted for process in self._processes.values()
        )
        time.sleep(_TICK_SECONDS if is_settled else _BUSY_TICK_SECONDS)

    def _look_at_processes(self, now: float) -> None:
        for process in self._processes.values():
            if process.code is not None:
                continue
            code = process.job.process.poll()
            if code is not None:
                process.code = code if code >= 0 else 128 - code
                process.job.close()
            elif now > process.kill_at:  # the connection is cut
                process.kill_at = float("inf")
                process.job.process.kill()
        if now > self._heartbeat_at:
            self._heartbeat_at = now + HEARTBEAT_SECONDS
            for process in self._processes.values():
                if process.job.is_remote and process.code is None:
                    process.job.tell(0)

    def _read(self, store: DriverStore) -> None:
        processes = [process for process in self._processes.values() if not process.is_noted]
        for process, data in zip(processes, store.read([card_key(each.worker) for each in processes]), strict=True):
            if data != process.card:
                process.card = data
                self._coordinator.note_card(process.worker, Card.decode(data))

    # What the coordinator has done

    def send(self, worker: int, number: int) -> None:
        process = self._processes[worker]
        if self._store is not None:
            self._store.tell(self._coordinator.orders)  # first: the worker is to know why
        if process.code is None:
            process.job.tell(number)
            if number == signal.SIGKILL:
                process.kill_at = time.monotonic() + KILL_SECONDS

    def forget(self, worker: int) -> None:
        del self._processes[worker]
        if self._store is not None:
            self._store.forget_worker(worker)

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads
            print(f"torchring run: {text}", file=sys.stderr, flush=True)

    def start(self, worker: int, slot: Slot) -> None:
        """Start a worker's process. A failure is an end of the process."""
        if self._store is not None:
            self._store.add_worker(worker)
        (host, number), listener = slot, self.listener
        addresses = tuple(dict.fromkeys((*[listener.own_address] * is_here(host), *listener.addresses)))
        invitation = Invitation(worker, number, self._coordinator.size, addresses, listener.port, listener.secret, host)
        slots = next((each.slots for each in self.hosts.known or () if each.name == host), 1)  # it may have left
        job = host_job(
            host,
            [sys.executable, "-u", *self.command],
            {**self.env, INVITATION: invitation.encode().decode(), "LOCAL_RANK": str(number)},
            environ=self._environ,
            sharing=max(1, min(slots, self.limits.max_size)),
            ssh_options=["-o", f"ConnectTimeout={_CONNECT_SECONDS}", *self.ssh_options],
            launcher=self.launcher,
            silence=_SILENCE_SECONDS,
            patience=_PATIENCE_SECONDS,
        )
        process = self._processes[worker] = _Process(worker, job)
        try:
            job.start(self.output, worker)
        except OSError as error:
            what = shlex.quote(str(error.filename or job.command[0]))
            self.say(f"cannot start worker {worker} on {host}: {what}: {error.strerror or error}")
            process.code = 127
