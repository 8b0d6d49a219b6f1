"""torchring.lightning with the real Lightning: what a Trainer does with it, and with its own DDP, in the same job."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torchring
from tests.platforms.cases import Cases, same
from tests.support.documents import ROOT, snippet
from tests.support.harness import patient, wait_until
from tests.support.training import attempt
from torchring.default_world import default_world
from torchring.gradients.views import CAN_SWAP
from torchring.observe.recorder.writer import recorder_of
from torchring.observer import Phase
from torchring.rendezvous.environment import ELASTIC

pytestmark = pytest.mark.platforms
case = Cases(__name__, deadline=240)

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
            self.is_forward_known: list[bool] = []
            middle = nn.BatchNorm1d(16) if norm else nn.Identity()
            self.net = nn.Sequential(nn.Linear(8, 16, bias=not norm), middle, nn.Tanh(), nn.Linear(16, 1))

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def on_after_backward(self) -> None:
            self.is_forward_known.append(int(Phase.FORWARD) in recorder_of(default_world())._stamps[::2])

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), self.lr)
            if self.plateau:
                return {
                    "optimizer": optimizer,
                    "lr_scheduler": ReduceLROnPlateau(optimizer, patience=0),
                    "monitor": "val",
                }
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

    import torchring.lightning  # noqa: F401 - registers the strategy

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


def close(value: Any) -> Any:
    return pytest.approx(value, rel=1e-6, abs=1e-7)


@case
def test_it_trains_as_with_ddp(rank: int) -> None:
    import lightning
    import lightning.pytorch.callbacks as callbacks

    kinds = modules()
    monitor = {"monitor": "val", "mode": "min"}

    def scaled() -> Any:
        """As precision="16-mixed" on a GPU. The first scale is too large, so first steps are left out."""
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-60)
        return lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)

    cases: list[tuple[Callable[[], Any], Callable[[], dict[str, Any]], int | None]] = [  # and the number of reductions
        (kinds.Regression, lambda: {"max_epochs": 100, "max_steps": 50}, 50),
        (kinds.Regression, lambda: {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}, 6),
        (kinds.Regression, lambda: {"precision": "bf16-mixed"}, 16),
        (kinds.Regression, lambda: {"plugins": scaled(), "gradient_clip_val": 0.5}, 16),
        (kinds.Gan, dict, 32),
        (
            functools.partial(kinds.Regression, plateau=True),
            lambda: {
                "max_epochs": 6,
                "callbacks": [
                    callbacks.EarlyStopping(**monitor, patience=1, min_delta=0.05),
                    callbacks.ModelCheckpoint("plateau", **monitor),
                ],
            },
            None,
        ),
        (
            kinds.Regression,
            lambda: {"max_epochs": 3, "callbacks": [callbacks.StochasticWeightAveraging(0.02, swa_epoch_start=1)],
                     "enable_checkpointing": False},
            24,
        ),
    ]  # fmt: skip
    for make, options, num_reductions in cases:
        strategy = "ddp_find_unused_parameters_true" if make is kinds.Gan else "ddp"  # torchring needs no such flag
        ddp, ring = fitted(make, strategy, **options()), fitted(make, **options())
        for name in ("weights", "losses", "metrics"):
            assert ring[name] == close(ddp[name]), name
        assert ring["epochs"] == ddp["epochs"]
        assert num_reductions == ring["count"] if num_reductions else ring["epochs"] < 6
        same(ring["weights"])
        first, second = torchring.all_gather_object(ring["losses"])
        assert first != second


@case
def test_checkpoints_are_those_of_one_device(rank: int) -> None:
    """Those of torchring, with shard=True too, and those of a Trainer in one process, into each other."""
    import lightning

    from torchring.lightning import RingStrategy

    kinds = modules()
    if rank == 0:
        alone = trainer("auto", 1, barebones=False, max_epochs=1)
        alone.fit(kinds.Regression(), loader())
        alone.save_checkpoint("alone.ckpt")
    torchring.barrier()
    expected = keys(torch.load("alone.ckpt", weights_only=True))
    plain: Any = None
    for name, strategy in (("plain", "torchring"), ("sharded", RingStrategy(shard=CAN_SWAP))):
        module = kinds.Regression()
        saver = lightning.pytorch.callbacks.ModelCheckpoint(name, "{epoch}", save_top_k=-1)
        own = trainer(strategy, max_epochs=2, callbacks=[saver])
        own.fit(module, loader())
        own.save_checkpoint(f"{name}.ckpt")  # after the fit has ended
        torchring.barrier()
        first, last, after = (torch.load(file, weights_only=True) for file in
                              (f"{name}/epoch=0.ckpt", f"{name}/epoch=1.ckpt", f"{name}.ckpt"))  # fmt: skip
        resumed = kinds.Regression()
        trainer("torchring" if name == "plain" else RingStrategy(shard=CAN_SWAP), max_epochs=2).fit(
            resumed, loader(), ckpt_path=f"{name}/epoch=0.ckpt"
        )
        assert keys(first) == expected
        assert weights_of(last) == weights_of(after) == weights(resumed) == weights(module)
        plain = plain or last
        assert weights(module) == close(weights_of(plain))
        for checkpoint in (last, after):
            torch.testing.assert_close(
                checkpoint["optimizer_states"][0]["state"], plain["optimizer_states"][0]["state"], rtol=1e-5, atol=1e-8
            )
    module = kinds.Regression()
    trainer(max_epochs=2).fit(module, loader(), ckpt_path="alone.ckpt")
    assert same(weights(module)) != weights_of(plain)
    if rank == 0:
        module = kinds.Regression()
        trainer("auto", 1, max_epochs=3).fit(module, loader(), ckpt_path="plain/epoch=1.ckpt")
        assert len(module.losses) == 16  # the third epoch, on all of the data
    torchring.barrier()


def weights_of(checkpoint: dict[str, Any]) -> list[float]:
    return torch.cat([value.double().flatten() for value in checkpoint["state_dict"].values()]).tolist()


def keys(checkpoint: dict[str, Any]) -> list[Any]:
    (state,) = checkpoint["optimizer_states"]
    shapes = [{key: tuple(value.shape) for key, value in each.items()} for each in state["state"].values()]
    groups = [sorted(group) for group in state["param_groups"]]
    return [sorted(checkpoint), sorted(checkpoint["loops"]), list(checkpoint["state_dict"]), shapes, groups]


@case
def test_a_module_is_fitted_again(rank: int) -> None:
    """By one Trainer and by another, and a search for the learning rate comes before one."""
    from lightning.pytorch.tuner import Tuner

    found = []
    for strategy, devices in (("ddp", 2), ("torchring", "auto")):
        module = modules().Regression()
        own = trainer(strategy, devices, max_epochs=1)
        own.fit(module, loader())
        own.fit_loop.max_epochs = 2
        own.fit(module, loader())
        trainer(strategy, devices, max_epochs=1).fit(module, loader())
        third = trainer(strategy, devices, max_epochs=1)
        Tuner(third).lr_find(module, loader(256), num_training=20)
        third.fit(module, loader())
        third.validate(module, loader(16), verbose=False)
        found.append([module.lr, len(module.losses), *weights(module)])
    assert found[1] == close(found[0])
    assert same(found[1])[0] != 0.01
    assert not [hook for p in module.parameters() for hook in (p._post_accumulate_grad_hooks or ())]
    assert [type(each) for each in own.optimizers] == [torch.optim.AdamW]


@case
def test_batchnorm(rank: int) -> None:
    """With sync_batchnorm, ranks train as one process that has all batches. Without it, statistics are averaged."""
    import lightning

    make = functools.partial(modules().Regression, norm=True)
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, "use_distributed_sampler": False}
    module, alone = make(), make()
    mine = DataLoader(data(), batch_size=4, sampler=[i for i in range(64) if i // 4 % 2 == rank])
    trainer(sync_batchnorm=True, **options).fit(module, mine)
    trainer("auto", 1, **options).fit(alone, DataLoader(data(), batch_size=8))
    assert same(weights(module)) == pytest.approx(weights(alone), rel=1e-4, abs=1e-6)
    assert type(module.net[1]) is nn.BatchNorm1d
    averaged = make()  # whose last epoch has forwards without a step
    callbacks = [lightning.pytorch.callbacks.StochasticWeightAveraging(0.02, swa_epoch_start=1),
                 lightning.pytorch.callbacks.ModelCheckpoint("averaged", "{epoch}")]  # fmt: skip
    trainer(callbacks=callbacks).fit(averaged, loader())
    torchring.barrier()
    assert same(weights(averaged)) == weights_of(torch.load("averaged/epoch=2.ckpt", weights_only=True))
    assert averaged.net[1].num_batches_tracked == 8  # the last epoch's alone


@case
def test_the_report_sees_forward_and_logs_have_the_names_of_ddp(rank: int) -> None:
    from lightning.pytorch.callbacks import LearningRateMonitor
    from lightning.pytorch.loggers import CSVLogger

    recorder = recorder_of(default_world())
    before = recorder.num_samples_before
    module = modules().Regression()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(
            logger=CSVLogger("logs"), log_every_n_steps=1, callbacks=[LearningRateMonitor()], enable_checkpointing=False
        ).fit(module, loader())
    torchring.barrier()
    assert Path("logs/lightning_logs/version_0/metrics.csv").read_text().splitlines()[0] == "lr-AdamW,step"
    assert recorder.num_samples_before - before == 64
    assert module.is_forward_known == [True] * 16
    assert not [str(each.message) for each in caught if "lr_scheduler" in str(each.message)]


@case
def test_mistakes(rank: int) -> None:
    """And wrapped optimizers are left alone."""
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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default_world(), "launcher", ELASTIC)
        assert attempt(trainer).startswith("TopologyError: Lightning's Trainer cannot go on with other ranks")
    module = Wraps()
    trainer(max_epochs=1).fit(module, loader())
    same(weights(module))

    def fit(make: Callable[[], Any], *arguments: Any, batches: Any = None, **options: Any) -> Callable[[], Any]:
        return lambda: trainer(*arguments, **options).fit(make(), batches or loader())

    shared = DataLoader(data(), 4, sampler=torchring.data.Sampler(data()))
    asks = "ValueError: Trainer(devices={}, num_nodes={}) asks for {} ranks"
    for text, act in (
        ("ValueError: Forgot.configure_optimizers() has returned no optimizer", fit(Forgot)),
        ("ValueError: Lightning would share the shares of a torchring.data.Sampler out again",
         fit(Wraps, batches=shared)),
        ("ValueError: net.0.weight belongs to a DistributedDataParallel", fit(Ddp)),
        ("ValueError: net.0.weight belongs to a DistributedDataParallel", fit(Wraps, "ddp", 2)),
        (f"{asks.format(4, 1, 4)}, but torch.distributed has 2, 2 of", lambda: trainer(devices=4)),
        (asks.format(1, 3, 3), lambda: trainer(num_nodes=3)),
        ("ValueError: FSDPPrecision works with its own strategy only",
         lambda: trainer(plugins=[FSDPPrecision("bf16-mixed")])),
        ("TypeError: RingStrategy does not take find_unused_parameters=True: leave it out",
         lambda: RingStrategy(find_unused_parameters=True)),
        ("TypeError: RingStrategy does not take compresion='bf16': its options are those of torchring.wrap",
         lambda: RingStrategy(compresion="bf16")),
        ("ValueError: compression must be one of None, 'fp16', 'bf16', got 'fp8'",
         lambda: fit(kinds.Regression, RingStrategy(compression="fp8"))()),
        ("TopologyError: Lightning's Other says that the ranks 0 to 1 are 0 of 2, 0 of 2",
         fit(kinds.Regression, plugins=[Other()])),
    ):  # fmt: skip
        said = attempt(act)
        assert said.startswith(text), said


@case
def test_ranks_take_the_gpus_of_the_trainer(rank: int) -> None:
    """The device of this rank, by the GPUs that it sees, and those that a Trainer has been given."""
    from lightning.fabric.plugins.environments import LightningEnvironment

    from torchring.lightning import RingStrategy

    def device(indices: list[int]) -> None:
        given = [torch.device("cuda", index) for index in indices]
        strategy = RingStrategy(parallel_devices=given, cluster_environment=LightningEnvironment())
        strategy._find_ranks()
        raise ValueError(strategy.root_device)

    for count, indices, said in (
        (8, [*range(8)], f"cuda:{rank}"),
        (8, [0], f"cuda:{rank}"),
        (8, [2, 3], f"cuda:{2 + rank}"),
        (8, [3], "Trainer(devices=[3], num_nodes=1) asks for 1 ranks, but "),
        (8, [4, 5, 6], "Trainer(devices=[4, 5, 6], num_nodes=1) asks for 3 ranks, but "),
        (1, [0], "cuda:0"),
        (1, [0, 1], "cuda:0"),  # Trainer(devices=2) on a rank that sees one GPU
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "device_count", lambda count=count: count)
            assert attempt(functools.partial(device, indices)).startswith(f"ValueError: {said}")


@case
def test_peers_that_a_rank_leaves_behind_get_advice_for_a_trainer(rank: int) -> None:
    advice = default_world().advice
    assert "trainer.should_stop" in advice
    assert "torchring.join" not in advice


@case
def test_the_script_of_the_page(rank: int) -> None:
    """Whose Trainer is told no number of ranks: under a launcher, and started as `python train.py`, when Lightning
    starts the second rank."""
    code = snippet(PAGE, "# Lightning")
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(compile(code, "lightning.md", "exec"), names)
    assert (names["trainer"].global_rank, names["trainer"].world_size) == (rank, 2)
    expected = same(weights(names["model"]))
    if rank == 0:
        assert code.count("max_epochs=2") == 1
        code = "import torch; torch.manual_seed(0)\n" + code.replace("max_epochs=2", "max_epochs=2, devices=2")
        code += "open(f'{__file__}.{torchring.rank()}', 'w').write(str(model.net.weight.tolist()))\n"
        Path("alone").mkdir()  # for Lightning's logs, checkpoints, and what it leaves when it looks for MPI
        script = Path("alone/train.py").resolve()
        script.write_text(code)
        unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "GROUP_", "TORCHELASTIC")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
        done = subprocess.run([sys.executable, script], env={**environ, "TMPDIR": str(script.parent)},
                              cwd=script.parent, capture_output=True, text=True, timeout=patient(90))  # fmt: skip
        assert done.returncode == 0, done.stderr
        for number in range(2):
            assert eval(Path(f"{script}.{number}").read_text()) == [close(expected[:8])]
        Path("done").touch()
    wait_until(Path("done").exists, "the script", 100)
