"""`torchring doctor`: checks fire on bad facts only, the report has what was measured, and ranks that fail are named.

python -m tests.doctor.test_doctor      writes golden.txt anew; look at the differences
"""

import contextlib
import io
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import torch

import torchring
from tests.support import harness
from tests.support.commands import run_python
from tests.support.documents import golden
from tests.support.fake_device import FakeAccelerator
from tests.support.netns import needs_hosts, run_on_hosts
from tests.support.scenarios import INTERPRETED
from tests.support.training import attempt
from torchring import doctor
from torchring.bench.netns import INTERFACE, Network
from torchring.doctor import checks, facts, rank, training
from torchring.doctor.report import PathFacts, RankFacts, Report, StoreFacts, TrainingFacts, show, verdict
from torchring.rendezvous.addresses import gloo_address
from torchring.rendezvous.environment import JOB

GOLDEN: Final = Path(__file__).parent / "golden.txt"
VERSIONS = {"python": "3.12.1", "torchring": "0.1.0", "torch": "2.13.0", "triton": "3.4.0", "mpi4py": None}


def healthy(number: int, host: int = 0, **changes: Any) -> RankFacts:
    """Two ranks of two threads per host, which has four cores."""
    good = RankFacts(
        rank=number,
        hostname=f"node{host}",
        uid=1000,
        boot=f"boot{host}",
        network_namespace="net:[1]",
        versions=dict(VERSIONS),
        platform="Linux x86_64, glibc 2.36",
        cores=[0, 1, 2, 3],
        threads=2,
        has_gloo=True,
        interfaces=[["lo", "127.0.0.1"], ["eth0", f"192.168.0.{host + 1}"]],
        gloo_address=f"192.168.0.{host + 1}",
    )
    return replace(good, **changes)


def one_host(*changes: Mapping[str, Any], **of_report: Any) -> Report:
    """Two ranks; `changes[i]` are those of rank i."""
    ranks = [healthy(i, **(changes[i] if i < len(changes) else {})) for i in range(2)]
    good = Report(
        launcher="torchrun",
        size=2,
        backend="gloo",
        store=StoreFacts("10.0.0.1", 29500, "rank 0", ["127.0.0.1", "192.168.0.1", "10.0.0.1"]),
        ranks=ranks,
        hosts=[[0, 1]],
        paths=[PathFacts("shared memory", [0, 1], 9.5, 8.0, 64 << 20), PathFacts("Gloo", [0, 1], 500.0, 1.0, 1 << 20)],
        algorithm="direct",
        reason="all ranks share memory",
    )
    return replace(good, **of_report)


def two_hosts(*changes: Mapping[str, Any], **of_report: Any) -> Report:
    ranks = [healthy(i, host=i, **(changes[i] if i < len(changes) else {})) for i in range(2)]
    return one_host(**{"ranks": ranks, "hosts": [[0], [1]], "paths": [], **of_report})


# Checks: facts in, findings out


GPUS = {"gpus": ["H200", "H200"], "gpu_peers": [[True, False], [False, True]]}
CONTAINERS = [{"handover": {"processes": f"pid:[{i}]", "folder": "1:2", "trouble": ""}} for i in range(2)]
WHOLE: Final = {  # all that is printed of them is in golden.txt
    "one host": one_host(),
    "two hosts": two_hosts(),
    "one rank": Report("none", size=1, ranks=[healthy(0)], hosts=[[0]]),
    "GPUs": one_host(GPUS, GPUS),
    "GPUs that train": one_host(
        GPUS, GPUS, trainings=[TrainingFacts("auto", "ring", 1e-6, 3.21), TrainingFacts("direct", "direct", 0.5, 1.0)]
    ),
    "GPUs together": one_host({**GPUS, "gpu_peers": [[True, True], [True, True]]}),
    "threads of two numbers": one_host({"threads": 4}),
}
REPORTS: Final[dict[str, Report]] = {
    **WHOLE,
    "a problem": one_host(problem="it broke"),
    "another torch": one_host({}, {"versions": {**VERSIONS, "torch": "2.12.0"}}),
    "torchring missing": one_host({}, {"versions": {**VERSIONS, "torchring": None}}),
    "another Python": one_host({}, {"versions": {**VERSIONS, "python": "3.9.1"}}),
    "another platform": two_hosts({}, {"platform": "Linux aarch64, glibc 2.36"}),
    "GPUs in containers": one_host({**GPUS, **CONTAINERS[0]}, {**GPUS, **CONTAINERS[1]}),
    "more threads than cores": one_host({"threads": 4}, {"threads": 4}),
    "a control group": one_host({"core_limit": 1.5}, {"core_limit": 1.5, "threads": 1}),
    "few threads": one_host({"threads": 1}, {"threads": 1}),
    "other programs": one_host({"load": 10.2}, {"load": 10.1}),
    "one core": one_host({"cores": [2]}, {"cores": [2]}),
    "network namespaces": one_host({"network_namespace": "net:[2]"}, hosts=[[0], [1]]),
    "users": one_host({"uid": 0}, hosts=[[0], [1]]),
    "no hand-over": one_host(hosts=[[0], [1]]),
    "no Gloo": two_hosts({"has_gloo": False}),
    "no mpi4py": one_host(launcher="mpirun (Open MPI)"),
    "a public store": one_host(store=StoreFacts("node0", 1, "torchrun", ["10.0.0.1", "2606:4700::1"])),
    "a public address": two_hosts({"gloo_address": "8.8.8.8"}),
    # What only looks bad
    "loopback, one host": one_host({"gloo_address": "127.0.1.1"}),  # no other host has to reach it
    "a public address, one host": one_host({"gloo_address": "8.8.8.8"}),
    "a public address, MPI": two_hosts({"gloo_address": "8.8.8.8"}, backend="mpi"),
    "a control group that leaves enough": one_host({"core_limit": 2.0, "threads": 1}, {"threads": 1}),
    "a core each": one_host({"cores": [0], "threads": 1}, {"cores": [1], "threads": 1}),
    "no Gloo, one host": one_host({"has_gloo": False}, {"has_gloo": False}),
    "users that share memory": one_host({"uid": 0}),
    "network namespaces of hosts": two_hosts({"network_namespace": "net:[2]"}),
    "containers without GPUs": one_host(*CONTAINERS),
}


def summary(name: str) -> str:
    findings = checks.examine(REPORTS[name])
    bad = [each for each in findings if each.level in ("warning", "wrong")]
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        if name in WHOLE:
            show(REPORTS[name], findings)
    said = shown.getvalue() or "".join(f"{each.level}, {each.topic}: {each.text}\n" for each in bad)
    return f"{said}{verdict(findings)}\n"


def test_what_is_bad_is_found_and_nothing_else() -> None:
    assert {name: summary(name) for name in REPORTS} == golden(GOLDEN)


def test_the_reader_may_end_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "take_part", lambda *_, **__: REPORTS["a problem"])
    monkeypatch.setattr("torchring.doctor.report.show", mock.Mock(side_effect=BrokenPipeError))
    assert doctor.main([]) == 1


def test_an_image_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(facts.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    (finding,) = (
        each
        for each in checks.examine(one_host({"triton_lacks": facts.triton_lacks(), **GPUS}))
        if each.level == "warning"
    )
    assert finding.text.startswith("node0: no C compiler and no headers of Python: Triton cannot compile")
    (tmp_path / "gcc").touch(mode=0o755)
    (tmp_path / "Python.h").touch()
    assert facts.triton_lacks() == []


def test_which_addresses_are_public() -> None:
    public = ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"]
    private = ["10.1.2.3", "192.168.1.1", "172.16.0.1", "100.64.0.1", "169.254.0.1", "127.0.0.1", "0.0.0.0", "nonsense"]
    private += ["::1", "fd00::2", "fe80::1%eth0"]
    assert [address for address in (*public, *private) if checks.is_public(address)] == public


@pytest.mark.sim
@harness.ranks(2, start=harness.run_ranks, env=INTERPRETED)
def test_a_model_trains_on_a_device_by_each_algorithm() -> None:
    cpu = torch.device("cpu")
    small = mock.patch.multiple(training, _STEPS=3, _WIDTH=16)
    with small, FakeAccelerator().installed() as accelerator:
        world = torchring.init()
        found = [training.train(world, cpu, way) for way in training.ways(world, [2, 2])]
        assert [each.asked for each in found] == ["auto", "direct", "ring", "native"]
        assert max(each.difference for each in found) < 1e-6
        assert "sees no GPU" in attempt(lambda: training.ways(world, [1, 0]))
        assert training.abort(world, cpu) == ""
    assert accelerator.races == []


# Facts of this machine


def test_where_gloo_will_listen() -> None:
    interface = {"GLOO_SOCKET_IFNAME": "eth0"}
    for environ, resolved, expected in (
        ({}, ["127.0.1.1"], "127.0.1.1"),
        ({}, ["10.0.0.5"], "10.0.0.5"),
        ({}, ["10.9.9.9"], "127.0.0.1"),  # another machine's: torch falls back
        ({}, [], "127.0.0.1"),
        (interface, ["127.0.1.1"], "10.0.0.5"),
        ({"GLOO_SOCKET_IFNAME": "eth0,eth1"}, [], "10.0.0.5"),
        ({"GLOO_SOCKET_IFNAME": "eth7"}, ["10.0.0.5"], ""),
    ):
        assert gloo_address(environ, [["lo", "127.0.0.1"], ["eth0", "10.0.0.5"]], resolved) == expected


def test_who_listens_at_a_port() -> None:
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        if family == socket.AF_INET6 and not Path("/proc/net/if_inet6").exists():
            continue
        with socket.create_server((address, 0), family=family) as server:
            port = server.getsockname()[1]
            assert facts.listening(["127.0.0.1", "::1"], port) == [address]
            server.close()
            assert facts.listening(["127.0.0.1", "::1"], port) == []


def test_limits_of_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The narrowest limit of the groups around a process counts, as far as it sees them."""
    outer, inner = tmp_path / "outer", tmp_path / "outer" / "inner"
    for folder, text in {outer: "150000 100000", inner: "max 100000"}.items():
        folder.mkdir()
        (folder / "cpu.max").write_text(text + "\n")
    for folders, cores in [([outer, inner], 1.5), ([inner], None), ([], None)]:
        with monkeypatch.context() as patch:
            patch.setattr(facts, "_control_groups", lambda folders=folders: folders)
            assert facts.core_limit() == cores


# One rank of several


def visit(number: int, _: int, trouble: str, *arguments: str) -> tuple[int, str, str]:
    """Its exit code, and what it printed. Measures small."""
    os.environ[JOB] = "of torchring run"
    rank._SIZES, doctor._REPORT_SECONDS = {1 << 10: 2, 1 << 20: 2}, 0.0  # type: ignore[misc]
    real = facts.gather
    if number == 1 and trouble == "torch":
        rank.gather = lambda i: replace(real(i), versions={**real(i).versions, "torch": "1.0"})
    elif (number, trouble) in ((1, "dies"), (0, "rank 0 dies")):
        rank._measure = lambda *_: os._exit(3)
    elif number == 1 and trouble == "hangs":
        rank._measure = lambda *_: time.sleep(1.5 * float(arguments[-1])) or []
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = doctor.main(arguments)
    return code, out.getvalue(), err.getvalue()


def test_ranks_of_a_launcher_make_one_report() -> None:
    (code, text, _), other = harness.run_ranks(visit, 2, "", "--json", "--timeout", "20")
    assert (code, other[:2]) == (0, (0, ""))
    report = json.loads(text)
    assert set(report) == {"verdict", "findings", *vars(Report("none"))}
    assert (report["launcher"], report["size"], report["hosts"]) == ("torchring doctor", 2, [[0, 1]])
    assert report["verdict"] in ("ok", "warning")
    assert [item["rank"] for item in report["ranks"]] == [0, 1]
    assert [(path["kind"], path["ranks"]) for path in report["paths"]] == [("shared memory", [0, 1])]
    assert report["algorithm"] == "direct"
    assert any("hosted by torchring doctor;" in found["text"] for found in report["findings"])


@pytest.mark.parametrize(
    ("trouble", "said"),
    [("torch", "1.0 on rank 1"), ("dies", "measuring failed: rank 1"), ("hangs", "measuring failed: rank 1")],
)
def test_a_rank_that_fails_is_in_the_report(trouble: str, said: str) -> None:
    exits, timeout = {1: 3} if trouble == "dies" else {}, str(harness.patient(1.0))
    (code, text, _), _ = harness.run_ranks(visit, 2, trouble, "--json", "--timeout", timeout, expect_exit=exits)
    report = json.loads(text)
    assert (code, report["verdict"]) == (1, "wrong")
    (wrong,) = [found["text"] for found in report["findings"] if found["level"] == "wrong"]
    assert said in wrong
    assert len(report["ranks"]) == 2


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_never_comes_is_named(number: int) -> None:
    """By rank 0 in its report; if that is rank 0, by the others."""
    env = {"WORLD_SIZE": "3", "RANK": str(number)}
    ((code, *said),) = harness.run_ranks(visit, 1, "", "--timeout", "0.3", env=env)
    assert code == 1
    assert f"joining the ranks failed: rank {1 - number} did not" in " ".join("".join(said).split())


def test_without_rank_0_the_others_fail() -> None:
    """Nobody else would say that there is no report."""
    timeout = str(harness.patient(1.0))
    _, (code, _, said) = harness.run_ranks(visit, 2, "rank 0 dies", "--timeout", timeout, expect_exit={0: 3})
    assert code == 1
    assert "torchring doctor: rank 1: measuring failed: rank 0" in said


def test_a_rank_starts_no_others(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    for arguments in (("-np", "2"), ("-H", "a:1"), ("x",)):
        with pytest.raises(SystemExit, match=r"^2$"):
            doctor.main(arguments, lambda *_: 0)
        assert f"2 ranks already; leave {arguments[0]} out" in capsys.readouterr().err
    monkeypatch.delenv("MASTER_ADDR")
    assert doctor.main([]) == 1
    assert "MASTER_ADDR not set" in capsys.readouterr().err


# Starting ranks


def test_what_ranks_are_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setenv("TORCHRING_LAUNCHER", "none")  # or each rank would be alone
    arguments = ["-np", "3", "-H", "a:2,b:1", "--backend", "mpi", "--env", "A=1", "--timeout", "7", "--json"]
    doctor.main(arguments, lambda *call: calls.append(call) or 0)  # type: ignore[func-returns-value]
    own = ["--backend", "mpi", "--timeout", "7.0", "--json"]
    program = str(Path(doctor.__file__).with_name("__main__.py"))
    assert calls.pop() == (["-np", "3", "-H", "a:2,b:1", "--env", "A=1"], (program, *own))
    assert "TORCHRING_LAUNCHER" not in os.environ
    doctor.main([], lambda *call: calls.append(call) or 0)  # type: ignore[func-returns-value]
    assert calls.pop() == (("-np", "2"), (program, "--backend", "auto", "--timeout", "30.0"))


HANGS = """
import os, sys, time
from torchring import doctor
from torchring.doctor import rank
def gather(_):
    os.write(1, b'noise\\n')
    time.sleep(60)
rank.gather, doctor._MEASURING_SECONDS = gather, 0.0
sys.exit(doctor.main(['--json', '--timeout', '0.1']))
"""


def test_a_rank_that_hangs_says_where_and_ends() -> None:
    """And what a library prints is not on stdout."""
    alone = {"TORCHRING_LAUNCHER": "none", "TORCHRING_JOB": "a job of torchring run"}  # a rank, which starts no others
    ran = run_python("-c", HANGS, env=harness._clean_environ() | alone)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "noise" in ran.stderr
    assert "Timeout (0:00:00" in ran.stderr


def test_a_process_that_hangs_before_it_is_a_rank(tmp_path: Path) -> None:
    """It is named, and neither it nor the launcher outlives the command. It hangs until rank 0 has said so."""
    hang = f"""
import atexit, os, pathlib, time
over, rank = pathlib.Path({str(tmp_path / "over")!r}), os.environ.get("RANK")
if rank == "0":
    atexit.register(over.touch)
elif rank == "1":
    over.with_name("pid").write_text(str(os.getpid()))
    while not over.exists():
        time.sleep(0.1)
    os._exit(1)
"""
    (tmp_path / "sitecustomize.py").write_text(hang)
    environ = harness._clean_environ() | {"PYTHONPATH": str(tmp_path)}
    ran = run_python("-m", "torchring", "doctor", "--timeout", "0.5", env=environ)
    assert ran.returncode == 1, ran.stderr
    assert "joining the ranks failed: rank 1 did not" in " ".join(ran.stdout.split())
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


# On several hosts
def visit_across(number: int, _: int, interface: str | None) -> tuple[int, str, str]:
    os.environ.pop("GLOO_SOCKET_IFNAME")
    os.environ |= {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    return visit(number, 2, "", "--json", "--timeout", "20")


@needs_hosts
def test_between_hosts() -> None:
    """The line's rate is found, since no more passes; then the same where Gloo is left to find its address."""
    with Network(2, rate="1gbit") as network:
        found = [run_on_hosts(network, (1, 1), visit_across, interface) for interface in (INTERFACE, None)]
    assert [[code for code, *_ in ranks] for ranks in found] == [[0, 0], [1, 1]]
    report, stuck = (json.loads(ranks[0][1]) for ranks in found)
    (path,) = report["paths"]
    assert (path["kind"], path["ranks"]) == ("Gloo", [0, 1])
    assert 0 < path["gigabytes_per_second"] < 0.2  # a loaded machine may be slower than the line, never faster
    assert report["algorithm"] == "native"
    warnings = [found["text"] for found in report["findings"] if found["level"] == "warning"]
    assert any("share no memory: they are in different network namespaces" in text for text in warnings)
    (wrong,) = [found["text"] for found in stuck["findings"] if found["level"] == "wrong"]
    for said in (
        *("joining the ranks failed: Gloo on rank 0", "which other hosts cannot reach"),
        f"{INTERFACE} ({network.addresses[0]})",
    ):
        assert said in wrong
    assert [stuck["paths"], stuck["algorithm"]] == [[], ""]


if __name__ == "__main__":
    GOLDEN.write_text("".join(f"=== {name}\n{summary(name)}" for name in REPORTS), encoding="utf-8")
