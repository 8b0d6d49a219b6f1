"""`python -m torchring.doctor`: what `torchring doctor` starts as ranks."""

import sys

from torchring.doctor import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
