"""Who gets memory and who does not, and that nothing a peer sends is run: what SECURITY.md promises.

`memory/test_host.py` has more on the hand-over: seals, and ranks of two users in one world.
"""

import ast
import contextlib
import ctypes
import functools
import json
import os
import pickle
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchring
from tests.support.harness import RanksFailed, ranks, run_ranks, run_threads
from tests.support.netns import needs_hosts
from torchring import initial_state as state
from torchring.errors import PlanMismatchError, RingError, TopologyError
from torchring.memory import host as host_module
from torchring.memory import links as links_module
from torchring.memory.channel import Channel
from torchring.memory.host import connect
from torchring.rendezvous.environment import _LOCAL_SIZES
from torchring.rendezvous.rendezvous import Rendezvous, within
from torchring.rendezvous.signed import SignedStore, sealed, signed
from torchring.transport.c10d import C10dTransport

PACKAGE = Path(torchring.__file__).parent
_NOBODY = 65534
_CLONE_NEWNET = 0x40000000

# ---- the hand-over, with an intruder in another process

# Connects as a given user, says a given thing and reads until it is turned away: [what it was told, descriptors].
_INTRUDER = """
import json, os, socket, sys
user, address, hello = int(sys.argv[1]), sys.argv[2], bytes.fromhex(sys.argv[3])
if user != os.getuid():
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
said, num_descriptors = [], 0
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.settimeout(8.0)
try:
    link.connect("\\0" + address)
    if hello:
        link.send(hello)
    print("connected", flush=True)
    while True:
        data, descriptors, _, _ = socket.recv_fds(link, 4096, 8)
        if not data:
            break
        said.append(data.decode(errors="replace"))
        num_descriptors += len(descriptors)
except ConnectionError as error:
    print(type(error).__name__, flush=True)
print(json.dumps([said, num_descriptors]))
"""


def _intrude(card: dict[str, str], hello: bytes, user: int) -> subprocess.Popen[str]:
    """Returns once it has said its hello, or was turned away before."""
    process = subprocess.Popen(
        [sys.executable, "-c", _INTRUDER, str(user), card["address"], hello.hex()], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() in ("connected\n", "ConnectionResetError\n", "BrokenPipeError\n")
    return process


def _told(process: subprocess.Popen[str]) -> list[Any]:
    """[what it was told, number of descriptors]"""
    with process, process.stdout:  # it does not wait for long
        told: list[Any] = json.loads(process.stdout.readlines()[-1])
    return told


def _hello(rank: object, token: object) -> bytes:
    return json.dumps({"rank": rank, "token": token}, ensure_ascii=False).encode()


_INTRUDERS: dict[str, Callable[[str], bytes]] = {  # what they say, given rank 0's token
    "wrong token": lambda token: _hello(2, "0" * len(token)),
    "a rank that has come already": lambda token: _hello(1, token),
    "the listener's rank": lambda token: _hello(0, token),
    "a rank that does not exist": lambda token: _hello(7, token),
    "no token": lambda token: b'{"rank": 2}',
    "lists": lambda token: _hello([2], {}),
    "no ASCII": lambda token: _hello(2, "ü"),
    "infinity": lambda token: _hello(float("inf"), ""),
    "a list": lambda token: b"[]",
    "a pickle": lambda token: b"\x80\x04N." + os.urandom(60),
    "no UTF-8": lambda token: b"\xff\xfe\x00",
    "deep": lambda token: b"[" * 4000,
    "long": lambda token: b"x" * 60_000,
    "nothing": lambda token: b"",
}


@pytest.mark.parametrize(
    ("words", "user"),
    [
        *[pytest.param(words, os.getuid(), id=name) for name, words in _INTRUDERS.items()],
        pytest.param(
            lambda token: _hello(2, token),
            _NOBODY,
            marks=pytest.mark.skipif(os.getuid() != 0, reason="needs root"),
            id="right words of another user",
        ),
    ],
)
def test_intruders_get_no_memory(monkeypatch: pytest.MonkeyPatch, words: Callable[[str], bytes], user: int) -> None:
    """Ranks 1 and 2 connect to rank 0, the intruder after rank 1 and before rank 2."""
    rank_1_has_dialled = threading.Event()
    intruders: list[subprocess.Popen[str]] = []
    call = links_module._call

    def call_in_turn(rank: int, peer: int, card: dict[str, str]) -> Any:
        if (rank, peer) == (2, 0):
            assert rank_1_has_dialled.wait(20.0)
            intruders.append(_intrude(card, words(card["token"]), user))
        link = call(rank, peer, card)
        if rank == 1:
            rank_1_has_dialled.set()
        return link

    monkeypatch.setattr(links_module, "_call", call_in_turn)

    def on_rank(rank: int, size: int, store: dist.Store) -> None:
        group = connect(Rendezvous(store, rank, size, 10.0))
        block = group.allocate(8)
        block.own.fill_(rank + 1)
        Channel(group, poll_seconds=0.0).barrier()
        assert [int(part[0]) for part in block.parts] == [1, 2, 3]
        Channel(group, poll_seconds=0.0).barrier()
        group.close()

    run_threads(on_rank, 3)
    assert _told(intruders[0]) == [[], 0]


def test_the_intruder_would_notice_memory() -> None:
    """The control: the same user with the right words in rank 1's place is let in, and handed a descriptor."""

    def on_rank(rank: int, size: int, store: dist.Store) -> Any:
        rendezvous = Rendezvous(store, rank, size, 1.0)
        if rank == 0:
            with pytest.raises(RingError):  # the intruder hands over nothing itself
                connect(rendezvous)
            return None
        card = {"address": "none", "token": "none", "host": host_module._host_identity(), "trouble": ""}
        target = json.loads(rendezvous.all_gather("host", json.dumps(card).encode())[0])
        intruder = _intrude(target, _hello(1, target["token"]), os.getuid())
        rendezvous.all_gather("reachable", b'{"links": [0], "why": []}')
        return _told(intruder)

    (_,), num_descriptors = run_threads(on_rank, 2)[1]
    assert num_descriptors == 1


# Of another user. Connects to every socket of a hand-over that it sees, more often than there are ranks, and holds the
# connections. Then it connects as fast as it can.
_CROWD = """
import os, socket, sys, time
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
held, num_sockets, has_told = {}, int(sys.argv[1]), False
while True:
    for name in {line.split("@")[1].strip() for line in open("/proc/net/unix") if "@torchring-" in line}:
        links = held.setdefault(name, [])
        for _ in range(50 if has_told else 8):
            link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            link.setblocking(False)
            try:
                link.connect("\\0" + name)
            except OSError:  # the backlog is full
                continue
            if len(links) < 8:
                links.append(link)
    if len(held) >= num_sockets and not has_told:
        has_told = print("all sockets are crowded", flush=True) is None
"""


@needs_hosts
@ranks(1, run_ranks)
def test_another_user_who_crowds_the_sockets_keeps_nobody_out() -> None:
    assert ctypes.CDLL(None).unshare(_CLONE_NEWNET) == 0  # where no other job would be disturbed
    crowd = subprocess.Popen([sys.executable, "-c", _CROWD, "3"], stdout=subprocess.PIPE, text=True)

    def on_rank(rank: int, size: int, store: dist.Store) -> None:
        if rank == 3:
            assert crowd.stdout.readline() == "all sockets are crowded\n"
        group = connect(Rendezvous(store, rank, size, 20.0))
        group.close()
        assert group.ranks == (0, 1, 2, 3)

    try:
        run_threads(on_rank, 4)
    finally:
        crowd.kill()
        crowd.communicate()


# ---- values in the store, where a stranger writes, too

_BELIEVED: dict[str, Callable[[Rendezvous], object]] = {
    "claimed/1": lambda rendezvous: rendezvous.host_of(1),
    "claimed/0": Rendezvous.claim_rank,
    "size": Rendezvous.agree_on_size,
    "job": lambda rendezvous: rendezvous.fetch("job", 1),
    "open": lambda rendezvous: rendezvous.is_published("open"),
    "gave_up": Rendezvous.raise_if_given_up,
    "host/0/1": lambda rendezvous: rendezvous.all_gather("host", b""),
    "unreachable/1/0": lambda rendezvous: rendezvous.is_published("unreachable/1/0"),
    "stalls/state/1": lambda rendezvous: rendezvous.start(lambda store: store.multi_get(["stalls/state/1"])).result(),
}


@pytest.mark.parametrize("key", _BELIEVED)
@pytest.mark.parametrize("by", ["nobody", "another job", "another key", "a rank"])
def test_what_no_rank_of_the_job_has_signed_is_not_believed(key: str, by: str) -> None:
    """Under every key that decides something. The control: what a rank has signed is read."""
    raw = dist.HashStore()
    rendezvous = Rendezvous(within(signed(raw, "secret"), "world"), 0, 2, 0.1)
    value = {
        "nobody": b'{"host": "", "links": [1]}',
        "another job": sealed("another secret", f"world/{key}", b"2"),
        "another key": sealed("secret", f"earlier world/{key}", b"2"),
        "a rank": sealed("secret", f"world/{key}", b"2"),
    }[by]
    raw.set(f"world/{key}", value)  # type: ignore[arg-type]  # takes bytes, too
    if by == "a rank":
        with contextlib.suppress(RingError):
            _BELIEVED[key](rendezvous)
        assert rendezvous.fetch(key, 1) == b"2"
        return
    with pytest.raises(TopologyError, match=f"a value under 'world/{key}' that no process of this job has put there"):
        _BELIEVED[key](rendezvous)


@ranks(2, start=run_ranks, env={"TORCHRING_JOB": "secret"})
def test_a_process_group_of_init_meets_in_the_signed_store(rank: int, world_size: int) -> None:
    """All but counters."""
    torchring.init(process_group=True)
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, rank)
    half = dist.new_group([0, 1])  # in the same store
    dist.barrier(half)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]))
    unsigned_keys = []
    for key in store.list_keys():
        if "process_group" in key and store.check([key]) and not re.match(rb"[0-9a-f]{64}|\d+$", store.get(key)):
            unsigned_keys.append(key)
    torchring.shutdown()
    assert gathered == [0, 1]
    assert unsigned_keys == []


class _Forger(SignedStore):
    """Of a rank after whom a stranger writes into the store."""

    def within(self, name: str) -> SignedStore:
        return _Forger(self.inner, self._secret, f"{self.prefix}{name}/")

    def set(self, key: str, value: str | bytes) -> None:
        if "/gloo/" in self.prefix:
            self.inner.set(self.prefix + key, "an address")
        else:
            super().set(key, value)


def test_a_wait_keeps_no_other_call_from_the_store() -> None:
    """A thread that Gloo leaves behind, as its peer was killed, would keep the next generation from meeting."""
    store = SignedStore(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), "secret")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(store.wait, ["late"], timedelta(seconds=20))
        for _ in range(200):
            store.set("other", "")
        assert not waiting.done()
        store.set("late", "")
        waiting.result()
    with pytest.raises(dist.DistStoreError, match="never"):
        store.wait(["never"], timedelta(milliseconds=1))


@pytest.mark.parametrize("kind", [SignedStore, _Forger])
def test_addresses_of_gloo_are_signed(kind: type[SignedStore]) -> None:
    """Gloo itself calls the store that signs."""

    def on_rank(rank: int, size: int, store: dist.Store) -> Any:
        rendezvous = Rendezvous((kind if rank == 1 else SignedStore)(store, "secret").within("world"), rank, size, 5.0)
        with contextlib.closing(C10dTransport(rendezvous, "x")) as transport:
            transport.start_all_reduce(total := torch.tensor([rank + 1])).wait()
            return total.item()

    if kind is SignedStore:
        assert run_threads(on_rank, 2) == [3, 3]
        return
    with pytest.raises(RanksFailed, match=r"a value under 'world/transport/x/gloo/0/.* that no process of this job"):
        run_threads(on_rank, 2)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
@pytest.mark.parametrize(
    ("env", "secret", "expected"),
    [
        ({"TORCHRING_JOB": "secret"}, None, "has come to the store of job"),
        ({"TORCHRING_JOB": "secret"}, "guessed", "no process of this job has put there"),
        ({"TORCHRING_JOB": "secret"}, "secret", "ranks 0, 1 run on one machine as users 0 and 65534"),
        ({"LOCAL_WORLD_SIZE": "2"}, None, "the launcher says that all ranks run on this machine, but"),
    ],
    ids=["of another user", "of another user who guesses", "the launcher's, changed", "without a secret"],
)
def test_a_process_of_another_user_becomes_no_rank(env: dict[str, str], secret: str | None, expected: str) -> None:
    said = run_ranks(_as_users, 2, secret, env=env)
    assert any(text.startswith("TopologyError") and expected in text for text in said)


def _as_users(rank: int, size: int, secret: str | None) -> str:
    if rank == 1:
        "".encode("idna")  # another user may not be able to read this Python's files
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        os.environ.pop("TORCHRING_JOB", None)
        os.environ |= {"TORCHRING_JOB": secret} if secret else {}
    with pytest.raises(RingError) as caught:
        torchring.init(timeout_seconds=2.0)
    return f"{type(caught.value).__name__}: {caught.value.message}"


# ---- nothing that a peer sends is run

# May run code that its input chooses. What is safe about the same modules is left out.
_RUNS = re.compile(
    r"(?<![\w.])(?:eval|exec|compile|__import__)\("
    r"|from (?:pickle|cloudpickle|marshal|shelve|dill|joblib|multiprocessing)\b"
    r"|import (?:marshal|shelve|dill|joblib|(?:cloud)?pickle as)\b"
    r"|pickle\.(?!dumps?\b|PicklingError|UnpicklingError|[A-Z_]+\b)\w+"
    r"|torch\.load\((?!.*weights_only=True)|np\.load\((?!.*allow_pickle=False)|torch\.(?:jit|hub)\.load"
    r"|(?<!def )\b(?:all_?gather_object|broadcast_object(?:_list)?|gather_object|scatter_object_list)\("
    r"|comm\.(?:[is]?send|i?recv|sendrecv|bcast|(?:all)?gather|scatter|alltoall|(?:all)?reduce|(?:ex)?scan)\("
)


@functools.cache
def _sources() -> dict[str, str]:
    """Of the package, by file, a statement a line and without comments; rglob does not follow links."""
    folders = (PACKAGE, PACKAGE / "kernels", PACKAGE / "bench")
    files = {str(file.relative_to(PACKAGE)): file for folder in folders for file in folder.rglob("*.py")}
    return {name: ast.unparse(ast.parse(file.read_text())) for name, file in files.items()}


def test_nothing_is_unpickled_or_evaluated_but_objects_that_the_script_sends() -> None:
    """Benchmarks are not looked at: they read files that they have written themselves."""
    found = Counter((file, what) for file, text in _sources().items() for what in _RUNS.findall(text))
    assert {key: num for key, num in found.items() if not key[0].startswith("bench/")} == {
        ("functions.py", "pickle.loads"): 2,
        ("horovod/functions.py", "pickle.loads"): 2,
        ("horovod/elastic/state.py", "broadcast_object("): 2,  # a State of the user's objects, and of an ElasticSampler
        # functions that the user's driver sends to workers of Ray and tasks of Spark, and what they return
        ("launch/task.py", "pickle.loads"): 2,
        ("ray/job.py", "pickle.loads"): 1,
        ("spark/barrier.py", "pickle.loads"): 2,
        ("spark/horovod.py", "pickle.loads"): 1,
        ("horovod/runner.py", "pickle.loads"): 3,  # torchring.horovod.run: files in a folder of the user's own
    }


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(x): return pickle.loads(x)", ["pickle.loads"]),
        ("class U(pickle.Unpickler): pass", ["pickle.Unpickler"]),
        ("pickle.dumps(1); cloudpickle.dumps(1); pickle.PROTO", []),
        ("cloudpickle.loads(x)", ["pickle.loads"]),
        ("import pickle as p", ["import pickle as"]),
        ("from pickle import loads", ["from pickle"]),
        ("from multiprocessing.connection import Client", ["from multiprocessing"]),
        ("def f(x):\n def g(): exec(x); eval(x)", ["exec(", "eval("]),
        ("re.compile('x'); model.eval(); json.loads(x)", []),
        ("torch.load(f)", ["torch.load("]),
        ("torch.load(f, weights_only=maybe)", ["torch.load("]),
        ("torch.load(f, weights_only=True); np.load(f, allow_pickle=False)", []),
        ("dist.all_gather_object(a, b)", ["all_gather_object("]),
        ("self._comm.bcast(x)", ["comm.bcast("]),
        ("comm.Ibcast(x); group.send([x], 1)", []),
    ],
)
def test_the_search_sees(source: str, expected: list[str]) -> None:
    assert _RUNS.findall(source) == expected


def test_no_python_is_started_that_imports_from_the_working_directory() -> None:
    """`python -m` does, and so does `python -c`, whose programs begin with OWN_IMPORTS therefore."""
    together = "\n".join(_sources().values())
    programs = re.findall(r"(?<!'sh', )'-c', (?:\w+\.)*(\w+)", together)
    assert len(programs) >= 3
    for name in programs:
        assert re.search(rf"\b{name}(: Final)? = f['\"]+\{{OWN_IMPORTS\}}", together), name
    modules = [file for file, text in _sources().items() for _ in re.findall("'-m'", text)]
    assert modules == ["cli.py", "cli.py"]  # its option, and the program that the user names with it


def test_security_md_says_what_is_there() -> None:
    page = " ".join((PACKAGE.parent / "SECURITY.md").read_text().split())
    for name in _LOCAL_SIZES.values():
        assert f"`{name}`" in page
    reports = (PACKAGE / "spark" / "reports.py").read_text()  # spark itself may not be installed
    names = ("_TOKEN_BYTES", "_TOKEN_SECONDS", "_MOST_STRANGERS")
    size, seconds, most = (float(re.findall(rf"^{name}: Final = ([\d.]+)", reports, re.M)[0]) for name in names)
    assert f"it reads {size / 1024:g} KiB, waits {seconds:g} s, and keeps {most:g}" in page
    for launcher in ("launch/launcher.py", "elastic/driver/driver.py", "spark/barrier_task.py", "ray/job.py"):
        assert re.search(r"\bJOB: (secret|call\.token)", (PACKAGE / launcher).read_text()), launcher
    for path in re.findall(r"`(tests/[^`]+)`", page):
        assert (PACKAGE.parent / path).is_file()


class _Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@ranks(2, run_ranks)
def test_optimizer_state_from_a_peer_runs_no_code(rank: int, tmp_path: Path) -> None:
    """And the trap works: an object that the script broadcasts springs it, as the docstring says.

    The sender, who would refuse to send it, is one that does not look.
    """
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5 / (rank + 1))
    if rank == 0:
        optimizer.param_groups[0]["trap"] = _Trap(f"{tmp_path}/state")
        state.load_plain = lambda data: None
        with pytest.raises(PlanMismatchError, match=r"rank 1 could not read its optimizer's state: UnpicklingError"):
            torchring.broadcast_optimizer_state(optimizer)
    else:
        with pytest.raises(pickle.UnpicklingError, match="mkdir"):
            torchring.broadcast_optimizer_state(optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.25
    torchring.broadcast_object(_Trap(f"{tmp_path}/object") if rank == 0 else None)
    assert rank == 0 or [path.name for path in tmp_path.iterdir()] == ["object"]
