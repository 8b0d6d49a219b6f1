"""Every example, run as a user would run it: what it prints, how it ends, and who prints."""

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
from tests.support.commands import run_python
from tests.support.harness import run_ranks

_MISSING = [name for name in ("sklearn", "rich") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(_MISSING), reason=f"needs {_MISSING}")  # not imported here: that takes 1.3 s

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DIGITS = ["train_digits.py", "--epochs", "2", "--target", "2", "--compare", f"{Path(__file__).parent}/before.json"]
ELASTIC = [str(EXAMPLES / "train_elastic.py"), "--epochs", "2", "--target", "0.8"]
GPT = ["train_char_gpt.py", "--steps", "40", "--sample", "20", "--amp", "off"]
DDP = ["compare_with_ddp.py", "--steps", "12", "--width", "128"]
SEQUENCES = ["train_sequences.py", "--steps", "3"]


def _run_main(rank: int, size: int, words: list[str], options: dict[str, str]) -> tuple[int, str, str]:
    """The script's exit code, and what it prints. `options` are wrap's."""
    torchring.wrap = functools.partial(torchring.wrap, **options)
    sys.argv = [str(EXAMPLES / words[0]), *words[1:]]
    sys.path.insert(0, str(EXAMPLES))  # as the interpreter does, unlike run_path
    exit_code: Any = 0
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            exit_code = end.code or 0
            if isinstance(exit_code, str):  # as the interpreter does with a text
                print(exit_code, file=sys.stderr)
                exit_code = 1
    return exit_code, out.getvalue(), err.getvalue()


# What rank 0 of each example prints.
SAID = {
    "digits": [
        r"accuracy +[89]\d\.\d+% of 360 test images\n.*"
        r"1 processes: \d+\.\d times the images per second of 2, accuracy \d\d\.\d+% beside 50\.00%",
        "the accuracy should have reached 200%",
    ],
    "GPT": [
        r"on 2 rank\(s\)",
        r"step +0 +loss 5\.\d+ .*\nstep +39 +loss [012]\.",
        r"validation loss +[45]\.\d+ before, [012]\.\d+ after",
        "the model writes:\n",
    ],
    # With weights, gradients are those of all tokens. The plain mean is far from these, and trains otherwise.
    "sequences": [
        r"2 rank\(s\) x 16 lines",
        r"largest distance from reference +\d\.\de-0[6-9] +[1-9]\.\de-01\n",
        r"held-out loss per token +([\d.]+) +(?!\1)",
    ],
    "sums against DDP": [r"torchring does not compute what DDP computes: step \d+: loss"],
}


@pytest.mark.parametrize(
    ("name", "num_ranks", "words", "options", "exit_code"),
    [
        ("digits", 1, DIGITS, {}, 1),
        ("GPT", 2, GPT, {}, 0),
        ("sequences", 2, SEQUENCES, {}, 0),
        ("sums against DDP", 2, DDP, {"op": "sum"}, 1),
    ],
)
def test_what_an_example_prints_and_how_it_ends(
    name: str, num_ranks: int, words: list[str], options: dict[str, str], exit_code: int
) -> None:
    """Ranks other than 0 print nothing. Where stdout is no terminal, nobody draws a progress bar."""
    results = run_ranks(_run_main, num_ranks, words, options, launcher_env=num_ranks > 1, deadline=90)
    assert max(code for code, _, _ in results) == exit_code, results  # as a launcher's is
    assert all(stdout == "" for _, stdout, _ in results[1:]), results
    _, stdout, stderr = results[0]
    assert "\x1b" not in stdout
    for pattern in SAID[name]:
        assert re.search(pattern, stdout + stderr, re.DOTALL), (pattern, stdout, stderr)


@pytest.mark.grid  # elastic/ starts such jobs
def test_train_elastic_under_its_launcher() -> None:
    result = run_python("-m", "torchring", "run", "--elastic", "-np", "2", *ELASTIC, seconds=90)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("epoch 0, image 0: 2 ranks\n")
    assert re.search(r"epoch 1: (8\d|9\d|100)\.?\d*% of the test images are right", result.stdout)
    assert "torchring run: generation 1 begins, 2 workers (localhost: 0, 1), because the job starts" in result.stderr


def _run_kinds(rank: int, size: int) -> list[str]:
    said = []
    for kind in ("tp", "pp", "fsdp", "ep"):
        said.append(_run_main(rank, size, ["train_mesh.py", kind], {})[1])
        torchring.shutdown()
    return said


def test_each_dimension_beside_data_parallelism_has_the_losses_of_one_process() -> None:
    said, *others = run_ranks(_run_kinds, 4, deadline=120)
    assert others == [[""] * 4] * 3
    assert said[0].count("loss 0.") == 2
    assert said == run_ranks(_run_kinds, 1, launcher_env=False, deadline=120)[0]
    assert said[0] == said[1] == said[2] != said[3]


def test_examples_are_all_tested() -> None:
    tested = {Path(words[0]).name for words in (DIGITS, ELASTIC, GPT, DDP, SEQUENCES, ["train_mesh.py"])}
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested
