"""All else is in pyproject.toml.

An editable install leads to `editable/`, which holds nothing but a link to the package. Type checkers and editors can
follow that, and not an import hook, which setuptools would install; the folder above would offer `tests`, `kernels` and
`bench` to everybody's `import` as well.
"""

import os
import sys

from setuptools import setup

is_editable = "editable_wheel" in sys.argv and os.path.isdir("editable")  # a source distribution has no links
setup(package_dir={"": "editable"} if is_editable else {})
