"""Private names of PyTorch that torchring uses. A release that renames one fails here, and not in a user's training."""

import ast
import re
from pathlib import Path

import pytest
import torch

import torchring
from torchring.doctor.facts import torch_lacks
from torchring.releases import PRIVATE_NAMES, check_torch, release_of

PACKAGE = Path(__file__).parents[1] / "torchring"

NAMES = {f"torch.{name}" for names in PRIVATE_NAMES.values() for name in names.replace(":", ".").split()}


def private_names(source: str) -> set[str]:
    """Names below torch that have a private part: imported, used as an attribute, or given to getattr as a constant."""
    tree = ast.parse(source)
    homes = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            homes |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            homes |= {alias.asname: alias.name for alias in node.names if alias.asname}
    used = set(homes)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            used.add(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            used.add(f"{ast.unparse(node.args[0])}.{getattr(node.args[1], 'value', '')}")
    found = {homes.get(head, head) + dot + rest for head, dot, rest in (name.partition(".") for name in used)}
    return {name for name in found if re.fullmatch(r"torch(\.\w+)*\._[^_][\w.]*", name)}


def is_part(name: str, of: str) -> bool:
    return f"{of}.".startswith(f"{name}.")


def test_every_private_name_is_listed() -> None:
    used = set().union(*(private_names(file.read_text()) for file in PACKAGE.rglob("*.py")))
    assert {name for name in used if not any(is_part(name, one) or is_part(one, name) for one in NAMES)} == set()
    assert used >= NAMES, "or the list is too long"


def test_private_names_are_found() -> None:
    for source, expected in (
        ("import torch\ntorch._C._f()", {"torch._C", "torch._C._f"}),
        ("from torch import _C as core\nhasattr(core, 'f')", {"torch._C", "torch._C.f"}),
        ("import torch.distributed as dist\nself._x = dist.y", set()),
    ):
        assert private_names(source) == expected


def test_this_release_has_them() -> None:
    swap = "shard=True (torch.UntypedStorage._swap_data_ptr_)"
    assert torch_lacks() == ([swap] if release_of(torch.__version__) < (2, 12) else [])


def test_what_a_release_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRIVATE_NAMES, "shard=True", "UntypedStorage._of_nobody")
    assert torch_lacks() == ["shard=True (torch.UntypedStorage._of_nobody)"]
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"takes PyTorch 2\.12 or newer, and this is .* lacks torch\.U.*_of_nobo"):
        torchring.wrap(optimizer, model, shard=True)
    torchring.shutdown()
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    with pytest.raises(ImportError, match=r"with PyTorch 2\.99, which lacks torch\._C\._storage_Use_Count; install"):
        check_torch("2.99")
