"""All pairs of features: single features are right, so what is left to go wrong is that two of them meet.

`FEATURES` lists what a script may do, each in a few ways. The first way is to do nothing special. `covering` makes some
trainings in which every pair of ways meets that can meet (a covering array, by allpairspy). `pair_training.py` runs a
training on ranks and in one process. `REFUSED` says what torchring refuses, and by which error. `APART` says which
pairs cannot meet, or have no result that is right, and why. `elastic_pairs.py` has the same for elastic jobs.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from allpairspy import AllPairs

Training: TypeAlias = "Mapping[str, str]"  # a way for each feature
Way: TypeAlias = tuple[str, str]  # a feature, and a way of it
Ways: TypeAlias = frozenset[Way]  # two; one, of a way that is refused beside anything

FEATURES: Final[Mapping[str, tuple[str, ...]]] = {
    # what counts in a mean
    "weights": ("none", "samples", "zero"),
    "skip": ("none", "one", "with forward"),
    "data": ("even", "join"),
    # when gradients are reduced
    "accumulate": ("1", "2"),
    "local": ("none", "no_sync", "synchronize"),
    "step": ("plain", "closure", "scaler", "sam"),
    "clip": ("none", "norm"),
    "optimizers": ("one", "two"),
    "owned": ("all", "ignored", "forgotten", "replaced"),
    "nonfinite": ("raise", "skip"),
    # the model
    "norm": ("none", "batch", "sync"),
    "buffers": ("none", "counter", "average", "own"),
    "forwards": ("stepped", "update_bn"),
    "layers": ("dense", "sparse", "complex", "used twice"),
    "graph": ("same", "of batch"),  # which layers a backward reaches: on each rank and micro-step, others
    "frozen": ("none", "thaws", "freezes"),
    "groups": ("same", "added"),
    "forward": ("plain", "checkpointed", "compiled"),
    # how gradients travel
    "op": ("mean", "sum"),
    "wire": ("own", "fp16", "bf16"),
    "buckets": ("default", "tiny"),
    "algorithm": ("auto", "ring", "native", "hierarchical"),
    "overlap": ("auto", "thread"),
    "hosts": ("one", "two"),
    # what the script does with tensors
    "gradients": ("none", "zeros", "model", "flat", "listed"),
    "layout": ("same", "transposed"),
    "load": ("none", "copy"),
    "dtype": ("same", "changed"),
    "copy": ("none", "model", "pickle"),
    "hook": ("none", "before wrap"),
    "kind": ("sgd", "momentum", "fused"),
    "shard": ("no", "yes"),
    # what else goes on
    "resume": ("none", "same ranks", "from one"),
    "workers": ("none", "fork"),
    "collectives": ("none", "script", "thread"),
    "api": ("torchring", "horovod", "process set"),
}


def _table(*rows: tuple[str, Any]) -> dict[Ways, Any]:
    """{ways: what a row says of them}. "skip=one|with forward + data=join" is two pairs."""
    found = {}
    for text, what in rows:
        parts = [part.split("=") for part in text.split(" + ")]
        each = [[(feature, way) for way in ways.split("|")] for feature, ways in parts]
        for ways in itertools.product(*each):
            assert all(way in FEATURES[feature] for feature, way in ways), text
            assert frozenset(ways) not in found, text
            found[frozenset(ways)] = what
    return found


_NOT_IN_JOIN: Final = ("step=closure", "collectives=script|thread", "norm=sync", "groups=added", "forwards=update_bn")
_NEEDS_ENGINE: Final = ("ValueError", "does not work with a process set")

# What is refused: (class of the error, words of its text).
REFUSED: Final[dict[Ways, tuple[str, str]]] = _table(
    ("owned=forgotten", ("GradientError", "get gradients that nobody reduces: each rank would train alone")),
    ("owned=replaced", ("GradientError", "is not a parameter of the model any more")),
    ("dtype=changed", ("GradientError", "is not what it was when it was wrapped")),
    *((f"data=join + {ways}", ("ValueError", "inside torchring.join()")) for ways in _NOT_IN_JOIN),
    ("data=join + shard=yes", ("ValueError", "torchring.join() does not work with shard=True")),
    ("shard=yes + step=closure", ("ValueError", "step(closure) does not work with shard=True")),
    ("shard=yes + step=sam", ("ValueError", "shard=True does not work with Sam")),
    ("step=closure + nonfinite=skip", ("ValueError", "step(closure) does not work with on_nonfinite='skip'")),
    ("step=sam + nonfinite=skip", ("GradientError", "on_nonfinite='skip' cannot leave out a step of the wrapped")),
    ("shard=yes + layers=sparse", ("ValueError", "shard=True does not take sparse gradients")),
    ("shard=yes + layout=transposed", ("GradientError", "was replaced after torchring.wrap(..., shard=True)")),
    ("weights=samples|zero + wire=fp16", ("GradientError", "weigh() was called where gradients travel in fp16")),
    ("op=sum + weights=samples|zero", ("ValueError", "weigh() takes op='mean'")),
    ("op=sum + gradients=flat|listed", ("GradientError", "which was summed over ranks before")),
    ("norm=sync + weights=samples|zero", ("GradientError", "SyncBatchNorm's backward takes only weigh(1)")),
    ("api=process set + weights=samples|zero", _NEEDS_ENGINE),
    ("api=process set + skip=one|with forward", _NEEDS_ENGINE),
    ("api=process set + layers=complex", ("ValueError", "allreduce does not take torch.complex128")),
)

_ENDED: Final = "no forward of a rank that skips takes part in the statistics of the others"
_OPTIONS: Final = (
    *("buckets=tiny", "owned=ignored", "shard=yes", "op=sum", "overlap=thread", "algorithm=ring|native|hierarchical"),
    *("nonfinite=skip", "buffers=average", "forwards=update_bn"),
)
_OF_ALL: Final = ("norm=sync", "collectives=script|thread", "data=join")

# Which pairs cannot meet, or have no result that is right, and why.
APART: Final[dict[Ways, str]] = _table(
    ("layers=sparse + kind=fused", "AdamW takes no sparse gradients"),
    ("layers=complex + kind=fused", "fused optimizers take no complex parameters"),
    ("layout=transposed + kind=fused", "fused AdamW pairs elements by address, and its state keeps the old strides"),
    ("layers=complex + step=scaler", "GradScaler takes no complex gradients on the CPU"),
    ("layers=sparse + clip=norm", "clip_grad_norm_ takes no sparse gradients"),
    ("layers=sparse + gradients=flat|listed", "a sparse gradient is another tensor after each backward"),
    ("layers=complex + gradients=flat", "one tensor has one dtype"),
    ("norm=sync + skip=one", _ENDED),
    ("norm=sync + skip=with forward", "forward without backward leaves the layers of the others waiting"),
    ("step=sam + norm=sync", "a rank's own ascent has parts of what the other ranks lose"),
    *((f"api=horovod|process set + {ways}", "Horovod's optimizer has no such option") for ways in _OPTIONS),
    *((f"api=process set + {ways}", "this needs all ranks, and one is not in the process set") for ways in _OF_ALL),
)


def describe(ways: Iterable[Way]) -> str:
    return " + ".join(f"{feature}={way}" for feature, way in sorted(ways))


def pairs_of(training: Training) -> Iterator[Ways]:
    return (frozenset(two) for two in itertools.combinations(training.items(), 2))


@dataclass(frozen=True)
class Pairs:
    """All pairs of ways of some features, but those that are apart."""

    features: Mapping[str, tuple[str, ...]]
    refused: Mapping[Ways, tuple[str, str]]
    apart: Mapping[Ways, str]

    def all_pairs(self) -> set[Ways]:
        """Those that can meet, refused ones included."""
        ways = [[(feature, way) for way in ways] for feature, ways in self.features.items()]
        every = {frozenset(two) for a, b in itertools.combinations(ways, 2) for two in itertools.product(a, b)}
        return every - self.apart.keys()

    def refused_pairs(self) -> set[Ways]:
        refused = self.refused
        return {two for two in self.all_pairs() if two in refused or any(frozenset({way}) in refused for way in two)}

    def training_of(self, ways: Iterable[Way]) -> Training:
        """One that has nothing special but these."""
        return {feature: choices[0] for feature, choices in self.features.items()} | dict(ways)

    def special(self, training: Training) -> str:
        return describe((feature, way) for feature, way in training.items() if way != self.features[feature][0])

    def is_possible(self, ways: Iterable[Way]) -> bool:
        """Whether all of these can be trained together."""
        ways = list(ways)
        groups = itertools.chain(((way,) for way in ways), itertools.combinations(ways, 2))
        return not any((group := frozenset(each)) in self.apart or group in self.refused for each in groups)

    def covering(self, seed: int) -> list[Training]:
        """Trainings that together have every pair that is neither refused nor apart; others for each seed."""
        shuffled = random.Random(seed)
        names = shuffled.sample(list(self.features), len(self.features))
        choices = {name: shuffled.sample(self.features[name], len(self.features[name])) for name in names}
        ways = [[(of, way) for way in choices[of] if frozenset({(of, way)}) not in self.refused] for of in names]
        rows = [dict(row) for row in AllPairs(ways, filter_func=self.is_possible)]
        while left := sorted(map(sorted, self.uncovered(rows))):  # allpairspy does not go back from a dead end
            row = dict(left[0])
            for two in shuffled.sample(left, len(left)):
                more = row | dict(two)
                if row.items() <= more.items() and self.is_possible(more.items()):
                    row = more
            rows.append(dict(self.training_of(row.items())))
        return rows

    def uncovered(self, trainings: Iterable[Training]) -> set[Ways]:
        """Pairs that can meet and are not refused, and that no training has."""
        met = {two for training in trainings for two in pairs_of(training)}
        return self.all_pairs() - self.refused_pairs() - met

    def shrunk(self, training: Training, find_faults: Callable[[Sequence[Training]], object]) -> Training:
        """A training that is wrong, too, and has fewer features."""
        for feature, way in training.items():
            less = {**training, feature: self.features[feature][0]}
            if way != self.features[feature][0] and find_faults([less]):
                training = less
        return training


PAIRS: Final = Pairs(FEATURES, REFUSED, APART)
