"""Private names of PyTorch that torchring uses. A release that renames one fails here, and not in a user's training."""

import ast
import importlib
import operator
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint.state_dict

PACKAGE = Path(__file__).parents[1] / "torchring"

# Where PyTorch itself uses the name: it is as stable as that code. "optional": torchring works without it, too.
NAMES = {
    "torch.autograd.Variable._execution_engine.queue_callback": "DistributedDataParallel, FSDP2",
    "torch._C._current_autograd_node": "torch.autograd.graph",
    "torch._C._storage_Use_Count": "CUDA graph trees of Inductor",
    "torch.UntypedStorage._swap_data_ptr_": "nothing in Python; optional",
    "torch._C._dynamo.eval_frame": "torch.compiler.disable; optional",
    "torch._C._get_tracing_state": "torch.nn.Module",
    "torch._C._autograd._get_sequence_nr": "torch.fx; optional",
    "torch.autograd._profiler_enabled": "torch.autograd.profiler",
    "torch.distributed.distributed_c10d._get_default_store": "torch.distributed",
    "torch.distributed.distributed_c10d._default_pg_init_method": "torch.distributed; optional",
    "torch.nn.modules.batchnorm._BatchNorm": "FSDP",
    "torch.utils.data.dataloader._BaseDataLoaderIter.__next__": "DataLoader",
    "torch.utils.data._utils.worker": "DataLoader",
    "torch.utils._pytree.tree_map": "FSDP2",
    "torch._foreach_add": "torch.optim",
    "torch._foreach_add_": "torch.optim",
    "torch._foreach_addcmul_": "torch.optim",
    "torch._foreach_copy_": "torch.optim",
    "torch._foreach_div": "torch.optim",
    "torch._foreach_div_": "torch.optim",
    "torch._foreach_lerp_": "torch.optim",
    "torch._foreach_mul": "torch.optim",
    "torch._foreach_mul_": "torch.optim",
    "torch._foreach_norm": "torch.nn.utils.clip_grad_norm_",
    "torch._foreach_sqrt": "torch.optim",
    "torch._foreach_zero_": "torch.optim",
    "torch.distributed.checkpoint.state_dict._init_optim_state": "torch.distributed.checkpoint",
    "torch._neg_view": "a public operator, without documentation",
}
OF_CUDA = {
    "torch._C._cuda_getCurrentStream": "torch.cuda",
    "torch._C._distributed_c10d._register_process_group": "torch.distributed",
    "torch._C._distributed_c10d._SymmetricMemory": "torch.distributed._symmetric_memory",
}


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
    listed = {*NAMES, *OF_CUDA}
    assert {name for name in used if not any(is_part(name, one) or is_part(one, name) for one in listed)} == set()
    assert listed <= used, "or the list is too long"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch\ntorch._C._f()", {"torch._C", "torch._C._f"}),
        ("from torch import _C as core\nhasattr(core, 'f')", {"torch._C", "torch._C.f"}),
        ("import torch.distributed as dist\nself._x = dist.y", set()),
    ],
)
def test_private_names_are_found(source: str, expected: set[str]) -> None:
    assert private_names(source) == expected


@pytest.mark.parametrize("name", NAMES | OF_CUDA if torch.backends.cuda.is_built() else NAMES)
def test_a_private_name_is_there(name: str) -> None:
    if name.startswith("torch.optim.optimizer."):  # a module that its package hides
        name = name.removeprefix("torch.optim.optimizer.")
        assert name in vars(importlib.import_module("torch.optim.optimizer"))
        return
    operator.attrgetter(name.removeprefix("torch."))(torch)
