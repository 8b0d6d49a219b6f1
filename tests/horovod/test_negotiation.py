"""Which operations may run: from what ranks ask for, in cycles, to answers in the same order everywhere."""

from __future__ import annotations

import random

import pytest

from torchring.horovod.negotiation import (
    BARRIER,
    JOIN,
    Negotiation,
    Request,
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
