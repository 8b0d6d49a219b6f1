"""A training that is saved by two ranks goes on with one or three, as if one process had trained all along."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import torchring
from tests.support.grids import grid
from tests.support.harness import run_pooled, run_ranks
from tests.support.training import small_model

_STEPS = 4  # before the checkpoint, and after it
_GLOBAL_BATCH = 6


def _train(rank: int, size: int, model: nn.Module, optimizer: Any, first: int, scheduler: Any) -> list[float]:
    """The losses of the global batches, of which each rank has a share."""
    losses = []
    for step in range(first, first + _STEPS):
        data = torch.randn(_GLOBAL_BATCH, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        mine = data[rank::size]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(mine[:, :4]), mine[:, 4:])
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(torchring.all_reduce(loss.detach().clone())) if size > 1 else loss.item())
    return losses


def _made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = small_model(seed=seed)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def _scheduler(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def _save(rank: int, size: int, kind: str, folder: str) -> list[float]:
    torchring.init(process_group=kind != "torch.save")
    model, plain = _made(seed=3)
    optimizer = torchring.wrap(plain, model)
    scheduler = _scheduler(optimizer)
    losses = _train(rank, size, model, optimizer, 0, scheduler)
    if kind == "torch.save":
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": None}
            torch.save(state | {"scheduler": scheduler.state_dict()}, Path(folder, "checkpoint.pt"))
        return losses
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer, "scheduler": scheduler.state_dict()}
    if kind == "dcp.save":
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.async_save(state, checkpoint_id=folder).result()
    return losses


def _resume(rank: int, size: int, kind: str, folder: str, wraps_first: bool) -> tuple[list[float], list[Tensor]]:
    torchring.init(process_group=kind != "torch.save" and size > 1)
    model, plain = _made(seed=4 + rank)  # what is loaded takes the place of all of it
    optimizer = torchring.wrap(plain, model) if wraps_first else plain
    scheduler = _scheduler(optimizer)
    if kind == "torch.save":
        state = torch.load(Path(folder, "checkpoint.pt"), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    else:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        state = {"model": of_model, "optimizer": of_optimizer, "scheduler": scheduler.state_dict()}
        options = {"no_dist": True} if size == 1 and "no_dist" in inspect.signature(dcp.load).parameters else {}
        dcp.load(state, checkpoint_id=folder, **options)
        set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    scheduler.load_state_dict(state["scheduler"])
    if not wraps_first:
        optimizer = torchring.wrap(plain, model)
    losses = _train(rank, size, model, optimizer, _STEPS, scheduler)
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.fixture(scope="module", params=["torch.save", "dcp.save", "dcp.async_save"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, list[float]]:
    """How it was saved, where, and the losses before."""
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    return request.param, folder, run_ranks(_save, 2, request.param, folder)[0]


@grid("size, wraps_first", [1, 3], [False, True], keep=lambda size, wraps_first: size == 3 and wraps_first)
def test_another_number_of_ranks_goes_on(saved: tuple[str, str, list[float]], size: int, wraps_first: bool) -> None:
    kind, folder, before = saved
    model, optimizer = _made(seed=3)
    scheduler = _scheduler(optimizer)
    expected = [*_train(0, 1, model, optimizer, 0, scheduler), *_train(0, 1, model, optimizer, _STEPS, scheduler)]
    # A process group leaves a hook behind, which a pool does not let pass.
    run = run_pooled if kind == "torch.save" else run_ranks
    for after, parameters in run(_resume, size, kind, folder, wraps_first):
        assert [*before, *after] == pytest.approx(expected, rel=1e-9)
        torch.testing.assert_close(parameters, [p.detach() for p in model.parameters()], rtol=1e-9, atol=1e-9)
