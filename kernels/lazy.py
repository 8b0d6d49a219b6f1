"""Imports Triton at the first launch: a process that only uses CPUs neither needs Triton nor waits for its import.

Importing Triton takes about 0.4 s, and fails where Triton is not installed. So kernel files import `tl` for type
checkers only, and decorate kernels with `lazy_jit` instead of `triton.jit`. At the first launch, `Kernel.jitted`
imports Triton, sets `tl`, and applies `triton.jit`.

Triton looks at every argument of every launch, to find the compiled kernel that fits. That takes several microseconds.
A kernel that is launched again and again with the same arguments is prepared once (`Kernel.prepare`). Later launches
call the compiled kernel as Triton's tutorial on fused softmax does: `compiled[grid](*arguments)`. Triton looks up the
current stream and calls the hooks of profilers in these launches, too. Read in Triton 3.4, 3.6 and 3.9.
"""

import inspect
import os
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import Any

import torch

# Triton reads the variable once, when a kernel is decorated. Reading it once here keeps both answers equal.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Kernel:
    """A Triton kernel, or a function that kernels call. The first launch imports Triton and compiles the kernel."""

    def __init__(self, fn: Callable[..., Any], do_not_specialize: Sequence[str], uses: "Sequence[Kernel]") -> None:
        self.fn = fn
        self.do_not_specialize = list(do_not_specialize)
        self.uses = tuple(uses)

    @cached_property
    def jitted(self) -> Any:
        """The `triton.JITFunction` (with TRITON_INTERPRET=1, the interpreted function)."""
        try:
            import triton
            import triton.language
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "torchring's kernels need Triton, which PyTorch's builds for GPUs bring along: pip install "
                "'torchring[gpu]'",
                name=error.name,
            ) from error

        # Triton looks up names in a kernel's body, such as `tl` and called functions, in the globals of the file.
        names = self.fn.__globals__
        names["tl"] = triton.language
        # A file that is imported after a launch finds what was jitted in place of a function of this decorator.
        names.update({helper.fn.__name__: getattr(helper, "jitted", helper) for helper in self.uses})
        return triton.jit(self.fn, do_not_specialize=self.do_not_specialize)

    def launch(self, programs: int, *args: Any, **options: Any) -> Any:
        """Launch `programs` programs on the current stream of the current device; does not synchronise.

        Returns the `triton.compiler.CompiledKernel`; None under the interpreter.
        """
        # Without fusion, a product is rounded before it is added, as in torch.
        return self.jitted[(programs,)](*args, enable_fp_fusion=False, **options)

    def prepare(self, device: torch.device, programs: int, *args: Any, **options: Any) -> Callable[[], None]:
        """What launches the kernel with these arguments, each time on the stream that is then current on `device`.

        Nothing is launched or compiled yet. Tensors are kept alive, and must keep their memory: `tensor.set_` or
        `tensor.data = ...` does not reach later launches. May be called from any thread.
        """
        if device.type == "cuda" and not INTERPRETED:
            return _PreparedLaunch(self, device, programs, args, options)
        return partial(self.launch, programs, *args, **options)


class _PreparedLaunch:
    """See `Kernel.prepare`. The first call launches by way of Triton, and keeps the compiled kernel for later calls."""

    __slots__ = ("_arguments", "_device", "_is_refused", "_kernel", "_launcher", "_values")

    def __init__(
        self, kernel: Kernel, device: torch.device, programs: int, args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self._kernel = kernel
        self._device = device
        self._arguments = programs, args, options
        self._launcher: Callable[..., None] | None = None
        self._values: list[Any] = []
        self._is_refused = False  # by the launcher: it is not what it was when this file was written

    def __call__(self) -> None:
        if torch.cuda.current_device() != self._device.index:
            with torch.cuda.device(self._device):
                self._launch()
        else:
            self._launch()

    def _launch(self) -> None:
        launcher = self._launcher
        if launcher is None:
            self._launch_by_triton()
            return
        try:
            launcher(*self._values)
        except (AttributeError, TypeError):  # raised while it parses the arguments, so nothing was launched
            self._launcher, self._is_refused = None, True
            self._launch_by_triton()

    def _launch_by_triton(self) -> None:
        programs, args, options = self._arguments
        compiled = self._kernel.launch(programs, *args, **options)
        if not self._is_refused:
            self._values = _values(self._kernel, args, options)
            self._launcher = _launcher(compiled, programs)


def _launcher(compiled: Any, programs: int) -> Callable[..., None] | None:
    """What launches a compiled kernel, given the kernel's arguments; None if only Triton itself can launch it."""
    from triton.compiler import CompiledKernel

    if not isinstance(compiled, CompiledKernel):  # a release of Triton that compiles in the background
        return None
    launcher: Callable[..., None] = compiled[programs, 1, 1]
    return launcher


def _values(kernel: Kernel, args: tuple[Any, ...], options: dict[str, Any]) -> list[Any]:
    """The values of all of the kernel's parameters, in order, as a launcher takes them: constexprs are included.

    An address takes the place of a tensor on the device: given a tensor, the launcher asks the driver about the
    tensor's address in every launch (Triton 3.4 and 3.6: `getPointer` in backends/nvidia/driver.py; 3.9:
    `extractPointer` in driver.c). Of pinned host memory the driver may know another address, so a tensor in host memory
    stays a tensor.
    """
    parameters = inspect.signature(kernel.fn)
    constants = {name: value for name, value in options.items() if name in parameters.parameters}
    bound = parameters.bind(*args, **constants)
    bound.apply_defaults()
    return [value.data_ptr() if getattr(value, "is_cuda", False) else value for value in bound.arguments.values()]


def lazy_jit(
    *, do_not_specialize: Sequence[str] = (), uses: Sequence[Kernel] = ()
) -> Callable[[Callable[..., Any]], Kernel]:
    """`triton.jit`, applied at the first launch. Values of arguments in `do_not_specialize` cause no recompilation.

    uses: functions with this decorator that the body calls by their own names, usually imported from another file.
    """
    return lambda fn: Kernel(fn, do_not_specialize, uses)


@cache
def triton_dtype(dtype: torch.dtype) -> Any:
    """torch.bfloat16 -> tl.bfloat16; both libraries use the same names."""
    import triton.language

    return getattr(triton.language, str(dtype).removeprefix("torch."))
