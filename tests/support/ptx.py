"""Runs the inline PTX of kernels that Triton interprets, which Triton itself does not.

    with ptx_in_kernels(Memory([*pads, abort])) as run:
        direct(...)
    run.log    what memory was touched by which instruction, and the barriers

All threads of a block run in lockstep. An operand that is a tensor has an element for each thread; scalars are the same
for 256 threads. The rules that ptxas checks are checked here, too: registers are declared, and have the width and the
kind of the instruction. More than ptxas does: memory outside `Memory` is an error, and so is a barrier that some
threads do not come to, a scalar result that is not the same for all threads, an operand that is read after a result was
written (results may share registers with operands), and a memory access that the constraints do not admit.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from torchring.kernels import launching

NUM_THREADS = 32 * launching.NUM_WARPS
_GARBAGE = 0xA5A5_A5A5_A5A5_A5A5
_WIDTHS = {"pred": 1, "r": 32, "l": 64}


class PtxError(Exception):
    """PTX that ptxas would refuse, or that no kernel may rely on."""


class Access(NamedTuple):
    """An instruction that touches memory or waits at a barrier, and what it did for each active thread."""

    opcode: str
    addresses: tuple[int, ...] = ()
    values: tuple[int, ...] = ()


class Memory:
    """The tensors that inline PTX may touch by address."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._regions = [(tensor.data_ptr(), _bytes_of(tensor)) for tensor in tensors]

    def load(self, addresses: np.ndarray, width: int) -> np.ndarray:
        cells = [self._cell(int(address), width) for address in addresses]
        return np.array([words[index] for words, index in cells], np.uint64)

    def store(self, addresses: np.ndarray, width: int, values: np.ndarray) -> None:
        for address, value in zip(addresses, values, strict=True):
            words, index = self._cell(int(address), width)
            words[index] = int(value) % 2**width

    def _cell(self, address: int, width: int) -> tuple[np.ndarray, int]:
        for begin, region in self._regions:
            if begin <= address < begin + len(region):
                if (address - begin) % (width // 8):
                    raise PtxError(f"an access of {width} bits at {address:#x}")
                return region.view(f"u{width // 8}"), (address - begin) // (width // 8)
        raise PtxError(f"no memory at {address:#x}")


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.flatten().view(torch.uint8).numpy()


class _Instruction(NamedTuple):
    guard: str  # "", "p" or "!p"
    opcode: str
    operands: tuple[str, ...]


@cache
def _parse(text: str) -> tuple[dict[str, str], list[_Instruction]]:
    """The declared registers with their types, and the instructions."""
    text = text.strip()
    if scoped := text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    registers: dict[str, str] = {}
    instructions = []
    *statements, rest = (" ".join(statement.split()) for statement in text.split(";"))
    if rest:
        raise PtxError(f"no semicolon after {rest!r}")
    for statement in filter(None, statements):
        if declared := re.fullmatch(r"\.reg \.(\w+) (.+)", statement):
            if not scoped:
                raise PtxError("registers that are declared outside of braces meet those of the next copy")
            registers |= {name.strip(): declared[1] for name in declared[2].split(",")}
            continue
        match = re.fullmatch(r"(?:@(!?\w+) )?([\w.:]+)(?: (.+))?", statement)
        if match is None:
            raise PtxError(f"cannot read {statement!r}")
        operands = re.findall(r"\{[^}]*\}|[^,\s]+", match[3] or "")
        instructions.append(_Instruction(match[1] or "", match[2], tuple(operands)))
    return registers, instructions


def _signed(values: np.ndarray, width: int) -> np.ndarray:
    """Bits, as uint64, that are read as a signed number."""
    return (values << np.uint64(64 - width)).view(np.int64) >> (64 - width)


def _low(values: np.ndarray, width: int) -> np.ndarray:
    return values & np.uint64(2**width - 1)


@dataclass
class _Threads:
    """The threads of a block while they run one text."""

    memory: Memory
    num_threads: int
    log: list[Access]
    types: dict[str, str]  # of all registers and operands
    values: dict[str, np.ndarray]  # bits as uint64; of a predicate bool
    num_results: int
    has_written: bool = False
    active: np.ndarray = field(init=False)

    def run(self, instruction: _Instruction) -> None:
        guard, opcode, operands = instruction
        self.active = np.ones(self.num_threads, bool)
        if guard:
            self.active = self.predicate(guard)
        name, *suffixes = opcode.split(".")
        try:
            getattr(self, f"_{name}")(opcode, suffixes, operands)
        except (AttributeError, ValueError, IndexError, KeyError) as error:
            raise PtxError(f"cannot run {opcode} {', '.join(operands)}") from error

    def predicate(self, name: str) -> np.ndarray:
        negated, name = name.startswith("!"), name.removeprefix("!")
        if self.types.get(name) != "pred" or name not in self.values:
            raise PtxError(f"{name} is no predicate that was set")
        return ~self.values[name] if negated else self.values[name]

    def read(self, name: str, kind: str, *, or_wider: bool = False) -> np.ndarray:
        if name == "%tid.x":
            return np.arange(self.num_threads, dtype=np.uint64)
        if re.fullmatch(r"-?\d+", name):
            return np.full(self.num_threads, int(name) % 2**64, np.uint64)
        self._check(name, kind, or_wider)
        if name.startswith("$") and self.has_written:
            raise PtxError(f"{name} is read after a result was written")
        if name not in self.values:
            raise PtxError(f"{name} is read before it is written")
        return self.values[name]

    def write(self, name: str, kind: str, values: np.ndarray, *, or_wider: bool = False) -> None:
        self._check(name, kind, or_wider)
        if name.startswith("$"):
            self.has_written = True
            if int(name[1:]) >= self.num_results:
                raise PtxError(f"{name} is no result")
        before = self.values.get(name, np.full(self.num_threads, _GARBAGE).astype(values.dtype))
        width = _width(self.types[name])
        self.values[name] = np.where(self.active, values if width == 1 else _low(values, width), before)

    def _check(self, name: str, kind: str, or_wider: bool) -> None:
        if name not in self.types:
            raise PtxError(f"{name} is not declared")
        own = self.types[name]
        fits = _width(own) == _width(kind) or (or_wider and _width(own) > _width(kind))
        floats = own[0] == "f", kind[0] == "f"
        if not fits or (own == "pred") != (kind == "pred") or (floats[0] != floats[1] and "b" not in (own[0], kind[0])):
            raise PtxError(f"{name} is .{own}, and the instruction works on .{kind}")

    def addresses(self, operand: str) -> np.ndarray:
        """Of the active threads."""
        if not (operand.startswith("[") and operand.endswith("]")):
            raise PtxError(f"{operand} is no address")
        return self.read(operand[1:-1], "u64")[self.active]

    def note(self, opcode: str, addresses: np.ndarray, values: np.ndarray) -> None:
        self.log.append(Access(opcode, tuple(addresses.tolist()), tuple(values.tolist())))

    def _mov(self, opcode: str, suffixes: list[str], operands: tuple[str, ...]) -> None:
        (kind,), (target, source) = suffixes, operands
        self.write(target, kind, self.read(source, kind))

    def _setp(self, opcode: str, suffixes: list[str], operands: tuple[str, ...]) -> None:
        (comparison, *combined, kind), (target, first, second, *other) = suffixes, operands
        width = _width(kind)
        pair = [_low(self.read(name, kind), width) for name in (first, second)]
        if kind.startswith("s"):
            pair = [_signed(values, width) for values in pair]
        compare = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
        result = {**compare, "eq": np.equal, "ne": np.not_equal}[comparison](*pair)
        if combined:
            (how,), (name,) = combined, other
            result = {"and": np.logical_and, "or": np.logical_or}[how](result, self.predicate(name))
        elif other:
            raise ValueError("an operand too many")
        self.write(target, "pred", result)

    def _selp(self, opcode: str, suffixes: list[str], operands: tuple[str, ...]) -> None:
        (kind,), (target, yes, no, name) = suffixes, operands
        self.write(target, kind, np.where(self.predicate(name), self.read(yes, kind), self.read(no, kind)))

    def _sub(self, opcode: str, suffixes: list[str], operands: tuple[str, ...]) -> None:
        (kind,), (target, first, second) = suffixes, operands
        self.write(target, kind, self.read(first, kind) - self.read(second, kind))

    def _mad(self, opcode: str, suffixes: list[str], operands: tuple[str, ...]) -> None:
        (part, kind), (target, first, second, third) = suffixes, operands
        width = _width(kind)
        factors = [_low(self.read(name, kind), width) for name in (first, second)]
        if kind.startswith("s"):
            factors = [_signed(values, width).view(np.uint64) for values in factors]
        result = {"wide": f"{kind[0]}{2 * width}", "lo": kind}[part]
        self.write(target, result, factors[0] * factors[1] + self.read(third, result))

    def _ld(self, opcode: str, suffixes: list[str], operands: tuple[str, ...]) -> None:
        (*_, kind), (target, address) = suffixes, operands
        width, at = _width(kind), self.addresses(address)
        loaded = self.memory.load(at, width)
        self.note(opcode, at, loaded)
        values = np.zeros(self.num_threads, np.uint64)
        values[self.active] = _signed(loaded, width).view(np.uint64) if kind.startswith("s") else loaded
        self.write(target, kind, values, or_wider=True)

    def _st(self, opcode: str, suffixes: list[str], operands: tuple[str, ...]) -> None:
        (*_, kind), (address, source) = suffixes, operands
        width, at = _width(kind), self.addresses(address)
        values = _low(self.read(source, kind, or_wider=True)[self.active], width)
        self.note(opcode, at, values)
        self.memory.store(at, width, values)

    def _bar(self, opcode: str, suffixes: list[str], operands: tuple[str, ...]) -> None:
        if not self.active.all():
            raise PtxError(f"some threads do not come to {opcode}")
        if suffixes == ["sync"]:
            barrier = operands
        else:
            target, *barrier, name = operands  # type: ignore[assignment]
            how = {"red.and.pred": np.all, "red.or.pred": np.any}[".".join(suffixes)]
            self.write(target, "pred", np.full(self.num_threads, how(self.predicate(name))))
        if list(barrier) != ["0"]:
            raise PtxError(f"{opcode} at another barrier than 0")
        self.log.append(Access(opcode))

    def _nanosleep(self, opcode: str, suffixes: list[str], operands: tuple[str, ...]) -> None:
        (kind,), (name,) = suffixes, operands
        pauses = self.read(name, kind)[self.active]
        if len(pauses):
            if pauses.max() > 1_000_000:
                raise PtxError("nanosleep takes a millisecond at most")
            self.note(opcode, pauses[:0], pauses)
            time.sleep(3e-4)  # and not the 400 ns of a GPU: whoever is to send a signal may need this core


def _width(kind: str) -> int:
    """Bits of a type: 32 of "u32", "b32", "bf16x2" or "f32"."""
    return 1 if kind == "pred" else int(kind.lstrip("abfsu"))


def run_text(
    text: str, constraints: str, operands: Sequence[np.ndarray], num_threads: int, memory: Memory, log: list[Access]
) -> list[np.ndarray]:
    """The results of inline PTX, each as the bits that every thread has."""
    declared, instructions = _parse(text)
    kinds = [constraint.strip() for constraint in constraints.split(",")]
    num_results = sum(kind.startswith("=") for kind in kinds)
    registers = [f"b{_WIDTHS[kind.lstrip('=')]}" for kind in kinds if kind != "~{memory}"]
    if len(registers) != num_results + len(operands):
        raise PtxError(f"{len(operands)} operands for {constraints}")
    for values, kind in zip(operands, registers[num_results:], strict=True):
        if values.dtype.itemsize * 8 != _width(kind):
            raise PtxError(f"an operand of {values.dtype} for {constraints}")
    names = [f"${i}" for i in range(len(registers))]
    given = [
        np.broadcast_to(values.view(f"u{values.dtype.itemsize}").astype(np.uint64), num_threads) for values in operands
    ]
    values = dict(zip(names[num_results:], given, strict=True))
    types = declared | dict(zip(names, registers, strict=True))
    num_before = len(log)
    threads = _Threads(memory, num_threads, log, types, values, num_results)
    for instruction in instructions:
        threads.run(instruction)
    if len(log) > num_before and "~{memory}" not in kinds:
        raise PtxError(f"memory is touched, and the constraints are {constraints}")
    missing = [name for name in names[:num_results] if name not in threads.values]
    if missing:
        raise PtxError(f"no value for {missing}")
    return [threads.values[name] for name in names[:num_results]]


@dataclass
class InlinePtx:
    """Takes the place of the interpreter's `create_inline_asm`."""

    memory: Memory
    log: list[Access] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)  # each text that ran, and its constraints
    edit: Callable[[str], str] = lambda text: text  # applied to each text before it runs

    def __call__(
        self, text: str, constraints: str, handles: list[Any], types: list[Any], is_pure: bool, pack: int
    ) -> SimpleNamespace:
        from triton.runtime.interpreter import TensorHandle, _get_np_dtype

        self.texts[text] = constraints
        if is_pure or pack != 1:
            raise PtxError("what touches memory is not pure, and is not packed")
        data = [handle.data for handle in handles]
        shape = np.broadcast_shapes(*(array.shape for array in data)) if data else (1,)
        is_scalar = shape in ((), (1,))
        if not is_scalar and ("%tid" in text or "bar." in text):
            raise PtxError("threads that have an element each are not those of the block")
        num_threads = NUM_THREADS if is_scalar else shape[0]
        results = run_text(self.edit(text), constraints, data, num_threads, self.memory, self.log)
        if is_scalar:
            if any((result != result[0]).any() for result in results):
                raise PtxError("a scalar that is not the same for all threads")
            results = [result[:1] for result in results]
        made = []
        for bits, kind in zip(results, types, strict=True):
            dtype = np.dtype(_get_np_dtype(kind.scalar))
            made.append(TensorHandle(bits.astype(f"u{dtype.itemsize}").view(dtype), kind.scalar))
        return SimpleNamespace(get_result=lambda i: made[i])


@contextmanager
def ptx_in_kernels(memory: Memory | InlinePtx) -> Iterator[InlinePtx]:
    """Interpreted `direct` and `ring` run as on an NVIDIA GPU: with inline PTX."""
    from triton.runtime.interpreter import InterpreterBuilder

    inline = memory if isinstance(memory, InlinePtx) else InlinePtx(memory)
    with (
        mock.patch.object(InterpreterBuilder, "create_inline_asm", lambda _, *arguments: inline(*arguments)),
        mock.patch.object(launching, "takes_ptx", return_value=True),
    ):
        yield inline
