"""`make soak`: all pairs of features of ordinary and of elastic jobs, against one process.

    make soak SECONDS=600        the pairs in other combinations in each run
    make soak SECONDS=60 SEED=7  those of seed 7, as long as nothing else differs

Elastic jobs take half a minute, or a sixth of the time. `pairs.py` and `elastic_pairs.py` say more. A training that is
wrong is shrunk, printed and ends the run with exit code 1.
"""

import argparse
import itertools
import os
import secrets
import sys
import time
from collections.abc import Callable

from qa import elastic_pairs
from qa.pair_training import find_faults, not_refused
from qa.pairs import PAIRS, Pairs, Training, describe

_MOST_LISTED = 50  # pairs


def soak(jobs: str, pairs: Pairs, find_faults: Callable[..., list[str]], seconds: float, number: int) -> bool:
    """Train covering arrays for so long, and what is refused in turn; print the coverage. Returns whether all agree."""
    end = time.monotonic() + seconds
    refused = sorted(pairs.refused, key=sorted)
    trained: list[Training] = []
    faults: list[str] = []
    for training in itertools.chain.from_iterable(map(pairs.covering, itertools.count(number))):
        if faults or time.monotonic() > end:
            break
        trained.append(training)
        if faults := find_faults([training]):
            faults += ["shrunk:", *find_faults([pairs.shrunk(training, find_faults)])]
        elif len(trained) <= len(refused):
            faults = not_refused([refused[-len(trained)]])
    left, num = pairs.uncovered(trained), len(pairs.all_pairs() - pairs.refused_pairs())
    print(*faults, sep="\n")
    if refused:
        seen = min(len(trained), len(refused)) - bool(faults)
        print(f"{seen} of {len(refused)} entries of the table of errors were refused as documented;")
    print(f"{num - len(left)} of {num} pairs of {jobs} jobs that can meet were trained, in {len(trained)} trainings;")
    print(f"uncovered: {'; '.join(sorted(map(describe, left))[:_MOST_LISTED]) or 'none'}", flush=True)
    return not faults


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    os.environ.setdefault("RES_OPTIONS", "timeout:1")  # as in conftest.py
    began = time.monotonic()
    if not soak("elastic", elastic_pairs.PAIRS, elastic_pairs.find_faults, arguments.seconds / 6, arguments.seed):
        return 1
    left = began + arguments.seconds - time.monotonic()
    return 0 if soak("ordinary", PAIRS, find_faults, left, arguments.seed) else 1


if __name__ == "__main__":
    sys.exit(main())
