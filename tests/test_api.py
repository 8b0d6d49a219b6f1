"""The public names, held still: api.txt has their parameters, one a line.

python -m tests.test_api      writes api.txt anew; look at the differences
"""

import ast
import dataclasses
import importlib
import inspect
import os
import pkgutil
from pathlib import Path
from typing import Any

import pytest

import torchring
from tests.support.commands import run_python

API = Path(__file__).with_name("api.txt")
# Whose public members are held still, too.
CLASSES = ("DistributedOptimizer", "RingError", "Stats", "Work")


def is_ours(kind: type) -> bool:
    return kind.__module__.startswith("torchring.")


def members_of(cls: type) -> dict[str, Any]:
    """The public ones that torchring defines, fields of dataclasses left out."""
    members = {name: value for kind in cls.__mro__[::-1] if is_ours(kind) for name, value in vars(kind).items()}
    return {
        name: value
        for name, value in sorted(members.items())
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    }


def signature_of(name: str, value: Any) -> str:
    """A parameter a line."""
    if isinstance(value, property):
        return f"{name}: property\n"
    signature = inspect.signature(value)
    result = (
        "" if signature.return_annotation in (signature.empty, None, "None") else f" -> {signature.return_annotation}"
    )
    kinds = {inspect.Parameter.KEYWORD_ONLY: "* ", inspect.Parameter.POSITIONAL_ONLY: "/ "}
    parameters = (f"    {kinds.get(each.kind, '')}{each}\n" for each in signature.parameters.values())
    return f"{name}{result}\n{''.join(parameters)}"


def described() -> str:
    """All that is public, of torchring, of its classes, of the recipes, and of torchring.horovod."""
    hvd = importlib.import_module("torchring.horovod")
    found = [signature_of(name, getattr(torchring, name)) for name in torchring.__all__]
    for cls in CLASSES:
        members = members_of(getattr(torchring, cls))
        found += [signature_of(f"{cls}.{name}", value) for name, value in members.items()]
    recipes = torchring.recipes
    found += [signature_of(f"recipes.{name}", getattr(recipes, name)) for name in recipes.__all__]
    for name in sorted(hvd.__all__):
        value, others = getattr(hvd, name), ("SyncBatchNorm", "HorovodInternalError")  # these have the bases' arguments
        parameters = inspect.signature(value).parameters if callable(value) and name not in others else ()
        found.append(" ".join([f"horovod.{name}", *parameters]) + "\n")
    return "".join(found)


def test_what_is_public_is_what_it_was() -> None:
    assert torchring.__all__ == sorted(torchring.__all__)
    namespace: dict[str, Any] = {}
    exec("from torchring import *", namespace)
    assert namespace.keys() - {"__builtins__"} == {*torchring.__all__}
    assert described() == API.read_text()
    assert torchring.Stats.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_names_of_horovod_are_told_where_they_are() -> None:
    with pytest.raises(TypeError, match=r"has all_reduce\(\); Horovod's allreduce\(\) is in torchring.horovod"):
        torchring.allreduce(1)  # type: ignore[operator]  # the package of that name
    with pytest.raises(AttributeError, match=r"'allgather'; it has all_gather\(\), and Horovod's names are in"):
        torchring.allgather  # type: ignore[attr-defined]  # noqa: B018


def has_own_docstring(value: Any) -> bool:
    text = (value.__dict__ if isinstance(value, type) else {"__doc__": value.__doc__}).get("__doc__") or ""
    is_made_up = isinstance(value, type) and text.startswith(f"{value.__name__}(")  # by dataclass
    return bool(text.strip()) and not is_made_up


def test_all_that_is_public_has_a_docstring() -> None:
    hvd = importlib.import_module("torchring.horovod")
    found = {name: getattr(torchring, name) for name in torchring.__all__}
    found |= {name: getattr(torchring.recipes, name) for name in torchring.recipes.__all__}
    for cls in CLASSES:
        members = members_of(getattr(torchring, cls)).items()
        found |= {f"{cls}.{name}": value for name, value in members if not isinstance(value, property)}
    assert [name for name, value in found.items() if not has_own_docstring(value)] == []
    assert [name for name in hvd.__all__ if callable(value := getattr(hvd, name)) and not inspect.getdoc(value)] == []
    assert (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product) == (0, 1, 2, 3, 4, 5)
    inherits, bare = type("Inherits", (torchring.RingError,), {}), dataclasses.make_dataclass("Bare", ["x"])
    assert not any(map(has_own_docstring, (inherits, bare, lambda: 0))), "this check can fail"


def test_modules_have_docstrings() -> None:
    # Without Ray, say, torchring.ray cannot be imported, and its modules are not among these.
    found = {module.name: module for module in pkgutil.walk_packages(torchring.__path__, "torchring.")}
    assert {"torchring.kernels.pack", "torchring.gradients.bucket", "torchring.ray"} <= found.keys()
    files = [module.module_finder.find_spec(name).origin for name, module in found.items()]  # type: ignore[union-attr, call-arg]
    assert [file for file in files if not ast.get_docstring(ast.parse(Path(file).read_text()))] == []


def test_importing_is_light() -> None:
    """No GPU compiler, no MPI, nothing that only examples need; and no process group or thread is started. CPU users
    never import Triton.
    """
    code = """
import sys, threading
import torch
torch_itself = set(sys.modules)
import torchring
import torchring.data
import torchring.transport.c10d
heavy = ["triton", "sklearn", "scipy", "rich", "mpi4py", "joblib", "pytest", "setuptools", "pyarrow", "torchdata"]
print([name for name in heavy if name in sys.modules and name not in torch_itself])
print([name for name in heavy[:1] + heavy[3:5] if name in sys.modules])
print(torchring.is_initialized(), torch.distributed.is_initialized(), threading.active_count())
import torchring.devices.opening, torchring.devices.packing
print("triton" in sys.modules)
"""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = run_python("-c", code, env=environ)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["[]", "[]", "False False 1", "False"]
    assert ran.stderr == ""


if __name__ == "__main__":
    API.write_text(described())
