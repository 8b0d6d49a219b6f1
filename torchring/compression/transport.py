"""A transport whose all-reduce compresses: `native` and `hierarchical` use it as they use any other.

A buffer passes three threads: one compresses it and starts a collective; one waits and starts the second collective,
through another transport; one waits and decodes. So the network is busy while buffers are coded.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from weakref import WeakKeyDictionary

import torch

from torchring.allreduce.contract import BucketWork
from torchring.allreduce.threaded import WorkOnThread
from torchring.compression.codec import AsItIs, Codec
from torchring.errors import FirstFailure, RingError
from torchring.threads import SerialThread
from torchring.transport.contract import Transfer, Transport


class CompressingTransport:
    """See `Transport`. Sums the buffers for which it has a codec in a compressed form, and others as they are."""

    def __init__(self, first: Transport, second: Transport) -> None:
        # By address of the buffer: the elements of each part of it, and the codec
        self.parts: dict[int, Sequence[tuple[int, Codec]]] = {}
        self.is_exact = False  # nothing is compressed for now; on all ranks alike
        self.weight = 1.0  # of this rank in the reduction under way
        self.rank, self.ranks, self.engine, self.sums = first.rank, first.ranks, first.engine, first.sums
        self.start_broadcast = first.start_broadcast
        self.start_all_to_all, self.start_all_gather = first.start_all_to_all, first.start_all_gather
        self._first, self._second = first, second
        self._beginning, self._going_on = SerialThread("torchring-compresses"), SerialThread("torchring-adds")
        self._ending = SerialThread("torchring-decodes")
        self._failure = FirstFailure()
        self._error: BaseException | None = None  # the first on the threads, of a script's compressor, for example
        self._traceback: TracebackType | None = None  # of that: raising it again would make it longer
        self._prepared = WeakKeyDictionary[Codec, Future[None]]()  # codecs of an old plan are dropped

    def start_all_reduce(self, tensor: torch.Tensor) -> BucketWork:
        return self._start_parts(tensor, tensor, self.weight)

    def start_nothing(self, tensor: torch.Tensor) -> BucketWork:
        return self._start_parts(tensor, torch.zeros_like(tensor), 0.0)

    def _start_parts(self, buffer: torch.Tensor, tensor: torch.Tensor, weight: float) -> BucketWork:
        """Sum `tensor`, in place of `buffer`."""
        parts: Sequence[tuple[int, Codec]] = [(tensor.numel(), AsItIs())]
        if not self.is_exact and buffer.numel():
            parts = self.parts.get(buffer.data_ptr(), parts)
        tensors = torch.split(tensor, [length for length, _ in parts])
        return [self._start(each, weight, codec) for each, (_, codec) in zip(tensors, parts, strict=True)][-1]

    def _start(self, tensor: torch.Tensor, weight: float, codec: Codec) -> BucketWork:
        transfers: list[Transfer] = []
        prepared = self._prepared.pop(codec, None)

        def begin() -> None:
            if prepared is not None:
                prepared.result()
            transfers.append(codec.begin(tensor, weight, self._first))

        def go_on() -> None:
            begun.wait()
            transfers.append(codec.go_on(tensor, weight, transfers.pop(), self._second))

        def end() -> None:
            gone_on.wait()
            codec.end(tensor, weight, transfers.pop())

        begun = self._submit(self._beginning, begin)
        gone_on = self._submit(self._going_on, go_on)
        work = self._submit(self._ending, end)
        self._prepared[codec] = self._ending.submit(codec.prepare)
        return work

    def _submit(self, thread: SerialThread, part: Callable[[], None]) -> WorkOnThread:
        return WorkOnThread(thread, partial(self._run, part), self._failure, self.fail)

    def _run(self, part: Callable[[], None]) -> None:
        if self._error is not None:  # send nothing: other ranks would take it for what this rank has not sent
            raise self._error.with_traceback(self._traceback)
        try:
            part()
        except BaseException as error:
            self._error, self._traceback = error, error.__traceback__
            raise

    def fail(self, error: RingError) -> RingError:
        self._failure.set(error)
        self._second.fail(error)
        return self._first.fail(error)

    def close(self) -> None:
        for each in (self._beginning, self._going_on, self._ending, self._first, self._second):
            each.close()
