"""torchring.horovod.elastic under a driver: ranks are lost, leave, and come."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from tests.support.harness import is_running, patient, run_ranks
from torchring.elastic import protocol
from torchring.elastic.protocol import Beat, Broken, Card, Generation, Invitation
from torchring.rendezvous.environment import INVITATION

SECONDS = 60.0  # against hangs


def _work(
    rank: int, size: int, environs: Sequence[Mapping[str, str]], folder: str, ends_at: int
) -> tuple[list[Any], list[Any], int]:
    """Trains until there are `ends_at` ranks, and three steps more.

    Worker 2 is killed, and worker 1 asks to leave, when they have trained with worker 3.
    """
    Path(folder, f"pid{rank}").write_text(str(os.getpid()))
    os.environ.update(environs[rank])

    import torchring.horovod as hvd

    hvd.init()
    torch.manual_seed(rank)
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    in_no_state = hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0))
    syncs = 0

    class State(hvd.elastic.TorchState):
        def sync(self) -> None:
            nonlocal syncs
            syncs += 1
            super().sync()

    state = State(model, optimizer, step=0, tries=0, met=False)
    entries: list[Any] = []

    @hvd.elastic.run
    def train(state: State) -> None:
        entries.append([hvd.rank(), hvd.size(), state.step])
        last = None
        while last is None or state.step < last:
            assert state.tries == state.step  # what was not committed is undone
            if hvd.size() == ends_at and last is None:
                last = state.step + 3
            state.met = state.met or bool(hvd.allreduce(torch.tensor(float(rank == 3)), op=hvd.Max))
            state.tries += 1
            if rank == 2 and state.met and state.step > 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 1 and state.met and hvd.size() == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            optimizer.zero_grad()
            in_no_state.zero_grad()
            (in_no_state.param_groups[0]["params"][0] * model(torch.full((1, 2), float(rank + 1)))).sum().backward()
            optimizer.step()
            grads = hvd.allgather(in_no_state.param_groups[0]["params"][0].grad.clone())
            assert torch.equal(grads, grads[:1].expand_as(grads))  # reduced, with the ranks that there are
            state.step += 1
            state.commit()

    train(state)
    return entries, [parameter.tolist() for parameter in model.parameters()], syncs


class _Driver:
    """Plans a generation whenever all members of the one before have left, or are lost: of all workers that meet.

    The first one begins when the first `num_at_first` workers meet, whoever else has come by then.
    """

    def __init__(self, folder: Path, num_workers: int, num_at_first: int) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self._store = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=SECONDS),
            master_listen_fd=listener.detach(),
        )
        self._folder, self._workers, self._num_at_first = folder, range(num_workers), num_at_first
        for key, value in {protocol.TOKEN: "token", protocol.CALL: "0", protocol.LATEST: "0", protocol.END: ""}.items():
            self._set(key, value)
        self._set(protocol.BROKEN, Broken().encode())
        for worker in self._workers:
            self._set(protocol.card_key(worker), Card("starting").encode())
            self._set(protocol.beat_key(worker), Beat(0).encode())
        self.environs = [
            {INVITATION: Invitation(n, n, num_at_first, ("127.0.0.1",), port, "token", "here").encode().decode()}
            for n in self._workers
        ]
        self.plans: list[tuple[int, ...]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._drive, daemon=True)

    def __enter__(self) -> _Driver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # takes bytes, too

    def _is_lost(self, worker: int) -> bool:
        file = self._folder / f"pid{worker}"
        return file.exists() and bool(pid := file.read_text()) and not is_running(int(pid))

    def cards(self) -> dict[int, Card]:
        keys = [protocol.card_key(worker) for worker in self._workers]
        return dict(zip(self._workers, map(Card.decode, self._store.multi_get(keys)), strict=True))

    def _drive(self) -> None:
        end = time.monotonic() + patient(SECONDS)
        while not self._is_over.wait(0.02) and time.monotonic() < end:
            cards = self.cards()
            generation = len(self.plans)
            meeting = [
                worker for worker, card in cards.items() if card.state == "meeting" and not self._is_lost(worker)
            ]
            before = self.plans[-1] if self.plans else tuple(range(self._num_at_first))
            has_left = [
                self._is_lost(worker) or (cards[worker].generation >= generation and cards[worker].state != "running")
                for worker in before
            ]
            if all(has_left) and meeting and (self.plans or set(before) <= set(meeting)):
                survivors = [worker for worker in before if worker in meeting]
                plan = (*survivors, *(worker for worker in meeting if worker not in survivors))
                self.plans.append(plan)
                self._set(protocol.generation_key(generation + 1), Generation(generation + 1, plan, "a test").encode())
                self._set(protocol.LATEST, str(generation + 1))
            elif generation and set(meeting) - set(before):
                self._set(protocol.CALL, str(generation))


def test_workers_come_are_killed_and_leave(tmp_path: Path) -> None:
    with _Driver(tmp_path, 4, 3) as driver:
        first, _, _, new = run_ranks(
            _work,
            4,
            driver.environs,
            str(tmp_path),
            2,
            deadline=SECONDS,
            launcher_env=False,
            expect_exit={1: 128 + signal.SIGTERM, 2: -signal.SIGKILL},
        )
        cards = driver.cards()
    came = first[0][-3][2] if driver.plans[0] == (0, 1, 2) else 0
    assert driver.plans[-3:] == [(0, 1, 2, 3), (0, 1, 3), (0, 3)]
    assert [entry[:2] for entry in first[0][-3:]] == [[0, 4], [0, 3], [0, 2]]
    assert [entry[:2] for entry in new[0]] == [[3, 4], [2, 3], [1, 2]]
    assert new[0][0][2] == came  # where the others were
    assert first[1] == new[1]
    assert new[2] == 2  # none after a worker has left: the others agree
    assert [cards[worker].state for worker in (0, 1, 3)] == ["finished", "leaving", "finished"]
