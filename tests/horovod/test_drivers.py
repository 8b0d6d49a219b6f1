"""torchring.horovod.elastic under a driver, torchring's or Horovod's: ranks are lost, leave, and come.

The drivers here decide nothing: they do what the test says, and speak to workers as the real ones do.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.server
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from tests.support.harness import is_running, patient, run_ranks, wait_until
from torchring.horovod.notices import NoticeService
from torchring.rendezvous import protocol
from torchring.rendezvous.protocol import Beat, Broken, Card, Invitation, Plan

SECONDS = 60.0  # against hangs

# ---- workers


def _work(
    rank: int, size: int, environs: Sequence[Mapping[str, str]], folder: str, ends_at: int
) -> tuple[list[Any], list[Any], int]:
    """Trains until there are `ends_at` ranks, and three steps more.

    Worker 2 is killed, and worker 1 asks to leave, when they have trained with worker 3.
    """
    Path(folder, f"pid{rank}").write_text(str(os.getpid()))
    os.environ.update(environs[rank])
    if rank == 3 and "HOROVOD_ELASTIC" in os.environ:
        wait_until(Path(folder, "start").exists, "the driver's start of worker 3", SECONDS)

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
            if rank == 2 and (state.met or "HOROVOD_ELASTIC" in os.environ) and state.step > 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 1 and state.met and hvd.size() == 3 and "HOROVOD_ELASTIC" not in os.environ:
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


# ---- torchring's driver


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
            {protocol.VARIABLE: Invitation(n, n, num_at_first, ("127.0.0.1",), port, "token", "here").to_json()}
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
        self._store.set(protocol.PREFIX + key, value)  # type: ignore[arg-type]  # takes bytes, too

    def _is_lost(self, worker: int) -> bool:
        file = self._folder / f"pid{worker}"
        return file.exists() and bool(pid := file.read_text()) and not is_running(int(pid))

    def cards(self) -> dict[int, Card]:
        keys = [protocol.PREFIX + protocol.card_key(worker) for worker in self._workers]
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
                self._set(protocol.plan_key(generation + 1), Plan(generation + 1, plan, "a test").encode())
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


# ---- Horovod's driver


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server

    def do_PUT(self) -> None:
        value = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.values[self.path] = value
        if self.path.startswith("/worker_addresses/"):
            addresses, key = pickle.loads(base64.b64decode(value))
            self.server.services[self.path.rpartition("/")[2]] = (next(iter(addresses.values()))[0], key)
        self._answer(200, b"")

    def do_GET(self) -> None:
        _, scope, key = self.path.split("/")
        value = self.server.tell(key) if scope == "rank_and_size" else self.server.values.get(self.path)
        self._answer(404 if value is None else 200, value or b"")

    def _answer(self, code: int, value: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value)

    def log_message(self, *_: object) -> None:
        """Nothing."""


class _Server(http.server.ThreadingHTTPServer):
    """Horovod's key-value server and elastic driver.

    Args:
        rounds: for each time that workers ask for their ranks: worker -> what it is told.
        folder: gets a file "start" at the first round.
    """

    def __init__(self, rounds: Sequence[Mapping[str, str]], folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.values: dict[str, bytes] = {}
        self.services: dict[str, tuple[tuple[str, int], bytes]] = {}
        self._rounds = list(rounds)
        self._folder = folder
        self._asking: set[str] = set()
        self._changed = threading.Condition()

    def tell(self, worker: str) -> bytes | None:
        with self._changed:
            now = self._rounds[0]
            self._asking.add(worker)
            if self._asking == set(now):
                self._asking = set()
                self._rounds.pop(0)
                self.values.clear()
                (self._folder / "start").touch()
                self._changed.notify_all()
            elif not self._changed.wait_for(lambda: self._rounds[:1] != [now], patient(SECONDS)):
                return None
            return now[worker].encode()

    def environ(self, worker: str, said: str) -> dict[str, str]:
        names = ["RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"]
        host, port = self.server_address[:2]
        return {
            **{f"HOROVOD_{name}": number for name, number in zip(names, said.split(","), strict=True)},
            "HOROVOD_HOSTNAME": worker.partition(":")[0],
            "HOROVOD_ELASTIC": "1",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": str(host),
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            "HOROVOD_GLOO_IFACE": "lo",
        }


@contextlib.contextmanager
def _serving(server: _Server) -> Iterator[_Server]:
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    with server:
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def horovods(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Classes of messages, as they are in a process of Horovod's."""

    class PingRequest: ...

    class PingResponse: ...

    class AckResponse: ...

    class HostsUpdatedRequest:
        def __init__(self, timestamp: int, res: Any) -> None:
            self.timestamp, self.res = timestamp, res

    import enum

    class HostUpdateResult(enum.IntFlag):
        no_update = 0
        removed = 1
        added = 2
        mixed = removed | added

    found = types.SimpleNamespace()
    for package in ("horovod", "horovod.runner", "horovod.runner.common", "horovod.runner.common.util"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    monkeypatch.setitem(sys.modules, "horovod.runner.elastic", types.ModuleType("horovod.runner.elastic"))
    homes = {
        "horovod.runner.common.util.network": (PingRequest, PingResponse, AckResponse),
        "horovod.runner.elastic.worker": (HostsUpdatedRequest, HostUpdateResult),
    }
    for home, classes in homes.items():
        module = types.ModuleType(home)
        for each in classes:
            each.__module__, each.__qualname__ = home, each.__name__
            setattr(module, each.__name__, each)
            setattr(found, each.__name__, each)
        monkeypatch.setitem(sys.modules, home, module)
    return found


def _exchange(service: tuple[tuple[str, int], bytes], body: bytes, key: bytes | None = None) -> Any:
    """Send a message as Horovod's driver does. Returns the answer; None if there is none."""
    address, its_key = service
    with socket.create_connection(address, timeout=patient(SECONDS)) as connection:
        digest = hmac.new(key or its_key, body, hashlib.sha256).digest()
        connection.sendall(digest + struct.pack("i", len(body)) + body)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    if not answer:
        return None
    digest, (length,), body = answer[:32], struct.unpack("i", answer[32:36]), answer[36:]
    assert len(body) == length
    assert digest == hmac.new(its_key, body, hashlib.sha256).digest()
    return pickle.loads(body)


def test_workers_join_again_under_horovods_driver(tmp_path: Path, horovods: types.SimpleNamespace) -> None:
    after_loss = {"a:0": "0,3,0,2,0,2", "a:1": "1,3,1,2,0,1"}
    after_removal = {"a:0": "-1,-1,-1,-1,-1,-1", "a:1": "0,2,0,1,0,2", "c:0": "1,2,0,1,1,2"}
    with _serving(_Server([after_loss, after_removal], tmp_path)) as server:
        said = {"a:0": "0,3,0,2,0,2", "a:1": "1,3,1,2,0,1", "b:0": "2,3,0,1,1,2", "c:0": "2,3,0,1,1,2"}
        environs = [server.environ(worker, numbers) for worker, numbers in said.items()]

        def announce() -> None:
            wait_until(lambda: "c:0" in server.services, "worker c:0", SECONDS)
            message = horovods.HostsUpdatedRequest(int(time.time()), horovods.HostUpdateResult.mixed)
            answers.append(_exchange(server.services["a:0"], pickle.dumps(message)))

        answers: list[Any] = []
        thread = threading.Thread(target=announce, daemon=True)
        thread.start()
        _, first, _, new = run_ranks(
            _work,
            4,
            environs,
            str(tmp_path),
            2,
            deadline=SECONDS,
            launcher_env=False,
            expect_exit={0: 1, 2: -signal.SIGKILL},
        )
        thread.join()
    assert [entry[:2] for entry in first[0]] == [[1, 3], [1, 3], [0, 2]]
    assert [entry[:2] for entry in new[0]] == [[2, 3], [1, 2]]
    assert first[0][1][2] == new[0][0][2] == 2
    assert first[1] == new[1]
    assert [type(answer) for answer in answers] == [horovods.AckResponse]


def test_only_the_driver_is_heard(
    tmp_path: Path, horovods: types.SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    heard = []
    with _serving(_Server([], tmp_path)) as server:
        host, port = server.server_address[:2]
        service = NoticeService((str(host), int(port)), "a:0", "lo", lambda *said: heard.append(said))
        place = server.services["a:0"]
    try:
        assert place[0][0] == "127.0.0.1"
        ping = _exchange(place, pickle.dumps(horovods.PingRequest()))
        assert vars(ping) == {"service_name": "worker notification service", "source_address": "127.0.0.1"}
        news = pickle.dumps(horovods.HostsUpdatedRequest(7, horovods.HostUpdateResult.removed))
        assert _exchange(place, news, key=b"another") is None
        # What unpickling could do: run a program.
        harm = b"cos\nsystem\n(V" + f"touch {tmp_path / 'harm'}".encode() + b"\ntR."
        assert _exchange(place, harm) is None
        assert _exchange(place, harm, key=b"another") is None
        assert _exchange(place, b"cbuiltins\ngetattr\n(cbuiltins\ngetattr\nV__self__\ntR.") is None
        assert _exchange(place, pickle.dumps(horovods.HostUpdateResult.added)) is None
        assert heard == []
        assert len(caplog.records) == 5
        assert _exchange(place, news) is not None
        assert heard == [(7.0, 1)]
    finally:
        service.close()
    assert not (tmp_path / "harm").exists()
