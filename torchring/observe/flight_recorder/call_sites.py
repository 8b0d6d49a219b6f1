"""Where in the script a thread is, read from its stack by another thread. So the model needs no hook."""

import contextlib
import gc
import linecache
import os
import sys
import sysconfig
from collections.abc import Iterable
from itertools import accumulate, chain, islice, repeat, takewhile
from operator import attrgetter, methodcaller
from types import CodeType
from typing import Final

import torch

import torchring
from torchring.observer import Phase

_PACKAGE: Final = f"{os.path.dirname(torchring.__file__)}{os.sep}"  # as code objects name it, links and all
_TORCH: Final = f"{os.path.dirname(torch.__file__)}{os.sep}"
# torch.no_grad() and the like as decorators add a frame
_NO_SITES: Final = ("<", _PACKAGE, os.path.join(_TORCH, "utils", "_contextlib.py"))
_PATHS: Final = sysconfig.get_paths()
_LIBRARIES: Final = tuple(f"{folder}{os.sep}" for folder in {_PATHS["purelib"], _PATHS["platlib"]})
_STANDARD: Final = tuple(f"{folder}{os.sep}" for folder in {_PATHS["stdlib"], _PATHS["platstdlib"]})
_LONGEST_PATH: Final = 120  # so that line, function and caller have room
_LONGEST_LINE: Final = 60
_PHASE_OF: Final = {
    (os.path.join(_TORCH, "nn", "modules", "module.py"), "_call_impl"): Phase.FORWARD,
    (os.path.join(_TORCH, "autograd", "graph.py"), "_engine_run_backward"): Phase.BACKWARD,
    (os.path.join(_PACKAGE, "optimizer.py"), "step"): Phase.OPTIMIZER,
}


def call_site_of(thread: int) -> tuple[Phase, str]:
    """The phase that a thread is in, and its call site: "train.py:30 in main".

    The phase is INPUT outside of forward, backward and step(). The call site of a thread that has ended is empty.

    Names the innermost function outside of Python's library and of torchring. If that function belongs to a library,
    the text also names the function of the script that called it.
    """
    return _find(_calls(thread))


def line_of(thread: int) -> str:
    """The innermost line of the script that a thread is in: "train.py:30 (loss.item())". Empty if there is none."""
    for code, line in _calls(thread):
        if not _is_internal(code) and not _is_library(code):
            text = linecache.getline(code.co_filename, line).strip()
            text = text if len(text) <= _LONGEST_LINE else f"{text[: _LONGEST_LINE - 1]}…"
            return f"{_short(code.co_filename)}:{line}{f' ({text})' if text else ''}"
    return ""


def _calls(thread: int) -> list[tuple[CodeType, int]]:
    """The code and the line of each call that a thread is in, the innermost first.

    Who holds a frame keeps alive what its function has in local variables, after that function has returned. PyTorch,
    for one, relies on the end of such a variable while it compiles the parts of a model
    (torch/_dynamo/backends/distributed.py, FakeifyFirstAOTInvocationGuard). So no frame is held when another thread can
    run: one call into C code does all, and Python switches threads between two instructions of Python code only.
    """
    frames = map(methodcaller("get", thread), islice(iter(sys._current_frames, None), 1))
    # getattr(frame, "f_back"), and the same of the result, and so on, up to the None above the outermost frame
    stack = takewhile(bool, accumulate(chain(frames, repeat("f_back")), getattr))
    calls = map(attrgetter("f_code", "f_lineno"), stack)
    # Before 3.12, Python collects garbage whenever C code makes an object, and finalizers are Python code.
    if sys.version_info >= (3, 12) or not gc.isenabled():
        return list(calls)
    gc.disable()
    try:
        return list(calls)
    finally:
        gc.enable()


def _find(calls: Iterable[tuple[CodeType, int]]) -> tuple[Phase, str]:
    phase = Phase.INPUT
    inner = caller = ""
    for code, line in calls:
        found = _PHASE_OF.get((code.co_filename, code.co_name))
        # A forward may run inside backward (checkpointing), and both inside step(), which calls a closure.
        if found is not None and (phase == Phase.INPUT or (phase == Phase.FORWARD and found == Phase.BACKWARD)):
            phase = found
        if not caller and not _is_internal(code):
            text = f"{_short(code.co_filename)}:{line} in {code.co_name}"
            inner = inner or text
            if not _is_library(code):
                caller = text
    return phase, inner if caller in ("", inner) else f"{inner}, called from {caller}"


def _is_internal(code: CodeType) -> bool:
    """Whether a function is of Python's library, or of torchring, or a decorator of torch."""
    file = code.co_filename
    if file.startswith(_NO_SITES):
        return True
    return file.startswith(_STANDARD) and not _is_library(code)


def _is_library(code: CodeType) -> bool:
    file = code.co_filename
    return file.startswith((_TORCH, *_LIBRARIES)) or f"{os.sep}dist-packages{os.sep}" in file


def _short(file: str) -> str:
    """A path within a library, or below the working directory, where that is shorter."""
    folders = [os.path.dirname(_TORCH.rstrip(os.sep)) + os.sep, *_LIBRARIES]
    with contextlib.suppress(OSError):  # it was removed
        folders.append(f"{os.getcwd()}{os.sep}")
    file = next((file[len(folder) :] for folder in folders if file.startswith(folder)), file)
    return file if len(file) <= _LONGEST_PATH else f"…{file[-_LONGEST_PATH:]}"
