"""`make soak`: random models, options and steps, on 1 to 4 ranks, and all pairs of features, against one process.

    make soak SECONDS=600        other cases in each run
    make soak SECONDS=60 SEED=7  those of seed 7, as long as nothing else differs

A third of the time is for pairs, after those of elastic jobs, which take half a minute. `soak_cases.py`, `pairs.py` and
`elastic_pairs.py` say more. A case that fails is shrunk, printed and ends
the run with exit code 1.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from qa import elastic_pairs
from qa.pair_training import find_faults, not_refused
from qa.pairs import PAIRS, REFUSED, Pairs, Training, describe
from qa.soak_cases import LAYERS, NUM_STEPS, Batch, Case, Part, Step, check

_HOSTS = {1: [(0,)], 2: [(0, 0), (0, 1)], 3: [(0, 0, 0), (0, 0, 1), (0, 1, 2)], 4: [(0, 0, 0, 0), (0, 0, 1, 1)]}
_MAX_MICROS = 3
_CASES_PER_BATCH = 5  # what a call to the ranks costs, a few cases share
_EXAMPLES_PER_ROUND = 100
_LONGEST = 3000  # characters of an error
_MOST_LISTED = 50  # pairs


@st.composite
def _parts(draw: Any, num_optimizers: int, num_ranks: int, is_loose: bool) -> tuple[Part, ...]:
    """A layer for each optimizer that each backward reaches, then any layers. is_loose: not all of the former."""
    dtypes = st.just("fp64")
    if draw(st.integers(0, 4)) == 4:
        dtypes = st.sampled_from(["fp64", "fp32", "bf16"])
    places = st.tuples(st.integers(0, num_ranks - 1), st.integers(0, NUM_STEPS - 1), st.integers(0, _MAX_MICROS - 1))
    absent = st.one_of(st.just(frozenset()), st.frozensets(places, max_size=12))
    never = (False,) * NUM_STEPS
    frozen = st.one_of(st.just(never), st.just(never), st.tuples(*[st.booleans()] * NUM_STEPS))
    parts = [
        Part("scale", owner, draw(dtypes), absent=draw(absent) if owner and is_loose else frozenset())
        for owner in range(num_optimizers)
    ]
    for _ in range(draw(st.integers(0, 6))):
        part = Part(
            draw(st.sampled_from([*LAYERS, "again"])),
            draw(st.integers(0, num_optimizers - 1)),
            draw(dtypes),
            draw(st.integers(0, len(parts) - 1)),
            draw(frozen),
            draw(absent),
        )
        parts.append(part)
    if any(part.dtype == "bf16" for part in parts):  # a norm of nearly equal values would magnify the rounding
        parts = [replace(part, kind="linear") if part.kind == "norm" else part for part in parts]
    return tuple(parts)


@st.composite
def _steps(
    draw: Any, num_ranks: int, accumulate: int, is_sum: bool, is_weighted: bool, most_skip: int, has_nan: bool
) -> tuple[Step, ...]:
    """Three steps, none of which does what is refused."""
    steps: list[Step] = []
    for s in range(NUM_STEPS):
        how = draw(st.sampled_from(["each", "inside", "collected", *([] if is_weighted else ["by hand"])]))
        most = _MAX_MICROS
        if how == "each" and (is_sum or (is_weighted and accumulate > 1)):
            most = accumulate  # a result of this step may not get another gradient
        num_micros = draw(st.integers(1, most))
        zero = draw(st.sampled_from(["none", "zeros", "model", "kept"]))
        may_accumulate = accumulate > 1 or how != "each"
        was_poisoned = s > 0 and steps[-1].poison is not None
        if zero == "kept" and (is_sum or was_poisoned or (is_weighted and may_accumulate)):
            zero = "none"
        adds_to_results = zero == "kept" or (how == "each" and num_micros > accumulate)
        # Where a mean over no samples at all is refused, a rank that does not skip has some.
        may_be_none = is_weighted and not (adds_to_results and most_skip)
        sizes = st.tuples(*[st.integers(0 if may_be_none else 1, 5)] * num_ranks)
        if adds_to_results:
            sizes = sizes.filter(any)
        samples = tuple(draw(sizes) for _ in range(num_micros))
        of = Step(samples, how, zero, is_one_graph=draw(st.booleans()), clips=draw(st.integers(0, 3)) == 3)
        probe = Case(0, (), (), (), options=(("accumulate", accumulate),))
        if most_skip and not probe.is_left_over(of):
            ranks = st.frozensets(st.integers(0, num_ranks - 1), max_size=most_skip)
            skips = [draw(st.one_of(st.just(frozenset()), ranks)) for _ in range(_MAX_MICROS)]
            of = Step(samples, how, zero, tuple(skips), of.is_one_graph, of.clips)
        if has_nan and draw(st.booleans()):
            of = Step(samples, how, zero, of.skips, of.is_one_graph, False, draw(st.integers(0, num_ranks - 1)))
        steps.append(of)
    return tuple(steps)


@st.composite
def cases(draw: Any, num_ranks: int, is_one_host: bool) -> Case:
    """A training of `num_ranks` ranks."""
    num_optimizers = draw(st.sampled_from([1, 1, 2, 3]))
    is_weighted, may_skip = draw(st.booleans()), draw(st.integers(0, 2)) == 2
    is_loose = not is_weighted and not may_skip
    is_sum = not is_weighted and draw(st.integers(0, 4)) == 4
    accumulate = draw(st.sampled_from([1, 1, 2, 3]))
    if is_loose and num_optimizers > 1:  # whether a backward counts would depend on whether it reaches the optimizer
        accumulate = 1
    parts = draw(_parts(num_optimizers, num_ranks, is_loose))
    options = {
        "op": "sum" if is_sum else "mean",
        "compression": draw(st.sampled_from([None, None, None, "bf16", *([] if is_weighted else ["fp16"])])),
        "bucket_mb": draw(st.sampled_from([None, 0, 50 / 2**20, 200 / 2**20, 0.01, 0.3])),
        "accumulate": accumulate,
        "algorithm": draw(
            st.sampled_from(["auto", *(["direct"] if is_one_host else []), "ring", "native", "hierarchical"])
        ),
        "overlap": draw(st.sampled_from(["auto", "inline", "thread"])),
        "on_nonfinite": draw(st.sampled_from(["raise", "skip", "ignore"])),
    }
    # A skip() stands for a backward of other ranks. If all skip, only the optimizer that was told to knows of it.
    most_skip = 0 if not may_skip else num_ranks if num_optimizers == 1 else num_ranks - 1
    steps = draw(_steps(num_ranks, accumulate, is_sum, is_weighted, most_skip, options["on_nonfinite"] == "skip"))
    is_sparse = [any(p.kind == "sparse" and p.owner == owner for p in parts) for owner in range(num_optimizers)]
    if any(is_sparse):  # PyTorch has no norm of sparse gradients
        steps = tuple(Step(s.samples, s.how, s.zero, s.skips, s.is_one_graph, False, s.poison) for s in steps)
    kinds = [draw(st.sampled_from(["sgd"] if sparse else ["sgd", "momentum", "adam"])) for sparse in is_sparse]
    return Case(
        draw(st.integers(0, 9)),
        parts,
        tuple(kinds),
        steps,
        draw(st.sampled_from([1.0, 0.25, 1000.0])) if is_weighted else None,
        draw(st.booleans()),
        tuple(options.items()),
    )


@st.composite
def batches(draw: Any, num_ranks: int | None = None, min_cases: int = 1) -> Batch:
    """Ranks, and the trainings that they run one after the other."""
    if num_ranks is None:
        num_ranks = draw(st.sampled_from([1, 2, 2, 2, 3, 3, 4]))
    hosts = draw(st.sampled_from(_HOSTS[num_ranks]))
    of_ranks = cases(num_ranks, len(set(hosts)) == 1)
    return Batch(hosts, tuple(draw(st.lists(of_ranks, min_size=min_cases, max_size=_CASES_PER_BATCH))))


COMMON = settings(deadline=None, database=None, report_multiple_bugs=False, suppress_health_check=list(HealthCheck))


def soak(seconds: float, first_seed: int) -> Counter[str]:
    """Check random batches for so long; returns how often there was what."""
    end = time.monotonic() + seconds
    counts: Counter[str] = Counter()
    number = first_seed
    failed: list[Batch] = []
    while time.monotonic() < end:

        @seed(number)
        @settings(COMMON, max_examples=_EXAMPLES_PER_ROUND, print_blob=False)
        @given(batches())
        def run(batch: Batch) -> None:
            if failed or time.monotonic() < end:  # what has failed is shrunk, however late
                try:
                    check(batch, counts)
                except AssertionError as error:
                    if not failed:
                        print(f"{str(error)[:_LONGEST]}\n{batch}\nhas failed, and is being shrunk", flush=True)
                    failed.append(batch)
                    raise

        run()
        number += 1
        print(f"{counts['cases']} cases, {max(0.0, end - time.monotonic()):.0f} s left", flush=True)
    return counts


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
    try:
        began = time.monotonic()
        if not soak_elastic_pairs(arguments.seconds / 6, arguments.seed):
            return 1
        if not soak_pairs(began + arguments.seconds / 3 - time.monotonic(), arguments.seed):
            return 1
        counts = soak(arguments.seconds * 2 / 3, arguments.seed)
    except Exception as error:  # hypothesis has errors of its own: a case failed once, and then passed
        print("\n".join([*getattr(error, "__notes__", [])[:1], str(error)[:_LONGEST]]))
        return 1
    total = counts.pop("cases", 0)
    print(f"{total} cases agree with one process. How many had:")
    print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
