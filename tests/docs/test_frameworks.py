"""Code of docs/guides/ddp.md and docs/guides/frameworks.md, as pasted: it trains as DDP does.

Where torchring and the framework's own DDP would both reduce, the framework's run ends with torchring's error.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

import torchring
from tests.support.checks import assert_same_on_all_ranks, digest
from tests.support.documents import ROOT, blocks, snippet
from tests.support.harness import run_ranks
from tests.support.training import attempt

DDP, FRAMEWORKS = (ROOT / "docs" / "guides" / f"{name}.md" for name in ("ddp", "frameworks"))
ADAMW = "torch.optim.AdamW({}.parameters())"


def side_of(diff: str, sign: str) -> str:
    return "".join(line[1:] or "\n" for line in diff.splitlines(keepends=True) if line[0] in f"{sign} \n")


def edited(code: str, *replacements: tuple[str, str]) -> str:
    for old, new in replacements:
        assert code.count(old) == 1, f"{old!r} is {code.count(old)} times in\n{code}"
        code = code.replace(old, new)
    return code


def run(code: str) -> dict[str, Any]:
    torch.manual_seed(0)  # the snippets draw their data
    namespace: dict[str, Any] = {}
    exec(compile(code, "docs", "exec"), namespace)
    return namespace


def _outcome(model: nn.Module, optimizer: Any = None) -> tuple[list[float], int]:
    """The weights, and how often torchring has reduced."""
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    if optimizer is None:
        return weights, 0
    return weights, optimizer.stats().num_reductions


# Each of these trains in several ways: "ring" as the pages say, "ddp" without torchring, "both" by mistake.


def _plain(rank: int) -> dict[str, Any]:
    diff = snippet(DDP, "# Moving from DistributedDataParallel")
    ring = run(side_of(diff, "+"))
    found: dict[str, Any] = {"ring": _outcome(ring["model"], ring["optimizer"])}
    torchring.shutdown()
    assert not dist.is_initialized(), "torchring.init(process_group=True) made one"
    if rank == 0:
        os.rename("checkpoint.pt", "ring.pt")
    ddp = run(side_of(diff, "-"))  # whose process group stays for what follows
    found["ddp"] = _outcome(ddp["model"])
    if rank == 0:
        state = torch.load("checkpoint.pt", weights_only=True)
        consume_prefix_in_state_dict_if_present(state, "module.")
        assert list(state) == list(torch.load("ring.pt", weights_only=True))
    return found


def _lightning(rank: int) -> dict[str, Any]:
    quiet = "max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False"
    code = edited(snippet(FRAMEWORKS, "## Lightning"), ("max_epochs=2", f"{quiet}, enable_model_summary=False"))
    ddp = edited(code, ("RingStrategy(),", "'ddp',"))
    adamw = ADAMW.format("self")
    wrapped = (f"return {adamw}", f"return torchring.wrap({adamw}, self)")
    both = edited(ddp, wrapped)
    sampler = "torch.utils.data.DistributedSampler(data, torchring.size(), torchring.rank())"
    auto = edited(
        code,
        wrapped,
        ("strategy=RingStrategy(), devices=torchring.local_size()", "strategy='auto', devices=1"),
        ("DataLoader(data, batch_size=4)", f"DataLoader(data, batch_size=4, sampler={sampler})"),
    )
    counts: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        close = torchring.DistributedOptimizer.close
        patch.setattr(
            torchring.DistributedOptimizer,
            "close",
            lambda self: (counts.append(self.stats().num_reductions), close(self)),
        )
        ring = run(code)
    found = _outcome(ring["model"])[0], counts[0]
    ring["trainer"].fit_loop.max_epochs = 3
    ring["trainer"].fit(ring["model"], ring["trainer"].train_dataloader)  # wraps again
    alone = run(auto)
    assert (ring["trainer"].global_rank, alone["trainer"].global_rank) == (rank, 0)
    return {
        "ring": found,
        "auto": _outcome(alone["model"], alone["trainer"].optimizers[0]),
        "ddp": _outcome(run(ddp)["model"]),
        "both": attempt(lambda: run(both)),
    }


def _buffers_and_copies(rank: int) -> dict[str, Any]:
    """What DDP does in its constructor and in forward; copies of the model are left to the script."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    torchring.broadcast_parameters(model)
    teacher = copy.deepcopy(model)
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.0), model)
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    return {"teacher": digest(teacher.parameters()), "student": digest(model.parameters()),
            "buffers": digest(model.buffers())}  # fmt: skip


def _all(rank: int, world_size: int, folder: str) -> dict[str, dict[str, Any]]:
    os.chdir(folder)
    return {case.__name__: case(rank) for case in (_plain, _lightning, _buffers_and_copies)}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    folder = str(tmp_path_factory.mktemp("frameworks"))
    return run_ranks(_all, 2, folder, deadline=150, env={"HF_HUB_OFFLINE": "1"})


@pytest.mark.parametrize(("name", "num_reductions"), [("_plain", 4), ("_lightning", 16)])
def test_it_trains_as_with_ddp(outcomes: list[Any], name: str, num_reductions: int) -> None:
    expected, _ = outcomes[0][name]["ddp"]
    for way in {"ring", "auto"} & outcomes[0][name].keys():
        for weights, count in (rank[name][way] for rank in outcomes):
            assert weights == outcomes[0][name][way][0]
            assert weights == pytest.approx(expected, rel=1e-6, abs=1e-7)
            assert count == num_reductions


@pytest.mark.parametrize("name", ["_lightning"])
def test_the_frameworks_own_ddp_beside_torchring_is_an_error(outcomes: list[Any], name: str) -> None:
    for rank in outcomes:
        error = rank[name]["both"]
        assert error.startswith(("GradientError: ", "ValueError: ")), error
        assert "belongs to a DistributedDataParallel" in error


def test_every_snippet_is_run_here() -> None:
    assert len(blocks(FRAMEWORKS, "python")) == 1
    assert len(blocks(DDP, "diff")) == 1


def test_ten_lines_change() -> None:
    assert (
        sum(line[0] in "+-" for line in snippet(DDP, "# Moving from DistributedDataParallel").split("\n") if line) == 10
    )


def test_buffers_and_copies(outcomes: list[Any]) -> None:
    found = [rank["_buffers_and_copies"] for rank in outcomes]
    assert_same_on_all_ranks([rank["teacher"] for rank in found])
    assert_same_on_all_ranks([rank["buffers"] for rank in found])
    assert found[0]["teacher"] == found[0]["student"]
