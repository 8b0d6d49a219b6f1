"""Lightning: `Trainer(strategy="torchring")` and `Fabric(strategy="torchring")`, where a script has "ddp" today.

    import torchring.lightning

    trainer = lightning.Trainer(strategy="torchring")               # or RingStrategy(compression="bf16"), with options

Lightning looks names of strategies up in a registry of its own, and loads no entry points for it. So this module has to
be imported once, which registers the name. The strategies do what Lightning's DDPStrategy does for ranks, samplers,
logging and checkpoints, but wrap the optimizers instead of the model.

A script that has imported `pytorch_lightning`, and not `lightning.pytorch`, gets the strategies of that package.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import operator
import os
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

import torchring
from torchring.default_world import default_world
from torchring.errors import GradientError, TopologyError
from torchring.gradients.group import OptimizerGroup
from torchring.initial_state import is_sharded
from torchring.norms import SyncBatchNorm
from torchring.optimizer import forward_watch_of, sync_of
from torchring.releases import check_release
from torchring.rendezvous.environment import ELASTIC
from torchring.rooms import room

_is_old_name: Final = importlib.util.find_spec("lightning") is None or (
    "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
)
check_release("pytorch-lightning" if _is_old_name else "lightning", (2, 6), (2, 7), "lightning")

if TYPE_CHECKING or not _is_old_name:
    import lightning.fabric as lf
    import lightning.pytorch as pl
    from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment
    from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
    from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
    from lightning.pytorch.strategies import DDPStrategy
else:
    import lightning_fabric as lf
    import pytorch_lightning as pl
    from lightning_fabric.plugins.environments import ClusterEnvironment, LightningEnvironment
    from lightning_fabric.strategies import DDPStrategy as FabricDDPStrategy
    from pytorch_lightning.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
    from pytorch_lightning.strategies import DDPStrategy

__all__ = ["FabricRingStrategy", "RingStrategy"]

_OPTIONS: Final = {
    name for name, each in inspect.signature(torchring.wrap).parameters.items() if each.kind is each.KEYWORD_ONLY
} - {"accumulate"}
_OF_LIGHTNING: Final = {
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io"),
    *("precision_plugin", "precision"),  # for Trainer and for Fabric
}
_INSTEAD: Final = {
    **dict.fromkeys(
        ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "process_group_backend", "start_method"),
        "leave it out, as torchring does without it",
    ),
    "accumulate": "use Trainer(accumulate_grad_batches=...), or fabric.no_backward_sync",
    "broadcast_buffers": "use sync_buffers: 'rank0' is what DDP does by default, None is False",
    "bucket_cap_mb": "use bucket_mb",
    "ddp_comm_hook": "use compression='bf16' or 'fp16'",
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


class _LaunchedRanks:
    """What the strategies for Trainer and Fabric share: options of `wrap`, and a launcher's ranks."""

    cluster_environment: Any
    parallel_devices: list[torch.device]
    num_nodes: int
    local_rank: int
    global_rank: int
    world_size: int
    _is_launched = False

    def __init__(self, **options: Any) -> None:
        for name in options.keys() - _OF_LIGHTNING:
            if name in _INSTEAD or name not in _OPTIONS:
                way_out = _INSTEAD.get(name, f"its options are those of torchring.wrap: {', '.join(sorted(_OPTIONS))}")
                raise TypeError(f"{type(self).__name__} does not take {name}={options[name]!r}: {way_out}")
        super().__init__(**{name: value for name, value in options.items() if name in _OF_LIGHTNING})
        self._options = {name: value for name, value in options.items() if name in _OPTIONS}

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
                "pass use_distributed_sampler=False to the Trainer, or to setup_dataloaders()"
            )
        return super().process_dataloader(dataloader)  # type: ignore[misc]

    def _find_ranks(self, trainer: str) -> None:
        """Take the launcher's ranks. Without a launcher, Lightning starts the script again for each of the others."""
        self._is_launched = _is_launched()
        if not self._is_launched:
            return
        world = torchring.init()
        if world.launcher == ELASTIC:
            raise TopologyError(
                f"Lightning's {trainer} cannot go on with other ranks, so it does not train under `{ELASTIC}`; start "
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
                f"{trainer}(devices={devices}, num_nodes={nodes}) asks for {num_devices * nodes} ranks, but "
                f"{world.launcher} has {world.size}, {world.local_size} of them on this host. Leave both arguments "
                f"out, or name {world.local_size} devices and pass num_nodes={world.num_nodes}"
            )
        if is_default:
            ranks = range(max(world.local_size, self.local_rank + 1))
            self.parallel_devices = [
                torch.device(kind, rank % count) if count else torch.device(kind) for rank in ranks
            ]
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


class RingStrategy(_LaunchedRanks, DDPStrategy):
    """`Trainer(strategy="torchring")`: gradients are reduced by torchring instead of a DistributedDataParallel.

    Optimizers that `configure_optimizers` returns are wrapped, with the LightningModule as the model, unless the module
    has wrapped them by itself. They are closed when the fit ends, so another fit wraps anew.

    Args:
        **options: of `torchring.wrap`, but `accumulate`, in whose place `Trainer(accumulate_grad_batches=...)` stands.
            Also `accelerator`, `parallel_devices`, `cluster_environment`, `checkpoint_io` and `precision_plugin`, as
            for any strategy of Lightning's. TypeError for others names the way out.
    """

    strategy_name = "torchring"
    optimizers: Any
    _layer_sync: Any

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
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
        self._find_ranks("Trainer")
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
        if torchring.size() > 1 and not any(group["params"] for each in plain for group in _groups(each, module)):
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
        with _no_sync(self._rings):
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


def _groups(optimizer: Any, module: Any) -> list[dict[str, Any]]:
    """The parameter groups that hold parameters of the module: Lightning's stand-in for no optimizer has none."""
    own = set(module.parameters())
    return [{"params": [p for p in group["params"] if p in own]} for group in optimizer.param_groups]


class FabricRingStrategy(_LaunchedRanks, FabricDDPStrategy):
    """`Fabric(strategy="torchring")`: `fabric.setup(model, optimizer)` wraps the optimizer, and leaves the model bare.

    Args:
        **options: of `torchring.wrap`, but `accumulate`, in whose place `fabric.no_backward_sync` stands.

    Raises: as `RingStrategy`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # The optimizers with their models, to which they refer weakly; modules in the order of setup, as on all ranks.
        self._rings: weakref.WeakKeyDictionary[Any, torch.nn.Module] = weakref.WeakKeyDictionary()
        self._modules: weakref.WeakKeyDictionary[torch.nn.Module, None] = weakref.WeakKeyDictionary()
        self._is_reduced = False  # all that was set up
        self._backward_sync_control = self

    def _configure_launcher(self) -> None:
        self._find_ranks("Fabric")
        self._set_world_ranks()
        super()._configure_launcher()

    def _setup_distributed(self) -> None:
        if self._is_launched:
            torchring.init(process_group=True)
        super()._setup_distributed()
        self._check_ranks()

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        self._modules[module], self._is_reduced = None, False
        return module

    def setup_optimizer(self, optimizer: Any) -> torchring.DistributedOptimizer:
        stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        models = [each for each in self._modules if not stepped.isdisjoint(each.parameters())]
        if not models:
            raise ValueError(
                "no parameter of this optimizer belongs to a module that was set up; call fabric.setup(model, "
                "optimizer), or fabric.setup_module(model) before fabric.setup_optimizers(optimizer)"
            )
        model = models[0] if len(models) == 1 else torch.nn.ModuleList(models)
        ring = _wrapped(optimizer, model, self._options)
        self._rings[ring] = model
        return ring

    def backward(self, tensor: torch.Tensor, module: torch.nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """As of any strategy. Raises GradientError if nobody reduces the gradients of a module that was set up."""
        super().backward(tensor, module, *args, **kwargs)
        if self._is_reduced or torchring.size() == 1:
            return
        group = default_world().shared(OptimizerGroup)
        loose = [each for each in self._modules if not group.owners_of(each.parameters())]
        if any(p.grad is not None for each in loose for p in each.parameters()):
            raise GradientError(
                f"nobody reduces the gradients of the {type(loose[0]).__name__} that was set up, so each rank would "
                "train alone. Pass its optimizer to fabric.setup() or fabric.setup_optimizers(); if the model is not "
                "to be trained, call model.requires_grad_(False)"
            )
        self._is_reduced = not loose

    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """What fabric.no_backward_sync() enters."""
        return _no_sync(self._rings) if enabled else contextlib.nullcontext()


@contextlib.contextmanager
def _no_sync(rings: Iterable[torchring.DistributedOptimizer]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for ring in rings:
            stack.enter_context(ring.no_sync())
        yield


pl.strategies.StrategyRegistry.register("torchring", RingStrategy, description="torchring, in place of DDP")
lf.strategies.STRATEGY_REGISTRY.register("torchring", FabricRingStrategy, description="torchring, in place of DDP")
