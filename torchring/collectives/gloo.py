"""Collectives between hosts: Gloo's, in a process group of torchring's own.

With backend="mpi", too: MPI moves only the gradients that `wrap` reduces.
"""

import struct
from array import array
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from torchring.collectives.operations import Meanwhile, combine_by
from torchring.collectives.signature import Signature, mismatch
from torchring.memory.host import tensor_of
from torchring.transport.c10d import C10dTransport
from torchring.world import World

REDUCE_OPS = {
    "mean": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
_EXCHANGED_BYTES = 504  # that travel with a signature: what ranks say in each reduction fits


class GlooCollectives:
    """The methods of `SharedMemoryCollectives`, over Gloo. Opening them is collective."""

    on_cpu = True

    def __init__(self, world: World, name: str) -> None:
        assert world.rendezvous is not None
        self._transport = C10dTransport(world.rendezvous, name, world.host)
        self.lost_peer = self._transport.lost_peer  # the error if a peer is gone
        world.on_failure(self._transport)

    def all_reduce(self, data: torch.Tensor, op: str, signature: Signature) -> None:
        may_lose = op in ("min", "max") and data.is_floating_point() and data.numel() > 0
        has_nan = any(row[0] for row in self._agree(signature, [int(may_lose and bool(data.amax().isnan()))]))
        if data.numel():
            combine_by(self._reduce, data, op, self._transport.size, keeps_nan=has_nan)

    def _reduce(self, buffer: torch.Tensor, op: str) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(REDUCE_OPS[op])
        self._transport.start(lambda group: group.allreduce([buffer], options)).wait()
        torch.autograd.graph.increment_version(buffer)  # the process group does not tell autograd that it writes

    def broadcast(self, data: torch.Tensor, src: int, signature: Signature) -> None:
        self._agree(signature)
        if data.numel():
            self._transport.start_broadcast(data, src).wait()
            torch.autograd.graph.increment_version(data)

    def all_gather(self, data: torch.Tensor, signature: Signature) -> list[torch.Tensor]:
        return self._gather(data, [row[0] for row in self._agree(signature, [data.numel()])])

    def _gather(self, data: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        # Gloo gathers equal sizes only.
        longest = max(sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        padded[: data.numel()] = data
        gathered = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in sizes]
        if longest:
            self._transport.start(lambda group: group.allgather([gathered], [padded])).wait()
        return [part[:size] for part, size in zip(gathered, sizes, strict=True)]

    def start_exchange(self, data: bytes, signature: Signature) -> Callable[[Meanwhile], list[bytes]]:
        """As all_gather. What fits travels with the signature. Gloo proceeds by itself: nothing is called meanwhile."""
        finish = self._start_agree(signature, struct.pack("<q", len(data)) + data[:_EXCHANGED_BYTES])

        def wait(meanwhile: Meanwhile) -> list[bytes]:
            rows = finish()
            sizes = [int.from_bytes(row[:8], "little") for row in rows]
            if max(sizes) <= _EXCHANGED_BYTES:
                return [row[8 : 8 + size] for row, size in zip(rows, sizes, strict=True)]
            return [part.numpy().tobytes() for part in self._gather(tensor_of(data), sizes)]

        return wait

    def all_to_all(self, pieces: Sequence[torch.Tensor], signature: Signature) -> list[torch.Tensor]:
        rows = self._agree(signature, [piece.numel() for piece in pieces])
        sizes = [row[self._transport.rank] for row in rows]
        received = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        if any(map(any, rows)):
            data = torch.cat(list(pieces))
            lengths = [piece.numel() for piece in pieces]
            options = dist.AllToAllOptions()
            self._transport.start(lambda group: group.alltoall_base(received, data, sizes, lengths, options)).wait()
        return list(torch.split(received, sizes))

    def barrier(self, signature: Signature) -> None:
        self._agree(signature)

    def close(self) -> None:
        self._transport.close()

    def _agree(self, signature: Signature, sizes: Sequence[int] = ()) -> list[memoryview]:
        """Compare signatures, and return the `sizes` of all ranks, and zeros, in one small message."""
        return [memoryview(row).cast("q") for row in self._start_agree(signature, array("q", sizes).tobytes())()]

    def _start_agree(self, signature: Signature, data: bytes) -> Callable[[], list[bytes]]:
        # Every row has room for the most sizes that any collective sends, so that all rows are equally long.
        room = 8 * max(self._transport.size, 1 + _EXCHANGED_BYTES // 8)
        checksum = struct.pack("<q", signature.checksum)
        mine = torch.frombuffer(bytearray(checksum + data.ljust(room, b"\0") + signature.text), dtype=torch.uint8)
        rows = torch.empty(self._transport.size, len(mine), dtype=torch.uint8, device="cpu")
        transfer = self._transport.start(lambda group: group.allgather([list(rows)], [mine]))

        def finish() -> list[bytes]:
            transfer.wait()
            theirs = [row.tobytes() for row in rows.numpy()]
            for rank, other in enumerate(theirs):
                if not other.startswith(checksum):
                    raise mismatch(self._transport.rank, signature, rank, other[8 + room :])
            return [other[8 : 8 + room] for other in theirs]

        return finish
