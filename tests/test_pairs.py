"""A part of all pairs in each run: `make soak` trains the rest, in other combinations each time. See `pairs.py`."""

from __future__ import annotations

import itertools

import pair_training
import pytest
from pair_training import find_faults, not_refused
from pairs import APART, FEATURES, REFUSED, Ways, all_pairs, covering, describe, refused_pairs, training_of, uncovered

_PART = [  # every feature, and what is quick
    {"weights": "zero", "step": "scaler", "clip": "norm", "buffers": "average", "frozen": "thaws", "hosts": "two"},
    {"skip": "one", "step": "closure", "optimizers": "two", "gradients": "listed", "wire": "fp16", "workers": "fork"},
    {"weights": "samples", "accumulate": "2", "norm": "sync", "overlap": "thread", "groups": "added", "load": "copy"},
    {"data": "join", "local": "no_sync", "layers": "sparse", "buckets": "tiny", "copy": "pickle", "norm": "batch"},
    {"nonfinite": "skip", "layers": "complex", "layout": "transposed", "kind": "momentum", "resume": "from one"},
    {"api": "horovod", "accumulate": "2", "hook": "before wrap", "forward": "checkpointed", "collectives": "thread"},
    {"api": "process set", "optimizers": "two", "gradients": "flat", "copy": "model", "resume": "same ranks"},
]


def test_every_pair_is_trained_or_refused_or_has_a_reason() -> None:
    plain = training_of(()).items()
    for ways, what in {**REFUSED, **APART}.items():
        assert len({feature for feature, _ in ways}) == len(ways) <= 2
        assert all(what), describe(ways)
        assert not ways <= plain, f"{describe(ways)}: the first way of a feature goes with everything"
    assert not REFUSED.keys() & APART.keys()
    trainings = covering(0)
    assert not uncovered(trainings)
    num_ways = [len(ways) for ways in FEATURES.values()]
    num_all = sum(a * b for a, b in itertools.combinations(num_ways, 2))
    assert num_all == len(all_pairs()) + len(APART)
    met = all_pairs() - uncovered(trainings) - refused_pairs()
    assert len(met) + len(refused_pairs()) + len(APART) == num_all
    missing = next(iter(met))
    assert missing in uncovered([training for training in trainings if not missing <= training.items()])


def test_pairs_agree_with_one_process() -> None:
    assert find_faults([training_of(ways.items()) for ways in _PART]) == []


def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    training = training_of({"weights": "samples"}.items())
    found = [(s, "digest", values) for s, (values, *_) in enumerate(pair_training.train_alone(training))]
    assert pair_training.compare(training, [found, found]) is None
    assert pair_training.compare(training, [found, [(s, "another", None) for s, *_ in found]]) == "ranks differ"
    assert "is off by" in str(pair_training.compare(training_of(()), [found, found]))  # the plain mean over ranks


@pytest.mark.grid
@pytest.mark.parametrize("ways", sorted(REFUSED, key=sorted), ids=describe)
def test_what_is_refused_has_its_error(ways: Ways) -> None:
    assert not_refused([ways]) == []


@pytest.mark.grid
@pytest.mark.timeout(1800)
def test_all_pairs_agree_with_one_process() -> None:
    assert [fault for training in covering(0) for fault in find_faults([training])] == []
