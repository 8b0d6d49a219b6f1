"""`python -m torchring.doctor`, and the script that `torchring doctor` starts as ranks."""

import faulthandler
import os
import sys

if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
    del sys.path[0]  # started as a script: the modules of this folder are not top-level modules

from torchring.doctor import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    faulthandler.dump_traceback_later(10.0, exit=True)  # a library may hang at exit
    sys.exit(code)
