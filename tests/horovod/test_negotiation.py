"""Which operations may run: from what ranks ask for, in cycles, to answers in the same order everywhere."""

from __future__ import annotations

import random

import pytest

from torchring.horovod.negotiation import (
    BARRIER,
    JOIN,
    Negotiation,
    Request,
    decode_requests,
    encode_requests,
    mismatch,
)


def request(name: str, kind: str = "allreduce", *, process_set: int = 0, shape: tuple[int, ...] = (2,)) -> Request:
    return Request(kind, name, process_set, (("float32", shape),), (("op", "Sum"),))


def test_all_ranks_come_to_the_same_order_and_nothing_is_lost() -> None:
    """Random calls in random cycles: each rank's machine gives the same responses, each operation once."""
    rng = random.Random(1)
    sets = {0: (0, 1, 2), 1: (0, 2), 2: (1,)}
    for _ in range(50):
        wanted = [request(f"op{i}", process_set=rng.choice([0, 0, 1, 2])) for i in range(12)]
        lines = [[each for each in wanted if rank in sets[each.process_set]] for rank in range(3)]
        for line in lines:
            rng.shuffle(line)
        machines = [Negotiation(sets) for _ in range(3)]
        seen: list[str] = []
        while any(lines):
            counts = [rng.randint(0, len(line)) for line in lines]
            submitted = [line[:count] for line, count in zip(lines, counts, strict=True)]
            lines = [line[count:] for line, count in zip(lines, counts, strict=True)]
            answers = [machine.advance(submitted) for machine in machines]
            assert answers[0] == answers[1] == answers[2]
            assert not any(response.error for response in answers[0])
            seen += [response.first.name for response in answers[0]]
        assert sorted(seen) == sorted(each.name for each in wanted)


# What ranks 0 to 2 ask for in each cycle, and what is answered then. j: join, a: all-reduce, g: all-gather, b: barrier.
@pytest.mark.parametrize(
    "cycles",
    [
        [("ab b b", "b"), ("- a -", ""), ("- - a", "a")],  # by name, whatever their order
        [("a - j", ""), ("- a -", "a"), ("g g -", "g!"), ("b b -", "b"), ("j - -", ""), ("- j -", "j"), ("a a -", "")],
        [("j - j", ""), ("- aj -", "aj")],  # what was asked for before is answered, for ranks that have joined, too
        [("j aj j", "aj")],
        [("a - -", ""), ("- j j", "a"), ("j - -", "j")],
    ],
)
def test_ranks_that_have_joined_are_not_waited_for_until_all_have(cycles: list[tuple[str, str]]) -> None:
    negotiation = Negotiation({0: (0, 1, 2)})
    known = {"j": Request(JOIN, "join"), "a": request("a"), "g": request("g", "allgather"), "b": Request(BARRIER, "b")}
    for asked, expected in cycles:
        found = negotiation.advance([[known[name] for name in line.strip("-")] for line in asked.split()])
        assert "".join(each.first.name[0] + "!" * ("join" in each.error) for each in found) == expected
        assert all(each.last_to_join >= 0 for each in found if each.first.kind == JOIN)


def test_a_set_that_is_removed_leaves_nothing_behind() -> None:
    negotiation = Negotiation({0: (0, 1), 1: (0, 1)})
    negotiation.advance([[request("x", process_set=1)], []])
    assert dict(negotiation.waiting()) == {(1, "x"): [1]}
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
    tensors = (("bool", ()), ("int8", (0, 2)))
    sent = [Request("alltoall", 'a "name"\nof two lines', 3, tensors, (("root rank", 1),), (1, 2))]
    for requests in (sent, []):
        assert decode_requests(encode_requests(requests)) == requests
