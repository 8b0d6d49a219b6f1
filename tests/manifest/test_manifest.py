"""`torchring manifest`: what a job file may say, and the files that are written."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from torchring import cli
from torchring.launch.hosts import LaunchError
from torchring.manifest.job_file import parse_job

JOB = {"name": "digits", "command": "python train.py --text 'two words'", "workers": 2, "cpus": 8}


def write(folder: Path, said: Any) -> str:
    said = said if isinstance(said, str | bytes) else yaml.safe_dump(said)
    (folder / "job.yaml").write_bytes(said if isinstance(said, bytes) else said.encode())
    return str(folder / "job.yaml")


def test_processes_follow_from_gpus_else_from_cores() -> None:
    for given, processes, threads in [
        ({}, 8, 1),
        ({"gpus": 4}, 4, 2),
        ({"processes": 2}, 2, 4),
        ({"gpus": 4, "processes": 2}, 2, 4),
        ({"gpus": 3, "cpus": 8}, 3, 2),
    ]:
        job = parse_job({**JOB, **given})
        assert (job.processes, job.threads) == (processes, threads), given
    assert parse_job({**JOB, "memory": "2Gi"}).memory == 2 << 30
    assert parse_job({**JOB, "memory": "500M"}).memory == 500_000_000


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"command": None}, "command: what starts one process, such as `python train.py --epochs 3`; got None"),
        ({"command": ["python", 3]}, "command: what starts one process"),
        ({"command": "python 'train.py"}, 'command: No closing quotation; got "python \'train.py"'),
        ({"name": "Digits"}, "name: lower-case letters"),
        ({"worker": 2}, r"unknown key 'worker'; did you mean workers\?"),
        ({"colour": 2}, "unknown key 'colour'; there are name, command, image, workers, gpus"),
        ({"workers": 0}, "workers: a whole number, 1 or more; got 0"),
        ({"workers": True}, "workers: a whole number, 1 or more; got True"),
        ({"gpus": -1}, "gpus: a whole number, 0 or more; got -1"),
        ({"gpus": "two"}, "gpus: a whole number, 0 or more; got 'two'"),
        ({"cpus": 0}, "say gpus or cpus of a worker"),
        ({"gpus": 16}, "16 processes, one for each GPU, need as many cores, and cpus is 8"),
        ({"processes": 9}, "9 processes need as many cores, and cpus is 8"),
        ({"gpus": 2, "processes": 3}, "3 processes do not fit on 2 GPUs"),
        ({"memory": "lots"}, "memory: of a worker, such as 64Gi or 500M; got 'lots'"),
        ({"memory": 64}, r"memory: 64 is 64 bytes, which no process can run in; did you mean 64Gi\?"),
        ({"memory": "0Gi"}, "memory: 0Gi is 0 bytes"),
        ({"elastic": {"min": 1}}, r"elastic: the fewest and the most workers, as {min: 2, max: 8}; got {'min': 1}"),
        ({"elastic": {"min": 3, "max": 4}}, "min <= workers <= max; got min 3, 2 workers, max 4"),
        ({"elastic": {"min": 0, "max": 4}}, "1 <= min"),
        ({"env": ["A"]}, "env: names of variables, with a value each; got"),
        ({"env": {"RANK": 0}}, "env: RANK is set for each process by what starts it"),
        ({"volumes": {"data": "here"}}, "volumes: the path at which data is mounted begins with /; got 'here'"),
        ({"env": {"VERSION": 3.1}}, "env: .*, in quotes if YAML would read it as a number; got 'VERSION': 3.1"),
        ({"volumes": {"data-": "/data"}}, "volumes: names of persistent volume claims"),
        ({"command": "./train", "elastic": {"min": 1, "max": 2}}, "elastic: the command begins with `python`, got"),
        ({"image": "two words"}, "image: the name of a container image"),
    ],
)
def test_bad_input(given: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        parse_job({**JOB, **given})


@pytest.mark.parametrize(
    ("said", "arguments", "message"),
    [
        ("name: [", [], "is not YAML: while parsing .* line 1, column"),
        ("- name", [], "a job file has a line `key: value` for each of name, command, .*; got \\['name'\\]"),
        ("name: " + "[" * 20_000 + "]" * 20_000, [], "is not YAML: maximum recursion"),
        ("name: a\ncpus: 1\ncommand: a\nmemory: " + "0x" + "9" * 5000, [], "is not a job file: Exceeds the limit"),
        ("name: a\ncpus: 1\ncommand: a\nenv: {A: 2001-99-99}", [], "is not a job file: month must be in 1..12"),
        ('name: a\ncpus: 1\ncommand: "\\ud800"', [], "is not a job file: .* surrogates not allowed"),
        ("name: " + "A" * 30_000, [], "name: lower-case letters, .{300,600}\n"),
        (b"name: \xff", [], "is not a job file: 'utf-8' codec can't decode"),
        (JOB, ["kubernetes"], "image: pods need a container image with PyTorch, torchring and the script"),
        (
            {**JOB, "image": "a", "elastic": {"min": 1, "max": 2}},
            ["kubernetes", "--kind", "job"],
            "elastic: the pods of a Job stay the same; `--kind jobset` writes an elastic job",
        ),
    ],
)
def test_files_that_are_refused(
    said: Any, arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, said)
    cluster, *options = arguments or ["slurm"]
    assert cli.main(["manifest", cluster, path, "--dry-run", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.match(f"torchring manifest: {re.escape(path)}: {message}", err)
    assert err.count("\n") == 1


def test_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, {**JOB, "memory": "16Gi", "gpus": 4, "env": {"NCCL_DEBUG": "a b"}})
    assert cli.main(["manifest", "slurm", path, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert [*tmp_path.iterdir()] == [tmp_path / "job.yaml"]
    for line in ("nodes=2", "ntasks-per-node=4", "cpus-per-task=2", "gpus-per-node=4", "mem=16384M", "job-name=digits"):
        assert f"\n#SBATCH --{line}\n" in shown
    assert "\nexport NCCL_DEBUG='a b'\n" in shown
    assert shown.endswith(" python train.py --text 'two words'\n")
    assert cli.main(["manifest", "slurm", path]) == 0
    assert capsys.readouterr().out == "digits.sbatch is written; `sbatch digits.sbatch` submits it\n"
    assert (tmp_path / "digits.sbatch").read_text() == shown
    assert cli.main(["manifest", "slurm", "no.yaml"]) == 2
    assert capsys.readouterr().err == "torchring manifest: no.yaml: cannot be read: No such file or directory\n"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "yaml", None)
        assert cli.main(["manifest", "slurm", "no.yaml"]) == cli.main(["manifest", "slurm", path]) == 2
    _, needed = capsys.readouterr().err.splitlines()
    assert needed.endswith("job files need PyYAML: pip install pyyaml")
    assert cli.main(["manifest", "slurm", path, "-o", "no/folder"]) == 1
    assert capsys.readouterr().err == "torchring manifest: cannot write 'no/folder': No such file or directory\n"
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main(["manifest", "slurm", path, "--kind", "job"])
