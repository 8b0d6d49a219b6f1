"""Code of docs/guides/ddp.md, as pasted: it trains as DDP does."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

import torchring
from tests.support.checks import assert_same_everywhere, digest
from tests.support.documents import ROOT, blocks, snippet
from tests.support.harness import ranks, run_ranks

DDP = ROOT / "docs" / "guides" / "ddp.md"
HEADING = "# Moving from DistributedDataParallel"


def side_of(diff: str, sign: str) -> str:
    return "".join(line[1:] or "\n" for line in diff.splitlines(keepends=True) if line[0] in f"{sign} \n")


def run(code: str) -> dict[str, Any]:
    torch.manual_seed(0)  # the snippet draws its data
    namespace: dict[str, Any] = {}
    exec(compile(code, "docs", "exec"), namespace)
    return namespace


def weights_of(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


@ranks(2, run_ranks)
def test_it_trains_as_with_ddp(tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    diff = snippet(DDP, HEADING)
    ring = run(side_of(diff, "+"))
    assert ring["optimizer"].stats().num_reductions == 4
    assert_same_everywhere(ring["model"].parameters())
    _look_at_buffers_and_copies(rank)
    torchring.shutdown()
    assert not dist.is_initialized(), "torchring.init(process_group=True) made one"
    if rank == 0:
        os.rename("checkpoint.pt", "ring.pt")
    ddp = run(side_of(diff, "-"))
    assert weights_of(ring["model"]) == pytest.approx(weights_of(ddp["model"]), rel=1e-6, abs=1e-7)
    if rank == 0:
        state = torch.load("checkpoint.pt", weights_only=True)
        consume_prefix_in_state_dict_if_present(state, "module.")
        assert list(state) == list(torch.load("ring.pt", weights_only=True))


def _look_at_buffers_and_copies(rank: int) -> None:
    """What DDP does in its constructor and in forward; copies of the model are left to the script."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    torchring.broadcast_parameters(model)
    teacher = copy.deepcopy(model)
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.0), model)
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    assert digest(teacher.parameters()) == digest(model.parameters())
    assert_same_everywhere([*model.parameters(), *model.buffers()])


def test_ten_lines_change() -> None:
    assert len(blocks(DDP, "diff")) == 1
    assert sum(line[0] in "+-" for line in snippet(DDP, HEADING).split("\n") if line) == 10
