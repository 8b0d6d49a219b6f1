"""Reducing in a stream of a device.

`OnStream` puts each bucket into its stream, behind the work that the stream has been given before. `wait` has the
current stream wait for the last of them; the host waits for nothing. What ranks compare, they compare on the host: see
`gradients/agreement.py`. What the stream is given comes from an engine: see `engines.py`.
"""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from torchring.devices.cuda import CudaMark, span
from torchring.devices.engines import DeviceWire, Engine, Launch
from torchring.devices.watchdog import DeviceWatchdog
from torchring.errors import FirstFailure, PeerLostError, RingError
from torchring.kernels.pack import NOT_FOUND
from torchring.world import World


class Dated(NamedTuple):
    """Where the all-reduce of a bucket begins and ends in its stream."""

    begin: CudaMark
    end: CudaMark


class OnStream:
    """Runs an engine in a stream of its own. See `AllReduce`; used by one thread, except `fail`.

    Buckets are done in order, and one wait is enough for all. So this is also the `BucketWork` of each bucket.
    """

    span = None

    def __init__(
        self,
        engine: Engine,  # launches the all-reduces
        world: World,  # the ranks that reduce together
        *,
        in_background: bool,  # backward goes on meanwhile. If False, the current stream waits for each bucket.
        # a method that returns an error if a rank of another host is gone. Called from another thread.
        lost_afar: Callable[[], RingError | None] | None = None,
    ) -> None:
        self.algorithm = engine.algorithm
        self.in_background = in_background
        self.accelerator = engine.accelerator
        # Buckets are reduced on it. The code that packs them makes this stream wait.
        self.stream = self.accelerator.open_stream()
        self.is_dated = False  # whether to mark where each bucket begins and ends
        self.engine = engine
        self._failure = FirstFailure()
        self.check = self._failure.raise_if_set  # raises the failure that ended this all-reduce, if there was any
        # Of the wires of a reduction; see `DeviceWire.report`. They are fetched and cleared at its end.
        self.reports: list[torch.Tensor] = []
        self._dated: list[Dated] = []  # since `take_dated`
        self._fetched: list[torch.Tensor] = []  # since `take_fetched`
        self._spare: dict[torch.Size, list[torch.Tensor]] = {}  # in pinned memory, which takes long to allocate
        self._started: list[DeviceWire] = []  # since `_end`
        self._guarded: list[DeviceWire] = []  # those that `_guard` is for
        self._guard: Launch | None = None
        self._end: CudaMark | None = None  # of `stream`, when somebody waited for it last
        self._held: set[object] = set()  # the streams that wait for `_end`
        self._world = world
        find_fault = self.accelerator.find_fault
        self._watchdog = DeviceWatchdog(self, world.host, world.timeout_seconds, lost_afar, find_fault)

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> Sequence[DeviceWire]:
        self.check()
        return self.engine.open_wires(specs)

    def start(self, wire: DeviceWire) -> "OnStream":
        """See `AllReduce.start`. The bucket comes after the work that `stream` was given before.

        Work of other streams is not waited for: call `stream.follow` first, or hold `stream` for a mark.
        """
        self.check()
        begin = self.stream.mark() if self.is_dated else None
        with span("torchring.{} bucket {}, {:.2f} MiB", self.algorithm, wire.row, wire.buffer.nbytes / 2**20):
            self.stream.run(partial(self.engine.launch, wire))
        if begin is not None:
            self._dated.append(Dated(begin, self.stream.mark()))
        self._started.append(wire)
        self._watchdog.started()
        if not self.in_background:
            self.stream.mark().hold_current()
        return self

    def advance(self, *, waits: bool = False) -> bool:
        """The device does this rank's part."""
        return True

    def wait(self) -> None:
        """Have the current stream wait for what was started so far; the host does not wait.

        The stream then also waits until reports are cleared, which later work may write to.
        """
        if self._started:
            self._end_reduction()
        self.hold_for_earlier()

    def _end_reduction(self) -> None:
        self.stream.run(self._launch_end)
        self._end = self.stream.mark()
        self._held.clear()

    def _launch_end(self) -> None:
        if self._started and self._started != self._guarded:
            self._guarded, self._guard = self._started, self.engine.guard(self._started)
        self._started = []
        if self._guard is not None:
            self._guard()
        for report in self.reports:
            spare = self._spare.get(report.shape)
            self._fetched.append(self.accelerator.fetch(report, spare.pop() if spare else None))
            report.fill_(NOT_FOUND)
            self.seal(self._fetched[-1])

    def hold_for_earlier(self) -> None:
        """Have the current stream wait for what another stream has waited for. Costs nothing if it did so before."""
        current = self.accelerator.current_stream()
        if self._end is not None and current not in self._held:
            self._end.hold_current()
            self._held.add(current)

    def run(self, work: Callable[[], None], report: torch.Tensor) -> None:
        """Run `work`, which is no all-reduce, in `stream`, between reductions. The current stream waits for it.

        Kernels of the work may wait for other ranks. `report` is on the device, and holds no -1.
        """
        self.check()
        fetched: list[torch.Tensor] = []

        def run() -> None:
            work()
            fetched.append(self.accelerator.fetch(report))

        self.stream.follow()
        self._watchdog.started()
        self.stream.run(run)
        self.seal(fetched[0])
        self.stream.mark().hold_current()

    def seal(self, fetched: torch.Tensor) -> None:
        """All of a reduction has been started. `CudaAccelerator.fetch` was called behind it, and gave `fetched`."""
        self._watchdog.sealed(fetched)

    def settle(self) -> None:
        """The caller has waited for all buckets, which belong to no reduction."""
        self.seal(torch.zeros(1, dtype=torch.int32, device="cpu"))

    def take_dated(self) -> list[Dated]:
        """The buckets that were dated since the last call."""
        dated, self._dated = self._dated, []
        return dated

    def take_fetched(self) -> list[torch.Tensor]:
        """Copies of `reports` as they were at the end of each reduction since the last call."""
        fetched, self._fetched = self._fetched, []
        return fetched

    def clear_reports(self) -> None:
        """Nobody wants to know of what was packed and reduced so far, in a reduction that was aborted."""
        self.stream.follow()
        self._end_reduction()
        self.hold_for_earlier()
        self.take_fetched()

    def forget_wires(self, wires: Sequence[DeviceWire]) -> None:
        """Collective: the device has finished all reductions, of these wires, which are about to be replaced."""
        self.reports, self._guarded, self._guard = [], [], None
        self.engine.release(wires)

    def give_back(self, fetched: Sequence[torch.Tensor]) -> None:
        """These copies have come, and are not looked at any more."""
        self._watchdog.forget_finished()
        for copy in fetched:
            self._spare.setdefault(copy.shape, []).append(copy)

    def fail(self, error: RingError) -> None:
        if self._failure.set(error):
            self.engine.abort()

    def lose_device(self, fault: str) -> None:
        """The device has failed for good. Ranks that wait for this one would not see it: its process lives."""
        rank = self._world.rank
        text = f"the GPU of rank {rank} has failed: {fault}; a new process may be able to use it"
        error = PeerLostError(text, rank=rank, peers=(rank,))
        self._world.fail(error)
        self.fail(error)

    def finish(self) -> None:
        """Wait until the device has finished the reductions that were sealed, and end one that was aborted.

        Peers' devices wait for this device. If it left when the process ends, peers would find it dead, and its last
        reduction would leave NaN behind.
        """
        failed_before = self._failure.error is not None
        if self._watchdog.is_open:
            self.fail(PeerLostError("a reduction was aborted", rank=self._world.rank, peers=(self._world.rank,)))
        elif self._watchdog.is_pending() and not failed_before:
            self.accelerator.synchronize()
            if self._failure.error is not None:
                text = f"results of the last reduction became NaN, and what was made of them: {self._failure.error}"
                warnings.warn(text, RuntimeWarning, stacklevel=2)

    def leave(self) -> None:
        """The script ends without closing."""
        self.finish()
        self.engine.abort()

    def close(self) -> None:
        self.finish()
        self._watchdog.close()
        self.engine.close()
        with contextlib.suppress(RuntimeError):  # of a device that has failed, which gives nothing back
            self.accelerator.synchronize()
            self.forget_wires(())
            self.engine.forget_peers()
