"""Imports go one way through the house, and the house has the rooms that it should have."""

import ast
import collections
import functools
import graphlib
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "torchring"

# From the cellar to the front door: what is in a room imports from its own room and from those before it.
# fmt: off
ORDER = [
    "kernels", "rooms", "observer", "errors", "linux", "threads", "dynamo", "releases", "requirements", "placement",
    "safe_files", "rendezvous", "accelerators", "memory", "world", "interruption", "default_world", "meeting",
    "transport", "collectives", "broadcasts", "allreduce", "optimizer_wrapper", "gradients", "participants", "devices",
    "compression",
    "observe", "mesh", "alone", "initial_state", "connection", "groups", "adasum", "functions", "norms",
    "compiled", "optimizer", "sharding", "joining", "local_steps", "recipes", "monitoring", "launch", "data", "elastic",
    "horovod", "accelerate", "transformers", "lightning", "spark", "ray", "manifest", "doctor", "report", "cli",
    "__main__", "__init__", "bench",
]
# fmt: on

MOST_STEMS = 12  # of files that stand twice: this number only falls
# Compression and local steps have ceilings of their own, so that the others go on falling.
FEWER_BYTES = ("torchring/compression", "torchring/local_steps", "kernels/*quantize.py", "bench/quality.py",
               "tests/compression", "tests/local_steps", "tests/kernels/test_quantize.py")  # fmt: skip
MOST_LINES = {"torchring kernels": 39_268, "bench": 3_471, "tests qa": 37_460}  # these numbers only fall
MOST_LINES_OF_FEWER_BYTES = {"torchring kernels": 2_131, "bench": 163, "tests qa": 1_170}  # and these


@functools.cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def imports(package: Path = PACKAGE) -> set[tuple[str, str]]:
    """(room that imports, room imported from), at the top of modules or inside functions."""
    found = set()
    for room in sorted(package.iterdir()):
        for file in room.rglob("*.py") if room.is_dir() else [room]:
            for node in ast.walk(parsed(file.read_text() if file.suffix == ".py" else "")):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
                if isinstance(node, ast.ImportFrom):
                    assert node.level < 2, f"{file}: a relative import from outside"
                    names = [] if node.level else [f"{node.module}.{name}" for name in names]
                found |= {(room.stem, name.split(".")[1]) for name in names if name.startswith("torchring.")}
    return {(room, other if other in ORDER else "__init__") for room, other in found}


def upward(package: Path = PACKAGE) -> list[tuple[str, str]]:
    return [pair for pair in imports(package) if ORDER.index(pair[0]) < ORDER.index(pair[1])]


def test_imports_go_one_way() -> None:
    cellar = {"kernels", "errors", "linux", "threads", "dynamo", "releases", "placement", "safe_files",
              "optimizer_wrapper", "rooms", "observer"}  # fmt: skip
    assert {room for room, _ in imports()} >= {*ORDER} - {*cellar, "__main__"}
    assert upward() == []


def test_the_search_for_imports_the_other_way_can_fail(tmp_path: Path) -> None:
    (tmp_path / "optimizer.py").write_text("from torchring.gradients.plan import Plan")
    (tmp_path / "gradients").mkdir()
    (tmp_path / "gradients" / "plan.py").write_text("def f():\n    from torchring.optimizer import wrap")
    assert upward(tmp_path) == [("gradients", "optimizer")]


def sort_modules(folder: Path, package: Path) -> list[str]:
    """Modules of the folder, each behind those that it imports at its top. Raises graphlib.CycleError."""
    prefix = ".".join(("torchring", *folder.relative_to(package).parts, ""))
    entries = {entry.stem for entry in folder.iterdir()}
    graph = {}
    for file in folder.glob("*.py"):
        names = []
        for node in parsed(file.read_text()).body:
            if isinstance(node, ast.ImportFrom):
                source = f"{prefix if node.level else ''}{node.module or ''}".rstrip(".")
                names += [f"{source}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
        heads = [name.removeprefix(prefix).split(".")[0] for name in names if name.startswith(prefix)]
        graph[file.stem] = {head if head in entries else "__init__" for head in heads} - {file.stem}
    return [*graphlib.TopologicalSorter(graph).static_order()]


def test_modules_of_one_folder_import_without_a_cycle(tmp_path: Path) -> None:
    folders = {file.parent for room in PACKAGE.iterdir() for file in room.rglob("*.py")} | {PACKAGE}
    assert len(folders) > 10
    for folder in folders:
        sort_modules(folder, PACKAGE)
    for statement in ("from torchring.world import a", "import torchring.world", "from .world import a"):
        (tmp_path / "memory.py").write_text(statement)
        (tmp_path / "world.py").write_text("")
        assert sort_modules(tmp_path, tmp_path) == ["world", "memory"]
        (tmp_path / "world.py").write_text("from torchring import memory")
        with pytest.raises(graphlib.CycleError):
            sort_modules(tmp_path, tmp_path)


def test_folders_of_the_report_import_one_way() -> None:
    for layer, above in (("model", "verdict|show"), ("verdict", "show")):
        files = [*(PACKAGE / "report" / layer).glob("*.py")]
        assert len(files) > 3
        assert [file for file in files if re.search(rf"\btorchring\.report\.({above})\b", file.read_text())] == []


def test_few_files_have_one_name_and_none_is_called_by_what_it_is_not() -> None:
    stems = collections.Counter(file.stem for file in PACKAGE.rglob("*.py") if not file.stem.startswith("__"))
    assert len(twice := sorted(stem for stem, count in stems.items() if count > 1)) <= MOST_STEMS, twice
    names = {*stems, *(folder.name for folder in PACKAGE.iterdir())}
    assert names.isdisjoint({"utils", "util", "common", "helpers", "helper", "config", "misc"})


def imports_top_level_kernels(source: str) -> bool:
    for node in ast.walk(parsed(source)) if re.search(r"(import|from) kernels\b", source) else ():
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        if any(name.split(".")[0] == "kernels" for name in names):
            return True
    return False


def test_nobody_imports_a_top_level_kernels() -> None:
    """That name belongs to another distribution."""
    folders = ("torchring", "kernels", "tests", "qa", "examples", "bench")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 40
    assert [file for file in files if imports_top_level_kernels(file.read_text())] == []
    for code in ("import kernels", "import kernels.a as p", "from kernels import a", "from kernels.a import b"):
        assert imports_top_level_kernels(code), code
    for code in ("from torchring import kernels", "from . import kernels", "import a.kernels", "import kernels_a"):
        assert not imports_top_level_kernels(code), code


# The core, as paths of files and folders below `torchring/`; everything else is a room. `rooms.py` names the rooms.
CORE = (
    "connection.py",
    *("optimizer.py", "optimizer_wrapper.py", "world.py", "default_world.py", "rooms.py", "errors.py", "threads.py"),
    "observer.py",
    *("linux.py", "dynamo.py", "releases.py", "interruption.py", "accelerators.py"),
    *("gradients/", "allreduce/", "collectives/", "memory/", "transport/", "kernels/"),
    "rendezvous/rendezvous.py",
)
ROOMS_WITHIN = ("transport/diagnosis/", "transport/mpi.py", "allreduce/hierarchical.py")


def is_core(path: str) -> bool:
    return path.startswith(CORE) and not path.startswith(ROOMS_WITHIN)


def room_imports(package: Path = PACKAGE) -> set[tuple[str, str]]:
    """(file of the core, file of a room that it imports): at its top, in a function, or for types only."""
    found = set()
    for file in package.rglob("*.py"):
        path = str(file.relative_to(package))
        if not is_core(path):
            continue
        for node in ast.walk(parsed(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names if not node.level]
            for name in names:
                parts = name.split(".")[1:] if name.startswith("torchring.") else []
                while parts and not package.joinpath(*parts).with_suffix(".py").is_file():
                    parts.pop()  # a name within the module
                if parts and not is_core(target := "/".join(parts) + ".py"):
                    found.add((path, target))
    return found


def test_the_core_imports_no_room(tmp_path: Path) -> None:
    assert room_imports() == set()
    (tmp_path / "sharding").mkdir()
    (tmp_path / "sharding" / "step.py").touch()
    (tmp_path / "world.py").touch()
    (tmp_path / "optimizer.py").write_text(
        "from torchring.world import World\ndef f():\n    from torchring.sharding.step import Shards"
    )
    assert room_imports(tmp_path) == {("optimizer.py", "sharding/step.py")}


def listed(*patterns: str) -> list[str]:
    return subprocess.check_output(["git", "ls-files", *patterns], cwd=ROOT, text=True).splitlines()


def test_nothing_grows() -> None:
    """Of what git knows: a file that nobody has added yet does not count."""
    assert len(listed("torchring/*.py", "kernels/*.py")) > 100
    for folders, most in MOST_LINES.items():
        files = {*listed(*(f"{folder}/*.py" for folder in folders.split()))}
        later = files & {*listed(*FEWER_BYTES)}
        for some, ceiling in ((files - later, most), (later, MOST_LINES_OF_FEWER_BYTES[folders])):
            paths = filter(Path.is_file, map(ROOT.joinpath, some))
            assert 100 < sum(path.read_bytes().count(b"\n") for path in paths) <= ceiling, folders


def test_top_level() -> None:
    names = {name.partition("/")[0] for name in listed()}
    assert {name for name in names if not name.startswith(".")} == {
        *("torchring", "kernels", "examples", "tests", "qa", "bench", "docs", "editable"),
        *("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "Makefile", "CHANGELOG.md", "LICENSE"),
        *("SECURITY.md", "constraints.txt", "mkdocs.yml"),
    }
    assert {".gitignore", ".pre-commit-config.yaml", ".ci"} <= names
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    for folder in ("kernels", "bench"):  # linked, not copied
        assert (PACKAGE / folder).readlink() == Path("..") / folder
