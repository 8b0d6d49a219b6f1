"""What gets installed: built without a network from a copy of the checkout, and used away from it."""

import configparser
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import torchring

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("kernels", "bench")  # folders at the top that are sub-packages of the distribution
LINKED_FILES = sorted(str(f.relative_to(ROOT)) for name in LINKED for f in (ROOT / name).rglob("*.py"))


def pip(*arguments: str | Path) -> None:
    """Offline: build tools and dependencies are those of this environment."""
    command = [sys.executable, "-m", "pip", "--no-cache-dir", "--disable-pip-version-check", "--quiet"]
    run([*command, *map(str, arguments)])


def run(command: list[str], **options: object) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, **options)  # type: ignore[call-overload]
    assert ran.returncode == 0, f"{command}:\n{ran.stdout}\n{ran.stderr}"
    return str(ran.stdout)


def build_wheel(source: Path, target: Path) -> Path:
    pip("wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", target, source)
    (wheel,) = target.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, because building writes beside the sources. Links stay links."""
    pytest.importorskip("setuptools.build_meta", reason="building without a network takes an installed setuptools")
    copy = tmp_path_factory.mktemp("source") / "torchring"
    skip = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=skip)
    assert all((copy / "torchring" / name).is_symlink() for name in LINKED)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("sdist")
    run([sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(target), str(source)])
    (archive,) = target.glob("*.tar.gz")
    return archive


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def check_contents(names: list[str]) -> None:
    assert len(LINKED_FILES) > 8
    assert {f"torchring/{file}" for file in LINKED_FILES} <= set(names)
    assert {"torchring/py.typed", "torchring/bench/micro/pytest.ini"} <= set(names)
    assert {"torchring/report/show/page.css", "torchring/report/show/page.html"} <= set(names)
    modules = {str(f.relative_to(ROOT)) for f in (ROOT / "torchring").rglob("*.py") if f.parent.name not in LINKED}
    assert modules <= set(names)
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"torchring"}
    assert [name for name in names if name.endswith((".pyc", ".so"))] == []


@pytest.mark.grid
def test_what_a_wheel_has(source: Path, wheel: Path) -> None:
    assert wheel.name == f"torchring-{torchring.__version__}-py3-none-any.whl"
    names = names_in(wheel)
    check_contents(names)
    for left_out in ("torchring/kernels/pack.py", "torchring/py.typed"):
        with pytest.raises(AssertionError):
            check_contents([name for name in names if name != left_out])
    for more in ("kernels/__init__.py", "tests/test_x.py", "torchring/native.so"):
        with pytest.raises(AssertionError):
            check_contents([*names, more])
    scripts = configparser.ConfigParser()
    with zipfile.ZipFile(wheel) as archive:
        for name in names:
            if name.startswith("torchring/"):
                assert archive.read(name) == (source / name).read_bytes(), name
        (folder,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        metadata = Parser().parsestr(archive.read(f"{folder}/METADATA").decode())
        scripts.read_string(archive.read(f"{folder}/entry_points.txt").decode())
        assert archive.read(f"{folder}/top_level.txt").decode().split() == ["torchring"]
    assert f"{folder}/licenses/LICENSE" in names
    assert dict(scripts["console_scripts"]) == {"torchring": "torchring.__main__:main"}
    assert metadata["Version"] == torchring.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    required = [text for text in metadata.get_all("Requires-Dist") if "extra ==" not in text]
    assert {re.split(r"[^\w-]", text)[0] for text in required} == {"torch", "numpy"}, "a CPU needs no Triton"
    assert {"gpu", "mpi", "report", "data", "manifest", "lightning"} <= set(metadata.get_all("Provides-Extra"))


@pytest.mark.grid
def test_installed_wheel_works_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip("install", "--no-index", "--no-deps", "--target", site, wheel)
    assert (site / "bin" / "torchring").exists()
    assert not (site / "torchring" / "kernels").is_symlink()
    assert not (site / "kernels").exists()
    import torch

    # -I: neither the working directory nor PYTHONPATH; -S: no .pth file that leads to the checkout.
    code = f"""
import sys
sys.path[:0] = [{str(site)!r}]
sys.path.append({str(Path(torch.__file__).parent.parent)!r})
import torch, torchring, torchring.kernels, torchring.kernels.pack, torchring.cli
from torchring.kernels import reference
wire = torch.zeros(3, dtype=torch.float16)
reference.pack([torch.tensor([1.0, 2.0]), torch.tensor([3.0])], [wire[:2], wire[2:]], scale=0.5)
print(torchring.__file__, torchring.kernels.__file__, wire.tolist(), sep="\\n")
print([path for path in sys.path if path.startswith({str(ROOT)!r}) and ".venv" not in path])
print([module for module in sys.modules.values() if str(getattr(module, "__file__", "")).startswith({str(ROOT)!r} + "/torchring")])
"""  # noqa: E501
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    said = run([sys.executable, "-I", "-S", "-c", code], cwd=elsewhere, env=environ).splitlines()
    assert said == [
        str(site / "torchring" / "__init__.py"),
        str(site / "torchring" / "kernels" / "__init__.py"),
        "[0.5, 1.0, 1.5]",
        "[]",
        "[]",
    ]


USER = """
import torch
import torchring

model = torch.nn.Linear(2, 1)
optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, compression="bf16")
nothing: None = optimizer.step()
loss: torch.Tensor = optimizer.step(lambda: model(torch.ones(2)).sum())
summed: torch.Tensor = torchring.all_reduce(torch.ones(2), "sum")
work: torchring.Work = torchring.all_reduce(torch.ones(2), async_op=True)
rows, counts = torchring.all_to_all(torch.ones(2), [1, 1])
count: int = counts[0]
text: str = torchring.broadcast_object("a" if torchring.rank() == 0 else None)

torchring.wrap(optimizer, op="avg")  # wrong
torchring.wrap(optimizer, compression="fp8")  # wrong
torchring.wrap(optimizer, algorithm="fast")  # wrong
torchring.wrap(optimizer, overlap="never")  # wrong
torchring.init("nccl")  # wrong
number: int = torchring.all_reduce(torch.ones(2))  # wrong
other: torch.Tensor = torchring.broadcast(torch.ones(2), async_op=True)  # wrong
optimizer.misspelt  # wrong
torchring.misspelt  # wrong
"""


@pytest.mark.grid
def test_an_installed_package_has_its_types(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By mypy --strict; editors do as it does. `kernels` and `tests` of the checkout are nobody's to import."""
    pytest.importorskip("mypy")
    run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")])
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "torch.pth").write_text(f"{Path(sysconfig.get_path('purelib'))}\n")
    (tmp_path / "user.py").write_text(USER)
    monkeypatch.chdir(tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    places = "import importlib.util as u; print([u.find_spec(name) for name in ('kernels', 'bench')])"
    assert run([str(python), "-c", places]).strip() == "[None, None]"
    options = ["--strict", "--no-error-summary", "--hide-error-context", "--python-version", "3.10"]
    options += ["--cache-dir", str(ROOT / ".mypy_cache"), "--python-executable", str(python)]
    said = subprocess.run([sys.executable, "-m", "mypy", *options, "user.py"], capture_output=True, text=True).stdout
    wrong = [number for number, line in enumerate(USER.splitlines(), 1) if line.endswith("# wrong")]
    errors = [line for line in said.splitlines() if ": error: " in line]
    assert [int(line.split(":")[1]) for line in errors] == wrong, said


@pytest.mark.grid  # before a release
def test_wheel_from_the_unpacked_sdist_is_the_same(sdist: Path, source: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
        links = [member.name for member in archive.getmembers() if member.issym() or member.islnk()]
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (top,) = {name.split("/")[0] for name in names}
    assert links == []  # a link out of the package would lead nowhere
    for needed in ("pyproject.toml", "README.md", "LICENSE", "torchring/py.typed", "torchring/kernels/pack.py"):
        assert f"{top}/{needed}" in names
    folders = ("tests", "qa", "examples", "bench", "kernels", "docs")
    files = [file for folder in folders for file in (source / folder).rglob("*") if file.is_file()]
    files += map(source.joinpath, ("Makefile", "constraints.txt", "mkdocs.yml", "CHANGELOG.md", "SECURITY.md"))
    assert len(files) > 100
    assert {f"{top}/{file.relative_to(source)}" for file in files if file.suffix != ".pyc"} <= set(names)
    again = build_wheel(tmp_path / top, tmp_path / "out")
    check_contents(names_in(again))
    assert sorted(names_in(again)) == sorted(names_in(wheel))
    with zipfile.ZipFile(again) as theirs, zipfile.ZipFile(wheel) as mine:
        for name in mine.namelist():
            if not name.endswith("RECORD"):
                assert theirs.read(name) == mine.read(name), name


def test_version_is_said_once_and_every_folder_of_the_package_is_installed() -> None:
    """setuptools finds those with an `__init__.py`."""
    (declared,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared == torchring.__version__
    folders = {Path(folder) for folder, _, _ in os.walk(ROOT / "torchring", followlinks=True)}
    without = [folder for folder in folders if [*folder.glob("*.py")] and not (folder / "__init__.py").is_file()]
    assert len(folders) > 20
    assert without == []
