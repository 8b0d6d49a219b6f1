"""hvd.DistributedOptimizer: trains as one process with all batches, whatever ritual a script follows."""

import copy
import os
import pickle
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchring
import torchring.horovod as hvd
from tests.horovod.test_collectives import run
from tests.support.checks import assert_bitwise, assert_same_everywhere, logged
from tests.support.documents import ROOT, blocks
from tests.support.grids import grid
from tests.support.harness import patient, ranks, run_ranks
from tests.support.training import loss_on, small_model, values
from torchring.adasum import adasum
from torchring.default_world import default_world
from torchring.horovod import engine as engine_module
from torchring.memory import host as host_module


def expected(size: int, *, op: str = "mean", passes: int = 1, clip: float | None = None) -> list[Tensor]:
    """Three steps in one process, with plain PyTorch."""
    net = small_model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        losses = [loss_on(net, rank, 10 * step + i) for rank in range(size) for i in range(passes)]
        (sum(losses) / (size if op == "mean" else 1)).backward()  # type: ignore[union-attr]
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return values(net)


class _Halves:
    """A compressor of the script's own, which loses nothing: the values are fp64."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor * 2, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return (tensor / 2).to(ctx)


@grid("world_size", [1, 2, 3], keep=lambda world_size: world_size < 3)
@ranks(start=run)
def test_every_ritual_trains_as_one_process_does(world_size: int, rank: int) -> None:
    def train(like: list[Tensor], body: Callable[[Any, nn.Module, int], None], **options: Any) -> None:
        net = small_model()
        if rank != 0:
            nn.init.zeros_(net[0].weight)  # type: ignore[index, arg-type]
        plain = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(plain, net.named_parameters(), **options)
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for step in range(3):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            body(optimizer, net, step)
        torch.testing.assert_close(values(net), like, rtol=1e-9, atol=1e-12)
        assert_same_everywhere(values(net))
        optimizer.close()

    def plainly(optimizer: Any, net: nn.Module, step: int) -> None:
        loss_on(net, rank, 10 * step).backward()
        optimizer.step()

    def clipped(optimizer: Any, net: nn.Module, step: int, *, by_ritual: bool = True) -> None:
        loss_on(net, rank, 10 * step).backward()
        if by_ritual:
            optimizer.synchronize()
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        with optimizer.skip_synchronize() if by_ritual else nullcontext():
            optimizer.step()

    def by_closure(optimizer: Any, net: nn.Module, step: int) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_on(net, rank, 10 * step)
            loss.backward()
            return loss

        assert_same_everywhere([optimizer.step(closure).detach()])

    def scaled(optimizer: Any, net: nn.Module, step: int) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(loss_on(net, rank, 10 * step)).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()

    def twice(optimizer: Any, net: nn.Module, step: int) -> None:
        for micro in range(2):
            loss_on(net, rank, 10 * step + micro).backward()
        optimizer.step()

    plain, clip = expected(world_size), expected(world_size, clip=0.05)
    train(plain, plainly)
    train(expected(world_size, op="sum"), plainly, op=hvd.Sum)
    train(plain, plainly, gradient_predivide_factor=2.0)
    train(plain, plainly, groups=2)
    train(plain, plainly, compression=_Halves)
    train(clip, clipped)
    train(clip, partial(clipped, by_ritual=False))
    train(clip, clipped, compression=_Halves())
    train(plain, by_closure)
    train(plain, by_closure, compression=_Halves)
    train(clip, scaled)
    passes = expected(world_size, passes=2)
    train(passes, twice, backward_passes_per_step=2)
    train(passes, twice, backward_passes_per_step=2, compression=_Halves)
    train(passes, twice)  # two backwards of one pass
    train(passes, twice, backward_passes_per_step=3)  # step() comes early


@ranks(2, start=run)
def test_gradients_that_a_rank_lacks_count_as_zero(rank: int) -> None:
    """As in Horovod, a gradient that a rank lacks counts as zero, and the average is over all ranks."""
    for compression in (hvd.Compression.none, _Halves):
        first, second, third = (nn.Parameter(torch.zeros(3)) for _ in range(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, second, third], lr=1.0), compression=compression)
        (second.sum() * 4 if rank else first.sum() * 2).backward()
        optimizer.step()
        assert [p[0].item() for p in (first, second, third)] == [-1.0, -2.0, 0.0]
        for ranks_with_backward in ([0], []):
            optimizer.zero_grad()
            if rank in ranks_with_backward:
                (first.sum() * 2).backward()
            optimizer.step()
            assert [p[0].item() for p in (first, second, third)] == [-2.0, -2.0, 0.0]


@ranks(2, start=run)
def test_what_a_script_does_with_an_optimizer(rank: int) -> None:
    net = small_model()
    plain = torch.optim.Adam(net.parameters(), lr=0.1)
    loss_on(net, rank, 0).backward()
    plain.step()
    state = plain.state_dict()["state"][0]["exp_avg"].clone()
    optimizer = hvd.DistributedOptimizer(plain, net.named_parameters())
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], state)  # kept, where Horovod drops it
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert [*optimizer._parameter_names.values()] == [name for name, _ in net.named_parameters()]
    hvd.broadcast_parameters(net.named_parameters(), root_rank=0)  # a generator, which Horovod refuses
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(optimizer)))
    assert type(copied) is hvd.DistributedOptimizer
    optimizer.zero_grad()
    loss_on(net, rank, 1).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    optimizer.set_backward_passes_per_step(2)
    optimizer.zero_grad()
    before = optimizer.stats().num_reductions
    loss_on(net, rank, 2).backward()
    assert optimizer.stats().num_reductions == before
    loss_on(net, rank, 3).backward()
    assert optimizer.stats().num_reductions == before + 1
    optimizer.step()
    optimizer.close()

    weight = nn.Parameter(torch.zeros(2))
    sgd = torch.optim.SGD([weight], lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, [("weight", weight)], backward_passes_per_step=2)
    if rank == 1:
        optimizer.skip()
    else:
        (weight * 4).sum().backward()
    optimizer.synchronize()  # ends an incomplete group
    assert weight.grad.tolist() == [4.0, 4.0]
    optimizer.zero_grad()
    optimizer.weigh(1 + 2 * rank)
    (weight * (1 + rank)).sum().backward()
    optimizer.synchronize()
    assert weight.grad.tolist() == [1.75, 1.75]  # (1 * 1 + 3 * 2) / 4


def test_wrong_arguments_are_found_before_init() -> None:
    assert not hvd.is_initialized()
    net = small_model()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    pairs = list(net.named_parameters())
    for options, said in [
        ({"named_parameters": [name for name, _ in pairs]}, "pairs"),
        ({"named_parameters": [("same", parameter) for _, parameter in pairs]}, "unique.* same"),
        ({"named_parameters": pairs[1:]}, "group 0, parameter 0"),
        ({"backward_passes_per_step": 0}, "at least 1"),
        ({"op": hvd.Max}, "Average"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "Average"),
        ({}, "init"),
    ]:
        with pytest.raises(ValueError, match=said):
            hvd.DistributedOptimizer(sgd, **options)


@grid("world_size", [2, 3], keep=lambda world_size: world_size == 2)
@ranks(start=run)
def test_process_sets_sparse_gradients_and_adasum(world_size: int, rank: int) -> None:
    """Sparse gradients without the model."""
    size = world_size
    last = hvd.add_process_set([size - 1])
    two = hvd.add_process_set([0, size - 1]) if size > 2 else hvd.global_process_set
    for ranks_of, change in ((last, rank + 1), (two, rank + 1 if size == 3 and rank == 1 else (1 + size) / 2)):
        parameter = nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), process_set=ranks_of)
        (parameter.sum() * (rank + 1)).backward()
        optimizer.step()
        assert parameter.tolist() == [-change] * 2
        optimizer.close()

    layer = nn.Embedding(5, 2, sparse=True)
    nn.init.zeros_(layer.weight)
    for compression in (hvd.Compression.none, _Halves):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(layer.parameters(), lr=1.0), layer.named_parameters(), compression=compression
        )
        optimizer.zero_grad()
        layer(torch.tensor([rank, 4])).sum().backward()
        optimizer.step()
        assert layer.weight.grad.is_sparse
        optimizer.close()
    assert layer.weight[:, 0].tolist() == pytest.approx([-2 / size] * size + [0.0] * (4 - size) + [-2.0])
    assert_same_everywhere([layer.weight])

    if size != 2:
        return
    start = torch.tensor([1.0, 2.0])
    parameter = nn.Parameter(start.clone())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.5), op=hvd.Adasum)
    grads = [torch.tensor([1.0, 0.5]), torch.tensor([2.0, -1.0])]
    (parameter * grads[rank]).sum().backward()
    with pytest.raises(AssertionError, match="Adasum"), optimizer.skip_synchronize():
        pass
    for call in (optimizer.skip, lambda: optimizer.weigh(3)):
        with pytest.raises(ValueError, match="does not work with a process set"):
            call()
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), start + adasum([-0.5 * grad for grad in grads]))
    assert_same_everywhere([parameter])


@grid("world_size", [2, 3], keep=lambda world_size: world_size == 2)
@ranks(start=run)
def test_ranks_that_have_joined_take_part_in_the_backwards_of_the_others(world_size: int, rank: int) -> None:
    """Rank r has r + 1 batches, each of which has gradient 1. Averages are over all ranks, as with Horovod."""
    for compression in (hvd.Compression.none, _Halves):
        first, second = (nn.Parameter(torch.zeros(2)) for _ in range(2))
        optimizers = [
            hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [(name, p)], compression=compression)
            for name, p in (("first", first), ("second", second))
        ]
        for _ in range(rank + 1):
            first.grad = second.grad = None
            (first + second).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            hvd.allreduce(torch.ones(1), op=hvd.Sum, name="batches")
        assert hvd.join() == world_size - 1
        hvd.broadcast_parameters([first, second], root_rank=world_size - 1)
        assert first.tolist() == pytest.approx([-(world_size + 1) / 2] * 2)
        assert_bitwise(first.detach(), second.detach())
        optimizers[0].zero_grad()  # all have data again
        first.sum().backward()
        optimizers[0].step()
        assert_same_everywhere([first])
        for optimizer in optimizers:
            optimizer.close()


@pytest.mark.parametrize("shares_memory", [True, False])
@ranks(2)
def test_a_joined_rank_ends_layers_of_others(shares_memory: bool, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks join together first. Then rank 0 has another batch, on one host after more than the timeout."""
    if not shares_memory:
        monkeypatch.setattr(host_module, "_host_identity", lambda: f"host {rank}")
        monkeypatch.setattr(engine_module, "_HEARTBEAT_SECONDS", 0.5)
    hvd.init()
    layer = hvd.SyncBatchNorm(3)

    def train() -> None:
        layer(torch.randn(4, 3))
        hvd.join()
        layer(torch.randn(4, 3))
        if rank and (host := default_world().host) is not None:
            host.timeout_seconds = patient(1.0)
        if not rank:
            end = time.monotonic() + 1.5 * patient(1.0)
            while shares_memory and time.monotonic() < end:
                hvd.allreduce(torch.ones(1), name="of rank 0")
            layer(torch.randn(4, 3))
        hvd.join()

    with pytest.raises(hvd.HorovodInternalError) as caught:
        train()
    hvd.shutdown()
    if rank == 0:  # rank 1 gets the same, or that rank 0 has left
        assert "hvd.join(no SyncBatchNorm layer may train meanwhile)" in str(caught.value)


@ranks(2, start=run)
def test_parameters_that_are_wrapped_again_and_optimizers_after_a_new_init(rank: int, world_size: int) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    earlier = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))  # Horovod has no close()
    with pytest.raises(ValueError, match="closed"):
        earlier.step()
    (parameter * (rank + 1)).sum().backward()
    optimizer.step()
    mean = (world_size + 1) / 2
    assert parameter.tolist() == [-mean] * 2
    hvd.shutdown()
    hvd.init()
    optimizer.zero_grad()
    (parameter * (rank + 1)).sum().backward()
    optimizer.step()
    assert parameter.tolist() == [-2 * mean] * 2
    torchring.shutdown()  # in place of hvd.shutdown()
    hvd.init()


@ranks(2, start=run)
def test_parameters_that_differ_and_a_nan_are_warnings(rank: int) -> None:
    """Horovod trains on, so these are warnings here."""
    parameter = nn.Parameter(torch.full((2,), float(rank)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("forgotten", parameter)])
    with logged() as texts:
        for factor in (1.0, float("nan")):
            optimizer.zero_grad()
            (parameter * (factor if rank == 1 else 1.0)).sum().backward()
            optimizer.step()
    assert any("forgotten is not the same on all ranks: rank 1 differs" in text for text in texts)
    assert any("forgotten is not finite: NaN or infinity came from rank 1" in text for text in texts)


@ranks(2)
def test_the_documented_script_trains_the_same_before_and_after() -> None:
    """The script in docs/guides/horovod.md."""
    (_, script) = blocks(ROOT / "docs" / "guides" / "horovod.md", "diff")
    trained = []
    for sign in "-+":
        lines = [line[1:] for line in script.code.splitlines() if line[:1] in (sign, " ")]
        names: dict[str, Any] = {}
        exec("\n".join(lines).replace("horovod.torch", "torchring.horovod"), names)
        trained.append([p.detach() for p in names["model"].parameters()])
        torchring.shutdown() if sign == "+" else hvd.shutdown()
    torch.testing.assert_close(*trained)
    torchring.init()
    assert_same_everywhere(trained[0])


@ranks(2, start=run_ranks, deadline=40.0, expect_exit={1: 7})
def test_a_rank_that_dies_in_a_backward_is_what_elastic_scripts_catch(rank: int) -> None:
    hvd.init()
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    parameter.sum().backward()
    optimizer.step()
    if rank == 1:
        os._exit(7)
    with pytest.raises(hvd.HorovodInternalError, match="rank 1"):
        parameter.sum().backward()
