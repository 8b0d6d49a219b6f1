"""Files in folders where another user has made a link, a FIFO or a folder before."""

import ast
import logging
import os
import re
import socket
from pathlib import Path

import pytest

import torchring
from torchring import safe_files
from torchring.safe_files import create, reading, replacing, warn_of_owner

PACKAGE = Path(torchring.__file__).parent


def _replace(path: Path) -> None:
    with replacing(path, "w") as file:
        file.write("new")


def _create(path: Path) -> None:
    with open(create(path), "w") as file:
        file.write("new")


@pytest.mark.parametrize("kind", ["link", "dangling link", "link to a device", "FIFO", "socket", "folder"])
def test_what_is_no_regular_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    path, precious = tmp_path / "name", tmp_path / "precious"
    precious.write_text("old")
    with socket.socket(socket.AF_UNIX) as listener:
        {
            "link": lambda: path.symlink_to(precious),
            "dangling link": lambda: path.symlink_to("nowhere"),
            "link to a device": lambda: path.symlink_to("/dev/zero"),
            "FIFO": lambda: os.mkfifo(path),
            "socket": lambda: listener.bind(str(path)),
            "folder": path.mkdir,
        }[kind]()
        for use in (reading, _create, _replace):
            with pytest.raises(OSError, match="it is a link, a pipe, a device or a folder; name another file"):
                use(path)
    assert precious.read_text() == "old"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["name", "precious"]


def test_an_older_file_is_replaced_and_its_other_names_keep_what_it_held(tmp_path: Path) -> None:
    for use in (_create, _replace):
        path, precious = tmp_path / "name", tmp_path / "precious"
        precious.write_text("old")
        path.unlink(missing_ok=True)
        path.hardlink_to(precious)
        use(path)
        assert (path.read_text(), precious.read_text()) == ("new", "old")
    with pytest.raises(TypeError), replacing(path) as file:
        file.write(file.write(b"half"))
    assert path.read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 2  # nothing unfinished is left


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root, to give a folder away")
def test_the_folder_of_another_user_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 12345, -1)
    with caplog.at_level(logging.WARNING, "torchring"):
        for folder in ("theirs", "theirs", "."):
            _replace(tmp_path / folder / "name")
    (said,) = caplog.messages
    assert said.startswith(f"the folder {tmp_path / 'theirs'} belongs to user 12345")
    safe_files._warned.clear()
    warn_of_owner(tmp_path / "gone")


def test_the_package_writes_files_through_this_module_only() -> None:
    """Benchmarks are not looked at: they write to folders of their own."""
    found = set()
    for file in [*PACKAGE.rglob("*.py"), *(PACKAGE / "kernels").rglob("*.py")]:  # rglob does not follow links
        source = file.read_text()
        for node in ast.walk(ast.parse(source)) if re.search(r"open\(|\.write_|O_CREAT", source) else ():
            text = ast.unparse(node) if isinstance(node, ast.Call | ast.Attribute) else ""
            writes = isinstance(node, ast.Call) and any(
                isinstance(word, ast.Constant) and str(word.value).strip("bt+") in ("w", "a", "x") for word in node.args
            )
            if (writes and "open(" in text) or text.endswith((".write_text", ".write_bytes", ".O_CREAT")):
                found.add((str(file.relative_to(PACKAGE)), text.partition("(")[0]))
    assert found == {
        ("safe_files.py", "os.O_CREAT"),
        ("__main__.py", "open"),  # /dev/null
        ("horovod/timeline.py", "open"),  # opens a descriptor of `create`
    }
