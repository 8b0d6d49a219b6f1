"""Checkpoints of a sharded optimizer are ordinary: any number of ranks, and a plain optimizer, go on from them."""

from __future__ import annotations

import copy
import inspect
import os
import signal
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
from tests.sharding.test_step import Net, _assert_equal_states, _groups, _parameters, _train
from tests.support.grids import grid
from tests.support.harness import ranks, run_pooled, run_ranks
from tests.support.training import attempt
from torchring.sharding import DistributedState, checkpoint
from torchring.sharding.shard_tensor import ShardTensor

_KINDS: dict[str, Any] = {
    "AdamW": lambda net: torch.optim.AdamW([*_groups(net), {"params": []}], lr=0.01, amsgrad=True),
    "fused": lambda net: torch.optim.AdamW(_groups(net), lr=0.01, fused=True),
    "whole": lambda net: torch.optim.Adafactor(_groups(net), lr=0.01),
}


def _save(rank: int, size: int, kind: str, shard: bool, file: str) -> None:
    net = Net()
    optimizer = torchring.wrap(_KINDS[kind](net), net, shard=shard)
    early = optimizer.state_dict()
    assert (early is None) == (shard and rank > 0)
    assert early is None or early["state"] == {}
    _train(net, optimizer, range(3))
    state = optimizer.state_dict()
    if rank == 0:
        torch.save({"model": net.state_dict(), "optimizer": state}, file)


def _go_on(rank: int, size: int, kind: str, file: str, has_all: bool) -> list[Tensor]:
    """Twins go on from the file, one of them sharded. Returns the parameters."""
    outcomes = []
    for shard in (False, True):
        saved = torch.load(file, weights_only=True)  # a plain optimizer goes on in these tensors
        net = Net()
        optimizer = torchring.wrap(_KINDS[kind](net), net, shard=shard)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"] if has_all or not shard or rank == 0 else None)
        loaded = optimizer.state_dict(all_ranks=True) if shard else optimizer.state_dict()
        _assert_equal_states(saved["optimizer"], loaded)
        _train(net, optimizer, range(3, 5))
        outcomes.append((_parameters(net), optimizer.state_dict(all_ranks=True) if shard else optimizer.state_dict()))
    (plain, plain_state), (sharded, state) = outcomes
    assert not [i for i, (one, other) in enumerate(zip(plain, sharded, strict=True)) if not torch.equal(one, other)]
    _assert_equal_states(plain_state, state)
    return plain


@grid(
    "kind, shard, size",
    list(_KINDS),
    [True, False],
    [3, 2, 1],
    keep=lambda kind, shard, size: size == 3 or (kind, shard) == ("AdamW", True),
)
def test_others_go_on(kind: str, shard: bool, size: int, tmp_path: Path) -> None:
    if kind == "whole" and not hasattr(torch.optim, "Adafactor"):
        pytest.skip("this PyTorch has no Adafactor")
    file = str(tmp_path / "checkpoint.pt")
    run_pooled(_save, 2, kind, shard, file)
    for has_all in (True, False):
        run_pooled(_go_on, size, kind, file, has_all)


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
        _train(net, optimizer, range(num_steps))
        model, state = get_state_dict(net, DistributedState(optimizer))
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
                _, state = get_state_dict(net, DistributedState(optimizer))
                dcp.load({"optimizer": state}, checkpoint_id=f"{place}/named")
                set_optimizer_state_dict(net, DistributedState(optimizer), state)
            elif way == "stateful":
                dcp.load({"optimizer": DistributedState(optimizer)}, checkpoint_id=f"{place}/stateful")
            else:
                optimizer.load_state_dict(copy.deepcopy(whole["optimizer"]))
            _assert_equal_states(whole["optimizer"], optimizer.state_dict(all_ranks=True))
            _train(net, optimizer, range(3, 5))
            outcomes.append(_parameters(net))
            optimizer.close()
        for parameters in zip(*outcomes, strict=True):
            assert all(torch.equal(parameters[-1], parameter) for parameter in parameters)


@grid("kind, size", list(_KINDS), [3, 2], keep=lambda kind, size: (kind, size) in (("AdamW", 3), ("whole", 2)))
def test_torch_distributed_checkpoint(kind: str, size: int, tmp_path: Path) -> None:
    run_ranks(_save_distributed, 2, kind, str(tmp_path))
    run_ranks(_load_distributed, size, kind, str(tmp_path))


@ranks(2, start=run_ranks)
def test_corners_of_torch_distributed_checkpoint(rank: int, tmp_path: Path) -> None:
    """torch.distributed.checkpoint where a rank has no share, and mistakes, which leave the state as it was."""
    layer = torch.nn.Linear(3, 3)
    alone = torchring.wrap(torch.optim.AdamW(layer.parameters()), layer, shard=True)
    said = attempt(lambda: dcp.save({"optimizer": DistributedState(alone)}, checkpoint_id=f"{tmp_path}/alone"))
    assert "would write the state of 1 of 2 ranks" in said, said
    alone.close()
    torchring.init(process_group=True)

    def fails(says: str, action: Any) -> None:
        with pytest.raises((Exception, CheckpointException)) as caught:
            action()
        assert says in str(caught.value), caught.value

    tiny = nn.Linear(2, 1, bias=False)  # a cache line is the least that a rank steps
    optimizer = torchring.wrap(torch.optim.AdamW(tiny.parameters()), tiny, shard=True)
    tiny(torch.ones(1, 2)).sum().backward()
    fails(
        "call step() or zero_grad() first",
        lambda: dcp.save({"optimizer": DistributedState(optimizer)}, checkpoint_id=f"{tmp_path}/tiny"),
    )
    optimizer.step()
    optimizer.zero_grad()
    whole = optimizer.state_dict(all_ranks=True)
    dcp.save({"optimizer": DistributedState(optimizer)}, checkpoint_id=f"{tmp_path}/tiny")
    other = nn.Linear(2, 1, bias=False)
    again = torchring.wrap(torch.optim.AdamW(other.parameters()), other, shard=True)
    dcp.load({"optimizer": DistributedState(again)}, checkpoint_id=f"{tmp_path}/tiny")
    _assert_equal_states(whole, again.state_dict(all_ranks=True))
    state = get_optimizer_state_dict(tiny, DistributedState(optimizer))
    assert any(entry["exp_avg"].elements.numel() for entry in state["state"].values()) == (rank == 0)

    wide, plain = _wide()
    large = torchring.wrap(plain, wide, shard=True)
    _backward(wide)
    large.step()
    large.zero_grad()
    whole, sharded = large.state_dict(all_ranks=True), get_optimizer_state_dict(wide, DistributedState(large))
    fails("Size mismatch", lambda: dcp.load({"optimizer": DistributedState(large)}, checkpoint_id=f"{tmp_path}/tiny"))
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    flattened = get_optimizer_state_dict(wide, DistributedState(large), options=flat)
    fails(
        "flatten_optimizer_state_dict=True",
        lambda: set_optimizer_state_dict(wide, DistributedState(large), flattened, options=flat),
    )
    fails("only a part of this state", lambda: large.load_state_dict(sharded if rank == 0 else None))
    turned = copy.deepcopy(sharded)
    moment = turned["state"]["0.weight"]["exp_avg"]
    turned["state"]["0.weight"]["exp_avg"] = ShardTensor((30, 40), (1, 30), moment.first, moment.elements)
    fails("only a part of this state", lambda: set_optimizer_state_dict(wide, DistributedState(large), turned))
    fails("for torch.distributed.checkpoint", lambda: moment + 1)
    fails("a rank cannot pickle all of it", lambda: torch.save(sharded, f"{tmp_path}/{rank}.pt"))
    _assert_equal_states(whole, large.state_dict(all_ranks=True))
    _backward(wide)
    large.step()
    set_optimizer_state_dict(wide, DistributedState(large), copy.deepcopy(sharded))  # a copy of what step() has changed
    torchring.barrier()


def _wide() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 2))
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def _backward(net: nn.Module) -> None:
    net(torch.ones(2, 40)).square().mean().backward()


def _step_with_a_gradient_on_rank_0(net: nn.Module, optimizer: Any) -> None:
    _backward(net)
    if torchring.rank() > 0:
        net[0].bias.grad = None
    optimizer.step()


@ranks(2)
def test_mistakes_are_named_on_all_ranks_and_nothing_is_lost(rank: int) -> None:
    """Mistakes that leave the optimizer as it was. All ranks go on together after each of them."""
    net, plain = _wide()
    optimizer = torchring.wrap(plain, net, shard=True)

    def refuse(says: str, action: Any) -> None:
        said = attempt(action)
        assert says in said, said

    _backward(net)
    optimizer.step()
    state = optimizer.state_dict(all_ranks=True)
    other = nn.Linear(40, 31)
    stranger = torch.optim.AdamW([*other.parameters(), *net[1].parameters()])
    sum(p.sum() for p in stranger.param_groups[0]["params"]).backward()
    stranger.step()
    net.zero_grad()
    shapes = "exp_avg of 0.weight has the shape (31, 40) in this state, and the parameter has (30, 40)"
    refuse(shapes, lambda: optimizer.load_state_dict(stranger.state_dict()))
    refuse(
        "parameter groups of this state have [] parameters",
        lambda: optimizer.load_state_dict({"state": {}, "param_groups": []}),
    )
    refuse(
        "rank 0 passed None" if rank == 0 else "passed None",
        lambda: optimizer.load_state_dict(None if rank == 0 else state),
    )
    refuse("other parameters have a gradient than on rank 0", lambda: _step_with_a_gradient_on_rank_0(net, optimizer))
    net.zero_grad()
    refuse("step(closure) does not work with shard=True", lambda: optimizer.step(lambda: None))
    refuse("call step() of the optimizer that torchring.wrap", plain.step)
    refuse("call state_dict() of the optimizer that torchring.wrap", plain.state_dict)
    refuse("call load_state_dict() of the optimizer that torchring.wrap", lambda: plain.load_state_dict(state))
    refuse("cannot be copied or pickled", lambda: copy.deepcopy((net, optimizer)))

    def in_backward(_: Tensor) -> None:
        if optimizer._sync.in_backward:
            refuse("called inside backward()", optimizer.state_dict)
            refuse("step() was called inside backward()", optimizer.step)

    handle = net[1].weight.register_post_accumulate_grad_hook(in_backward)
    _backward(net)
    handle.remove()  # refers to the optimizer, past the garbage collector
    optimizer.step()
    before = net[0].weight.data
    net[0].weight.data = before.clone()
    refuse("the memory of 0.weight was replaced after torchring.wrap", optimizer.step)
    net[0].weight.data = before
    optimizer.zero_grad()
    optimizer.close()
    refuse("has the state of a part of the parameters only", plain.step)
    refuse("has the state of a part of the parameters only", lambda: torchring.wrap(plain, net))
    plain.load_state_dict(state)
    plain.step()
    again = torchring.wrap(plain, net, shard=True)
    _assert_equal_states(state, again.state_dict(all_ranks=True))
    again.close()
    for options, says in (
        ({"shard": rank == 0}, "shard=True"),
        ({"shard": 1}, "shard must be True or False, got 1"),
        ({"shard": "unmirrored"}, "no rank keeps another one's share any more, so pass True"),
        ({"shard": True, "free_gradients": True}, "use FSDP2 (torch.distributed.fsdp.fully_shard)"),
    ):
        net, plain = _wide()
        refuse(says, lambda plain=plain, net=net, options=options: torchring.wrap(plain, net, **options))
    refuse("call torchring.wrap(..., shard=True)", lambda: torchring.DistributedOptimizer(plain, net, shard=True))
    sparse, part = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3)
    part.weight = nn.Parameter(torch.ones(12)[:9].view(3, 3))
    for model, says in ((sparse, "does not take sparse gradients, as weight has"), (part, "and cannot move weight")):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        refuse(says, lambda sgd=sgd, model=model: torchring.wrap(sgd, model, shard=True))


@pytest.mark.parametrize(
    ("what", "instead", "says"),
    [
        ("state_dict", "backward", "called state_dict(optimizer 0) while rank 1 called backward()"),
        ("state_dict", "step", "called state_dict(optimizer 0) while rank"),
        ("step", "backward", "called step(optimizer 0) while rank 1 called backward()"),
        ("step", "raise", "ZeroDivisionError"),
    ],
)
@ranks(2, start=run_ranks)
def test_a_call_on_one_rank_is_named(what: str, instead: str, says: str, rank: int) -> None:
    torchring.init(timeout_seconds=20)
    net, plain = _wide()
    optimizer = torchring.wrap(plain, net, shard=True)
    for _ in range(2):
        _backward(net)
        optimizer.step()

    def go_on() -> None:
        if rank == 0:
            _backward(net) if what == "step" else None
            getattr(optimizer, what)()
        elif instead == "backward":
            for _ in range(3):
                _backward(net)
        elif instead == "step":
            optimizer.step()
        elif instead == "raise":
            optimizer.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
            _backward(net)
            optimizer.step()

    said = attempt(go_on)
    assert says in said or says.replace("state_dict(", "step(") in said, said
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
    options = {"no_dist": True} if "no_dist" in inspect.signature(dcp.load).parameters else {}
    dcp.load({"optimizer": state}, checkpoint_id=str(tmp_path), **options)
    set_optimizer_state_dict(net, optimizer, state)
    _assert_equal_states(torch.load(tmp_path / "whole.pt", weights_only=True), optimizer.state_dict())
