"""The inline PTX of kernels, text by text: what each does, and that a text with a fault in it does not pass.

A mutant of a text has one instruction less, or one with another operand, comparison, width, predicate or order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, no_type_check

import pytest
import torch

from tests.support.kernels import needs_interpreter
from tests.support.ptx import InlinePtx, Memory, ptx_in_kernels
from torchring.kernels.lazy import lazy_jit
from torchring.kernels.signals import MAX_BLOCKS, is_aborted, look, send, signal_bytes

if TYPE_CHECKING:
    import triton.language as tl

pytestmark = needs_interpreter

NUM_RANKS = 3
Edit = Callable[[str], str]


@lazy_jit(uses=(send,))
@no_type_check
def _send_kernel(signals, width, skip, word, count, NUM_RANKS: tl.constexpr):
    send(signals, width, skip, word, count, NUM_RANKS, True)


@lazy_jit(uses=(look,))
@no_type_check
def _look_kernel(words, width, skip, count, pause, out):
    tl.store(out, look(words, width, skip, count, pause, True))


@lazy_jit(uses=(is_aborted,))
@no_type_check
def _is_aborted_kernel(abort, out):
    tl.store(out, is_aborted(abort, True))


def check_send(edit: Edit) -> InlinePtx:
    """A count in one word of each pad but the skipped one, by a store that releases what precedes a barrier."""
    pads = [torch.arange(signal_bytes(NUM_RANKS) // 4, dtype=torch.int32) + 1000 * rank for rank in range(NUM_RANKS)]
    signals = torch.tensor([pad.data_ptr() for pad in pads])
    inline = InlinePtx(Memory([signals, *pads]), edit=edit)
    line = pads[0].numel() // MAX_BLOCKS
    # (first pad, width, skip, word, count): as `direct` signals to all others, and `ring` to one.
    for first, width, skip, word, count in [
        (0, 3, 1, 2, 7),
        (0, 3, 0, 0, -5),
        (1, 1, -1, 4, 2**31 - 1),
        (2, 1, -1, 0, 1),
    ]:
        expected = [pad.clone() for pad in pads]
        written = [rank for rank in range(first, first + width) if rank - first != skip]
        for block in range(2):
            for rank in written:
                expected[rank][block * line + word] = count
        inline.log.clear()
        with ptx_in_kernels(inline):
            _send_kernel.launch(2, signals[first:], width, skip, word, count, NUM_RANKS=NUM_RANKS)
        for pad, what in zip(pads, expected, strict=True):
            assert pad.tolist() == what.tolist()
        steps = [(access.opcode, len(access.addresses)) for access in inline.log]
        stored = ("st.release.sys.global.u32", len(written))
        assert steps == [("ld.global.u64", len(written)), ("bar.sync", 0), stored] * 2
    return inline


def check_look(edit: Edit) -> InlinePtx:
    """1 if all words have come to a count, modulo 2**32; by loads that acquire, and a barrier behind them."""
    words = torch.zeros(NUM_RANKS + 2, dtype=torch.int32)
    out = torch.zeros(1, dtype=torch.int32)
    inline = InlinePtx(Memory([words]), edit=edit)
    for width, skip, count, pause, behind, come in [
        (3, 1, 5, 0, None, 1),
        (3, 1, -(2**31), 0, None, 1),
        (3, -1, -1, 400, None, 1),
        (3, 1, 5, 0, 0, 0),
        (3, 1, 5, 0, 1, 1),  # the word that does not matter
        (3, 1, 5, 0, 2, 0),
        (3, 1, 5, 0, 3, 1),  # beyond the words
        (3, 0, -(2**31), 0, 2, 0),
        (3, 0, 5, 400, 2, 0),
        (3, 0, 0, 400, 0, 1),
        (1, -1, 1, 0, 0, 0),
        (1, -1, 1, 0, 1, 1),
    ]:
        words.copy_(torch.tensor([count, count + 1, count, count, count]))
        if behind is not None:
            words[behind] = (count - 1 + 2**31) % 2**32 - 2**31
        inline.log.clear()
        with ptx_in_kernels(inline):
            _look_kernel.launch(1, words, width, skip, count, pause, out)
        assert out.item() == come, (width, skip, count, pause, behind)
        seen = [words.data_ptr() + 4 * i for i in range(width) if i != skip]
        load = f"ld.{'relaxed' if pause else 'acquire'}.sys.global.s32"
        steps = [(access.opcode, access.addresses) for access in inline.log if access.opcode.startswith(("ld", "bar"))]
        assert [step for step in steps if step[1]] == [(load, tuple(seen))]
        assert steps[-1] == ("bar.red.and.pred", ())
        paused = [access.values for access in inline.log if access.opcode == "nanosleep.u32"]
        assert paused == ([(pause,) * len(seen)] if pause else [])
    return inline


def check_is_aborted(edit: Edit) -> InlinePtx:
    """1 if the word is not 0, which one thread loads from host memory."""
    abort, out = torch.zeros(3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    inline = InlinePtx(Memory([abort]), edit=edit)
    for word in (0, 1, -1, -(2**31)):
        abort[:] = torch.tensor([1 - bool(word), word, 1 - bool(word)])
        inline.log.clear()
        with ptx_in_kernels(inline):
            _is_aborted_kernel.launch(1, abort[1:], out)
        assert out.item() == bool(word)
        steps = [(access.opcode, access.addresses) for access in inline.log]
        assert steps == [("ld.relaxed.sys.global.s32", (abort.data_ptr() + 4,)), ("bar.red.or.pred", ())]
    return inline


CHECKS = [check_send, check_look, check_is_aborted]

OPCODES = [
    (".lt.", ".le."),
    (".lt.", ".gt."),
    (".ge.", ".gt."),
    (".ge.", ".eq."),
    (".ne.", ".eq."),
    (".eq.", ".ne."),
    (".and.", ".or."),
    (".or.", ".and."),
    (".release.", ".relaxed."),
    (".acquire.", ".relaxed."),
    (".relaxed.", ".acquire."),
    (".sys.", ".gpu."),
    (".u32", ".u64"),
    (".u64", ".u32"),
    (".s32", ".s64"),
    (".b32", ".b64"),
    (".pred", ".u32"),
    (".wide.", ".lo."),
]


def mutants(text: str) -> Iterator[str]:
    statements = text.split(";")
    for number, statement in enumerate(statements):
        for changed in _changed(statement.strip().lstrip("{").strip()):
            opening = "{" if statement.strip().startswith("{") else ""
            yield ";".join([*statements[:number], opening + changed, *statements[number + 1 :]])


def _changed(statement: str) -> Iterator[str]:
    if not statement or statement == "}":
        return
    if statement.startswith(".reg"):
        kind = statement.split()[1]
        yield statement.replace(kind, {".u64": ".u32", ".pred": ".u32"}.get(kind, ".u64"))
        return
    yield ""
    match = re.fullmatch(r"(@!?\w+ )?(\S+)(.*)", statement, re.DOTALL)
    assert match is not None
    guard, opcode, rest = match[1] or "", match[2], match[3]
    if guard:
        yield opcode + rest
        yield f"@!{guard[1:]}" + opcode + rest
    for before, after in OPCODES:
        if before in opcode + ".":
            yield (
                guard
                + (opcode + ".").replace(before, after + "." * (before[-1] != "." and False), 1).rstrip(".")
                + rest
            )
    operands = re.findall(r"%?[\w$.]+", rest)
    for i, one in enumerate(operands):
        for other in operands[i + 1 :]:
            is_commutative = opcode.startswith(("setp.eq", "setp.ne", "mad.")) and i == 1 and other == operands[2]
            if one != other and not is_commutative:
                swapped = re.sub(r"%?[\w$.]+", lambda found: {one: other, other: one}.get(found[0], found[0]), rest)  # noqa: B023
                yield guard + opcode + swapped
        if re.fullmatch(r"\d+", one):
            yield guard + opcode + re.sub(rf"(?<![\w$]){one}\b", str(int(one) + 1), rest, count=1)
        if one.startswith("$"):
            yield guard + opcode + rest.replace(one, f"${int(one[1:]) + 1}")


# These do the same as what they replace.
SAME = [
    "mov.u32 $0, 1",  # of the result, which nobody uses
    "setp.eq.u32 mine, thread, 1",  # any one thread may look at the abort word
]


@pytest.mark.parametrize("check", CHECKS)
def test_what_it_does(check: Callable[[Edit], InlinePtx]) -> None:
    check(lambda text: text)


@pytest.mark.parametrize("check", CHECKS)
def test_a_mutant_is_noticed(check: Callable[[Edit], InlinePtx]) -> None:
    from triton.runtime.errors import InterpreterError

    unnoticed, num_mutants = [], 0
    for text in check(lambda text: text).texts:
        for mutant in mutants(text):
            num_mutants += 1
            try:
                check(lambda other: mutant if other == text else other)  # noqa: B023
            except (AssertionError, InterpreterError):
                continue
            pairs = zip(text.split(";"), mutant.split(";"), strict=True)
            unnoticed += [" ".join(after.split()) for before, after in pairs if before != after]
    assert num_mutants > 40
    assert [statement for statement in unnoticed if statement not in SAME] == []
