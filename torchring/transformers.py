"""Hugging Face's Trainer without DistributedDataParallel: `RingTrainer` in place of `Trainer`.

For another trainer, such as Seq2SeqTrainer, put the mixin before its class:

    class RingSeq2SeqTrainer(RingMixin, Seq2SeqTrainer):
        pass

A Trainer leaves placement, reduction and accumulation to its Accelerator. So the mixin gives the Trainer a
`torchring.accelerate.RingAccelerator`. The rest of the Trainer's work is unchanged.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

import torchring
from torchring.requirements import check_release

check_release("transformers", (5, 17), (5, 24), "transformers")

from transformers import Trainer, TrainingArguments  # noqa: E402 - if it is the right one

from torchring.accelerate import RingAccelerator, refuse_engines, shown_ranks  # noqa: E402


class RingMixin:
    """Goes before a Trainer's class: optimizers are wrapped by `torchring.wrap`, and the model stays bare.

    Without a GPU it trains on the CPU, with all processes that were launched.

    Attributes:
        wrap_options: options of `torchring.wrap`, such as `{"compression": "bf16"}`. Set it in a subclass, where it may
            also be a property that looks at `self.args`.
    """

    accelerator: Any
    args: TrainingArguments
    optimizer: Any
    wrap_options: Mapping[str, Any] = MappingProxyType({})

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's constructor calls this."""
        args = self.args
        refuse_engines(name for name in ("deepspeed", "fsdp", "parallelism_config") if getattr(args, name))
        if args.world_size != torchring.size():
            _look_again(args)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator = RingAccelerator.adopt(self.accelerator, self.wrap_options)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """With shard=True, all ranks have to ask for the optimizer's state. The Trainer asks on rank 0 alone."""
        state = self.optimizer.state_dict()
        self.optimizer.state_dict = lambda: state
        try:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        finally:
            del self.optimizer.state_dict


class RingTrainer(RingMixin, Trainer):
    """A transformers.Trainer that reduces gradients with torchring. See `RingMixin`."""


def _look_again(args: TrainingArguments) -> None:
    """Let arguments that took this process for the only one see all ranks, on the CPU if there is no GPU."""
    args.use_cpu = args.use_cpu or not torch.accelerator.is_available()
    del args.__dict__["_setup_devices"]
    with shown_ranks():
        _ = args._setup_devices
