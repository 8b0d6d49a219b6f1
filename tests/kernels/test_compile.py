"""Every kernel compiled for GPUs that need not be here, and what the compiler made of it.

Memory speed needs 128-bit loads and stores, and registers enough for all values; both can be read in the machine code.
"""

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from tests.support.driver import DEVICE, OnDevice, driver_of
from tests.support.grids import grid
from tests.support.kernels import B16, F16, F32
from torchring.kernels import guard, lazy
from torchring.kernels.chunks import ChunkTable
from torchring.kernels.direct import prepare_direct
from torchring.kernels.launching import NUM_WARPS
from torchring.kernels.pack import prepare_pack, prepare_unpack
from torchring.kernels.quantize import prepare_decode, prepare_quantize
from torchring.kernels.ring import prepare_ring

triton = pytest.importorskip("triton")
pytestmark = [pytest.mark.sim, pytest.mark.skipif(lazy.INTERPRETED, reason="the interpreter has no compiler")]

# (dtype read, dtype written)
PAIRS = [(F32, F32), (F32, F16), (F32, B16), (F16, F32), (B16, B16)]
GPUS = ["sm_80", "sm_90", "sm_100", "gfx942"]


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Empty at first, so that no kernel comes from an earlier run; shared, so that each is compiled once."""
    with mock.patch.dict(os.environ, TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton"))):
        yield


def compiled(launch: Any, **options: Any) -> Any:
    """The kernel that the first call of a prepared launch compiles, on the current driver."""
    programs, arguments, own = launch._arguments
    kernel = launch._kernel.launch(programs, *arguments, **{**own, **options})
    launch._kernel.jitted.device_caches.clear()  # the next driver is another
    kernel.module = None  # or its end would ask the driver, which is gone by then, to unload it
    return kernel


class _Table(ChunkTable):
    """Of one tensor, on a device that is not here."""

    def __init__(self) -> None:
        super().__init__([4096], [0], device="cpu", layouts=[((4096, 1),)])
        self.device = DEVICE
        self.address, self.wire_offset, self.numel = [OnDevice(torch.int64)] * 3  # type: ignore[assignment]

    def launch_at(self, tensors: Any, dtype: torch.dtype, launch: Any) -> Any:
        return launch


def build_pack(
    read: torch.dtype, written: torch.dtype, gpu: str, wire: Any = None, check: bool = False, **options: Any
) -> Any:
    with driver_of(gpu):
        found: Any = OnDevice(torch.int32, 2) if check else None
        wire = wire or OnDevice(written, 4096)
        return compiled(prepare_pack(wire, _Table(), read, scale=0.5, found=found)([]), **options)


def build_unpack(read: torch.dtype, written: torch.dtype, gpu: str, wire: Any = None, **options: Any) -> Any:
    with driver_of(gpu):
        wire = wire or OnDevice(read, 4096)
        return compiled(prepare_unpack(wire, _Table(), written)([]), **options)


def build_direct(dtype: torch.dtype, gpu: str, num_ranks: int = 4, **halves: bool) -> Any:
    with driver_of(gpu):
        return compiled(prepare_direct(**_of_rank(dtype, num_ranks), begin=32_768, end=65_536, **halves))


def build_ring(dtype: torch.dtype, gpu: str, num_ranks: int = 4) -> Any:
    with driver_of(gpu):
        return compiled(prepare_ring(**_of_rank(dtype, num_ranks)))


def build_guard(gpu: str) -> Any:
    with driver_of(gpu), mock.patch.object(guard, "sent", lambda table, device: OnDevice(torch.int64, table.numel())):
        abort = OnDevice(torch.int32, device=torch.device("cpu"))
        return compiled(guard.prepare_guard([OnDevice(F32, 1000), OnDevice(B16, 7)], abort))  # type: ignore[arg-type, list-item]


def build_quantize(dtype: torch.dtype, gpu: str, *add: int) -> Any:
    with driver_of(gpu):
        return compiled(prepare_quantize(*_rows(dtype), OnDevice(F32), (5, 9), *add))  # type: ignore[arg-type]


def build_decode(dtype: torch.dtype, gpu: str) -> Any:
    with driver_of(gpu):
        return compiled(prepare_decode(*_rows(dtype)))


def _rows(dtype: torch.dtype) -> tuple[Any, Any, Any]:
    return OnDevice(dtype), OnDevice(torch.uint8, 1 << 16), OnDevice(torch.int32, 4 * 16)


def _of_rank(dtype: torch.dtype, num_ranks: int) -> dict[str, Any]:
    tensors = {"wires": OnDevice(torch.int64, num_ranks), "signals": OnDevice(torch.int64, num_ranks)}
    tensors |= {"wire": OnDevice(dtype, 100_000), "abort": OnDevice(torch.int32, device=torch.device("cpu"))}
    return {**tensors, "rank": 1, "num_ranks": num_ranks}


SIGNALLING: dict[str, Callable[..., Any]] = {"direct": build_direct, "ring": build_ring}


class Case(NamedTuple):
    """A kernel, and the bytes that a block moves by 128-bit loads and stores at least."""

    name: str
    build: Callable[[str], Any]
    loads: int = 0
    stores: int = 0
    num_warps: int = NUM_WARPS

    def __str__(self) -> str:
        return self.name.replace("torch.", "")


def _cases() -> Iterator[Case]:
    for name, build in (("pack", build_pack), ("unpack", build_unpack)):
        for read, written in PAIRS:
            sizes = 4096 * read.itemsize, 4096 * written.itemsize
            yield Case(f"{name} {read} to {written}", partial(build, read, written), *sizes, num_warps=4)
    for dtype in (F32, B16):
        yield Case(f"direct {dtype}", partial(build_direct, dtype), 4 * 8192, 4 * 8192)  # sums four wires, writes four
        # The ring adds two in one loop and copies one in the other.
        yield Case(f"ring {dtype}", partial(build_ring, dtype), 3 * 16384, 2 * 16384)
    for n in (2, 8):
        yield Case(f"gathers from {n}", partial(build_direct, F32, num_ranks=n, gather=True, spread=False))
        yield Case(f"spreads to {n}", partial(build_direct, F32, num_ranks=n, gather=False, spread=True))
    yield Case("pack, looking for what is not finite", partial(build_pack, F32, F16, check=True))
    yield Case("guard", build_guard)
    for dtype in (F32, F16, B16):
        size, coded = 4096 * dtype.itemsize, 4096
        loads, stores = size + 4 * 4096, coded + 8 * 4096  # feedback, and rows that travel in fp32
        yield Case(f"quantize {dtype}", partial(build_quantize, dtype), loads, stores, num_warps=4)
        add_up = lambda gpu, dtype=dtype: build_quantize(dtype, gpu, 1, 3)  # noqa: E731
        yield Case(f"add up {dtype}", add_up, loads + coded + 4 * 4096, stores, num_warps=4)
        yield Case(f"decode to {dtype}", partial(build_decode, dtype), coded + 4 * 4096, size, num_warps=4)


CASES = list(_cases())


def num_wide(compiled: Any, what: str) -> int:
    """128-bit instructions: `what` is "load" or "store"."""
    if "ptx" in compiled.asm:
        word = "ld" if what == "load" else "st"
        wide = rf"\b{word}\.global[.\w:]*\.(?:v4\.[bfu]32|v2\.[bfu]64)\b"
        copy = r"|\bcp\.async\.cg\.shared\.global .*, 0x10\b" if what == "load" else ""
        return len(re.findall(wide + copy, compiled.asm["ptx"]))
    return len(re.findall(rf"\b(?:global|buffer)_{what}_dwordx4\b", compiled.asm["amdgcn"]))


def spilled_bytes(compiled: Any, folder: Path) -> int:
    """Bytes per thread that did not fit into registers."""
    if "amdgcn" in compiled.asm:
        counts = re.findall(
            r"\.(?:vgpr_spill_count|sgpr_spill_count|private_segment_fixed_size):\s+(\d+)", compiled.asm["amdgcn"]
        )
        assert len(counts) == 3
        return sum(map(int, counts))
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    command = [Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump", "-res-usage", cubin]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    usage = re.search(r"STACK:(\d+) .*LOCAL:(\d+)", report)
    assert usage is not None, report
    return int(usage[1]) + int(usage[2])


@grid("case, gpu", CASES, GPUS, keep=lambda case, gpu: GPUS[CASES.index(case) % len(GPUS)] == gpu)
def test_128_bits_at_a_time_and_no_spills(case: Case, gpu: str, tmp_path: Path) -> None:
    compiled = case.build(gpu)
    bytes_at_a_time = 16 * case.num_warps * (32 if gpu.startswith("sm_") else 64)
    assert num_wide(compiled, "load") >= case.loads // bytes_at_a_time
    assert num_wide(compiled, "store") >= case.stores // bytes_at_a_time
    assert spilled_bytes(compiled, tmp_path) == 0


_EVENTS = {
    "store": re.compile(r"\bst\.global\b"),
    "barrier": re.compile(r"\bbar(?:rier)?\.(?:cta\.)?(?:sync|red)\b"),
    "send": re.compile(r"\bst\.release\.sys\.global\b"),
    "look": re.compile(r"\bld\.acquire\.sys\.global\b"),
    "load": re.compile(r"\bld\.global\.v4\b|\bcp\.async\.cg\b"),
    "atomic": re.compile(r"\b(?:atom|red)\.(?:\w+\.)*(?:global|sys|gpu)\b"),
}


def events_in(ptx: str) -> list[str]:
    named = [next((name for name, what in _EVENTS.items() if what.search(line)), "") for line in ptx.splitlines()]
    return [name for name in named if name]


def unordered(events: list[str]) -> list[str]:
    """Stores that nothing orders before the signal that tells of them, and loads that may overtake their signal."""
    wrong = []
    for i, event in enumerate(events):
        if event == "send":
            before = next(name for name in reversed(["barrier", *events[:i]]) if name in ("barrier", "store"))
            wrong += ["store, send"] * (before == "store")
        elif event == "look":
            after = next(name for name in [*events[i + 1 :], "barrier"] if name in ("barrier", "load"))
            wrong += ["look, load"] * (after == "load")
        elif event == "atomic":
            wrong.append(event)
    return wrong


@grid("name, num_ranks", list(SIGNALLING), [2, 4], keep=lambda name, num_ranks: num_ranks == 4)
def test_signals_are_ordered_with_the_data(name: str, num_ranks: int) -> None:
    ptx = SIGNALLING[name](F32 if name == "direct" else B16, "sm_90", num_ranks).asm["ptx"]
    events = events_in(ptx)
    num_waits = 2 if name == "direct" else 3
    # One for all ranks at a time; the ring's four become three where there is but one step.
    assert events.count("send") == (2 if name == "direct" else min(num_ranks + 1, 4))
    assert events.count("look") >= 2 * num_waits  # once in the loop, and again after a relaxed look
    assert len(re.findall(r"\bld\.relaxed\.sys\.global\b", ptx)) >= 2 * num_waits  # of words, and of the abort word
    assert "load" in events
    assert "store" in events
    assert unordered(events) == []


def test_a_missing_barrier_would_show() -> None:
    lines = {
        "store": "@%p7 st.global.v4.b32 [ %rd57 + 0 ], { %r74, %r75, %r76, %r77 };",
        "barrier": "bar.red.and.pred come, 0, come;",
        "send": "@mine st.release.sys.global.u32 [pad], %r7;",
        "look": "@eager ld.acquire.sys.global.s32 seen, [word];",
        "load": "cp.async.cg.shared.global [ %r42 + 0 ], [ %rd47 + 0 ], 0x10, %r43;",
        "atomic": "@%p1 atom.global.sys.release.exch.b32 %r6, [ %rd26 + 0 ], %r7;",
    }
    assert events_in("\n".join(["mov.u32 %r3, %tid.x;", *lines.values()])) == list(lines)
    assert unordered(["barrier", "store", "send", "look", "load", "atomic"]) == ["store, send", "look, load", "atomic"]
    assert unordered(["store", "barrier", "send", "look", "barrier", "load"]) == []


def test_without_alignment_nothing_is_wide() -> None:
    wire = OnDevice(F32, 4096, address=8)
    assert num_wide(build_pack(F32, F32, "sm_90", wire), "store") == 0
    assert num_wide(build_unpack(F32, F32, "sm_90", wire), "load") == 0


def test_too_few_registers_show_as_spills(tmp_path: Path) -> None:
    assert spilled_bytes(build_pack(F32, F32, "sm_90", maxnreg=24), tmp_path) > 0


def test_offsets_have_64_bits() -> None:
    for kernel in (build_pack(F32, F32, "sm_90"), build_unpack(F32, F32, "sm_90")):
        # One step to the chunk, and from there by less than a chunk.
        assert re.findall(r"tt\.addptr %wire, %\w+ : !tt\.ptr<f32>, (i\d+)", kernel.asm["ttir"]) == ["i64"]
    # One step to the tile, and from there by less than a tile. The ring's words lie in a small pad.
    steps = re.findall(r"tt\.addptr %\S+, %\w+ : !tt\.ptr<f32>, (i\d+)", build_direct(F32, "sm_90").asm["ttir"])
    assert len(steps) >= 12
    assert set(steps) == {"i64"}
    ring = build_ring(B16, "sm_90").asm["ttir"]
    assert set(re.findall(r"tt\.addptr .*, tensor<\d+x(i\d+)>", ring)) == {"i64"}


@pytest.mark.parametrize("build", [build_pack, build_unpack])
def test_only_aligned_addresses_take_the_wide_path(build: Callable[..., Any]) -> None:
    # The interpreter ignores alignment and a GPU faults, so the branch is checked where it is decided.
    ttir = build(F32, F32, "sm_90").asm["ttir"]
    aligned, misaligned = re.split(r"\n\s*} else {", ttir[ttir.index("arith.remsi") :], maxsplit=1)
    assert re.search(r"arith\.cmpi eq, .*\n\s*scf\.if", aligned), ttir
    assert "tt.divisibility" in aligned
    assert "tt.divisibility" not in misaligned
