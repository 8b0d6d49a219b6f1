"""The state machine that matches Horovod's collectives by name: which are ready, in which order, and what differs."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from torchring.horovod.negotiation import (
    BARRIER,
    JOIN,
    Negotiation,
    Request,
    Response,
    decode_requests,
    encode_requests,
    mismatch,
)


def request(name: str, kind: str = "allreduce", *, process_set: int = 0, shape: tuple[int, ...] = (2,)) -> Request:
    return Request(kind, name, process_set, (("float32", shape),), (("op", "Sum"),))


def names(responses: Sequence[Response]) -> list[str]:
    return [response.first.name for response in responses]


def test_requests_meet_by_name_whatever_their_order() -> None:
    """The example of the module's docstring."""
    negotiation = Negotiation({0: (0, 1)})
    a, b = request("a"), request("b")
    assert names(negotiation.advance([[a, b], [b]])) == ["b"]
    assert dict(negotiation.waiting()) == {(0, "a"): [1]}
    assert names(negotiation.advance([[], [a]])) == ["a"]
    assert not negotiation.waiting()


def test_all_ranks_come_to_the_same_order_and_nothing_is_lost() -> None:
    """Random calls in random cycles: each rank's machine gives the same responses, each operation once."""
    rng = random.Random(1)
    sets = {0: (0, 1, 2), 1: (0, 2), 2: (1,)}
    for _ in range(50):
        wanted = [request(f"op{i}", process_set=rng.choice([0, 0, 1, 2])) for i in range(12)]
        lines = []
        for rank in range(3):
            mine = [each for each in wanted if rank in sets[each.process_set]]
            rng.shuffle(mine)
            lines.append(mine)
        machines = [Negotiation(sets) for _ in range(3)]
        seen: list[str] = []
        while any(lines):
            counts = [rng.randint(0, len(line)) for line in lines]
            submitted = [line[:count] for line, count in zip(lines, counts, strict=True)]
            lines = [line[count:] for line, count in zip(lines, counts, strict=True)]
            answers = [machine.advance(submitted) for machine in machines]
            assert answers[0] == answers[1] == answers[2]
            assert not any(response.error for response in answers[0])
            seen += names(answers[0])
        assert sorted(seen) == sorted(each.name for each in wanted)


def test_a_rank_that_has_joined_is_not_waited_for_until_all_have() -> None:
    negotiation = Negotiation({0: (0, 1, 2)})
    joins = Request(JOIN, "join")
    a = request("a")
    assert negotiation.advance([[a], [], [joins]]) == []
    (answer,) = negotiation.advance([[], [a], []])
    assert answer.error == ""
    assert list(answer.requests) == [0, 1]
    (refused,) = negotiation.advance([[request("g", "allgather")], [request("g", "allgather")], []])
    assert "join" in refused.error
    (met,) = negotiation.advance([[Request(BARRIER, "b")], [Request(BARRIER, "b")], []])
    assert met.error == ""
    assert negotiation.advance([[joins], [], []]) == []
    (last,) = negotiation.advance([[], [joins], []])
    assert last.last_to_join == 1
    assert not negotiation.joined  # they may begin again
    assert negotiation.advance([[a], [a], []]) == []


@pytest.mark.parametrize(
    "rounds", [[[[], ["j"]], [["a", "j"], []]], [[["j"], ["a", "j"]]], [[["a"], []], [[], ["j"]], [["j"], []]]]
)
def test_what_waits_for_a_rank_that_joins_or_is_asked_for_before_is_answered(rounds: list[list[list[str]]]) -> None:
    negotiation = Negotiation({0: (0, 1)})
    known = {"j": Request(JOIN, "join"), "a": request("a")}
    seen = [name for each in rounds for name in names(negotiation.advance([[known[c] for c in line] for line in each]))]
    assert seen == ["a", "join"]
    assert not negotiation.waiting()


def test_a_set_that_is_removed_leaves_nothing_behind() -> None:
    sets = {0: (0, 1), 1: (0, 1)}
    negotiation = Negotiation(sets)
    negotiation.advance([[request("x", process_set=1)], []])
    negotiation.forget(1)
    assert not negotiation.waiting()


_PLAIN, _ROWS = request("x"), request("g", "allgather", shape=(1, 5))


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (_PLAIN._replace(kind="join"), "collective of 'x': allreduce on rank 0, join on rank 1"),
        (_PLAIN._replace(tensors=(("int32", (2,)),)), "dtype of 'x': float32 on rank 0, int32 on rank 1"),
        (request("x", shape=(3,)), "shape of 'x': [2] on rank 0, [3] on rank 1"),
        (_PLAIN._replace(arguments=(("op", "Min"),)), "op of 'x': Sum on rank 0, Min on rank 1"),
        (_PLAIN._replace(tensors=_PLAIN.tensors * 2), "number of tensors of 'x': 1 on rank 0, 2 on rank 1"),
        (_PLAIN, ""),
        # Numbers of rows may differ where rows are gathered, but not the rest of the shape.
        (request("g", "allgather", shape=(7, 5)), ""),
        (request("g", "allgather", shape=(1, 6)), "[*, 5] on rank 0, [*, 6] on rank 1"),
        (request("g", "allgather", shape=(1,)), "[*, 5] on rank 0, [*] on rank 1"),
    ],
)
def test_differences_are_named(other: Request, difference: str) -> None:
    found = mismatch({0: _ROWS if other.name == "g" else _PLAIN, 1: other})
    assert found.endswith(difference)
    assert bool(found) == bool(difference)


def test_requests_survive_the_way_to_other_ranks() -> None:
    sent = [
        Request("alltoall", 'a "name"\nof two lines', 3, (("bool", ()), ("int8", (0, 2))), (("root rank", 1),), (1, 2)),
        Request(BARRIER, "b"),
    ]
    assert decode_requests(encode_requests(sent)) == sent
    assert decode_requests(encode_requests([])) == []
