"""`python -m torchring.doctor`, and the script that `torchring doctor` has `torchring run` start."""

import os
import sys

if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
    del sys.path[0]  # started as a script: this folder's modules are no top-level ones

from torchring.doctor import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
