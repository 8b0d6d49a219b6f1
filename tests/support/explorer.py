"""All executions of a few ranks' programs that a weak memory admits.

The memory is that of GPUs which address each other's memory (PTX ISA, "Memory Consistency Model"):

- A store leaves its rank at any time later, and stores overtake each other, but not at one place. A releasing signal
  leaves after all stores that a barrier preceded: those of all threads of the block.
- A load returns what is in memory, or what its rank has cached at this place since it last acquired: since a look that
  acquires, and the barrier behind that look. While a rank waits in a look that does not acquire, it may load early
  what its program loads behind that look.
- A kernel begins with an empty cache, and after all stores of the kernel before it.

`explore` says whether each load returns in all executions what it returns in one of them, in which every store arrives
at once, and whether all executions end. Which values are right is for other tests to say.

Example: two ranks; rank 0 stores, and signals to rank 1, which waits for the signal and loads
    [[Store(0, 0, 1), Barrier(), Signal(True, 1, 0, 1)], [Look(True, (0,), is_one), Barrier(), Load(0, 0)]]
    holds. Without the first barrier, or with Signal(False, ...), rank 1 may load the 0 from before the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple


class Launch(NamedTuple):
    """A kernel begins; the own data have been overwritten since the last kernel."""

    rank: int
    values: tuple[int, ...]  # of all places of the own data


class Store(NamedTuple):
    target: int  # rank whose data are written
    place: int
    value: int


class Load(NamedTuple):
    source: int
    place: int


class Barrier(NamedTuple):
    """All threads of the block meet."""


class Signal(NamedTuple):
    releases: bool
    target: int
    word: int
    value: int


class Look(NamedTuple):
    """Goes on when `passes(values of the own words)`."""

    acquires: bool
    words: tuple[int, ...]
    passes: Callable[[tuple[int, ...]], bool]


Operation = Launch | Store | Load | Barrier | Signal | Look
Program = Sequence[Operation]


class ProtocolError(AssertionError):
    """An execution in which a load returns something else, or in which ranks wait for ever."""


class _Rank(NamedTuple):
    next: int = 0  # operation
    buffer: tuple[tuple[bool, Store | Signal], ...] = ()  # what has not left; True: a barrier came behind it
    cache: frozenset[tuple[tuple[int, int], int]] = frozenset()
    has_acquired: bool = False  # and no barrier has come behind it


class _State(NamedTuple):
    ranks: tuple[_Rank, ...]
    data: tuple[tuple[int, ...], ...]  # [rank][place]
    words: tuple[tuple[int, ...], ...]  # [rank][word]


def explore(programs: Sequence[Program], num_places: int, num_words: int) -> int:
    """The number of states that were looked at. Raises ProtocolError."""
    expected = _in_order(programs, num_places, num_words)
    first = _State(
        tuple(_after_issuing(_Rank(), program) for program in programs),
        ((0,) * num_places,) * len(programs),
        ((0,) * num_words,) * len(programs),
    )
    seen, todo = {first}, [first]
    while todo:
        state = todo.pop()
        following = [
            after
            for number in range(len(programs))
            for after in _steps(state, number, programs[number], expected[number])
        ]
        if not following:
            waiting = [rank for rank, program in zip(state.ranks, programs, strict=True) if rank.next < len(program)]
            if waiting:
                raise ProtocolError(f"ranks wait for ever: {[rank.next for rank in state.ranks]} in {state.words}")
        for after in following:
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return len(seen)


def _in_order(programs: Sequence[Program], num_places: int, num_words: int) -> list[dict[int, int]]:
    """What each load returns if ranks take turns, and every store arrives at once: {number of the operation: value}."""
    data = [[0] * num_places for _ in programs]
    words = [[0] * num_words for _ in programs]
    nexts, loaded = [0] * len(programs), [dict[int, int]() for _ in programs]
    is_moving = True
    while is_moving:
        is_moving = False
        for number, program in enumerate(programs):
            while nexts[number] < len(program):
                operation = program[nexts[number]]
                if isinstance(operation, Look) and not operation.passes(
                    tuple(words[number][i] for i in operation.words)
                ):
                    break
                if isinstance(operation, Launch):
                    data[number] = list(operation.values)
                elif isinstance(operation, Store):
                    data[operation.target][operation.place] = operation.value
                elif isinstance(operation, Signal):
                    words[operation.target][operation.word] = operation.value
                elif isinstance(operation, Load):
                    loaded[number][nexts[number]] = data[operation.source][operation.place]
                nexts[number] += 1
                is_moving = True
    if any(done < len(program) for done, program in zip(nexts, programs, strict=True)):
        raise ProtocolError(f"ranks wait for ever: {nexts} in {words}")
    return loaded


def _after_issuing(rank: _Rank, program: Program) -> _Rank:
    """Past stores, signals and barriers, which by themselves nobody else notices: so they need no order with others."""
    number, buffer, cache, has_acquired = rank
    while number < len(program):
        operation = program[number]
        if isinstance(operation, Store | Signal):
            buffer = (*buffer, (False, operation))
            cache = frozenset(entry for entry in cache if isinstance(operation, Signal) or entry[0] != operation[:2])
        elif isinstance(operation, Barrier):
            buffer = tuple((True, entry) for _, entry in buffer)
            cache, has_acquired = (frozenset() if has_acquired else cache), False
        else:
            break
        number += 1
    return _Rank(number, buffer, cache, has_acquired)


def _steps(state: _State, number: int, program: Program, expected: dict[int, int]) -> list[_State]:
    """All states that follow when one rank does something that others may notice."""
    rank = state.ranks[number]
    following = []

    def add(rank: _Rank, **changed: Any) -> None:
        ranks = _replaced(state.ranks, number, rank)
        following.append(state._replace(ranks=ranks, **changed))

    for i, (_, entry) in enumerate(rank.buffer):
        if _may_leave(rank.buffer, i):
            left = rank._replace(buffer=rank.buffer[:i] + rank.buffer[i + 1 :])
            where, place = ("data", entry.place) if isinstance(entry, Store) else ("words", entry.word)
            memory = getattr(state, where)
            cells = _replaced(memory[entry.target], place, entry.value)
            add(left, **{where: _replaced(memory, entry.target, cells)})
    if rank.next == len(program):
        return following
    operation, past = program[rank.next], rank._replace(next=rank.next + 1)
    if isinstance(operation, Launch):
        # As one step: an execution in which somebody sees a part of it has an earlier one, in which he sees nothing.
        if not rank.buffer:
            data = _replaced(state.data, number, operation.values)
            add(_after_issuing(past._replace(cache=frozenset()), program), data=data)
    elif isinstance(operation, Look):
        if not operation.acquires:
            for source, place in _loads_behind(program, rank.next):
                entry = ((source, place), state.data[source][place])
                if entry not in rank.cache:
                    add(rank._replace(cache=frozenset({*(old for old in rank.cache if old[0] != entry[0]), entry})))
        if _passes(operation, state.words[number]):
            add(_after_issuing(past._replace(has_acquired=rank.has_acquired or operation.acquires), program))
    elif isinstance(operation, Load):
        where = (operation.source, operation.place)
        own = [entry.value for _, entry in rank.buffer if isinstance(entry, Store) and entry[:2] == where]
        fresh = state.data[operation.source][operation.place]
        cached = dict(rank.cache)
        for value in {own[-1]} if own else {fresh, cached.get(where, fresh)}:
            if value != expected[rank.next]:
                raise ProtocolError(
                    f"rank {number}: operation {rank.next} loads {value} for {expected[rank.next]} at {where}"
                )
        if not own:
            cached[where] = fresh
        add(_after_issuing(past._replace(cache=frozenset(cached.items())), program))
    return following


def _may_leave(buffer: tuple[tuple[bool, Store | Signal], ...], i: int) -> bool:
    entry = buffer[i][1]
    for is_covered, other in buffer[:i]:
        if isinstance(entry, Signal) and entry.releases and is_covered:
            return False
        if type(entry) is type(other) and entry[-3:-1] == other[-3:-1]:
            return False
    return True


def _passes(look: Look, words: Sequence[int]) -> bool:
    return look.passes(tuple(words[word] for word in look.words))


def _loads_behind(program: Program, number: int) -> Iterator[Load]:
    """The loads that an operation is not ordered before."""
    for operation in program[number + 1 :]:
        if isinstance(operation, Launch) or (isinstance(operation, Look) and operation.acquires):
            return
        if isinstance(operation, Load):
            yield operation


def _replaced(items: Any, i: int, item: Any) -> Any:
    return (*items[:i], item, *items[i + 1 :])
