"""Twenty seconds of `make chaos`. Its module says what happens, and what is looked at."""

import pytest

from qa.chaos import run


@pytest.mark.grid
def test_adversary_of_twenty_seconds() -> None:
    print(run(20.0, seed=3))
