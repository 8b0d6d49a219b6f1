"""The forms of a collective: plain, in place, and started, of one tensor or of several, made from one description.

A describing function has Horovod's signature for several tensors. It checks its arguments and returns a `Collective`;
nothing is sent yet.

    def _broadcast(tensors, root_rank, name=None): ...

    broadcast = form("broadcast", _broadcast)                    (tensor, root_rank, name) -> Tensor; differentiable
    broadcast_ = form("broadcast_", _broadcast)                  (tensor, root_rank, name) -> Tensor, which is `tensor`
    broadcast_async = form("broadcast_async", _broadcast)        (tensor, root_rank, name) -> int, a handle
    broadcast_async_ = form("broadcast_async_", _broadcast)      (tensor, root_rank, name) -> int
    grouped_allgather = form("grouped_allgather", _allgather)    (tensors, name) -> tuple of Tensor

`help()` shows each form with its signature.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from torchring.accelerators import accelerator_of
from torchring.broadcasts import check_dense, check_writable
from torchring.collectives import operations
from torchring.dynamo import run_eagerly
from torchring.functions import REDUCIBLE
from torchring.horovod.context import ProcessSet, engine, ranks_of
from torchring.horovod.exceptions import HorovodInternalError
from torchring.horovod.execution import Operation, Result
from torchring.horovod.negotiation import ALLREDUCE, Request

Handle = int


@dataclass
class Collective:
    """One call of a collective, with checked arguments. Nothing is sent before `wait` or `start`."""

    kind: str  # "allreduce", "allgather", ...
    tensors: Sequence[Tensor]  # the script's
    name: str | None  # by which ranks match their calls. None for the number of the call
    process_set: ProcessSet
    # Makes what the caller gets, from the tensors and the numbers of `execution.Result`.
    give: Callable[[Sequence[Tensor], Sequence[int]], Any]
    # Makes the gradients of `tensors`, from the gradients of the result's tensors and the result's numbers.
    gradient: Callable[[Sequence[Tensor], Sequence[int]], Sequence[Tensor]]
    arguments: Mapping[str, Any] = field(default_factory=dict)  # equal on all ranks: op, scale factors, root rank
    splits: tuple[int, ...] = ()  # rows for each rank, of alltoall
    overwrites: bool = False  # the engine writes results over the tensors that it sends

    def wait(self) -> Any:
        """Carry out the collective, with new tensors for the result. Differentiable."""
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors):
            numbers: list[int] = []
            tensors = _Differentiable.apply(self, numbers, *self.tensors)  # type: ignore[no-untyped-call]
            return self.give(tensors, numbers)
        return self.give(*self.run(self.copies()))

    def wait_in_place(self) -> Any:
        """Carry out the collective in the script's tensors, which do not get a gradient."""
        self.run(self._own())
        return self.give(self.tensors, ())

    def start(self, *, in_place: bool = False) -> Handle:
        """Have the engine carry out the collective, in the script's tensors, or with new ones for the result."""
        handle, operation = self._operation(self._own() if in_place else self.copies())
        engine().handles[handle] = engine().submit(operation)
        return handle

    def run(self, tensors: Sequence[Tensor]) -> Result:
        result: Result = engine().run(self._operation(tensors)[1])
        return result

    def copies(self) -> list[Tensor]:
        """Tensors for the engine, which does not write to those of the script."""
        if not self.overwrites:
            return [tensor.detach() for tensor in self.tensors]
        layout = torch.contiguous_format
        with torch.inference_mode(False), torch.no_grad():
            return [operations.writable(tensor).clone(memory_format=layout) for tensor in self.tensors]

    def _own(self) -> list[Tensor]:
        """The script's tensors for the engine, which writes to them."""
        tensors = [operations.writable(tensor.detach()) for tensor in self.tensors]
        for tensor in tensors:
            check_writable(tensor)
        if self.kind == ALLREDUCE:  # a broadcast may write the same values twice, where parameters are tied
            check_apart(tensors)
        return tensors

    def _operation(self, tensors: Sequence[Tensor]) -> tuple[Handle, Operation]:
        ranks_of(self.process_set)
        handle = engine().next_handle()  # counts calls, whether they have a name or not, as in Horovod
        label = f"{self.kind}.{self.name}" if self.name is not None else f"{self.kind}.noname.{handle}"
        equal = tuple(self.arguments.items())
        if tensors:
            equal += (("device", "CPU" if accelerator_of(tensors[0].device) is None else "GPU"),)
        described = tuple((str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in tensors)
        number = self.process_set.process_set_id or 0
        request = Request(self.kind, label, number, described, equal, self.splits)
        return handle, Operation(request, tensors, self.give)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Collective, numbers: list[int], *_: Tensor) -> tuple[Tensor, ...]:
        tensors, found = call.run(call.copies())
        numbers.extend(found)
        ctx.gradient, ctx.numbers = call.gradient, numbers
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.gradient([grad.contiguous() for grad in grads], ctx.numbers)


# The ending of a form's name: how the form carries a call out, and what `help()` says of the form.
_HOW: Final[dict[str, tuple[Callable[[Collective], Any], str]]] = {
    "": (Collective.wait, "`{}` of several tensors as one operation."),
    "_": (Collective.wait_in_place, "`{}` in place and without a gradient. Returns what it was given."),
    "_async": (Collective.start, "Start `{}` without a gradient. `synchronize(handle)` waits, and returns the result."),
    "_async_": (
        functools.partial(Collective.start, in_place=True),
        "Start `{}_`. The library owns its tensors until `synchronize(handle)`.",
    ),
}


def form(name: str, describe: Callable[..., Collective]) -> Callable[..., Any]:
    """The function `name` of Horovod's, which describes a call and carries it out as the ending of `name` says.

    Only the plain form takes the argument `compression`. Without "grouped_", it takes one tensor, and returns one.
    """
    bare = name.removesuffix("_").removesuffix("_async")
    carry_out, doc = _HOW[name[len(bare) :]]
    is_grouped = name.startswith("grouped_")
    parameters = list(inspect.signature(describe).parameters.values())
    if not is_grouped:
        parameters[0] = parameters[0].replace(name="tensor", annotation="Tensor")
    kept = [each for each in parameters if name == bare or each.name != "compression"]
    omitted = {"compression": None} if len(kept) < len(parameters) else {}
    signature = inspect.signature(describe).replace(parameters=kept)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        first = given.pop(kept[0].name)
        collective = describe(first if is_grouped else [first], **given, **omitted)
        if not is_grouped:
            give = collective.give
            collective.give = lambda tensors, numbers: give(tensors, numbers)[0]
        return carry_out(collective)

    made: Callable[..., Any] = run_eagerly(call)
    made.__name__ = made.__qualname__ = name
    made.__module__ = describe.__module__
    made.__doc__ = describe.__doc__ if name == bare and not is_grouped else doc.format(bare.removeprefix("grouped_"))
    made.__signature__ = signature  # type: ignore[attr-defined]
    return made


def check_tensors(tensors: Sequence[Tensor], what: str, *, have_rows: bool = False) -> None:
    """Raise ValueError for no tensors, sparse ones or, if they `have_rows`, scalars.

    Raises HorovodInternalError for tensors of two kinds of devices.
    """
    if not len(tensors):
        raise ValueError(f"{what} got no tensors")
    for tensor in tensors:
        check_dense(tensor)
        if have_rows and tensor.dim() == 0:
            raise ValueError(f"{what} takes tensors with at least one dimension, got a scalar")
    if len({tensor.device.type for tensor in tensors}) > 1:
        raise HorovodInternalError(f"{what} got tensors on the CPU and on the GPU; give it those of one device")


def check_reducible(tensor: Tensor, label: str, what: str) -> None:
    """Raise ValueError for a dtype that an operation does not take."""
    if tensor.dtype not in REDUCIBLE:
        raise ValueError(f"{what} does not take {tensor.dtype}; convert the tensor to numbers first")
    if label == "Adasum" and not tensor.is_floating_point():
        raise ValueError(f"Adasum takes floating-point tensors, got {tensor.dtype}")


def check_apart(tensors: Sequence[torch.Tensor]) -> None:
    """Raise ValueError if tensors that are to be written together share memory, as far as their first elements show."""
    addresses = [tensor.data_ptr() for tensor in tensors if tensor.numel()]
    if len(set(addresses)) < len(addresses):
        raise ValueError("tensors that are reduced together need memory of their own, but two begin at one address")
