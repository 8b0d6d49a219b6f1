"""Runs the inline PTX of kernels that Triton interprets, which Triton itself does not.

    with ptx_in_kernels(InlinePtx([*pads, abort])) as run:
        direct(...)
    run.log    what memory was touched by which instruction, and the barriers

All threads of a block run in lockstep. Operands are scalars, the same for 256 threads. What ptxas checks, such as the
types of registers, `test_compile.py` leaves to ptxas. Errors here: memory outside of the tensors, a barrier that some
threads do not come to, a result that is not the same for all threads, an operand that is read after a result was
written (results may share registers with operands), and a memory access that the constraints do not admit.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from torchring.kernels import launching

NUM_THREADS = 32 * launching.NUM_WARPS
_COMPARE = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal}
_COMPARE["ne"] = np.not_equal


class PtxError(Exception):
    """PTX that no kernel may rely on."""


class Access(NamedTuple):
    """An instruction that touches memory or waits at a barrier, and what it did for each active thread."""

    opcode: str
    addresses: tuple[int, ...] = ()
    values: tuple[int, ...] = ()


def _typed(values: np.ndarray, kind: str) -> np.ndarray:
    """Numbers as one of a type such as u32 has them, in int64: addresses are below 2**63."""
    unused = 64 - int(kind[1:])
    return values << unused >> unused if kind[0] == "s" or not unused else values & (2 ** (64 - unused) - 1)


@dataclass
class InlinePtx:
    """Takes the place of the interpreter's `create_inline_asm`."""

    tensors: Sequence[torch.Tensor]  # that inline PTX may touch by address
    edit: Callable[[str], str] = lambda text: text  # applied to each text before it runs
    log: list[Access] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)  # that ran

    def __call__(
        self, text: str, constraints: str, handles: list[Any], types: list[Any], is_pure: bool, pack: int
    ) -> SimpleNamespace:
        from triton.runtime.interpreter import TensorHandle

        self.texts.add(text)
        if is_pure or pack != 1:
            raise PtxError("what touches memory is not pure, and is not packed")
        before, block = len(self.log), _Block(self, [int(handle.data.item()) for handle in handles])
        for statement in self.edit(text).strip().removeprefix("{").removesuffix("}").split(";"):
            block.run(" ".join(statement.split()))
        if len(self.log) > before and "~{memory}" not in constraints:
            raise PtxError(f"memory is touched, and the constraints are {constraints}")
        result = block.values["$0"].astype(np.int32)
        if (result != result[0]).any():
            raise PtxError("a scalar that is not the same for all threads")
        return SimpleNamespace(get_result=lambda i: TensorHandle(result[:1], types[i].scalar))

    def cell(self, address: int, kind: str) -> np.ndarray:
        """One element, which may be written."""
        size = int(kind[1:]) // 8
        for tensor in self.tensors:
            begin = address - tensor.data_ptr()
            if 0 <= begin < tensor.nbytes:
                return tensor.flatten().view(torch.uint8).numpy()[begin : begin + size].view(f"i{size}")
        raise PtxError(f"no memory at {address:#x}")


class _Block:
    """The threads of a block while they run one text."""

    def __init__(self, inline: InlinePtx, operands: list[int]) -> None:
        self.inline = inline
        self.values: dict[str, np.ndarray] = {"%tid.x": np.arange(NUM_THREADS)}  # int64; of predicates bool
        self.values |= {f"${i}": np.full(NUM_THREADS, operand) for i, operand in enumerate(operands, 1)}
        self.active = np.ones(NUM_THREADS, bool)

    def run(self, statement: str) -> None:
        if statement.startswith(".reg") or not statement:
            return
        match = re.fullmatch(r"(?:@(!?)(\w+) )?([\w.]+) (.+)", statement)
        if match is None:
            raise PtxError(f"cannot read {statement!r}")
        negated, guard, opcode, operands = match.groups()
        self.active = np.ones(NUM_THREADS, bool) if guard is None else self.values[guard] ^ bool(negated)
        name, *suffixes = opcode.split(".")
        getattr(self, f"_{name}")(opcode, suffixes, *operands.split(", "))

    def read(self, name: str, kind: str) -> np.ndarray:
        if re.fullmatch(r"-?\d+", name):
            return np.full(NUM_THREADS, int(name))
        if name.startswith("$") and "$0" in self.values:
            raise PtxError(f"{name} is read after a result was written")
        assert self.values[name].dtype == np.int64, f"{name} is a predicate"
        return _typed(self.values[name], kind)

    def write(self, name: str, values: np.ndarray) -> None:
        if name.startswith("$") and name != "$0":
            raise PtxError(f"{name} is no result")
        garbage = np.arange(NUM_THREADS).astype(values.dtype)
        self.values[name] = np.where(self.active, values, self.values.get(name, garbage))

    def _mov(self, opcode: str, suffixes: list[str], target: str, source: str) -> None:
        self.write(target, self.read(source, suffixes[0]))

    def _setp(
        self, opcode: str, suffixes: list[str], target: str, first: str, second: str, other: str | None = None
    ) -> None:
        comparison, *combined, kind = suffixes
        result = _COMPARE[comparison](self.read(first, kind), self.read(second, kind))
        if other is not None:
            result = {"and": np.logical_and, "or": np.logical_or}[combined[0]](result, self.values[other])
        self.write(target, result)

    def _selp(self, opcode: str, suffixes: list[str], target: str, yes: str, no: str, name: str) -> None:
        self.write(target, np.where(self.values[name], self.read(yes, suffixes[0]), self.read(no, suffixes[0])))

    def _sub(self, opcode: str, suffixes: list[str], target: str, first: str, second: str) -> None:
        kind = suffixes[0]
        self.write(target, _typed(self.read(first, kind) - self.read(second, kind), kind))

    def _mad(self, opcode: str, suffixes: list[str], target: str, first: str, second: str, third: str) -> None:
        assert suffixes == ["wide", "u32"]
        self.write(target, self.read(first, "u32") * self.read(second, "u32") + self.read(third, "u64"))

    def _ld(self, opcode: str, suffixes: list[str], target: str, address: str) -> None:
        at = self.read(address[1:-1], "u64")[self.active].tolist()
        loaded = [int(self.inline.cell(each, suffixes[-1])[0]) for each in at]
        self.inline.log.append(Access(opcode, tuple(at), tuple(loaded)))
        values = np.zeros(NUM_THREADS, np.int64)
        values[self.active] = loaded
        self.write(target, values)

    def _st(self, opcode: str, suffixes: list[str], address: str, source: str) -> None:
        at = self.read(address[1:-1], "u64")[self.active].tolist()
        values = self.read(source, "s" + suffixes[-1][1:])[self.active].tolist()
        self.inline.log.append(Access(opcode, tuple(at), tuple(values)))
        for each, value in zip(at, values, strict=True):
            self.inline.cell(each, suffixes[-1])[0] = value

    def _bar(self, opcode: str, suffixes: list[str], *operands: str) -> None:
        if not self.active.all():
            raise PtxError(f"some threads do not come to {opcode}")
        if suffixes == ["sync"]:
            (barrier,) = operands
        else:
            target, barrier, name = operands
            how = {"red.and.pred": np.all, "red.or.pred": np.any}[".".join(suffixes)]
            self.write(target, np.full(NUM_THREADS, how(self.values[name])))
        assert barrier == "0"
        self.inline.log.append(Access(opcode))

    def _nanosleep(self, opcode: str, suffixes: list[str], name: str) -> None:
        pauses = self.read(name, suffixes[0])[self.active].tolist()
        if pauses:
            assert max(pauses) <= 1_000_000, "nanosleep takes a millisecond at most"
            self.inline.log.append(Access(opcode, (), tuple(pauses)))
            time.sleep(3e-4)  # and not the 400 ns of a GPU: whoever is to send a signal may need this core


@contextmanager
def ptx_in_kernels(inline: InlinePtx) -> Iterator[InlinePtx]:
    """Interpreted `direct` and `ring` run as on an NVIDIA GPU: with inline PTX."""
    from triton.runtime.interpreter import InterpreterBuilder

    with (
        mock.patch.object(InterpreterBuilder, "create_inline_asm", lambda _, *arguments: inline(*arguments)),
        mock.patch.object(launching, "takes_ptx", return_value=True),
    ):
        yield inline
