"""Figures of one GPU against what they have to be, a line each.

    python -m qa.gpu.check kernels host     the figures of qa/gpu/check_kernels.py and check_host.py

Prints PASS or FAIL for each figure as it comes. The exit code is the number of figures that failed. A topic that raises
an error counts as one, and the next topic follows.
"""

import importlib
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Figure(NamedTuple):
    """A figure, and the most that it may be, or with `at_least` the least."""

    name: str
    value: float
    unit: str
    limit: float
    at_least: bool = False

    @property
    def passes(self) -> bool:
        """False for NaN."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        verdict, bound = "PASS" if self.passes else "FAIL", "least" if self.at_least else "most"
        return f"{verdict} {self.name}: {self.value:.4g} {self.unit} (at {bound} {self.limit:g})".replace("  ", " ")


def main(topics: Sequence[str]) -> int:
    num_failed = 0
    for topic in topics:
        try:
            figures: Iterator[Figure] = importlib.import_module(f"qa.gpu.check_{topic}").figures()
            for figure in figures:
                print(figure, flush=True)
                num_failed += not figure.passes
        except Exception as error:  # of any kind: the other topics still say what they have to
            traceback.print_exc()
            print(f"FAIL {topic}: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
            num_failed += 1
    return num_failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
