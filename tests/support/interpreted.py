"""Imported where TRITON_INTERPRET=1: makes interpreted kernels cheaper, and changes nothing that they compute.

Triton puts its interpreter's functions into `triton.language` anew, and looks at every name there, whenever a program
calls a function that is no kernel: that is half of the time that a small kernel takes. Here it does so once. In such a
process nothing but kernels uses these names.
"""

import threading
import time
import types
from typing import Any

import triton.language
from triton.runtime import interpreter

# What the files of kernels know the language as, and those of Triton's own functions.
_names = {"tl": triton.language, "core": triton.language.core}
_patch: Any = interpreter._patch_lang


_before = threading.local()


def _look_patiently(words: Any, *args: Any, **options: Any) -> Any:
    """A kernel that sees again what it saw before leaves the core to whoever is to send a signal."""
    seen = _look(words, *args, **options)
    if options.get("sem") == "acquire":
        now = (words.handle.data.flat[0], seen.handle.data.tobytes())
        if now == getattr(_before, "now", None):
            time.sleep(3e-4)
        _before.now = now
    return seen


if hasattr(interpreter, "_LangPatchScope"):  # other versions of Triton are left as they are
    _patch(types.FunctionType((lambda: None).__code__, _names))
    _look: Any = triton.language.atomic_or
    vars(triton.language)["atomic_or"] = _look_patiently
    vars(interpreter)["_patch_lang"] = lambda fn: interpreter._LangPatchScope()  # which has nothing to take back
