"""Imports Triton at the first launch: a process that only uses CPUs neither needs Triton nor waits for its import.

Importing Triton takes about 0.4 s, and fails where Triton is not installed. So kernel files import `tl` for type
checkers only, and decorate kernels with `lazy_jit` instead of `triton.jit`. At the first launch, `Kernel.jitted`
imports Triton, sets `tl`, and applies `triton.jit`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import Any

import torch

# Triton reads the variable once, when a kernel is decorated. Reading it once here keeps both answers equal.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Kernel:
    """A Triton kernel, or a function that kernels call. The first launch imports Triton and compiles the kernel."""

    def __init__(self, fn: Callable[..., Any], do_not_specialize: Sequence[str], uses: Sequence[Kernel]) -> None:
        self.fn = fn
        self.do_not_specialize = list(do_not_specialize)
        self.uses = tuple(uses)

    @cached_property
    def jitted(self) -> Any:
        """The `triton.JITFunction` (with TRITON_INTERPRET=1, the interpreted function)."""
        import triton
        import triton.language

        # Triton looks up names in a kernel's body, such as `tl` and called functions, in the globals of the file.
        names = self.fn.__globals__
        names["tl"] = triton.language
        names.update({helper.fn.__name__: helper.jitted for helper in self.uses})
        return triton.jit(self.fn, do_not_specialize=self.do_not_specialize)

    def launch(self, device: torch.device, programs: int, *args: Any, **options: Any) -> None:
        """Launch `programs` programs on the current stream of `device`; does not synchronise.

        Triton launches on the current device, so this method makes `device` current if another device is.
        """
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._run(programs, args, options)
        else:
            self._run(programs, args, options)

    def prepare(self, device: torch.device, programs: int, *args: Any, **options: Any) -> Callable[[], None]:
        """A function that launches with these arguments at each call, on the stream that is current then."""
        return partial(self.launch, device, programs, *args, **options)

    def _run(self, programs: int, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        # Without fusion, a product is rounded before it is added, as in torch.
        self.jitted[(programs,)](*args, enable_fp_fusion=False, **options)


def lazy_jit(
    *, do_not_specialize: Sequence[str] = (), uses: Sequence[Kernel] = ()
) -> Callable[[Callable[..., Any]], Kernel]:
    """`triton.jit`, applied at the first launch. Values of arguments in `do_not_specialize` cause no recompilation.

    uses: functions with this decorator that the body calls by their own names, usually imported from another file.
    """
    return lambda fn: Kernel(fn, do_not_specialize, uses)


def runs_on_triton(device: torch.device) -> bool:
    """True for CUDA (and ROCm) devices, and for CPU tensors when Triton interprets; otherwise torch does the work."""
    return device.type == "cuda" or (INTERPRETED and device.type == "cpu")


@cache
def triton_dtype(dtype: torch.dtype) -> Any:
    """torch.bfloat16 -> tl.bfloat16; both libraries use the same names."""
    import triton.language

    return getattr(triton.language, str(dtype).removeprefix("torch."))
