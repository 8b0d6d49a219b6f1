"""Microbenchmarks of hooks and kernels, which pytest runs: `torchring bench micro -k hooks`."""

import importlib.util
import sys
from pathlib import Path

if __name__ == "__main__":
    missing = [name for name in ("pytest", "pytest_benchmark") if not importlib.util.find_spec(name)]
    if missing:
        sys.exit(f"torchring bench micro needs {' and '.join(missing)}: pip install 'torchring[bench]'")
    import pytest
    import torch

    torch.set_num_threads(1)  # as a rank's
    sys.exit(pytest.main([str(Path(__file__).parent), *sys.argv[1:]]))
