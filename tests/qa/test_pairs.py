"""A part of all pairs in each run: `make soak` trains the rest, in other combinations each time. See `pairs.py`."""

import itertools

import pytest

from qa import elastic_pairs, pair_training
from qa.pair_training import find_faults, not_refused
from qa.pairs import PAIRS, REFUSED, Pairs, Ways, describe

# fmt: off
_PART = [  # every feature, and what is quick
    {"weights": "zero", "step": "scaler", "clip": "norm", "buffers": "average", "frozen": "thaws", "owned": "ignored",
     "hosts": "two", "shard": "yes"},
    {"skip": "one", "step": "closure", "optimizers": "two", "gradients": "listed", "wire": "fp16", "workers": "fork",
     "graph": "of batch"},
    {"weights": "samples", "accumulate": "2", "overlap": "thread", "groups": "added", "load": "copy"},
    {"data": "join", "local": "no_sync", "layers": "sparse", "buckets": "tiny", "copy": "pickle", "norm": "batch"},
    {"nonfinite": "skip", "norm": "sync", "forwards": "update_bn", "layers": "complex", "layout": "transposed",
     "kind": "momentum", "resume": "from one"},
    {"skip": "one", "step": "sam", "accumulate": "2", "optimizers": "two", "layers": "complex", "hosts": "two",
     "op": "sum"},
    {"api": "horovod", "accumulate": "2", "hook": "before wrap", "forward": "checkpointed", "collectives": "thread"},
    {"api": "process set", "optimizers": "two", "gradients": "flat", "copy": "model", "resume": "same ranks",
     "layers": "used twice"},
]
# fmt: on


@pytest.mark.parametrize("pairs", [PAIRS, elastic_pairs.PAIRS], ids=["ordinary", "elastic"])
def test_every_pair_is_trained_or_refused_or_has_a_reason(pairs: Pairs) -> None:
    plain = pairs.training_of(()).items()
    for ways, what in {**pairs.refused, **pairs.apart}.items():
        assert len({feature for feature, _ in ways}) == len(ways) <= 2
        assert all(what), describe(ways)
        assert not ways <= plain, f"{describe(ways)}: the first way of a feature goes with everything"
    assert not pairs.refused.keys() & pairs.apart.keys()
    trainings = pairs.covering(0)
    assert not pairs.uncovered(trainings)
    num_ways = [len(ways) for ways in pairs.features.values()]
    num_all = sum(a * b for a, b in itertools.combinations(num_ways, 2))
    assert num_all == len(pairs.all_pairs()) + len(pairs.apart)
    met = pairs.all_pairs() - pairs.uncovered(trainings) - pairs.refused_pairs()
    assert len(met) + len(pairs.refused_pairs()) + len(pairs.apart) == num_all
    missing = next(iter(met))
    assert all(PAIRS.is_possible(ways.items()) for ways in _PART)
    assert missing in pairs.uncovered([training for training in trainings if not missing <= training.items()])


@pytest.mark.grid
def test_pairs_agree_with_one_process() -> None:
    assert find_faults([PAIRS.training_of(ways.items()) for ways in _PART]) == []


def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    training = PAIRS.training_of({"weights": "samples"}.items())
    found = [(s, "digest", values) for s, (values, *_) in enumerate(pair_training.train_alone(training))]
    assert pair_training.compare(training, [found, found]) is None
    assert pair_training.compare(training, [found, [(s, "another", None) for s, *_ in found]]) == "ranks differ"
    assert "is off by" in str(pair_training.compare(PAIRS.training_of(()), [found, found]))  # the plain mean over ranks


@pytest.mark.grid
@pytest.mark.parametrize("ways", sorted(REFUSED, key=sorted), ids=describe)
def test_what_is_refused_has_its_error(ways: Ways) -> None:
    assert not_refused([ways]) == []


@pytest.mark.grid
@pytest.mark.timeout(1800)
def test_all_pairs_agree_with_one_process() -> None:
    assert [fault for training in PAIRS.covering(0) for fault in find_faults([training])] == []


# fmt: off
_ELASTIC_PART = [
    {"event": "returned from backward", "place": "first", "loop": "two backwards", "accumulate": "2",
     "optimizers": "two"},
    {"event": "resumed", "place": "first", "loop": "ahead", "skip": "some", "groups": "added", "kind": "adamw",
     "shard": "yes"},
]
# fmt: on


@pytest.mark.parametrize("ways", _ELASTIC_PART, ids=lambda ways: ways["event"])
def test_elastic_pairs_agree_with_one_process(ways: dict[str, str]) -> None:
    training = elastic_pairs.PAIRS.training_of({"shares": "unequal", "scaler": "grows", "clip": "norm", **ways}.items())
    assert elastic_pairs.find_faults([training]) == []


def test_the_comparison_of_elastic_jobs_can_fail() -> None:
    training = elastic_pairs.PAIRS.training_of(())
    right = elastic_pairs.train_alone(training)
    assert elastic_pairs.compare(training, [right, right]) is None
    assert elastic_pairs.compare(training, []) == elastic_pairs.compare(training, [right, right[:1]]) == "ranks differ"
    plain = elastic_pairs.PAIRS.training_of({("skip", "some")})
    assert "is off by" in str(elastic_pairs.compare(plain, [right, right]))
