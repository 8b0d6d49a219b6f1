"""Imports go one way through the house, and the house has the rooms that it should have."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "torchring"

# From the front door to the cellar. A module imports from lines below its own, and within a line from those to its
# right. `collectives` stands below what a gradient passes through, because ranks agree by means of it.
# fmt: off
ORDER = [
    "bench.network", "bench.memory",
    "bench.gpu", "bench.overlap", "bench.gpu_training", "bench.gpu_buckets", "bench.gpu_kernels", "bench.gpu_timing",
    "bench.gpu_models", "bench.gpu_dry",
    "bench.micro.bench_allreduce", "bench.micro.bench_hooks", "bench.micro.bench_kernels", "bench.micro.bench_plan",
    "bench.micro.peer", "bench.micro", "bench.micro.conftest",
    "bench.allreduce", "bench.step", "bench", "bench.turns", "bench.measure", "bench.models",
    "bench.netns",
    "__main__", "torchring", "cli",
    "doctor.__main__", "doctor", "doctor.rank", "doctor.probe", "doctor.render",
    "doctor.checks", "doctor.facts", "doctor.report",
    "arguments", "run", "agent", "part", "output", "guard",
    "optimizer",
    "state", "hooks",
    "reduction",
    "rounds", "replicas", "sparse", "scheduler",
    "bucket", "gradient_views", "packing",
    "allreduce.select",
    "collectives",
    "allreduce.hierarchical", "allreduce.lanes",
    "allreduce.on_device", "allreduce.native", "allreduce.ring", "allreduce.direct",
    "allreduce.notes", "allreduce.slices",
    "allreduce", "allreduce.mover",
    "transport.exchange", "memory.exchange",
    "transport.open", "transport.mpi", "transport.c10d",
    "transport.places", "transport.links", "transport.culprit", "transport.staging", "transport",
    "memory.channel",
    "platform", "memory.cuda",
    "call",
    "interruption",
    "world",
    "meeting", "launch",
    "memory.host", "memory", "memory.mapping", "memory.linux", "memory.semaphore", "memory.heap",
    "rendezvous", "worker", "interfaces",
    "backward", "module_wrappers", "dynamo", "plan",
    "kernels", "kernels.ring", "kernels.direct", "kernels.pack", "kernels.unpack", "kernels.accumulate",
    "kernels.signals", "kernels.finite", "kernels.chunks", "kernels.lazy", "kernels.reference",
    "errors",
]
# fmt: on


def modules() -> dict[str, Path]:
    """{name without "torchring.": file}; the package itself is "torchring"."""
    found = {}
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name or "torchring"] = file
    for link in ("kernels", "bench"):  # rglob does not follow links, except the one that it starts from
        for file in (PACKAGE / link).rglob("*.py"):
            parts = file.relative_to(PACKAGE).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports_of(name: str, source: str, known: set[str], *, is_package: bool) -> set[str]:
    """The modules of the package that `source` names, at the top or inside a function."""
    package = ["torchring", *(name.split(".") if name != "torchring" else [])]
    if not is_package:
        package = package[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            targets = [[*base, alias.name] for alias in node.names]
        else:
            continue
        for target in targets:
            if target[0] != "torchring":
                continue
            whole = ".".join(target[1:]) or "torchring"
            parent = ".".join(target[1:-1]) or "torchring"
            found.add(whole if whole in known else parent)
    return found - {name}


def wrong_way(sources: dict[str, str], packages: set[str], order: list[str]) -> list[str]:
    place = {name: i for i, name in enumerate(order)}
    return [
        f"{name} imports {other}"
        for name, source in sorted(sources.items())
        for other in sorted(imports_of(name, source, set(sources), is_package=name in packages))
        if place[other] <= place[name]
    ]


def all_sources() -> tuple[dict[str, str], set[str]]:
    found = modules()
    return {n: f.read_text() for n, f in found.items()}, {n for n, f in found.items() if f.name == "__init__.py"}


def test_every_module_has_its_place() -> None:
    assert sorted(modules()) == sorted(ORDER)
    assert len(set(ORDER)) == len(ORDER)


def test_imports_go_one_way() -> None:
    sources, packages = all_sources()
    assert wrong_way(sources, packages, ORDER) == []


def test_the_direction_check_can_fail() -> None:
    sources = {
        "torchring": "from torchring.a import x",
        "a": "import torchring.sub.b\nfrom torchring import sub",
        "sub": "from torchring.sub.b import y",
        "sub.b": "def f():\n    from torchring.a import x",
        "sub.c": "from . import b\nfrom .b import y\nfrom ..a import x",
    }
    order = ["torchring", "a", "sub.c", "sub", "sub.b"]
    assert wrong_way(sources, {"torchring", "sub"}, order) == ["sub.b imports a", "sub.c imports a"]
    everything = imports_of("sub.c", sources["sub.c"], set(sources), is_package=False)
    assert everything == {"sub.b", "a"}


def test_the_real_imports_are_seen() -> None:
    """What the order is checked against is not empty by mistake."""
    sources, packages = all_sources()
    seen = {n: imports_of(n, s, set(sources), is_package=n in packages) for n, s in sources.items()}
    assert seen["optimizer"] >= {"hooks", "plan", "reduction", "world", "collectives", "allreduce.select"}
    assert seen["kernels.pack"] == {"kernels.reference", "kernels.chunks", "kernels.finite", "kernels.lazy"}
    assert seen["torchring"] >= {"optimizer", "collectives", "errors"}
    assert "kernels.reference" in seen["packing"]
    assert "call" in seen["collectives"] & seen["memory.exchange"] & seen["transport.exchange"]


def test_kernels_import_nothing_from_the_package_but_themselves() -> None:
    sources, packages = all_sources()
    for name, source in sources.items():
        if name.split(".")[0] == "kernels":
            others = imports_of(name, source, set(sources), is_package=name in packages)
            assert {other.split(".")[0] for other in others} <= {"kernels"}, name
        if name in ("plan", "errors", "backward", "dynamo", "worker", "memory.linux", "memory.semaphore"):
            assert imports_of(name, source, set(sources), is_package=False) <= {"dynamo"}, name
        if name == "call":
            assert imports_of(name, source, set(sources), is_package=False) == {"errors"}


def is_import_of_top_level_kernels(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] == "kernels" for alias in node.names)
    return isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "kernels"


def test_nobody_imports_a_top_level_kernels() -> None:
    """That name belongs to another distribution."""
    files = [
        f for folder in ("torchring", "kernels", "tests", "examples", "bench") for f in (ROOT / folder).rglob("*.py")
    ]
    assert len(files) > 40
    guilty = [str(f) for f in files if any(map(is_import_of_top_level_kernels, ast.walk(ast.parse(f.read_text()))))]
    assert guilty == []


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import kernels", True),
        ("import kernels.pack as p", True),
        ("from kernels import pack", True),
        ("from kernels.pack import pack", True),
        ("from torchring import kernels", False),
        ("from . import kernels", False),
        ("import torchring.kernels", False),
        ("import kernels_of_truth", False),
    ],
)
def test_the_search_for_top_level_kernels_can_fail(code: str, expected: bool) -> None:
    assert any(map(is_import_of_top_level_kernels, ast.walk(ast.parse(code)))) is expected


def test_no_room_is_called_by_what_it_is_not() -> None:
    stems = {Path(name.replace(".", "/")).name for name in modules()}
    assert stems.isdisjoint({"utils", "util", "common", "helpers", "helper", "config", "misc"})


@pytest.mark.parametrize("folder", ["kernels", "bench"])
def test_folders_of_the_package_at_the_top_are_linked_not_copied(folder: str) -> None:
    link = PACKAGE / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..") / folder


def ignored(names: list[str]) -> set[str]:
    """Those that git ignores; without git, what .gitignore names."""
    asked = subprocess.run(["git", "check-ignore", "--", *names], cwd=ROOT, capture_output=True, text=True, timeout=30)
    if asked.returncode in (0, 1):
        return {name.rstrip("/") for name in asked.stdout.split()}
    patterns = [line.strip("/") for line in (ROOT / ".gitignore").read_text().split()]
    return {name.rstrip("/") for name in names for pattern in patterns if Path(name).match(pattern)}


def test_top_level() -> None:
    entries = [path for path in ROOT.iterdir() if not path.name.startswith(".")]
    folders = {path.name for path in entries if path.is_dir()}
    folders -= ignored([f"{name}/" for name in sorted(folders)])
    assert folders == {"torchring", "kernels", "examples", "tests", "bench", "editable"}
    files = {path.name for path in entries if path.is_file()}
    files -= ignored(sorted(files))
    assert files == {
        "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "Makefile", "CHANGELOG.md", "LICENSE", "SECURITY.md",
        "constraints.txt",
    }  # fmt: skip


def test_hidden_files_at_the_top() -> None:
    assert {".gitignore", ".pre-commit-config.yaml", ".ci"} <= {path.name for path in ROOT.iterdir()}
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
