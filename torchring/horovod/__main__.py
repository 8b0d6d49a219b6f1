"""Runs a script in which `import horovod.torch` finds torchring:

python -m torchring.horovod script.py arguments...
python -m torchring.horovod -m module arguments...
"""

import os
import subprocess
import sys
from collections.abc import Sequence

from torchring.launch.horovodrun import with_aliases


def main(arguments: Sequence[str]) -> int:
    """Replace this process by `python ARGUMENTS...`, so that nothing differs but the imports.

    Returns an exit code if there is nothing to run.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__, end="", file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    options += ["-u"] * getattr(sys.stdout, "write_through", False)  # which those lack
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *options, *arguments], with_aliases(os.environ))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
