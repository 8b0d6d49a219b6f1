"""The public names, held still: whoever changes one changes this file with it."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import torchring
from tests.support.harness import patient

_ERROR = (
    "(message: 'str', *, rank: 'int | None' = None, peers: 'Sequence[int]' = (), bucket: 'int | None' = None, "
    "parameters: 'Sequence[str]' = (), step: 'int | None' = None, seconds: 'float | None' = None) -> 'None'"
)
_OPTIONS = (
    "(optimizer: 'Optimizer', model: 'torch.nn.Module | None' = None, *, op: 'GradientOp' = 'mean', "
    "compression: 'Compression | None' = None, "
    "bucket_mb: 'float | None' = None, accumulate: 'int' = 1, "
    "algorithm: 'Algorithm' = 'auto', "
    "overlap: 'Overlap' = 'auto', on_nonfinite: 'OnNonfinite' = 'raise', "
    "sync_buffers: 'SyncBuffers' = 'mean', sync_initial_state: 'bool' = True, "
    "shard: 'bool' = False, "
    "ignore: 'Sequence[str | torch.nn.Module | torch.Tensor]' = (), "
    "noise_scale: 'bool' = False, "
    "free_gradients: 'None' = None)"
)
SIGNATURES = {
    "DistributedOptimizer": (
        "(optimizer: 'Optimizer', model: 'torch.nn.Module | None' = None, **options: 'Any') -> 'None'"
    ),
    "GradientError": _ERROR,
    "PeerLostError": _ERROR,
    "PeerTimeoutError": _ERROR,
    "PlanMismatchError": _ERROR,
    "RingError": _ERROR,
    "Stats": (
        "(algorithm: 'str', reason: 'str', overlap: 'str', num_buckets: 'int', bytes_per_step: 'int', "
        "num_reductions: 'int', "
        "communication_ms: 'float', exposed_ms: 'float', mean_communication_ms: 'float', mean_exposed_ms: 'float', "
        "overlap_ratio: 'float', num_skipped_steps: 'int' = 0, batch_size: 'float' = 0.0, "
        "noise_scale: 'float | None' = None) -> None"
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
        "stall_warning_seconds: 'float | None' = None, check_data: 'bool | None' = None) -> 'World'"
    ),
    "is_initialized": "() -> 'bool'",
    "join": "(*objects: 'Any') -> 'Iterator[None]'",
    "local_rank": "() -> 'int'",
    "local_size": "() -> 'int'",
    "metrics": "() -> 'dict[str, float]'",
    "node_rank": "() -> 'int'",
    "num_nodes": "() -> 'int'",
    "rank": "() -> 'int'",
    "reduce_scatter": (
        "(tensor: 'torch.Tensor', op: 'ElementwiseOp' = 'mean', async_op: 'bool' = False) -> 'torch.Tensor | Work'"
    ),
    "shutdown": "() -> 'None'",
    "size": "() -> 'int'",
    "trace": "(folder: 'str | os.PathLike[str]') -> 'Iterator[None]'",
    "wrap": f"{_OPTIONS} -> 'DistributedOptimizer'",
}
OF_RECIPES = {
    "LAMB": (
        "(params: 'Iterable[Any]', lr: 'float | Tensor' = 0.001, betas: 'tuple[float, float]' = (0.9, 0.999), "
        "eps: 'float' = 1e-06, weight_decay: 'float' = 0.0, *, bias_correction: 'bool' = True, "
        "exclude: 'Exclude' = '1d', foreach: 'bool | None' = None) -> 'None'"
    ),
    "LARS": (
        "(params: 'Iterable[Any]', lr: 'float | Tensor', momentum: 'float' = 0.9, weight_decay: 'float' = 0.0, *, "
        "trust_coefficient: 'float' = 0.001, eps: 'float' = 1e-08, nesterov: 'bool' = False, "
        "exclude: 'Exclude' = '1d', foreach: 'bool | None' = None) -> 'None'"
    ),
    "MeanMetric": "() -> 'None'",
    "WarmUp": "(optimizer: 'Optimizer', after: 'LRScheduler | None', steps: 'int', start: 'float') -> 'None'",
    "scale_lr": "(base_lr: 'float', base_batch: 'int', batch: 'int', rule: 'Rule' = 'linear') -> 'float'",
    "warm_up": "(after: 'Optimizer | LRScheduler', steps: 'int', start: 'float' = 0.0) -> 'WarmUp'",
}
MEMBERS = {
    "DistributedOptimizer": {
        "add_param_group": "(self, param_group: 'dict[str, Any]') -> 'None'",
        "close": "(self) -> 'None'",
        "defaults": "property",
        "load_state_dict": "(self, state_dict: 'Mapping[str, Any] | None') -> 'None'",
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
        "state_dict": "(self, *, all_ranks: 'bool' = False) -> 'dict[str, Any]'",
        "stats": "(self) -> 'Stats'",
        "step": "(self, closure: 'Callable[[], Any] | None' = None, *args: 'Any', **kwargs: 'Any') -> 'Any'",
        "sync_buffers": "(self) -> 'None'",
        "synchronize": "(self) -> 'None'",
        "zero_grad": "(self, set_to_none: 'bool' = True) -> 'None'",
    },
    "RingError": {"locate": "(self, *, bucket: 'int', parameters: 'Sequence[str]', step: 'int') -> 'None'"},
    "Stats": {},
    "Work": {"is_completed": "(self) -> 'bool'", "wait": "(self) -> 'torch.Tensor'"},
}


def is_ours(kind: type) -> bool:
    return kind.__module__.startswith("torchring.")


def members_of(cls: type) -> dict[str, str]:
    """The public ones that torchring defines, fields of dataclasses left out."""
    members = {name: value for kind in cls.__mro__[::-1] if is_ours(kind) for name, value in vars(kind).items()}
    return {
        name: "property" if isinstance(value, property) else str(inspect.signature(value))
        for name, value in sorted(members.items())
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    }


def test_names_of_horovod_are_told_where_they_are() -> None:
    with pytest.raises(
        TypeError, match=r"torchring has all_reduce\(\); Horovod's allreduce\(\) is in torchring.horovod"
    ):
        torchring.allreduce(1)  # type: ignore[operator]  # the package of that name
    with pytest.raises(AttributeError, match=r"'allgather'; it has all_gather\(\), and Horovod's names are in"):
        torchring.allgather  # type: ignore[attr-defined]  # noqa: B018


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


def test_recipes() -> None:
    recipes = torchring.recipes
    assert {name: str(inspect.signature(getattr(recipes, name))) for name in recipes.__all__} == OF_RECIPES
    assert all(has_own_docstring(getattr(recipes, name)) for name in OF_RECIPES)


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


_NAMES_OF_HOROVOD = """
    Adasum Average Compression DistributedOptimizer HorovodInternalError Max Min Product ProcessSet Sum
    SyncBatchNorm add_process_set allgather allgather_async allgather_object allreduce allreduce_ allreduce_async
    allreduce_async_ alltoall alltoall_async barrier broadcast broadcast_ broadcast_async broadcast_async_
    broadcast_object broadcast_optimizer_state broadcast_parameters ccl_built cross_rank cross_size cuda_built
    ddl_built elastic global_process_set gloo_built gloo_enabled grouped_allgather grouped_allgather_async
    grouped_allreduce grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter
    grouped_reducescatter_async init is_initialized join local_rank local_size mpi_built mpi_enabled
    mpi_threads_supported nccl_built poll rank reducescatter reducescatter_async remove_process_set rocm_built
    shutdown size sparse_allreduce_async start_timeline stop_timeline synchronize
"""
OF_HOROVOD = _NAMES_OF_HOROVOD.split()
# Scripts pass these by position, too.
ARGUMENTS_OF_HOROVOD = {
    "init": "comm process_sets",
    "allreduce": "tensor average name compression op prescale_factor postscale_factor process_set",
    "allreduce_async_": "tensor average name op prescale_factor postscale_factor process_set",
    "grouped_allreduce": "tensors average name compression op prescale_factor postscale_factor process_set",
    "sparse_allreduce_async": "tensor name op process_set",
    "allgather": "tensor name process_set",
    "broadcast_": "tensor root_rank name process_set",
    "alltoall": "tensor splits name process_set",
    "reducescatter": "tensor name compression op process_set prescale_factor postscale_factor",
    "reducescatter_async": "tensor name op process_set prescale_factor postscale_factor",
    "join": "device",
    "barrier": "process_set",
    "broadcast_optimizer_state": "optimizer root_rank model",
    "broadcast_object": "obj root_rank name process_set",
    "start_timeline": "file_path mark_cycles",
    "DistributedOptimizer": (
        "optimizer named_parameters compression backward_passes_per_step op gradient_predivide_factor num_groups "
        "groups sparse_as_dense process_set"
    ),
    "run": (
        "func args kwargs num_proc min_num_proc max_num_proc slots reset_limit cooldown_range hosts hostfile "
        "host_discovery_script start_timeout ssh_port ssh_identity_file disable_cache output_filename verbose use_gloo "
        "use_mpi mpi_args network_interface network_interfaces executable np min_np max_np"
    ),
}


def test_names_of_horovod() -> None:
    hvd = importlib.import_module("torchring.horovod")
    assert len(OF_HOROVOD) == 67
    assert {*hvd.__all__} == {*OF_HOROVOD, "run"}
    assert (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product) == (0, 1, 2, 3, 4, 5)
    for name in hvd.__all__:
        if callable(getattr(hvd, name)):
            assert inspect.getdoc(getattr(hvd, name)), name
    for name, arguments in ARGUMENTS_OF_HOROVOD.items():
        assert " ".join(inspect.signature(getattr(hvd, name)).parameters) == arguments, name


@pytest.mark.parametrize("name", SIGNATURES)
def test_public_names_have_docstrings(name: str) -> None:
    assert has_own_docstring(getattr(torchring, name))


def test_public_members_have_docstrings() -> None:
    missing = [
        f"{cls}.{member}"
        for cls, members in MEMBERS.items()
        for member, text in members.items()
        if text != "property" and not has_own_docstring(getattr(getattr(torchring, cls), member))
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
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patient(60), env=environ)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["[]", "[]", "False False 1", "False"]
    assert ran.stderr == ""


@pytest.mark.grid  # test_layout.py finds cycles
def test_a_script_may_begin_with_any_name() -> None:
    """Modules that import each other can be imported in any order."""
    code = """
import os, sys
import torch
for name in sys.argv[1:]:
    if not (child := os.fork()):
        import torchring
        getattr(torchring, name)
        os._exit(0)
    print(name, os.waitpid(child, 0)[1])
"""
    first_of_home = {home: name for name, home in reversed(torchring._HOME_OF.items())}
    names = list(first_of_home.values())
    ran = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, timeout=patient(60))
    assert ran.stdout.splitlines() == [f"{name} 0" for name in names], ran.stderr
