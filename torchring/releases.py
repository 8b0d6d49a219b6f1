"""Which releases of PyTorch torchring works with, and which releases of packages are installed.

2.11 is the oldest release with which torchring has run on a GPU. Before 2.12, `UntypedStorage._swap_data_ptr_` is
missing: gradients do not live in wire buffers there, and `shard=True` is an error.
"""

import importlib.metadata
import pkgutil
import re
from typing import Final

LEAST_TORCH: Final = (2, 11)
# What does not work where PyTorch lacks one of these private names of its own. A release may rename or remove them.
PRIVATE_NAMES: Final = {
    "torchring.wrap": """
        autograd.Variable._execution_engine.queue_callback _C._current_autograd_node _C._storage_Use_Count
        _C._dynamo.eval_frame _foreach_copy_ _foreach_mul _foreach_mul_ _foreach_zero_
        nn.modules.batchnorm._BatchNorm""",
    "shard=True": "UntypedStorage._swap_data_ptr_",
    "torch.distributed.checkpoint with shard=True": """
        distributed.checkpoint.state_dict:_init_optim_state Tensor._make_wrapper_subclass
        _C._disabled_torch_function_impl""",
    "DTensors": """
        distributed.tensor._utils:compute_local_shape_and_global_offset Tensor._make_subclass Tensor._version""",
    "layer-wise recipes": """
        _foreach_add _foreach_add_ _foreach_addcmul_ _foreach_div _foreach_div_ _foreach_lerp_ _foreach_norm
        _foreach_sqrt""",
    "torchring.compile_backend": """
        _dynamo.backends.distributed:DDPOptimizer _dynamo.backends.registry:lookup_backend
        _TorchCompileInductorWrapper""",
    "collectives": "_neg_view distributed.distributed_c10d._get_default_store",
    "torchring.trace": "_C._get_tracing_state utils.data.dataloader._BaseDataLoaderIter.__next__",
    "torchring.data": "utils.data._utils.worker",
    "torchring.elastic": "utils._pytree.tree_map",
    "warning of ranks that train alone": """
        _C._autograd._get_sequence_nr distributed.distributed_c10d._default_pg_init_method""",
    "GPUs": """
        autograd._profiler_enabled _C._cuda_getCurrentStream _C._distributed_c10d._register_process_group
        _C._distributed_c10d._SymmetricMemory _C.__file__""",
}


def missing_names(what: str) -> list[str]:
    """The private names without which `what` does not work, and which this PyTorch lacks."""
    return [name for name in PRIVATE_NAMES[what].split() if not _is_there(name)]


def _is_there(name: str) -> bool:
    try:
        pkgutil.resolve_name(f"torch.{name}" if ":" in name else f"torch:{name}")  # imports what is before the colon
    except (ImportError, AttributeError):
        return False
    return True


def release_of(version: str) -> tuple[int, int]:
    """(major, minor) of a version such as "2.13.0+cu130" or "2.14.0a0+git1234567"."""
    found = re.match(r"(\d+)\.(\d+)", version)
    assert found is not None, version
    return int(found[1]), int(found[2])


def installed_version(package: str) -> str | None:
    """The version of an installed package; None if there is none, or if the package is run from its source."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_torch(version: str) -> None:
    """Raise ImportError if this release of PyTorch is too old, or lacks what training takes."""
    if release_of(version) < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        raise ImportError(
            f"torchring needs PyTorch {least} or newer, and PyTorch {version} is installed; upgrade PyTorch with "
            "`pip install --upgrade torch`, or with the command that pytorch.org gives for your GPU"
        )
    if missing := missing_names("torchring.wrap"):
        raise ImportError(
            f"torchring does not work with PyTorch {version}, which lacks torch.{missing[0]}; install a release that "
            "torchring was tested with: docs/guides/gpu.md names them under Versions"
        )
