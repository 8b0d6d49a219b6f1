"""Every example, run as a user would run it: what it prints, how it ends, and who prints."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import torchring
from tests.support.grids import grid
from tests.support.harness import run_ranks, run_script

_MISSING = [name for name in ("sklearn", "rich") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(_MISSING), reason=f"needs {_MISSING}")  # not imported here: that takes 1.3 s

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FAST = {
    "train_digits.py": ("--epochs", "4", "--target", "0.8"),
    "train_char_gpt.py": ("--steps", "40", "--sample", "20", "--amp", "off"),
    "train_sequences.py": ("--steps", "3"),
    "train_elastic.py": ("--epochs", "2", "--target", "0.8"),
    "compare_with_ddp.py": ("--steps", "12", "--width", "128"),
}


def _run_main(
    rank: int, size: int, script: Path, arguments: tuple[str, ...], options: dict[str, str]
) -> tuple[int, str, str]:
    """The script's exit code, and what it prints."""
    torchring.wrap = functools.partial(torchring.wrap, **options)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))  # as the interpreter does, unlike run_path
    exit_code: Any = 0
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            exit_code = end.code or 0
            if isinstance(exit_code, str):  # as the interpreter does with a text
                print(exit_code, file=sys.stderr)
                exit_code = 1
    return exit_code, out.getvalue(), err.getvalue()


def fork_example(script: str, *arguments: str, num_ranks: int, exit_code: int = 0, **options: str) -> tuple[str, str]:
    """Run it in forked ranks, check exit codes and that ranks other than 0 print nothing; rank 0's stdout and stderr.

    `options` are wrap's.
    """
    args = EXAMPLES / script, arguments, options
    results = run_ranks(_run_main, num_ranks, *args, launcher_env=num_ranks > 1, deadline=90)
    assert max(code for code, _, _ in results) == exit_code, results  # as a launcher's is
    assert all(stdout == "" for _, stdout, _ in results[1:]), results
    _, stdout, stderr = results[0]
    assert "\x1b" not in stdout  # no progress bar where stdout is not a terminal
    return stdout, stderr


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, f"{pattern!r} is not in\n{text}"
    return float(found[1])


def test_train_digits_alone() -> None:
    stdout, _ = fork_example("train_digits.py", *FAST["train_digits.py"], num_ranks=1)
    assert number(r"accuracy +([\d.]+)% of 360 test images", stdout) >= 80
    assert re.search(r"algorithm +none, inline, 0 bytes", stdout)


def test_train_digits_says_if_it_has_not_learned() -> None:
    _, stderr = fork_example("train_digits.py", "--epochs", "1", "--lr", "0", num_ranks=1, exit_code=1)
    assert "the accuracy should have reached 97%" in stderr


@pytest.mark.grid  # elastic/ starts such jobs
def test_train_elastic_under_its_launcher() -> None:
    command = ["-m", "torchring", "run", "--elastic", "-np", "2", EXAMPLES / "train_elastic.py"]
    result = run_script([*command, *FAST["train_elastic.py"]], deadline=90)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0] == "epoch 0, image 0: 2 ranks"
    assert number(r"epoch 1: ([\d.]+)% of the test images are right", result.stdout) >= 80
    assert "torchring run: generation 1 begins, 2 workers (localhost: 0, 1), because the job starts" in result.stderr


@grid("num_ranks", [1, 2], keep=lambda num_ranks: num_ranks == 2)
def test_train_char_gpt_learns(num_ranks: int) -> None:
    stdout, _ = fork_example("train_char_gpt.py", *FAST["train_char_gpt.py"], num_ranks=num_ranks)
    before = number(r"validation loss +([\d.]+) before", stdout)
    after = number(r"validation loss .* ([\d.]+) after", stdout)
    assert before > 4
    assert after < 3
    first, last = (number(rf"step +{step}  loss ([\d.]+)", stdout) for step in (0, 39))
    assert abs(first - before) < 0.5
    assert last < first - 1.5
    assert number(r"on (\d) rank\(s\)", stdout) == num_ranks
    assert "the model writes:\n" in stdout


@grid("num_ranks", [1, 2, 3], keep=lambda num_ranks: num_ranks == 2)
def test_train_sequences_shows_what_weights_change(num_ranks: int) -> None:
    stdout, _ = fork_example("train_sequences.py", *FAST["train_sequences.py"], num_ranks=num_ranks)
    assert number(r"(\d) rank\(s\) x 16 lines", stdout) == num_ranks
    distances, losses = (
        [number(rf"{name} {skipped}([\d.e+-]+)", stdout) for skipped in (" +", r" +\S+ +")]
        for name in ("largest distance from reference", "held-out loss per token")
    )
    assert distances[0] < 1e-5
    if num_ranks == 1:  # a rank alone has all tokens, and nothing to weigh against
        assert distances[0] == distances[1]
        assert losses[0] == losses[1]
    else:
        assert distances[1] > 0.05
        assert losses[0] != losses[1]


def test_train_sequences_fails_where_gradients_differ() -> None:
    arguments = "--steps", "1", "--batch-size", "2"
    _, stderr = fork_example("train_sequences.py", *arguments, num_ranks=2, exit_code=1, compression="bf16")
    assert "gradients with weights are not those of the mean over all tokens" in stderr


@pytest.mark.grid  # optimizer/test_semantics.py compares many more trainings
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_compare_with_ddp_agrees(num_ranks: int) -> None:
    stdout, _ = fork_example("compare_with_ddp.py", *FAST["compare_with_ddp.py"], num_ranks=num_ranks)
    assert "torchring computes what DDP computes" in stdout
    assert "parameters are equal bit by bit" in stdout or num_ranks == 3
    for name in ("DDP", "torchring"):
        assert number(rf"{name} +([\d.]+) ms per step \(20% to 80%: [\d.]+ to [\d.]+\)", stdout) > 0


@pytest.mark.parametrize(
    ("option", "value", "found"),
    [
        ("op", "sum", r"step \d+: loss"),
        pytest.param("compression", "bf16", "(parameters differ by|step)", marks=pytest.mark.grid),
    ],
)
def test_compare_with_ddp_fails_where_they_differ(option: str, value: str, found: str) -> None:
    arguments = FAST["compare_with_ddp.py"]
    stdout, stderr = fork_example("compare_with_ddp.py", *arguments, num_ranks=2, exit_code=1, **{option: value})
    assert re.search(rf"torchring does not compute what DDP computes: {found}", stderr)
    assert "torchring computes what DDP computes" not in stdout


def test_examples_are_all_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(FAST)
