"""Which releases of PyTorch torchring works with, and which releases of packages are installed.

2.11 is the oldest release with which torchring has run on a GPU. Before 2.12, `UntypedStorage._swap_data_ptr_` is
missing: gradients do not live in wire buffers there, and `shard=True` is an error.
"""

from __future__ import annotations

import importlib.metadata
import re
from typing import Final

LEAST_TORCH: Final = (2, 11)


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


def check_torch(version: str) -> None:
    """Raise ImportError if this release of PyTorch is too old."""
    if release_of(version) < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        raise ImportError(
            f"torchring needs PyTorch {least} or newer, and PyTorch {version} is installed; upgrade PyTorch with "
            "`pip install --upgrade torch`, or with the command that pytorch.org gives for your GPU"
        )
