"""The forms of a collective: plain, in place, and started, made from one description.

A describing function has Horovod's signature. It checks its arguments and returns a `Collective`; nothing is sent yet.

    def _broadcast(tensor: Tensor, root_rank: int, name: str | None = None) -> Collective[Tensor]: ...

    broadcast = plain(_broadcast)                          (tensor, root_rank, name) -> Tensor; differentiable
    broadcast_ = in_place(_broadcast)                      (tensor, root_rank, name) -> Tensor, which is `tensor`
    broadcast_async = started(_broadcast)                  (tensor, root_rank, name) -> int, a handle
    broadcast_async_ = started_in_place(_broadcast)        (tensor, root_rank, name) -> int

Each form has the signature of the describing function, for type checkers and for `help()`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from torchring.collectives import operations
from torchring.dynamo import run_eagerly
from torchring.horovod.context import Context, ProcessSet, context_of_collectives
from torchring.horovod.exceptions import HorovodInternalError
from torchring.horovod.execution import Operation, Result
from torchring.horovod.negotiation import ALLREDUCE, request_of

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")
Handle = int


@dataclass
class Collective(Generic[_R]):
    """One call of a collective, with checked arguments. Nothing is sent before `wait` or `start`.

    Attributes:
        kind: "allreduce", "allgather", ...
        tensors: the script's.
        name: by which ranks match their calls. None for the number of the call.
        process_set: the ranks that take part.
        give: makes what the caller gets, from the tensors and the numbers of `execution.Result`.
        gradient: makes the gradients of `tensors`, from the gradients of the result's tensors and the result's numbers.
        arguments: must be equal on all ranks: op, scale factors, root rank.
        splits: rows for each rank, of alltoall.
        overwrites: the engine writes results over the tensors that it sends.
    """

    kind: str
    tensors: Sequence[Tensor]
    name: str | None
    process_set: ProcessSet
    give: Callable[[Sequence[Tensor], Sequence[int]], _R]
    gradient: Callable[[Sequence[Tensor], Sequence[int]], Sequence[Tensor]]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    splits: tuple[int, ...] = ()
    overwrites: bool = False

    def of_one(self) -> Collective[Tensor]:
        """The same call. Its caller gets one tensor, and not a tuple of one."""
        call = cast("Collective[Tensor]", self)
        call.give = _first
        return call

    def wait(self) -> _R:
        """Carry out the collective, with new tensors for the result. Differentiable."""
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors):
            numbers: list[int] = []
            tensors = _Differentiable.apply(self, numbers, *self.tensors)  # type: ignore[no-untyped-call]
            return self.give(tensors, numbers)
        return self.give(*self._run(self._copies()))

    def wait_in_place(self) -> _R:
        """Carry out the collective in the script's tensors, which do not get a gradient."""
        self._run(self._own())
        return self.give(self.tensors, ())

    def start(self) -> Handle:
        """Have the engine carry out the collective, with new tensors for the result."""
        return self._start(self._copies())

    def start_in_place(self) -> Handle:
        """Have the engine carry out the collective in the script's tensors."""
        return self._start(self._own())

    def _copies(self) -> list[Tensor]:
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
            operations.check_writable(tensor)
        if self.kind == ALLREDUCE:  # a broadcast may write the same values twice, where parameters are tied
            operations.check_apart(tensors)
        return tensors

    def _run(self, tensors: Sequence[Tensor]) -> Result:
        here = context_of_collectives()
        result: Result = here.engine.run(self._operation(here, tensors))
        return result

    def _start(self, tensors: Sequence[Tensor]) -> Handle:
        here = context_of_collectives()
        operation = self._operation(here, tensors)
        here.engine.submit(operation)
        here.handles[operation.handle] = (operation, self.give)
        return operation.handle

    def _operation(self, here: Context, tensors: Sequence[Tensor]) -> Operation:
        here.ranks_of(self.process_set)
        handle = here.next_handle()  # counts calls, whether they have a name or not, as in Horovod
        label = f"{self.kind}.{self.name}" if self.name is not None else f"{self.kind}.noname.{handle}"
        equal = tuple(self.arguments.items())
        if tensors:
            equal += (("device", "CPU" if tensors[0].device.type == "cpu" else "GPU"),)
        described = tuple([(tensor.dtype, tensor.shape) for tensor in tensors])
        number = self.process_set.process_set_id or 0
        request = request_of(self.kind, label, number, described, equal, self.splits)
        return Operation(request, tensors, handle)


def _first(tensors: Sequence[Tensor], _: Sequence[int]) -> Tensor:
    return tensors[0]


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Collective[Any], numbers: list[int], *_: Tensor) -> tuple[Tensor, ...]:
        tensors, found = call._run(call._copies())
        numbers.extend(found)
        ctx.gradient, ctx.numbers = call.gradient, numbers
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.gradient([grad.contiguous() for grad in grads], ctx.numbers)


def plain(describe: Callable[_P, Collective[_R]]) -> Callable[_P, _R]:
    return _form(describe, Collective.wait, "", describe.__doc__ or "")


def in_place(describe: Callable[_P, Collective[_R]]) -> Callable[_P, _R]:
    return _form(
        describe, Collective.wait_in_place, "_", "`{}` in place and without a gradient. Returns what it was given."
    )


def started(describe: Callable[_P, Collective[Any]]) -> Callable[_P, Handle]:
    doc = "Start `{}` without a gradient. `synchronize(handle)` waits for the result, and returns it."
    return _form(describe, Collective.start, "_async", doc)


def started_in_place(describe: Callable[_P, Collective[Any]]) -> Callable[_P, Handle]:
    doc = "Start `{}_`. What it was given belongs to the library until `synchronize(handle)` returns it."
    return _form(describe, Collective.start_in_place, "_async_", doc)


def _form(
    describe: Callable[_P, Collective[_R]], carry_out: Callable[[Collective[_R]], _T], suffix: str, doc: str
) -> Callable[_P, _T]:
    """A function that describes a call and carries it out. `help()` shows it as if it was written out."""

    @run_eagerly
    def form(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return carry_out(describe(*args, **kwargs))

    functools.update_wrapper(form, describe)
    name = describe.__name__.removeprefix("_")
    form.__name__ = form.__qualname__ = f"{name}{suffix}"
    form.__doc__ = doc.format(name)
    signature = inspect.signature(describe)
    returned = "int" if "async" in suffix else signature.return_annotation.removeprefix("Collective[").removesuffix("]")
    form.__annotations__ = {**describe.__annotations__, "return": returned}
    form.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
    return form


def check_tensors(tensors: Sequence[Tensor], what: str) -> None:
    """Raise ValueError for no tensors or sparse ones, HorovodInternalError for those of two kinds of devices."""
    if not len(tensors):
        raise ValueError(f"{what} got no tensors")
    for tensor in tensors:
        operations.check_dense(tensor)
    if len(tensors) > 1 and len({tensor.device.type for tensor in tensors}) > 1:
        raise HorovodInternalError(f"{what} got tensors on the CPU and on the GPU; give it those of one device")


def check_rows(tensors: Sequence[Tensor], what: str) -> None:
    """Raise ValueError for scalars."""
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError(f"{what} takes tensors with at least one dimension, got a scalar")


def check_reducible(tensor: Tensor, label: str, what: str) -> None:
    """Raise ValueError for a dtype that an operation does not take."""
    dtype = tensor.dtype
    if dtype == torch.bool and label in ("Average", "Adasum"):
        raise ValueError(f"{what} has no op={label} of booleans; use op=hvd.Sum for any, op=hvd.Min for all")
    if dtype.is_complex and label not in ("Average", "Sum"):
        raise ValueError(f"{what} of {dtype} takes op=hvd.Average or op=hvd.Sum, got {label}")
    if label == "Adasum" and not dtype.is_floating_point:
        raise ValueError(f"Adasum takes floating-point tensors, got {dtype}")
    if not (operations.is_reducible(dtype) or dtype == torch.bool or dtype in (torch.complex64, torch.complex128)):
        raise ValueError(f"{dtype} cannot be reduced")
