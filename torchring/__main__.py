"""The `torchring` command, also as `python -m torchring`."""

import os
import signal
import sys
from importlib.machinery import PathFinder


def main() -> int:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during an import would print its traceback
    _open_closed_streams()
    from torchring.cli import main as command
    from torchring.requirements import NEEDED, lacking

    try:
        return command()
    except ModuleNotFoundError as error:
        if error.name not in NEEDED:
            raise
        print(lacking(error.name), file=sys.stderr)
        return 2


def _open_closed_streams() -> None:
    """A shell closes streams by `>&-`. The next files that are opened would take their numbers, and get the output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115


def _lead_here() -> None:
    """In a checkout that is not installed, processes that `python -m torchring` starts find the package there, too."""
    checkout, *others = sys.path
    if PathFinder.find_spec("torchring", others) is None:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [checkout, os.environ.get("PYTHONPATH")]))


if __name__ == "__main__":
    _lead_here()
    sys.exit(main())
