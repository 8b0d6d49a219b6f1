"""What `torchring manifest kubernetes` writes: objects of the published schemas, whose pods find each other."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.commands import finish, free_port, start
from tests.support.harness import patient
from torchring.manifest.job_file import JobFile
from torchring.manifest.kubernetes import KINDS, indexed_job, jobset, objects, to_yaml

pytestmark = pytest.mark.platforms

WORDS = ["python", "train.py", "--lr", "1e-3", "y", "0o7", "-1", "a b"]
PLAIN = JobFile("digits", WORDS, "example.com/train", 2, cpus=8, memory=16 << 30, processes=2)
ELASTIC = JobFile(**{**vars(PLAIN), "elastic": (1, 4), "env": {"A": "1"}, "volumes": {"checkpoints": "/checkpoints"}})
PREFIXES = {"v1": "IoK8sApiCoreV1", "batch/v1": "IoK8sApiBatchV1", "jobset.x-k8s.io/v1alpha2": "JobsetV1alpha2"}


def check(thing: dict[str, Any]) -> str:
    """Compare an object with the schema that Kubeflow's package has of it; returns the name of the model."""
    from kubeflow_trainer_api import models

    model = getattr(models, PREFIXES[thing["apiVersion"]] + thing["kind"])
    # The models drop what they do not know, as an API server does, and raise for wrong types and missing fields.
    assert model.from_dict(thing).to_dict() == thing
    return str(model.__name__)


def test_objects_have_the_published_schemas() -> None:
    found = set()
    for job in (PLAIN, ELASTIC):
        for kind in ["jobset"] if job.elastic else [None, *KINDS]:
            text = to_yaml(objects(job, kind))
            # As Kubernetes reads YAML, which takes these words for numbers and for true.
            assert all(f'- "{word}"\n' in text for word in WORDS[3:-1])
            for thing in yaml.safe_load_all(text):
                if thing["apiVersion"] != "rbac.authorization.k8s.io/v1":  # not among the models
                    found.add(check(thing))
    assert found == {
        "IoK8sApiCoreV1Service", "IoK8sApiCoreV1ServiceAccount", "IoK8sApiBatchV1Job", "JobsetV1alpha2JobSet",
    }  # fmt: skip
    for fault in ({"workers": 2}, {"template": {}, "parallelism": "2"}, {}):
        with pytest.raises((AssertionError, ValueError)):
            check({"apiVersion": "batch/v1", "kind": "Job", "spec": fault})


def test_pods_find_each_other(tmp_path: Path) -> None:
    """Each pod is a process here, with the command and the variables that it would get."""
    script = (
        "import torch, torchring as t; print(t.rank(), t.size(), t.all_reduce(torch.tensor(1.0 + t.rank())).item())"
    )
    job = JobFile("digits", [sys.executable, "-c", script], "image", 2, cpus=2, processes=1, env={"A": "b"})
    container = indexed_job(job)[1]["spec"]["template"]["spec"]["containers"][0]
    named = {each["name"]: each.get("value") for each in container["env"]}
    assert named["PET_MASTER_ADDR"] == "digits-0.digits"
    assert (named["OMP_NUM_THREADS"], named["A"]) == ("2", "b")
    named |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
    pods = [
        subprocess.Popen(container["command"], env={**os.environ, **named, "PET_NODE_RANK": str(index)}, text=True,
                         stdout=subprocess.PIPE)
        for index in range(2)
    ]  # fmt: skip
    assert [pod.communicate(timeout=patient(60))[0] for pod in pods] == ["0 2 1.5\n", "1 2 1.5\n"]


ELASTIC_SCRIPT = """
import sys, torch, torchring
model = torch.nn.Linear(4, 1)
optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
state = torchring.elastic.State(model=model, optimizer=optimizer, step=0)

@torchring.elastic.run
def train(state):
    while state.step < 20:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1
    print(f"{torchring.size()} ranks")

train(state)
"""
# kubectl, as the coordinator's pod has it; each pod is a process of this machine.
KUBECTL = """#!/bin/sh
echo "$@" >> {log}
if [ $1 = get ]; then printf 'digits-worker-0-0:1\\ndigits-worker-0-1:1\\n'; exit; fi
shift 4  # exec -i POD --
exec "$@"
"""


def test_a_coordinator_starts_workers_in_pods(tmp_path: Path) -> None:
    script, log, kubectl = (tmp_path / name for name in ("train.py", "log", "kubectl"))
    script.write_text(ELASTIC_SCRIPT)
    kubectl.write_text(KUBECTL.format(log=log))
    kubectl.chmod(0o755)
    job = JobFile("digits", ["python", str(script)], "image", 2, cpus=1, processes=1, elastic=(1, 2), env={"A": "b"})
    coordinator = next(
        each["template"]["spec"]["template"]["spec"]["containers"][0]
        for each in jobset(job)[-1]["spec"]["replicatedJobs"]
        if each["name"] == "coordinator"
    )
    named = {each["name"]: each["value"] for each in coordinator["env"]}
    assert named == {"OMP_NUM_THREADS": "1", "A": "b"}, "kubectl exec hands them on"
    environ = {**os.environ, **named, "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ended = finish(start(coordinator["command"], environ, tmp_path), seconds=100)
    assert (ended.returncode, sorted(ended.stdout.splitlines())) == (0, ["2 ranks", "2 ranks"]), ended.stderr
    calls = log.read_text().splitlines()
    wanted = "jobset.sigs.k8s.io/jobset-name=digits,jobset.sigs.k8s.io/replicatedjob-name=worker"
    assert calls[0].startswith(f"get pods -l {wanted} --field-selector status.phase=Running -o go-template=")
    assert {call.split()[2] for call in calls if call.startswith("exec")} == {"digits-worker-0-0", "digits-worker-0-1"}
