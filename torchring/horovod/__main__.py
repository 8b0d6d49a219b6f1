"""Runs a script in which `import horovod.torch` finds torchring:

python -m torchring.horovod script.py arguments...
python -m torchring.horovod -m module arguments...
"""

import os
import sys
from collections.abc import Sequence
from typing import Final

from torchring.launch.horovodrun import with_aliases

_NAME: Final = "torchring.horovod"


def main(original: Sequence[str], arguments: Sequence[str]) -> int:
    """Replace this process by `python ARGUMENTS...`, so that nothing differs but the imports.

    `original` is the command line of this process, with the interpreter's own options. Returns an exit code if there is
    nothing to run.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__, end="", file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    *options, module = original[1 : len(original) - len(arguments)]
    flag = options.pop() if module == _NAME else module.removesuffix(_NAME)  # -m, or -Xm, or -mNAME
    if (flag := flag.removesuffix("m")) != "-":
        options.append(flag)
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *options, *arguments], with_aliases(os.environ))


if __name__ == "__main__":
    sys.exit(main(sys.orig_argv, sys.argv[1:]))
