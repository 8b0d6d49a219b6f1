"""`torchring.accelerate` trains as Accelerate does with DistributedDataParallel, in scripts that stay as they are."""

import copy
import io
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import torchring
from tests.platforms.cases import Cases, assert_refused, close, flat, run_page, same, too_large_scale, without_torchrun
from tests.support.commands import finish, free_port, start
from tests.support.documents import ROOT
from tests.support.training import attempt
from torchring.gradients.views import CAN_SWAP

pytestmark = pytest.mark.platforms
case = Cases(__name__, deadline=180, env={"HF_HUB_OFFLINE": "1"})

PAGE = ROOT / "docs" / "platforms" / "accelerate.md"


def _model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed + torchring.rank())  # ranks begin with rank 0's weights, whatever they have made
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def _loader(size: int = 200) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(size, 8, generator=generator), torch.randn(size, 1, generator=generator))
    return DataLoader(data, batch_size=4)


def _weights(*models: nn.Module) -> list[float]:
    return flat(p for model in models for p in model.parameters())


def _accelerator(kind: type[Any], **options: Any) -> Any:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)  # of the last case; precision may be another
    GradientState._reset_state()
    return kind(**{"cpu": True, **options})


def _trained(
    kind: type[Any], num_epochs: int = 1, *, is_scaled: bool = False, **options: Any
) -> tuple[Any, Any, Any, dict[str, Any]]:
    """The accelerator, the model, the optimizer, and what there is to compare."""
    accelerator = _accelerator(kind, gradient_accumulation_steps=2, **options)
    accelerator.scaler = too_large_scale() if is_scaled else accelerator.scaler
    raw = _model()
    plain = torch.optim.AdamW(raw.parameters(), 1e-2)
    decay = torch.optim.lr_scheduler.StepLR(plain, 8, 0.9)
    optimizer, loader, model, scheduler = accelerator.prepare(plain, _loader(), raw, decay)  # in any order
    losses, skipped = [], []
    for x, y in (batch for _ in range(num_epochs) for batch in loader):
        with accelerator.accumulate(model):
            loss = mse_loss(model(x), y)
            accelerator.backward(100 * loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        skipped.append(accelerator.optimizer_step_was_skipped)
    found = {"weights": _weights(raw), "losses": losses, "skipped": skipped, "lr": scheduler.get_last_lr()}
    return accelerator, model, optimizer, found


def _ring() -> Any:
    from torchring.accelerate import RingAccelerator

    return RingAccelerator


@case
def test_it_trains_as_with_ddp(rank: int) -> None:
    from accelerate import Accelerator

    options: dict[str, Any]
    for options in ({"num_epochs": 4}, {"mixed_precision": "bf16"}, {"is_scaled": True}):
        (_, model, optimizer, mine), (_, wrapped, _, ddp) = (_trained(it, **options) for it in (_ring(), Accelerator))
        assert mine == {**ddp, "weights": close(ddp["weights"]), "losses": close(ddp["losses"])}
        assert set(mine["skipped"]) == ({True, False} if "is_scaled" in options else {False})
        same(mine["weights"])
        assert [type(each).__name__ for each in (model, wrapped)] == ["Sequential", "DistributedDataParallel"]
        # An epoch's 25 micro-steps end with a single one.
        assert optimizer.optimizer.stats().num_reductions == 13 * options.get("num_epochs", 1)


@case
def test_a_checkpoint_has_all_of_the_state(rank: int) -> None:
    found: list[list[float]] = []
    for options, folder in (({}, "whole"), ({"shard": CAN_SWAP}, "shared")):
        accelerator, model, optimizer, _ = _trained(_ring(), wrap_options=options)
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        for is_first in (True, False):
            (x, y), _ = list(_loader(8))
            accelerator.backward(mse_loss(model(x + rank), y))
            optimizer.step()
            optimizer.zero_grad()
            found.append(_weights(model))
            if is_first:
                accelerator.load_state(folder)
        written = io.BytesIO()
        torch.save([model, copy.deepcopy(model)], written)
        pickle.dumps(copy.deepcopy(optimizer.optimizer.optimizer))
        assert b"torchring" not in written.getvalue()
        assert {"model.safetensors", "optimizer.bin", "scheduler.bin"} <= {*os.listdir(folder)}
        assert next(iter(accelerator.get_state_dict(model))) == "0.weight"
    assert same(found) == found[:1] * 4


@case
def test_several_models_and_optimizers(rank: int) -> None:
    """Two models with an optimizer of their own, and one with a loose parameter, over both models' heads."""
    from accelerate import Accelerator

    found = []
    for kind in (_ring(), Accelerator):
        accelerator = _accelerator(kind, gradient_accumulation_steps=2)
        first, second = _model(), _model(1)
        makes: list[Callable[..., Any]] = [torch.optim.SGD, torch.optim.AdamW]
        plain = [make(m.parameters(), lr=1e-2) for make, m in zip(makes, (first, second), strict=True)]
        steps = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in plain]
        a, b, loader = accelerator.prepare(first, second, _loader(32))
        (one, two), schedules = accelerator.prepare(*plain), accelerator.prepare(*steps)
        for x, y in loader:
            with accelerator.accumulate(a, b):
                accelerator.backward(mse_loss(a(x), y) + mse_loss(b(x), y))
                one.step()
                two.step()
                one.zero_grad()
                two.zero_grad()
        found.append(_weights(first, second))
        if kind is not Accelerator:
            assert [each.optimizer.stats().num_reductions for each in (one, two)] == [2, 2]
            assert [each.optimizers for each in schedules] == [[one], [two]]
    assert found[0] == close(found[1])
    accelerator = _accelerator(_ring())
    first, second, loose = _model(), _model(1), nn.Parameter(torch.tensor(float(rank)))
    parameters = [*first.parameters(), *second.parameters(), loose]
    first, second, optimizer = accelerator.prepare(first, second, torch.optim.SGD(parameters, 0.1))
    for x, y in _loader(4):
        accelerator.backward(mse_loss(loose * (first(x + rank) + second(x)), y))
    optimizer.step()
    buffers = [buffer.flatten().double() for model in (first, second) for buffer in model.buffers()]
    same([*_weights(first, second), loose.item(), *torch.cat(buffers).tolist()])
    # For another training, with the old one alive.
    again = accelerator.prepare(torch.optim.SGD(first.parameters(), 0.1))
    accelerator.backward(first(torch.randn(4, 8)).sum())
    again.step()
    same(_weights(first))
    assert attempt(optimizer.step).startswith("ValueError: this DistributedOptimizer is closed")


@case
def test_ranks_with_uneven_data(rank: int) -> None:
    accelerator = _accelerator(_ring())
    raw = nn.Linear(8, 1)
    model, optimizer, loader = accelerator.prepare(raw, torch.optim.SGD(raw.parameters(), 0.1), _loader(20))
    num_batches = 0
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for x, y in loader:
            accelerator.backward(mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            num_batches += 1
    assert num_batches == 3 - rank
    metrics = [accelerator.gather_for_metrics(y).flatten() for _, y in loader]
    assert torch.equal(torch.cat(metrics), torch.cat([y.flatten() for _, y in _loader(20)]))
    assert len([*loader]) == 3
    same(_weights(model))


@case
def test_accelerate_sees_the_ranks_of_any_launcher(rank: int) -> None:
    """As under srun, which sets none of the variables that Accelerate reads."""
    with without_torchrun():
        before = dict(os.environ)
        accelerator = _accelerator(_ring(), cpu=False)
        assert (accelerator.num_processes, accelerator.process_index) == (2, rank)
        assert dict(os.environ) == before


@case
def test_the_page_is_run_as_pasted(rank: int) -> None:
    _accelerator(_ring())
    ring, plain = run_page(PAGE, "from torchring.accelerate import RingAccelerator as", "from accelerate import")
    assert same(_weights(ring["model"])) == close(_weights(plain["model"]))


@case
def test_a_mistake_is_an_error(rank: int) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
    from torch.nn.parallel import DistributedDataParallel

    ring = _ring()

    def alone() -> None:
        accelerator = _accelerator(ring)
        model, other = accelerator.prepare(_model()), _model()
        optimizer = torchring.wrap(torch.optim.SGD(other.parameters(), 0.1), other)
        accelerator.backward(model(torch.randn(4, 8)).sum())
        optimizer.step()

    def late() -> None:
        accelerator, model = _accelerator(ring), _model()
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1))
        accelerator.prepare(model, optimizer)

    def both() -> None:
        accelerator, model = _accelerator(Accelerator), _model()
        optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), 0.1), model)
        model = accelerator.prepare(model)
        accelerator.backward(model(torch.randn(4, 8)).sum())
        optimizer.step()

    def foreign() -> None:
        model = _model()
        _, optimizer = _accelerator(Accelerator).prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        _accelerator(ring).prepare(optimizer)

    def half() -> None:
        accelerator, model = _accelerator(ring), _model()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD([model[0].weight], 0.1))
        accelerator.backward(model(torch.randn(4, 8)).sum())
        optimizer.step()

    def seen_before() -> None:
        _accelerator(Accelerator, cpu=False)  # takes this process for the only one
        ring()

    def launched_with_fsdp() -> None:
        with mock.patch.dict(os.environ, ACCELERATE_USE_FSDP="true"):
            ring()

    def with_fsdp() -> None:
        with mock.patch.dict(os.environ):
            ring(fsdp_plugin=FullyShardedDataParallelPlugin())

    hook = DistributedDataParallelKwargs(comm_hook="fp16")
    shared = DataLoader(range(4), batch_sampler=torchring.data.Sampler(range(4), batch_size=1))
    assert_refused(
        (lambda: _accelerator(ring).prepare(DistributedDataParallel(_model())),
         "ValueError: the model is a DistributedDataParallel"),
        (lambda: _accelerator(ring).prepare(shared),
         "ValueError: Accelerate would share the shares of a torchring.data.Sampler out again"),
        (with_fsdp, "ValueError: fsdp_plugin asks for an engine"),
        (lambda: _accelerator(ring, kwargs_handlers=[hook]), "wrap_options={'compression': 'bf16'}"),
        (lambda: _accelerator(ring, wrap_options={"group": [[0, 1]]}), "ValueError: Accelerate shares batches"),
        (alone, "GradientError: nobody reduces the gradients of the Sequential"),
        (late, "ValueError: the optimizer of this Sequential was prepared before the model"),
        (both, "belongs to a DistributedDataParallel", "with Accelerate, use torchring.accelerate.RingAccelerator"),
        (foreign, "ValueError: this optimizer was prepared by another Accelerator"),
        (half, "GradientError: 0.bias, 1.weight, 1.bias and 2 more get gradients that nobody reduces"),
        (seen_before, "TopologyError: Accelerate sees 1 of 2 processes"),
        (launched_with_fsdp, "ValueError: ACCELERATE_USE_FSDP=true asks for an engine"),
    )  # fmt: skip


SCRIPT = """
import sys
import torch
from torchring.accelerate import RingAccelerator
accelerator = RingAccelerator()
model = torch.nn.Linear(1, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
accelerator.backward(model(torch.ones(1, 1) * accelerator.process_index).sum())
sys.stdout.write(f"size {accelerator.num_processes} gradient {model.weight.grad.item()}\\n")
"""


def test_accelerate_launch_on_cpus(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    program = Path(sys.executable).with_name("accelerate")
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path), "HOME": str(tmp_path)}
    command = f"launch --multi_gpu --num_processes 2 --main_process_port {free_port()} train.py".split()
    done = finish(start([program, *command], env, tmp_path), seconds=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("size 2 gradient 0.5") == 2
