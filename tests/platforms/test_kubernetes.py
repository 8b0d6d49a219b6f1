"""What `torchring manifest kubernetes` writes: objects of the published schemas, whose pods find each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.commands import free_port
from tests.support.harness import patient
from torchring.manifest.job import Job
from torchring.manifest.kubernetes import KINDS, indexed_job, objects, to_yaml

pytestmark = pytest.mark.platforms

PLAIN = Job("digits", ["python", "train.py"], "example.com/train", 2, cpus=8, memory=16 << 30, processes=2)
ELASTIC = Job(**{**vars(PLAIN), "elastic": (1, 4), "env": {"A": "1"}, "volumes": {"checkpoints": "/checkpoints"}})
PREFIXES = {
    "v1": "IoK8sApiCoreV1",
    "batch/v1": "IoK8sApiBatchV1",
    "jobset.x-k8s.io/v1alpha2": "JobsetV1alpha2",
    "trainer.kubeflow.org/v1alpha1": "TrainerV1alpha1",
}


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
            for thing in yaml.safe_load_all(to_yaml(objects(job, kind))):
                if thing["apiVersion"] != "rbac.authorization.k8s.io/v1":  # not among the models
                    found.add(check(thing))
    assert found == {
        "IoK8sApiCoreV1Service", "IoK8sApiCoreV1ServiceAccount", "IoK8sApiBatchV1Job", "JobsetV1alpha2JobSet",
        "TrainerV1alpha1TrainJob", "TrainerV1alpha1ClusterTrainingRuntime",
    }  # fmt: skip
    for fault in ({"spec": {"workers": 2}}, {"spec": {"template": {}, "parallelism": "2"}}, {"spec": {}}):
        with pytest.raises((AssertionError, ValueError)):
            check({"apiVersion": "batch/v1", "kind": "Job", **fault})


def test_pods_find_each_other(tmp_path: Path) -> None:
    """Each pod is a process here, with the command and the variables that it would get."""
    script = "import torchring as t; print(t.rank(), t.size(), t.all_reduce(t.tensor(t.rank())).item())"
    script = script.replace("t.tensor(", "__import__('torch').tensor(1.0 + ")
    job = Job("digits", [sys.executable, "-c", script], "image", 2, cpus=2, processes=1, env={"A": "b"})
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
