"""How long `direct` should take over NVLink: a model, as no machine with several GPUs has run it. Prints a table.

Two rates limit an all-reduce of S bytes between N ranks, each of which reads (N-1)/N S from the others and writes as
much to them:

    what 24 blocks get through a link, reads and writes together
    Little's law: bytes under way divided by latency. (N-1)/N of the bytes under way are remote, as of those to read, so
    that N does not matter

Two meetings come on top. PyTorch's two_shot_all_reduce_ reads and writes as `direct` does, in 24 blocks of 512 threads
that load 16 bytes from each rank. Its times on 8 H100, which vLLM published, give the link and the meeting, within 3 %.
4 GPUs take 11 % less than this model says: with a latency above 4 us they could not. If bytes under way limited 8 GPUs,
the latency would be 10.7 us. So the link limits two_shot, and with 64 KiB under way `direct`, too. With 32 KiB, 2 GPUs
with a latency above 3 us wait for bytes.
"""

from typing import Final

from torchring.kernels.signals import MAX_BLOCKS

_LINK_BYTES_PER_SECOND: Final = 257e9
_LATENCY_SECONDS: Final = 4e-6  # at most; a block that reads host memory over PCIe at 12.3 GB/s has 2.7 (H200)
_MEETING_SECONDS: Final = 3.9e-6

TWO_SHOT: Final = {
    (8, 8): 65.0, (8, 16): 125.0, (8, 32): 242.0, (8, 48): 354.0, (8, 64): 468.0, (8, 128): 923.0, (4, 4): 29.0
}  # fmt: skip
"""Microseconds by GPUs and MiB, on H100: vLLM's pull request 42324, for 4 GPUs 24111."""


def seconds(num_bytes: float, num_ranks: int, block_bytes: int = 64 << 10) -> float:
    """block_bytes: under way in a block, from all ranks together."""
    remote = (num_ranks - 1) / num_ranks
    by_link = 2 * remote * num_bytes / _LINK_BYTES_PER_SECOND
    by_latency = num_bytes * _LATENCY_SECONDS / (MAX_BLOCKS * block_bytes)
    return 2 * _MEETING_SECONDS + max(by_link, by_latency)


if __name__ == "__main__":
    for gpus in (2, 4, 8):
        before, now = (1e6 * seconds(25 << 20, gpus, kib << 10) for kib in (32, 64))
        print(f"direct, {gpus} GPUs, 25 MiB: {before:.0f} us with 32 KiB under way in a block, {now:.0f} with 64")
