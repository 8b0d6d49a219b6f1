"""The protocol of `direct` and `ring` in all executions that a weak memory admits, not only those that happen to come.

What is explored is what the interpreted kernels do: their loads and stores of slices, and the signals, looks and
barriers of their inline PTX. One slice of a rank has 64 bytes, so that it is loaded and stored as a whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.support.explorer import (
    Barrier,
    Launch,
    Load,
    Look,
    Operation,
    Program,
    ProtocolError,
    Signal,
    Store,
    explore,
)
from tests.support.grids import grid
from tests.support.kernel_ranks import Place, Round, Runner, places_of_one_process, run_direct, run_ring
from tests.support.kernels import needs_interpreter
from tests.support.ptx import Access, InlinePtx, Memory, ptx_in_kernels, run_text

pytestmark = needs_interpreter

RUNNERS: dict[str, Runner] = {"direct": run_direct, "ring": run_ring}
SLICE_BYTES = 64


class _Words(Memory):
    """Pads in which all words have one value, or given ones, and which no store changes."""

    def __init__(self, place: Place, value: int = 0, given: dict[int, int] | None = None) -> None:
        super().__init__([place.signals, place.abort])
        self.place, self.value, self.given = place, value, given or {}

    def load(self, addresses: np.ndarray, width: int) -> np.ndarray:
        if any(_where(self.place.pads, int(address)) for address in addresses):
            values = [self.given.get(int(address), self.value) % 2**width for address in addresses]
            return np.array(values, np.uint64)
        return super().load(addresses, width)

    def store(self, addresses: np.ndarray, width: int, values: np.ndarray) -> None:
        for address in addresses:
            assert _where(self.place.pads, int(address)), "a signal goes to a pad"


def _where(tensors: list[Any], address: int) -> tuple[int, int] | None:
    """Which tensor an address lies in, and how many bytes behind its begin."""
    for number, tensor in enumerate(tensors):
        if 0 <= address - tensor.data_ptr() < tensor.nbytes:
            return number, address - tensor.data_ptr()
    return None


@dataclass
class _Recorder(InlinePtx):
    """What the kernel of one rank does while its looks pass: at once, or after `num_late` that do not."""

    place: Place = None  # type: ignore[assignment]
    num_late: int = 0
    operations: list[Operation] = field(default_factory=list)
    _num_failed: int = 0
    _num_stores: int = 0

    def run(self, text: str, constraints: str, data: list[np.ndarray], num_threads: int) -> list[np.ndarray]:
        def results(words: Memory, log: list[Access]) -> list[np.ndarray]:
            return run_text(text, constraints, data, num_threads, words, log)

        log: list[Access] = []
        result = results(_Words(self.place), log)
        looks = [access for access in log if access.addresses and _where(self.place.pads, access.addresses[0])]
        if not looks or not looks[0].opcode.startswith("ld."):
            for access in log:
                self._note(access)
            return result
        (look,) = looks

        @functools.cache
        def passes(values: tuple[int, ...]) -> bool:
            given = dict(zip(look.addresses, values, strict=True))
            return bool(results(_Words(self.place, given=given), [])[0][0])

        count = next((count for count in range(40) if passes((count,) * len(look.addresses))), None)
        if count is None:
            raise ProtocolError("no words let this look pass")
        if self._num_failed < self.num_late and count > 0:
            self._num_failed += 1
            return results(_Words(self.place, count - 1), [])
        self._num_failed = 0 if ".acquire.sys." in look.opcode else self._num_failed
        words = [self._word(address, of=self.place.rank) for address in look.addresses]
        self.operations.append(Look(".acquire.sys." in look.opcode, tuple(words), passes))
        self.operations += [Barrier() for access in log[log.index(look) :] if access.opcode.startswith("bar.")]
        return results(_Words(self.place, count), [])

    def _note(self, access: Access) -> None:
        if access.opcode.startswith("bar."):
            self.operations.append(Barrier())
        elif access.opcode.startswith("st."):
            for address, value in zip(access.addresses, access.values, strict=True):
                target, _ = _where(self.place.pads, address) or (-1, 0)
                releases = ".release.sys." in access.opcode
                self.operations.append(Signal(releases, target, self._word(address, of=target), value))

    def _word(self, address: int, of: int) -> int:
        rank, offset = _where(self.place.pads, address) or (-1, 0)
        assert rank == of
        assert offset // 4 < self.place.num_ranks + 3, "only block 0 runs"
        return offset // 4

    def slices(self, ptrs: Any, mask: Any) -> list[tuple[int, int]]:
        """The slices that are loaded or stored, as (rank, slice)."""
        found = [_where(self.place.parts, int(address)) for address in ptrs.data[mask.data].flat]
        bytes_of = [(where[0], where[1] // SLICE_BYTES) for where in found if where]
        slices = sorted(set(bytes_of))
        assert len(bytes_of) == len(slices) * SLICE_BYTES // 4, "a part of a slice"
        return slices

    def load(self, ptrs: Any, mask: Any) -> None:
        self.operations += [Load(rank, place) for rank, place in self.slices(ptrs, mask)]

    def store(self, ptrs: Any, mask: Any) -> None:
        for rank, place in self.slices(ptrs, mask):
            self._num_stores += 1
            self.operations.append(
                Store(rank, place, 10_000 + self._num_stores * self.place.num_ranks + self.place.rank)
            )


@contextmanager
def _data_of(recorder: _Recorder) -> Iterator[None]:
    """The recorder also sees the loads and stores of Triton's own."""
    from triton.runtime.interpreter import InterpreterBuilder

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def noted_load(builder: Any, ptrs: Any, mask: Any, *args: Any, **options: Any) -> Any:
        recorder.load(ptrs, mask)
        return load(builder, ptrs, mask, *args, **options)

    def noted_store(builder: Any, ptrs: Any, value: Any, mask: Any, *args: Any) -> Any:
        recorder.store(ptrs, mask)
        return store(builder, ptrs, value, mask, *args)

    with mock.patch.multiple(InterpreterBuilder, create_masked_load=noted_load, create_masked_store=noted_store):
        yield


def recorded(
    name: str,
    num_ranks: int,
    num_launches: int,
    *,
    num_late: int = 0,
    edit: Callable[[str], str] = lambda text: text,
) -> list[list[Operation]]:
    """What each rank does in that many launches, and what it then reads of its own wire."""
    programs = []
    for place in places_of_one_process(num_ranks, "cpu"):
        recorder = _Recorder(Memory([]), edit=edit, place=place, num_late=num_late)
        todo = Round(num_ranks * SLICE_BYTES // 4)
        for launch in range(num_launches):
            values = tuple(1000 * (launch + 1) + 10 * place.rank + i for i in range(num_ranks))
            recorder.operations.append(Launch(place.rank, values))
            with ptx_in_kernels(recorder), _data_of(recorder):
                RUNNERS[name](place, todo)
            recorder.operations += [Load(place.rank, i) for i in range(num_ranks)]
        programs.append(recorder.operations)
    return programs


def num_states(programs: list[list[Operation]]) -> int:
    return explore(programs, len(programs), len(programs) + 3)


def without_last_meeting(program: Program) -> list[Operation]:
    """Nothing between the last store of a launch and the loads that follow."""
    kept: list[Operation] = []
    for number, operation in enumerate(program):
        rest = program[number:]
        end = next((i for i, later in enumerate(rest) if i and isinstance(later, Launch)), len(rest))
        is_last = not any(isinstance(later, Store) for later in rest[:end])
        if not (is_last and isinstance(operation, Barrier | Signal | Look)):
            kept.append(operation)
    return kept


def test_worked_example_of_the_explorer() -> None:
    def is_one(words: tuple[int, ...]) -> bool:
        return words == (1,)

    look = [Look(True, (0,), is_one), Barrier(), Load(0, 0)]
    explore([[Store(0, 0, 1), Barrier(), Signal(True, 1, 0, 1)], look], 1, 1)
    for fault in ([Store(0, 0, 1), Signal(True, 1, 0, 1)], [Store(0, 0, 1), Barrier(), Signal(False, 1, 0, 1)]):
        with pytest.raises(ProtocolError, match="rank 1: operation 2 loads 0 for 1"):
            explore([fault, look], 1, 1)
    with pytest.raises(ProtocolError, match="ranks wait for ever"):
        explore([[], look], 1, 1)


@grid(
    "name, num_ranks, num_launches",
    ["direct", "ring"],
    [2, 3],
    [1, 2, 3],
    keep=lambda name, num_ranks, num_launches: num_launches == (2 if num_ranks == 2 else 1),
)
def test_every_execution_loads_the_same(name: str, num_ranks: int, num_launches: int) -> None:
    assert num_states(recorded(name, num_ranks, num_launches)) > 50


@pytest.mark.parametrize("name", RUNNERS)
def test_a_wait_that_has_become_patient(name: str) -> None:
    eager, patient = (recorded(name, 2, 1, num_late=num_late) for num_late in (0, 33))
    looks = [[look.acquires for look in program if isinstance(look, Look)] for program in (eager[0], patient[0])]
    assert looks[0] == [True] * len(looks[0])
    assert looks[1] == [False, True] * len(looks[0])
    num_states(patient)


@pytest.mark.parametrize(
    ("name", "num_ranks", "before", "after"),
    [
        ("direct", 2, "st.release.sys", "st.relaxed.sys"),
        ("ring", 2, "st.release.sys", "st.relaxed.sys"),
        ("direct", 2, "st.release.sys", "st.release.gpu"),
        ("ring", 2, "bar.sync 0;", ""),
        ("direct", 2, "bar.sync 0;", ""),
        ("direct", 2, "ld.acquire.sys", "ld.relaxed.sys"),
        ("ring", 3, "ld.acquire.sys", "ld.relaxed.sys"),
        ("direct", 2, "setp.ge.s32 come", "setp.eq.s32 come"),
        ("ring", 2, "setp.ge.s32 come", "setp.eq.s32 come"),
        ("direct", 3, "bar.red.and", "bar.red.or"),
        ("direct", 2, "mad.wide.u32 word, thread, 4, $1", "mad.wide.u32 word, thread, 0, $1"),
    ],
)
def test_a_fault_in_the_instructions_is_found(name: str, num_ranks: int, before: str, after: str) -> None:
    edits = []

    def edit(text: str) -> str:
        edits.append(before in text)
        return text.replace(before, after)

    with pytest.raises(ProtocolError):
        num_states(recorded(name, num_ranks, 2 if num_ranks == 2 else 1, edit=edit))
    assert any(edits)


@pytest.mark.parametrize("name", RUNNERS)
def test_a_meeting_that_is_left_out_is_found(name: str) -> None:
    programs = recorded(name, 2, 2)
    assert num_states(programs)
    with pytest.raises(ProtocolError):
        num_states([without_last_meeting(program) for program in programs])
