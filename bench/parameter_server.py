"""A parameter server, which all-reduces replaced: one process that adds up the gradients of all workers.

Each worker sends its gradients to the server, and gets their mean back. So all bytes of all workers cross the server's
link, twice; in a ring each link carries less than twice the bytes of one worker. Gradients travel in the buckets of
DistributedDataParallel, beside backward and in both directions at once: Gloo's gather and scatter, which send straight
to the server and back.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchring.bench import netns

_TIMEOUT = timedelta(minutes=10)  # the server waits while rivals have their turns
_END, _COUNT = 0, -1  # requests; all others are a number of elements


class ParameterServer:
    """The server, as a worker and the server itself see it. The server's rank follows those of the workers."""

    def __init__(self) -> None:
        self.num_workers = self.root = int(os.environ["WORLD_SIZE"])
        self.rank = int(os.environ["RANK"])
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)

        def connected(name: str) -> Any:
            return dist.ProcessGroupGloo(dist.PrefixStore(name, store), self.rank, self.num_workers + 1, _TIMEOUT)

        # On one connection, Gloo's word that a buffer is ready would wait behind the mean of the bucket before.
        self.up, self.down = connected("to the parameter server"), connected("from the parameter server")
        self._scatter, self._gather = dist.ScatterOptions(), dist.GatherOptions()
        self._scatter.rootRank = self._gather.rootRank = self.root

    def wrap(self, model: torch.nn.Module) -> DistributedDataParallel:
        """Let a worker's model send its gradients to the server. Small buckets keep both directions busy."""
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=4)
        ddp.register_comm_hook(None, lambda _, bucket: self._mean(bucket.buffer()))
        return ddp

    def link_bytes(self) -> list[int]:
        """What `link_bytes` finds on the server's host; called by rank 0 alone."""
        self._ask(_COUNT)
        found = torch.zeros(2, dtype=torch.int64)
        self.down.recv([found], self.root, 0).wait()
        return [int(each) for each in found]

    def close(self) -> None:
        """End the server."""
        if self.rank == 0:
            self._ask(_END)

    def serve(self) -> None:
        """Run as the server."""
        request = torch.zeros(1, dtype=torch.int64)
        while True:
            self.up.recv([request], 0, 0).wait()
            if (numel := int(request)) == _END:
                return
            if numel == _COUNT:
                self.down.send([torch.tensor(link_bytes())], 0, 0).wait()
                continue
            buffers = torch.empty(self.num_workers + 1, numel)  # the last one is for the mean
            mean = buffers[-1]
            self.up.gather([list(buffers)], [mean], self._gather).wait()
            torch.mean(buffers[:-1], 0, out=mean)
            # Not waited for: the workers' next bucket arrives meanwhile.
            self.down.scatter([mean], [[mean] * (self.num_workers + 1)], self._scatter)

    def _mean(self, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        if self.rank == 0:
            self._ask(buffer.numel())
        self.up.gather([], [buffer], self._gather)
        # The mean arrives in the buffer only after the server has all of its elements.
        future: torch.futures.Future[Any] = self.down.scatter([buffer], [], self._scatter).get_future()
        return future.then(lambda _: buffer)

    def _ask(self, request: int) -> None:
        self.up.send([torch.tensor([request])], self.root, 0).wait()


def link_bytes() -> Sequence[int]:
    """The bytes that this host has received and sent so far."""
    folder = Path("/sys/class/net", netns.INTERFACE, "statistics")
    return [int((folder / name).read_text()) for name in ("rx_bytes", "tx_bytes")]
