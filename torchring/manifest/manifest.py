"""The command `torchring manifest`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from torchring.launch.arguments import Parser
from torchring.launch.hosts import LaunchError
from torchring.manifest.job_file import read_job
from torchring.manifest.kubernetes import KINDS, objects, to_yaml
from torchring.manifest.slurm import sbatch_script
from torchring.safe_files import replacing

_MOST_LETTERS: Final = 600  # of a message, which quotes what the file says


def main(arguments: Sequence[str]) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.kind and options.cluster == "slurm":
        parser.error("--kind is for kubernetes")
    try:
        job = read_job(options.job)
        text = sbatch_script(job) if options.cluster == "slurm" else to_yaml(objects(job, options.kind))
        text.encode()
    except (LaunchError, ValueError) as error:  # a number of 5,000 digits, or half a character, is a ValueError
        what = error if isinstance(error, LaunchError) else f"is not a job file: {error}"
        print(f"torchring manifest: {options.job}: {what}"[:_MOST_LETTERS], file=sys.stderr)
        return 2
    if options.dry_run:
        print(text, end="")
        return 0
    ending = "sbatch" if options.cluster == "slurm" else "kubernetes.yaml"
    file = Path(options.output or f"{job.name}.{ending}")
    try:
        with replacing(file, "w") as opened:
            opened.write(text)
    except OSError as error:
        print(f"torchring manifest: cannot write {str(file)!r}: {error.strerror}", file=sys.stderr)
        return 1
    submit = "sbatch" if options.cluster == "slurm" else "kubectl apply -f"
    print(f"{file} is written; `{submit} {file}` submits it")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="torchring manifest",
        description="Write an sbatch script, or objects for Kubernetes, from a short job file. Nothing is submitted.",
        epilog="examples:\n  torchring manifest slurm job.yaml\n  torchring manifest kubernetes job.yaml --dry-run",
    )
    parser.add_argument("cluster", choices=["slurm", "kubernetes"])
    parser.add_argument("job", metavar="JOB.YAML", help="what to run, on how many hosts, with what")
    parser.add_argument("--kind", choices=list(KINDS), help="for kubernetes; by default job, for an elastic job jobset")
    parser.add_argument("--dry-run", action="store_true", help="print the text, and write no file")
    parser.add_argument("-o", "--output", metavar="FILE", help="by default NAME.sbatch or NAME.kubernetes.yaml")
    return parser
