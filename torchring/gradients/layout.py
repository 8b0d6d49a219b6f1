"""The buckets of one optimizer: chooses the algorithm, lays the buckets out, and lays them out anew."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

import torch

from torchring.accelerators import accelerator_of
from torchring.allreduce import AllReduce
from torchring.allreduce.contract import PlannedAllReduce
from torchring.allreduce.select import Choice, choose, open_all_reduce
from torchring.collectives.service import internal_collectives_of
from torchring.gradients.agreement import Agreement, Timing, wires_of
from torchring.gradients.bucket import Bucket
from torchring.gradients.launcher import Launcher
from torchring.gradients.ledger import Ledger
from torchring.gradients.places import open_bucket
from torchring.gradients.plan import LAST_BUCKET_BYTES, ParameterSpec, Plan, build_plan, default_bucket_mb
from torchring.observer import Progress
from torchring.rooms import room
from torchring.world import World

BufferChoice: TypeAlias = Literal["mean", "rank0"] | None
SyncBuffers: TypeAlias = BufferChoice | Mapping[str, BufferChoice]


@dataclass(frozen=True)
class Options:
    """The user's choices in `wrap`; equal on all ranks. `check_options` says what each may be."""

    op: str = "mean"
    compression: Any = None  # None, a key of `plan.COMPRESSIONS`, or a `Scheme` of `torchring.compression`
    bucket_mb: float | None = None
    accumulate: int = 1
    algorithm: str = "auto"
    overlap: str = "auto"
    on_nonfinite: str = "raise"
    sync_buffers: SyncBuffers = "mean"
    shard: bool = False
    noise_scale: bool = False
    max_error: float | None = None

    def __str__(self) -> str:
        return ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))

    @property
    def scheme(self) -> Any:
        """The `Scheme` that compresses what travels between hosts, if there is one."""
        return None if self.compression is None or isinstance(self.compression, str) else self.compression

    @property
    def is_sum(self) -> bool:
        """Whether gradients are added up over ranks, and not averaged."""
        return self.op != "mean"

    def scale(self, world_size: int) -> float:
        """The factor between the sum over ranks and the result."""
        return 1.0 / world_size if self.op == "mean" else 1.0


class BucketLayout:
    """The buckets of one optimizer. Opening it is collective.

    After the first reduction the plan is rebuilt once, in the order in which rank 0's gradients really became ready.
    A layer that is registered last and never used would hold all other buckets back until backward has ended.
    """

    def __init__(
        self,
        world: World,  # has more than one rank
        options: Options,
        specs: Sequence[ParameterSpec],  # what is laid out
        parameters: Sequence[torch.nn.Parameter],
        progress: Progress,  # this and the next: see `Launcher`
        waiting: set[Launcher],
    ) -> None:
        self.specs = list(specs)  # this and the next grow with `add`
        self.parameters = list(parameters)
        self.world = world
        self.options = options
        self.timing = Timing()  # how long reductions took
        device = specs[0].device
        ranks, on_device = (world.size, world.num_nodes), accelerator_of(device) is not None
        self._on_device = on_device
        self._bucket_mb = default_bucket_mb(*ranks, options.algorithm, on_device=on_device)
        plan = self.plan()
        self.all_reduce, self.choice = self._open_all_reduce(device, plan)
        if (size := default_bucket_mb(*ranks, self.choice.algorithm, on_device=on_device)) != self._bucket_mb:
            self._bucket_mb = size
            plan = self.plan()
        # Why this algorithm reduces wire buffers, and where this rank runs
        self.reason = "; ".join(filter(None, (self.choice.reason, os.environ.get(room("placement").PLACE, ""))))
        world.on_failure(self.all_reduce)
        self.ledger = Ledger(is_sum=options.is_sum)  # what is known about each gradient
        self.launcher = Launcher(self.all_reduce, self.ledger, progress, waiting)
        self.agreement: Agreement  # how ranks agree at the end of a reduction, on the host or with a device
        if on_device:
            self.agreement = room("device agreement").DeviceAgreement(
                world, self.all_reduce, self.timing, self.specs, self.parameters
            )
        else:
            self.agreement = Agreement(self.all_reduce, self.timing, world.size)
        self.launcher.install(self._open(plan))

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self.launcher.buckets

    @property
    def current_plan(self) -> Plan:
        return Plan(tuple(bucket.plan for bucket in self.buckets))

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank contributes to one reduction."""
        num_bytes: int = getattr(self.all_reduce, "num_bytes", self.current_plan.num_bytes)
        return num_bytes

    def plan(self, order: Sequence[int] | None = None, first_index: int = 0) -> Plan:
        """Default buckets; `order` and `first_index` as in `build_plan`."""
        bucket_mb = self.options.bucket_mb
        is_small_last = bucket_mb is None and self.world.num_nodes > 1 and not self._on_device
        return build_plan(
            self.specs,
            bucket_bytes=int((self._bucket_mb if bucket_mb is None else bucket_mb) * 2**20),
            last_bucket_bytes=LAST_BUCKET_BYTES if is_small_last else None,
            compression=None if self.options.scheme else self.options.compression,
            alignment=self.options.scheme and self.options.scheme.alignment,
            order=order,
            first_index=first_index,
        )

    def add(self, specs: Sequence[ParameterSpec], parameters: Sequence[torch.nn.Parameter]) -> None:
        """Collective, between reductions: more parameters, in buckets of their own."""
        self.launcher.forget_order()  # the order knows nothing of the new parameters
        first = len(self.specs)
        self.specs += specs
        self.parameters += parameters
        plan = self.plan(range(first, len(self.specs))[::-1], len(self.buckets))
        self.launcher.install([*self.buckets, *self._open(plan, self.buckets)])

    def follow_order(self) -> None:
        """Collective, between reductions: lay the buckets out in the order of rank 0's first one, if it is known now.

        Gradients that lie in the old buckets stay valid there, and move when they next change; on a device, at once.
        """
        if self.launcher.ready_order is None:
            return
        order = list(dict.fromkeys(self.launcher.ready_order))
        order += sorted(set(range(len(self.specs))).difference(order), reverse=True)
        collectives = internal_collectives_of(self.world)
        agreed = collectives.broadcast(torch.tensor(order, dtype=torch.int64, device="cpu"), 0).tolist()
        self.launcher.forget_order()
        plan = self.plan(agreed)
        if plan == self.current_plan:
            return
        self.release()
        internal_collectives_of(self.world).barrier()  # memory is free when all ranks have let go of it
        self.launcher.install(self._open(plan))

    def release(self) -> None:
        """Let go of the wires, which others are about to replace, or nobody needs any more."""
        self.agreement.wait_for_device()
        for bucket in self.buckets:
            bucket.release()
        self.agreement.wait_for_device()  # gradients have moved, whichever stream uses them next

    def _open_all_reduce(self, device: torch.device, plan: Plan) -> tuple[AllReduce[Any], Choice]:
        world, options = self.world, self.options
        if accelerator := accelerator_of(device):
            opening = room("device all-reduces") if options.scheme is None else options.scheme
            opened: tuple[AllReduce[Any], Choice] = opening.open_on_device(
                world, options.algorithm, options.overlap, wires_of(plan), accelerator
            )
            return opened
        choice = choose(world) if options.algorithm == "auto" else Choice(options.algorithm, "asked for")
        if options.scheme is not None:
            compressed: tuple[AllReduce[Any], Choice] = options.scheme.open_all_reduce(world, choice, options.overlap)
            return compressed
        return open_all_reduce(world, choice.algorithm, options.overlap), choice

    def _open(self, plan: Plan, others: Sequence[Bucket] = ()) -> list[Bucket]:
        order = [slot.parameter for bucket in (*(each.plan for each in others), *plan.buckets) for slot in bucket.slots]
        order += (index for index, spec in enumerate(self.specs) if spec.is_sparse)
        self.ledger.lay_out(order, self.specs, self.parameters)
        opened = self.agreement.open_wires(plan, self.options.scale(self.world.size))
        if isinstance(self.all_reduce, PlannedAllReduce):
            self.all_reduce.lay_out(
                [wire for wire, _ in opened], plan, self.specs, self.parameters, num_kept=len(others)
            )
        return [
            open_bucket(bucket, wire, self.specs, self.parameters, packing, self.ledger)
            for bucket, (wire, packing) in zip(plan.buckets, opened, strict=True)
        ]
