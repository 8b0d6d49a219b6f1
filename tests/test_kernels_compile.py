# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiled for GPUs that need not be here, and what the compiler made of it.

Memory speed needs 128-bit loads and stores, and registers enough for all values; both can be read in the machine code.
"""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchring.kernels import lazy, reference
from torchring.kernels.accumulate import _BLOCK, _accumulate_kernel
from torchring.kernels.pack import _pack_kernel
from torchring.kernels.unpack import _unpack_kernel

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(lazy.INTERPRETED, reason="the interpreter has no compiler")

F32, F16, B16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
SHORT = {F32: "fp32", F16: "fp16", B16: "bf16", F64: "fp64"}
# (dtype read, dtype written)
PAIRS = [(F32, F32), (F32, F16), (F32, B16), (F16, F32), (B16, B16)]
GPUS = ["sm_80", "sm_90", "sm_100", "gfx942"]
NUM_PARTS = 4


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def build(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], aligned: str, gpu: str, **options: Any
) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    cuda = gpu.startswith("sm_")
    target = GPUTarget("cuda", int(gpu[3:]), 32) if cuda else GPUTarget("hip", gpu, 64)
    attributes = {(list(signature).index(aligned),): [["tt.divisibility", 16]]} if aligned else {}
    source = ASTSource(kernel.jitted, signature, constants, attributes)
    return triton.compile(source, target=target, options={"num_warps": 4, "enable_fp_fusion": False, **options})


def build_pack(read: torch.dtype, written: torch.dtype, gpu: str, aligned: str = "wire", **options: Any) -> Any:
    columns = dict.fromkeys(["address", "wire_offset", "numel"], "*i64")
    signature = {**columns, "wire": f"*{SHORT[written]}", "scale": "fp64"}
    return build_copy(_pack_kernel, signature, "SOURCE", read, read, written, aligned, gpu, **options)


def build_unpack(read: torch.dtype, written: torch.dtype, gpu: str, aligned: str = "wire", **options: Any) -> Any:
    columns = dict.fromkeys(["address", "wire_offset", "numel"], "*i64")
    signature = {"wire": f"*{SHORT[read]}", **columns, "scale": "fp64"}
    return build_copy(_unpack_kernel, signature, "TARGET", written, read, written, aligned, gpu, **options)


def build_copy(
    kernel: Any,
    signature: dict[str, str],
    name: str,
    dtype: torch.dtype,
    read: torch.dtype,
    written: torch.dtype,
    aligned: str,
    gpu: str,
    **options: Any,
) -> Any:
    compute = lazy.triton_dtype(reference.compute_dtype(read, written))
    constants = {name: lazy.triton_dtype(dtype), "COMPUTE": compute, "CHUNK": 4096}
    signature = {**signature, **dict.fromkeys(constants, "constexpr")}
    return build(kernel, signature, constants, aligned, gpu, **options)


def build_accumulate(
    read: torch.dtype,
    written: torch.dtype,
    gpu: str,
    aligned: str = "out",
    alignment: int = 16,
    num_parts: int = NUM_PARTS,
    **options: Any,
) -> Any:
    compute = lazy.triton_dtype(reference.compute_dtype(read, written))
    constants = {"SOURCE": lazy.triton_dtype(read), "COMPUTE": compute, "NUM_PARTS": num_parts}
    constants |= {"ALIGNMENT": alignment, "BLOCK": _BLOCK}
    signature = {"addresses": "*i64", "out": f"*{SHORT[written]}", "numel": "i64", "scale": "fp64"}
    signature |= dict.fromkeys(constants, "constexpr")
    return build(_accumulate_kernel, signature, constants, aligned, gpu, **options)


BUILDERS: dict[str, Callable[..., Any]] = {"pack": build_pack, "unpack": build_unpack, "accumulate": build_accumulate}


def num_wide(compiled: Any, what: str) -> int:
    """128-bit instructions: `what` is "load" or "store"."""
    if "ptx" in compiled.asm:
        word = "ld" if what == "load" else "st"
        return len(re.findall(rf"\b{word}\.global[.\w:]*\.(?:v4\.[bfu]32|v2\.[bfu]64)\b", compiled.asm["ptx"]))
    return len(re.findall(rf"\b(?:global|buffer)_{what}_dwordx4\b", compiled.asm["amdgcn"]))


def spilled_bytes(compiled: Any, folder: Path) -> int:
    """Bytes per thread that did not fit into registers."""
    if "amdgcn" in compiled.asm:
        counts = re.findall(
            r"\.(?:vgpr_spill_count|sgpr_spill_count|private_segment_fixed_size):\s+(\d+)", compiled.asm["amdgcn"]
        )
        assert len(counts) == 3
        return sum(map(int, counts))
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    report = subprocess.run([tool, "-res-usage", cubin], check=True, capture_output=True, text=True).stdout
    usage = re.search(r"STACK:(\d+) .*LOCAL:(\d+)", report)
    assert usage is not None, report
    return int(usage[1]) + int(usage[2])


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{SHORT[pair[0]]}-{SHORT[pair[1]]}")
@pytest.mark.parametrize("name", BUILDERS)
def test_128_bits_at_a_time_and_no_spills(
    name: str, pair: tuple[torch.dtype, torch.dtype], gpu: str, tmp_path: Path
) -> None:
    compiled = BUILDERS[name](*pair, gpu)
    threads = 4 * (32 if gpu.startswith("sm_") else 64)
    loaded, stored = (NUM_PARTS * _BLOCK, _BLOCK) if name == "accumulate" else (4096, 4096)
    assert num_wide(compiled, "load") >= loaded * pair[0].itemsize // 16 // threads
    assert num_wide(compiled, "store") >= stored * pair[1].itemsize // 16 // threads
    assert spilled_bytes(compiled, tmp_path) == 0


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("num_parts", [2, 8, 16])
def test_any_number_of_parts_fits_the_registers(num_parts: int, gpu: str, tmp_path: Path) -> None:
    assert spilled_bytes(build_accumulate(F32, F32, gpu, num_parts=num_parts), tmp_path) == 0


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("pair", [(F64, F64), (F64, B16), (F64, F16), (F16, F64)], ids=str)
def test_fp64_compiles(name: str, pair: tuple[torch.dtype, torch.dtype], tmp_path: Path) -> None:
    compiled = BUILDERS[name](*pair, "sm_90")
    assert "mul.rn.f64" in compiled.asm["ptx"]
    assert spilled_bytes(compiled, tmp_path) == 0


def test_without_alignment_nothing_is_wide() -> None:
    assert num_wide(build_pack(F32, F32, "sm_90", aligned=""), "store") == 0
    assert num_wide(build_unpack(F32, F32, "sm_90", aligned=""), "load") == 0
    odd = build_accumulate(F32, F32, "sm_90", aligned="", alignment=1)
    assert num_wide(odd, "load") == num_wide(odd, "store") == 0
    odd = build_accumulate(F32, F32, "gfx942", aligned="", alignment=1)
    assert num_wide(odd, "load") == num_wide(odd, "store") == 0


def test_too_few_registers_show_as_spills(tmp_path: Path) -> None:
    assert spilled_bytes(build_pack(F32, F32, "sm_90", maxnreg=24), tmp_path) > 0


def tensor_offset_types(compiled: Any) -> set[str]:
    return set(re.findall(r"tt\.addptr .*, tensor<\d+x(i\d+)>", compiled.asm["ttir"]))


@lazy.lazy_jit()
def _narrow_kernel(out, numel: "tl.int64", BLOCK: "tl.constexpr"):  # type: ignore[no-untyped-def]  # noqa: F821
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # noqa: F821
    tl.store(out + lane, 1.0, mask=lane < numel)  # noqa: F821


def test_offsets_have_64_bits() -> None:
    for compiled in (build_pack(F32, F32, "sm_90"), build_unpack(F32, F32, "sm_90")):
        # One step to the chunk, and from there by less than a chunk.
        assert re.findall(r"tt\.addptr %wire, %\w+ : !tt\.ptr<f32>, (i\d+)", compiled.asm["ttir"]) == ["i64"]
    assert tensor_offset_types(build_accumulate(F32, F32, "sm_90")) == {"i64"}
    signature = {"out": "*fp32", "numel": "i64", "BLOCK": "constexpr"}
    assert tensor_offset_types(build(_narrow_kernel, signature, {"BLOCK": 1024}, "out", "sm_90")) == {"i32"}


@pytest.mark.parametrize("name", ["pack", "unpack"])
def test_only_aligned_addresses_take_the_wide_path(name: str) -> None:
    # The interpreter ignores alignment and a GPU faults, so the branch is checked where it is decided.
    ttir = BUILDERS[name](F32, F32, "sm_90").asm["ttir"]
    aligned, misaligned = re.split(r"\n\s*} else {", ttir[ttir.index("arith.remsi") :], maxsplit=1)
    assert re.search(r"arith\.cmpi eq, .*\n\s*scf\.if", aligned), ttir
    assert "tt.divisibility" in aligned
    assert "tt.divisibility" not in misaligned
