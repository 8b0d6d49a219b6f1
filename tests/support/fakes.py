"""An all-reduce whose ranks take turns on one thread, with the gradients that it reduces."""

import functools
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchring.errors import RingError
from torchring.gradients.launcher import Launcher
from torchring.gradients.ledger import Ledger
from torchring.gradients.packing import Packing
from torchring.gradients.places import open_bucket
from torchring.gradients.plan import ParameterSpec, build_plan
from torchring.gradients.reduction import Reduction, Said


@dataclass
class FakeWire:
    """Buckets pack to `tensor`. The all-reduce writes to `buffer`, which has a version counter of its own."""

    index: int
    tensor: Tensor
    buffer: Tensor


class FakeAllReduce:
    """One rank's end of an all-reduce whose ranks take turns on one thread. See `AllReduce`."""

    algorithm = "fake"

    def __init__(self, group: "list[FakeAllReduce]", in_background: bool = False) -> None:
        group.append(self)
        self.group = group  # the ends of all ranks
        self.in_background = in_background
        self.events: list[str] = []  # what was done, such as "start 0", "reduce 0" and "land 0" of bucket 0
        self.errors: dict[str, Exception] = {}  # what raises an error, by event
        # The buckets for which other ranks are late: only `advance` that waits reduces them
        self.late: set[int] = set()
        # Begin and end of each bucket, for an all-reduce that reduces on a thread of its own
        self.spans: dict[int, tuple[float, float]] = {}
        self.parts: list[Tensor] = []  # what this rank has added

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[FakeWire]:
        buffers = [torch.full((numel,), float("nan"), dtype=dtype) for numel, dtype in specs]
        return [FakeWire(index, buffer.data, buffer) for index, buffer in enumerate(buffers)]

    def start(self, wire: FakeWire) -> "FakeWork":
        self.note(f"start {wire.index}")
        self.parts.append(wire.tensor.to(torch.float64, copy=True))
        return FakeWork(self, wire, len(self.parts))

    def note(self, event: str) -> None:
        self.events.append(event)
        if event in self.errors:
            raise self.errors[event]

    def take_events(self) -> list[str]:
        events, self.events = self.events, []
        return events

    def fail(self, error: RingError) -> None: ...

    def close(self) -> None: ...


@dataclass
class FakeWork:
    """See `BucketWork`."""

    all_reduce: FakeAllReduce
    wire: FakeWire
    number: int  # of starts on this rank
    has_advanced: bool = False

    @property
    def span(self) -> tuple[float, float] | None:
        return self.all_reduce.spans.get(self.wire.index)

    def advance(self, *, waits: bool = False) -> bool:
        is_there = all(len(end.parts) >= self.number for end in self.all_reduce.group)
        assert is_there or not waits, "would wait for ever"
        if not self.has_advanced and is_there and (waits or self.wire.index not in self.all_reduce.late):
            self.all_reduce.note(f"reduce {self.wire.index}")
            self.has_advanced = True
        return self.has_advanced

    def wait(self) -> None:
        assert self.has_advanced, "peers wait for this rank's part"
        self.all_reduce.note(f"land {self.wire.index}")
        self.wire.buffer.copy_(torch.stack([end.parts[self.number - 1] for end in self.all_reduce.group]).sum(0))


class FakeRank:
    """Parameters p0, p1, ... of one rank, and what hooks and the reducer do with their gradients."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        all_reduce: Any,
        *,
        scale: float = 1.0,
        is_sum: bool = False,
        open_packing: Callable[..., Packing] = Packing,
        **plan: Any,
    ) -> None:
        self.parameters = [p if isinstance(p, nn.Parameter) else nn.Parameter(p) for p in parameters]
        self.specs = [
            ParameterSpec(f"p{i}", tuple(p.shape), p.stride(), p.dtype, p.device) for i, p in enumerate(self.parameters)
        ]
        self.all_reduce = all_reduce
        self.ledger = Ledger(is_sum=is_sum)
        self.launcher = Launcher(all_reduce, self.ledger)
        self.is_in_backward = False
        self._open_packing = functools.partial(open_packing, 1.0 if is_sum else scale)
        self.lay_out(**plan)

    def lay_out(self, order: Sequence[int] | None = None, bucket_bytes: int = 1 << 40, **options: Any) -> None:
        """In these buckets from now on; by default, of parameters in their order, in one bucket."""
        order = range(len(self.specs)) if order is None else order
        options = {"bucket_bytes": bucket_bytes, "first_bucket_bytes": bucket_bytes, **options}
        plans = build_plan(self.specs, order=order, **options).buckets
        wires = self.all_reduce.open_wires([(plan.numel, plan.wire_dtype) for plan in plans])
        self.ledger.lay_out([slot.parameter for plan in plans for slot in plan.slots], self.specs, self.parameters)
        for bucket in self.launcher.buckets:
            bucket.release()
        num_ranks = len(self.all_reduce.group)
        self.launcher.install([
            open_bucket(
                plan, wire, self.specs, self.parameters,
                self._open_packing(plan, wire.tensor, num_ranks, []), self.ledger
            )
            for plan, wire in zip(plans, wires, strict=True)
        ])  # fmt: skip

    def begin(self, **fields: Any) -> None:
        self.launcher.drain()
        self.launcher.begin(Reduction(self.launcher.reduction.next_number, **fields))
        self.is_in_backward = True

    def give(self, index: int, value: Any) -> None:
        """Autograd accumulates, and the parameter's hook runs."""
        parameter = self.parameters[index]
        new = torch.as_tensor(value, dtype=parameter.dtype).expand(parameter.shape)
        if parameter.grad is None:
            parameter.grad = new.clone()
        else:
            parameter.grad.add_(new)
        self.arrive(index)

    def arrive(self, index: int) -> None:
        if not self.is_in_backward:
            self.begin()
        self.launcher.on_ready(len(self.parameters))[index](index)

    def fill(self) -> None:
        """Backward is over."""
        if not self.is_in_backward:
            self.begin()
        for bucket in self.launcher.count_noted():
            bucket.pack_rest()
        self.launcher.launch_rest()

    def close(self, unused: Set[int] = frozenset()) -> None:
        """Ranks have agreed."""
        self.launcher.reduction.said = Said({}, unused)
        self.launcher.close_reduction()
        self.is_in_backward = False

    def abort(self) -> None:
        self.launcher.abort()
        self.is_in_backward = False

    def unused(self) -> set[int]:
        return {bucket.plan.slots[slot].parameter for bucket in self.launcher.buckets for slot in bucket.unused}

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def gradient(self, index: int) -> Tensor:
        gradient = self.parameters[index].grad
        assert gradient is not None
        return gradient

    def gradients(self) -> list[list[float] | None]:
        return [None if p.grad is None else p.grad.flatten().tolist() for p in self.parameters]

    def is_in_wire(self, index: int) -> bool:
        at, wires = self.gradient(index).data_ptr(), [bucket.wire.tensor for bucket in self.launcher.buckets]
        return any(wire.data_ptr() <= at < wire.data_ptr() + wire.nbytes for wire in wires)


def fake_ranks(num_ranks: int, *parameters: Tensor | int, **options: Any) -> list[FakeRank]:
    """Ranks with these parameters; a number is the length of one."""
    tensors = [torch.ones(p) if isinstance(p, int) else p for p in parameters]
    group: list[FakeAllReduce] = []
    ends = [FakeAllReduce(group) for _ in range(num_ranks)]
    return [FakeRank(tensors, end, scale=1 / num_ranks, **options) for end in ends]


def finish(*ranks: FakeRank) -> None:
    for rank in ranks:
        rank.fill()
    for rank in ranks:
        rank.launcher.wait()
    unused = set.intersection(*(rank.unused() for rank in ranks))
    for rank in ranks:
        rank.close(unused)
