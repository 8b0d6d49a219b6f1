"""What `compression` of `torchring.wrap` may be, beside the narrow dtypes; and the all-reduce that compresses."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch

from torchring.allreduce.contract import AllReduce, BucketWork
from torchring.allreduce.hierarchical import HierarchicalAllReduce, open_hierarchical
from torchring.allreduce.native import NativeAllReduce
from torchring.allreduce.select import Choice, open_all_reduce
from torchring.collectives.service import internal_collectives_of
from torchring.compression.codec import ROW, Codec, Contents, Piece
from torchring.compression.custom import Compressor, CustomCodec
from torchring.compression.ddp_hook import DDPHook, HookAllReduce
from torchring.compression.int8 import Int8Codec
from torchring.compression.powersgd import PowerSGD, PowerSGDCodec
from torchring.compression.transport import CompressingTransport
from torchring.errors import GradientError, in_step
from torchring.gradients.layout import Options
from torchring.gradients.plan import BucketPlan, ParameterSpec, Plan
from torchring.rooms import room
from torchring.transport.c10d import open_transport
from torchring.world import World

_logger: Final = logging.getLogger("torchring")
COMPRESSED: Final = (torch.float32, torch.float16, torch.bfloat16)
_COLUMN_BYTES: Final = 1024  # columns begin at rows: of ROW elements of 4 bytes


@dataclass(eq=False)
class Scheme:
    """How an optimizer's gradients are compressed between hosts.

    Attributes:
        settings: "int8", a `PowerSGD`, a `DDPHook`, or a `Compressor` of the script.
        kept: by parameter, what error feedback has kept, while no all-reduce has it: fp32, as long as the gradient, in
            the order of its memory.
    """

    settings: Any
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    alignment = ROW

    def __repr__(self) -> str:  # which ranks compare
        if isinstance(self.settings, (str, PowerSGD)):
            return str(self.settings)
        found: Any = self.settings.hook if isinstance(self.settings, DDPHook) else type(self.settings)
        return f"{found.__module__}.{getattr(found, '__qualname__', type(found).__qualname__)}"

    @property
    def part(self) -> int | None:
        """The elements of a buffer that are coded at once, where a buffer is cut. The network sends one part meanwhile.

        Gloo sends a message all at once. Several MB overflow the queues of switches, and TCP slows down.
        """
        return 1 << 20 if self.settings == "int8" else None

    @property
    def num_exact(self) -> int:
        """Number of reductions until gradients are compressed."""
        return self.settings.start if isinstance(self.settings, PowerSGD) else 0

    def check(self, options: Options) -> None:
        """Raise ValueError for what is no compression, or does not go with it."""
        is_class = isinstance(self.settings, type)
        if self.settings != "int8" and (is_class or not isinstance(self.settings, (PowerSGD, DDPHook, Compressor))):
            known = "None, 'fp16', 'bf16', 'int8', 'powersgd', a torchring.compression.PowerSGD, an object with "
            known += "compress() and decompress(), or torchring.ddp_hook(...)"
            raise ValueError(f"compression must be {known}, got {self.settings!r}")
        most = options.max_error
        if most is not None and isinstance(self.settings, DDPHook):
            raise ValueError("max_error takes a compression that checks itself, such as 'int8'; a hook does not")
        if most is not None and not (isinstance(most, (int, float)) and 0 < most < math.inf):
            raise ValueError(f"max_error must be a number above 0, such as 0.1, or None, got {most!r}")

    def check_weigh(self) -> None:
        """Raise GradientError where `weigh()` would leave out most of a gradient: nothing is kept with it."""
        if isinstance(self.settings, PowerSGD):
            raise GradientError("weigh() takes no compression='powersgd'; use 'int8' or 'bf16'")

    def check_parts(self, world: World) -> None:
        """Raise ValueError if groups with other parts of DTensors may compress what this one does not."""
        if world.shares_memory and not world.outer.shares_memory and not isinstance(self.settings, DDPHook):
            text = "takes DTensors if all groups cross machines, and this group lies on one; leave it out"
            raise ValueError(f"compression={self} {text}")

    def _say_that_nothing_is_compressed(self, world: World) -> None:
        if world.rank == 0:
            _logger.info("compression=%s: all ranks are on one host, so nothing is compressed", self)

    def open_all_reduce(self, world: World, choice: Choice, overlap: str) -> tuple[AllReduce[Any], Choice]:
        """Collective: as `select.open_all_reduce`, for gradients on the CPU."""
        if isinstance(self.settings, DDPHook):
            self.settings.check_group(world.members)
            return HookAllReduce(open_transport(world), self.settings, world.size), Choice("native", "a hook reduces")
        if world.shares_memory:
            self._say_that_nothing_is_compressed(world)
            return open_all_reduce(world, choice.algorithm, overlap), choice
        if choice.algorithm == "direct" or overlap == "inline":
            open_all_reduce(world, choice.algorithm, overlap)  # which says why not
        if isinstance(self.settings, PowerSGD):  # each rank computes the result. Its last bits depend on these.
            how = f"torch.get_num_threads()={torch.get_num_threads()} and {torch.backends.cpu.get_cpu_capability()}"
            internal_collectives_of(world).check_equal([f"how compression={self} computes: {how}"])
        transports: list[CompressingTransport] = []

        def opens(world: World, ranks: Sequence[int] | None = None) -> CompressingTransport:
            transports.append(CompressingTransport(open_transport(world, ranks), open_transport(world, ranks)))
            return transports[0]

        is_nested = choice.algorithm == "hierarchical"
        inner: Any = open_hierarchical(world, opens, _COLUMN_BYTES) if is_nested else NativeAllReduce(opens(world))
        reason = f"{choice.reason}; compressed by {self} between hosts"
        return CompressedAllReduce(inner, transports[0], self), choice._replace(reason=reason)

    def open_on_device(self, world: World, algorithm: str, overlap: str, specs: Any, accelerator: Any) -> Any:
        """Collective: as `opening.open_on_device`. Raises ValueError if gradients on a device cannot be compressed."""
        opens = partial(room("device all-reduces").open_on_device, world, algorithm, overlap)
        if isinstance(self.settings, DDPHook) or not (self.settings == "int8" or world.shares_memory):
            text = f"compression={self} takes gradients on the CPU; on a GPU, compression='int8' sends a quarter"
            raise in_step(ValueError(text))
        if world.shares_memory:
            self._say_that_nothing_is_compressed(world)
            return opens(specs, accelerator)
        from torchring.compression.on_device import CompressedOnStream

        return opens((), accelerator, partial(CompressedOnStream, self))  # () has "auto" not measure full precision

    def codec(self, contents: Contents, transport: CompressingTransport) -> Codec:
        if self.settings == "int8":
            return Int8Codec(contents, len(transport.ranks), transport.ranks.index(transport.rank))
        if isinstance(self.settings, PowerSGD):
            return PowerSGDCodec(contents, self.settings)
        return CustomCodec(contents, self.settings, len(transport.ranks))


def scheme_of(compression: object) -> Scheme:
    """The scheme for an argument of `wrap`, which `Scheme.check` has still to look at."""
    if isinstance(compression, Scheme):  # of an optimizer that is wrapped anew
        return compression
    return Scheme(PowerSGD() if compression == "powersgd" else compression)


class CompressedBuckets:
    """The buckets of an all-reduce whose sums between hosts are compressed, and what error feedback keeps of them."""

    def __init__(self, scheme: Scheme, transport: Any, codec: Callable[..., Codec], part: int | None = None) -> None:
        self.scheme, self._codec, self._part = scheme, codec, part
        self.transport = transport  # a `CompressingTransport`, or a `BetweenHosts`
        self.sampled: Any = None  # the wire of which `take` is called with the gradients of this rank
        self.take: Callable[[torch.Tensor], None]
        self._parts: list[tuple[Contents, Codec | None]] = []  # of all buckets

    @property
    def num_bytes(self) -> int:
        """That this rank sends between hosts in a reduction."""
        is_exact = self.transport.is_exact
        return sum(c.buffer.nbytes if is_exact or codec is None else codec.num_bytes for c, codec in self._parts)

    def lay_out(
        self, wires: Sequence[Any], plan: Plan, specs: Sequence[ParameterSpec], parameters: Any, *, num_kept: int
    ) -> None:
        """See `PlannedAllReduce`. Feedback moves to its new place."""
        self.keep(num_kept)
        for wire, bucket in zip(wires, plan.buckets, strict=True):
            buffer = next(getattr(wire, name) for name in ("own", "whole", "own_slice") if hasattr(wire, name))
            if not buffer.numel() or bucket.wire_dtype not in COMPRESSED:
                self._parts.append((Contents(bucket.index, buffer, (), buffer[:0]), None))
                continue
            parts = self.transport.parts[buffer.data_ptr()] = []
            for part in torch.split(buffer, self._part or buffer.numel()):
                first = (part.data_ptr() - wire.tensor.data_ptr()) // part.itemsize
                pieces = list(_pieces(bucket, specs, first, first + part.numel()))
                contents = Contents(bucket.index, part, pieces, part.new_zeros(part.numel(), dtype=torch.float32))
                _load(contents, self.scheme.kept)
                codec = self._codec(contents, self.transport)
                self._parts.append((contents, codec))
                parts.append((part.numel(), codec))
        self.scheme.kept.clear()

    def keep(self, num_kept: int = 0) -> None:
        """Have the scheme keep the feedback of all buckets but the first `num_kept`, which are not reduced any more."""
        while self._parts and self._parts[-1][0].index >= num_kept:
            contents, _ = self._parts.pop()
            self.transport.parts.pop(contents.buffer.data_ptr(), None)
            _add_feedback(contents, self.scheme.kept)

    def feedback(self) -> dict[str, torch.Tensor]:
        """A copy of what error feedback has kept, as `Scheme.kept`."""
        copies: dict[str, torch.Tensor] = {}
        for contents, _ in self._parts:
            _add_feedback(contents, copies)
        return copies

    def load_feedback(self, state: dict[str, torch.Tensor]) -> None:
        """The inverse of `feedback`."""
        for contents, _ in self._parts:
            contents.feedback.zero_()
            _load(contents, state)


class CompressedAllReduce(CompressedBuckets):
    """`native` or `hierarchical`, whose sums between hosts are compressed. See `AllReduce`."""

    def __init__(self, inner: NativeAllReduce | HierarchicalAllReduce, transport: Any, scheme: Scheme) -> None:
        super().__init__(scheme, transport, scheme.codec, scheme.part)
        self.algorithm, self.in_background = inner.algorithm, inner.in_background
        self.open_wires, self.abort_bucket, self.fail = inner.open_wires, inner.abort_bucket, inner.fail
        self._inner: AllReduce[Any] = inner

    def start(self, wire: Any) -> BucketWork:
        if wire is self.sampled:
            for number, (tensor, factor, _) in getattr(wire, "deferred", {}).items():  # the sum will pack them again
                torch.mul(tensor, factor, out=wire.blocks[number].own)
            self.take(wire.tensor)
        return self._inner.start(wire)

    def close(self) -> None:
        self._inner.close()
        self.keep()


def _load(contents: Contents, kept: dict[str, torch.Tensor]) -> None:
    for piece in contents.pieces:
        if (given := kept.get(piece.name)) is not None:
            contents.feedback_of(piece).copy_(given[piece.first : piece.first + piece.end - piece.begin])


def _add_feedback(contents: Contents, kept: dict[str, torch.Tensor]) -> None:
    for piece in contents.pieces:
        if piece.name not in kept:
            kept[piece.name] = torch.zeros(math.prod(piece.shape), dtype=torch.float32, device="cpu")
        kept[piece.name][piece.first : piece.first + piece.end - piece.begin] = contents.feedback_of(piece)


def _pieces(bucket: BucketPlan, specs: Sequence[ParameterSpec], begin: int, end: int) -> Iterator[Piece]:
    """The pieces of gradients in [begin, end) of a bucket."""
    for slot in bucket.slots:
        first, last = max(slot.offset, begin), min(slot.offset + slot.numel, end)
        if first < last:
            spec = specs[slot.parameter]
            dimensions = sorted(zip(spec.gradient_stride, spec.shape, strict=True), key=lambda each: -each[0])
            shape = (*(length for _, length in dimensions), *([2] if spec.dtype.is_complex else []))
            yield Piece(spec.name, shape, first - begin, last - begin, first - slot.offset)
