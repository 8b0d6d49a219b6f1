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
from tests.support.checks import assert_same_on_all_ranks
from tests.support.documents import ROOT, snippet
from tests.support.harness import patient, run_ranks
from tests.support.training import attempt
from torchring.default_world import default_world
from torchring.observe.recorder.writer import recorder_of
from torchring.observer import Phase
from torchring.rendezvous.environment import ELASTIC

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
        Tuner(third).lr_find(module, loader(256), num_training=20)
        third.fit(module, loader())
        third.validate(module, loader(16), verbose=False)
        found[strategy] = {"weights": weights(module), "lr": module.lr, "count": len(module.losses)}
    assert not [hook for p in module.parameters() for hook in (p._post_accumulate_grad_hooks or ())]
    assert [type(each) for each in own.optimizers] == [torch.optim.AdamW]
    return found


def _batch_norm(rank: int) -> dict[str, Any]:
    """With sync_batchnorm, ranks train as one process that has all batches. Without it, statistics are averaged."""
    import lightning

    make = functools.partial(modules().Regression, norm=True)
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, "use_distributed_sampler": False}
    module, alone = make(), make()
    mine = DataLoader(data(), batch_size=4, sampler=[i for i in range(64) if i // 4 % 2 == rank])
    trainer(sync_batchnorm=True, **options).fit(module, mine)
    trainer("auto", 1, **options).fit(alone, DataLoader(data(), batch_size=8))
    averaged = make()  # whose last epoch has forwards without a step
    callbacks = [lightning.pytorch.callbacks.StochasticWeightAveraging(0.02, swa_epoch_start=1),
                 lightning.pytorch.callbacks.ModelCheckpoint("averaged", "{epoch}")]  # fmt: skip
    trainer(callbacks=callbacks).fit(averaged, loader())
    torchring.barrier()
    saved = torch.load("averaged/epoch=2.ckpt", weights_only=True)
    return {
        "ring": weights(module),
        "alone": weights(alone),
        "layer": type(module.net[1]),
        "averaged": weights(averaged),
        "saved": weights_of(saved),
        "count": int(averaged.net[1].num_batches_tracked),
    }


def _report(rank: int) -> dict[str, Any]:
    """What is recorded, what logs are called, and what nobody is warned of."""
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
    with open("logs/lightning_logs/version_0/metrics.csv") as file:
        columns = file.readline().strip().split(",")
    return {
        "samples": recorder.num_samples_before - before,
        "columns": columns,
        "warnings": [str(each.message) for each in caught if "lr_scheduler" in str(each.message)],
        "forward": module.is_forward_known,
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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default_world(), "launcher", ELASTIC)
        elastic = attempt(trainer)
    module = Wraps()
    trainer(max_epochs=1).fit(module, loader())
    return {
        "wrapped": weights(module),
        "elastic": elastic,
        "nothing": attempt(lambda: trainer().fit(Forgot(), loader())),
        "shared twice": attempt(
            lambda: trainer().fit(Wraps(), DataLoader(data(), 4, sampler=torchring.data.Sampler(data())))
        ),
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


def _gpus(rank: int) -> dict[str, Any]:
    """The device of this rank on a host of 8 GPUs, by the GPUs that a Trainer has been given."""
    from lightning.fabric.plugins.environments import LightningEnvironment

    from torchring.lightning import RingStrategy

    def device(indices: list[int]) -> None:
        given = [torch.device("cuda", index) for index in indices]
        strategy = RingStrategy(parallel_devices=given, cluster_environment=LightningEnvironment())
        strategy._find_ranks()
        raise ValueError(strategy.root_device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 8)
        return {
            str(indices): attempt(functools.partial(device, indices))
            for indices in ([*range(8)], [0], [2, 3], [3], [4, 5, 6])
        }


def _page(rank: int) -> dict[str, Any]:
    """The page's script, whose Trainer is told no number of ranks."""
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(compile(snippet(PAGE, "# Lightning"), "lightning.md", "exec"), names)
    return {"weights": weights(names["model"]), "ranks": (names["trainer"].global_rank, names["trainer"].world_size)}


CASES = [_both, _checkpoints, _again, _batch_norm, _report, _mistakes, _gpus, _page]


def _all(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    import lightning  # noqa: F401

    import torchring.lightning

    os.chdir(folder)
    found: dict[str, Any] = {"launched": launched(torchring.lightning._is_launched)}
    found |= {case.__name__: case(rank) for case in CASES}
    return found | {"advice": default_world().advice}


def launched(is_launched: Callable[[], bool]) -> list[bool]:
    """Before there is a process group: under torchrun; then by variables of srun, of Lightning's launcher, and none."""
    found = [is_launched()]
    with pytest.MonkeyPatch.context() as patch:
        for name in [
            name for name in os.environ if name.startswith(("RANK", "WORLD_", "LOCAL_", "MASTER_", "TORCHEL"))
        ]:
            patch.delenv(name)
        for variables in (
            {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1", "SLURM_NODELIST": "a",
             "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"},
            {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "NODE_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            {"NODE_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            {},
        ):  # fmt: skip
            with pytest.MonkeyPatch.context() as more:
                for name, value in variables.items():
                    more.setenv(name, value)
                found.append(is_launched())
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(_all, 2, str(tmp_path_factory.mktemp("lightning")), deadline=150)


def close(value: Any) -> Any:
    return pytest.approx(value, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(
    ("case", "num_reductions"),
    [("50 steps", 50), ("accumulated", 6), ("bf16", 16), ("two optimizers", 32), ("plateau, stops", None),
     ("averaged", 24)],
)  # fmt: skip
def test_it_trains_as_with_ddp(outcomes: list[Any], case: str, num_reductions: int | None) -> None:
    for rank in outcomes:
        ddp, ring = (rank["_both"][case][strategy] for strategy in ("ddp", "torchring"))
        assert ring["weights"] == close(ddp["weights"])
        assert ring["losses"] == close(ddp["losses"])
        assert ring["metrics"] == close(ddp["metrics"])
        assert ring["epochs"] == ddp["epochs"]
        assert num_reductions in (None, ring["count"])
    assert_same_on_all_ranks([torch.tensor(rank["_both"][case]["torchring"]["weights"]) for rank in outcomes])
    assert outcomes[0]["_both"][case]["torchring"]["losses"] != outcomes[1]["_both"][case]["torchring"]["losses"]
    if case == "plateau, stops":
        assert outcomes[0]["_both"][case]["torchring"]["epochs"] < 6


@pytest.mark.parametrize("name", ["plain", "sharded"])
def test_checkpoints_are_those_of_one_device(outcomes: list[Any], name: str) -> None:
    for rank in outcomes:
        found = rank["_checkpoints"]
        saved = found[name]
        assert saved["keys"] == found["keys alone"]
        assert saved["saved"] == [saved["weights"]] * 2
        assert saved["resumed"] == saved["weights"]
        assert saved["weights"] == close(found["plain"]["weights"])
        for state in saved["states"]:  # at the end of the last epoch, and after the fit
            for own, plain in zip(state.values(), found["plain"]["states"][0].values(), strict=True):
                assert own.keys() == plain.keys()
                for key in own:
                    torch.testing.assert_close(own[key], plain[key], rtol=1e-5, atol=1e-8)


def test_training_goes_on_from_checkpoints_of_one_device_and_on_one_device(outcomes: list[Any]) -> None:
    first, second = (rank["_checkpoints"] for rank in outcomes)
    assert first["went on from one"] == second["went on from one"]
    assert first["went on from one"] != first["plain"]["weights"]
    assert first["went on alone"] == 16  # the third epoch, on all of the data


def test_a_module_is_fitted_again(outcomes: list[Any]) -> None:
    for rank in outcomes:
        ddp, ring = (rank["_again"][strategy] for strategy in ("ddp", "torchring"))
        assert ring["weights"] == close(ddp["weights"])
        assert ring["lr"] == close(ddp["lr"])
        assert ring["lr"] != 0.01
        assert ring["count"] == ddp["count"]
    assert outcomes[0]["_again"]["torchring"]["weights"] == outcomes[1]["_again"]["torchring"]["weights"]


def test_sync_batchnorm(outcomes: list[Any]) -> None:
    for rank in outcomes:
        found = rank["_batch_norm"]
        assert found["ring"] == pytest.approx(found["alone"], rel=1e-4, abs=1e-6)
        assert found["layer"] is nn.BatchNorm1d
    assert outcomes[0]["_batch_norm"]["ring"] == outcomes[1]["_batch_norm"]["ring"]


def test_batchnorm_after_forwards_without_a_step(outcomes: list[Any]) -> None:
    found, other = (rank["_batch_norm"] for rank in outcomes)
    assert found["averaged"] == found["saved"] == other["averaged"]
    assert found["count"] == 8  # the last epoch's alone


def test_the_report_sees_forward_and_logs_have_the_names_of_ddp(outcomes: list[Any]) -> None:
    for rank in outcomes:
        found = rank["_report"]
        assert found["samples"] == 64
        assert found["forward"] == [True] * 16
        assert found["columns"] == ["lr-AdamW", "step"]
        assert found["warnings"] == []


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ("nothing", "ValueError: Forgot.configure_optimizers() has returned no optimizer"),
        ("shared twice", "ValueError: Lightning would share the shares of a torchring.data.Sampler out again"),
        ("ddp inside", "ValueError: net.0.weight belongs to a DistributedDataParallel"),
        ("ddp around", "ValueError: net.0.weight belongs to a DistributedDataParallel"),
        ("devices", "ValueError: Trainer(devices=4, num_nodes=1) asks for 4 ranks, but torch.distributed has 2, 2 of"),
        ("nodes", "ValueError: Trainer(devices=1, num_nodes=3) asks for 3 ranks"),
        ("elastic", "TopologyError: Lightning's Trainer cannot go on with other ranks"),
        ("precision", "ValueError: FSDPPrecision works with its own strategy only"),
        ("unused", "TypeError: RingStrategy does not take find_unused_parameters=True: leave it out"),
        ("unknown", "TypeError: RingStrategy does not take compresion='bf16': its options are those of torchring.wrap"),
        ("value", "ValueError: compression must be one of None, 'fp16', 'bf16', got 'fp8'"),
        ("plugin", "TopologyError: Lightning's Other says that the ranks 0 to 1 are 0 of 2, 0 of 2"),
    ],
)
def test_mistakes(outcomes: list[Any], mistake: str, text: str) -> None:
    for rank in outcomes:
        assert rank["_mistakes"][mistake].startswith(text)


def test_ranks_take_the_gpus_of_the_trainer(outcomes: list[Any]) -> None:
    for rank, found in enumerate(each["_gpus"] for each in outcomes):
        every, first, two, *wrong = found.values()
        assert [every, first, two] == [
            f"ValueError: cuda:{rank}",
            f"ValueError: cuda:{rank}",
            f"ValueError: cuda:{2 + rank}",
        ]
        assert wrong[0].startswith("ValueError: Trainer(devices=[3], num_nodes=1) asks for 1 ranks, but ")
        assert wrong[1].startswith("ValueError: Trainer(devices=[4, 5, 6], num_nodes=1) asks for 3 ranks, but ")


def test_peers_that_a_rank_leaves_behind_get_advice_for_a_trainer(outcomes: list[Any]) -> None:
    for rank in outcomes:
        assert "trainer.should_stop" in rank["advice"]
        assert "torchring.join" not in rank["advice"]


def test_wrapped_optimizers_are_left_alone(outcomes: list[Any]) -> None:
    first, second = (rank["_mistakes"]["wrapped"] for rank in outcomes)
    assert first == second


def test_the_script_of_the_page(outcomes: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a launcher, and started as `python train.py`, when Lightning starts the second rank."""
    first, second = (rank["_page"] for rank in outcomes)
    assert first["weights"] == second["weights"]
    assert [first["ranks"], second["ranks"]] == [(0, 2), (1, 2)]
    code = snippet(PAGE, "# Lightning")
    assert code.count("max_epochs=2") == 1
    script = tmp_path / "train.py"
    more = "with open(f'{__file__}.{torchring.rank()}', 'w') as file:\n    file.write(str(model.net.weight.tolist()))\n"
    script.write_text(
        "import torch; torch.manual_seed(0)\n" + code.replace("max_epochs=2", "max_epochs=2, devices=2") + more
    )
    monkeypatch.chdir(tmp_path)  # for Lightning's logs and checkpoints
    # Lightning looks for MPI, which leaves a file in TMPDIR.
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True, timeout=patient(90))
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = Path(f"{script}.{rank}").read_text()
        assert eval(found) == [close(first["weights"][:8])]


def test_who_starts_the_ranks(outcomes: list[Any]) -> None:
    assert outcomes[0]["launched"] == [True, True, False, False, False]
