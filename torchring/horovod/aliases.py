"""Makes `import horovod.torch` find torchring, in scripts that cannot be edited.

    horovod.torch, and what is in it        torchring.horovod, and what is in it: the same modules under two names
    horovod.common.exceptions, .elastic     torchring.horovod.exceptions, .elastic
    horovod.common.util, .process_sets      torchring.horovod.builds, .mpi_ops
    horovod.run, horovod.runner.run         torchring.horovod.runner.run
    horovod.spark                           torchring.spark.horovod
    sparkdl, sparkdl.horovod                torchring.spark, torchring.spark.horovod: Databricks' HorovodRunner

Nothing comes from a Horovod that is installed: torchring refuses to run under its launchers.

`python -m torchring.horovod` and `torchring run --horovod` put the folder `startup/` on PYTHONPATH. So every Python
process of the job installs the aliases as it starts, child processes included, except those started with -E, -I or -S.
sitecustomize.py in that folder runs this file, which therefore imports neither torch nor torchring.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

VERSION: Final = "0.28.1"  # of the Horovod whose API this is, for scripts that compare
_TORCH: Final = "horovod.torch"
_PACKAGES: Final = ("horovod", "horovod.common", "horovod.runner")
_OTHERS: Final = ("horovod.keras", "horovod.mxnet", "horovod.tensorflow")
_TARGETS: Final = {
    _TORCH: "torchring.horovod",
    "horovod.common.elastic": "torchring.horovod.elastic",
    "horovod.common.exceptions": "torchring.horovod.exceptions",
    "horovod.common.process_sets": "torchring.horovod.mpi_ops",
    "horovod.common.util": "torchring.horovod.builds",
    "horovod.spark": "torchring.spark.horovod",
    "sparkdl": "torchring.spark",
    "sparkdl.horovod": "torchring.spark.horovod",
}


def install() -> None:
    """Install the aliases in this process, once. What has been imported already stays as it is."""
    if not any(getattr(finder, "finds_torchring_for_horovod", False) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())


def uninstall() -> None:
    """Undo `install`. What has been imported stays, but not under the names of Horovod's."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("horovod", "sparkdl")]:
        del sys.modules[name]


class Finder(MetaPathFinder):
    """Finds the modules of the table above."""

    finds_torchring_for_horovod = True  # `isinstance` would not do: sitecustomize.py has a class of its own

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See importlib.abc.MetaPathFinder."""
        if fullname in _PACKAGES:
            return ModuleSpec(fullname, _Package(), is_package=True)
        name = _TARGETS.get(fullname)
        if fullname in _OTHERS:
            what = "torchring has horovod.torch only. Other frameworks need Horovod itself"
            raise ModuleNotFoundError(f"No module named {fullname!r}: {what}", name=fullname)
        if name is None and fullname.startswith(f"{_TORCH}."):
            name = _TARGETS[_TORCH] + fullname[len(_TORCH) :]
        return None if name is None else ModuleSpec(fullname, _Alias(name))


class _Alias(Loader):
    """Imports another module in place of the one that was asked for."""

    def __init__(self, target: str) -> None:
        self.target = target

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        try:
            # importlib hands out what it finds here, and not the module that it has made.
            sys.modules[name] = importlib.import_module(self.target)
        except ModuleNotFoundError as error:
            if error.name != self.target:
                raise
            raise ModuleNotFoundError(f"No module named {name!r}: torchring has none of that name", name=name) from None


class _Package(Loader):
    """A package whose code is here."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name == "horovod.common":
            return
        if name == "horovod":
            module.__version__ = VERSION  # type: ignore[attr-defined]

        def find(attribute: str) -> Any:
            if attribute != "run":
                raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
            return importlib.import_module("torchring.horovod.runner").run

        module.__getattr__ = find  # type: ignore[method-assign]
