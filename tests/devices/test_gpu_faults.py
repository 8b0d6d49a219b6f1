"""A real GPU, which two ranks share: ranks that fail, memory that they leave, and settings of CUDA."""

import gc
import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import torchring
from tests.devices.test_gpu import DEADLINE, SHARED, batch, loss_of, make_model
from tests.support.checks import assert_same_on_all_ranks, digest
from tests.support.harness import ranks, run_ranks, wait_until
from tests.support.scripts import Raises
from tests.support.training import attempt
from torchring.allreduce.select import Algorithm
from torchring.default_world import default_world
from torchring.devices import watchdog
from torchring.devices.symmetric_memory import CudaGroup
from torchring.errors import PeerLostError

pytestmark = pytest.mark.gpu


def take_steps(rank: int, model: nn.Module, optimizer: Any, num_steps: int) -> None:
    for step in range(num_steps):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, step, rank).backward()
        optimizer.step()


def live_through_generations(rank: int, size: int) -> list[int]:
    """Bytes of the GPU's memory that are free in each generation. Each of them ends with an error in a backward."""
    parts: list[StorageWeakRef] = []
    allocate = CudaGroup.allocate

    def noted(group: CudaGroup, num_bytes: int) -> Any:
        block = allocate(group, num_bytes)
        parts.extend(StorageWeakRef(part.untyped_storage()) for part in block.parts)
        return block

    CudaGroup.allocate = noted  # type: ignore[method-assign]
    model, free = make_model(), []
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        torchring.init(timeout_seconds=20.0)
        num_old = len(parts)
        optimizer = torchring.wrap(sgd, model)
        # A thread that has ended may have been the last to know of a block.
        wait_until(lambda old=parts[:num_old]: gc.collect() >= 0 and all(part.expired() for part in old), "memory", 10)
        take_steps(rank, model, optimizer, 2)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torchring.barrier()
        free.append(torch.cuda.mem_get_info()[0])
        torchring.barrier()
        x, y = batch(2, rank)
        hidden = model[:2](x)  # type: ignore[index]
        loss = nn.functional.cross_entropy(model[2:](Raises.apply(hidden) if rank else hidden), y)  # type: ignore[index]
        assert attempt(loss.backward)
        torchring.shutdown()
    return free


def test_generations_leave_no_memory_of_a_rank_that_is_gone() -> None:
    free, _ = run_ranks(live_through_generations, 2, env=SHARED, deadline=DEADLINE)
    if "PYTEST_XDIST_WORKER" not in os.environ:  # other tests use the GPU meanwhile
        assert free[1] - min(free[1:]) <= 2 << 20, free


@ranks(2, start=run_ranks, env=SHARED, deadline=DEADLINE, expect_exit={1: -signal.SIGKILL})
def test_a_rank_whose_gpu_has_failed_is_named_while_its_process_lives(rank: int) -> None:
    """And asking whether the GPU works does not disturb the capture of a graph."""
    watchdog._ASK_SECONDS = 0.01
    model = make_model()
    torchring.init(timeout_seconds=60.0)
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    take_steps(rank, model, optimizer, 3)
    x = torch.ones(8, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        for _ in range(20):
            x.mul_(2.0)
            time.sleep(0.01)
    torchring.barrier()
    started = time.monotonic()
    if rank == 0:
        with pytest.raises(PeerLostError, match="the GPU of rank 1 has failed: device-side assert triggered") as caught:
            take_steps(rank, model, optimizer, 1)
        assert caught.value.peers == (1,)
    else:
        assert "device-side assert" in attempt(lambda: x[torch.full((1,), 1 << 20, device="cuda")].tolist())
        while default_world().failure is None and time.monotonic() - started < 10:
            time.sleep(0.01)
        failure = default_world().failure
        assert failure is not None
        time.sleep(2.0)  # alive, while the other rank is told
        assert "the GPU of rank 1 has failed" in attempt(torchring.barrier)
    assert time.monotonic() - started < 10
    if rank == 1:  # what the GPU had can only go with the process
        os.kill(os.getpid(), signal.SIGKILL)


def train_or_say_why_not(rank: int, size: int, algorithm: Algorithm) -> tuple[str, str]:
    """(digest of what was trained, "") or ("", the error)."""
    model = make_model()
    torchring.init(timeout_seconds=20.0)

    def train() -> None:
        optimizer = torchring.wrap(
            torch.optim.SGD(model.parameters(), lr=0.1), model, algorithm=algorithm, bucket_mb=0.5
        )
        take_steps(rank, model, optimizer, 3)

    error = attempt(train)
    return ("" if error else digest([p.cpu() for p in model.parameters()])), error


@pytest.mark.parametrize("name", ["CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"])
def test_settings_of_cuda_that_bring_all_work_into_one_order(name: str) -> None:
    results = run_ranks(train_or_say_why_not, 2, "direct", env={**SHARED, name: "1"}, deadline=60.0)
    assert [error for _, error in results] == ["", ""]
    assert_same_on_all_ranks([trained for trained, _ in results])


def test_nccl_for_ranks_that_share_a_gpu() -> None:
    for _, error in run_ranks(train_or_say_why_not, 2, "native", env=SHARED, deadline=60.0):
        assert error.startswith("TopologyError: torch.distributed's backend "), error
        assert "Duplicate GPU" in error
