"""Installs the aliases of aliases.py as Python starts, then runs the sitecustomize that this one hides, if any."""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location

HERE = os.path.dirname(os.path.abspath(__file__))


def install_aliases() -> None:
    """Run aliases.py as a module of its own: importing it as part of its package would import torch."""
    spec = spec_from_file_location("_torchring_horovod_aliases", os.path.join(os.path.dirname(HERE), "aliases.py"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.install()


def run_next() -> None:
    """Run the sitecustomize that Python would have found without this folder, under that name."""
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != HERE]
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":  # mypy and others that look at all modules import it under another name
    install_aliases()
    run_next()
