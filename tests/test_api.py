"""The public names, held still: whoever changes one changes this file with it."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from typing import Any

import pytest
import torch
from harness import patient

import torchring

_ERROR = (
    "(message: 'str', *, rank: 'int | None' = None, peers: 'Sequence[int]' = (), bucket: 'int | None' = None, "
    "parameters: 'Sequence[str]' = (), step: 'int | None' = None, seconds: 'float | None' = None) -> 'None'"
)
_OPTIONS = (
    "(optimizer: 'Optimizer', model: 'torch.nn.Module | None' = None, *, op: 'GradientOp' = 'mean', "
    "compression: 'Compression | None' = None, bucket_mb: 'float | None' = None, accumulate: 'int' = 1, "
    "algorithm: 'Algorithm' = 'auto', "
    "overlap: 'Overlap' = 'auto', on_nonfinite: 'OnNonfinite' = 'raise', "
    "sync_buffers: 'SyncBuffers | None' = 'mean', sync_initial_state: 'bool' = True)"
)
SIGNATURES = {
    "DistributedOptimizer": f"{_OPTIONS} -> 'None'",
    "GradientError": _ERROR,
    "PeerLostError": _ERROR,
    "PeerTimeoutError": _ERROR,
    "PlanMismatchError": _ERROR,
    "RingError": _ERROR,
    "Stats": (
        "(algorithm: 'str', reason: 'str', overlap: 'str', num_buckets: 'int', bytes_per_step: 'int', "
        "num_reductions: 'int', "
        "communication_ms: 'float', exposed_ms: 'float', mean_communication_ms: 'float', mean_exposed_ms: 'float', "
        "overlap_ratio: 'float', num_skipped_steps: 'int' = 0) -> None"
    ),
    "TopologyError": _ERROR,
    "SyncBatchNorm": str(inspect.signature(torch.nn.BatchNorm2d)),
    "Work": "(future: 'Future[torch.Tensor]') -> 'None'",
    "all_gather": "(tensor: 'torch.Tensor', async_op: 'bool' = False) -> 'torch.Tensor | Work'",
    "all_gather_object": "(obj: '_T') -> 'list[_T]'",
    "all_reduce": "(tensor: 'torch.Tensor', op: 'Op' = 'mean', async_op: 'bool' = False) -> 'torch.Tensor | Work'",
    "all_to_all": "(tensor: 'torch.Tensor', splits: 'Sequence[int] | None' = None, async_op: 'bool' = False) -> 'Any'",
    "barrier": "() -> 'None'",
    "broadcast": "(tensor: 'torch.Tensor', src: 'int' = 0, async_op: 'bool' = False) -> 'torch.Tensor | Work'",
    "broadcast_object": "(obj: '_T | None', src: 'int' = 0) -> '_T'",
    "broadcast_optimizer_state": "(optimizer: 'Optimizer', src: 'int' = 0) -> 'None'",
    "convert_sync_batchnorm": "(module: 'torch.nn.Module') -> 'torch.nn.Module'",
    "broadcast_parameters": ("(model_or_state_dict: 'torch.nn.Module | Mapping[str, Any]', src: 'int' = 0) -> 'None'"),
    "device": "() -> 'torch.device'",
    "init": (
        "(backend: 'Backend' = 'auto', *, timeout_seconds: 'float | None' = None, process_group: 'bool' = False, "
        "stall_warning_seconds: 'float | None' = None) -> 'World'"
    ),
    "is_initialized": "() -> 'bool'",
    "join": "(*objects: 'Any') -> 'Iterator[None]'",
    "local_rank": "() -> 'int'",
    "local_size": "() -> 'int'",
    "node_rank": "() -> 'int'",
    "num_nodes": "() -> 'int'",
    "rank": "() -> 'int'",
    "reduce_scatter": "(tensor: 'torch.Tensor', op: 'Op' = 'mean', async_op: 'bool' = False) -> 'torch.Tensor | Work'",
    "shutdown": "() -> 'None'",
    "size": "() -> 'int'",
    "wrap": f"{_OPTIONS} -> 'DistributedOptimizer'",
}
MEMBERS = {
    "DistributedOptimizer": {
        "add_param_group": "(self, param_group: 'dict[str, Any]') -> 'None'",
        "close": "(self) -> 'None'",
        "defaults": "property",
        "load_state_dict": "(self, state_dict: 'Mapping[str, Any]') -> 'None'",
        "no_sync": "(self) -> 'AbstractContextManager[None]'",
        "skip": "(self) -> 'None'",
        "weigh": "(self, weight: 'float') -> 'None'",
        "param_groups": "property",
        "profile_hook_step": "(func: 'Callable[..., Any]') -> 'Callable[..., Any]'",
        **dict.fromkeys(
            (
                "register_load_state_dict_post_hook",
                "register_load_state_dict_pre_hook",
                "register_state_dict_post_hook",
                "register_state_dict_pre_hook",
            ),
            "(self, hook: 'Any', prepend: 'bool' = False) -> 'Any'",
        ),
        "state": "property",
        "state_dict": "(self) -> 'dict[str, Any]'",
        "stats": "(self) -> 'Stats'",
        "step": "(self, closure: 'Callable[[], Any] | None' = None, *args: 'Any', **kwargs: 'Any') -> 'Any'",
        "synchronize": "(self) -> 'None'",
        "zero_grad": "(self, set_to_none: 'bool' = True) -> 'None'",
    },
    "RingError": {"locate": "(self, *, bucket: 'int', parameters: 'Sequence[str]', step: 'int') -> 'None'"},
    "Stats": {},
    "Work": {"is_completed": "(self) -> 'bool'", "wait": "(self) -> 'torch.Tensor'"},
}


def members_of(cls: type) -> dict[str, str]:
    """The public ones that the class itself defines, fields of dataclasses left out."""
    return {
        name: "property" if isinstance(value, property) else str(inspect.signature(value))
        for name, value in sorted(vars(cls).items())
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    }


def test_public_names() -> None:
    assert sorted(torchring.__all__) == sorted(SIGNATURES)
    assert torchring.__all__ == sorted(torchring.__all__)
    assert len(set(torchring.__all__)) == len(torchring.__all__)


def test_a_star_import_gives_exactly_these() -> None:
    namespace: dict[str, Any] = {}
    exec("from torchring import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(SIGNATURES)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    assert str(inspect.signature(getattr(torchring, name))) == SIGNATURES[name]


@pytest.mark.parametrize("name", MEMBERS)
def test_members(name: str) -> None:
    assert members_of(getattr(torchring, name)) == MEMBERS[name]


def test_wrap_and_the_class_take_the_same_arguments() -> None:
    of_wrap, of_class = (inspect.signature(f).parameters for f in (torchring.wrap, torchring.DistributedOptimizer))
    assert dict(of_wrap) == dict(of_class)


def test_options_are_keywords_only() -> None:
    kinds = {name: p.kind for name, p in inspect.signature(torchring.wrap).parameters.items()}
    positional = [name for name, kind in kinds.items() if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert positional == ["optimizer", "model"]


def test_stats_is_a_frozen_dataclass() -> None:
    assert dataclasses.is_dataclass(torchring.Stats)
    stats = torchring.Stats("none", "alone", "inline", 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.num_buckets = 1  # type: ignore[misc]


def has_own_docstring(value: Any) -> bool:
    text = getattr(value, "__doc__", None)
    if isinstance(value, type):  # not one inherited, nor what dataclass makes up
        text = value.__dict__.get("__doc__")
        return bool(text and text.strip()) and not text.startswith(f"{value.__name__}(")
    return bool(text and text.strip())


@pytest.mark.parametrize("name", SIGNATURES)
def test_public_names_have_docstrings(name: str) -> None:
    assert has_own_docstring(getattr(torchring, name))


def test_public_members_have_docstrings() -> None:
    missing = [
        f"{cls}.{member}"
        for cls, members in MEMBERS.items()
        for member, text in members.items()
        if text != "property" and not has_own_docstring(vars(getattr(torchring, cls))[member])
    ]
    assert missing == []


def test_the_docstring_check_can_fail() -> None:
    class Inherits(torchring.RingError):
        pass

    @dataclasses.dataclass
    class Bare:
        x: int

    assert [has_own_docstring(value) for value in (Inherits, Bare, lambda: 0)] == [False] * 3


def test_modules_have_docstrings() -> None:
    names = [module.name for module in pkgutil.walk_packages(torchring.__path__, "torchring.")]
    assert "torchring.kernels.pack" in names
    assert "torchring.gradients.bucket" in names
    assert [name for name in names if not has_own_docstring(importlib.import_module(name))] == []


def test_importing_is_light() -> None:
    """No GPU compiler, no MPI, nothing that only examples need; and no process group or thread is started. CPU users
    never import Triton.
    """
    code = """
import sys, threading
import torch
torch_itself = set(sys.modules)
import torchring
import torchring.transport.open
heavy = ["triton", "sklearn", "scipy", "rich", "mpi4py", "joblib", "pytest", "setuptools"]
print([name for name in heavy if name in sys.modules and name not in torch_itself])
print([name for name in heavy[:1] + heavy[3:5] if name in sys.modules])
print(torchring.is_initialized(), torch.distributed.is_initialized(), threading.active_count())
from torchring.kernels import ChunkTable, accumulate, pack, unpack
table = ChunkTable([2], [0], wire_dtype=torch.float16, device="cpu")
wire = torch.zeros(2, dtype=torch.float16)
grad = torch.ones(2)
pack([grad], wire, table, scale=0.5), unpack(wire, [grad], table), accumulate([grad, grad], grad)
print(grad.tolist(), "triton" in sys.modules)
"""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patient(60), env=environ)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["[]", "[]", "False False 1", "[1.0, 1.0] False"]
    assert ran.stderr == ""
