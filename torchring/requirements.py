"""What has to be installed: for all of torchring, and for its parts that work within a framework."""

import importlib.util
from typing import Final

from torchring.releases import installed_version, release_of

NEEDED: Final = ("torch", "numpy")


def require_packages() -> None:
    """Raise ModuleNotFoundError if a package is not installed without which nothing trains. Imports none of them."""
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            raise lacking(name)


def lacking(name: str) -> ModuleNotFoundError:
    """The error for a package of `NEEDED` that is not installed."""
    return ModuleNotFoundError(f"torchring needs {name}, which is not installed: pip install {name}", name=name)


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
