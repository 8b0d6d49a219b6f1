"""Every example, run as a user would run it: what it prints, how it ends, and who prints."""

import contextlib
import functools
import importlib.util
import io
import os
import re
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import torchring
from tests.support.commands import run_python
from tests.support.documents import rows
from tests.support.harness import run_ranks

_MISSING = [name for name in ("sklearn", "PIL", "pyarrow") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(_MISSING), reason=f"needs {_MISSING}")  # not imported here: that takes 1.3 s

FOLDER = Path(__file__).resolve().parents[2] / "examples"
FRAMEWORKS = {"finetune_lora.py", "train_lightning.py"}


class Run(NamedTuple):
    """What rank 0 prints has the pattern `says`. None: it is the same as in the run before. `options` are wrap's."""

    file: str
    num_ranks: int
    words: str
    says: str | None
    exit_code: int = 0
    options: tuple[tuple[str, str], ...] = ()


MESH = ("train_tensor_parallel.py", "train_pipeline.py", "train_experts.py", "train_fsdp.py")
EXAMPLES = [
    Run(
        "train_digits.py", 2, "--epochs 1 --target 0 --compare run.json", r"^epoch  1 .* on 2 rank\(s\)\n.* included\n$"
    ),
    Run("train_digits.py", 1, "--epochs 2 --target 2 --compare run.json", r"second of 2, .* reached 200%\n$", 1),
    Run("train_char_gpt.py", 2, "--steps 40", r"^step +0  loss [45]\..*\ntest loss [012]\.\d+\nthe model writes:\n"),
    Run("train_images.py", 2, "--epochs 1", r"^epoch 0: loss [12]\.\d+, test accuracy [2-9]\d\.\d+%\n$"),
    Run("train_images.py", 1, "--epochs 2 --resume", r"^epoch 1: loss 0\.\d+, test accuracy [3-9]\d\.\d+%\n$"),
    Run("train_parquet.py", 2, "--epochs 2 --stop-after 3", r"^stopped in epoch 0 after 288 of 1797 rows\n$"),
    Run(
        "train_parquet.py",
        1,
        "--epochs 2 --resume",
        r"^goes on in epoch 0 after 288 of 1797 rows\n(.*was used once\n){2}$",
    ),
    # With weights, gradients are those of all tokens. The plain mean is far from these, and trains otherwise.
    Run("train_sequences.py", 2, "--steps 3", r"largest .* \d\.\de-0[6-9] +[1-9]\.\de-01\n.*token +([\d.]+) +(?!\1)"),
    Run(
        "compare_with_ddp.py", 2, "--steps 9 --width 128", r"equal bit by bit\ntorchring computes what DDP computes\n$"
    ),
    Run("compare_with_ddp.py", 4, "--steps 9 --width 128", r"not compute .* of steps \[1, ", 1, (("op", "sum"),)),
    *(
        Run(file, size, "--epochs 1", says)
        for file in MESH
        for size, says in ((4, r"^epoch 0: loss [12]\."), (1, None))
    ),
    Run("train_lightning.py", 2, "--epochs 2", r"accuracy 9\d\.\d+%, in .*best\.ckpt\n$"),
    Run("finetune_lora.py", 2, "--steps 40", r"\nLoRA trains 17,408 .*\ntest loss: 3\.\d+ before, 2\.\d+ after\n$"),
]


def _run(rank: int, size: int, folder: str, runs: list[Run]) -> list[tuple[int, str, str]]:
    """The exit code of each script, and what it prints. Of these, one can call init_process_group: its store stays."""
    os.chdir(folder)
    sys.path.insert(0, str(FOLDER))  # as the interpreter does, unlike run_path
    found = []
    for run in runs:
        sys.argv = [str(FOLDER / run.file), *run.words.split()]
        exit_code: Any = 0
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(io.StringIO()) as out,
            contextlib.redirect_stderr(io.StringIO()) as err,
        ):
            patch.setattr(torchring, "wrap", functools.partial(torchring.wrap, **dict(run.options)))
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
            except SystemExit as end:
                exit_code = end.code or 0
                if isinstance(exit_code, str):  # as the interpreter does with a text
                    print(exit_code, file=sys.stderr)
                    exit_code = 1
        torchring.shutdown()
        found.append((exit_code, out.getvalue(), err.getvalue()))
    return found


@functools.cache
def _found(frameworks: bool) -> dict[Run, list[tuple[int, str, str]]]:
    """What each rank has come to. One job runs all scripts: what they import takes seconds."""
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for size in (4, 2, 1):
            if runs := [run for run in EXAMPLES if run.num_ranks == size and (run.file in FRAMEWORKS) == frameworks]:
                of_ranks = run_ranks(_run, size, folder, runs, launcher_env=size > 1, deadline=150)
                found |= dict(zip(runs, zip(*of_ranks, strict=True), strict=True))
        return found


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=pytest.mark.platforms if file in FRAMEWORKS else ())
        for file in dict.fromkeys(run.file for run in EXAMPLES)
    ],
)
def test_what_an_example_prints_and_how_it_ends(file: str) -> None:
    """Ranks other than 0 print nothing. Where stdout is no terminal, nobody draws a progress bar."""
    before = ""
    for run in [run for run in EXAMPLES if run.file == file]:
        (_, stdout, stderr), *others = of_ranks = _found(file in FRAMEWORKS)[run]
        assert max(code for code, _, _ in of_ranks) == run.exit_code, of_ranks  # as a launcher's is
        assert [said for _, said, _ in others if said] == []
        assert "\x1b" not in stdout
        said = stdout + stderr * run.exit_code
        assert said == before if run.says is None else re.search(run.says, said, re.DOTALL), (said, stderr)
        before = said


@pytest.mark.grid  # elastic/ starts such jobs
def test_train_elastic_under_its_launcher() -> None:
    script = [str(FOLDER / "train_elastic.py"), "--epochs", "2", "--target", "0.8"]
    result = run_python("-m", "torchring", "run", "--elastic", "-np", "2", *script, seconds=90)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("epoch 0, image 0: 2 ranks\n")
    assert re.search(r"epoch 1: (8\d|9\d|100)\.?\d*% of the test images are right", result.stdout)
    assert "torchring run: generation 1 begins, 2 workers (localhost: 0, 1), because the job starts" in result.stderr


def test_each_example_is_tested_and_in_the_index_and_short() -> None:
    lines = {path.name: len(path.read_text().splitlines()) for path in FOLDER.glob("*.py")}
    assert {*lines} == {"train_elastic.py", *(run.file for run in EXAMPLES)}
    assert {name: count for name, count in lines.items() if count > 120} == {}
    indexed = {row[0] for row in rows((FOLDER / "README.md").read_text())}
    assert {f"[{name}]({name})" for name in lines} == indexed
