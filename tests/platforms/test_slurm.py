"""torchring on a Slurm cluster of two nodes: what a user starts there, and what the loss of a node or a task does."""

import dataclasses
import itertools
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.platforms.slurm import Cluster, why_no_slurm
from tests.support import commands
from tests.support.documents import snippet
from torchring.errors import TopologyError
from torchring.manifest.job_file import JobFile
from torchring.manifest.slurm import sbatch_script
from torchring.rendezvous.environment import read_environment
from torchring.rendezvous.frameworks import refuse_lone_tasks

pytestmark = [
    pytest.mark.platforms,
    pytest.mark.skipif(why_no_slurm() is not None, reason=f"no Slurm cluster: {why_no_slurm()}"),
]
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "slurm"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


# Stands in for scikit-learn in the examples: each process would import the real one for seconds.
DATASETS = """
import numpy
def load_digits(return_X_y):
    labels = numpy.arange(1797) % 10
    random = numpy.random.default_rng(0)
    return random.random((10, 64))[labels] * 12 + random.random((1797, 64)) * 4, labels
"""
MODEL_SELECTION = """
def train_test_split(samples, test_size, stratify, random_state):
    return list(samples[360:]), list(samples[:360])
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the batch scripts use: the examples, and a virtual environment."""
    for name, code in (
        ("sklearn/datasets.py", DATASETS),
        ("sklearn/model_selection.py", MODEL_SELECTION),
        (".venv/bin/activate", f"export PATH={Path(sys.executable).parent}:$PATH\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


# What ranks do after the script of the page: they say where they are, and make steps until one of them is killed.
MORE = """
import json, os
torch.save(model.state_dict(), f"model{rank}.pt")
place = [size, torchring.local_rank(), torchring.local_size(), os.uname().nodename]
print(json.dumps([rank, place, os.getpid()]), flush=True)
while True:
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()
"""


def test_srun_trains_as_one_process_does_and_says_who_was_killed(cluster: Cluster, repository: Path) -> None:
    script = snippet(ROOT / "docs" / "platforms" / "slurm.md", "## The smallest script")
    (repository / "train.py").write_text(script + MORE)
    job = cluster.start("srun", "--nodes=2", "--ntasks-per-node=2", sys.executable, "train.py", folder=repository)
    try:
        assert job.stdout is not None
        lines = (line for line in job.stdout if line.startswith("["))
        ranks = sorted(json.loads(line) for line in itertools.islice(lines, 4))
        places = [place for _, place, _ in ranks]
        assert places == [[4, 0, 2, "node1"], [4, 1, 2, "node1"], [4, 0, 2, "node2"], [4, 1, 2, "node2"]]
        *_, pid = ranks[3]
        os.kill(pid, signal.SIGKILL)
    except BaseException:
        os.killpg(job.pid, signal.SIGKILL)
        raise
    result = commands.finish(job)
    assert result.returncode == 128 + signal.SIGKILL
    errors = re.findall(r"PeerLostError: (.*) \[rank (\d)", result.stderr)
    assert {rank for _, rank in errors} == {"0", "1", "2"}, result.stderr
    assert all(re.search(rf"rank 3 (\(pid {pid}\) on this host|on node2) died or exited", text) for text, _ in errors)
    assert "srun: error: node2: task 3: Killed" in result.stderr
    plain = re.sub(r"torchring\.wrap\((.*), model\)\n.*", r"\1\nrank, size = 0, 1", script)
    assert plain.count("torchring") == 1, "imported, and no more"
    alone: dict[str, Any] = {}
    exec(plain, alone)
    first, *others = [torch.load(repository / f"model{rank}.pt") for rank in range(4)]
    torch.testing.assert_close(others, [first] * 3, rtol=0.0, atol=0.0)
    torch.testing.assert_close(first, alone["model"].state_dict(), rtol=0.0, atol=1e-6)


def test_the_batch_script_trains(cluster: Cluster, repository: Path) -> None:
    options = ("--ntasks-per-node=1", EXAMPLES / "train.sbatch", "--epochs", "2", "--target", "0.5")
    job = cluster.submit(*options, folder=repository)
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    assert re.search(r"images/s on 2 rank", cluster.output(job))


def test_a_preempted_job_goes_on_from_its_checkpoint(cluster: Cluster, repository: Path) -> None:
    script = ("--ntasks-per-node=1", EXAMPLES / "requeue.sbatch", "--pause", "0.1", "--epochs", "2", "--target", "0.5")
    job = cluster.submit(*script, folder=repository)
    cluster.wait_for("epoch 0, image 0: 2 ranks", job)
    urgent = cluster.submit("--partition=urgent", "--nodes=2", "--exclusive", "--wrap=true")
    output = cluster.wait_for("this job was told to end; the newest checkpoint is", job)
    assert cluster.wait(urgent) == "COMPLETED"
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    assert cluster.about(job)["Restarts"] == "1"
    again = cluster.output(job).removeprefix(output)
    (step,) = re.findall(r"training goes on from the checkpoint of step (\d+)", again)
    assert f"step-{int(step):09}.pt" in output
    assert re.search(r"epoch \d, image [1-9]\d*: 2 ranks", again)


def test_an_elastic_job_goes_on_without_a_node(cluster: Cluster, repository: Path) -> None:
    options = ("--ntasks=3", EXAMPLES / "elastic.sbatch", "--pause", "0.1", "--epochs", "4", "--target", "0.5")
    job = cluster.submit(*options, folder=repository)
    cluster.wait_for("epoch 0: ", job)  # which is over
    cluster.kill("node2")
    try:
        cluster.wait_for("epoch 3: ", job)  # is over: the job would end when srun gives up a new worker on node2
    finally:
        cluster.ask("scancel", str(job))
        cluster.boot("node2")
    first, second = re.findall(r"generation \d begins, .*", cluster.output(job))
    assert first == "generation 1 begins, 3 workers (node1: 0, 1; node2: 2), because the job starts"
    assert second.startswith(
        "generation 2 begins, 2 workers (node1: 0, 1), because worker 2 on node2 gave no sign of life for 1.5 s"
    )
    first, second = re.findall(r"epoch (\d), image (\d+): (\d) ranks", cluster.output(job))
    assert first == ("0", "0", "3")
    assert (int(second[0]) > 0, second[2]) == (True, "2"), "the second epoch, or a later one"


def test_manifests(cluster: Cluster, tmp_path: Path) -> None:
    say = ["sh", "-c", "echo $SLURM_PROCID of $SLURM_STEP_NUM_TASKS, $OMP_NUM_THREADS threads, $SAID"]
    plain = JobFile("digits", say, workers=2, cpus=4, memory=64 << 20, processes=2, env={"SAID": "two words"})
    elastic = dataclasses.replace(plain, command=["python", "train.py"], elastic=(1, 2))
    for name, written in (("plain", plain), ("elastic", elastic)):
        (tmp_path / name).write_text(sbatch_script(written))
    cluster.ask("sbatch", "--test-only", tmp_path / "elastic")
    job = cluster.submit(tmp_path / "plain", folder=tmp_path)
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    about = cluster.about(job)
    assert (about["JobName"], about["MinMemoryNode"]) == ("digits", "64M")
    lines = [line for line in cluster.output(job).splitlines() if " of " in line]
    assert sorted(lines) == [f"{rank} of 4, 2 threads, two words" for rank in range(4)]


def test_what_slurm_says_to_a_task_and_to_a_batch_script(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "environ.sbatch"
    script.write_text(
        "#!/bin/bash\nenv -0 > batch; srun sh -c 'env -0 > $SLURM_PROCID'; srun -N1 -n1 sh -c 'env -0 > one'"
    )
    job = cluster.submit("--nodes=2", "--ntasks-per-node=2", script, folder=tmp_path)
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)

    def environ(name: str) -> dict[str, str]:
        return dict(line.split("=", 1) for line in (tmp_path / name).read_text().split("\0") if line)

    tasks = [read_environment(environ(str(rank))) for rank in range(4)]
    assert [(task.launcher, task.rank, task.size, task.local_rank) for task in tasks] == [
        ("srun", rank, 4, rank % 2) for rank in range(4)
    ]
    assert {(task.job, task.master and task.master[0]) for task in tasks} == {(f"{job}.0", "node1")}
    assert len({task.master for task in tasks}) == 1
    with pytest.raises(TopologyError, match=r"MASTER_ADDR=127.0.0.1, but srun started processes on 2 hosts"):
        read_environment({**environ("3"), "MASTER_ADDR": "127.0.0.1"})
    for name, launcher in (("one", "srun"), ("batch", "none")):
        assert (read_environment(environ(name)).launcher, read_environment(environ(name)).size) == (launcher, 1)
        for key, value in environ(name).items():
            monkeypatch.setenv(key, value)
        with caplog.at_level(logging.WARNING, "torchring"):
            if launcher == "none":
                refuse_lone_tasks()
    assert "this process trains alone, although its Slurm job has 4 tasks" in caplog.text
