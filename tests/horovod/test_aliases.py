"""`import horovod.torch` finds torchring, in a script and in every Python process that the script starts."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import run_python
from torchring.horovod import aliases
from torchring.horovod.__main__ import main
from torchring.launch.horovodrun import with_aliases


def said(*arguments: str | Path, **options: Any) -> Any:
    """What a program prints, as JSON."""
    ran = run_python(*arguments, **options)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.fixture
def installed() -> Iterator[None]:
    """The aliases in this process, for as long as the test runs."""

    def horovods() -> dict[str, Any]:
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "horovod"}

    finders, modules = list(sys.meta_path), horovods()
    aliases.install()
    yield
    sys.meta_path[:] = finders
    horovods()
    sys.modules.update(modules)


def test_the_same_modules_under_two_names(installed: None) -> None:
    import torchring.horovod.elastic.state
    from torchring.horovod import exceptions
    from torchring.horovod.elastic.state import ObjectState
    from torchring.horovod.runner import run

    before = list(sys.meta_path)
    aliases.install()
    assert sys.meta_path == before
    horovod, runner = import_module("horovod"), import_module("horovod.runner")
    assert import_module("horovod.torch") is horovod.torch is torchring.horovod
    assert import_module("horovod.torch.elastic.state") is torchring.horovod.elastic.state
    assert import_module("horovod.common.exceptions") is exceptions
    assert import_module("horovod.common.elastic").ObjectState is ObjectState
    assert exceptions.__spec__.name == exceptions.__name__ == "torchring.horovod.exceptions"
    assert horovod.run is runner.run is run
    assert horovod.__version__.split(".")[0] == "0"
    with pytest.raises(AttributeError, match=r"'horovod\.runner' has no attribute 'walk'"):
        runner.walk  # noqa: B018


@pytest.mark.parametrize("name", ["horovod.torch.no_such", "horovod.keras", "horovod.runner.util.threads"])
def test_what_torchring_has_not_is_missing_under_the_name_that_was_asked_for(installed: None, name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"'horovod\.") as caught:
        import_module(name)
    assert (name == "horovod.keras") is ("torchring has horovod.torch only" in str(caught.value))


FACTS = """
import json, subprocess, sys, multiprocessing

def child(queue):
    import horovod  # which takes no import of torch
    queue.put(horovod.__version__)

if __name__ == "__main__":
    found = {"argv": sys.argv, "path": sys.path[0], "file": __file__, "main": child.__module__}
    for method in ("spawn", "forkserver", "fork"):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        found[method] = queue.get()
        process.join()
    code = "import horovod; print(horovod.__version__)"
    found["subprocess"] = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
    print(json.dumps(found))
"""


def test_a_script_runs_as_ever_and_its_children_inherit_the_aliases(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FACTS)
    found = said("-m", "torchring.horovod", script, "-x", "--", "y", folder=tmp_path)
    assert found.pop("argv") == [str(script), "-x", "--", "y"]
    assert found.pop("path") == str(tmp_path)
    assert (found.pop("file"), found.pop("main")) == (str(script), "__main__")
    assert found == dict.fromkeys(["spawn", "forkserver", "fork", "subprocess"], aliases.VERSION)


def test_modules_and_options_of_the_interpreter(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """And without a script it says how it is used."""
    started: list[str] = []
    monkeypatch.setattr(os, "execve", lambda program, command, environ: started.append(" ".join(command[1:])))
    monkeypatch.setattr(subprocess, "_args_from_interpreter_flags", lambda: ["-X", "dev"])
    main(["-m", "training", "-m", "torchring.horovod"])
    assert started.pop() == "-X dev -u -m training -m torchring.horovod"  # -u: as capsys writes
    assert main([]) == 2
    assert not started
    assert "script.py" in capsys.readouterr().err


def test_the_path_and_sitecustomize_of_the_site_still_count(tmp_path: Path) -> None:
    first = with_aliases({"PYTHONPATH": "/a:/b", "HOME": "/"})
    startup, rest = first["PYTHONPATH"].split(":", 1)
    assert (rest, first["HOME"]) == ("/a:/b", "/")
    assert with_aliases(first) == first
    assert with_aliases({})["PYTHONPATH"] == startup  # an empty entry would be the working directory
    (tmp_path / "sitecustomize.py").write_text("import sys, horovod\nsys.mine = horovod.__version__\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code = "import sys, json, sitecustomize as s, horovod.runner; "
    code += "print(json.dumps([sys.mine, s.__file__, sys.path, sorted({*sys.modules} & {'torch', 'torchring'})]))"
    mine, file, path, imported = said("-c", code, env=with_aliases(environ))
    assert (mine, file) == (aliases.VERSION, str(tmp_path / "sitecustomize.py"))
    assert str(tmp_path) in path
    assert not [entry for entry in path if entry.endswith("startup")]
    assert imported == []  # a start of Python costs no import of torch
    (tmp_path / "sitecustomize.py").write_text("1 / 0\n")
    ran = run_python("-c", "import horovod", env=with_aliases(environ))
    assert "ZeroDivisionError" in ran.stderr  # as Python has it
