"""torch.compile around code that calls backward(): Dynamo, its compiler, keeps out of what torchring does there.

Dynamo breaks the graph at backward() and then looks at every Python function that autograd calls. It would compile the
hooks, which ask for addresses and wait for other ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_F = TypeVar("_F", bound=Callable[..., Any])


def run_eagerly(function: _F) -> _F:
    """A decorator: Dynamo runs `function`, and all that it calls, as it is.

    The same as torch.compiler.disable, whose wrapper takes 0.3 us a call, of 4 to 5 that a gradient's hook may take. A
    mark on the function's code takes nothing. PyTorch 2.6 cannot make one.
    """
    frames = torch._C._dynamo.eval_frame
    if not hasattr(frames, "set_code_exec_strategy"):
        return cast(_F, torch.compiler.disable(function))  # type: ignore[no-untyped-call]
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # where it would be inlined into a graph
    return function


def is_compiled_backward() -> bool:
    """Whether the caller's backward is one that compiled autograd has made a graph of."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "in_compiled_autograd_region", False))
