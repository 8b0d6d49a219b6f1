"""What a RingError says and carries, and that it survives pickling."""

import copy
import pickle

import pytest

from torchring.errors import (
    MAX_MESSAGE_BYTES,
    GradientError,
    PeerLostError,
    PeerTimeoutError,
    PlanMismatchError,
    RingError,
    TopologyError,
    decode_error,
    encode_error,
)

ALL = [RingError, PlanMismatchError, PeerLostError, PeerTimeoutError, GradientError, TopologyError]
FIELDS = ("message", "rank", "peers", "bucket", "parameters", "step", "seconds")


def full(cls: type[RingError]) -> RingError:
    return cls("it broke", rank=1, peers=[0, 3], bucket=2, parameters=["a.weight", "b.bias"], step=7, seconds=1.25)


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
    b'{"error": "SystemExit", "message": "m", "peers": []}',
    b'{"error": "RingError", "peers": []}',
    b'{"error": "RingError", "message": "m"}',
    b'{"error": "RingError", "message": "m", "peers": null}',
    b'{"error": "RingError", "message": "m", "peers": [Infinity]}',
)


def test_garbage_is_an_error_that_names_the_reporter() -> None:
    for said in GARBAGE:
        error = decode_error(said, 5)
        assert type(error) is RingError
        assert error.message == "rank 5 stopped: it reported a failure"
        assert error.peers == (5,)
