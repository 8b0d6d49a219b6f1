"""What a RingError says and carries, and that it survives pickling."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import torchring
from torchring import errors
from torchring.errors import (
    MAX_MESSAGE_BYTES,
    FirstFailure,
    GradientError,
    PeerLostError,
    PeerTimeoutError,
    PlanMismatchError,
    RingError,
    TopologyError,
    decode_error,
    encode_error,
    ranks_in_words,
)

ALL = [RingError, PlanMismatchError, PeerLostError, PeerTimeoutError, GradientError, TopologyError]
FIELDS = ("message", "rank", "peers", "bucket", "parameters", "step", "seconds")


def full(cls: type[RingError]) -> RingError:
    return cls("it broke", rank=1, peers=[0, 3], bucket=2, parameters=["a.weight", "b.bias"], step=7, seconds=1.25)


def test_they_are_of_one_kind_and_there_are_no_others() -> None:
    defined = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)}
    assert defined == {*ALL, errors.HorovodInternalError}
    assert issubclass(RingError, errors.HorovodInternalError)  # which scripts for Horovod catch
    for cls in ALL:
        assert issubclass(cls, RuntimeError)
        assert cls is RingError or cls.__mro__[1] is RingError
        assert getattr(torchring, cls.__name__) is cls


def facts_of(error: RingError) -> list[object]:
    return [getattr(error, field) for field in FIELDS]


@pytest.mark.parametrize("cls", ALL)
def test_carries_the_facts_and_survives_the_trip(cls: type[RingError]) -> None:
    for trip in (lambda e: e, lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy):
        error, bare = trip(full(cls)), trip(cls("it broke"))
        assert type(error) is type(bare) is cls
        assert facts_of(error) == ["it broke", 1, (0, 3), 2, ("a.weight", "b.bias"), 7, 1.25]
        assert str(error) == "it broke [rank 1, step 7, bucket 2, parameters a.weight .. b.bias, after 1.25 s]"
        assert facts_of(bare) == ["it broke", None, (), None, (), None, None]
        assert str(bare) == "it broke"
    theirs = decode_error(encode_error(full(cls)), 4)
    assert type(theirs) is cls
    # Where the reporter was is not where this rank is; that is for `locate` to say.
    assert facts_of(theirs) == ["rank 4 stopped: it broke", None, (0, 3), None, (), None, None]
    assert decode_error(encode_error(cls("x")), 0).peers == ()


def test_each_fact_is_said() -> None:
    facts: dict[str, dict[str, Any]] = {
        "[rank 0]": {"rank": 0},
        "[step 0]": {"step": 0},
        "[bucket 0]": {"bucket": 0},
        "[bucket 3, parameter w]": {"bucket": 3, "parameters": ["w"]},
        "[bucket 3, parameters w .. y]": {"bucket": 3, "parameters": ["w", "x", "y"]},
        "[after 0.00 s]": {"seconds": 0.0},
        "[after 12.35 s]": {"seconds": 12.3456},
        "[rank 4, after 1.00 s]": {"rank": 4, "seconds": 1.0},
    }
    assert [str(RingError("it broke", **known)) for known in facts.values()] == [f"it broke {text}" for text in facts]
    ranks = {"rank 3": [3], "ranks 0, 1": [0, 1], "ranks 0-2, 5": [5, 0, 1, 2], "ranks 0, 2": [0, 2]}
    assert [ranks_in_words(each) for each in ranks.values()] == [*ranks]


def test_locate_adds_the_place_if_none_is_known() -> None:
    error = PeerLostError("rank 3 died", rank=0, peers=(3,), seconds=0.5)
    error.locate(bucket=0, parameters=["w", "x"], step=12)
    assert facts_of(error) == ["rank 3 died", 0, (3,), 0, ("w", "x"), 12, 0.5]
    assert str(error) == "rank 3 died [rank 0, step 12, bucket 0, parameters w .. x, after 0.50 s]"
    first = GradientError("g", bucket=0, parameters=("p",), step=3)
    first.locate(bucket=1, parameters=["w"], step=4)
    assert (first.bucket, first.parameters, first.step) == (0, ("p",), 3)


def test_a_report_that_is_passed_on_keeps_its_first_reporter() -> None:
    once = decode_error(encode_error(GradientError("no", peers=(2,))), 2)
    twice = decode_error(encode_error(once), 1)
    assert (type(twice), twice.message, twice.peers) == (GradientError, "rank 2 stopped: no", (2,))
    # "rank N ..." alone is no such report.
    assert decode_error(encode_error(PeerLostError("rank 3 died")), 1).message == "rank 1 stopped: rank 3 died"


def test_a_long_message_is_cut_and_still_decodes() -> None:
    """To whole characters, and to what fits a page of 4 KiB whatever has to be escaped."""
    for letter in ("x", '"', "\\", "\n", "é", "汉", "🜁"):
        data = encode_error(RingError(letter * 5000, peers=(1,)))
        assert len(data) < 4096
        theirs = decode_error(data, 1)
        said = theirs.message.removeprefix("rank 1 stopped: ")
        assert said == letter * (MAX_MESSAGE_BYTES // len(letter.encode()))
        assert theirs.peers == (1,)


GARBAGE = (
    *(b"", b"\0" * 64, encode_error(PeerLostError("rank 3 died", peers=(3,)))[:30], b"\xff\xfe\x00\x80"),
    *(b"[1, 2]", b"7", b"null", b"[" * 4000),
    b'{"message": "m", "peers": []}',
    b'{"error": "SystemExit", "message": "m", "peers": []}',
    b'{"error": ["RingError"], "message": "m", "peers": []}',
    b'{"error": "RingError", "peers": []}',
    b'{"error": "RingError", "message": "m"}',
    b'{"error": "RingError", "message": "m", "peers": null}',
    b'{"error": "RingError", "message": "m", "peers": ["x"]}',
    b'{"error": "RingError", "message": "m", "peers": [Infinity]}',
)


def test_garbage_is_an_error_that_names_the_reporter() -> None:
    for said in GARBAGE:
        error = decode_error(said, 5)
        assert type(error) is RingError
        assert error.message == "rank 5 stopped: it reported a failure"
        assert error.peers == (5,)


def test_of_many_threads_that_fail_at_once_one_is_first() -> None:
    for _ in range(20):
        failure, start = FirstFailure(), threading.Barrier(4)
        failure.raise_if_set()
        errors_of_threads = [RingError(str(i)) for i in range(4)]

        def fail(error: RingError, failure: FirstFailure = failure, start: threading.Barrier = start) -> bool:
            start.wait(20)
            return failure.set(error)

        with ThreadPoolExecutor(4) as pool:
            are_first = list(pool.map(fail, errors_of_threads))
        assert sorted(are_first) == [False, False, False, True]
        with pytest.raises(RingError) as caught:
            failure.raise_if_set()
        assert caught.value is failure.error is errors_of_threads[are_first.index(True)]
