"""Lightning: `Trainer(strategy="torchring")`, where a script has "ddp" today.

    import torchring.lightning

    trainer = lightning.Trainer(strategy="torchring")               # or RingStrategy(compression="bf16"), with options

Lightning looks names of strategies up in a registry of its own, and loads no entry points for it. So this module has to
be imported once, which registers the name. The strategy does what Lightning's DDPStrategy does for ranks, samplers,
logging and checkpoints, but wraps the optimizers instead of the model. A script with Fabric wraps its optimizer itself.

A script that has imported `pytorch_lightning`, and not `lightning.pytorch`, gets the strategy of that package.
"""

import contextlib
import importlib.util
import inspect
import operator
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

import torchring
from torchring.default_world import default_world
from torchring.errors import TopologyError
from torchring.initial_state import is_sharded
from torchring.norms import SyncBatchNorm
from torchring.optimizer import forward_watch_of, sync_of
from torchring.rendezvous.environment import ELASTIC
from torchring.requirements import check_release
from torchring.rooms import room

_is_old_name: Final = importlib.util.find_spec("lightning") is None or (
    "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
)
check_release("pytorch-lightning" if _is_old_name else "lightning", (2, 6), (2, 7), "lightning")

if TYPE_CHECKING or not _is_old_name:
    import lightning.pytorch as pl
    from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment
    from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
    from lightning.pytorch.strategies import DDPStrategy
else:
    import pytorch_lightning as pl
    from lightning_fabric.plugins.environments import ClusterEnvironment, LightningEnvironment
    from pytorch_lightning.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
    from pytorch_lightning.strategies import DDPStrategy

__all__ = ["RingStrategy"]

_OPTIONS: Final = {
    name for name, each in inspect.signature(torchring.wrap).parameters.items() if each.kind is each.KEYWORD_ONLY
} - {"accumulate", "group"}
_OF_LIGHTNING: Final = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}
_INSTEAD: Final = {
    **dict.fromkeys(
        ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "process_group_backend", "start_method"),
        "leave it out, as torchring does without it",
    ),
    "accumulate": "use Trainer(accumulate_grad_batches=...)",
    "broadcast_buffers": "use sync_buffers: 'rank0' is what DDP does by default, None is False",
    "bucket_cap_mb": "use bucket_mb",
    "group": "Lightning shares batches, and logs, over all ranks",
    "ddp_comm_hook": "use compression='bf16', or compression=torchring.ddp_hook(state, hook)",
    "timeout": "call torchring.init(timeout_seconds=...) before the Trainer is made",
}
_ADVICE: Final = (
    ". Its own output says whether it failed. If it did not, and others still have batches: give every rank equally "
    "many, as the Trainer's own DistributedSampler does, and stop on all ranks in the same step: set "
    "trainer.should_stop by a value that is equal on all ranks, such as one of torchring.all_reduce"
)


class _ClosureFirst(torchring.DistributedOptimizer):
    """Evaluates a closure once, before the step, as Lightning's closures allow for any optimizer but LBFGS.

    So no rank has to wait for the mean of the losses, which only LBFGS decides by, and `shard` works.
    """

    def step(self, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        step = inspect.unwrap(torchring.DistributedOptimizer.step)  # hooks on steps run around this function
        if closure is None or isinstance(self.optimizer, torch.optim.LBFGS):
            return step(self, closure, *args, **kwargs)
        with torch.enable_grad():
            loss = closure()
        step(self, None, *args, **kwargs)
        return loss

    # Learning rate schedulers, which were made for the plain optimizer, look here whether it steps before they do.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    _opt_called = property(operator.attrgetter("_has_stepped"))


def _wrapped(optimizer: Any, model: torch.nn.Module, options: dict[str, Any]) -> torchring.DistributedOptimizer:
    """The distributed optimizer; the same one if the script has wrapped it."""
    if isinstance(optimizer, torchring.DistributedOptimizer):
        return optimizer
    # LearningRateMonitor names learning rates by the optimizer's class.
    bases = (_ClosureFirst, room("sharding").ShardedOptimizer) if options.get("shard") is True else (_ClosureFirst,)
    kind = type(type(optimizer).__name__, bases, {})
    return kind(optimizer, model, **options)  # type: ignore[no-any-return]


class _Environment(ClusterEnvironment):
    """Ranks as torchring knows them, also under launchers that Lightning does not know."""

    creates_processes_externally = True
    main_address, main_port = "", 0  # torchring.init makes the process group
    detect = staticmethod(torchring.is_initialized)
    world_size = staticmethod(torchring.size)
    global_rank = staticmethod(torchring.rank)
    local_rank = staticmethod(torchring.local_rank)
    node_rank = staticmethod(torchring.node_rank)

    def set_world_size(self, size: int) -> None: ...
    def set_global_rank(self, rank: int) -> None: ...


def _is_launched() -> bool:
    """Whether a launcher, or the script's process group, makes this process one of several ranks."""
    if "RANK" not in os.environ and not dist.is_initialized():
        # Lightning's own launcher sets WORLD_SIZE, LOCAL_RANK and MASTER_ADDR, and so do its users on several hosts.
        with contextlib.suppress(TopologyError):
            return torchring.size() > 1
        return False
    return torchring.size() > 1


class _SyncBatchNorm(LayerSync):
    """Trainer(sync_batchnorm=True): torchring's layers while the Trainer fits, and the model's own after that."""

    def __init__(self) -> None:
        self._layers: dict[str, torch.nn.Module] = {}

    def apply(self, model: torch.nn.Module) -> torch.nn.Module:
        before = dict(model.named_modules(remove_duplicate=False))
        torchring.convert_sync_batchnorm(model)
        after = dict(model.named_modules(remove_duplicate=False))
        self._layers = {name: layer for name, layer in before.items() if after[name] is not layer}
        return model

    def revert(self, model: torch.nn.Module) -> torch.nn.Module:
        for name, layer in self._layers.items():
            synced = model.get_submodule(name)
            if isinstance(synced, SyncBatchNorm):
                # Buffers may have moved to another device, and callbacks have changed the momentum.
                layer.__dict__.update({key: value for key, value in synced.__dict__.items() if key in layer.__dict__})
                model.set_submodule(name, layer)
        self._layers = {}
        return model


class _EqualBuffers(pl.Callback):
    """Makes buffers equal after forwards in training mode that no step follows, as in StochasticWeightAveraging.

    Before the model is evaluated, and at the end of an epoch, before ModelCheckpoint saves it.
    """

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        for ring in trainer.strategy._rings:
            sync_of(ring).sync_buffers()

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.on_validation_start(trainer)


class RingStrategy(DDPStrategy):
    """`Trainer(strategy="torchring")`: gradients are reduced by torchring instead of a DistributedDataParallel.

    Optimizers that `configure_optimizers` returns are wrapped, with the LightningModule as the model, unless the module
    has wrapped them by itself. They are closed when the fit ends, so another fit wraps anew.

    Args:
        **options: of `torchring.wrap`, but `group`, and `accumulate`, in whose place
            `Trainer(accumulate_grad_batches=...)` stands. Also `accelerator`, `parallel_devices`,
            `cluster_environment`, `checkpoint_io` and `precision_plugin`, as for any strategy of Lightning's. TypeError
            for others names the way out.
    """

    strategy_name = "torchring"
    optimizers: Any
    cluster_environment: Any
    parallel_devices: list[torch.device]
    num_nodes: int
    _layer_sync: Any
    _is_launched = False

    def __init__(self, **options: Any) -> None:
        for name in options.keys() - _OF_LIGHTNING:
            if name in _INSTEAD or name not in _OPTIONS:
                way_out = _INSTEAD.get(name, f"its options are those of torchring.wrap: {', '.join(sorted(_OPTIONS))}")
                raise TypeError(f"{type(self).__name__} does not take {name}={options[name]!r}: {way_out}")
        super().__init__(**{name: value for name, value in options.items() if name in _OF_LIGHTNING})
        self._options = {name: value for name, value in options.items() if name in _OPTIONS}
        self._rings: list[torchring.DistributedOptimizer] = []
        self._watched: Any = None

    def _configure_launcher(self) -> None:
        plugin = self.precision_plugin
        if isinstance(plugin, (pl.plugins.DeepSpeedPrecision, pl.plugins.FSDPPrecision, pl.plugins.XLAPrecision)):
            raise ValueError(
                f"{type(plugin).__name__} works with its own strategy only, not with torchring; in its place, pass "
                f"Trainer(precision={plugin.precision!r})"
            )
        if isinstance(self._layer_sync, TorchSyncBatchNorm):
            self._layer_sync = _SyncBatchNorm()
        self._find_ranks()
        self.set_world_ranks()
        super()._configure_launcher()

    def setup_distributed(self) -> None:
        if self._is_launched:
            torchring.init(process_group=True)  # Lightning uses the process group that is there
        super().setup_distributed()
        default_world().advice = _ADVICE
        self._check_ranks()

    def configure_ddp(self) -> None:
        """No DistributedDataParallel around the model."""

    def setup_optimizers(self, trainer: Any) -> None:
        self._close()
        super().setup_optimizers(trainer)
        plain, module = self.optimizers, self.lightning_module
        own = set(module.parameters())  # Lightning's stand-in for no optimizer has none of them
        parameters = (p for each in plain for group in each.param_groups for p in group["params"])
        if torchring.size() > 1 and own.isdisjoint(parameters):
            raise ValueError(
                f"{type(module).__name__}.configure_optimizers() has returned no optimizer, so no gradient would be "
                f"reduced, and each of {torchring.size()} ranks would train alone. Return the optimizers"
            )
        for each in plain:  # one by one: if the second cannot be wrapped, teardown() closes the first
            self._rings.append(_wrapped(each, module, self._options))
        for config in self.lr_scheduler_configs:
            config.scheduler.optimizer = self._rings[plain.index(config.scheduler.optimizer)]
        self.optimizers = self._rings
        if not any(isinstance(callback, _EqualBuffers) for callback in trainer.callbacks):
            trainer.callbacks.insert(0, _EqualBuffers())
        if module.automatic_optimization and isinstance(self._rings[0], _ClosureFirst):
            # training_step() mostly calls parts of the module, so hooks on the module would see nothing.
            self._watched = self._rings[0]
            forward_watch_of(self._watched).close()

    def training_step(self, *arguments: Any, **keywords: Any) -> Any:
        """Forward begins and ends here, for `torchring report`; the batch is what the data check looks at."""
        ring = self._watched
        if ring is None or not torch.is_grad_enabled():
            return super().training_step(*arguments, **keywords)
        batch = arguments[0]
        inputs = tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)
        forward_watch_of(ring).begin(inputs, keywords)
        loss = super().training_step(*arguments, **keywords)
        forward_watch_of(ring).end()
        return loss

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """For all micro-steps of accumulate_grad_batches but the last, and for toggle_model(sync_grad=False)."""
        with contextlib.ExitStack() as stack:
            for ring in self._rings:
                stack.enter_context(ring.no_sync())
            yield

    def on_train_end(self) -> None:
        """The script's own hooks may have run forwards, too."""
        for ring in self._rings:
            sync_of(ring).sync_buffers()

    def optimizer_state(self, optimizer: Any) -> Any:
        """After a fit with shard=True, rank 0 has the whole state, and the others refuse to give theirs."""
        if self._options.get("shard") and not self._rings and not self.is_global_zero:
            return {}
        return super().optimizer_state(optimizer)

    def teardown(self) -> None:
        self._close()
        super().teardown()

    def _close(self) -> None:
        """Give the plain optimizers back: a script may save a checkpoint after fit(), or fit the module again."""
        trainer = self.lightning_module._trainer if self.lightning_module is not None else None
        has_failed = trainer is None or trainer.state.status == "interrupted"
        for ring in self._rings:
            whole = ring.state_dict() if is_sharded(ring) and not has_failed else None
            ring.close()
            if whole is not None:  # of rank 0, which saves checkpoints
                ring.optimizer.load_state_dict(whole)
        for config in self.lr_scheduler_configs:
            if config.scheduler.optimizer in self._rings:
                config.scheduler.optimizer = config.scheduler.optimizer.optimizer
        if self._rings:
            self.optimizers = [ring.optimizer for ring in self._rings]
        self._rings, self._watched = [], None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Hosts may have different numbers of ranks."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Raises ValueError if a DistributedSampler would share the shares of torchring's Sampler out again."""
        shared = getattr(getattr(dataloader, "sampler", None), "dataset", None)
        if isinstance(getattr(shared, "_sampler", None), torchring.data.Sampler):
            raise ValueError(
                "Lightning would share the shares of a torchring.data.Sampler out again, and leave most samples out: "
                "pass use_distributed_sampler=False to the Trainer"
            )
        return super().process_dataloader(dataloader)

    def _find_ranks(self) -> None:
        """Take the launcher's ranks. Without a launcher, Lightning starts the script again for each of the others."""
        self._is_launched = _is_launched()
        if not self._is_launched:
            return
        world = torchring.init()
        if world.launcher == ELASTIC:
            raise TopologyError(
                f"Lightning's Trainer cannot go on with other ranks, so it does not train under `{ELASTIC}`; start "
                "the script with `torchring run`, and resume from a checkpoint"
            )
        if type(self.cluster_environment) is LightningEnvironment:
            self.cluster_environment = _Environment()
        kind, nodes = self.parallel_devices[0].type, self.num_nodes
        count = torch.cuda.device_count() if kind == "cuda" else 0
        devices: Any = [device.index for device in self.parallel_devices] if count else len(self.parallel_devices)
        num_devices = len(self.parallel_devices)
        # Where `devices` is left out, Lightning takes one CPU, or all GPUs of the host, of which a rank may see one.
        is_default = devices in (1, [0], list(range(count)))
        are_found = (is_default or num_devices == world.local_size) and nodes in (1, world.num_nodes)
        if not are_found and num_devices * nodes != world.size:
            raise ValueError(
                f"Trainer(devices={devices}, num_nodes={nodes}) asks for {num_devices * nodes} ranks, but "
                f"{world.launcher} has {world.size}, {world.local_size} of them on this host. Leave both arguments "
                f"out, or name {world.local_size} devices and pass num_nodes={world.num_nodes}"
            )
        ranks = range(max(world.local_size, self.local_rank + 1))
        numbers = ranks if is_default else [device.index for device in self.parallel_devices]
        # Lightning numbers GPUs by local rank. A rank may see its own only, and ranks may share one.
        self.parallel_devices = [torch.device(kind, i % count) if count else torch.device(kind) for i in numbers]
        self.num_nodes = world.num_nodes

    def _check_ranks(self) -> None:
        """Collective: torchring's ranks are Lightning's."""
        said = torchring.all_gather(torch.tensor([[self.global_rank, self.world_size]])).tolist()
        if said != [[rank, torchring.size()] for rank in range(torchring.size())]:
            names = ", ".join(f"{rank} of {size}" for rank, size in said)
            raise TopologyError(
                f"Lightning's {type(self.cluster_environment).__name__} says that the ranks 0 to {len(said) - 1} are "
                f"{names}; start the script with `torchring run` or torchrun, and leave out plugins that set ranks"
            )


pl.strategies.StrategyRegistry.register("torchring", RingStrategy, description="torchring, in place of DDP")
