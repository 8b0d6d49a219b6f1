"""Checkpoints of a sharded optimizer are ordinary: any number of ranks, and a plain optimizer, go on from them."""

import copy
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)

import torchring
from tests.sharding.test_step import Net, assert_equal, assert_equal_states, groups, train
from tests.support.harness import ranks, run_pooled, run_ranks
from tests.support.training import attempt, values
from torchring.sharding import DistributedState, checkpoint
from torchring.sharding.shard_tensor import ShardTensor

_KINDS: dict[str, Any] = {
    "AdamW": lambda net: torch.optim.AdamW([*groups(net), {"params": []}], lr=0.01, amsgrad=True),
    "fused": lambda net: torch.optim.AdamW(groups(net), lr=0.01, fused=True),
    "whole": lambda net: torch.optim.Adafactor(groups(net), lr=0.01),
}
_SAVED = [("AdamW", True), ("AdamW", False), ("fused", True), ("whole", False)]  # whether by a sharded one


def _save(rank: int, size: int, folder: Path) -> None:
    for kind, shard in _SAVED:
        net = Net()
        optimizer = torchring.wrap(_KINDS[kind](net), net, shard=shard)
        early = optimizer.state_dict()
        assert (early is None) == (shard and rank > 0)
        assert early is None or early["state"] == {}
        train(net, optimizer, range(3))
        state = optimizer.state_dict()
        if rank == 0:
            torch.save({"model": net.state_dict(), "optimizer": state}, folder / f"{kind}{shard}.pt")
        optimizer.close()


def _go_on(rank: int, size: int, folder: Path) -> None:
    """A plain optimizer goes on from each file, and sharded ones: on all ranks, or where rank 0 has it."""
    for kind, saved_by in _SAVED:
        outcomes = []
        for shard, has_state in ((False, True), (True, True), (True, rank == 0)):
            saved = torch.load(folder / f"{kind}{saved_by}.pt", weights_only=True)  # a plain one goes on in its tensors
            net = Net()
            optimizer = torchring.wrap(_KINDS[kind](net), net, shard=shard)
            net.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"] if has_state else None)
            assert_equal_states(saved["optimizer"], optimizer.state_dict(all_ranks=shard))
            train(net, optimizer, range(3, 5))
            outcomes.append((values(net), optimizer.state_dict(all_ranks=shard)))
            optimizer.close()
        (plain, plain_state), *sharded = outcomes
        for parameters, state in sharded:
            assert_equal(plain, parameters)
            assert_equal_states(plain_state, state)


@pytest.mark.parametrize("size", [3, 1])
def test_others_go_on(size: int, tmp_path: Path) -> None:
    run_pooled(_save, 2, tmp_path)
    run_pooled(_go_on, size, tmp_path)


def _all_trained(kind: str, shard: bool) -> tuple[Net, Any]:
    """Parameters that get gradients from step 1 on, or are frozen."""
    net = Net()
    net.never.requires_grad_(False)
    return net, torchring.wrap(_KINDS[kind](net), net, shard=shard)


def _save_distributed(rank: int, size: int, kind: str, folder: str) -> None:
    """What a sharded and a plain run save, in both ways, before the first step and after some."""
    torchring.init(process_group=True)
    for num_steps, shard in ((0, True), (3, True), (3, False)):
        place = f"{folder}/{num_steps}{shard}"
        net, optimizer = _all_trained(kind, shard)
        train(net, optimizer, range(num_steps))
        model, state = get_state_dict(net, DistributedState(optimizer) if shard else optimizer)
        dcp.save({"model": model, "optimizer": state}, checkpoint_id=f"{place}/named")
        whole = optimizer.state_dict(all_ranks=True)
        if shard:
            parts = [v for entry in state["state"].values() for v in entry.values() if isinstance(v, ShardTensor)]
            assert 0 < sum(part.elements.numel() for part in parts) < 0.7 * sum(part.numel() for part in parts)
        dcp.async_save({"optimizer": DistributedState(optimizer)}, checkpoint_id=f"{place}/stateful").result()
        if rank == 0:
            torch.save({"model": net.state_dict(), "optimizer": whole}, f"{place}/whole.pt")
        optimizer.close()
    torchring.barrier()


def _load_distributed(rank: int, size: int, kind: str, folder: str) -> None:
    """Either kind loads what either kind has saved, in both ways, and trains on as its twin that has loaded whole."""
    torchring.init(process_group=True)
    for num_steps, saved, shard in ((0, True, True), (3, True, True), (3, True, False), (3, False, True)):
        place = f"{folder}/{num_steps}{saved}"
        whole = torch.load(f"{place}/whole.pt", weights_only=True)
        outcomes = []
        for way in ("named", "stateful", "whole"):
            net, optimizer = _all_trained(kind, shard)
            net.load_state_dict(whole["model"])
            torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)  # gives the groups another entry
            if way == "named":
                its = DistributedState(optimizer) if shard else optimizer
                _, state = get_state_dict(net, its)
                dcp.load({"optimizer": state}, checkpoint_id=f"{place}/named")
                set_optimizer_state_dict(net, its, state)
            elif way == "stateful":
                dcp.load({"optimizer": DistributedState(optimizer)}, checkpoint_id=f"{place}/stateful")
            else:
                optimizer.load_state_dict(copy.deepcopy(whole["optimizer"]))
            assert_equal_states(whole["optimizer"], optimizer.state_dict(all_ranks=True))
            train(net, optimizer, range(3, 5))
            outcomes.append(values(net))
            optimizer.close()
        for parameters in outcomes[:2]:
            assert_equal(outcomes[2], parameters)


@pytest.mark.parametrize(("kind", "size"), [("AdamW", 3), ("whole", 2)])
def test_torch_distributed_checkpoint(kind: str, size: int, tmp_path: Path) -> None:
    run_ranks(_save_distributed, 2, kind, str(tmp_path))
    run_ranks(_load_distributed, size, kind, str(tmp_path))


def _refuse(says: str, act: Callable[..., Any], *arguments: Any) -> None:
    with pytest.raises((Exception, CheckpointException)) as caught:
        act(*arguments)
    assert says in f"{type(caught.value).__name__}: {caught.value}", caught.value


@ranks(2, start=run_ranks)
def test_corners_of_torch_distributed_checkpoint(rank: int, tmp_path: Path) -> None:
    """torch.distributed.checkpoint where a rank has no share, and mistakes, which leave the state as it was."""

    def save(optimizer: Any, name: str) -> None:
        dcp.save({"optimizer": DistributedState(optimizer)}, checkpoint_id=f"{tmp_path}/{name}")

    def load(optimizer: Any) -> None:
        dcp.load({"optimizer": DistributedState(optimizer)}, checkpoint_id=f"{tmp_path}/tiny")

    layer = torch.nn.Linear(3, 3)
    alone = torchring.wrap(torch.optim.AdamW(layer.parameters()), layer, shard=True)
    _refuse("would write the state of 1 of 2 ranks", save, alone, "alone")
    alone.close()
    torchring.init(process_group=True)

    tiny = nn.Linear(2, 1, bias=False)  # a cache line is the least that a rank steps
    optimizer = torchring.wrap(torch.optim.AdamW(tiny.parameters()), tiny, shard=True)
    tiny(torch.ones(1, 2)).sum().backward()
    _refuse("call step() or zero_grad() first", save, optimizer, "tiny")
    optimizer.step()
    optimizer.zero_grad()
    whole = optimizer.state_dict(all_ranks=True)
    save(optimizer, "tiny")
    other = nn.Linear(2, 1, bias=False)
    again = torchring.wrap(torch.optim.AdamW(other.parameters()), other, shard=True)
    load(again)
    assert_equal_states(whole, again.state_dict(all_ranks=True))
    state = get_optimizer_state_dict(tiny, DistributedState(optimizer))
    assert any(entry["exp_avg"].elements.numel() for entry in state["state"].values()) == (rank == 0)

    wide, plain = _wide()
    large = torchring.wrap(plain, wide, shard=True)
    _backward(wide)
    large.step()
    large.zero_grad()
    whole, sharded = large.state_dict(all_ranks=True), get_optimizer_state_dict(wide, DistributedState(large))

    def set_state(state: Any, **options: Any) -> None:
        set_optimizer_state_dict(wide, DistributedState(large), state, **options)

    _refuse("Size mismatch", load, large)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    flattened = get_optimizer_state_dict(wide, DistributedState(large), options=flat)
    _refuse("flatten_optimizer_state_dict=True", lambda: set_state(flattened, options=flat))
    _refuse("only a part of this state", large.load_state_dict, sharded if rank == 0 else None)
    turned = copy.deepcopy(sharded)
    moment = turned["state"]["0.weight"]["exp_avg"]
    turned["state"]["0.weight"]["exp_avg"] = ShardTensor((30, 40), (1, 30), moment.first, moment.elements)
    _refuse("only a part of this state", set_state, turned)
    _refuse("for torch.distributed.checkpoint", lambda: moment + 1)
    _refuse("a rank cannot pickle all of it", torch.save, sharded, f"{tmp_path}/{rank}.pt")
    assert_equal_states(whole, large.state_dict(all_ranks=True))
    _backward(wide)
    large.step()
    set_state(copy.deepcopy(sharded))  # a copy of what step() has changed
    torchring.barrier()


def _wide() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 2))
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def _backward(net: nn.Module) -> None:
    net(torch.ones(2, 40)).square().mean().backward()


@ranks(2)
def test_mistakes_are_named_on_all_ranks_and_nothing_is_lost(rank: int) -> None:
    net, plain = _wide()
    optimizer = torchring.wrap(plain, net, shard=True)
    _backward(net)
    optimizer.step()
    state = optimizer.state_dict(all_ranks=True)
    other = nn.Linear(40, 31)
    stranger = torch.optim.AdamW([*other.parameters(), *net[1].parameters()])
    sum(p.sum() for p in stranger.param_groups[0]["params"]).backward()
    stranger.step()
    net.zero_grad()
    load = optimizer.load_state_dict
    shapes = "exp_avg of 0.weight has the shape (31, 40) in this state, and the parameter has (30, 40)"
    _refuse(shapes, load, stranger.state_dict())
    _refuse("parameter groups of this state have [] parameters", load, {"state": {}, "param_groups": []})
    _refuse("rank 0 passed None" if rank == 0 else "passed None", load, None if rank == 0 else state)
    _backward(net)
    net[0].bias.grad = net[0].bias.grad if rank == 0 else None
    _refuse("other parameters have a gradient than on rank 0", optimizer.step)
    net.zero_grad()
    _refuse("step(closure) does not work with shard=True", optimizer.step, lambda: None)
    _refuse("call step() of the optimizer that torchring.wrap", plain.step)
    _refuse("call state_dict() of the optimizer that torchring.wrap", plain.state_dict)
    _refuse("call load_state_dict() of the optimizer that torchring.wrap", plain.load_state_dict, state)
    _refuse("cannot be copied or pickled", copy.deepcopy, (net, optimizer))

    def in_backward(_: Tensor) -> None:
        if optimizer._sync.in_backward:
            _refuse("called inside backward()", optimizer.state_dict)
            _refuse("step() was called inside backward()", optimizer.step)

    handle = net[1].weight.register_post_accumulate_grad_hook(in_backward)
    _backward(net)
    handle.remove()  # refers to the optimizer, past the garbage collector
    optimizer.step()
    before = net[0].weight.data
    net[0].weight.data = before.clone()
    _refuse("the memory of 0.weight was replaced after torchring.wrap", optimizer.step)
    net[0].weight.data = before
    optimizer.zero_grad()
    optimizer.close()
    _refuse("has the state of a part of the parameters only", plain.step)
    _refuse("has the state of a part of the parameters only", torchring.wrap, plain, net)
    plain.load_state_dict(state)
    plain.step()
    again = torchring.wrap(plain, net, shard=True)
    assert_equal_states(state, again.state_dict(all_ranks=True))
    again.close()

    def wrap(options: dict[str, Any], net: nn.Module | None = None, call: Any = torchring.wrap) -> None:
        net = net or _wide()[0]
        call(torch.optim.SGD(net.parameters(), lr=0.1), net, **options)

    _refuse("shard=True", wrap, {"shard": rank == 0})
    _refuse("shard must be True or False, got 1", wrap, {"shard": 1})
    _refuse("call torchring.wrap(..., shard=True)", wrap, {"shard": True}, None, torchring.DistributedOptimizer)
    sparse, part = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3)
    part.weight = nn.Parameter(torch.ones(12)[:9].view(3, 3))
    _refuse("does not take sparse gradients, as weight has", wrap, {"shard": True}, sparse)
    _refuse("and cannot move weight", wrap, {"shard": True}, part)

    def make_graphed_callables() -> Any:
        return lambda x: x

    graphed = nn.Linear(3, 3)
    graphed.forward = make_graphed_callables()  # type: ignore[method-assign]
    _refuse("the CUDA graph of this Linear goes on reading", wrap, {"shard": True}, graphed)


def _raise_in_step(net: nn.Module, optimizer: Any) -> None:
    optimizer.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    _backward(net)
    optimizer.step()


_CALLS: dict[str, Callable[..., object]] = {
    "state_dict": lambda net, optimizer: optimizer.state_dict(),
    "three backwards": lambda net, optimizer: [_backward(net) for _ in range(3)],
    "step": lambda net, optimizer: optimizer.step(),
    "backward, step": lambda net, optimizer: (_backward(net), optimizer.step()),
    "error in step": _raise_in_step,
}


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ("state_dict", "three backwards", ("called state_dict(optimizer 0) while rank 1 called backward()",)),
        ("state_dict", "step", ("called state_dict(optimizer 0) while rank", "called step(optimizer 0) while rank")),
        ("backward, step", "three backwards", ("called step(optimizer 0) while rank 1 called backward()",)),
        ("backward, step", "error in step", ("ZeroDivisionError",)),
    ],
)
@ranks(2, start=run_ranks)
def test_a_call_on_one_rank_is_named(first: str, second: str, says: tuple[str, ...], rank: int) -> None:
    torchring.init(timeout_seconds=20)
    net, plain = _wide()
    optimizer = torchring.wrap(plain, net, shard=True)
    for _ in range(2):
        _backward(net)
        optimizer.step()
    said = attempt(lambda: _CALLS[second if rank else first](net, optimizer))
    assert any(words in said for words in says), said
    torchring.shutdown()


def _dies_while_gathering(rank: int, size: int, folder: str) -> str:
    torchring.init(process_group=True, timeout_seconds=20)
    net, plain = _wide()
    optimizer = torchring.wrap(plain, net, shard=True)
    _backward(net)
    optimizer.step()
    dcp.save({"optimizer": get_optimizer_state_dict(net, DistributedState(optimizer))}, checkpoint_id=folder)
    state = optimizer.state_dict()
    if rank == 0:
        torch.save(state, f"{folder}/whole.pt")
    torchring.barrier()
    if rank == 1:
        checkpoint.broadcast_bytes = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # after the ranks have begun
    return attempt(optimizer.state_dict)


def test_a_rank_that_dies_while_state_is_gathered_is_named_and_earlier_files_are_whole(tmp_path: Path) -> None:
    first, _, last = run_ranks(_dies_while_gathering, 3, str(tmp_path), expect_exit={1: -9})
    assert first.startswith("PeerLostError: rank 1 (pid "), first
    assert last.startswith("PeerLostError: rank 1 (pid "), last
    net, optimizer = _wide()
    state = get_optimizer_state_dict(net, optimizer)
    dcp.load({"optimizer": state}, checkpoint_id=str(tmp_path))
    set_optimizer_state_dict(net, optimizer, state)
    assert_equal_states(torch.load(tmp_path / "whole.pt", weights_only=True), optimizer.state_dict())
