"""Objects for Kubernetes.

The fields are those of `batch/v1` Job and `jobset.x-k8s.io/v1alpha2` JobSet.

In each pod torchrun starts the processes. It reads where to meet from PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK,
PET_MASTER_ADDR and PET_MASTER_PORT, which are defaults of its options.

An elastic job has pods that wait, and one pod with the coordinator, `torchring run --elastic`, which starts processes
in the others by `kubectl exec` and learns from `kubectl get` which pods there are.
"""

import re
import shlex
from typing import Any, Final

from torchring.launch.hosts import LaunchError
from torchring.manifest.job_file import GRACE_SECONDS, JobFile

_PORT: Final = 29500
_MOST_RESTARTS: Final = 100  # each begins with the newest checkpoint
_INDEX: Final = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_RBAC: Final = "rbac.authorization.k8s.io/v1"
_JOBSET: Final = "jobset.x-k8s.io/v1alpha2"
_WAIT_SECONDS: Final = 7 * 24 * 3600  # for pods that wait for room; torchrun and elastic jobs give up after 600 s
_TORCHRUN: Final = ("torchrun", "--rdzv-conf", f"timeout={_WAIT_SECONDS}", "--no-python")
# What a pod of an elastic job does: on SIGTERM it waits until its workers, whom `torchring run` tells to leave,
# have left. It has started them through reaper.py. With 143, the pod gets a successor.
_IDLE: Final = (
    "trap : TERM; sleep infinity & wait; while grep -qs 'reaper[.]py' /proc/[0-9]*/cmdline; do sleep 1; done; exit 143"
)
Object = dict[str, Any]


def indexed_job(job: JobFile) -> list[Object]:
    """A Job with a pod for each worker, and the Service that gives the pods names. It needs nothing installed."""
    pod = _pod(job, [*_TORCHRUN, *job.command], _meeting(job, f"{job.name}-0.{job.name}"), _resources(job))
    pod |= {"subdomain": job.name, "restartPolicy": "OnFailure"}
    selector = {"batch.kubernetes.io/job-name": job.name}
    # Pods need names before they are ready: they become ready when all have met.
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
    return [
        _object("v1", "Service", job.name, spec=service),
        _object("batch/v1", "Job", job.name, spec=_indexed(job.workers, pod, restarts=_MOST_RESTARTS)),
    ]


def jobset(job: JobFile) -> list[Object]:
    """A JobSet. If a pod fails, JobSet starts all of them anew. An elastic job goes on without the pod."""
    if job.elastic:
        return _elastic_jobset(job)
    meeting = _meeting(job, f"{job.name}-worker-0-0.{job.name}")
    pod = _pod(job, [*_TORCHRUN, *job.command], meeting, _resources(job))
    return [_object(_JOBSET, "JobSet", job.name, spec=_jobset([_replicated("worker", _indexed(job.workers, pod))]))]


KINDS: Final = {"job": indexed_job, "jobset": jobset}


def objects(job: JobFile, kind: str | None) -> list[Object]:
    """The objects of a kind of `KINDS`; None: an elastic job is a JobSet, others a Job. Raises LaunchError."""
    kind = kind or ("jobset" if job.elastic else "job")
    if job.elastic and kind != "jobset":
        raise LaunchError("elastic: the pods of a Job stay the same; `--kind jobset` writes an elastic job")
    if not job.image:
        raise LaunchError("image: pods need a container image with PyTorch, torchring and the script")
    return KINDS[kind](job)


def to_yaml(things: list[Object]) -> str:
    """The text that `kubectl apply -f` takes."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """Kubernetes takes 1e-3, 0o7 and y for numbers and true, if they are not in quotes. PyYAML does not."""

    def represent(dumper: Any, text: str) -> Any:
        style = '"' if re.match(r"[-+.0-9]|.?$", text) else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, represent)
    return str(yaml.dump_all(things, Dumper=Dumper, sort_keys=False, width=120))


def _elastic_jobset(job: JobFile) -> list[Object]:
    assert job.elastic is not None
    sizes = (str(num * job.processes) for num in (job.workers, *job.elastic))
    selector = f"jobset.sigs.k8s.io/jobset-name={job.name},jobset.sigs.k8s.io/replicatedjob-name=worker"
    # Not pods that end: their workers are told to leave.
    pod = f'{{{{if not .metadata.deletionTimestamp}}}}{{{{.metadata.name}}}}:{job.processes}{{{{"\\n"}}}}{{{{end}}}}'
    running = ["kubectl", "get", "pods", "-l", selector, "--field-selector", "status.phase=Running"]
    discover = shlex.join([*running, "-o", f"go-template={{{{range .items}}}}{pod}{{{{end}}}}"])
    options = zip(("-np", "--min-np", "--max-np"), sizes, strict=True)
    run = ["torchring", "run", "--elastic", "--launcher", "kubectl", *(word for pair in options for word in pair)]
    run += ["--elastic-timeout", str(_WAIT_SECONDS), "--discover", discover, *job.command]
    coordinator = _pod(job, run, _env(job), {"cpu": "1", "memory": "1Gi"}) | {"serviceAccountName": job.name}
    worker = _pod(job, ["sh", "-c", _IDLE], _env(job), _resources(job)) | {"restartPolicy": "OnFailure"}
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]},
        {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["create", "get"]},
    ]
    reference = {"apiGroup": _RBAC.partition("/")[0], "kind": "Role", "name": job.name}
    subjects = [{"kind": "ServiceAccount", "name": job.name}]
    jobs = [
        _replicated("coordinator", _indexed(1, coordinator)),
        _replicated("worker", _indexed(job.elastic[1], worker, restarts=_MOST_RESTARTS)),
    ]
    done = {"operator": "All", "targetReplicatedJobs": ["coordinator"]}
    return [
        _object("v1", "ServiceAccount", job.name),
        _object(_RBAC, "Role", job.name, rules=rules),
        _object(_RBAC, "RoleBinding", job.name, roleRef=reference, subjects=subjects),
        _object(_JOBSET, "JobSet", job.name, spec=_jobset(jobs) | {"successPolicy": done}),
    ]


def _object(version: str, kind: str, name: str, **fields: Any) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **fields}


def _jobset(jobs: list[Object]) -> Object:
    """The spec of a JobSet, which starts all pods anew when a Job has failed. Its pods have names in DNS."""
    return {"failurePolicy": {"maxRestarts": _MOST_RESTARTS}, "replicatedJobs": jobs}


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


def _pod(job: JobFile, command: list[str], env: list[Object], resources: Object) -> Object:
    claims = enumerate(job.volumes.items())  # a claim's name may have dots, and a volume's may not
    mounts = {
        f"claim{number}": (path, {"persistentVolumeClaim": {"claimName": name}}) for number, (name, path) in claims
    }
    # Otherwise the processes of a pod and the workers of their DataLoaders share 64 MB.
    mounts["shm"] = ("/dev/shm", {"emptyDir": {"medium": "Memory"}})
    container = {
        "name": "node",
        "image": job.image,
        "command": command,
        **({"env": env} if env else {}),
        # What a container gets, and no more. Copies, or else YAML would have an anchor.
        **({"resources": {"requests": resources, "limits": resources.copy()}} if resources else {}),
        "volumeMounts": [{"name": name, "mountPath": path} for name, (path, _) in mounts.items()],
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [container],
        "volumes": [{"name": name, **source} for name, (_, source) in mounts.items()],
    }


def _resources(job: JobFile) -> Object:
    amounts = {"cpu": job.cpus, "memory": job.memory, "nvidia.com/gpu": job.gpus}
    return {name: str(amount) for name, amount in amounts.items() if amount}


def _env(job: JobFile) -> list[Object]:
    return [{"name": name, "value": value} for name, value in job.variables.items()]


def _meeting(job: JobFile, master: str) -> list[Object]:
    """The variables of torchrun, and those of the job."""
    said = {"NNODES": job.workers, "NPROC_PER_NODE": job.processes, "MASTER_ADDR": master, "MASTER_PORT": _PORT}
    rank = {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}
    return [*({"name": f"PET_{name}", "value": str(value)} for name, value in said.items()), rank, *_env(job)]
