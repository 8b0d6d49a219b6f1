"""torch.compile: cuts the graphs of models that train data-parallel, and keeps Dynamo out of torchring's code.

AOTAutograd, a part of torch.compile, makes one autograd node of the backward of a graph. All gradients of the graph
arrive when that node has ended. So the gradients of a model that is one graph arrive at the end of backward, when
nothing is left that could hide communication. `compile` cuts the graph into parts.

Dynamo, the front end of torch.compile, breaks the graph at backward(), and then compiles every Python function that
autograd calls. torchring's hooks are such functions. They ask for addresses and wait for other ranks, and cannot be
compiled.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast, overload

import torch

_F = TypeVar("_F", bound=Callable[..., Any])
_MIB: Final = 1 << 20
_has_cut = False  # whether `compile` was called
_FIRST_BYTES: Final = 1 << 20  # the size of torchring's first bucket, and of DistributedDataParallel's
# What stands between these functions in a graph is inside torch.func or torch.inference_mode, and stays in one part.
_BEGIN: Final = (
    "_grad_increment_nesting", "_jvp_increment_nesting", "_vmap_increment_nesting", "_enter_dual_level",
    "_enter_inference_mode",
)  # fmt: skip
_END: Final = (
    "_grad_decrement_nesting", "_jvp_decrement_nesting", "_vmap_decrement_nesting", "_exit_dual_level",
    "_exit_inference_mode",
)  # fmt: skip
_GRAD: Final = ("_autograd_grad", "grad")  # stay in one part with the graph through which they go back


@overload
def compile(model: _F, *, bucket_mb: float = ..., backend: str | Callable[..., Any] = ..., **options: Any) -> _F: ...
@overload
def compile(
    model: None = None, *, bucket_mb: float = ..., backend: str | Callable[..., Any] = ..., **options: Any
) -> Callable[[_F], _F]: ...
def compile(
    model: Any = None, *, bucket_mb: float = 25.0, backend: str | Callable[..., Any] = "inductor", **options: Any
) -> Any:
    """Like `torch.compile`, for a model that trains data-parallel: gradients arrive while backward still computes.

    With `torch.compile` all gradients of a model arrive at the end of backward, so no communication is hidden.
    `torchring.compile` cuts the graph of the model into parts, and compiles each part. Gradients arrive part by part.
    No kernel is fused across a cut. PyTorch compiles the model of a `DistributedDataParallel` in the same way; the
    class that cuts is PyTorch's `DDPOptimizer` (torch/_dynamo/backends/distributed.py). Not collective.

    Args:
        model: a module or a function. It may be compiled before or after `wrap`. None: returns a decorator.
        bucket_mb: size of a part: MiB of parameters, in the dtype of the parameters. The last part of the model, whose
            gradients arrive first, has 1 MiB.
        backend: the name of a backend of `torch.compile`, or a function. It compiles the parts.
        **options: other arguments of `torch.compile`: mode, options, fullgraph, dynamic, disable.

    Returns:
        What `torch.compile` returns.

    Raises:
        ValueError: `bucket_mb` is not a size greater than 0.
        RuntimeError: `mode` or `options` are none of `torch.compile`.
    """
    if not isinstance(bucket_mb, (int, float)) or not 0 < bucket_mb < float("inf"):
        raise ValueError(f"bucket_mb must be a size in MiB greater than 0, got {bucket_mb!r}")
    if model is None:
        return functools.partial(compile, bucket_mb=bucket_mb, backend=backend, **options)
    global _has_cut
    _has_cut = True
    if backend == "inductor":
        mode, given = options.pop("mode", None), options.pop("options", None)
        if mode is not None and given is not None:
            raise RuntimeError("torch.compile takes either mode or options")
        # This is what torch.compile makes of these arguments. It raises RuntimeError for those that do not exist.
        inductor: Any = torch._TorchCompileInductorWrapper
        backend = inductor(mode or "default", given, options.get("dynamic"))
    return torch.compile(model, backend=_InParts(int(bucket_mb * _MIB), backend), **options)


@dataclass(frozen=True)
class _InParts:
    """A backend of torch.compile. Two that are equal can use the same compiled graphs.

    Attributes:
        num_bytes: of the parameters of a part.
        backend: compiles the parts.
    """

    num_bytes: int
    backend: str | Callable[..., Any]

    def __call__(self, graph: Any, inputs: Any, **arguments: Any) -> Callable[..., Any]:
        """Compile a graph. `arguments`: mode and options of torch.compile, for other backends than Inductor."""
        from torch._dynamo.backends import distributed

        # PyTorch compiles the backwards of the parts as if they ran from the last part to the first, and none was left
        # out, as the backward of an output that the loss does not use. Otherwise a backward is compiled with what is
        # known of another part, and could reuse memory that is still needed. PyTorch 2.8 always takes the last part for
        # the current one (pytorch/pytorch#160745). Whether memory may be reused is asked again in each backward: the
        # setting holds for good.
        torch._functorch.config.donated_buffer = False
        lookup = functools.partial(torch._dynamo.lookup_backend(self.backend), **arguments)
        has_begun = False

        def compile_part(part: Any, inputs: Any) -> Callable[..., Any]:
            nonlocal has_begun
            has_begun = True
            return cast(Callable[..., Any], lookup(part, inputs))

        optimizer = distributed.DDPOptimizer(self.num_bytes, compile_part, min(_FIRST_BYTES, self.num_bytes))
        try:
            with _cut_in_order():
                return cast(Callable[..., Any], optimizer.compile_fn(graph, inputs))
        except NotImplementedError as error:  # some releases of PyTorch cannot cut a graph with higher-order operators
            if has_begun:  # this is an error of the backend
                raise
            warnings.warn(f"torchring.compile compiles this graph as a whole: {error}", RuntimeWarning, stacklevel=2)
            return compile_part(graph, inputs)


@contextlib.contextmanager
def _cut_in_order() -> Iterator[None]:
    """Inside, PyTorch's DDPOptimizer cuts a graph as `_cut` does. Dynamo compiles in one thread at a time."""
    passes = importlib.import_module("torch.fx.passes.split_module")
    split = passes.split_module
    passes.split_module = functools.partial(_cut, split)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        passes.split_module = split  # type: ignore[attr-defined]


def _cut(split: Callable[..., Any], graph: Any, root: Any, part_of: Callable[[Any], int], **options: Any) -> Any:
    """Cut a graph into parts that run in the order of the graph, and hold each call of torch.func as a whole.

    `split` alone knows no order between a part that writes to a parameter or a buffer, and one that reads the value.

    Args:
        split: PyTorch's split_module.
        graph: a GraphModule.
        root: passed to `split`.
        part_of: the part of a node; does not decrease from node to node.
        **options: passed to `split`.
    """
    position = {node: i for i, node in enumerate(graph.graph.nodes)}
    parts: dict[Any, int] = {}
    depth = part = 0
    last = -1  # the node to which the part has to reach
    for node, i in position.items():
        if node.op in ("placeholder", "output"):
            continue
        is_item = _name(node) == "getitem" and parts.get(node.args[0]) == part  # of a tuple; a part returns tensors
        if depth == 0 and i > last and not is_item:
            part = part_of(node)
        depth += (_name(node) in _BEGIN) - (_name(node) in _END)
        last = max([last, *(position[user] for user in node.users if _name(user) in _GRAD)])
        parts[node] = part
    return split(graph, root, parts.__getitem__, **{**options, "keep_original_order": True})


def _name(node: Any) -> str:
    return getattr(node.target, "__name__", "")


def run_eagerly(function: _F) -> _F:
    """A decorator: Dynamo does not compile `function`, nor what `function` calls.

    Does what torch.compiler.disable does. That wrapper takes 0.3 us a call, and a gradient's hook may take 4 to 5 us. A
    mark on the function's code takes no time. The mark is set by private functions of PyTorch's, which a later release
    may lack.
    """
    frames = torch._C._dynamo.eval_frame
    if not hasattr(frames, "set_code_exec_strategy"):
        return cast(_F, torch.compiler.disable(function))  # type: ignore[no-untyped-call]
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # where it would be inlined into a graph
    return function


def has_compiled_whole() -> bool:
    """Whether torch.compile has compiled something in this process, and `compile` was not asked for."""
    module = sys.modules.get("torch._dynamo.utils")
    return not _has_cut and module is not None and bool(module.counters.get("stats", {}).get("unique_graphs"))


def is_compiled_backward() -> bool:
    """Whether compiled autograd runs the current backward."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "in_compiled_autograd_region", False))
