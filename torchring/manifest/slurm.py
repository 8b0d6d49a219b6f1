"""Writes sbatch scripts."""

import shlex

from torchring.manifest.job_file import GRACE_SECONDS, JobFile


def sbatch_script(job: JobFile) -> str:
    """A script for sbatch, which runs it on the first node: in it, srun or `torchring run` starts the processes.

    Slurm takes a lost node out of an elastic job, which goes on. If the first node is lost, Slurm starts the job again.
    """
    options = {
        "job-name": job.name,
        "nodes": "{}-{}".format(*job.elastic) if job.elastic else job.workers,
        "ntasks-per-node": job.processes,
        "cpus-per-task": job.threads,
        "gpus-per-node": job.gpus,
        "mem": f"{job.memory >> 20}M" if job.memory else "",
        "output": "%x-%j.out",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in job.variables.items()]
    if job.elastic:
        lines += ["#SBATCH --no-kill", "#SBATCH --requeue", "#SBATCH --open-mode=append"]
        lines.append(f"#SBATCH --signal=B:TERM@{GRACE_SECONDS}")
        least = str(job.elastic[0] * job.processes)
        run = ["exec", "torchring", "run", "--elastic", "--launcher", "srun", "--min-np", least, *job.command]
    else:
        # Newer versions of srun do not inherit --cpus-per-task from sbatch.
        cores = [f"--cpus-per-task={job.threads}"] if job.threads else []
        run = ["srun", *cores, "--kill-on-bad-exit=1", *job.command]
    return "\n".join(["#!/bin/bash", *lines, "", "set -euo pipefail", *exports, shlex.join(run), ""])
