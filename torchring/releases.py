"""Which releases of PyTorch torchring works with, and which releases of packages are installed.

2.11 is the oldest release with which torchring has run on a GPU. Before 2.12, `UntypedStorage._swap_data_ptr_` is
missing: gradients do not live in wire buffers there, and `shard=True` is an error.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from typing import Final

LEAST_TORCH: Final = (2, 11)
NEEDED: Final = ("torch", "numpy")


def require_packages() -> None:
    """Raise ModuleNotFoundError if a package is not installed without which nothing trains. Imports none of them."""
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            raise lacking(name)


def lacking(name: str) -> ModuleNotFoundError:
    """The error for a package of `NEEDED` that is not installed."""
    return ModuleNotFoundError(f"torchring needs {name}, which is not installed: pip install {name}", name=name)


def release_of(version: str) -> tuple[int, int]:
    """(major, minor) of a version such as "2.13.0+cu130" or "2.14.0a0+git1234567"."""
    found = re.match(r"(\d+)\.(\d+)", version)
    assert found is not None, version
    return int(found[1]), int(found[2])


def installed_version(package: str) -> str | None:
    """The version of an installed package; None if there is none, or if the package is run from its source."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_release(
    package: str, least: tuple[int, int], below: tuple[int, int], room: str, version: str | None = None
) -> None:
    """Raise ImportError if a framework's release is not among those that `room`, a part of torchring, was tested with.

    What a framework lets others extend changes between its minor releases, often without an error. `version` is for a
    framework that may be there without having been installed by pip.
    """
    version = version or installed_version(package)
    if version is None or not least <= release_of(version) < below:
        there = "is not installed" if version is None else f"{version} is installed"
        first, end = (".".join(map(str, release)) for release in (least, below))
        raise ImportError(
            f"torchring.{room} works with {package} {first} and newer, up to but not including {end}, and {package} "
            f"{there}; run `pip install 'torchring[{room}]'`, which installs a release that works"
        )


def check_torch(version: str) -> None:
    """Raise ImportError if this release of PyTorch is too old."""
    if release_of(version) < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        raise ImportError(
            f"torchring needs PyTorch {least} or newer, and PyTorch {version} is installed; upgrade PyTorch with "
            "`pip install --upgrade torch`, or with the command that pytorch.org gives for your GPU"
        )
