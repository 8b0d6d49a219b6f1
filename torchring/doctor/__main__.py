"""`python -m torchring.doctor`, and the script that `torchring doctor` starts as ranks."""

import os
import sys

if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
    del sys.path[0]  # started as a script: the modules of this folder are not top-level modules

from torchring.doctor import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
