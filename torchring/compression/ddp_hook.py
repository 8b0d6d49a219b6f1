"""Communication hooks of DistributedDataParallel, unchanged: `compression=torchring.ddp_hook(state, hook)`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from torchring.allreduce.native import NativeAllReduce, NativeWire
from torchring.errors import in_step
from torchring.gradients.plan import BucketPlan, ParameterSpec, Plan


@dataclass(frozen=True)
class DDPHook:
    """What `ddp_hook` returns."""

    state: Any
    hook: Callable[[Any, Any], torch.futures.Future[Any]]

    def check_group(self, members: Sequence[int]) -> None:
        """Raise ValueError if the optimizer is of a group, whose members these are, and the hook sends to others."""
        group = getattr(self.state, "process_group", self.state)
        reached = dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else []
        if members and sorted(reached) != sorted(members):
            text = "with group=, a hook's state must be the ProcessGroup of the same ranks, or have it as process_group"
            raise in_step(ValueError(f"{text}; else the hook sends to other ranks than {list(members)}"))


def ddp_hook(state: Any, hook: Callable[[Any, Any], torch.futures.Future[Any]]) -> DDPHook:
    """A communication hook of DistributedDataParallel as a `compression`, for gradients on the CPU.

        state = PowerSGDState(process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=10)
        optimizer = torchring.wrap(optimizer, model, compression=torchring.ddp_hook(state, powerSGD_hook))

    The hook is called as by `register_comm_hook`, in the thread that runs backward, when the bucket before is reduced.
    That is so on one host, too. Hooks send through torch.distributed's process group: the script's, or that of
    `torchring.init(process_group=True)`.

    Args:
        state: passed to the hook. With `group=` of `wrap`, it is the ProcessGroup of these ranks, or has that as
            `process_group`.
        hook: takes the state and a bucket with the methods of torch.distributed.GradBucket, and returns a Future of the
            mean over ranks, a tensor as large as `bucket.buffer()`. Between parameters, the buffer has a few zeros.

    Raises:
        TypeError: the hook is not callable.
    """
    if not callable(hook):
        raise TypeError(f"ddp_hook(state, hook): the hook comes second, a function, got {type(hook).__name__}")
    return DDPHook(state, hook)


@dataclass(eq=False)
class GradBucket:
    """A bucket as hooks see it: see torch.distributed.GradBucket, which Python cannot make."""

    plan: BucketPlan
    specs: Sequence[ParameterSpec]
    wire: torch.Tensor
    is_last_one: bool
    _parameters: Sequence[torch.Tensor] = field(default_factory=list)

    def index(self) -> int:
        return self.plan.index

    def buffer(self) -> torch.Tensor:
        return self.wire

    def set_buffer(self, buffer: torch.Tensor) -> None:
        self.wire = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Complex ones as pairs of real numbers."""
        found = []
        for spec, offset in [(self.specs[slot.parameter], slot.offset) for slot in self.plan.slots]:
            parts = 2 if spec.dtype.is_complex else 1
            strides = *(parts * step for step in spec.gradient_stride), 1
            gradient = self.wire.as_strided((*spec.shape, parts), strides, offset)
            found.append(gradient if parts == 2 else gradient.squeeze(-1))
        return found

    def parameters(self) -> list[torch.Tensor]:
        return [self._parameters[slot.parameter] for slot in self.plan.slots]

    def is_last(self) -> bool:
        return self.is_last_one


@dataclass(eq=False)
class _Work:
    """One call of the hook. See `BucketWork`."""

    future: torch.futures.Future[Any]
    target: torch.Tensor | None  # gets the result
    span: tuple[float, float] | None = None

    def advance(self, *, waits: bool = False) -> bool:
        return True

    def wait(self) -> None:
        result = self.future.wait()
        result = result[0] if isinstance(result, list) else result
        if self.target is not None:
            if result.shape != self.target.shape:
                raise ValueError(f"a hook's result has shape {tuple(result.shape)}, not {tuple(self.target.shape)}")
            self.target.copy_(result)
            self.target = None


class HookAllReduce(NativeAllReduce):
    """Hands each bucket to a hook. Model buffers are reduced by the engine."""

    def __init__(self, transport: Any, hook: DDPHook, num_ranks: int) -> None:
        super().__init__(transport)
        self._hook = hook
        self._num_ranks = num_ranks
        self._buckets: dict[int, GradBucket] = {}  # by address of the wire
        # What a hook does next waits in a thread of Gloo's, and Gloo has two: so buckets take turns.
        self._last: _Work | None = None

    def lay_out(
        self, wires: Sequence[Any], plan: Plan, specs: Sequence[ParameterSpec], parameters: Any, *, num_kept: int
    ) -> None:
        """See `PlannedAllReduce`."""
        self._buckets = {place: each for place, each in self._buckets.items() if each.plan.index < num_kept}
        for each in self._buckets.values():
            each.is_last_one = False
        for wire, bucket in zip(wires, plan.buckets, strict=True):
            whole, is_last = wire.whole, bucket is plan.buckets[-1]
            self._buckets[whole.data_ptr()] = GradBucket(bucket, specs, whole, is_last, parameters)

    def start(self, wire: NativeWire) -> Any:
        return self._call(wire, wire.whole, wire.whole)

    def abort_bucket(self, wire: NativeWire) -> Any:
        return self._call(wire, torch.zeros_like(wire.whole), None)

    def _call(self, wire: NativeWire, values: torch.Tensor, target: torch.Tensor | None) -> Any:
        bucket = self._buckets.get(wire.whole.data_ptr())
        if bucket is None:
            return super().start(wire) if target is not None else super().abort_bucket(wire)
        if not dist.is_initialized():
            text = "hooks of DistributedDataParallel send through torch.distributed's process group: call "
            raise ValueError(f"{text}torchring.init(process_group=True) first")
        if self._last is not None:
            self._last.wait()
        bucket.wire = values.mul_(self._num_ranks)  # the hook divides by it
        self._last = _Work(self._hook.hook(self._hook.state, bucket), target)
        return self._last
