"""torchring.lightning with the real Lightning: what a Trainer does with it, and with its own DDP, in the same job."""

from __future__ import annotations

import functools
import os
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torchring
from tests.support.checks import assert_same_on_all_ranks
from tests.support.documents import ROOT, snippet
from tests.support.harness import run_ranks, run_script
from tests.support.training import attempt

pytestmark = pytest.mark.platforms

PAGE = ROOT / "docs" / "platforms" / "lightning.md"


@functools.cache
def modules() -> types.SimpleNamespace:
    """The LightningModules of these tests. Lightning is imported only where they are needed."""
    import lightning
    from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

    class Regression(lightning.LightningModule):
        """With buffers, a schedule, and a metric that is reduced."""

        def __init__(self, norm: bool = False, plateau: bool = False) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.lr = 0.01
            self.plateau = plateau
            self.losses: list[float] = []
            self.num_reductions = 0
            middle = nn.BatchNorm1d(16) if norm else nn.Identity()
            self.net = nn.Sequential(nn.Linear(8, 16), middle, nn.Tanh(), nn.Linear(16, 1))

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), self.lr)
            if self.plateau:
                return {"optimizer": optimizer, "lr_scheduler": ReduceLROnPlateau(optimizer, patience=0), "monitor": "val"}
            return [optimizer], [{"scheduler": StepLR(optimizer, 3, 0.7), "interval": "step"}]

        def on_train_end(self) -> None:
            for optimizer in self.trainer.optimizers:
                if isinstance(optimizer, torchring.DistributedOptimizer):
                    self.num_reductions += optimizer.stats().num_reductions

    class Gan(Regression):
        """Manual optimization, two optimizers in turn."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.critic = nn.Linear(1, 1)

        def training_step(self, batch: Any, _: int) -> None:
            one, two = self.optimizers()
            for optimizer, sign in ((one, 1.0), (two, -1.0)):
                self.toggle_optimizer(optimizer)
                loss = sign * (self.critic(self.net(batch[0])) - batch[1]).square().mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, 0.5, "norm")
                optimizer.step()
                self.untoggle_optimizer(optimizer)
            self.losses.append(loss.item())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), 0.05, 0.9), torch.optim.Adam(self.critic.parameters())

    return types.SimpleNamespace(Regression=Regression, Gan=Gan)


def data(size: int = 64) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(size, 8, generator=draw), torch.randn(size, 1, generator=draw))


def loader(size: int = 64) -> DataLoader[Any]:
    return DataLoader(data(size), batch_size=4)


def trainer(strategy: Any = "torchring", devices: Any = "auto", **options: Any) -> Any:
    import lightning

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    checkpoints = {} if "callbacks" in options else {"enable_checkpointing": False}
    options = {"max_epochs": 2, **quiet, **checkpoints, **options}
    return lightning.Trainer(accelerator="cpu", strategy=strategy, devices=devices, **options)


def weights(module: nn.Module) -> list[float]:
    return torch.cat([value.detach().double().flatten() for value in module.state_dict().values()]).tolist()


def fitted(make: Callable[[], Any], strategy: Any = "torchring", **options: Any) -> dict[str, Any]:
    module = make()
    own = trainer(strategy, "auto" if strategy == "torchring" else 2, **options)
    own.fit(module, loader(), loader(16) if "val" not in options else None)
    return {
        "weights": weights(module),
        "losses": module.losses,
        "count": module.num_reductions,
        "metrics": {name: float(value) for name, value in own.callback_metrics.items()},
        "epochs": own.current_epoch,
    }


# What is trained with "ddp" and with "torchring": options of the Trainer, and how many reductions there should be.


def _both(rank: int) -> dict[str, Any]:
    import lightning.pytorch.callbacks as callbacks

    kinds = modules()
    monitor = {"monitor": "val", "mode": "min"}
    cases: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Any]]]] = {
        "50 steps": (kinds.Regression, lambda: {"max_epochs": 100, "max_steps": 50}),
        "accumulated": (kinds.Regression, lambda: {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}),
        "bf16": (kinds.Regression, lambda: {"precision": "bf16-mixed"}),
        "two optimizers": (kinds.Gan, dict),
        "plateau, stops": (
            functools.partial(kinds.Regression, plateau=True),
            lambda: {
                "max_epochs": 6,
                "callbacks": [
                    callbacks.EarlyStopping(**monitor, patience=1, min_delta=0.05),
                    callbacks.ModelCheckpoint("plateau", **monitor),
                ],
            },
        ),
        "averaged": (
            kinds.Regression,
            lambda: {"max_epochs": 3, "callbacks": [callbacks.StochasticWeightAveraging(0.02, swa_epoch_start=1)],
                     "enable_checkpointing": False},
        ),
    }  # fmt: skip
    found = {}
    for name, (make, options) in cases.items():
        ddp = "ddp_find_unused_parameters_true" if make is kinds.Gan else "ddp"  # torchring needs no such flag
        found[name] = {"ddp": fitted(make, ddp, **options()), "torchring": fitted(make, **options())}
    return found


def _checkpoints(rank: int) -> dict[str, Any]:
    """Those of torchring, with shard=True too, and those of a Trainer in one process, into each other."""
    import lightning
    from torchring.lightning import RingStrategy

    kinds = modules()
    found: dict[str, Any] = {}
    alone = trainer("auto", 1, barebones=False, max_epochs=1)
    if rank == 0:
        alone.fit(kinds.Regression(), loader())
        alone.save_checkpoint("alone.ckpt")
    torchring.barrier()
    for name, strategy in (("plain", "torchring"), ("sharded", RingStrategy(shard=True))):
        module = kinds.Regression()
        saver = lightning.pytorch.callbacks.ModelCheckpoint(name, "{epoch}", save_top_k=-1)
        own = trainer(strategy, max_epochs=2, callbacks=[saver])
        own.fit(module, loader())
        own.save_checkpoint(f"{name}.ckpt")  # after the fit has ended
        torchring.barrier()
        first, last, after = (torch.load(file, weights_only=True) for file in
                              (f"{name}/epoch=0.ckpt", f"{name}/epoch=1.ckpt", f"{name}.ckpt"))  # fmt: skip
        resumed = kinds.Regression()
        trainer("torchring" if name == "plain" else RingStrategy(shard=True), max_epochs=2).fit(
            resumed, loader(), ckpt_path=f"{name}/epoch=0.ckpt"
        )
        found[name] = {
            "weights": weights(module),
            "resumed": weights(resumed),
            "saved": [weights_of(last), weights_of(after)],
            "states": [each["optimizer_states"][0]["state"] for each in (last, after)],
            "keys": keys(first),
        }
    found["keys alone"] = keys(torch.load("alone.ckpt", weights_only=True))
    module = kinds.Regression()
    trainer(max_epochs=2).fit(module, loader(), ckpt_path="alone.ckpt")
    found["went on from one"] = weights(module)
    if rank == 0:
        module = kinds.Regression()
        trainer("auto", 1, max_epochs=3).fit(module, loader(), ckpt_path="plain/epoch=1.ckpt")
        found["went on alone"] = len(module.losses)
    torchring.barrier()
    return found


def weights_of(checkpoint: dict[str, Any]) -> list[float]:
    return torch.cat([value.double().flatten() for value in checkpoint["state_dict"].values()]).tolist()


def keys(checkpoint: dict[str, Any]) -> list[Any]:
    (state,) = checkpoint["optimizer_states"]
    shapes = [{key: tuple(value.shape) for key, value in each.items()} for each in state["state"].values()]
    groups = [sorted(group) for group in state["param_groups"]]
    return [sorted(checkpoint), sorted(checkpoint["loops"]), list(checkpoint["state_dict"]), shapes, groups]


def _again(rank: int) -> dict[str, Any]:
    """Several fits of one module, by one Trainer and by another, and a search for the learning rate before one."""
    from lightning.pytorch.tuner import Tuner

    found = {}
    for strategy, devices in (("ddp", 2), ("torchring", "auto")):
        module = modules().Regression()
        own = trainer(strategy, devices, max_epochs=1)
        own.fit(module, loader())
        own.fit_loop.max_epochs = 2
        own.fit(module, loader())
        trainer(strategy, devices, max_epochs=1).fit(module, loader())
        third = trainer(strategy, devices, max_epochs=1)
        Tuner(third).lr_find(module, loader(), num_training=16, min_lr=1e-3, max_lr=0.3, early_stop_threshold=None)
        third.fit(module, loader())
        third.validate(module, loader(16), verbose=False)
        found[strategy] = {"weights": weights(module), "lr": module.lr, "count": len(module.losses)}
    assert not [hook for p in module.parameters() for hook in (p._post_accumulate_grad_hooks or ())]
    assert [type(each) for each in own.optimizers] == [torch.optim.AdamW]
    return found


def _batch_norm(rank: int) -> dict[str, Any]:
    """With sync_batchnorm, ranks train as one process that has all batches."""
    make = functools.partial(modules().Regression, norm=True)
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, "use_distributed_sampler": False}
    module, alone = make(), make()
    mine = DataLoader(data(), batch_size=4, sampler=[i for i in range(64) if i // 4 % 2 == rank])
    trainer(sync_batchnorm=True, **options).fit(module, mine)
    trainer("auto", 1, **options).fit(alone, DataLoader(data(), batch_size=8))
    return {"ring": weights(module), "alone": weights(alone), "layer": type(module.net[1])}


def _report(rank: int) -> dict[str, Any]:
    """What is recorded, what logs are called, and what nobody is warned of."""
    from lightning.pytorch.callbacks import LearningRateMonitor
    from lightning.pytorch.loggers import CSVLogger
    from torchring.default_world import default_world
    from torchring.observe.phases import FORWARD
    from torchring.observe.recorder.records import StepRecord
    from torchring.observe.services import recorder_of

    recorder = recorder_of(default_world())
    before = recorder.num_samples_before
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(
            logger=CSVLogger("logs"), log_every_n_steps=1, callbacks=[LearningRateMonitor()], enable_checkpointing=False
        ).fit(modules().Regression(), loader())
    torchring.barrier()
    with open("logs/lightning_logs/version_0/metrics.csv") as file:
        columns = file.readline().strip().split(",")
    trace, steps = recorder.trace(count=4)
    return {
        "samples": recorder.num_samples_before - before,
        "columns": columns,
        "warnings": [str(each.message) for each in caught if "lr_scheduler" in str(each.message)],
        "phases": FORWARD in steps[-1] and StepRecord is not None,
    }


def _mistakes(rank: int) -> dict[str, Any]:
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.pytorch.plugins import FSDPPrecision
    from torchring.lightning import RingStrategy

    kinds = modules()

    class Forgot(kinds.Regression):
        def configure_optimizers(self) -> None:
            return None

    class Wraps(kinds.Regression):
        def configure_optimizers(self) -> Any:
            optimizer = torchring.wrap(torch.optim.SGD(self.parameters(), 0.1), self)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    class Ddp(kinds.Regression):
        def configure_optimizers(self) -> Any:
            self.inner = nn.parallel.DistributedDataParallel(self.net)
            return super().configure_optimizers()

    class Other(LightningEnvironment):
        def global_rank(self) -> int:
            return 0

        def teardown(self) -> None: ...  # would take WORLD_SIZE from the environment

    module = Wraps()
    trainer(max_epochs=1).fit(module, loader())
    return {
        "wrapped": weights(module),
        "nothing": attempt(lambda: trainer().fit(Forgot(), loader())),
        "ddp inside": attempt(lambda: trainer().fit(Ddp(), loader())),
        "ddp around": attempt(lambda: trainer("ddp", 2).fit(Wraps(), loader())),
        "devices": attempt(lambda: trainer(devices=4)),
        "nodes": attempt(lambda: trainer(num_nodes=3)),
        "precision": attempt(lambda: trainer(plugins=[FSDPPrecision("bf16-mixed")])),
        "unused": attempt(lambda: RingStrategy(find_unused_parameters=True)),
        "unknown": attempt(lambda: RingStrategy(compresion="bf16")),
        "value": attempt(lambda: trainer(RingStrategy(compression="fp8")).fit(kinds.Regression(), loader())),
        "plugin": attempt(lambda: trainer(plugins=[Other()]).fit(kinds.Regression(), loader())),
    }


def _fabric(rank: int) -> dict[str, Any]:
    import lightning

    found = {}
    for strategy, devices in (("ddp", 2), ("torchring", "auto")):
        fabric = lightning.Fabric(accelerator="cpu", devices=devices, strategy=strategy)
        fabric.launch()
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        optimizer = torch.optim.AdamW(model.parameters(), 0.05)
        model, optimizer = fabric.setup(model, optimizer)
        for i, (x, y) in enumerate(fabric.setup_dataloaders(loader())):
            with fabric.no_backward_sync(model, enabled=i % 2 == 0):
                fabric.backward(nn.functional.mse_loss(model(x), y))
            if i % 2:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
        fabric.save(f"{strategy}.ckpt", {"model": model, "optimizer": optimizer})
        saved = torch.load(f"{strategy}.ckpt", weights_only=True)
        found[strategy] = {"weights": weights(model), "keys": list(saved["model"])}
    stray = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    return found | {"count": optimizer.stats().num_reductions, "stray": attempt(lambda: fabric.setup_optimizers(stray))}


CASES = [_both, _checkpoints, _again, _batch_norm, _report, _mistakes, _fabric]


def _all(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    import lightning  # noqa: F401

    import torchring.lightning

    os.chdir(folder)
    import faulthandler; faulthandler.dump_traceback_later(100, exit=True)
    found = {case.__name__: (print("CASE", case.__name__, flush=True), case(rank))[1] for case in CASES}
    return found | {"group": dist.get_world_size()}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(_all, 2, str(tmp_path_factory.mktemp("lightning")), deadline=25)


def test_x(outcomes: list[dict[str, Any]]) -> None:
    import pprint

    for name in outcomes[0]:
        for rank in (0, 1):
            pprint.pprint((name, rank, outcomes[rank][name]), width=200, compact=True)
