"""A training that is saved by two ranks goes on with three, as if one process had trained all along."""

from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import torchring
from tests.support.harness import run_ranks
from tests.support.training import small_model, values

_STEPS: Final = 4  # before the checkpoint, and after it
_GLOBAL_BATCH: Final = 6


def _made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = small_model(seed=seed)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def _train(rank: int, size: int, model: nn.Module, optimizer: Any, first: int, scheduler: Any) -> None:
    """Each rank has a share of the global batches."""
    for step in range(first, first + _STEPS):
        data = torch.randn(_GLOBAL_BATCH, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        mine = data[rank::size]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(mine[:, :4]), mine[:, 4:]).backward()
        optimizer.step()
        scheduler.step()


def _scheduler(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def _save(rank: int, size: int, folder: str) -> None:
    torchring.init(process_group=True)
    model, plain = _made(seed=3)
    optimizer = torchring.wrap(plain, model)
    scheduler = _scheduler(optimizer)
    _train(rank, size, model, optimizer, 0, scheduler)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer, "scheduler": scheduler.state_dict()}
    dcp.async_save(state, checkpoint_id=folder).result()


def _resume(rank: int, size: int, folder: str) -> list[torch.Tensor]:
    torchring.init(process_group=True)
    model, plain = _made(seed=4 + rank)  # what is loaded takes the place of all of it
    optimizer = torchring.wrap(plain, model)
    scheduler = _scheduler(optimizer)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer, "scheduler": scheduler.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    scheduler.load_state_dict(state["scheduler"])
    _train(rank, size, model, optimizer, _STEPS, scheduler)
    return values(model)


def test_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    run_ranks(_save, 2, str(tmp_path))
    model, optimizer = _made(seed=3)
    scheduler = _scheduler(optimizer)
    for first in (0, _STEPS):
        _train(0, 1, model, optimizer, first, scheduler)
    for parameters in run_ranks(_resume, 3, str(tmp_path)):
        torch.testing.assert_close(parameters, values(model), rtol=1e-9, atol=1e-9)
