"""Accelerate: scripts that import `RingAccelerator` in place of `Accelerator`, and stay as they are.

    from torchring.accelerate import RingAccelerator as Accelerator

Accelerate has no plug-in for another kind of data parallelism: its DistributedType is an Enum, and prepare() builds the
DistributedDataParallel (DDP) itself. So this is a subclass. It overrides the public methods that a script calls:
prepare() adds no DDP, and wraps the optimizers. The model stays the script's own, and nothing is attached to it.
"""

import contextlib
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.optim import Optimizer

import torchring
from torchring.default_world import default_world
from torchring.errors import GradientError, TopologyError
from torchring.gradients.group import OptimizerGroup
from torchring.optimizer import DistributedOptimizer
from torchring.participants.module_wrappers import WAY_OUT, is_module_wrapper
from torchring.requirements import check_release
from torchring.world import World

check_release("accelerate", (1, 14), (1, 16), "accelerate")

from accelerate import Accelerator  # noqa: E402 - if it is the right one
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.utils import DDPCommunicationHookType, DistributedType  # noqa: E402

_KINDS: Final = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_SHOWN: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_PLUGINS: Final = (  # split up the model, or reduce its gradients
    *("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin"),
    "parallelism_config",
)
_ASKED_BY_LAUNCH: Final = tuple(
    f"ACCELERATE_USE_{name}" for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG")
)


class RingAccelerator(Accelerator):
    """An Accelerator whose `prepare` adds no DistributedDataParallel, and wraps the optimizers by `torchring.wrap`.

    Everything else is Accelerate's. Without a GPU it trains on the CPU, with all processes that were launched.

    Args:
        *args: as for accelerate.Accelerator.
        wrap_options: options of `torchring.wrap` for all optimizers, such as `{"compression": "bf16"}`.
        **kwargs: as for accelerate.Accelerator. Those for DDP have no effect (DistributedDataParallelKwargs).

    Raises:
        ValueError: an option cannot be combined with torchring, or Accelerate does not see all ranks.
        TopologyError: see `torchring.init`.
    """

    def __init__(self, *args: Any, wrap_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        refuse_engines(name for name in _PLUGINS if kwargs.get(name) is not None)
        with shown_ranks():
            if torchring.size() > 1 and not torch.accelerator.is_available():
                kwargs["cpu"] = True  # without it, Accelerate takes each process for the only one
            super().__init__(*args, **kwargs)
        self._begin(wrap_options)

    @classmethod
    def adopt(cls, accelerator: Accelerator, wrap_options: Mapping[str, Any] | None = None) -> "RingAccelerator":
        """Make an Accelerator that a library has built, and has prepared nothing with, a RingAccelerator."""
        accelerator.__class__ = cls
        adopted: RingAccelerator = accelerator
        adopted._begin(wrap_options)
        return adopted

    def _begin(self, wrap_options: Mapping[str, Any] | None) -> None:
        self.wrap_options = dict(wrap_options or {})
        if self.wrap_options.get("group") is not None:
            raise ValueError("Accelerate shares batches, and gathers, over all ranks: leave group out of wrap_options")
        self._unreduced: list[torch.nn.Module] | None = None  # what `_find_unreduced` has found
        if self.distributed_type not in _KINDS:
            raise ValueError(f"torchring reduces gradients on the CPU and on CUDA, not with {self.distributed_type}")
        if self.num_processes != torchring.size():
            raise TopologyError(
                f"Accelerate sees {self.num_processes} of {torchring.size()} processes, so each would train on all of "
                "the data. Make the RingAccelerator before an Accelerator, PartialState or TrainingArguments, or give "
                "those cpu=True or use_cpu=True, if there is no GPU"
            )
        if self.ddp_handler is not None and self.ddp_handler.comm_hook != DDPCommunicationHookType.NO:
            raise ValueError(
                f"comm_hook={self.ddp_handler.comm_hook} is for DistributedDataParallel, which RingAccelerator does "
                "not add; pass wrap_options={'compression': 'bf16'}, or torchring.ddp_hook(state, hook) in its place"
            )

    @property
    def _rings(self) -> list[DistributedOptimizer]:
        return [ring for each in self._optimizers if not (ring := each.optimizer).is_closed]

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, data loaders and schedulers. Returns them in the same order. Collective."""
        order = sorted(range(len(args)), key=lambda i: not isinstance(args[i], torch.nn.Module))
        if device_placement is not None and len(device_placement) == len(args):
            device_placement = [device_placement[i] for i in order]
        # Models first: an optimizer is wrapped with its model, and when the parameters are on their device.
        prepared = super().prepare(*(args[i] for i in order), device_placement=device_placement)
        return prepared if len(args) == 1 else tuple(prepared[order.index(i)] for i in range(len(args)))

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Put the model on its device, set up mixed precision and torch.compile. Adds no DistributedDataParallel."""
        if is_module_wrapper(model):
            raise ValueError(f"the model is a {type(model).__name__}, which reduces gradients itself. {WAY_OUT}")
        if model not in self._models and any(_shares(ring, model) for ring in self._rings):
            raise ValueError(
                f"the optimizer of this {type(model).__name__} was prepared before the model; pass both to one "
                "prepare(), or the model to an earlier one"
            )
        self._unreduced = None
        prepared: torch.nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        return prepared

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """As Accelerator.prepare_data_loader.

        Raises:
            ValueError: the ranks' shares of torchring's Sampler would be shared out again.
        """
        samplers = (getattr(data_loader, "sampler", None), getattr(data_loader, "batch_sampler", None))
        if self.num_processes > 1 and any(isinstance(each, torchring.data.Sampler) for each in samplers):
            raise ValueError(
                "Accelerate would share the shares of a torchring.data.Sampler out again, and leave most samples out: "
                "leave its DataLoader out of prepare(), and move batches to accelerator.device in the loop"
            )
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Wrap the optimizer with the prepared models whose parameters it has. Collective."""
        self._unreduced = None
        if isinstance(optimizer, AcceleratedOptimizer):
            ring = optimizer.optimizer
            if not isinstance(ring, DistributedOptimizer):
                raise ValueError("this optimizer was prepared by another Accelerator; pass the one that it wraps")
            if not ring.is_closed:
                return super().prepare_optimizer(optimizer, device_placement)
            optimizer = ring.optimizer  # another optimizer of the same parameters was prepared meanwhile
        if not isinstance(optimizer, DistributedOptimizer):
            optimizer = self._wrap(optimizer)
        return super().prepare_optimizer(optimizer, device_placement)

    def _wrap(self, optimizer: Optimizer) -> DistributedOptimizer:
        parameters = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        prepared = default_world().shared(_prepared)
        for ring in list(prepared):
            if any(id(p) in parameters for group in ring.param_groups for p in group["params"]):
                ring.close()  # of an earlier training
        models = [model for model in dict.fromkeys(self._models) if _shares(optimizer, model)]
        loose = [p for i, p in parameters.items() if not any(i == id(q) for m in models for q in m.parameters())]
        several = [*models, *([torch.nn.ParameterList(loose)] if loose else [])]
        model = several[0] if len(several) == len(models) == 1 else torch.nn.ModuleList(several)
        ring = torchring.wrap(optimizer, model if models else None, **self.wrap_options)
        prepared[ring] = model
        return ring

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler. It may refer to the optimizer that was given to `prepare`, or to the wrapped one."""
        prepared = super().prepare_scheduler(scheduler)
        own = [each for each in self._optimizers if each.optimizer.optimizer is getattr(scheduler, "optimizer", None)]
        if own:
            prepared.optimizers = own
        return prepared

    @contextlib.contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Inside, backward() accumulates the model's gradients on this rank and sends nothing."""
        with contextlib.ExitStack() as stack:
            for ring in self._rings:
                if _shares(ring, model):
                    stack.enter_context(ring.no_sync())
            yield

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """As Accelerator.backward. When it returns, gradients are reduced, except inside `no_sync` and `accumulate`.

        Raises:
            GradientError: nobody reduces the gradients of a prepared model; or see `torchring.wrap`.
        """
        if self.num_processes == 1:
            super().backward(loss, **kwargs)
            return
        if self._unreduced is None or self._unreduced:  # the script may have wrapped an optimizer itself meanwhile
            self._unreduced = self._find_unreduced()
        before = [(model, _stamps(model)) for model in self._unreduced]
        super().backward(loss, **kwargs)
        for model, stamps in before:
            if _stamps(model) != stamps:
                raise GradientError(
                    f"nobody reduces the gradients of the {type(model).__name__} that was prepared, so each rank would "
                    "train alone. Pass its optimizer to prepare(), too; if the model is not to be trained, call "
                    "model.requires_grad_(False)"
                )

    def wait_for_everyone(self) -> None:
        """Wait until all ranks are here. Accelerate's own names a GPU by LOCAL_RANK, which a rank may not see."""
        torchring.barrier()

    def _find_unreduced(self) -> list[torch.nn.Module]:
        """The prepared models without a wrapped optimizer. If nothing is wrapped at all, that is an error."""
        group = default_world().shared(OptimizerGroup)
        if not group.owners():
            raise GradientError(
                "no optimizer was wrapped, so each rank trains alone. Pass model and optimizer to prepare() of the "
                "RingAccelerator"
            )
        trained = [model for model in self._models if any(p.requires_grad for p in model.parameters())]
        return [model for model in trained if not group.owners_of(model.parameters())]

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Ranks may have different numbers of batches inside, on CPUs, too. See `torchring.join`.

        Args:
            joinables: not used; all prepared optimizers and schedulers join.
            even_batches: overrides that of the Accelerator for the data loaders over map-style datasets.
        """
        even = self.even_batches if even_batches is None else even_batches
        samplers = [each.batch_sampler for each in self._dataloaders if hasattr(each.batch_sampler, "even_batches")]
        before = [sampler.even_batches for sampler in samplers]
        try:
            for sampler in samplers:
                sampler.even_batches = even
            with contextlib.nullcontext() if even else torchring.join(*self._rings, *self._schedulers):
                yield
        finally:
            for sampler, value in zip(samplers, before, strict=True):
                sampler.even_batches = value


def refuse_engines(given: Iterable[str]) -> None:
    """Raise ValueError if one of these options is given, or if `accelerate launch` has asked for another engine."""
    asked = [*given, *(f"{name}=true" for name in _ASKED_BY_LAUNCH if os.environ.get(name, "").lower() == "true")]
    if asked:
        raise ValueError(
            f"{asked[0]} asks for an engine that splits up the model or reduces its gradients itself, which cannot be "
            "combined with torchring. Leave it out, or use accelerate.Accelerator and transformers.Trainer. To split "
            "up the optimizer's state among the ranks, use wrap_options={'shard': True}"
        )


@contextlib.contextmanager
def shown_ranks() -> Iterator[None]:
    """Inside, Accelerate sees all ranks. It reads the variables of torchrun, which mpirun and srun do not set."""
    if torchring.size() == 1 or all(name in os.environ for name in _SHOWN):
        yield
        return
    world = torchring.init(process_group=True)
    shown = dict(zip(_SHOWN, map(str, (world.rank, world.size, world.local_rank)), strict=True))
    shown |= {"LOCAL_WORLD_SIZE": str(world.local_size), "MASTER_ADDR": os.environ.get("MASTER_ADDR", "localhost")}
    before = dict(os.environ)
    os.environ.update(shown)
    try:
        yield
    finally:
        for name in (*shown, "MASTER_PORT"):  # which Accelerate sets
            os.environ.pop(name, None)
            os.environ.update({name: before[name]} if name in before else {})


def _shares(optimizer: Optimizer, model: torch.nn.Module) -> bool:
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return any(id(p) in own for p in model.parameters())


def _stamps(model: torch.nn.Module) -> list[tuple[int, int] | None]:
    """Of each parameter: which tensor its gradient is, and how often that was written to."""
    grads = [parameter.grad for parameter in model.parameters()]
    return [None if grad is None else (id(grad), grad._version) for grad in grads]


def _prepared(_: World) -> weakref.WeakKeyDictionary[DistributedOptimizer, torch.nn.Module]:
    """What RingAccelerators have wrapped in a world, each with its model, to which the optimizer refers weakly."""
    return weakref.WeakKeyDictionary()
