"""torchring.spark on a Spark whose executors are processes of their own, with a GPU each as far as Spark knows."""

import contextlib
import importlib
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import torchring
from tests.support.documents import ROOT, section
from tests.support.harness import patient
from tests.support.training import attempt
from torchring.doctor.facts import listening
from torchring.rendezvous.addresses import list_interfaces

pytestmark = pytest.mark.platforms

PAGE = ROOT / "docs" / "platforms" / "spark.md"
_LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two executors with a core each. What they write stays out of pyspark's folder."""
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    import pyspark
    from pyspark.sql import SparkSession

    folder = tmp_path_factory.mktemp("spark")
    for path in Path(pyspark.__file__).parent.iterdir():
        if path.name != "work":
            (folder / path.name).symlink_to(path)
    gpus = folder / "gpus.sh"  # each worker of Spark asks once: 0 and 1
    gpus.write_text(f"""#!/bin/sh
mkdir {folder}/asked 2>&- && n=0 || n=1
echo '{{"name": "gpu", "addresses": ["'$n'"]}}'
""")
    gpus.chmod(0o755)
    cheap = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    options = {
        "spark.driver.extraJavaOptions": cheap,
        "spark.executor.extraJavaOptions": cheap,
        "spark.executor.memory": "512m",
        "spark.executorEnv.PYTHONPATH": str(ROOT),
        "spark.executorEnv.RES_OPTIONS": "timeout:1",
        "spark.log.level": "OFF",
        "spark.python.daemon.module": "tests.platforms.spark_daemon",
        "spark.sql.shuffle.partitions": "1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.worker.resource.gpu.amount": "1",
        "spark.worker.resource.gpu.discoveryScript": str(gpus),
        "spark.executor.resource.gpu.amount": "1",
        "spark.task.resource.gpu.amount": "1",
    }
    environ = {
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "SPARK_HOME": str(folder),
        "SPARK_LOCAL_HOSTNAME": "localhost",
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        session = SparkSession.builder.master("local-cluster[2,1,1024]").config(map=options).getOrCreate()
        patch.setattr("torchring.spark.barrier._REGISTRATION_SECONDS", patient(60.0))
        yield session
        session.stop()


def _trained(model: torch.nn.Module, optimizer: Any, ranks: range) -> list[float]:
    """20 steps, on the batches of these ranks; their mean is the loss."""
    for step in range(20):
        optimizer.zero_grad()
        draws = [torch.Generator().manual_seed(10 * step + rank) for rank in ranks]
        torch.stack([model(torch.randn(8, 4, generator=draw)).square().mean() for draw in draws]).mean().backward()
        optimizer.step()
    return model.weight.flatten().tolist()


def _model() -> torch.nn.Linear:
    torch.manual_seed(7)
    return torch.nn.Linear(4, 1)


def _alone() -> Any:
    model = _model()
    return pytest.approx(_trained(model, torch.optim.SGD(model.parameters(), 0.1), range(2)), rel=1e-5, abs=1e-7)


def _train(lr: float, *, fails: int | None = None, killed: int | None = None) -> dict[str, Any]:
    model = _model()
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr), model)
    rank = torchring.rank()
    print("this is", end=" ")
    print(f"rank {rank}")
    if rank == fails:
        raise ValueError("this rank fails on purpose")
    if rank == killed:
        os.kill(os.getpid(), signal.SIGKILL)
    weights = _trained(model, optimizer, range(rank, rank + 1))
    os.environ["LEFT_BY"] = str(rank)
    found = {"pid": os.getpid(), "weights": weights, "algorithm": optimizer.stats().algorithm}
    found["store"] = listening([address for _, address in list_interfaces()], int(os.environ["MASTER_PORT"]))
    return found | {name: os.environ.get(name) for name in (*_LAUNCH, "CUDA_VISIBLE_DEVICES", "GIVEN")}


def _look(_: object) -> Iterator[Any]:
    """What a rank has left in a worker that Spark uses again."""
    names = {*_LAUNCH, "LEFT_BY", "GIVEN", "TORCHRING_JOB", "TORCHRING_LAUNCHER", "TORCHRING_PARENT"}
    left = sorted(names & os.environ.keys())
    yield os.getpid(), torchring.is_initialized(), left, [fd for fd in os.listdir("/proc/self/fd") if _listens(int(fd))]


def _listens(descriptor: int) -> bool:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as its:
        return its.family != socket.AF_UNIX and bool(its.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


def test_ranks_train_as_one_process_does_and_leave_no_trace(spark: Any, capfd: pytest.CaptureFixture[str]) -> None:
    from torchring.spark import run

    first, second = run(_train, (0.1,), num_proc=2, use_gpu=True, env={"GIVEN": "a", "TORCHRING_LAUNCHER": "none"})
    assert first["weights"] == second["weights"] == _alone()
    assert (first["algorithm"], first["GIVEN"]) == ("direct", "a")
    assert first["store"] == ["127.0.0.1"]  # all ranks are on this host
    assert [[rank[name] for name in _LAUNCH[:4]] for rank in (first, second)] == [[*"0202"], [*"1212"]]
    assert first["CUDA_VISIBLE_DEVICES"] == second["CUDA_VISIBLE_DEVICES"]
    assert first["CUDA_VISIBLE_DEVICES"] in ("0,1", "1,0")
    assert {"[0] this is rank 0", "[1] this is rank 1"} <= set(capfd.readouterr().out.splitlines())

    looked = spark.sparkContext.parallelize(range(2), 2).mapPartitions(_look).collect()
    assert {pid for pid, *_ in looked} <= {first["pid"], second["pid"]}
    assert [left for _, *left in looked] == [[False, [], []]] * 2
    again = run(_train, (0.1,), num_proc=2, use_gpu=False, show_output=False)  # maybe with ranks the other way round
    assert [rank["weights"] for rank in again] == [first["weights"]] * 2
    assert (again[0]["CUDA_VISIBLE_DEVICES"], again[0]["GIVEN"]) == ("", None)
    assert again[0]["MASTER_PORT"] != first["MASTER_PORT"]
    assert "this is rank" not in capfd.readouterr().out


def test_isolated_executors_call_their_gpus_alike() -> None:
    from torchring.spark.barrier_task import visible_gpus

    assert (visible_gpus("1", ["0", "1"]), visible_gpus("0", ["0", "0"])) == ("0,1", "0")


def test_a_barrier_stage_of_the_scripts_own_is_an_error(spark: Any) -> None:
    stage = spark.sparkContext.parallelize(range(2), 2).barrier().mapPartitions(lambda _: [attempt(torchring.init)])
    for said in stage.collect():
        assert re.match("TopologyError: this is task .*Start the function with torchring.spark.run", said)


def test_a_rank_that_raises_is_named_with_its_traceback(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchring.spark import barrier

    expected = r"^rank 1 of 2 \(pid \d+ on .*\) failed:\n(?s:.*)in _train\n(?s:.*)ValueError: this rank fails"
    with pytest.raises(RuntimeError, match=expected):
        barrier.run(_train, (0.1,), {"fails": 1}, num_proc=2)
    call = barrier.RankCall  # and where executors cannot connect to the driver
    monkeypatch.setattr(barrier, "RankCall", lambda payload, driver, *a, **k: call(payload, ("127.0.0.1", 1), *a, **k))
    with pytest.raises(RuntimeError, match=rf"{expected} on purpose$"):
        barrier.run(_train, (0.1,), {"fails": 1}, num_proc=2)


def test_a_rank_that_is_killed_is_named(spark: Any) -> None:
    from torchring.spark import run

    with pytest.raises(RuntimeError, match=r"^rank 1 of 2 \(pid \d+ on .*\) was lost: its process was killed"):
        run(_train, (0.1,), {"killed": 1}, num_proc=2)


def test_the_scripts_of_the_page(spark: Any, capfd: pytest.CaptureFixture[str]) -> None:
    from torchring.spark import barrier

    names = _run("## The smallest script")
    assert list(names["state"]) == ["weight", "bias"]
    assert "[1] step 19: " in capfd.readouterr().out

    fitted = _run("## From a DataFrame")
    torch.testing.assert_close(dict(fitted["state"]), _fitted_alone(fitted["path"]), rtol=1e-5, atol=1e-6)
    unseen = r"rank 0 sees 64 of the 65 rows that Spark has written to file:/.* do not share"
    with pytest.raises(ValueError, match=unseen):
        barrier._train_on(fitted["train"], fitted["path"], 65)
    with pytest.raises(Exception, match="already exists"):
        barrier.fit(fitted["df"], fitted["train"], fitted["path"])

    assert _run("## Databricks notebooks with HorovodRunner")["weight"].shape == (1, 4)
    shown = capfd.readouterr().out
    assert re.search(r"^\[0\] loss \S+ on rank 0 of 2$", shown, re.MULTILINE)
    assert re.search(r"^\[1\] loss \S+ on rank 1 of 2$", shown, re.MULTILINE)
    looked = spark.sparkContext.parallelize(range(2), 2).map(lambda _: find_spec("horovod") is None).collect()
    assert looked == [True, True]


def _run(heading: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}  # its functions are pickled by value, as those of a script
    for block in re.findall(r"^```python\n(.*?)^```$", section(PAGE, heading), re.DOTALL | re.MULTILINE):
        exec(compile(block, heading, "exec"), names)
    return names


def _fitted_alone(path: str) -> dict[str, torch.Tensor]:
    """What the page's script trains: two ranks in one process, whose losses are averaged."""
    from torchring.data import RowGroups

    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ranks = [RowGroups(path, batch_size=16, rank=rank, size=2) for rank in range(2)]
    for epoch in range(5):
        for rows in ranks:
            rows.set_epoch(epoch)
        for batches in zip(*ranks, strict=True):
            optimizer.zero_grad()
            for batch in batches:
                (torch.nn.functional.mse_loss(model(torch.stack(batch["x"]))[:, 0], batch["y"]) / 2).backward()
            optimizer.step()
    return dict(model.state_dict())


def test_aliases_and_processes_on_the_driver(spark: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The imports of a notebook as they were, and np=-2, whose processes torchring.horovod.run starts: not here."""
    from torchring.horovod import aliases
    from torchring.spark import horovod

    monkeypatch.setattr(horovod, "run_here", lambda fn, args, num_proc: [fn(*args)] * num_proc)
    aliases.install()
    try:
        from horovod.spark import run
        from sparkdl import HorovodRunner
        from sparkdl.horovod import log_to_driver

        def main(number: int) -> tuple[bool, int]:
            import horovod.torch as hvd

            log_to_driver("hello")
            return hvd is torchring.horovod, number

        assert HorovodRunner is horovod.HorovodRunner
        assert HorovodRunner(np=-2).run(main, number=3) == (True, 3)
        with pytest.warns(UserWarning, match=r"start_timeout, use_gloo: no meaning here, ignored"):
            assert run(main, (4,), num_proc=2, start_timeout=30, use_gloo=True) == [(True, 4)] * 2
        assert HorovodRunner(np=0).run(main, number=5) == (True, 5)
    finally:
        aliases.uninstall()
    shown = capsys.readouterr().out
    assert [shown.count(line) for line in ("[0] hello\n", "[1] hello\n", "hello\n")] == [2, 2, 5]
    with pytest.raises(ValueError, match=r"driver_log_verbosity must be one of .*, got 'none'"):
        horovod.HorovodRunner(np=1, driver_log_verbosity="none")


@pytest.mark.grid  # starts three interpreters that import torch
def test_under_torch_distributor(spark: Any) -> None:
    from pyspark.ml.torch.distributor import TorchDistributor

    found = TorchDistributor(num_processes=2, local_mode=True, use_gpu=False).run(_train, 0.1)
    assert found["weights"] == _alone()


def test_what_cannot_work_is_refused_at_once(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyspark

    from torchring.spark import run

    def refused(fn: Any = _train, **options: Any) -> str:
        return attempt(lambda: run(fn, (0.1,), **options))

    assert "num_proc must be 1 or more, got 0" in refused(num_proc=0)
    monkeypatch.setattr("torchring.spark.barrier._REGISTRATION_SECONDS", 0.0)  # all executors have come
    said = refused(num_proc=5)
    assert said.startswith("ValueError: num_proc=5, but Spark has 2 task slots (master local-cluster[2,1,1024])")
    assert "cannot send test_what_cannot_work_is_refused_at_once.<locals>" in refused(lambda _: spark, num_proc=2)
    returns = refused(lambda _: (each for each in "a"), num_proc=1)
    assert re.search(r"TypeError: rank 0 of 1 .* returned generator, which cannot be pickled", returns)

    context = spark.sparkContext
    for name, value, options, expected in [
        ("spark.dynamicAllocation.enabled", "true", {}, "Spark runs no barrier stage then"),
        ("spark.task.resource.gpu.amount", "0.5", {}, "spark.task.resource.gpu.amount=0.5, but a rank uses one GPU"),
        ("spark.task.resource.gpu.amount", "0", {"use_gpu": True}, "spark.task.resource.gpu.amount=0, but a rank uses"),
    ]:
        conf = context.getConf().set(name, value)
        with monkeypatch.context() as patch:
            patch.setattr(type(context), "getConf", lambda self, conf=conf: conf)
            assert expected in refused(num_proc=2, **options)

    class Remote:
        __module__ = "pyspark.sql.connect.session"

    assert "this session is one of Spark Connect" in refused(spark=Remote())
    monkeypatch.setattr(pyspark, "__version__", "3.4.1")
    with pytest.raises(ImportError, match=r"pyspark 3\.5 and newer, up to .* 4\.4, and pyspark 3\.4\.1 is"):
        importlib.reload(torchring.spark)


def test_strangers_are_sent_away(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    from torchring.spark import reports

    monkeypatch.setattr(reports, "_TOKEN_SECONDS", 3.0)
    with reports.Reports("127.0.0.1") as server, contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(server.server_address)) for _ in range(70)]
        for stranger in strangers[:6]:
            stranger.settimeout(2.0)
            assert stranger.recv(1) == b""  # made room for the others
        rank = reports.Reporter(server.server_address, token=server.token, partition=0, name="rank 0", rank=0)
        tokens = (b'"\xc3\xbc"', b'"\\ud800"', b"1e999")
        for line in (*(b'{"token": ' + token + b"}\n" for token in tokens), b"[" * 4096, b"a" * 5000):
            with socket.create_connection(server.server_address) as stranger, contextlib.suppress(ConnectionError):
                stranger.sendall(line)
                assert stranger.recv(1) == b""
        assert strangers[-1].recv(1) == b""  # has said nothing
        rank.say(output="hello")
        rank.say(done=True)
        server.drain()
        rank.close()
    assert capfd.readouterr() == ("[0] hello\n", "")
