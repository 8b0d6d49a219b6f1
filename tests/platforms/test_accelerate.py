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
from tests.support.commands import finish, free_port, start
from tests.support.documents import ROOT, blocks
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
        "scaled": [_scaled(kind) for kind in (ring, Accelerator)],
        "num_reductions": mine["optimizer"].optimizer.stats().num_reductions,
        "types": [type(mine["model"]).__name__, type(ddp["model"]).__name__],
    }


def _scaled(kind: type[Any]) -> dict[str, Any]:
    """With a loss scale, as fp16 has on GPUs. The first scale is too large, so the first steps are left out."""
    accelerator = _accelerator(kind)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-60)
    raw = _model()
    plain = torch.optim.SGD(raw.parameters(), 0.1)
    decay = torch.optim.lr_scheduler.ExponentialLR(plain, 0.9)
    model, optimizer, loader, scheduler = accelerator.prepare(raw, plain, _loader(32), decay)
    skipped = []
    for x, y in loader:
        accelerator.backward(100 * mse_loss(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
    return {"weights": _weights(raw), "skipped": skipped, "lr": scheduler.get_last_lr()}


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
    again = accelerator.prepare(
        torch.optim.SGD(first.parameters(), 0.1)
    )  # for another training, with the old one alive
    accelerator.backward(first(torch.randn(4, 8)).sum())
    again.step()
    found["again"] = [_weights(first), attempt(optimizer.step)]
    return found


def _uneven(ring: type[Any]) -> dict[str, Any]:
    accelerator = _accelerator(ring)
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


def _shown(ring: type[Any]) -> list[Any]:
    """As under srun, which sets none of the variables that Accelerate reads."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            patch.delenv(name, raising=False)
        before = dict(os.environ)
        accelerator = _accelerator(ring, cpu=False)
        return [accelerator.num_processes, accelerator.process_index, dict(os.environ) == before]


def _mistakes(ring: type[Any]) -> dict[str, str]:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
    from torch.nn.parallel import DistributedDataParallel

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

    def seen_before() -> None:
        _accelerator(Accelerator, cpu=False)  # takes this process for the only one
        ring()

    def launched_with_fsdp() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ACCELERATE_USE_FSDP", "true")
            ring()

    hook = DistributedDataParallelKwargs(comm_hook="fp16")
    shared = DataLoader(range(4), batch_sampler=torchring.data.Sampler(range(4), batch_size=1))  # type: ignore[arg-type]
    found = {
        "ddp": attempt(lambda: _accelerator(ring).prepare(DistributedDataParallel(_model()))),
        "shared_twice": attempt(lambda: _accelerator(ring).prepare(shared)),
        "fsdp": attempt(lambda: ring(fsdp_plugin=FullyShardedDataParallelPlugin())),
        "hook": attempt(lambda: _accelerator(ring, kwargs_handlers=[hook])),
    }
    os.environ.pop("ACCELERATE_USE_FSDP", None)

    def half() -> None:
        accelerator, model = _accelerator(ring), _model()
        weight, *others = model.parameters()
        stray = torch.optim.SGD(others, 0.1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD([weight], 0.1))
        accelerator.backward(model(torch.randn(4, 8)).sum())
        said = attempt(optimizer.step)
        assert stray.param_groups[0]["params"] == others
        _, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))  # closes the first
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(4, 8)).sum())
            optimizer.step()
        raise ValueError(said)

    tries = {"alone": alone, "late": late, "both": both, "foreign": foreign, "half": half}
    tries |= {"seen_before": seen_before, "launched_with_fsdp": launched_with_fsdp}
    return found | {name: attempt(action) for name, action in tries.items()}


def _page(rank: int) -> dict[str, Any]:
    from accelerate.state import AcceleratorState

    (block,) = blocks(PAGE, "python")
    plain = block.code.replace("from torchring.accelerate import RingAccelerator as", "from accelerate import")
    assert plain != block.code
    found = {}
    for name, text in (("ring", block.code), ("ddp", plain)):
        AcceleratorState._reset_state(reset_partial_state=True)
        namespace: dict[str, Any] = {}
        exec(compile(text, PAGE.name, "exec"), namespace)
        found[name] = _weights(namespace["model"])
    return found


def _all(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    os.chdir(folder)
    from torchring.accelerate import RingAccelerator

    return {
        **{case.__name__: case(RingAccelerator) for case in (_parity, _several, _uneven, _shown)},
        "whole": _checkpoint(RingAccelerator, {}, "whole"),
        "shared": _checkpoint(RingAccelerator, {"shard": True}, "shared"),
        "_page": _page(rank),
        "_mistakes": _mistakes(RingAccelerator),
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("accelerate"))
    return run_ranks(_all, 2, folder, deadline=180, env={"HF_HUB_OFFLINE": "1"})


def test_it_trains_as_with_ddp(outcomes: list[dict[str, Any]]) -> None:
    for rank in outcomes:
        found = rank["_parity"]
        losses, expected = found["losses"]
        assert len(losses) == 100  # micro-steps
        assert found["num_reductions"] == 52  # the last step of an epoch has a single micro-batch
        assert losses == pytest.approx(expected, abs=1e-6)
        for mine, ddp in (found["weights"], found["bf16"]):
            assert mine == pytest.approx(ddp, rel=1e-5, abs=1e-6)
        assert found["weights"][0] == outcomes[0]["_parity"]["weights"][0]
        scaled, expected = found["scaled"]
        assert scaled["weights"] == pytest.approx(expected["weights"], rel=1e-5, abs=1e-6)
        assert scaled["skipped"] == expected["skipped"]
        assert scaled["skipped"][0]
        assert not scaled["skipped"][-1]
        assert scaled["lr"] == expected["lr"]
        assert found["types"] == ["Sequential", "DistributedDataParallel"]


@pytest.mark.parametrize("case", ["whole", "shared"])
def test_a_checkpoint_has_all_of_the_state(outcomes: list[dict[str, Any]], case: str) -> None:
    for rank in outcomes:
        found = rank[case]
        assert found["found"] == found["expected"] == outcomes[0]["whole"]["expected"]
        assert {"model.safetensors", "optimizer.bin", "scheduler.bin"} <= {*found["files"]}
        assert found["names"][0] == "0.weight"
        assert not found["is_ours"]


def test_several_models_and_optimizers(outcomes: list[dict[str, Any]]) -> None:
    for rank in outcomes:
        found = rank["_several"]
        assert found["ring"] == pytest.approx(found["ddp"], rel=1e-5, abs=1e-6)
        assert found["reductions"] == [2, 2]
        assert found["scheduled"] == [True, True]
        assert found["shared"] == outcomes[0]["_several"]["shared"]
        assert found["again"][0] == outcomes[0]["_several"]["again"][0]
        assert found["again"][1].startswith("ValueError: this DistributedOptimizer is closed")


def test_ranks_with_uneven_data(outcomes: list[dict[str, Any]]) -> None:
    assert [rank["_uneven"]["batches"] for rank in outcomes] == [3, 2]
    assert [rank["_uneven"]["even"] for rank in outcomes] == [3, 3]
    assert outcomes[0]["_uneven"]["weights"] == outcomes[1]["_uneven"]["weights"]
    assert all(rank["_uneven"]["gathered"] for rank in outcomes)


def test_accelerate_sees_the_ranks_of_any_launcher(outcomes: list[dict[str, Any]]) -> None:
    assert [rank["_shown"] for rank in outcomes] == [[2, 0, True], [2, 1, True]]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("ddp", "ValueError: the model is a DistributedDataParallel"),
        ("shared_twice", "ValueError: Accelerate would share the shares of a torchring.data.Sampler out again"),
        ("fsdp", "ValueError: fsdp_plugin asks for an engine"),
        ("launched_with_fsdp", "ValueError: ACCELERATE_USE_FSDP=true asks for an engine"),
        ("hook", "wrap_options={'compression': 'bf16'}"),
        ("alone", "GradientError: nobody reduces the gradients of the Sequential"),
        ("half", "GradientError: 0.bias, 1.weight, 1.bias and 2 more get gradients that nobody reduces"),
        ("late", "ValueError: the optimizer of this Sequential was prepared before the model"),
        ("both", "belongs to a DistributedDataParallel"),
        ("both", "with Accelerate, use torchring.accelerate.RingAccelerator"),
        ("foreign", "ValueError: this optimizer was prepared by another Accelerator"),
        ("seen_before", "TopologyError: Accelerate sees 1 of 2 processes"),
    ],
)
def test_a_mistake_is_an_error(outcomes: list[dict[str, Any]], case: str, said: str) -> None:
    for rank in outcomes:
        assert said in rank["_mistakes"][case]


def test_the_page_is_run_as_pasted(outcomes: list[dict[str, Any]]) -> None:
    for rank in outcomes:
        assert rank["_page"]["ring"] == pytest.approx(rank["_page"]["ddp"], rel=1e-5, abs=1e-6)
        assert rank["_page"]["ring"] == outcomes[0]["_page"]["ring"]


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


@pytest.mark.parametrize("how", ["--multi_gpu", pytest.param("--cpu --mpirun_hostfile hosts", marks=pytest.mark.grid)])
def test_accelerate_launch_on_cpus(tmp_path: Path, how: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    program = Path(sys.executable).with_name("accelerate")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path), "HOME": str(tmp_path), **root}
    command = f"launch {how} --num_processes 2 --main_process_port {free_port()} train.py".split()
    done = finish(start([program, *command], env, tmp_path), seconds=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("size 2 gradient 0.5") == 2
