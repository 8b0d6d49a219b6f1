"""Imported where TRITON_INTERPRET=1: makes interpreted kernels cheaper, and changes nothing that they compute.

Triton puts its interpreter's functions into `triton.language` anew, and looks at every name there, whenever a program
calls a function that is no kernel: that is half of the time that a small kernel takes. Here it does so once. In such a
process nothing but kernels uses these names.
"""

from __future__ import annotations

import time
import types
from typing import Any

import triton.language
from triton.runtime import interpreter

# What the files of kernels know the language as, and those of Triton's own functions.
_names = {"tl": triton.language, "core": triton.language.core}
_patch: Any = interpreter._patch_lang


def _exchange_patiently(*args: Any, **options: Any) -> Any:
    """A kernel that looks for a signal in vain leaves the core to whoever is to send it."""
    taken = _exchange(*args, **options)
    if options.get("sem") == "acquire" and not taken.handle.data.any():
        time.sleep(3e-4)
    return taken


if hasattr(interpreter, "_LangPatchScope"):  # other versions of Triton are left as they are
    _patch(types.FunctionType((lambda: None).__code__, _names))
    _exchange: Any = triton.language.atomic_xchg
    vars(triton.language)["atomic_xchg"] = _exchange_patiently
    vars(interpreter)["_patch_lang"] = lambda fn: interpreter._LangPatchScope()  # which has nothing to take back
