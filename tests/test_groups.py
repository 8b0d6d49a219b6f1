"""`group=`: what ranks do among some of the ranks, beside what all do; and groups that cannot be."""

import os
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader

import torchring
from tests.support.harness import ranks, run_ranks
from tests.support.training import attempt, batch, loss_on, small_model, values
from torchring.default_world import default_world, world_of
from torchring.groups import members_of
from torchring.rendezvous.environment import ELASTIC

_DATA = range(11)


def _collectives(group: Any, ours: list[int], rank: int) -> None:
    n, place = len(ours), ours.index(rank)
    assert (torchring.rank(group), torchring.size(group)) == (place, n)
    own = torch.tensor([rank + 1.0, rank * rank])
    everybody = torch.stack([torch.tensor([r + 1.0, r * r]) for r in ours])
    work = torchring.all_reduce(own.clone(), async_op=True, group=group)
    assert torchring.all_gather(torch.tensor([rank])).tolist() == [0, 1, 2, 3]  # all ranks meanwhile
    assert torchring.broadcast(own.clone(), n - 1, group=group).equal(everybody[-1])
    torch.testing.assert_close(work.wait(), everybody.mean(0))
    assert torchring.all_gather(own[None], group=group).equal(everybody)
    rows = torch.arange(5.0)[:, None]
    shares = torch.tensor_split(rows * everybody[:, 0].sum(), n)
    assert torchring.reduce_scatter(rows * (rank + 1), "sum", group=group).equal(shares[place])
    sent = 10 * rank + torch.arange(n)
    assert torchring.all_to_all(sent, group=group).tolist() == [10 * r + place for r in ours]
    torchring.barrier(group=group)
    assert torchring.broadcast_object({rank}, n - 1, group=group) == {ours[-1]}
    assert torchring.all_gather_object(str(rank), group=group) == [*map(str, ours)]
    assert torchring.all_reduce(own.clone(), "adasum", group=group).isfinite().all()
    assert f"0 .. {n - 1}, got {n}" in attempt(lambda: torchring.broadcast(own, n, group=group))

    metric = torchring.recipes.MeanMetric(group=group)
    metric.update({"loss": float(rank)}, weight=rank + 1)
    assert metric.compute() == {"loss": pytest.approx(sum(r * (r + 1) for r in ours) / sum(r + 1 for r in ours))}


def _norms(group: Any, ours: list[int], rank: int) -> None:
    """Against BatchNorm of the batches of the group's ranks."""
    plain = nn.BatchNorm1d(4).double()
    old = nn.SyncBatchNorm(4, process_group=group if isinstance(group, dist.ProcessGroup) else None).double()
    kept = torchring.convert_sync_batchnorm(old, None if isinstance(group, dist.ProcessGroup) else group)
    for layer in (torchring.SyncBatchNorm(4, group=group).double(), pickle.loads(pickle.dumps(kept))):
        xs = [batch(r, 0)[0].requires_grad_() for r in ours]
        own = batch(rank, 0)[0].requires_grad_()
        plain.reset_running_stats()
        expected = plain(torch.cat(xs)).chunk(len(ours))[ours.index(rank)]
        result = layer(own)
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(layer.running_var, plain.running_var)
        (result * own.detach()).sum().backward()
        (plain(torch.cat(xs)) * torch.cat(xs).detach()).sum().backward()
        torch.testing.assert_close(own.grad, xs[ours.index(rank)].grad)


def _steps(model: nn.Module, optimizer: Any, batches: Sequence[list[int]], weigh: Callable[[], object]) -> list[Tensor]:
    for samples in batches:
        weigh()
        optimizer.zero_grad()
        torch.stack([loss_on(model, 0, sample) for sample in samples]).mean().backward()
        optimizer.step()
    return values(model)


def _samples(group: Any, ours: list[int], rank: int) -> None:
    """Shares of an epoch, some smaller, weighed in the group: as one process with the global batches."""
    n = len(ours)
    model, plain = small_model(), small_model()
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, group=group)
    sampler = pickle.loads(pickle.dumps(torchring.data.Sampler(_DATA, batch_size=2, group=group)))
    assert torchring.data.check(_DATA, sampler).num_drawn == len(_DATA)
    loader = DataLoader(_DATA, batch_sampler=sampler, collate_fn=list)  # type: ignore[arg-type]
    trained = _steps(model, optimizer, loader, lambda: optimizer.weigh(sampler.weight()))  # type: ignore[arg-type]
    whole = torchring.data.Sampler(_DATA, batch_size=2 * n, rank=0, size=1)
    expected = _steps(plain, torch.optim.SGD(plain.parameters(), lr=0.1), list(whole), lambda: None)
    torch.testing.assert_close(trained, expected, rtol=1e-9, atol=1e-9)

    read = torchring.data.shard(_DATA, group=group)
    assert [int(x) for x in DataLoader(read, batch_size=None, num_workers=1)] == [*_DATA[ours.index(rank) :: n]]
    assert [*pickle.loads(pickle.dumps(read))] == [*_DATA[ours.index(rank) :: n]]
    if n > 1:
        both = torchring.data.Sampler(_DATA, batch_size=2, rank=0, size=n)
        said = attempt(lambda: torchring.data.check(_DATA, both, group=group))
        assert f"on ranks {', '.join(map(str, ours))}" in said or f"on ranks {ours[0]}-{ours[-1]}" in said
    unweighed = attempt(
        lambda: _steps(model, optimizer, torchring.data.Sampler(_DATA, batch_size=2, group=group), bool)
    )
    assert ("was not weighed" in unweighed) == (n > 1), unweighed
    optimizer.close()


def _joined(group: Any, ours: list[int], rank: int) -> None:
    """Position p makes p + 1 steps."""
    model, plain = small_model(), small_model()
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, group=group)
    average = torch.optim.swa_utils.AveragedModel(model)
    with torchring.join(optimizer, average):
        for step in range(ours.index(rank) + 1):
            _steps(model, optimizer, [[10 * rank + step]], bool)
            if len(ours) > 1:
                assert "inside torchring.join()" in attempt(torchring.barrier)
        average.update_parameters(model)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = _steps(plain, sgd, [[10 * r + step for r in ours[step:]] for step in range(len(ours))], bool)
    torch.testing.assert_close(values(model), expected, rtol=1e-9, atol=1e-9)
    assert torchring.all_gather_object([p.tolist() for p in average.parameters()], group=group) == [
        [p.tolist() for p in average.parameters()]
    ] * len(ours)
    beside = torchring.wrap(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    for objects in ((optimizer,), (optimizer, beside)) if 1 < len(ours) < 4 else ():
        with pytest.raises(ValueError, match="optimizers of several groups"), torchring.join(*objects):
            pass
    beside.close()
    optimizer.close()


@ranks(4, run_ranks)
def test_groups_do_what_all_ranks_do(rank: int) -> None:
    """In several groups at once, between collectives of all ranks."""
    torchring.init(process_group=True)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    made, _ = dist.new_subgroups_by_enumeration([[0, 3], [2, 1]])
    groups = [([[0, 2], [1, 3]], mesh["dp"]), ([[0, 1], [2, 3]], mesh["tp"]), ([[0, 3], [1, 2]], made)]
    for lists, group in (*groups, *((each, each) for each in ([[0], [1, 2, 3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]]))):
        ours = next(each for each in lists if rank in each)
        assert world_of(group) is world_of(lists)
        for check in (_collectives, _norms, _samples, _joined):
            print(check.__name__, lists, flush=True)
            check(group, ours, rank)

    alone = [nn.Parameter(torch.ones(1))]
    torchring.wrap(torch.optim.SGD(alone, lr=0.1), group=[[each] for each in range(4)])
    assert not alone[0]._post_accumulate_grad_hooks


def _refused(rank: int) -> None:
    """Groups that this rank cannot be in, by any name: it says so, and waits for nobody."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    made, _ = dist.new_subgroups_by_enumeration([[0, 3], [2, 1]])
    for group, place in ((mesh["dp"], rank // 2), (made, rank // 2), ([[0, 2], [1, 3]], rank // 2)):
        assert (torchring.rank(group), torchring.size(group)) == (place, 2)
    assert not torchring.is_initialized()
    torchring.barrier(group=made)
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    destroyed, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    dist.destroy_process_group(destroyed)
    mistakes: list[tuple[str, Any]] = [
        (f"rank {rank} is not in group", meshes[rank < 2]),
        (f"rank {rank} is not in group", dist.GroupMember.NON_GROUP_MEMBER),
        (f"rank {rank} is in none of the lists", [[(rank + 1) % 4]]),
        ("group has rank 1 several times", [[0, 1], [1, 2, 3]]),
        ("group has ranks -1, 4, but the job has ranks 0-3", [[0, 1, 2, 3], [-1, 4]]),
        ("TypeError: group takes lists of ranks, such as", [0, 1, 2, 3]),
        ("TypeError: group takes lists of ranks, such as", [[0.0, 1.0], [2.0, 3.0]]),
        ("or lists of ranks such as [[0, 1], [2, 3]], got str", "0123"),
        ("or lists of ranks such as [[0, 1], [2, 3]], got Tensor", torch.zeros(4)),
        ("2 dimensions, dp, tp; pass the one over which ranks reduce, as mesh['dp'], or", mesh),
        ("the process group of group was destroyed", destroyed),
    ]
    for text, group in mistakes:
        sgd = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        for use in (partial(torchring.wrap, sgd), torchring.barrier, partial(torchring.data.Sampler, _DATA)):
            assert text in (said := attempt(partial(use, group=group))), (text, said)  # type: ignore[operator]
    dist.destroy_process_group()
    torchring.shutdown()


def _opened_crosswise(rank: int) -> None:
    in_a_circle = [[[0, 1]], [[1, 2]], [[2, 0]], [[3]]][rank]
    in_two_orders = [[[0, 1], [2], [3]], [[0, 1, 2], [3]], [[0, 1, 2], [3]], [[3]]][rank]
    for lists in (in_a_circle, in_two_orders):
        torchring.init(timeout_seconds=100.0)
        said = attempt(lambda lists=lists: torchring.barrier(group=lists))
        assert ("ranks open groups that overlap, in different orders" in said) == (rank != 3), said
        assert torchring.all_gather(torch.tensor([rank])).tolist() == [0, 1, 2, 3]  # the job is as it was
        torchring.shutdown()
    torchring.barrier(group=[[0, 1], [2, 3]])


def _ended(rank: int) -> None:
    """A rank of the group is a forked child, has broken the job, or has died."""
    group = [[0, 1], [2, 3]]
    torchring.barrier(group=group)
    read, write = os.pipe()
    if not (child := os.fork()):
        os.write(write, attempt(lambda: torchring.barrier(group=group)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert f"forked from rank {rank} (" in os.read(read, 10_000).decode()
    os.close(read), os.close(write)
    torchring.barrier()
    if rank == 0:
        default_world().break_off("a test", RuntimeError("broken"))
    if rank in (0, 3):
        said = attempt(lambda: torchring.barrier(group=[[0, 3], [1], [2]]))
        assert "a test was interrupted by RuntimeError: broken" in said, said
    torchring.shutdown()

    torchring.barrier(group=group)
    torchring.barrier()
    if rank == 3:
        os._exit(5)
    assert "rank 3" in attempt(lambda: torchring.barrier(group=group if rank == 2 else [[0, 1, 3], [2]]))
    if rank < 2:
        assert torchring.all_gather(torch.tensor([rank]), group=group).tolist() == [0, 1]


def _bad_groups(rank: int, world_size: int, store: str) -> None:
    torchring.init()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=3 - rank, world_size=4)
    said = attempt(lambda: torchring.barrier(group=dist.group.WORLD))
    assert f"this is rank {3 - rank} of 4; for torchring it is rank {rank} of 4" in said, said
    dist.destroy_process_group()
    torchring.shutdown()

    dist.init_process_group("gloo")
    _refused(rank)
    _opened_crosswise(rank)
    torchring.shutdown()
    _ended(rank)


def test_groups_that_cannot_be(tmp_path: Path) -> None:
    run_ranks(_bad_groups, 4, str(tmp_path / "store"), expect_exit={3: 5})
    with pytest.raises(ValueError, match="group does not work in an elastic job: its ranks change"):
        members_of([[0]], 0, 1, ELASTIC)
