"""What `LocalSGD` and `DiLoCo` take, and what they refuse."""

from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from torchring.broadcasts import check_dense, check_writable
from torchring.gradients.validation import named_parameters
from torchring.optimizer_wrapper import OptimizerWrapper
from torchring.world import World


@dataclass(frozen=True)
class Options:
    """See `DiLoCo`. Equal on all ranks."""

    every: int
    fragments: int = 1
    overlap: int = 0
    bits: int | None = None
    within: str | None = None

    def names(self, optimizer: Optimizer, model: torch.nn.Module | None, world: World) -> dict[torch.nn.Parameter, str]:
        """The parameters of the optimizer and their names. Raises ValueError for what does not work."""
        for name, least in (("every", 1), ("fragments", 1), ("overlap", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least or value > self.every - (name == "overlap"):
                most = {"fragments": f", at most every={self.every}", "overlap": f", less than every={self.every}"}
                raise ValueError(f"{name} must be a whole number, at least {least}{most.get(name, '')}, got {value!r}")
        if self.bits not in (None, 4, 2):
            raise ValueError(f"bits must be 4, 2 or None, got {self.bits!r}")
        if self.within not in (None, "host"):
            raise ValueError(f"within must be 'host' or None, got {self.within!r}")
        if self.within is not None and world.is_provisional:
            raise ValueError("within='host' does not work in an elastic job, whose hosts change")
        if isinstance(optimizer, OptimizerWrapper):
            raise ValueError(
                f"this {type(optimizer).__name__} talks to other ranks already; pass the plain optimizer, and "
                "within='host' for torchring.wrap() on the ranks of each host"
            )
        names = named_parameters(optimizer, model)
        if self.fragments > len(names):
            raise ValueError(f"fragments={self.fragments}, but the optimizer has {len(names)} parameters")
        for parameter, name in names.items():
            try:
                check_dense(parameter)
                check_writable(parameter)
            except ValueError as error:
                raise ValueError(f"{name} cannot be averaged: {error}") from None
            if parameter.dtype.itemsize == 1 or not (parameter.is_floating_point() or parameter.is_complex()):
                raise ValueError(
                    f"{name} is {parameter.dtype}, which cannot be averaged; leave it out of the optimizer"
                )
        return names
