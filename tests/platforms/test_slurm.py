"""torchring on a Slurm cluster of two nodes: what a user starts there, and what happens when nodes and tasks are lost."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.platforms.slurm import Cluster, why_no_slurm
from tests.support import commands
from torchring.errors import TopologyError
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


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the batch scripts use: the examples, and a virtual environment."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text(f"export PATH={Path(sys.executable).parent}:$PATH\n")
    return tmp_path


TRAIN = '''
import json, os, sys
import torch
import torchring

def train(num_steps):
    for _ in range(num_steps):
        loss = torch.nn.functional.mse_loss(model(x[rank::size]), y[rank::size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

torch.manual_seed(0)
x = torch.randn(64, 8)
y = x.sum(dim=1, keepdim=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torchring.wrap(torch.optim.AdamW(model.parameters(), lr=0.01), model)
rank, size = torchring.rank(), torchring.size()
train(20)
weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
place = [size, torchring.local_rank(), torchring.local_size(), os.uname().nodename]
print(json.dumps([rank, place, os.getpid(), weights]), flush=True)
train(1_000_000 if size > 1 else 0)
'''


def test_srun_trains_as_one_process_does_and_says_who_was_killed(cluster: Cluster, repository: Path) -> None:
    (repository / "train.py").write_text(TRAIN)
    job = cluster.start("srun", "--nodes=2", "--ntasks-per-node=2", sys.executable, "train.py", folder=repository)
    try:
        assert job.stdout is not None
        ranks = sorted(json.loads(job.stdout.readline()) for _ in range(4))
        places = [place for _, place, _, _ in ranks]
        assert places == [[4, 0, 2, "node1"], [4, 1, 2, "node1"], [4, 0, 2, "node2"], [4, 1, 2, "node2"]]
        *_, pid, weights = ranks[3]
        assert all(each == weights for *_, each in ranks)
        os.kill(pid, signal.SIGKILL)
    finally:
        result = commands.finish(job)
    assert result.returncode == 128 + signal.SIGKILL
    errors = re.findall(r"PeerLostError: (.*) \[rank (\d)", result.stderr)
    assert dict((rank, text) for text, rank in errors).keys() == {"0", "1", "2"}, result.stderr
    assert all(re.search(rf"rank 3 (\(pid {pid}\) on this host|on node2) died or exited", text) for text, _ in errors)
    assert "srun: error: node2: task 3: Killed" in result.stderr
    code = compile(TRAIN.replace("torchring.wrap(torch.optim.AdamW(model.parameters(), lr=0.01), model)",
                                 "torch.optim.AdamW(model.parameters(), lr=0.01)"), "train.py", "exec")  # fmt: skip
    alone: dict[str, list[float]] = {}
    exec(code, alone)
    torch.testing.assert_close(weights, alone["weights"], rtol=0.0, atol=1e-6)


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
    assert cluster.wait(job, "PENDING") == "PENDING", "requeued"
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    assert cluster.about(job)["Restarts"] == "1"
    again = cluster.output(job).removeprefix(output)
    (step,) = re.findall(r"training goes on from the checkpoint of step (\d+)", again)
    assert f"step-{int(step):09}.pt" in output
    assert re.search(r"epoch \d, image [1-9]\d*: 2 ranks", again)


def test_an_elastic_job_goes_on_without_a_node(cluster: Cluster, repository: Path) -> None:
    options = ("--ntasks=3", EXAMPLES / "elastic.sbatch", "--pause", "0.1", "--epochs", "4", "--target", "0.5")
    job = cluster.submit(*options, folder=repository)
    cluster.wait_for("epoch 0: ", job)
    cluster.kill("node2")
    try:
        assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    finally:
        cluster.boot("node2")
    first, second = re.findall(r"generation \d begins, .*", cluster.output(job))
    assert first == "generation 1 begins, 3 workers (node1: 0, 1; node2: 2), because the job starts"
    assert second.startswith("generation 2 begins, 2 workers (node1: 0, 1), because worker 2 on node2 gave no sign of life")
    assert re.search(r"epoch [01], image [1-9]\d*: 2 ranks", cluster.output(job))


def test_what_slurm_says_to_a_task_and_to_a_batch_script(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "environ.sbatch"
    script.write_text("#!/bin/bash\nenv -0 > batch; srun sh -c 'env -0 > $SLURM_PROCID'; srun -N1 -n1 sh -c 'env -0 > one'")
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
