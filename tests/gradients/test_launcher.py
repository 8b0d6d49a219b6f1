"""Buckets leave in plan order, whatever order hooks fire in; what goes wrong on the way comes out with its place."""

import itertools

import pytest

from tests.support.fakes import FakeRank, fake_ranks, finish
from torchring.errors import GradientError, PeerLostError, RingError
from torchring.gradients import launcher as launcher_module
from torchring.gradients.bucket import BucketState
from torchring.gradients.launcher import union_length
from torchring.gradients.ledger import GradientStatus
from torchring.gradients.packing import COPY_ON_ARRIVAL_BYTES
from torchring.observer import COPIED, COPYING, LAUNCHED, OVER, PACKED, READY, REDUCED, STARTED


def buckets(count: int, per_bucket: int = 1) -> FakeRank:
    """A world of one; bucket 0 has p0 and, with two per bucket, p1."""
    [rank] = fake_ranks(1, *[2] * (count * per_bucket), bucket_bytes=8 * per_bucket)
    assert len(rank.launcher.buckets) == count
    return rank


def give_all(rank: FakeRank) -> None:
    for index in range(len(rank.parameters)):
        rank.give(index, float(index))


def starts(rank: FakeRank) -> list[int]:
    """The buckets that have left since the last call."""
    return [int(event.split()[1]) for event in rank.all_reduce.take_events() if event.startswith("start")]


def test_buckets_leave_in_plan_order_as_soon_as_those_before_them_have_left() -> None:
    for order in itertools.permutations(range(4)):
        rank = buckets(4)
        left: list[int] = []
        for i, index in enumerate(order, 1):
            rank.give(index, float(index))
            left += starts(rank)
            assert left == list(range(next(n for n in range(5) if n not in order[:i])))
        finish(rank)
        assert {bucket.state for bucket in rank.launcher.buckets} == {BucketState.IDLE}
        assert rank.gradients() == [[float(i)] * 2 for i in range(4)]


def test_held_buckets_all_leave_at_the_end_before_one_is_waited_for() -> None:
    rank = buckets(2)
    for _ in range(2):
        rank.zero_grad()
        rank.begin(defers_launch=True)
        give_all(rank)
        assert rank.all_reduce.take_events() == []
        finish(rank)
        assert rank.all_reduce.take_events() == ["start 0", "start 1", "reduce 0", "reduce 1", "land 0", "land 1"]
    rank.give(0, 1.0)  # the next reduction need not be held
    assert starts(rank) == [0]


def test_where_a_backward_may_reach_several_optimizers_few_buckets_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """The all-reduce waits for other ranks where too many are, and these may wait for this one in another reduction."""
    monkeypatch.setattr(launcher_module, "MAX_PENDING", 2)
    rank = buckets(4)
    rank.begin(is_unordered=True)
    give_all(rank)
    assert starts(rank) == [0, 1]
    finish(rank)
    assert starts(rank) == [2, 3]


def test_the_first_reduction_shows_the_order_of_gradients() -> None:
    rank = buckets(3)
    for order in ((2, 0, 1), (0, 1, 2)):
        for index in order:
            rank.give(index, 1.0)
            assert rank.launcher.ready_order == (None if order[0] else [2, 0, 1])
        finish(rank)
        assert rank.launcher.ready_order == [2, 0, 1]
    rank.launcher.forget_order()
    assert rank.launcher.ready_order is None


def test_small_gradients_are_noted_and_the_last_one_of_a_bucket_has_them_counted() -> None:
    rank = buckets(2, per_bucket=3)
    rank.launcher.forget_order()
    planned, other = (0, 1, 2, 3, 4, 5), (2, 0, 1, 3, 4, 5)
    for order, when in ((planned, {2: [0], 5: [1]}), (other, {5: [0, 1]}), (other, {1: [0], 5: [1]})):
        rank.zero_grad()
        left = {}
        for index in order:
            rank.give(index, float(index))
            if new := starts(rank):
                left[index] = new
        assert left == when
        finish(rank)
        assert rank.ledger.first_unsettled() is None
        assert rank.gradients() == [[float(i)] * 2 for i in range(6)]
        rank.all_reduce.take_events()
    for index in other:
        rank.give(index, 1.0)
    rank.give(0, 1.0)
    with pytest.raises(GradientError, match=r"p0 received another gradient"):
        rank.launcher.count_noted()


def test_what_was_noted_when_a_backward_is_aborted_is_local() -> None:
    rank = buckets(1, per_bucket=3)
    rank.launcher.forget_order()
    give_all(rank)
    finish(rank)
    rank.give(1, 1.0)  # on the result of the reduction before
    assert rank.ledger.first_unsettled() is None
    rank.abort()
    assert rank.ledger.first_unsettled() == ("p1", GradientStatus.LOCAL.value)


@pytest.mark.parametrize(("num_left", "number", "order"), [(0, 0, None), (2, 1, None), (3, 1, [0, 1, 2])])
def test_who_aborts_a_reduction_has_the_number_of_peers(num_left: int, number: int, order: list[int] | None) -> None:
    """Once a bucket has left, peers finish the reduction. Once all have left, they know the order of gradients, too."""
    rank = buckets(3)
    rank.begin()
    for index in range(num_left):
        rank.give(index, 1.0)
    rank.abort()
    assert (rank.launcher.reduction.next_number, rank.launcher.num_aborted) == (number, num_left)
    assert rank.launcher.ready_order == order
    rank.zero_grad()
    rank.begin()
    assert rank.launcher.num_aborted == 0
    assert {bucket.state for bucket in rank.launcher.buckets} == {BucketState.IDLE}
    starts(rank)
    for index in (2, 1, 0):
        rank.give(index, float(index))
    finish(rank)
    assert rank.launcher.reduction.next_number == number + 1
    assert rank.launcher.ready_order == (order or [2, 1, 0])
    assert starts(rank) == [0, 1, 2]
    assert rank.gradients() == [[float(i)] * 2 for i in range(3)]


def test_what_an_aborted_reduction_has_left_under_way_lands_before_the_next_one_begins() -> None:
    """Its buckets are the all-reduce's until then: filling them again would change what is under way."""
    rank = buckets(3)
    rank.all_reduce.late = {0, 1}
    for index in (0, 1):
        rank.give(index, 1.0)
    rank.abort()
    assert rank.all_reduce.take_events() == ["start 0", "start 1"]
    rank.launcher.drain()
    assert rank.all_reduce.take_events() == ["reduce 0", "reduce 1", "land 0", "land 1"]
    states = [bucket.state for bucket in rank.launcher.buckets]
    assert states == [BucketState.REDUCING, BucketState.REDUCING, BucketState.IDLE], "nobody uses the results"
    rank.begin()
    assert rank.launcher.reduction.num_launched == 0
    assert (rank.launcher.reduction.busy_seconds, rank.launcher.reduction.exposed_seconds) == (0.0, 0.0)


def test_a_bucket_is_started_and_looked_in_on_and_waited_for_at_the_end() -> None:
    rank = buckets(3)
    for _ in range(2):
        rank.all_reduce.late = {0, 1, 2}
        rank.zero_grad()
        rank.give(0, 0.0)
        rank.launcher.advance()
        rank.give(1, 1.0)
        assert rank.all_reduce.take_events() == ["start 0", "start 1"]
        rank.all_reduce.late = {0, 2}
        rank.launcher.advance()
        assert rank.all_reduce.take_events() == [], "bucket 1 may not go before bucket 0"
        rank.all_reduce.late = {2}
        rank.launcher.advance()
        assert rank.all_reduce.take_events() == ["reduce 0", "reduce 1"]
        assert [b.state for b in rank.launcher.buckets[:2]] == [BucketState.REDUCING] * 2
        rank.give(2, 2.0)
        finish(rank)
        assert rank.all_reduce.take_events() == ["start 2", "reduce 2", "land 0", "land 1", "land 2"]


# What goes wrong between ranks


@pytest.mark.parametrize("where", ["start 1", "reduce 1", "land 1", "land 1, late"])
def test_an_error_between_ranks_says_which_bucket_it_was(where: str) -> None:
    """And nothing more is done with a broken all-reduce."""
    rank = buckets(3, per_bucket=2)
    event, _, is_late = where.partition(",")
    rank.all_reduce.errors[event] = PeerLostError("rank 3 died", rank=0, peers=(3,), seconds=0.5)
    rank.all_reduce.late = {0, 1, 2} if is_late else set()

    def backward() -> None:
        rank.begin(step=7)
        give_all(rank)
        finish(rank)

    with pytest.raises(PeerLostError) as caught:
        backward()
    assert (caught.value.bucket, caught.value.step, caught.value.parameters) == (1, 7, ("p2", "p3"))
    assert str(caught.value) == "rank 3 died [rank 0, step 7, bucket 1, parameters p2 .. p3, after 0.50 s]"
    assert rank.all_reduce.events[-1] == event


def test_an_error_of_an_aborted_reduction_comes_out_before_the_next_one_once() -> None:
    rank = buckets(2)
    rank.begin(step=7)
    give_all(rank)
    rank.abort()
    rank.all_reduce.errors["land 0"] = PeerLostError("rank 3 died", peers=(3,))
    with pytest.raises(PeerLostError) as caught:
        rank.begin(step=8)
    assert (caught.value.bucket, caught.value.step) == (0, 7)
    rank.begin(step=8)


def test_late_ranks_are_waited_for_at_the_first_bucket_that_has_left() -> None:
    rank = buckets(3)
    rank.all_reduce.late = {1, 2}
    give_all(rank)
    error = RingError("late")
    rank.launcher.locate(error)
    assert (error.bucket, error.parameters) == (1, ("p1",))


def test_every_bucket_lands_though_one_before_it_fails() -> None:
    """Nothing may be under way when the error comes out: the next reduction fills the buffers again."""
    [rank] = fake_ranks(1, 2, 2, bucket_bytes=0, compression="fp16")
    give_all(rank)
    rank.parameters[0].grad = None
    with pytest.raises(GradientError, match="was taken away"):
        finish(rank)
    assert rank.all_reduce.events[-1] == "land 1"


# What is said about it


def test_an_observer_hears_what_happens_to_each_bucket() -> None:
    """One is reduced during backward, another afterwards."""
    [rank] = fake_ranks(1, 2, COPY_ON_ARRIVAL_BYTES // 4, 2, bucket_bytes=8)
    rank.all_reduce.late = {2}
    seen: list[tuple[int, int]] = []
    rank.begin(events=lambda event, index, at: seen.append((index, event)))
    rank.give(0, 1.0)
    rank.give(1, 1.0)
    of_bucket = [READY, PACKED, LAUNCHED, STARTED, REDUCED]
    assert seen == [*((0, each) for each in of_bucket), (1, COPYING), (1, COPIED), *((1, each) for each in of_bucket)]
    seen.clear()
    rank.launcher.fill_rest()
    finish(rank)
    assert seen[:2] == [(-1, OVER), (2, READY)]
    assert seen.count((-1, OVER)) == 1
    assert [*dict.fromkeys(event for index, event in seen if index == 2)] == of_bucket


@pytest.mark.parametrize("in_background", [False, True])
def test_time_in_which_a_thread_reduces_is_busy_and_not_exposed(in_background: bool) -> None:
    rank = buckets(2)
    rank.all_reduce.in_background = in_background
    rank.all_reduce.spans = {0: (10.0, 12.0), 1: (11.0, 13.5)} if in_background else {}
    heard: list[tuple[int, int, int]] = []
    rank.begin(events=lambda *event: heard.append(event))
    give_all(rank)
    in_launches = rank.launcher.reduction.exposed_seconds
    finish(rank)
    current = rank.launcher.reduction
    assert 0.0 < in_launches < current.exposed_seconds < 60.0
    assert current.busy_seconds == (3.5 if in_background else current.exposed_seconds)
    spans = [event for event in heard if event[2]]
    assert (
        spans
        == [
            *((STARTED, 0, 10_000_000_000), (REDUCED, 0, 12_000_000_000)),
            *((STARTED, 1, 11_000_000_000), (REDUCED, 1, 13_500_000_000)),
        ][: 4 * in_background]
    )


@pytest.mark.parametrize(
    ("spans", "length"),
    [([], 0), ([(1, 3)], 2), ([(0, 2), (1, 3), (5, 6)], 4), ([(5, 6), (0, 10)], 10), ([(0, 1), (1, 2)], 2)],
)
def test_what_is_under_way_at_a_time_is_busy_once(spans: list[tuple[float, float]], length: float) -> None:
    assert union_length(spans) == length
