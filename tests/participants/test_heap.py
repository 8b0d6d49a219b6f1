"""Freed gradients stay with the process: counted in page faults, in processes that have freed none yet."""

import os
import platform
import resource

import pytest
import torch

from tests.support.harness import ranks, run_ranks
from torchring.participants import heap

MIB = 2**20
NUM_PAGES = 48 * MIB // os.sysconf("SC_PAGE_SIZE")
_UNSET: dict[str, str | None] = {k: None for k in os.environ if k.startswith("MALLOC_") or k == "GLIBC_TUNABLES"}

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is tuned through glibc's mallopt")


@pytest.mark.parametrize(
    ("calls", "is_kept"),
    [
        pytest.param([[48 * MIB]], True, id="one gradient"),
        pytest.param([[48 * MIB], [10] * 10], True, id="and a second optimizer of small ones"),
        pytest.param([[48 * MIB] * 100], True, id="more bytes than an int holds"),
        pytest.param([], False, id="without it, or the others say nothing"),
        pytest.param([[40 * MIB, 8 * MIB]], False, id="larger than a gradient"),
        pytest.param([[65 * MIB, 240 * MIB]], False, id="beside a very large one, which raises no threshold"),
    ],
)
@ranks(1, run_ranks, env=_UNSET)
def test_blocks_that_come_and_go_are_kept_if_gradients_are_as_large(calls: list[list[int]], is_kept: bool) -> None:
    """Page faults of taking, touching and freeing a block, after some that do not count."""

    def step() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.zeros(48 * MIB, dtype=torch.uint8)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    for call in calls:
        heap.keep_freed(call)
    for _ in range(40 if is_kept else 4):  # until the heap has grown to where blocks fit, beside small ones that stay
        step()
    found = [step() for _ in range(4)]
    assert max(found) < 0.1 * NUM_PAGES if is_kept else min(found) > 0.9 * NUM_PAGES


@pytest.mark.parametrize("num_blocks", [4, 12])
@ranks(1, run_ranks)
def test_free_memory_between_blocks_in_use_is_given_back_where_it_is_more_than_gradients_take(num_blocks: int) -> None:
    heap.keep_freed([60 * MIB])
    heap.give_back()
    before = heap._resident_bytes()
    blocks, between = [], []
    for _ in range(num_blocks):
        blocks.append(torch.ones(30 * MIB, dtype=torch.uint8))
        between.append(torch.ones(MIB // 4, dtype=torch.uint8))  # these stay
    del blocks
    freed = (heap._resident_bytes() - before) // MIB
    heap._next_look = 0.0
    heap.give_back()
    left = (heap._resident_bytes() - before) // MIB
    assert freed > 28 * num_blocks, "glibc by itself keeps it"
    assert (left < 20) if freed > 60 + 2 * 61 else (left > 28 * num_blocks)


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_MMAP_THRESHOLD_", str(32 * MIB)), ("GLIBC_TUNABLES", f"glibc.malloc.mmap_threshold={32 * MIB}")],
)
def test_thresholds_of_its_own_are_seen(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(heap, "_kept_bytes", 0)
    heap.keep_freed([48 * MIB])
    assert heap._kept_bytes == 0
