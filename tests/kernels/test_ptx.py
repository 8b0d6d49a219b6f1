"""The inline PTX of kernels, text by text: what each does, and that a text with a fault in it does not pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, no_type_check

import pytest
import torch

from tests.support.kernels import needs_interpreter
from tests.support.ptx import InlinePtx, ptx_in_kernels
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
    inline = InlinePtx([signals, *pads], edit)
    line = pads[0].numel() // MAX_BLOCKS
    # (first pad, width, skip, word, count): as `direct` signals to all others, and `ring` to one.
    for first, width, skip, word, count in [(0, 3, 1, 2, 7), (0, 3, 0, 0, -5), (1, 1, -1, 4, 2**31 - 1)]:
        expected = [pad.clone() for pad in pads]
        written = [rank for rank in range(first, first + width) if rank - first != skip]
        for block in range(2):
            for rank in written:
                expected[rank][block * line + word] = count
        inline.log.clear()
        with ptx_in_kernels(inline):
            _send_kernel.launch(2, signals[first:], width, skip, word, count, NUM_RANKS=NUM_RANKS)
        assert all(map(torch.equal, pads, expected))
        steps = [(access.opcode, len(access.addresses)) for access in inline.log]
        stored = ("st.release.sys.global.u32", len(written))
        assert steps == [("ld.global.u64", len(written)), ("bar.sync", 0), stored] * 2
    return inline


def check_look(edit: Edit) -> InlinePtx:
    """1 if all words have come to a count, modulo 2**32; by loads that acquire, and a barrier behind them."""
    words = torch.zeros(NUM_RANKS + 2, dtype=torch.int32)
    out = torch.zeros(1, dtype=torch.int32)
    inline = InlinePtx([words], edit)
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
    inline = InlinePtx([abort], edit)
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


@pytest.mark.parametrize("check", CHECKS)
def test_what_it_does(check: Callable[[Edit], InlinePtx]) -> None:
    check(lambda text: text)


# What a statement may have in place of something else, besides not being there.
FAULTS = [
    (".lt.", ".le."), (".lt.", ".gt."), (".ge.", ".gt."), (".ge.", ".eq."), (".ne.", ".eq."), (".eq.", ".ne."),
    (".and.", ".or."), (".or.", ".and."), (".release.", ".relaxed."), (".acquire.", ".relaxed."), (".sys.", ".gpu."),
    ("@mine ", ""), ("@mine ", "@!mine "), ("@patient ", "@eager "), ("@eager ", ""), ("$2", "$3"), ("$3", "$4"),
    ("$4", "$5"), ("$5", "$4"), (" 4,", " 8,"), (" 8,", " 4,"), (", 1, 0,", ", 0, 1,"),
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
def test_a_fault_is_noticed(check: Callable[[Edit], InlinePtx]) -> None:
    from triton.runtime.errors import InterpreterError

    (text,) = check(lambda text: text).texts
    statements = [each for each in text.split(";") if each.strip() not in ("", "}") and ".reg" not in each]
    faults = [(each, "") for each in statements]
    faults += [(each, each.replace(*fault)) for each in statements for fault in FAULTS if fault[0] in each]
    unnoticed = []
    for before, after in faults:
        try:
            check(lambda text: text.replace(f"{before};", f"{after};"))  # noqa: B023
        except (AssertionError, InterpreterError):
            continue
        unnoticed.append((before.strip(), after.strip()))
    assert unnoticed == []
