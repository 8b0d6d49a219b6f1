"""Keeps Dynamo, the front end of torch.compile, out of torchring's code.

Dynamo breaks the graph at backward(), and then compiles every Python function that autograd calls. torchring's hooks
are such functions. They ask for addresses and wait for other ranks, and cannot be compiled.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_F = TypeVar("_F", bound=Callable[..., Any])


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
