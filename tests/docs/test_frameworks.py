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
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.utils.data import Dataset

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
    if not isinstance(optimizer, torchring.DistributedOptimizer):
        optimizer = optimizer.optimizer  # Accelerate's own wrapper
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


class _Rows(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.sum()}


class _Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(8, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.net(x)[:, 0], labels)}


def _trainer(rank: int) -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    def trained(kind: type[Trainer], is_wrapped: bool = False, is_given: bool = False, use_cpu: bool = True) -> Any:
        model = _Regression()
        batches = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 2}
        quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
        options = TrainingArguments("checkpoints", use_cpu=use_cpu, learning_rate=0.05, **batches, **quiet)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.0) if is_given else None
        if is_wrapped:
            optimizer = torchring.wrap(torch.optim.AdamW(model.parameters()), model)
        trainer = kind(model, options, train_dataset=_Rows(), optimizers=(optimizer, None))
        trainer.train()
        return trainer

    ring_trainer = run(snippet(FRAMEWORKS, "## Hugging Face Trainer"))["RingTrainer"]
    ring, given, ddp = trained(ring_trainer), trained(ring_trainer, is_given=True), trained(Trainer)
    return {
        "ring": _outcome(ring.model, ring.optimizer),
        "given": _outcome(given.model, given.optimizer),
        "ddp": _outcome(ddp.model),
        "both": attempt(lambda: trained(Trainer, is_wrapped=True)),
        "one": attempt(lambda: trained(ring_trainer, use_cpu=False)),
    }


def _accelerate(rank: int) -> dict[str, Any]:
    from accelerate.state import AcceleratorState

    code = snippet(FRAMEWORKS, "## Accelerate")
    both = edited(
        code,
        ("accelerator.prepare_model(torch.nn.Linear(8, 1), evaluation_mode=True)", "torch.nn.Linear(8, 1)"),
        ("optimizer, loader = accelerator.prepare(", "model, optimizer, loader = accelerator.prepare(model, "),
    )
    adamw = ADAMW.format("model")
    ddp = edited(both, (f"torchring.wrap({adamw}, model)", adamw), ("accelerator.no_sync =", "_ ="))
    AcceleratorState._reset_state(reset_partial_state=True)  # what a Trainer of _trainer has found out
    ring = run(code)
    trained = ring["model"].weight.detach().clone()
    torchring.barrier()  # rank 0 saves
    nn.init.zeros_(ring["model"].weight)
    ring["accelerator"].load_state("checkpoint")
    assert torch.equal(ring["model"].weight, trained), "save_state() has saved the model"
    return {
        "ring": _outcome(ring["model"], ring["optimizer"]),
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
    return {case.__name__: case(rank) for case in (_plain, _trainer, _accelerate, _buffers_and_copies)}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    folder = str(tmp_path_factory.mktemp("frameworks"))
    return run_ranks(_all, 2, folder, deadline=150, env={"HF_HUB_OFFLINE": "1"})


@pytest.mark.parametrize(("name", "num_reductions"), [("_plain", 4), ("_trainer", 4), ("_accelerate", 4)])
def test_it_trains_as_with_ddp(outcomes: list[Any], name: str, num_reductions: int) -> None:
    expected, _ = outcomes[0][name]["ddp"]
    for way in {"ring", "given"} & outcomes[0][name].keys():
        for weights, count in (rank[name][way] for rank in outcomes):
            assert weights == outcomes[0][name][way][0]
            assert weights == pytest.approx(expected, rel=1e-6, abs=1e-7)
            assert count == num_reductions


@pytest.mark.parametrize("name", ["_trainer", "_accelerate"])
def test_the_frameworks_own_ddp_beside_torchring_is_an_error(outcomes: list[Any], name: str) -> None:
    for rank in outcomes:
        error = rank[name]["both"]
        assert error.startswith(("GradientError: ", "ValueError: ")), error
        assert "belongs to a DistributedDataParallel" in error


def test_a_trainer_that_sees_one_process_only_is_an_error(outcomes: list[Any]) -> None:
    for rank in outcomes:
        assert rank["_trainer"]["one"].startswith("ValueError: the Trainer sees one process only")


def test_every_snippet_is_run_here() -> None:
    assert len(blocks(FRAMEWORKS, "python")) == 2
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
