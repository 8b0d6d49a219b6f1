"""A backend for torch.compile that cuts the graph of a model where buckets end.

One graph for the whole model computes all gradients in one piece, and they arrive when backward is over. With several
graphs they arrive graph by graph, so that communication goes on beside the rest of backward. PyTorch's DDPOptimizer
does the cutting, as it does for DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchring.default_world import is_initialized, size
from torchring.gradients.plan import BUCKET_MB, FIRST_BUCKET_BYTES
from torchring.releases import missing_names

Backend = Callable[..., Callable[..., Any]]


def compile_backend(inner: str | Backend = "inductor", *, bucket_mb: float = BUCKET_MB) -> Backend:
    """A backend for `torch.compile`, with which the gradients of a compiled model arrive bucket by bucket.

        model = torch.compile(model, backend=torchring.compile_backend())

    The graph is cut by the sizes of parameters, from the last layer to the first. In a world of one rank it is left
    whole.

    Args:
        inner: compiles each part: the name of a backend, or a function as `torch.compile` takes it. It gets the `mode`
            and the `options` that `torch.compile` was given.
        bucket_mb: parameters of a part, in MiB. Pass what `torchring.wrap` gets as `bucket_mb`.

    Raises:
        ValueError: `bucket_mb` is not positive.
        RuntimeError: PyTorch has no backend of that name.
        ImportError: this release of PyTorch cannot cut graphs.
    """
    if missing := missing_names("torchring.compile_backend"):
        raise ImportError(f"torchring.compile_backend needs torch.{missing[0]}, which this release of PyTorch lacks")
    from torch._dynamo.backends.distributed import DDPOptimizer
    from torch._dynamo.backends.registry import lookup_backend

    if not bucket_mb > 0:
        raise ValueError(f"bucket_mb must be positive, got {bucket_mb!r}")
    num_bytes = int(bucket_mb * 2**20)
    found: Any = lookup_backend(inner)

    def torchring_backend(
        graph: torch.fx.GraphModule,
        inputs: list[torch.Tensor],
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Any:
        part, kept = found, {name: given for name, given in (("mode", mode), ("options", options)) if given}
        if kept and inner == "inductor":  # whose function takes neither
            part, kept = torch._TorchCompileInductorWrapper(mode, options, None), {}  # type: ignore[no-untyped-call]
        if is_initialized() and size() == 1:
            return part(graph, inputs, **kept)
        return DDPOptimizer(num_bytes, part, min(FIRST_BUCKET_BYTES, num_bytes)).compile_fn(graph, inputs, **kept)

    return torchring_backend
