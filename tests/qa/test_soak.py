"""A few seconds of `make soak`: the same random trainings in each run. And the comparison can fail."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from hypothesis import given, settings

from qa import soak_cases
from qa.soak import COMMON, batches
from qa.soak_cases import Batch, Case, Part, Step, check

_CASES_PER_BATCH = 4  # at least


@pytest.mark.grid
@pytest.mark.parametrize("ranks_and_batches", [(1, 2), (2, 4), (3, 2), (4, 1)])
def test_random_trainings_agree_with_one_process(ranks_and_batches: tuple[int, int]) -> None:
    num_ranks, num_batches = ranks_and_batches
    counts: Counter[str] = Counter()

    @settings(COMMON, max_examples=num_batches, derandomize=True)
    @given(batches(num_ranks, min_cases=_CASES_PER_BATCH))
    def run(batch: Batch) -> None:
        check(batch, counts)

    run()
    print(counts)
    assert counts["cases"] >= num_batches * _CASES_PER_BATCH
    if num_ranks == 2:
        assert {"weights", "several backwards", "several optimizers", "synchronize()"} <= counts.keys()


_CASE = Case(
    seed=1,
    parts=(Part("scale"), Part("linear"), Part("words")),
    optimizers=("adam",),
    steps=(Step(((1, 4), (2, 0))), Step(((3, 5),), zero="zeros"), Step(((5, 2),), skips=(frozenset({0}),) * 3)),
    unit=1.0,
    options=(("op", "mean"), ("accumulate", 1)),
)


def test_a_case_of_every_layer_agrees() -> None:
    parts = (Part("scale"), *(Part(kind, of=1) for kind in soak_cases.LAYERS), Part("again", of=1))
    check(Batch((0, 0), (dataclasses.replace(_CASE, parts=parts, optimizers=("sgd",)),)))


@pytest.mark.parametrize("what", ["a weight", "a gradient", "a step"])
def test_the_comparison_can_fail(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch((0, 0), (_CASE,))
    check(batch)
    if what == "a weight":
        monkeypatch.setattr(soak_cases, "_weight", lambda case, of, rank, micro: 1.0)
    elif what == "a gradient":
        monkeypatch.setattr(torch.autograd, "grad", lambda loss, parameters, **_: [None for _ in parameters])
    else:
        monkeypatch.setattr(torch.optim.Adam, "step", lambda *_: None)
    with pytest.raises(AssertionError, match="case 0, step 0, parameter"):
        check(batch)
