"""`python -m torchring.doctor`: what `torchring doctor` starts as ranks."""

import faulthandler
import sys

from torchring.doctor import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    faulthandler.dump_traceback_later(10.0, exit=True)  # a library may hang at exit
    sys.exit(code)
