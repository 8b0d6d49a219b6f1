"""Objects for Kubernetes.

The fields are those of `batch/v1` Job, `jobset.x-k8s.io/v1alpha2` JobSet, and `trainer.kubeflow.org/v1alpha1` TrainJob
and ClusterTrainingRuntime.

In each pod torchrun starts the processes. It reads where to meet from PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK,
PET_MASTER_ADDR and PET_MASTER_PORT, which are defaults of its options. Kubeflow Trainer sets these variables itself.

An elastic job has pods that wait, and one pod with the coordinator, `torchring run --elastic`, which starts processes
in the others by `kubectl exec` and learns from `kubectl get` which pods there are.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any, Final

from torchring.launch.hosts import LaunchError
from torchring.manifest.job import Job

_PORT: Final = 29500
_MOST_RESTARTS: Final = 100  # each begins with the newest checkpoint
_GRACE_SECONDS: Final = 120  # after SIGTERM, to finish the step and write a checkpoint
_INDEX: Final = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_TORCHRUN: Final = ("torchrun", "--no-python")
Object = dict[str, Any]


def indexed_job(job: Job) -> list[Object]:
    """A Job with a pod for each worker, and the Service that gives the pods names. It needs nothing installed."""
    pod = _pod(job, [*_TORCHRUN, *job.command], env=_meeting(job, f"{job.name}-0.{job.name}"))
    pod |= {"subdomain": job.name, "restartPolicy": "OnFailure"}
    selector = {"batch.kubernetes.io/job-name": job.name}
    # Pods need names before they are ready: they become ready when all have met.
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": job.name}, "spec": service},
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": job.name},
            "spec": _indexed(job.workers, pod, restarts=_MOST_RESTARTS),
        },
    ]


def jobset(job: Job) -> list[Object]:
    """A JobSet. If a pod fails, JobSet starts all of them anew. An elastic job goes on without the pod."""
    if job.elastic:
        return _elastic_jobset(job)
    pod = _pod(job, [*_TORCHRUN, *job.command], env=_meeting(job, f"{job.name}-worker-0-0.{job.name}"))
    return [_jobset(job, [_replicated("worker", _indexed(job.workers, pod))])]


def trainjob(job: Job) -> list[Object]:
    """A TrainJob of Kubeflow Trainer, and a ClusterTrainingRuntime for it, which an administrator may have to apply."""
    runtime = f"{job.name}-torchring"
    node = _replicated("node", _indexed(job.workers, _pod(job, [], env=[])))
    # Kubeflow Trainer overwrites the container `node` of the Jobs that have this label.
    node["template"]["metadata"] = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    template = {"spec": {"failurePolicy": {"maxRestarts": _MOST_RESTARTS}, "replicatedJobs": [node]}}
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": runtime}
    trainer = {
        "image": job.image,
        "command": [*_TORCHRUN, *job.command],
        "numNodes": job.workers,
        "numProcPerNode": job.processes,
        **_if(_resources(job), "resourcesPerNode"),
        **_if(_env(job), "env"),
    }
    kinds = {
        "ClusterTrainingRuntime": {"mlPolicy": {"numNodes": job.workers, "torch": {}}, "template": template},
        "TrainJob": {"runtimeRef": reference, "trainer": trainer},
    }
    return [
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": kind,
            "metadata": {"name": runtime if kind == "ClusterTrainingRuntime" else job.name},
            "spec": spec,
        }
        for kind, spec in kinds.items()
    ]


KINDS: Final[dict[str, Callable[[Job], list[Object]]]] = {"job": indexed_job, "jobset": jobset, "trainjob": trainjob}


def objects(job: Job, kind: str | None) -> list[Object]:
    """The objects of a kind of `KINDS`; None: an elastic job is a JobSet, others a Job. Raises LaunchError."""
    kind = kind or ("jobset" if job.elastic else "job")
    if job.elastic and kind != "jobset":
        raise LaunchError(f"elastic: the pods of a {kind} stay the same; `--kind jobset` writes an elastic job")
    if not job.image:
        raise LaunchError("image: pods need a container image with PyTorch, torchring and the script")
    return KINDS[kind](job)


def to_yaml(things: list[Object]) -> str:
    """The text that `kubectl apply -f` takes."""
    import yaml

    return str(yaml.safe_dump_all(things, sort_keys=False, width=120))


def _elastic_jobset(job: Job) -> list[Object]:
    assert job.elastic is not None
    least, most = job.elastic
    selector = f"jobset.sigs.k8s.io/jobset-name={job.name},jobset.sigs.k8s.io/replicatedjob-name=worker"
    line = f'{{range .items[*]}}{{.metadata.name}}:{job.processes}{{"\\n"}}{{end}}'
    running = ["kubectl", "get", "pods", "-l", selector, "--field-selector", "status.phase=Running"]
    discover = f"#!/bin/sh\nexec {shlex.join([*running, '-o', f'jsonpath={line}'])}\n"
    run = ["torchring", "run", "--elastic", "-np", str(job.workers * job.processes)]
    run += ["--min-np", str(least * job.processes), "--max-np", str(most * job.processes)]
    run += ["--discover", "/tmp/pods", "--launcher", "kubectl"]
    for name in _variables(job):
        run += ["--env", name]
    script = (
        f"printf %s {shlex.quote(discover)} > /tmp/pods && chmod +x /tmp/pods && exec {shlex.join([*run, *job.script])}"
    )
    coordinator = _pod(job, ["sh", "-c", script], env=_env(job), is_worker=False) | {"serviceAccountName": job.name}
    worker = _pod(job, ["sleep", "infinity"], env=_env(job)) | {"restartPolicy": "OnFailure"}
    coordinator["containers"][0]["name"] = "coordinator"
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": job.name},
        "rules": [
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]},
            {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["create", "get"]},
        ],
    }
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": job.name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": job.name},
        "subjects": [{"kind": "ServiceAccount", "name": job.name}],
    }
    jobs = [
        _replicated("coordinator", _indexed(1, coordinator)),
        _replicated("worker", _indexed(most, worker, restarts=_MOST_RESTARTS)),
    ]
    done = {"operator": "All", "targetReplicatedJobs": ["coordinator"]}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": job.name}},
        role,
        binding,
        _jobset(job, jobs, successPolicy=done),
    ]


def _jobset(job: Job, jobs: list[Object], **policies: Object) -> Object:
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": job.name},
            "failurePolicy": {"maxRestarts": _MOST_RESTARTS},
            **policies,
            "replicatedJobs": jobs,
        },
    }


def _replicated(name: str, spec: Object) -> Object:
    return {"name": name, "replicas": 1, "template": {"spec": spec}}


def _indexed(num: int, pod: Object, restarts: int = 0) -> Object:
    """The spec of a Job whose pods have the numbers 0 .. num - 1."""
    return {
        "completionMode": "Indexed",
        "completions": num,
        "parallelism": num,
        "backoffLimit": restarts,
        "template": {"spec": pod},
    }


def _pod(job: Job, command: list[str], env: list[Object], is_worker: bool = True) -> Object:
    mounts = [{"name": name, "mountPath": path} for name, path in job.volumes.items()]
    volumes: list[Object] = [{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in job.volumes]
    if is_worker:  # without it, the processes of a pod and the workers of their DataLoaders share 64 MB
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    container = {
        "name": "node",
        "image": job.image,
        **_if(command, "command"),
        **_if(env, "env"),
        **_if(_resources(job) if is_worker else {}, "resources"),
        **_if(mounts, "volumeMounts"),
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "containers": [container],
        **_if(volumes, "volumes"),
    }


def _resources(job: Job) -> Object:
    amounts = {"cpu": job.cpus, "memory": job.memory, "nvidia.com/gpu": job.gpus}
    given = {name: str(amount) for name, amount in amounts.items() if amount}
    return {"requests": given, "limits": given.copy()} if given else {}


def _variables(job: Job) -> dict[str, str]:
    return {**({"OMP_NUM_THREADS": str(job.threads)} if job.threads else {}), **job.env}


def _env(job: Job) -> list[Object]:
    return [{"name": name, "value": value} for name, value in _variables(job).items()]


def _meeting(job: Job, master: str) -> list[Object]:
    """The variables of torchrun, and those of the job."""
    said = {"NNODES": job.workers, "NPROC_PER_NODE": job.processes, "MASTER_ADDR": master, "MASTER_PORT": _PORT}
    rank = {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}
    return [*({"name": f"PET_{name}", "value": str(value)} for name, value in said.items()), rank, *_env(job)]


def _if(value: Any, key: str) -> Object:
    """The key with its value, unless the value is empty."""
    return {key: value} if value else {}
