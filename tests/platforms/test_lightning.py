"""torchring.lightning with the real Lightning: what a Trainer does with it, and with its own DDP, in the same job."""

import functools
import os
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
from tests.platforms.cases import Cases, assert_refused, close, flat, same, too_large_scale
from tests.support.commands import finish, start
from tests.support.documents import ROOT, snippet
from tests.support.harness import wait_until
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
            self.lr, self.plateau, self.num_reductions = 0.01, plateau, 0
            self.losses: list[float] = []
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
                schedule = ReduceLROnPlateau(optimizer, patience=0)
                return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "val"}
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
    return flat(module.state_dict().values())


def weights_of(checkpoint: dict[str, Any]) -> list[float]:
    return flat(checkpoint["state_dict"].values())


def fitted(make: Callable[[], Any], strategy: Any = "torchring", **options: Any) -> tuple[Any, Any, dict[str, float]]:
    module = make()
    own = trainer(strategy, "auto" if strategy == "torchring" else 2, **options)
    own.fit(module, loader(), loader(16))
    return own, module, {name: float(value) for name, value in own.callback_metrics.items()}


@case
def test_it_trains_as_with_ddp(rank: int) -> None:
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
    from lightning.pytorch.plugins import MixedPrecision

    kinds = modules()
    plateau = functools.partial(kinds.Regression, plateau=True)
    monitor = {"monitor": "val", "mode": "min"}

    def stopping() -> dict[str, Any]:
        stop = EarlyStopping(**monitor, patience=1, min_delta=0.05)
        return {"max_epochs": 6, "callbacks": [stop, ModelCheckpoint("plateau", **monitor)]}

    def averaging() -> dict[str, Any]:
        callbacks = [StochasticWeightAveraging(0.02, swa_epoch_start=1)]
        return {"max_epochs": 3, "callbacks": callbacks, "enable_checkpointing": False}

    def scaled() -> dict[str, Any]:
        """As precision="16-mixed" on a GPU."""
        return {"plugins": MixedPrecision("16-mixed", "cpu", scaler=too_large_scale()), "gradient_clip_val": 0.5}

    cases: list[tuple[Callable[[], Any], Callable[[], dict[str, Any]], int]] = [  # and the number of reductions
        (kinds.Regression, lambda: {"max_epochs": 100, "max_steps": 50}, 50),
        (kinds.Regression, lambda: {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}, 6),
        (kinds.Regression, lambda: {"precision": "bf16-mixed"}, 16),
        (kinds.Regression, scaled, 16),
        (kinds.Gan, dict, 32),
        (plateau, stopping, 0),
        (kinds.Regression, averaging, 24),
    ]
    for make, options, num_reductions in cases:
        strategy = "ddp_find_unused_parameters_true" if make is kinds.Gan else "ddp"  # torchring needs no such flag
        (ddp, its, expected), (ring, mine, metrics) = fitted(make, strategy, **options()), fitted(make, **options())
        assert weights(mine) == close(weights(its))
        assert mine.losses == close(its.losses)
        assert metrics == close(expected)
        assert ring.current_epoch == ddp.current_epoch
        assert num_reductions == mine.num_reductions if num_reductions else ring.current_epoch < 6
        same(weights(mine))
        first, second = torchring.all_gather_object(mine.losses)
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
    for name, make in (("plain", RingStrategy), ("sharded", functools.partial(RingStrategy, shard=CAN_SWAP))):
        module = kinds.Regression()
        saver = lightning.pytorch.callbacks.ModelCheckpoint(name, "{epoch}", save_top_k=-1)
        own = trainer(make(), callbacks=[saver])
        own.fit(module, loader())
        own.save_checkpoint(f"{name}.ckpt")  # after the fit has ended
        torchring.barrier()
        files = [f"{name}/epoch=0.ckpt", f"{name}/epoch=1.ckpt", f"{name}.ckpt"]
        first, last, after = (torch.load(file, weights_only=True) for file in files)
        resumed = kinds.Regression()
        trainer(make()).fit(resumed, loader(), ckpt_path=files[0])
        assert keys(first) == expected
        assert weights_of(last) == weights_of(after) == weights(resumed) == weights(module)
        plain = plain or last
        assert weights(module) == close(weights_of(plain))
        (expected_state,) = plain["optimizer_states"]
        for checkpoint in (last, after):
            (state,) = checkpoint["optimizer_states"]
            torch.testing.assert_close(state["state"], expected_state["state"], rtol=1e-5, atol=1e-8)
    module = kinds.Regression()
    trainer().fit(module, loader(), ckpt_path="alone.ckpt")
    assert same(weights(module)) != weights_of(plain)
    if rank == 0:
        module = kinds.Regression()
        trainer("auto", 1, max_epochs=3).fit(module, loader(), ckpt_path="plain/epoch=1.ckpt")
        assert len(module.losses) == 16  # the third epoch, on all of the data
    torchring.barrier()


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
    options = {"num_sanity_val_steps": 0, "use_distributed_sampler": False}
    module, alone = make(), make()
    mine = DataLoader(data(), batch_size=4, sampler=[i for i in range(64) if i // 4 % 2 == rank])
    trainer(sync_batchnorm=True, **options).fit(module, mine)
    trainer("auto", 1, **options).fit(alone, DataLoader(data(), batch_size=8))
    assert same(weights(module)) == pytest.approx(weights(alone), rel=1e-4, abs=1e-6)
    assert type(module.net[1]) is nn.BatchNorm1d
    averaged = make()  # whose last epoch has forwards without a step
    averaging = lightning.pytorch.callbacks.StochasticWeightAveraging(0.02, swa_epoch_start=1)
    trainer(callbacks=[averaging, lightning.pytorch.callbacks.ModelCheckpoint("averaged", "{epoch}")]).fit(
        averaged, loader()
    )
    torchring.barrier()
    assert same(weights(averaged)) == weights_of(torch.load("averaged/epoch=2.ckpt", weights_only=True))
    assert averaged.net[1].num_batches_tracked == 8  # the last epoch's alone


@case
def test_the_report_sees_forward_and_logs_have_the_names_of_ddp(rank: int) -> None:
    from lightning.pytorch.callbacks import LearningRateMonitor
    from lightning.pytorch.loggers import CSVLogger

    assert "trainer.should_stop" in default_world().advice  # to peers that a rank leaves behind
    recorder = recorder_of(default_world())
    before = recorder.num_samples_before
    module = modules().Regression()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = {"callbacks": [LearningRateMonitor()], "enable_checkpointing": False}
        trainer(logger=CSVLogger("logs"), log_every_n_steps=1, **options).fit(module, loader())
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
    assert_refused(
        (fit(Forgot), "ValueError: Forgot.configure_optimizers() has returned no optimizer"),
        (fit(Wraps, batches=shared), "ValueError: Lightning would share the shares of a torchring.data.Sampler out"),
        (fit(Wraps, "ddp", 2), "ValueError: net.0.weight belongs to a DistributedDataParallel"),
        (lambda: trainer(devices=4), f"{asks.format(4, 1, 4)}, but torch.distributed has 2, 2 of"),
        (lambda: trainer(num_nodes=3), asks.format(1, 3, 3)),
        (lambda: trainer(plugins=[FSDPPrecision("bf16-mixed")]),
         "ValueError: FSDPPrecision works with its own strategy only"),
        (lambda: RingStrategy(find_unused_parameters=True),
         "TypeError: RingStrategy does not take find_unused_parameters=True: leave it out"),
        (lambda: RingStrategy(group=[[0, 1]]), "Lightning shares batches, and logs, over all ranks"),
        (lambda: RingStrategy(compresion="bf16"),
         "TypeError: RingStrategy does not take compresion='bf16': its options are those of torchring.wrap"),
        (lambda: fit(kinds.Regression, RingStrategy(compression="fp8"))(),
         "ValueError: compression must be None, 'fp16', 'bf16', 'int8'"),
        (fit(kinds.Regression, plugins=[Other()]),
         "TopologyError: Lightning's Other says that the ranks 0 to 1 are 0 of 2, 0 of 2"),
    )  # fmt: skip


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
        done = finish(
            start([sys.executable, script], {**environ, "TMPDIR": str(script.parent)}, script.parent), seconds=90
        )
        assert done.returncode == 0, done.stderr
        for number in range(2):
            assert eval(Path(f"{script}.{number}").read_text()) == [close(expected[:8])]
        Path("done").touch()
    wait_until(Path("done").exists, "the script", 100)
