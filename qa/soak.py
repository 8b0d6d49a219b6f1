"""`make soak`: all pairs of features of ordinary and of elastic jobs, against one process.

    make soak SECONDS=600        the pairs in other combinations in each run
    make soak SECONDS=60 SEED=7  those of seed 7, as long as nothing else differs

Elastic jobs take half a minute, or a sixth of the time. `pairs.py` and `elastic_pairs.py` say more. A training that is
wrong is shrunk, printed and ends the run with exit code 1.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from collections.abc import Sequence
from typing import Any

from qa import elastic_pairs
from qa.pair_training import find_faults, not_refused
from qa.pairs import PAIRS, REFUSED, Pairs, Training, describe

_MOST_LISTED = 50  # pairs


def soak_pairs(seconds: float, first_seed: int) -> bool:
    """Train covering arrays for so long, and what is refused in turn; print the coverage. Returns whether all agree."""
    end = time.monotonic() + seconds
    number, trained, refused = first_seed, [], set()
    missing: list[Any] = []
    are_right = True
    while are_right and time.monotonic() < end:
        missing = missing or sorted(REFUSED, key=sorted)
        for training in PAIRS.covering(number):
            if time.monotonic() > end:
                break
            faults = find_faults([training])
            trained.append(training)
            if not faults and missing:
                ways = missing.pop()
                faults = not_refused([ways])
                refused |= {ways}
            elif faults:
                faults += ["shrunk:", *find_faults([PAIRS.shrunk(training, find_faults)])]
            if faults:
                print("\n".join(faults), flush=True)
                are_right = False
                break
        number += 1
    print(f"{len(refused)} of {len(REFUSED)} entries of the table of errors were refused as documented;")
    _print_coverage("ordinary", PAIRS, trained)
    return are_right


def soak_elastic_pairs(seconds: float, number: int) -> bool:
    """Run the elastic jobs of a covering array, but no longer than that. Returns whether all agree."""
    end = time.monotonic() + seconds
    trained: list[Training] = []
    for training in elastic_pairs.PAIRS.covering(number):
        if time.monotonic() > end:
            break
        trained.append(training)
        if faults := elastic_pairs.find_faults([training]):
            less = elastic_pairs.PAIRS.shrunk(training, elastic_pairs.find_faults)
            print("\n".join([*faults, "shrunk:", *elastic_pairs.find_faults([less])]), flush=True)
            return False
    _print_coverage("elastic", elastic_pairs.PAIRS, trained)
    return True


def _print_coverage(jobs: str, pairs: Pairs, trained: Sequence[Training]) -> None:
    left, num = pairs.uncovered(trained), len(pairs.all_pairs() - pairs.refused_pairs())
    print(f"{num - len(left)} of {num} pairs of {jobs} jobs that can meet were trained, in {len(trained)} trainings;")
    print(f"uncovered: {'; '.join(sorted(map(describe, left))[:_MOST_LISTED]) or 'none'}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    os.environ.setdefault("RES_OPTIONS", "timeout:1")  # as in conftest.py
    began = time.monotonic()
    if not soak_elastic_pairs(arguments.seconds / 6, arguments.seed):
        return 1
    return 0 if soak_pairs(began + arguments.seconds - time.monotonic(), arguments.seed) else 1


if __name__ == "__main__":
    sys.exit(main())
