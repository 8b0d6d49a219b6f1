"""Does every rank train on data of its own? The mistakes that nobody notices, as losses look healthy.

- Two ranks get the same batches: no DistributedSampler, or one for another rank; equal seeds; an iterable that each
  rank reads whole.
- An epoch has the order of the first: nobody called `set_epoch`.
- Each worker of a DataLoader reads the whole of an iterable, so each batch comes several times.
- Batches differ much in size between ranks, and nobody calls `weigh`: each rank's mean counts the same.

A digest of each batch is in the message of the reduction, so nothing is sent for this. Two ranks are taken to read the
same if their digests are equal in 8 reductions in a row, in which batches change.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, Final

from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from torchring.errors import ranks_in_words
from torchring.gradients.contract import Setup
from torchring.gradients.reducer import Reducer
from torchring.gradients.reduction import Participant, Reduction
from torchring.observe import loading
from torchring.observe.inputs import Batch, Inputs

_IN_A_ROW: Final = 8
_LEAST_CHANGES: Final = 6  # of them: a script may take turns with two batches, on purpose
_NUM_FIRST: Final = 16  # batches of the first epoch that are remembered
_LEAST_DIFFERENT: Final = 4  # of them where an epoch repeats, which may be short
_UNEVEN_SAMPLES: Final = 0.25  # of the mean of the ranks
_UNEVEN_TOKENS: Final = 0.5  # padding counts, too
_EXACT: Final = 2**52  # integers below it are numbers of a message
_OFTEN: Final = 0.25  # of the reductions

EQUAL_EPOCHS, EQUAL_WORKERS, UNEVEN, EQUAL_RANKS = 1, 2, 3, 4  # the last one is told by nobody: all ranks see it
_ON_PURPOSE: Final = "If this is on purpose, call torchring.init(check_data=False)"


class DataCheck(Participant):
    """Watches the batches of one optimizer's model. Logs each kind of mistake once, on a rank that has it."""

    fields = ("num_samples", "num_tokens", "batch_digest", "data_finding")

    def __init__(self, reducer: Reducer, setup: Setup) -> None:
        self.batch = Batch()
        self._rank, self._size, self._warn = setup.world.rank, setup.world.size, setup.world.warn
        self._inputs: Inputs = setup.inputs
        self._inputs.is_on = self._is_on = setup.world.check_data
        if self._is_on:
            loading.watch(self._inputs.loading)
        self._inputs.take()  # what was seen before, maybe in a world of one, belongs to no reduction
        self._is_mean = setup.options.op == "mean"  # each rank counts the same
        self._recent: deque[int] = deque(maxlen=_IN_A_ROW)  # digests of this rank's batches
        self._in_a_row: dict[int, int] = {}  # by rank: for how many reductions it has had the batches of this rank
        self._num_compared = self._num_uneven = 0  # reductions: of sizes, and those in which they differ much
        self._finding = 0, ""  # what the next reduction tells the others
        self._told: set[int] = set()
        self._repeats = Repeats(self._told)

    def on_begin(self, current: Reduction) -> None:
        if current.is_again:
            return
        batch = self.batch = self._inputs.take()
        current.mine["num_samples"], current.mine["num_tokens"] = batch.num_samples, batch.num_tokens
        if not self._is_on:
            return
        if batch.digest is not None and not current.is_absent:
            current.mine["batch_digest"] = batch.digest % _EXACT + 1
        if not self._finding[0]:
            self._finding = self._repeats.note(batch, self._remedy)
        current.mine["data_finding"] = self._finding[0]

    def on_reduced(self, current: Reduction) -> None:
        if not self._is_on or current.is_again:
            return
        sums, by_rank = current.heard.sums, current.heard.by_rank
        self._compare(by_rank["batch_digest"])
        self._tell([*map(int, by_rank["data_finding"])])
        is_plain = self._is_mean and UNEVEN not in self._told
        if is_plain and all(by_rank["weight"]) and not (sums["is_weighted"] or sums["has_ended"]):
            self._compare_sizes(sums["num_samples"] / self._size, sums["num_tokens"] / self._size)

    def close(self) -> None:
        loading.forget(self._inputs.loading)

    def _compare_sizes(self, mean_samples: float, mean_tokens: float) -> None:
        self._num_compared += 1
        sizes = (
            (self.batch.num_samples, mean_samples, _UNEVEN_SAMPLES),
            (self.batch.num_tokens, mean_tokens, _UNEVEN_TOKENS),
        )
        uneven = [(own, mean) for own, mean, most in sizes if abs(own - mean) > most * mean]
        if not uneven:
            return
        own, mean = uneven[0]
        self._num_uneven += 1
        is_often = self._num_uneven >= max(_IN_A_ROW, _OFTEN * self._num_compared)  # the last batch may be short
        if is_often and not self._finding[0]:
            self._finding = (
                UNEVEN,
                f"batches often differ much in size from those of other ranks (last time {own} samples or tokens, and "
                f"{mean:.0f} on average), while each rank's gradient counts the same. If the loss is a mean over "
                "these, call optimizer.weigh(number of samples or tokens that count) before each backward()",
            )

    def _compare(self, digests: Sequence[float]) -> None:
        own, digest = digests[self._rank], self.batch.digest
        if not own or digest is None or EQUAL_RANKS in self._told:
            return
        self._recent.append(digest)
        if digests.count(own) == 1 and not self._in_a_row:
            return
        before, self._in_a_row = self._in_a_row, {}
        for rank, other in enumerate(digests):
            if rank != self._rank and (other == own or (not other and rank in before)):
                self._in_a_row[rank] = before.get(rank, 0) + (other == own)
        same = [rank for rank, count in self._in_a_row.items() if count >= _IN_A_ROW]
        if not same or len(set(self._recent)) < _LEAST_CHANGES:
            return
        self._told.add(EQUAL_RANKS)
        if self._rank > max(same):  # if one rank reads what is another's, it is mostly that of the lower number
            ranks = ranks_in_words([self._rank, *same])
            remedy = self._remedy(remedy_for_equal_ranks, self._rank, self._size) or "Give each rank other samples"
            self._warn(
                f"{ranks} got the same batch in each of the last {_IN_A_ROW} steps, so all but one of them work for "
                f"nothing. {remedy}. {_ON_PURPOSE}"
            )

    def _remedy(self, search: Callable[..., str], *arguments: int) -> str:
        with contextlib.suppress(Exception):  # a script's loaders, samplers and datasets may be of any kind
            return search(self._inputs.loading.loader(), *arguments)
        return ""

    def _tell(self, findings: Sequence[int]) -> None:
        if not any(findings):
            return
        own, text = self._finding
        if own and own not in self._told and findings.index(own) == self._rank:
            ranks = ranks_in_words([rank for rank, finding in enumerate(findings) if finding == own])
            self._warn(f"on {ranks}, {text}. {_ON_PURPOSE}")
        self._told.update(filter(None, findings))
        if own in self._told:
            self._finding = 0, ""


class Repeats:
    """Notices batches that come again on this rank."""

    def __init__(self, told: Container[int]) -> None:
        self._told = told  # kinds of mistakes that need not be looked for any more
        self._first: list[int] = []  # digests of the first epoch's first batches
        self._num_same = 0  # how many of them have come again, in their order
        self._recent: deque[bool] = deque(maxlen=_NUM_FIRST)  # whether a batch was that before it

    def note(self, batch: Batch, find: Callable[[Callable[[Any], str]], str]) -> tuple[int, str]:
        """Returns the mistake that this batch has shown, and its text; or (0, "").

        `find` calls a function below with the loader that gave the last batch.
        """
        if batch.is_repeated or batch.digest is not None:
            self._recent.append(batch.is_repeated)
        if batch.digest is not None and EQUAL_EPOCHS not in self._told:
            self._follow(batch.digest)
        if self._num_same == _IN_A_ROW and len(set(self._first[:_IN_A_ROW])) >= _LEAST_DIFFERENT:
            self._num_same = 0
            if remedy := find(remedy_for_equal_epochs):
                return EQUAL_EPOCHS, f"an epoch began with the batches of the first one, in the same order. {remedy}"
        num_repeated = sum(self._recent)
        is_full = len(self._recent) == _NUM_FIRST
        if is_full and num_repeated >= _NUM_FIRST // 2 - 1 and num_repeated <= _NUM_FIRST - 2:
            self._recent.clear()
            if EQUAL_WORKERS not in self._told and (remedy := find(remedy_for_equal_workers)):
                return EQUAL_WORKERS, f"each batch comes several times in a row. {remedy}"
        return 0, ""

    def _follow(self, digest: int) -> None:
        if self._num_same < len(self._first) and digest == self._first[self._num_same]:
            self._num_same += 1
        else:
            self._num_same = int(self._first[:1] == [digest])
        if len(self._first) < _NUM_FIRST:
            self._first.append(digest)


def remedy_for_equal_ranks(loader: DataLoader[Any] | None, rank: int, size: int) -> str:
    """What gives each rank other samples. Rank `rank` of `size` has those of another one."""
    if loader is not None and isinstance(dataset := loader.dataset, IterableDataset) and not _is_ours(dataset):
        own = "datasets.distributed.split_dataset_by_node(dataset, torchring.rank(), torchring.size())"
        also = f", or {own}" if type(dataset).__module__.startswith("datasets") else ""
        return f"Each rank reads the whole of {_name(dataset)}: pass torchring.data.shard(dataset) to DataLoader{also}"
    samplers = [] if loader is None or isinstance(loader.dataset, IterableDataset) else list(_samplers(loader))
    for sampler in samplers:
        if isinstance(sampler, DistributedSampler) and (sampler.rank, sampler.num_replicas) != (rank, size):
            return (
                f"A DistributedSampler was made for rank {sampler.rank} of {sampler.num_replicas}, and this is rank "
                f"{rank} of {size}: pass num_replicas=torchring.size(), rank=torchring.rank()"
            )
    if samplers and not any(isinstance(each, DistributedSampler) or _is_ours(each) for each in samplers):
        return (
            f"The {_name(samplers[0])} of a DataLoader draws the same samples on each rank: pass "
            "sampler=torchring.data.Sampler(dataset) or a DistributedSampler to DataLoader, without shuffle"
        )
    return (
        "Give each rank other samples, such as samples[torchring.rank() :: torchring.size()], or another seed: "
        "torch.manual_seed(seed + torchring.rank())"
    )


def remedy_for_equal_epochs(loader: DataLoader[Any] | None) -> str:
    """What gives each epoch another order. Empty if the loader does not shuffle by epochs: the order may be meant."""
    for each in () if loader is None else (*_samplers(loader), loader.dataset):
        shuffles = getattr(each, "shuffle", True) is not False and getattr(each, "_shuffling", each) is not None
        if hasattr(each, "set_epoch") and shuffles and not _is_ours(each):
            return f"Call set_epoch(epoch) of the {_name(each)} before each epoch"
    return ""


def remedy_for_equal_workers(loader: DataLoader[Any] | None) -> str:
    """What gives each worker of a loader other samples. Empty if the loader has no such workers."""
    if loader is None or not isinstance(loader.dataset, IterableDataset) or _is_ours(loader.dataset):
        return ""
    return (
        f"Each of the {loader.num_workers} workers of a DataLoader reads the whole of {_name(loader.dataset)}: "
        "pass torchring.data.shard(dataset), which gives each worker its part"
    )


def _samplers(loader: DataLoader[Any]) -> Iterator[Any]:
    """The samplers of a loader that chooses samples by index, a batch sampler of the script's own first."""
    outer: Any = loader.batch_sampler
    while outer is not None:
        if type(outer) is not BatchSampler:
            yield outer
        outer = getattr(outer, "sampler", None)
    if loader.batch_sampler is None:
        yield loader.sampler


def _is_ours(each: object) -> bool:
    return any(kind.__module__.startswith("torchring.") for kind in type(each).__mro__)


def _name(each: object) -> str:
    return type(each).__name__
