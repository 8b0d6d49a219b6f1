"""torchring.ray on a local Ray: the scripts of docs/platforms/ray.md, workers that fail or die, and bad input."""

import json
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.documents import ROOT, snippet
from tests.support.harness import is_running, wait_until

pytestmark = pytest.mark.platforms

PAGE = ROOT / "docs" / "platforms" / "ray.md"
CPUS = 2
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # otherwise Ray writes a token into the home directory
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # one process less
    "RAY_TRAIN_METRICS_ENABLED": "0",
}


def start_ray(folder: str) -> None:
    """Start it again where it gives up after 30 s, as it may on a busy machine."""
    import ray

    size = {"num_cpus": CPUS, "object_store_memory": 80 * 2**20}
    for is_last in (False, False, True):
        try:
            ray.init("local", include_dashboard=False, log_to_driver=False, _temp_dir=folder, **size)
        except Exception:
            ray.shutdown()
            if is_last:
                raise
        else:
            return


@pytest.fixture(scope="module", autouse=True)
def logs() -> Iterator[str]:
    """Starts a Ray of two CPUs for all tests of this file. The folder of its logs."""
    import ray
    from ray import cloudpickle

    # Not a folder of pytest's: the names of Ray's sockets must be short.
    temporary = tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True)
    with temporary as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RAY_ADDRESS"):
            patch.delenv(name, raising=False)
        patch.setenv("TORCHRING_LAUNCHER", "none")  # of the shell that started the cluster: no rank trains alone for it
        start_ray(folder)
        cloudpickle.register_pickle_by_value(sys.modules[__name__])  # else each worker would import pytest and torch
        yield str(Path(folder, "session_latest", "logs"))
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
        ray.shutdown()


def run_page(heading: str, *replacements: tuple[str, str], **names: Any) -> dict[str, Any]:
    code = snippet(PAGE, heading)
    for old, new in replacements:
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    namespace: dict[str, Any] = {"__name__": "__main__", **names}
    exec(compile(code, "ray.md", "exec"), namespace)
    return namespace


def assert_nothing_is_left(folder: Path) -> None:
    """No process of a rank, and no resources that are taken. Ray notices the end of a process after a moment."""
    import ray

    pids = [int(file.name.removeprefix("pid")) for file in folder.glob("pid*")]
    assert pids
    wait_until(lambda: not any(map(is_running, pids)), "the ranks to end")
    wait_until(lambda: ray.available_resources().get("CPU") == CPUS, "the resources to be free")


def write_facts(folder: str) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    facts = {name: os.environ[name] for name in names}
    Path(folder, f"pid{os.getpid()}").write_text(json.dumps(facts))


def trained_alone(batches: Iterable[list[int]]) -> dict[str, Any]:
    """What the page's scripts train on these samples, in one process."""
    import torch

    torch.manual_seed(0)
    x, y = torch.randn(64, 8), torch.randn(64, 1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
        optimizer.step()
    return dict(model.state_dict())


def test_the_script_of_the_page_trains_as_one_process() -> None:
    import torch

    names = run_page("## A function on several workers")
    first, second = names["states"]
    assert all(torch.equal(first[name], second[name]) for name in first)
    sampler = names["torchring"].data.Sampler(range(64), seed=0, batch_size=16)
    batches = [batch for _ in range(2) for batch in sampler]
    torch.testing.assert_close(dict(first), trained_alone(batches), rtol=1e-6, atol=1e-7)


def _is_killed(folder: str) -> None:
    import torchring

    write_facts(folder)
    torchring.barrier()
    assert torchring.local_size() == 2, "ranks of one node share memory"
    if torchring.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torchring.barrier()


def test_a_worker_that_is_killed_is_named_and_the_others_end(tmp_path: Path) -> None:
    import torchring

    with pytest.raises(torchring.PeerLostError, match=r"rank 1 of 2 is lost: The actor died") as caught:
        torchring.ray.run(_is_killed, (str(tmp_path),), num_workers=2)
    assert caught.value.peers == (1,)
    facts = sorted((json.loads(file.read_text()) for file in tmp_path.iterdir()), key=lambda fact: fact["RANK"])
    same = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    assert facts == [{"RANK": rank, "LOCAL_RANK": rank, **same} for rank in "01"]
    assert_nothing_is_left(tmp_path)


def _trains_alone(folder: str, logs: str, *, what: str) -> None:
    """Rank 0 returns without having met rank 1, which fails as soon as rank 0 has said so."""
    write_facts(folder)
    if os.environ["RANK"] == "0":
        import torch

        torch.nn.Linear(1, 1)(torch.ones(1, 1)).sum().backward()
        return
    end = time.monotonic() + 120
    while not any("so each has trained alone" in file.read_text() for file in Path(logs).glob("worker-*.err")):
        assert time.monotonic() < end, "rank 0 has not said that it was alone"
        time.sleep(0.02)
    raise KeyError(what)


def test_an_exception_of_a_rank_arrives_with_its_traceback(tmp_path: Path, logs: str) -> None:
    import torchring

    with pytest.raises(RuntimeError, match="rank 1 of 2 failed:") as caught:
        torchring.ray.run(_trains_alone, (str(tmp_path), logs), {"what": "too small"}, num_workers=2)
    assert re.search(r"test_ray.py\", line \d+, in _trains_alone\n +raise KeyError", str(caught.value))
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__cause__.args == ("too small",)
    assert_nothing_is_left(tmp_path)


def _interrupts(folder: str, driver: int) -> None:
    write_facts(folder)
    os.kill(driver, signal.SIGINT)
    time.sleep(600)


def test_ctrl_c_on_the_driver_ends_the_workers(tmp_path: Path) -> None:
    import torchring

    with pytest.raises(KeyboardInterrupt):
        torchring.ray.run(_interrupts, (str(tmp_path), os.getpid()), num_workers=1)
    assert_nothing_is_left(tmp_path)


# In the loop of the page, beside its own lines
def before_training(folder: str) -> None:
    """Note whether this attempt has a checkpoint; a loop that wraps nothing ends with an error."""
    import ray.train
    import torch

    import torchring
    from torchring.ray.train import _loop

    if os.environ["RANK"] == "0":
        with Path(folder, "attempts").open("a") as file:
            file.write(f"{ray.train.get_checkpoint() is not None}\n")
    with pytest.raises(torchring.TopologyError, match="each of the 2 workers has trained alone"), _loop():
        ray.train.torch.prepare_model(torch.nn.Linear(1, 1))


def after_epoch(epoch: int) -> None:
    """Kill rank 1 of the first attempt, when Ray has taken in the checkpoint of epoch 0 or a later one.

    A report waits until Ray has taken the one before.
    """
    import ray.train

    if os.environ["RANK"] == "1" and epoch == 2 and ray.train.get_checkpoint() is None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_of_ray_train_is_killed_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.chdir(tmp_path)
    report = 'ray.train.report({"loss": loss.item()}, checkpoint=checkpoint)\n'
    seed = "    torch.manual_seed(0)\n"
    before = (seed, f"    before_training({str(tmp_path)!r})\n{seed}")
    names = {"before_training": before_training, "after_epoch": after_epoch}
    result = run_page("## Ray Train", before, (report, f"{report}        after_epoch(epoch)\n"), **names)["result"]
    assert Path("attempts").read_text().split() == ["False", "True"], "the second attempt has a checkpoint"
    with result.checkpoint.as_directory() as folder:
        state = torch.load(Path(folder, "state.pt"), weights_only=True)
    assert state["epoch"] == 4
    # As one process that was never interrupted: DistributedSampler has every other sample on rank 1.
    orders = [torch.randperm(64, generator=torch.Generator().manual_seed(epoch)) for epoch in range(5)]
    alone = trained_alone(batch.tolist() for order in orders for batch in order.split(16))
    torch.testing.assert_close(dict(state["model"]), alone, rtol=1e-6, atol=1e-7)


# Bad input


def test_what_cannot_work_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    import torchring

    run = torchring.ray.run
    lock = threading.Lock()
    for text, call in (
        ("num_workers must be 1 or more, got 0", lambda: run(print, num_workers=0)),
        (r"positive amounts, got \{'CPU': 0\}", lambda: run(print, num_workers=1, resources={"CPU": 0})),
        (r"positive amounts, got \{\}", lambda: run(print, num_workers=1, resources={})),
        ("cannot send .*cannot pickle '_thread.lock'.* inside the function", lambda: run(lambda: lock, num_workers=1)),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    wait_until(lambda: ray.available_resources().get("CPU") == CPUS, "the resources to be free")
    with pytest.raises(TimeoutError, match=r"num_workers=3 .* within 0.01 s; .* have \{'CPU': 2.0\}, of which"):
        run(print, num_workers=3, start_timeout_seconds=0.01)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(torchring.TopologyError, match="was called on rank 1 of 2"):
        run(print, num_workers=1)


def test_what_cannot_be_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray import cloudpickle

    from torchring.ray.actor import Rank

    monkeypatch.setenv("RANK", "0")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    with pytest.raises(TypeError, match="rank 0 returned lock, which cannot be pickled"):
        Rank.__new__(Rank).call(("a", "1"), cloudpickle.dumps((threading.Lock, (), {})))
    assert pickle.loads(Rank.__new__(Rank).call(("a", "1"), cloudpickle.dumps((sys.exit, (0,), {})))) is None
    with pytest.raises(SystemExit):
        Rank.__new__(Rank).call(("a", "1"), cloudpickle.dumps((sys.exit, (3,), {})))


def test_the_rank_that_failed_first_is_named_and_not_one_that_missed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.exceptions import ActorDiedError, RayTaskError

    import torchring
    from torchring.ray import job

    def raises(error: Exception) -> RayTaskError:
        return RayTaskError("call", f"traceback of {error!r}", error)

    def outcome(*failures: Exception, num_ready: int = 2) -> str:
        def wait(pending: list[int], timeout: float | None) -> tuple[list[int], list[int]]:
            is_ready = len(failures) - len(pending) < num_ready
            return (pending[:1], pending[1:]) if is_ready else ([], pending)

        def get(rank: int) -> bytes:
            raise failures[rank]

        monkeypatch.setattr(job, "ray", types.SimpleNamespace(wait=wait, get=get))
        with pytest.raises(RuntimeError) as caught:
            job._results([0, 1])
        return f"{type(caught.value).__name__}: {caught.value}"

    missed = raises(torchring.PeerLostError("rank 1 died"))
    assert outcome(missed, ActorDiedError()).startswith("PeerLostError: rank 1 of 2 is lost")
    assert outcome(missed, raises(ValueError("too small"))).startswith("RuntimeError: rank 1 of 2 failed")
    assert outcome(missed, missed).startswith("RuntimeError: rank 0 of 2 failed")
    assert outcome(missed, ActorDiedError(), num_ready=1).startswith("RuntimeError: rank 0 of 2 failed")


def test_ranks_of_one_node_are_adjacent() -> None:
    from torchring.launch.task import places_of

    places = places_of(["a", "b", "a"])
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    found = [(bundle, "".join(environ[name] for name in names)) for bundle, environ in places]
    assert found == [(0, "03020"), (2, "13120"), (1, "23011")]
