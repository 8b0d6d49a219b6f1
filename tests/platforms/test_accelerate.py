"""`torchring.accelerate` trains as Accelerate does with DistributedDataParallel, in scripts that stay as they are.

One job of two ranks tries all cases, because importing Accelerate takes seconds.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import torchring
from tests.support.commands import output_of
from tests.support.documents import ROOT, rows, section, snippet
from tests.support.harness import run_ranks
from tests.support.training import attempt

pytestmark = pytest.mark.platforms

PAGE = ROOT / "docs" / "platforms" / "accelerate.md"


def _model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed + torchring.rank())  # ranks begin with rank 0's weights, whatever they have made
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def _loader(size: int = 200) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(size, 8, generator=generator), torch.randn(size, 1, generator=generator))
    return DataLoader(data, batch_size=4)


def _weights(*models: nn.Module) -> list[float]:
    weights: list[float] = torch.cat([p.detach().flatten() for m in models for p in m.parameters()]).tolist()
    return weights


def _accelerator(kind: type[Any], **options: Any) -> Any:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)  # of the last case; precision may be another
    GradientState._reset_state()
    return kind(**{"cpu": True, **options})


def _fit(accelerator: Any, model: Any, optimizer: Any, loader: Any, scheduler: Any, num_epochs: int) -> list[float]:
    losses = []
    for _ in range(num_epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    return losses


def _trained(kind: type[Any], num_epochs: int = 4, **options: Any) -> dict[str, Any]:
    accelerator = _accelerator(kind, gradient_accumulation_steps=2, **options)
    raw = _model()
    plain = torch.optim.AdamW(raw.parameters(), 1e-2)
    decay = torch.optim.lr_scheduler.StepLR(plain, 8, 0.9)
    optimizer, loader, model, scheduler = accelerator.prepare(plain, _loader(), raw, decay)  # in any order
    losses = _fit(accelerator, model, optimizer, loader, scheduler, num_epochs)
    return {"accelerator": accelerator, "model": model, "optimizer": optimizer, "losses": losses, "raw": raw}


def _parity(ring: type[Any]) -> dict[str, Any]:
    from accelerate import Accelerator

    mine, ddp = _trained(ring), _trained(Accelerator)
    half = [_trained(kind, num_epochs=1, mixed_precision="bf16") for kind in (ring, Accelerator)]
    return {
        "losses": [mine["losses"], ddp["losses"]],
        "weights": [_weights(mine["raw"]), _weights(ddp["raw"])],
        "bf16": [_weights(each["raw"]) for each in half],
        "num_reductions": mine["optimizer"].optimizer.stats().num_reductions,
        "types": [type(mine["model"]).__name__, type(ddp["model"]).__name__],
    }


def _checkpoint(ring: type[Any], options: dict[str, Any], folder: str) -> dict[str, Any]:
    run = _trained(ring, num_epochs=1, wrap_options=options)
    accelerator, model, optimizer = run["accelerator"], run["model"], run["optimizer"]
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()

    def go_on() -> list[float]:
        (x, y), _ = list(_loader(8))
        accelerator.backward(mse_loss(model(x + torchring.rank()), y))
        optimizer.step()
        optimizer.zero_grad()
        return _weights(model)

    expected = go_on()
    go_on()
    accelerator.load_state(folder)
    written = io.BytesIO()
    torch.save([model, copy.deepcopy(model)], written)
    pickle.dumps(copy.deepcopy(optimizer.optimizer.optimizer))
    return {
        "expected": expected,
        "found": go_on(),
        "files": sorted(os.listdir(folder)),
        "names": [*accelerator.get_state_dict(model)],
        "is_ours": b"torchring" in written.getvalue(),
    }


def _several(ring: type[Any]) -> dict[str, Any]:
    """Two models with an optimizer of their own, and one with a loose parameter, over both models' heads."""
    from accelerate import Accelerator

    found: dict[str, Any] = {}
    for name, kind in (("ring", ring), ("ddp", Accelerator)):
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
        found[name] = _weights(first, second)
        if kind is ring:
            found["reductions"] = [each.optimizer.stats().num_reductions for each in (one, two)]
            found["scheduled"] = [each.optimizers == [own] for each, own in zip(schedules, (one, two), strict=True)]
    accelerator = _accelerator(ring)
    first, second, loose = _model(), _model(1), nn.Parameter(torch.tensor(float(torchring.rank())))
    parameters = [*first.parameters(), *second.parameters(), loose]
    first, second, optimizer = accelerator.prepare(first, second, torch.optim.SGD(parameters, 0.1))
    for x, y in _loader(4):
        accelerator.backward(mse_loss(loose * (first(x + torchring.rank()) + second(x)), y))
    optimizer.step()
    buffers = [buffer.flatten().double() for model in (first, second) for buffer in model.buffers()]
    found["shared"] = [*_weights(first, second), loose.item(), *torch.cat(buffers).tolist()]
    again = accelerator.prepare(torch.optim.SGD(first.parameters(), 0.1))  # for another training, with the old one alive
    accelerator.backward(first(torch.randn(4, 8)).sum())
    again.step()
    found["again"] = [_weights(first), attempt(optimizer.step)]
    return found


def _uneven(ring: type[Any]) -> dict[str, Any]:
    accelerator = _accelerator(ring)
    model, optimizer, loader = accelerator.prepare(_model(), *(_sgd(m) for m in ()), _loader(20)) if False else (0, 0, 0)
    raw = nn.Linear(8, 1)
    model, optimizer, loader = accelerator.prepare(raw, torch.optim.SGD(raw.parameters(), 0.1), _loader(20))
    num_batches = 0
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for x, y in loader:
            accelerator.backward(mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            num_batches += 1
    metrics = [accelerator.gather_for_metrics(y).flatten() for _, y in loader]
    data = torch.cat([y.flatten() for _, y in _loader(20)])
    return {
        "batches": num_batches,
        "even": len([*loader]),
        "weights": _weights(model),
        "gathered": torch.equal(torch.cat(metrics), data),
    }


def _mistakes(ring: type[Any]) -> dict[str, str]:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
    from torch.nn.parallel import DistributedDataParallel

    def alone() -> None:
        accelerator = _accelerator(ring)
        model = accelerator.prepare(_model())
        accelerator.backward(model(torch.randn(4, 8)).sum())

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

    def seen_before() -> None:
        _accelerator(Accelerator, cpu=False)  # takes this process for the only one
        ring()

    def launched_with_fsdp() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ACCELERATE_USE_FSDP", "true")
            ring()

    hook = DistributedDataParallelKwargs(comm_hook="fp16")
    found = {
        "ddp": attempt(lambda: _accelerator(ring).prepare(DistributedDataParallel(_model()))),
        "fsdp": attempt(lambda: ring(fsdp_plugin=FullyShardedDataParallelPlugin())),
        "hook": attempt(lambda: _accelerator(ring, kwargs_handlers=[hook])),
    }
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    tries = {"alone": alone, "late": late, "both": both, "foreign": foreign}
    tries |= {"seen_before": seen_before, "launched_with_fsdp": launched_with_fsdp}
    return found | {name: attempt(action) for name, action in tries.items()}


def _page(rank: int) -> dict[str, Any]:
    from accelerate.state import AcceleratorState

    code = snippet(PAGE, "# Accelerate").replace("", "")
    code = next(block for block in [PAGE.read_text().split("```python\n")[1].split("```")[0]])
    found = {}
    for name, text in (("ring", code), ("ddp", code.replace("from torchring.accelerate import RingAccelerator as", "from accelerate import"))):
        assert name == "ring" or text != code
        AcceleratorState._reset_state(reset_partial_state=True)
        namespace: dict[str, Any] = {}
        exec(compile(text, PAGE.name, "exec"), namespace)
        found[name] = _weights(namespace["model"])
    return found


def _all(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    os.chdir(folder)
    from torchring.accelerate import RingAccelerator

    found = {case.__name__: case(RingAccelerator) for case in (_parity, _several, _uneven)}
    accelerator = RingAccelerator.__new__(RingAccelerator)
    del accelerator
    return {
        **found,
        "whole": _checkpoint(RingAccelerator, {}, "whole"),
        "shared": _checkpoint(RingAccelerator, {"shard": True}, "shared"),
        "_page": _page(rank),
        "_mistakes": _mistakes(RingAccelerator),
    }
