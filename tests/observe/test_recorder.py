"""What the recorder writes down of real steps, and when the trace is written."""

import copy
import dataclasses
import itertools
import logging
import os
import pickle
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import torchring
from tests.support.harness import ranks, run_ranks
from tests.support.traces import decoded, write
from torchring import default_world as world_module
from torchring.observe import TRACE, loading
from torchring.observe.inputs import ForwardWatch
from torchring.observe.recorder import recorder as recorder_module
from torchring.observe.recorder import writer
from torchring.observe.recorder.clocks import estimate, measure
from torchring.observe.recorder.files import find, path_of, read
from torchring.observe.recorder.recorder import Recorder
from torchring.observe.recorder.records import ClockOffset, RankTrace, StepRecord
from torchring.observe.recorder.writer import recorder_of
from torchring.observer import BACKWARD, BETWEEN, EXPOSED, FORWARD, INPUT, OPTIMIZER, Observers, Phase
from torchring.report.model.merge import load

SIZES = (300, 300, 300)  # 360 kB a layer: copied on arrival


class Clock:
    """A clock that a test sets, in place of the time module."""

    def __init__(self) -> None:
        self.now = 0

    def perf_counter_ns(self) -> int:
        return self.now

    def thread_time_ns(self) -> int:
        return 2 * self.now

    def time(self) -> float:
        return 1.8e9


def steps_of(recorder: Recorder) -> tuple[StepRecord, ...]:
    return decoded(*recorder.trace()).steps


def test_the_recorder_keeps_the_parts_of_the_last_thousand_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(recorder_module, "time", clock)
    recorder = Recorder()
    for number in range(1003):
        for part, begin in ((FORWARD, 5), (BACKWARD, 9), (BACKWARD, 11), (EXPOSED, 20), (BETWEEN, 30), (OPTIMIZER, 31)):
            clock.now = 100 * number + begin
            recorder.phase(part, 0)
        recorder.num_samples += 8
        recorder.add_reduction([0, 64, 1, 2, 3, 4, 0], 7, 6)
        clock.now = 100 * (number + 1)
        recorder.end_step(number)
    steps = steps_of(recorder)
    assert [step.number for step in steps] == list(range(3, 1003))
    last = steps[-1]
    assert (last.begin, last.end, last.num_samples, last.stall_ns, last.packing_ns) == (100_200, 100_300, 8, 7, 6)
    assert [last.ns_in(part) for part in Phase] == [5, 4, 11, 0, 10, 1, 69]
    assert last.exposed_ns == 17
    assert (recorder.num_steps, recorder.num_bytes, recorder.num_samples_before) == (1003, 64 * 1003, 8 * 1003)
    # Very many micro-steps, or a script that makes no step, do not fill the memory.
    for i in range(100_000):
        clock.now += 10
        recorder.phase(FORWARD, 0)
        recorder.phase(BACKWARD, 0)
        if i < 20_000:
            recorder.add_reduction([0] * 70, 0, 0)
    assert len(recorder._buckets) < 60_000
    recorder.end_step(1003)
    step = steps_of(recorder)[-1]
    assert len(step.phases) < 2000
    assert sum(step.ns_in(part) for part in Phase) == step.end - step.begin


def test_the_recorder_knows_how_long_its_thread_had_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says in how many slices of time a thread had a core; a thread that asks had one at least."""
    queued_ns, num_slices = 100, 1
    monkeypatch.setattr(os, "pread", lambda *_: f"5 {queued_ns} {num_slices}\n".encode())
    recorder = Recorder()

    def run_step() -> tuple[int, int]:
        nonlocal queued_ns
        for part in (FORWARD, BACKWARD, EXPOSED, BETWEEN, OPTIMIZER):
            queued_ns += part  # 4 of them before EXPOSED begins, and 5 until it ends
            recorder.phase(part, 0)
        recorder.end_step(recorder.num_steps)
        step = steps_of(recorder)[-1]
        return step.queued_ns, step.exposed_queued_ns

    assert run_step() == (-1, -1), "nothing is known of what was before"
    assert run_step() == (18, 5)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run_step).result() == (-1, -1), "these are numbers of another thread"
    num_slices = 0
    assert run_step() == (-1, -1), "the kernel does not count"


def test_the_recorder_knows_the_line_of_the_script_that_is_run() -> None:
    recorder = Recorder()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(recorder.sample).result()
        recorder.end_step(0)
        pool.submit(recorder.sample).result()  # in a step that is not in the trace
    ((step, phase, line),) = recorder.trace()[0].samples
    assert (step, phase) == (0, INPUT)
    assert re.fullmatch(r".*test_recorder\.py:\d+ \(pool\.submit\(recorder\.sample\)\.result\(\)\)", line)


class _Nested(torch.utils.data.Dataset[int]):
    """Reads a batch of another DataLoader for each sample. Each look at the clock takes 1 ns."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        self.clock.now += 50
        return int(next(iter(DataLoader([index]))))


def test_time_in_a_data_loader_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, recorder = Clock(), Recorder()
    monkeypatch.setattr(loading, "time", clock)
    before = torch.utils.data.dataloader._BaseDataLoaderIter.__next__
    loading.watch(recorder.loading)
    batches = iter(DataLoader(_Nested(clock), batch_size=1))
    next(batches)
    recorder.phase(BETWEEN, 0)
    next(batches)  # the rank would pass this time anyway
    recorder.end_step(recorder.num_steps)
    iter(DataLoader(_Nested(clock)))  # gives no batch yet
    elsewhere = threading.Thread(target=next, args=(batches,))
    elsewhere.start()
    elsewhere.join()
    recorder.end_step(recorder.num_steps)
    next(batches)
    next(batches, None)
    recorder.end_step(recorder.num_steps)
    found = [(step.loading_ns, step.loading_cpu_ns, step.num_workers) for step in steps_of(recorder)]
    assert found == [(50, 100, 0), (0, 0, -1), (50, 100, 0)]
    loading.forget(recorder.loading)
    assert torch.utils.data.dataloader._BaseDataLoaderIter.__next__ is before


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(size, size) for size in SIZES))


def _train(options: dict[str, Any], micros: int) -> tuple[RankTrace, int, list[float]]:
    model, recorder = _model(), recorder_of(torchring.init())
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model, **options)
    for _ in range(8):
        optimizer.zero_grad()
        for _ in range(micros):
            model(torch.ones(5, SIZES[0])).square().mean().backward()
        with torch.no_grad():
            model(torch.ones(7, SIZES[0]))  # no part of training
        optimizer.step()
    return decoded(*recorder.trace()), optimizer.stats().bytes_per_step, list(torchring.metrics().values())


@pytest.mark.parametrize(
    ("options", "micros"),
    [({"bucket_mb": 0.5}, 1), ({"accumulate": 2}, 2), ({"algorithm": "native", "overlap": "thread"}, 1)],
    ids=str,
)
@ranks(2)
def test_real_steps(options: dict[str, Any], micros: int, rank: int) -> None:
    trace, bytes_per_step, metrics = _train(options, micros)
    run_info = trace.run_info
    assert (run_info.rank, run_info.size, run_info.host != "", run_info.pid > 0) == (rank, 2, True, True)
    assert run_info.algorithm == options.get("algorithm", "direct")
    names = [f"{i}.{k}" for i in range(3) for k in ("weight", "bias")]
    assert [parameter.name for parameter in run_info.parameters] == names
    num_buckets = 1 + max(parameter.bucket for parameter in run_info.parameters)
    assert [step.number for step in trace.steps] == list(range(8))
    for before, step in itertools.pairwise(trace.steps):
        assert before.end == step.begin
        kinds = [part.phase for part in step.phases]
        assert kinds == [INPUT, FORWARD, BACKWARD] * micros + [EXPOSED, BETWEEN, OPTIMIZER]
        assert step.num_samples == 5 * micros
        assert step.num_bytes == bytes_per_step
        assert [bucket.index for bucket in step.buckets] == list(range(num_buckets))
        (backward,) = (part for part in step.phases[-4:] if part.phase == BACKWARD)
        for bucket in step.buckets:
            assert backward.begin < bucket.ready <= bucket.launched <= bucket.started
            assert bucket.started <= bucket.reduced <= step.phases[-2].begin
        assert 0 <= step.stall_ns <= step.ns_in(Phase.BACKWARD)
        assert step.packing_ns > 0
    assert len(trace.arrivals) == 4
    for arrivals in trace.arrivals:
        ready = [arrivals.ready_ns[2 * layer] for layer in range(3)]  # of the weights
        assert arrivals.backward_ns >= ready[0] > ready[1] > ready[2] > 0
    own, size, num_steps, num_samples, num_bytes, per_s, samples_per_s, seconds, *parts, exposed = metrics
    num_counted = 7 * 5 * micros  # hooks come with the first step
    assert (own, size, num_steps, num_samples) == (rank, 2, 8, num_counted)
    assert num_bytes == 8 * bytes_per_step >= 8 * 4 * 3 * 90_300
    assert (per_s * seconds, samples_per_s / per_s) == (pytest.approx(1), pytest.approx(num_counted / 8))
    assert sum(parts) + exposed == pytest.approx(seconds)
    assert all(part > 0 for part in parts)


def test_a_world_of_one() -> None:
    trace, _, values = _train({"on_nonfinite": "skip"}, 1)
    assert [part.phase for part in trace.steps[-1].phases] == [INPUT, FORWARD, BACKWARD, OPTIMIZER]
    assert trace.steps[-1].buckets == ()
    assert trace.run_info.algorithm == "none"
    assert len(values) == 14


@pytest.mark.parametrize("world_size", [1, 2])
@ranks()
def test_what_an_optimizer_does_after_its_closure_is_the_optimizers(world_size: int) -> None:
    model, recorder = _model(), recorder_of(torchring.init())
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(5, SIZES[0])).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    expected = [INPUT, OPTIMIZER, INPUT, FORWARD, BACKWARD, *([EXPOSED, BETWEEN] if world_size > 1 else []), OPTIMIZER]
    assert [part.phase for part in steps_of(recorder)[-1].phases] == expected


def test_inputs_without_a_shape_are_not_counted() -> None:
    model = nn.Identity()
    observers, recorder = Observers(), Recorder()
    observers.add(recorder)
    watch = ForwardWatch(model)
    watch.observers = lambda: observers
    watch.start()
    model(torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]))
    model(torch.tensor(1.0))
    model("text")
    assert recorder.num_samples == 2


def test_hooks_do_not_follow_a_model_to_copies_and_files() -> None:
    model, recorder, x = _model(), recorder_of(torchring.init()), torch.ones(3, SIZES[0])
    own = model.register_forward_hook(print)
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model)
    assert not model._forward_pre_hooks, "torch.cuda.make_graphed_callables takes no model with hooks"
    optimizer.step()
    pickled = pickle.dumps(model)
    assert b"print" in pickled
    assert b"torchring" not in pickled
    own.remove()
    before = recorder.num_samples
    for other in (copy.deepcopy(model), pickle.loads(pickled)):
        other(x)
    assert recorder.num_samples == before
    model(x)
    assert recorder.num_samples == before + 3
    torch.compile(model, fullgraph=True, backend="eager")(x)
    again = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model)  # the first one is not closed
    again.step()
    model(x)
    assert recorder.num_samples == 3, "each forward since the last step counts once"
    with pytest.raises(RuntimeError, match=r"optimizer\.close\(\) first"):
        torch.jit.script(model)
    optimizer.close()
    again.close()
    scripted = torch.jit.script(model)
    torchring.wrap(torch.optim.SGD(scripted.parameters(), lr=0.01), scripted)


@ranks(2, run_ranks)
def test_when_a_trace_is_written(tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace of the whole script is in no other one's way."""
    folder = tmp_path
    monkeypatch.setenv(TRACE, str(folder / "whole"))
    model = _model()
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(5, SIZES[0])).square().mean().backward()
        optimizer.step()

    step()
    with torchring.trace(folder / "block"):
        step()
        for each in writer.writers:
            each.write(writer.recorder_of(world_module.default_world()))
        now = read(path_of(folder / "block", rank))
        assert ([each.number for each in now.steps], now.run_info.ended_by) == ([1], ""), "step 0 was before"
        with torchring.trace(folder / "inner"), torchring.trace(folder / "inner"):
            step()
        assert [each.number for each in read(path_of(folder / "inner", rank)).steps] == [2]
    now = read(path_of(folder / "block", rank))
    assert ([each.number for each in now.steps], now.run_info.ended_by) == ([1, 2], "end")
    with torchring.trace(folder / "broken"):
        step()
        error = torchring.PeerLostError("rank 7 is gone", rank=rank, peers=(7,))
        world_module.default_world().fail(error)
        assert "rank 7 is gone" in read(path_of(folder / "broken", rank)).run_info.ended_by
    assert "rank 7 is gone" in read(path_of(folder / "broken", rank)).run_info.ended_by
    assert len(read(path_of(folder / "whole", rank)).steps) == 4, "this writer heard of the error, too"


def _ends(rank: int, size: int) -> None:
    _train({}, 1)
    if rank == 1:
        sys.last_value = ValueError("a mistake")  # as after an exception that nobody has caught


def test_the_environment_asks_for_a_trace_which_the_exit_writes(tmp_path: Path) -> None:
    run_ranks(_ends, 2, env={"TORCHRING_TRACE": str(tmp_path)})
    traces = [read(path) for path in find(tmp_path).values()]
    assert [len(trace.steps) for trace in traces] == [8, 8]
    assert [trace.run_info.ended_by for trace in traces] == ["end", "ValueError: a mistake"]


def test_what_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    recorder = Recorder()
    recorder.end_step(recorder.num_steps)
    with caplog.at_level(logging.WARNING, "torchring"), torchring.trace(tmp_path / "file" / "folder"):
        for ended_by in ("", "", "end"):
            recorder.end_step(recorder.num_steps)
            writer.writers[0].write(recorder, ended_by)
    assert [each.message.partition(":")[0] for each in caplog.records] == [
        f"no trace is written to {tmp_path}/file/folder"
    ]


@ranks(2)
def test_the_trace_knows_all_optimizers(tmp_path: Path) -> None:
    recorder = recorder_of(torchring.init())
    models = _model(), nn.Linear(4, 4, dtype=torch.bfloat16)
    for model in (models[0], *models):  # the first one is wrapped again
        optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.0), model)
        for _ in range(4):  # after the first backward, buckets are laid out anew
            weight = next(model.parameters())
            model(torch.ones(5, weight.shape[1], dtype=weight.dtype)).sum().backward()
            optimizer.step()
        optimizer.close()
    trace = read(write(tmp_path, decoded(*recorder.trace())))
    found = [(each.optimizer, each.name, each.dtype) for each in trace.run_info.parameters]
    of_first = [(0, f"{i}.{k}", "float32") for i in range(3) for k in ("weight", "bias")]
    assert found == [*of_first, *((1, name, "bfloat16") for name in ("weight", "bias"))]
    assert [{bucket.optimizer for bucket in step.buckets} for step in trace.steps] == [{0}] * 8 + [{1}] * 4
    assert [(each.optimizer, len(each.ready_ns)) for each in trace.arrivals] == [(0, 6)] * 4 + [(1, 2)] * 2
    assert all(at >= 0 for each in trace.arrivals for at in each.ready_ns)


@ranks(4)
def test_a_rank_has_one_trace_for_all_its_groups(tmp_path: Path, rank: int) -> None:
    """Each rank trains experts in one group and the rest with all ranks. Parameters have the same names."""
    pairs, models = [[0, 2], [1, 3]], (nn.Linear(4, 4), nn.Linear(4, 4))
    with torchring.trace(tmp_path):
        of_pair = torchring.wrap(torch.optim.SGD(models[0].parameters(), lr=0.0), models[0], group=pairs)
        of_all = torchring.wrap(torch.optim.SGD(models[1].parameters(), lr=0.0), models[1])
        for step in range(4):
            models[1](models[0](torch.full((2, 4), float(4 * step + rank)))).sum().backward()
            of_pair.step()
            of_all.step()
        assert (of_pair.stats().group, of_all.stats().group) == (tuple(pairs[rank % 2]), ())
        assert torchring.metrics()["torchring_steps_total"] == 8
    torchring.barrier()
    trace = read(path_of(tmp_path, rank))
    assert [step.number for step in trace.steps] == [*range(8)]
    assert [sorted({bucket.optimizer for bucket in step.buckets}) for step in trace.steps] == [[0, 1], []] * 4
    assert {number: group["ranks"] for number, group in trace.run_info.groups.items()} == {"0": pairs[rank % 2]}
    assert [(job.group, job.size, len(job.steps)) for job in load(tmp_path)] == [
        ((), 4, 8),
        ((0, 2), 2, 8),
        ((1, 3), 2, 8),
    ]


def test_clocks() -> None:
    """The example of the docstring, and hosts whose clocks differ by 5 s."""
    assert estimate([(151, 153)], [(100, 104)]) == ClockOffset(153, 50, 3)
    ahead, delays = 5_000_000_000, ((70, 900), (300, 60), (80, 80))
    mine, theirs = [], []
    for number, (there, back) in enumerate(delays):
        sent = 1000 * number
        mine.append((sent + ahead + 10, sent + ahead + max(10, there)))
        theirs.append((sent, sent + 10 + back))
    found = estimate(mine, theirs)
    assert abs(found.offset_ns - ahead) <= found.error_ns < 80
    same = measure(lambda data: [data], is_same_host=True)
    assert (same.offset_ns, same.error_ns) == (0, 0)


class Stream:
    """A device that reaches marks when a test says so. Its clock is 7 ns ahead of the host's, and counts from there."""

    def __init__(self) -> None:
        self.now = 0
        self.done_at = -1
        self.capturing = False

    def mark_current(self) -> Any:
        return _Mark(self, self.now)

    def is_capturing(self) -> bool:
        return self.capturing


@dataclasses.dataclass
class _Mark:
    stream: Stream
    at: int

    def is_reached(self) -> bool:
        return self.at <= self.stream.done_at

    def milliseconds_since(self, earlier: "_Mark") -> float:
        assert self.is_reached()
        assert earlier.is_reached()
        return (self.at - earlier.at) / 1e6


def test_steps_get_the_times_of_the_device_when_it_has_come_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host takes 1 ns for what takes the device 100; before the second step it waits until the device is idle."""
    clock, stream = Clock(), Stream()
    monkeypatch.setattr(recorder_module, "time", clock)
    recorder = Recorder()
    recorder.follow(stream)

    def run_step(host: int, device: int) -> None:
        for i, part in enumerate((FORWARD, BACKWARD, EXPOSED, BETWEEN, OPTIMIZER)):
            clock.now, stream.now = host + 1 + i, device + 100 * (i + 1)
            recorder.phase(part, 0)
        marks = [(_Mark(stream, device + 250), _Mark(stream, device + 380))]
        recorder.add_reduction([0, 64, 1, 1, 1, 1, 0], 0, 0, marks)
        clock.now, stream.now = host + 10, device + 600
        recorder.end_step(recorder.num_steps)

    run_step(0, 0)
    assert steps_of(recorder) == ()
    stream.done_at = 600
    recorder._device.take_finished()
    clock.now, stream.now = 607, 600  # idle, as after loss.item(); what the device does next begins now
    recorder.phase(FORWARD, 0)
    recorder.end_step(recorder.num_steps)
    stream.done_at = 10_000
    run_step(607, 600)
    first, *_, last = steps_of(recorder)
    assert [part.end - part.begin for part in first.phases] == [100] * 6
    assert (first.end - first.begin, first.exposed_ns) == (600, 100)
    (bucket,) = first.buckets
    assert [at - first.begin for at in (bucket.ready, bucket.launched, bucket.started, bucket.reduced)] == [250] * 3 + [
        380
    ]
    assert last.begin == 607
    assert [part.end - part.begin for part in last.phases] == [100] * 6
    # A step with a captured graph keeps the times of the host.
    clock.now = 0
    recorder = Recorder()
    recorder.follow(stream)
    stream.capturing = True
    clock.now = 5
    recorder.phase(FORWARD, 0)
    stream.capturing = False
    clock.now = 9
    recorder.end_step(recorder.num_steps)
    (step,) = steps_of(recorder)
    assert [(part.begin, part.end) for part in step.phases] == [(0, 5), (5, 9)]
