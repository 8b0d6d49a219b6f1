"""int8 between hosts on devices, with the shares, messages and feedback of `int8.py`. The host waits for none of it.

quantize the others' shares -> all-to-all -> add up the own share, quantize the sum -> all-gather -> decode
"""

from typing import Any

import torch

from torchring.compression.codec import ROW, Contents
from torchring.compression.int8 import Int8Codec
from torchring.compression.schemes import CompressedBuckets, Scheme
from torchring.devices.cuda import Backend
from torchring.devices.engines import DeviceWire, Engine, all_gather, all_reduce, all_to_all
from torchring.devices.stream import OnStream
from torchring.kernels.quantize import prepare_decode, prepare_quantize


class Int8OnDevice(Int8Codec):
    """An `Int8Codec` whose launches are prepared."""

    def __init__(self, contents: Contents, between: "BetweenHosts") -> None:
        super().__init__(contents, len(between.ranks), between.rank)
        places = torch.tensor([[0], [0], [-1], [ROW]], dtype=torch.int32, device="cpu").repeat(1, len(self._feedback))
        for part in self._sent_parts:
            codes, scales, values = (int(each.storage_offset()) for each in (part.codes, part.scales, part.values))
            rows = torch.arange(part.end - part.begin, dtype=torch.int32, device="cpu")
            places[0, part.begin : part.end] = codes // 16 + rows * (ROW // 16)
            places[1, part.begin : part.end] = scales + rows
            places[2, part.exact] = values // 4 + rows[: len(part.exact)] * (ROW // 4)
        for piece in contents.pieces:
            places[3, (piece.end - 1) // ROW] = (piece.end - 1) % ROW + 1
        places, own = places.to(contents.buffer.device), self._sent_parts[between.rank]
        sides = (self._sent, ()), (self._received, (between.rank, len(between.ranks)))
        self._launches = [  # by weight
            [prepare_quantize(contents.buffer, side, places, kept, (own.begin, own.end), *add) for side, add in sides]
            for kept in (None, contents.feedback)
        ]
        self._decode = prepare_decode(contents.buffer, self._sent, places)

    def launch(self, backend: Backend, weight: float) -> None:
        """Replace the buffer by the sum, with the same bits on all ranks, on the current stream."""
        quantize, add_up = self._launches[int(weight)]
        quantize()
        all_to_all(backend, self._received, self._sent)
        add_up()
        all_gather(backend, self._sent.view(-1), self._received[self._place])
        self._decode()


class BetweenHosts:
    """Sums up this rank's slices between hosts: those that have a codec in int8, and others as they are."""

    def __init__(self, backend: Backend | None) -> None:
        self.parts: dict[int, list[tuple[int, Int8OnDevice]]] = {}  # this and the next two as in `CompressingTransport`
        self.is_exact, self.weight = False, 1.0
        self._backend: Any = backend  # None on a rank that has no slices
        self.rank, self.ranks = (0, range(1)) if backend is None else (backend.rank(), range(backend.size()))

    def __call__(self, own_slice: torch.Tensor) -> None:
        if self.is_exact or (parts := self.parts.get(own_slice.data_ptr())) is None:
            all_reduce(self._backend, own_slice)
        else:
            parts[0][1].launch(self._backend, self.weight)


class CompressedOnStream(CompressedBuckets, OnStream):
    """An `OnStream` whose sums between hosts are compressed."""

    def __init__(self, scheme: Scheme, engine: Engine, *args: Any, **options: Any) -> None:
        CompressedBuckets.__init__(self, scheme, BetweenHosts(engine.backend), Int8OnDevice)
        engine.between_hosts = self.transport
        engine.group.note += f"; compressed by {scheme} between hosts"
        OnStream.__init__(self, engine, *args, **options)

    def start(self, wire: DeviceWire) -> OnStream:
        if wire is self.sampled:
            self.stream.run(lambda: self.take(wire.tensor))
        return super().start(wire)

    def close(self) -> None:
        super().close()
        if not int(self.engine.abort_word):  # else messages that never came are in it
            self.keep()
