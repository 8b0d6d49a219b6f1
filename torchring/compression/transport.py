"""A transport whose all-reduce compresses: `native` and `hierarchical` use it as they use any other.

One thread compresses a buffer and starts its first collective. Another thread waits, decodes, and does what else is to
be sent, through a second transport. So the network is busy with a bucket while the bucket before is decoded.
"""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from weakref import WeakKeyDictionary

import torch

from torchring.allreduce.contract import BucketWork
from torchring.allreduce.threaded import WorkOnThread
from torchring.compression.codec import Codec
from torchring.errors import FirstFailure, RingError
from torchring.threads import SerialThread
from torchring.transport.contract import Transfer, Transport


class CompressingTransport:
    """See `Transport`. Sums the buffers for which it has a codec in a compressed form, and others as they are."""

    def __init__(self, first: Transport, second: Transport) -> None:
        self.codecs: dict[int, Codec] = {}  # by address of the buffer
        self.is_exact = False  # nothing is compressed for now; on all ranks alike
        self.weight = 1.0  # of this rank in the reduction under way
        self.rank, self.ranks, self.engine, self.sums = first.rank, first.ranks, first.engine, first.sums
        self.start_broadcast = first.start_broadcast
        self.start_all_to_all, self.start_all_gather = first.start_all_to_all, first.start_all_gather
        self._first, self._second = first, second
        self._starting, self._ending = SerialThread("torchring-compresses"), SerialThread("torchring-decodes")
        self._failure = FirstFailure()
        self._error: BaseException | None = None  # the first on the threads, of a script's compressor, for example
        self._prepared = WeakKeyDictionary[Codec, Future[None]]()  # codecs of an old plan are dropped

    def start_all_reduce(self, tensor: torch.Tensor) -> BucketWork:
        return self._start(tensor, self.weight, self._codec_of(tensor))

    def start_nothing(self, tensor: torch.Tensor) -> BucketWork:
        return self._start(torch.zeros_like(tensor), 0.0, self._codec_of(tensor))

    def _codec_of(self, tensor: torch.Tensor) -> Codec | None:
        return None if self.is_exact or not tensor.numel() else self.codecs.get(tensor.data_ptr())

    def _start(self, tensor: torch.Tensor, weight: float, codec: Codec | None) -> BucketWork:
        started: list[Transfer] = []
        prepared = None if codec is None else self._prepared.pop(codec, None)

        def begin() -> None:
            if codec is None:
                started.append(self._first.start_all_reduce(tensor))
                return
            if prepared is not None:
                prepared.result()
            started.append(codec.begin(tensor, weight, self._first))

        def end() -> None:
            begun.wait()
            if codec is None:
                started.pop().wait()
            else:
                codec.end(tensor, weight, started.pop(), self._second)

        begun = WorkOnThread(self._starting, partial(self._run, begin), self._failure, self.fail)
        work = WorkOnThread(self._ending, partial(self._run, end), self._failure, self.fail)
        if codec is not None:
            self._prepared[codec] = self._ending.submit(codec.prepare)
        return work

    def _run(self, part: Callable[[], None]) -> None:
        if self._error is not None:  # send nothing: other ranks would take it for what this rank has not sent
            raise self._error
        try:
            part()
        except BaseException as error:
            self._error = error
            raise

    def fail(self, error: RingError) -> RingError:
        self._failure.set(error)
        self._second.fail(error)
        return self._first.fail(error)

    def close(self) -> None:
        for each in (self._starting, self._ending, self._first, self._second):
            each.close()
