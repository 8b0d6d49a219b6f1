"""Imported where TRITON_INTERPRET=1: has Triton put its interpreter's functions into `triton.language` only once.

Triton does so anew, and looks at every name there, whenever a program calls a function that is no kernel: that is half
of the time that a small kernel takes. In such a process nothing but kernels uses these names.
"""

from __future__ import annotations

import types
from typing import Any

import triton.language
from triton.runtime import interpreter

# What the files of kernels know the language as, and those of Triton's own functions.
_names = {"tl": triton.language, "core": triton.language.core}
_patch: Any = interpreter._patch_lang
_patch(types.FunctionType((lambda: None).__code__, _names))
vars(interpreter)["_patch_lang"] = lambda fn: interpreter._LangPatchScope()  # with nothing to take back
