"""The `torchring` command, also as `python -m torchring`."""

import signal
import sys


def main() -> int:
    """Entry point; returns the exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during an import would print its traceback
    from torchring.cli import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
