"""Transport over MPI (mpi4py): non-blocking collectives straight on the tensors' memory, in a communicator of its own.

A wait polls, because MPI has no deadlines and does not report a peer that is gone. Between two polls the wait gives its
core away. Now and then the wait checks that the peers on this host are alive, and asks the store whether a peer has
announced its end. MPI moves a large transfer inside its own calls, so a thread polls what nobody waits for yet.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch

from torchring.errors import FirstFailure, RingError, TopologyError
from torchring.memory.host import HostGroup
from torchring.rendezvous.rendezvous import Rendezvous
from torchring.threads import SerialThread
from torchring.transport.contract import closed, contiguous_bytes
from torchring.transport.diagnosis.culprit import Culprits

_T = TypeVar("_T")

# Small messages take 3 to 40 us, so at first a wait only yields the core. Then the wait sleeps, for a twentieth of the
# time waited so far. Sleeps are short, because MPI moves a large transfer piece by piece inside its own calls: the link
# must not be idle. Two ranks on two cores swap 16 KiB in 36 us (sleeping at once: 214), 1 MiB in 159 (325); waits of 20
# ms take 9% of a core.
_YIELD_SECONDS: Final = 2e-4
_SHORTEST_PAUSE_SECONDS: Final = 2e-5
_LONGEST_PAUSE_SECONDS: Final = 5e-4
_LOOK_SECONDS: Final = 0.05  # between two looks at the peers of this host, a system call
_LOOKS_PER_STORE_LOOK: Final = 5  # the store is asked by all waiting ranks
_LATE_SECONDS: Final = 0.2  # what a peer sent before it left may take this long to arrive

_SUMMED: Final = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.uint8: "UINT8_T",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.float16: "UINT16_T",  # MPI has no 16-bit floats, and adds them with `_added`
    torch.bfloat16: "UINT16_T",
}

_lock = threading.RLock()  # MPI may take one thread at a time, and no call of it waits
_open: weakref.WeakSet[MpiTransport] = weakref.WeakSet()
# (request, tensor) of transfers under way when their transport was closed: MPI may still read or write their memory.
_abandoned: list[tuple[Any, Sequence[torch.Tensor]]] = []


class MpiTransport:
    """See `Transport`. Opening it is collective.

    Args:
        rendezvous, name, host: see `Culprits`.
        ranks: the ranks to connect; by default all. Ranks may be in different groups, each in one.
        communicator: an mpi4py communicator of exactly the world's ranks, in the same order; COMM_WORLD by default. The
            transport makes a communicator of its own, so that other messages cannot match these transfers.
    """

    engine = "MPI"

    def __init__(
        self,
        rendezvous: Rendezvous,
        name: str,
        host: HostGroup | None = None,
        *,
        ranks: Sequence[int] | None = None,
        communicator: Any = None,
    ) -> None:
        self.rank = rendezvous.rank
        self.ranks = tuple(range(rendezvous.size) if ranks is None else ranks)
        self._timeout_seconds = rendezvous.timeout_seconds
        self._diagnosis = Culprits(rendezvous, name, host, self.ranks)
        self._under_way: set[MpiTransfer] = set()
        self._pid = os.getpid()
        self._failure = FirstFailure()
        self._is_closed = False
        self._poller = SerialThread(f"torchring-{name}-poller")
        # All ranks are known to be here, and to fit, before MPI waits for them.
        mpi, parent, problem = _load(communicator, rendezvous)
        problems = rendezvous.all_gather(f"transport/{name}", problem.encode())
        for other, text in enumerate(problems):
            if text:
                raise TopologyError(f"rank {other} {text.decode()}", rank=self.rank, peers=(other,))
        self._mpi = mpi
        self.mpi_error: type[Exception] = mpi.Exception
        with _lock:
            if is_whole := len(self.ranks) == parent.size:
                self._communicator, opening = parent.Idup()
            else:  # collective over these ranks alone
                of_parent = rendezvous.members or range(rendezvous.size)
                ranks = [of_parent[rank] for rank in self.ranks]
                self._communicator = parent.Create_group(parent.Get_group().Incl(ranks))
        if is_whole:
            MpiTransfer(self, opening, ()).wait()
        self._communicator.Set_errhandler(mpi.ERRORS_RETURN)
        _open.add(self)

    def sums(self, dtype: torch.dtype) -> bool:
        return dtype in _SUMMED

    def start_all_reduce(self, tensor: torch.Tensor) -> MpiTransfer:
        mpi = self._mpi
        operation = _added(tensor.dtype) if tensor.dtype.itemsize == 2 and tensor.is_floating_point() else mpi.SUM
        # Not the blocking call, which is faster (64 MiB: 31 against 55 ms) but has no timeout and cannot be left.
        data = [self._buffer(tensor), tensor.numel(), getattr(mpi, _SUMMED[tensor.dtype])]
        return self._start(lambda: self._communicator.Iallreduce(mpi.IN_PLACE, data, operation), tensor)

    def start_nothing(self, tensor: torch.Tensor) -> MpiTransfer:
        return self.start_all_reduce(torch.zeros_like(tensor))

    def start_all_to_all(self, output: torch.Tensor, tensor: torch.Tensor) -> MpiTransfer:
        share = len(tensor[0])
        source, target = ([self._buffer(each), share, self._mpi.BYTE] for each in (tensor, output))
        return self._start(lambda: self._communicator.Ialltoall(source, target), tensor, output)

    def start_all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> MpiTransfer:
        source, target = ([self._buffer(each), len(tensor), self._mpi.BYTE] for each in (tensor, output))
        return self._start(lambda: self._communicator.Iallgather(source, target), tensor, output)

    def start_broadcast(self, tensor: torch.Tensor, src: int) -> MpiTransfer:
        data, place = contiguous_bytes(tensor), self.ranks.index(src)
        return self._start(lambda: self._communicator.Ibcast(self._buffer(data), place), data)

    def fail(self, error: RingError) -> RingError:
        if self._failure.set(error):
            self._diagnosis.report(error)
        self.close()
        return error

    def close(self) -> None:
        if os.getpid() != self._pid:  # a forked child: transfers are the parent's
            self._is_closed = True
            return
        with _lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._poller.close()
            if self._mpi.Is_finalized():  # by the script; no function of MPI may be called any more
                return
            under_way, self._under_way = self._under_way, set()
            left = [transfer for transfer in under_way if not transfer.has_ended()]
            _abandoned.extend((transfer.request, transfer.data) for transfer in left)
            # Open MPI crashes if a communicator is freed during a collective. After a failure, messages that nobody has
            # received may still come in. In both cases the communicator stays until the process ends.
            if not left and self._failure.error is None:
                with contextlib.suppress(self._mpi.Exception):
                    self._communicator.Free()
        self._diagnosis.say_goodbye()

    def is_done(self, transfer: MpiTransfer) -> bool:
        """Does not wait. Raises if the transport was closed meanwhile, or MPI says that the transfer failed."""
        with _lock:
            if transfer.is_done:
                return True
            self._check_open()
            if not self._guard(transfer.request.Test):
                return False
            transfer.is_done = True
            self._under_way.discard(transfer)
        return True

    def wait_for(self, transfer: MpiTransfer) -> None:
        """Poll, yielding the core, until the transfer is done. Raises if it cannot be done."""
        started = time.monotonic()
        num_looks = 0
        error: RingError | None = None
        until = self._timeout_seconds
        while not self.is_done(transfer):
            waited = time.monotonic() - started
            if waited < _YIELD_SECONDS:
                os.sched_yield()
                continue
            if waited > until and error is not None:
                raise self.fail(self._diagnosis.signed(error, waited))
            if waited > until:
                self._diagnosis.suspect(timed_out=True)
                raise self.fail(self._diagnosis.explain(waited, timed_out=True))
            if waited > (num_looks + 1) * _LOOK_SECONDS and error is None:
                num_looks += 1
                error = self._trouble(asks_the_store=num_looks % _LOOKS_PER_STORE_LOOK == 0)
                if error is not None:
                    until = waited + _LATE_SECONDS
            time.sleep(min(max(waited / 20, _SHORTEST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS))

    def _trouble(self, *, asks_the_store: bool) -> RingError | None:
        """The reason why a wait may never end. None if no reason is known."""
        suspects = [rank for rank in self.ranks if rank != self.rank]
        error = self._diagnosis.seen_by_the_host(suspects)
        return self._diagnosis.heard_from(suspects) if error is None and asks_the_store else error

    def _start(self, operation: Callable[[], Any], *data: torch.Tensor) -> MpiTransfer:
        with _lock:
            self._check_open()
            request = self._guard(operation) if data[0].numel() else self._mpi.REQUEST_NULL
            transfer = MpiTransfer(self, request, data)
            self._under_way.add(transfer)
        self._poller.submit(transfer.poll)
        return transfer

    def _check_open(self) -> None:
        if self._is_closed or self._failure.error is not None:  # another thread may be about to close it
            raise closed(self._failure.error, self.rank)

    def _guard(self, operation: Callable[[], _T]) -> _T:
        """Run `operation`. Turn an error of MPI into a RingError that names its cause, and close the transport."""
        try:
            return operation()
        except self._mpi.Exception as failure:
            error = self._trouble(asks_the_store=True) or RingError(f"MPI reports {failure}")
            raise self.fail(self._diagnosis.signed(error, 0.0)) from failure

    def _buffer(self, data: torch.Tensor) -> Any:
        """The tensor's memory as mpi4py takes it: counted in bytes unless the call names a type."""
        return self._mpi.memory.fromaddress(data.data_ptr(), data.numel() * data.element_size())


class MpiTransfer:
    """See `Transfer`. `data` is the memory that MPI reads or writes."""

    def __init__(self, transport: MpiTransport, request: Any, data: Sequence[torch.Tensor]) -> None:
        self.request = request
        self.data = data
        self.is_done = False
        self._transport = transport

    def wait(self) -> None:
        self._transport.wait_for(self)

    def poll(self) -> None:
        """Have MPI move the transfer, until the transfer is done or broken. `wait` says why it broke."""
        with contextlib.suppress(RingError):
            while not self._transport.is_done(self):
                time.sleep(_LONGEST_PAUSE_SECONDS)

    def has_ended(self) -> bool:
        """Whether MPI has finished with its memory. A collective cannot be cancelled."""
        try:
            return bool(self.request.Test())
        except self._transport.mpi_error:  # the link is broken already
            return False


@functools.cache
def _added(dtype: torch.dtype) -> Any:
    """MPI's operation that adds values of a 16-bit floating-point dtype, rounding each sum once."""
    from mpi4py import MPI as mpi  # noqa: N811  # as a value, not a constant

    def add(source: Any, target: Any, _: object) -> None:
        torch.frombuffer(target, dtype=dtype).add_(torch.frombuffer(source, dtype=dtype))

    return mpi.Op.Create(add, commute=True)


@atexit.register
def _say_goodbye() -> None:
    """MPI_Finalize comes later and waits for all ranks. Ranks that wait for this rank must learn that it stops."""
    for transport in list(_open):
        transport.close()


def _load(communicator: Any, rendezvous: Rendezvous) -> tuple[Any, Any, str]:
    """mpi4py.MPI, the communicator, and a reason why they cannot be used ("" if they can)."""
    try:
        from mpi4py import MPI as mpi  # noqa: N811  # as a value, not a constant
    except (ImportError, RuntimeError, OSError) as error:  # mpi4py is missing, or finds no MPI library
        return None, None, f"cannot load MPI ({error}); pip install torchring[mpi]"
    if not mpi.Is_initialized() or mpi.Is_finalized():
        return None, None, "has not initialised MPI, or has finalised it already"
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        return None, None, "has initialised MPI for one thread only; set mpi4py.rc.thread_level = 'multiple'"
    parent = mpi.COMM_WORLD if communicator is None else communicator
    rank, size = rendezvous.rank, rendezvous.size
    if (parent.rank, parent.size) == (rank, size) or parent.rank in rendezvous.members[rank : rank + 1]:
        return mpi, parent, ""
    problem = (
        f"of this world of {rendezvous.size} is rank {parent.rank} of {parent.size} in MPI; start all ranks with one "
        "mpirun, and let nothing else set RANK and WORLD_SIZE"
    )
    return None, None, problem
