"""A GPU that is not here: Triton compiles for it, and what was to be launched is noted."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

DEVICE = torch.device("cuda", 0)


class OnDevice:
    """As much of a tensor on a GPU as Triton and those who prepare launches look at."""

    def __init__(
        self, dtype: torch.dtype = torch.float32, numel: int = 1, device: torch.device = DEVICE, address: int = 4096
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.is_cuda = device.type == "cuda"
        self.numel = lambda: numel
        self.data_ptr = lambda: address

    def view(self, dtype: torch.dtype) -> "OnDevice":
        return OnDevice(dtype)

    def dim(self) -> int:
        return 1

    def is_contiguous(self) -> bool:
        return True

    def is_pinned(self) -> bool:
        return True


class Driver:
    """A driver that compiles for a GPU, launches nothing, and notes what it was to launch."""

    def __init__(self, gpu: str = "sm_90") -> None:
        self.target = GPUTarget("cuda", int(gpu[3:]), 32) if gpu.startswith("sm_") else GPUTarget("hip", gpu, 64)
        self.stream = 7
        self.launched: list[tuple[Any, ...]] = []
        self.refuses = False
        self.utils = SimpleNamespace(
            load_binary=lambda *arguments: (1, 2, 32, 0, 1024),
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": 232448},
        )

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(*arguments: Any) -> None:
            x, y, z, stream, function, packed, metadata, enter, leave, *values = arguments
            if self.refuses and not any(isinstance(value, OnDevice) for value in values):
                raise TypeError("function takes exactly 3 arguments")
            if enter is not None:
                enter(metadata)
            self.launched.append((x, y, z, stream, function, packed, leave, *values))

        return launch


@contextmanager
def driver_of(gpu: str) -> Iterator[Driver]:
    """As if there were that GPU, and torch were built for it."""
    fake, before = Driver(gpu), dict(vars(driver))
    driver.set_active(fake)
    try:
        with (
            mock.patch("torch.version.hip", None if gpu.startswith("sm_") else "6.4"),
            mock.patch("torch.cuda.current_device", return_value=0),
            mock.patch(
                "torch.cuda.get_device_capability",
                return_value=divmod(int(gpu[3:]) if gpu.startswith("sm_") else 0, 10),
            ),
        ):
            yield fake
    finally:
        vars(driver).clear()
        vars(driver).update(before)
