"""README.md and docs/: their code runs, their commands parse, their tables are complete, their links lead somewhere."""

import argparse
import ast
import inspect
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

import torchring
from tests.optimizer.test_mistakes import OF_DDP
from tests.support.checks import assert_same_everywhere, assert_same_on_all_ranks, digest
from tests.support.documents import PAGES, ROOT, anchors, blocks, code_spans, included, links, programs, rows, section
from tests.support.harness import ranks, run_ranks
from tests.support.netns import needs_hosts, run_on_hosts
from torchring import cli
from torchring.allreduce.select import ALGORITHMS, OVERLAPS
from torchring.bench import options
from torchring.bench.netns import Network
from torchring.default_world import default_world

DOCS = ROOT / "docs"
OPTIONS = DOCS / "reference" / "options.md"
ERRORS = DOCS / "reference" / "errors.md"


# Python


def run_page(page: Path) -> dict[str, Any]:
    """Run the page's Python programs; the names that they define, those of the last one if several define a name."""
    names: dict[str, Any] = {}
    for program in programs(page):
        namespace: dict[str, Any] = {}
        for block in program:
            try:
                exec(compile(block.code, block.place, "exec"), namespace)
            except BaseException as error:
                raise AssertionError(f"{block.place} does not run") from error
        for value in namespace.values():
            if isinstance(value, torchring.DistributedOptimizer):
                value.close()
        names |= namespace
    return names


def _run_pages(rank: int, world_size: int, folder: str, pages: list[Path]) -> dict[str, Any]:
    os.chdir(folder)
    found = {}
    for page in pages:
        torch.manual_seed(rank)
        names = run_page(page)
        if page.name == "elastic.md":  # started again, its script finds a checkpoint
            assert rank > 0 or [*Path("checkpoints").iterdir()]  # rank 0 writes it; the next init() waits for rank 0
            torchring.shutdown()
            run_page(page)
        assert torchring.size() == world_size
        found[page.name] = {
            "models": {name: digest(each.parameters()) for name, each in names.items() if isinstance(each, nn.Module)},
            "reductions": default_world().num_reductions,
            "loss": float(names["loss"]) if page.name == "first-script.md" else None,
        }
        torchring.shutdown()
    return found


def test_python_runs_on_two_ranks(tmp_path: Path) -> None:
    pages = [page for page in PAGES if page.parent.name != "platforms" and blocks(page, "python")]
    first, second = run_ranks(_run_pages, 2, str(tmp_path), pages, deadline=150)
    assert {"README.md", "recipes.md", "options.md", "gpu.md", "troubleshooting.md", "ddp.md"} <= first.keys()
    assert first.keys() == second.keys()
    for page in first.keys() - {"ddp.md"}:  # which has no ranks
        for name, mine in first[page]["models"].items():
            assert_same_on_all_ranks([mine, second[page]["models"][name]])
    assert first["README.md"]["reductions"] == 5 * 64
    assert first["recipes.md"]["reductions"] > 0
    (loss,) = set(re.findall(r"ranks: loss ([\d.]+)", section(DOCS / "start" / "first-script.md", "## The check")))
    assert first["first-script.md"]["loss"] == pytest.approx(float(loss), rel=1e-3)


def test_python_runs_alone(tmp_path: Path) -> None:
    pages = [ROOT / "README.md", page := DOCS / "start" / "first-script.md"]
    (found,) = run_ranks(_run_pages, 1, str(tmp_path), pages, launcher_env=False)
    assert f"loss {found[page.name]['loss']:.6f}" in section(page, "## The check")


def _fewer_bytes(rank: int, world_size: int) -> tuple[Any, list[str]]:
    torchring.init(process_group=True)
    names = run_page(DOCS / "guides" / "fewer-bytes.md")
    for name in ("powersgd", "topk", "hook"):
        sgd = torch.optim.SGD(names["model"].parameters(), lr=0.1)
        optimizer = torchring.wrap(sgd, names["model"], compression=names[name])
        for _ in range(3):
            names["model"](torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
        optimizer.close()
    torchring.shutdown()
    return digest(names["model"].parameters()), sorted(names["topk"].memory)


@needs_hosts
def test_the_page_on_fewer_bytes_compresses_between_hosts() -> None:
    with Network(2) as network:
        first, second = run_on_hosts(network, (1, 1), _fewer_bytes)
    assert_same_on_all_ranks([first[0], second[0]])
    assert first[1] == second[1] == ["0.bias", "0.weight", "1.bias", "1.weight"]


def test_running_a_page_can_fail(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n```text\nnot Python\n```\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError):
        run_page(page)


# Commands


class Commands:
    """Takes commands apart as the programs would, in a folder that has the files that the pages speak of."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[list[str]] = []
        for name in ("examples", "tests", "bench"):
            (folder / name).symlink_to(ROOT / name)
        for name, text in {
            "train.py": "",
            "digits.sbatch": "",
            "job.yaml": "{name: digits, command: python train.py, image: train, cpus: 2}",
            "hosts.txt": "node1 slots=4\nnode2:4\n",
            "hosts.sh": "#!/bin/sh\necho node1:4\n",
        }.items():
            (folder / name).write_text(text)
        (folder / "hosts.sh").chmod(0o755)
        monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")  # for --launcher srun
        monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2(x2)")
        monkeypatch.chdir(folder)
        for name in ("start", "start_elastic"):
            monkeypatch.setattr(cli, name, lambda command, *_, **__: self.started.append(command) or 0)

    def check(self, words: list[str]) -> None:
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        program, arguments = words[0], words[1:]
        if program == "torchring":
            self._torchring(arguments)
        elif program == "torchrun":
            from torch.distributed.run import get_args_parser

            options = get_args_parser().parse_args(arguments)
            script = [options.training_script, *options.training_script_args]
            self.check(script if options.no_python else ["python", *script])
        elif program == "horovodrun":  # torchring run takes its options
            self._torchring(["run", "--horovod", *arguments])
        elif program in ("mpirun", "srun"):
            self.check(arguments[next(i for i, word in enumerate(arguments) if word in ("python", "torchring")) :])
        elif program == "python" and arguments[:2] in (["-m", "mpi4py"], ["-m", "torchring.horovod"]):
            self.check(["python", *arguments[2:]])
        elif program == "python" and arguments[:2] == ["-m", "pytest"]:
            for word in arguments[2:]:
                assert Path(word).exists() or word in ("-q", "-m", "gpu"), word
        elif program in ("python", "sbatch", "bash", "kubectl"):
            file = arguments[-1 if program == "kubectl" else 0]
            assert Path(file).is_file(), file
        elif program == "make":
            assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), arguments[0]
        elif program == "pip":
            extras = re.findall(r"\.\[(\w+)\]", " ".join(arguments))
            assert arguments[0] == "install"
            assert all(f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text() for extra in extras)
        else:
            assert words == [".", ".venv/bin/activate"], f"no check for {program}"

    def _torchring(self, arguments: list[str]) -> None:
        if arguments[0] == "report":
            from torchring.report.command import _parser as report_parser

            report_parser().parse_args(arguments[1:])
        elif arguments[0] == "manifest":
            assert cli.main([*arguments, "--dry-run"]) == 0
        elif arguments[0] == "top":
            assert cli.main(["top", "--once", *arguments[1:]]) == 1  # there is no such trace
        elif arguments == ["--version"]:
            with pytest.raises(SystemExit, match=r"^0$"):
                cli.main(arguments)
        elif arguments[0] == "bench":
            if arguments[1] in options.OPTIONS:
                options.parser(arguments[1]).parse_args(arguments[2:])
        else:
            count = len(self.started)
            assert cli.main(arguments) == 0
            assert len(self.started) == count + 1


def commands() -> dict[str, list[str]]:
    """The words of each command, by where it stands."""
    found = {}
    for page in [*PAGES, ROOT / "bench" / "README.md"]:
        for block in blocks(page, "console", "bash"):
            lines = [line for line in block.code.replace("\\\n", "").splitlines() if line.startswith("$ ")]
            assert lines, f"{block.place} has no line that begins with $"
            found |= {f"{block.place} {line}": shlex.split(line[2:], comments=True) for line in lines}
    return found


def test_commands_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checker, found = Commands(tmp_path, monkeypatch), commands()
    assert len(found) > 30
    for place, words in found.items():
        try:
            checker.check(words)
        except (AssertionError, KeyError, SystemExit, argparse.ArgumentError) as error:
            raise AssertionError(f"{place} is not right: {error}") from error
    assert len(checker.started) > 10
    for wrong in (
        "torchring run -np 2 no_such_script.py",
        "torchring doctor --no-such-option",
        "mpirun -np 2 python no_such_script.py",
        "make no-such-target",
        "pip install '.[no_such_extra]'",
        "rm -rf .",
    ):
        with pytest.raises((AssertionError, SystemExit)):
            checker.check(shlex.split(wrong))


# Tables


def first_cells(page: Path, heading: str) -> list[str]:
    """What stands in the first column of the tables under a heading."""
    return [code_spans(cells[0])[0] for cells in rows(section(page, heading))]


def test_tables_have_a_row_for_each_thing() -> None:
    kinds = [torchring.RingError, *torchring.RingError.__subclasses__()]
    assert sorted(first_cells(ERRORS, "## Error classes")) == sorted(kind.__name__ for kind in kinds)
    for heading, values in (("### `algorithm`", ALGORITHMS), ("### `overlap`", OVERLAPS)):
        assert sorted(first_cells(OPTIONS, heading)) == sorted(f'"{value}"' for value in values)
    for function in (torchring.wrap, torchring.init):
        parameters = inspect.signature(function).parameters.values()
        own = {f"{p.name}={p.default!r}".replace("'", '"') for p in parameters if p.name not in ("optimizer", "model")}
        table = section(OPTIONS, f"## `torchring.{function.__name__}`").partition("\n### ")[0]
        assert {code_spans(cells[0])[0] for cells in rows(table)} == own
    named = re.findall(r"^::: torchring\.(\w+)$", (DOCS / "reference" / "api.md").read_text(), re.MULTILINE)
    assert sorted(named) == torchring.__all__
    horovod = rows((DOCS / "reference" / "horovod.md").read_text())
    described = {name for cells in horovod for name in code_spans(cells[1])}
    assert described == {*torchring.horovod.__all__, "State", "TorchState", "ObjectState", "ElasticSampler"}
    listed = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in PAGES if DOCS in page.parents)


def test_quoted_messages_are_those_of_the_code() -> None:
    said = "\n".join(text for file in (ROOT / "torchring").rglob("*.py") for text in _strings(file))
    tables = ERRORS.read_text().partition("\n## Starting\n")[2]
    quoted = [span for cells in rows(tables) for span in code_spans(cells[0])]
    assert len(quoted) > 50
    unknown = [span for span in quoted if not re.search("[^\n]*".join(map(re.escape, span.split("…"))), said)]
    assert unknown == []


def _strings(file: Path) -> list[str]:
    """The string constants of a source; "…" stands for what an f-string fills in."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
            found.append("".join(parts).replace("\n", " "))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value.replace("\n", " "))
    return found


def test_every_mistake_of_ddp_has_its_row_and_its_test() -> None:
    table = rows(section(DOCS / "guides" / "ddp.md", "## Mistakes that DDP does not notice"))
    assert len(table) == 9
    assert [code_spans(cells[3])[0] for cells in table] == [name for name in OF_DDP if name != "no mistake"]


# Links


def target_of(page: Path, link: str) -> str | None:
    """What is wrong with a link, if something is."""
    if re.match("https?://", link):
        return None
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return f"there is no {path}"
    if DOCS in page.parents and DOCS not in target.parents:
        return f"{path} is not part of the site"
    if anchor and anchor not in anchors(target):
        return f"{target.name} has no heading #{anchor}"
    return None


def test_links_lead_somewhere() -> None:
    for page in (*PAGES, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"):
        assert {link: wrong for link in links(page) if (wrong := target_of(page, link))} == {}, page
    page = DOCS / "index.md"
    assert links(DOCS / "guides" / "launching.md")
    for link in ("no_such_page.md", "reference/limits.md#no-such-heading", "#no-such-heading", "../README.md"):
        assert target_of(page, link), link


def test_files_that_pages_name_and_include_exist() -> None:
    found = [(page.name, *item) for page in PAGES for item in included(page)]
    assert len(found) >= 5
    for _, file, name in found:
        text = (ROOT / file).read_text()
        assert not name or text.count(f"--8<-- [start:{name}]") == text.count(f"--8<-- [end:{name}]") == 1
    pattern = re.compile(r"(torchring|kernels|bench|tests|examples|docs)/[\w./-]*")
    named = {span for page in PAGES for span in code_spans(page.read_text()) if pattern.fullmatch(span)}
    assert len(named) > 15
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_code_fits_a_page_and_platforms_name_the_tested_versions() -> None:
    code = [(block, line) for page in PAGES for block in blocks(page) for line in block.code.splitlines()]
    assert [line for block, line in code if len(line) > (80 if block.language == "text" else 76)] == []
    pinned = {line.partition(";")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    for page in DOCS.glob("platforms/*.md"):
        tested = {span for span in code_spans(page.read_text()) if re.fullmatch(r"[\w-]+==[\d.]+", span)}
        assert tested or page.stem == "index"
        assert tested <= pinned, page


# docs/guides/ddp.md, as pasted


def run(diff: str, sign: str) -> dict[str, Any]:
    torch.manual_seed(0)  # the snippet draws its data
    namespace: dict[str, Any] = {}
    code = "".join(line[1:] or "\n" for line in diff.splitlines(keepends=True) if line[0] in f"{sign} \n")
    exec(compile(code, "docs", "exec"), namespace)
    return namespace


@ranks(2, run_ranks)
def test_it_trains_as_with_ddp_and_ten_lines_change(tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = blocks(DOCS / "guides" / "ddp.md", "diff")
    assert sum(line[0] in "+-" for line in block.code.splitlines() if line) == 10
    ring = run(block.code, "+")
    assert ring["optimizer"].stats().num_reductions == 4
    assert_same_everywhere(ring["model"].parameters())
    torchring.shutdown()
    assert not dist.is_initialized(), "torchring.init(process_group=True) made one"
    if rank == 0:
        os.rename("checkpoint.pt", "ring.pt")
    ddp = run(block.code, "-")
    for ours, theirs in zip(ring["model"].parameters(), ddp["model"].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    if rank == 0:
        state = torch.load("checkpoint.pt", weights_only=True)
        consume_prefix_in_state_dict_if_present(state, "module.")
        assert list(state) == list(torch.load("ring.pt", weights_only=True))
