"""The GPU benchmarks, without a GPU: what is computed from what was measured, and dry runs of all that measures.

Lists and models · timing · rivals that are wrong · jobs that fail or hang · what is said · intervals and traces · dry
runs, in which interpreted kernels reduce between ranks.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.harness import patient, run_ranks
from torchring.allreduce.device.select import open_on_device
from torchring.allreduce.device.stream import OnStream
from torchring.bench import measure, overlap
from torchring.bench.gpu import __main__ as gpu
from torchring.bench.gpu import buckets, dry, kernels, models, predictions, report, streams, timing, training
from torchring.bench.gpu.kernels import Rival
from torchring.bench.measure import Command
from torchring.bench.overlap import common, length, merged
from torchring.default_world import default_world

CPU = torch.device("cpu")


# Lists and models


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [
        ("resnet50", 161, 25_557_032),
        ("gpt2", 148, 124_439_808),
        ("vgg16", 32, 138_357_544),
        ("tiny", 2000, 2_000_000),
        ("tiny32", 2000, 64_000),
    ],
)
def test_gradient_lists_are_those_of_the_architectures(name: str, tensors: int, parameters: int) -> None:
    shapes = models.LISTS[name]()
    assert len(shapes) == tensors
    assert sum(shape.numel() for shape in shapes) == parameters


def test_every_list_is_measured() -> None:
    assert set(gpu.LISTS) == set(models.LISTS)


def test_the_transformer_sees_only_the_past() -> None:
    torch.manual_seed(0)
    model = models.Gpt(layers=2, width=16, heads=2, vocabulary=11, length=6).eval()
    tokens = torch.randint(0, 11, (3, 6))
    others = tokens.clone()
    others[:, 4] = (others[:, 4] + 1) % 11
    with torch.no_grad():
        out, out_of_others = model(tokens), model(others)
    assert out.shape == (3, 6, 11)
    torch.testing.assert_close(out[:, :4], out_of_others[:, :4])
    assert not torch.allclose(out[:, 4:], out_of_others[:, 4:])


# Timing


def test_turns_rotate_and_warm_ups_do_not_count() -> None:
    said: list[str] = []

    def turn(name: str, seconds: float) -> Callable[[], float]:
        return lambda: said.append(name) or seconds  # type: ignore[func-returns-value]

    times = timing.take_turns({"a": turn("a", 1.0), "b": turn("b", 2.0)}, until=math.inf, most=3, warmups=1)
    assert times == {"a": [1.0] * 3, "b": [2.0] * 3}
    assert "".join(said) == "ba" + "ab" + "ba" + "ab"
    assert len(timing.take_turns({"a": turn("a", 1.0)}, until=0.0, most=99)["a"]) == 3


def test_rates_and_shares() -> None:
    times = {"copy": [1.0, 1.0, 2.0], "mine": [2.0, 1.0, 4.0]}
    assert timing.rates(times, 4_000_000_000)["mine"]["p50"] == 2.0
    shares = timing.shares(times, "copy")
    assert list(shares) == ["mine"]
    assert shares["mine"]["p50"] == 0.5
    assert timing.quantiles([3.0]) == {"p20": 3.0, "p50": 3.0, "p80": 3.0}
    values = timing.quantiles([float(i) for i in range(11)])
    assert values == {"p20": 2.0, "p50": 5.0, "p80": 8.0}


def test_overhead_is_against_the_same_repetition() -> None:
    times = {"plain": [1.0, 2.0, 4.0], "ring": [1.5, 3.0, 6.0]}
    assert training.overheads(times) == {"ring": {"p20": 0.5, "p50": 0.5, "p80": 0.5}}


def test_clocks_are_warm_before_a_calibration_and_each_comparison_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(timing, "warm_up", lambda device: said.append("warm up"))
    monkeypatch.setattr(timing.CudaTimer, "_calibrate", lambda self: said.append("calibrate"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: argparse.Namespace(L2_cache_size=64))
    timer = timing.CudaTimer(torch.device("meta"))
    assert said == ["warm up", "calibrate"]
    timer.reset()
    assert said[2:] == ["calibrate"]


# Wrong results


def _rivals(is_right: Callable[[], bool], name: str = "mine") -> dict[str, Rival]:
    copy = kernels.copy_rival(64, 2, CPU)
    return {"copy": copy, name: Rival(lambda i: None, lambda i: None, lambda i: is_right())}


@pytest.mark.parametrize(("name", "is_ours"), [("cat", False), ("torchring", True), ("checked", True)])
def test_a_rival_that_is_wrong_from_the_start_is_left_out(name: str, is_ours: bool) -> None:
    """And if it is one of ours, the row is no result."""
    row = kernels.compare(timing.HostTimer(), _rivals(lambda: False, name), num_bytes=64, num_sets=2, until=0.0, most=3)
    assert list(row["ms"]) == ["copy"]
    assert list(row["problems"]) == [name]
    assert ("problem" in row) == is_ours


def test_a_rival_that_becomes_wrong_spoils_the_row() -> None:
    answers = iter([True] * 3 + [False] * 100)
    with pytest.raises(kernels.WrongResultError, match="mine"):
        kernels.compare(timing.HostTimer(), _rivals(lambda: next(answers)), num_bytes=64, num_sets=2, until=0.0, most=3)


def _sets(count: int = 2) -> list[kernels.Gradients]:
    shapes = [torch.Size([3, 5]), torch.Size([]), torch.Size([40])]
    return [kernels.Gradients.new(shapes, torch.float32, torch.bfloat16, CPU) for _ in range(count)]


def _all_rivals(kind: str) -> dict[str, Rival]:
    if kind == "pack":
        return kernels.pack_rivals(_sets(), kernels.SCALE)
    if kind == "unpack":
        return kernels.unpack_rivals(_sets())
    return kernels.sum_rivals([[torch.randn(50) for _ in range(3)] for _ in range(2)])


@pytest.mark.parametrize("kind", ["pack", "unpack", "accumulate"])
def test_checks_see_a_rival_that_did_nothing(kind: str) -> None:
    """All are right after they ran, wrong after the poison, and touch one input set at a time."""
    for rival in _all_rivals(kind).values():
        for i in range(2):
            rival.poison(i)
        assert not rival.is_right(0)
        rival.run(0)
        assert rival.is_right(0)
        assert not rival.is_right(1)
        rival.poison(0)
        assert not rival.is_right(0)


def test_replicas_are_judged() -> None:
    verdict_of = training.verdict_of
    assert "problem" not in verdict_of(["a", "a"], 1e-5, 0.5, 1e-3)
    assert "different bits" in verdict_of(["a", "b"], 1e-5, 0.5, 1e-3)["problem"]
    assert "of the way" in verdict_of(["a", "a"], 2e-3, 0.5, 1e-3)["problem"]
    assert "of the way" in verdict_of(["a", "a"], math.nan, 0.5, 1e-3)["problem"]
    assert "as near" in verdict_of(["a", "a"], 1e-5, 1e-4, 1e-3)["problem"]


# Jobs


def test_nccl_takes_part_where_there_is_a_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "ALGORITHMS", ("auto", "native", "nvls"))

    def algorithms(num_gpus: int, *, has_multicast: bool = False) -> list[tuple[int, str]]:
        found = gpu.jobs(["allreduce"], [2, 4], num_gpus, has_multicast=has_multicast, is_quick=False, is_dry=False)
        return [(job.ranks, job.algorithm) for job in found]

    assert algorithms(1) == [(2, "direct"), (2, "ring"), (4, "direct"), (4, "ring")]
    assert algorithms(2) == [(2, "direct"), (2, "ring"), (2, "native"), (4, "direct"), (4, "ring")]
    assert algorithms(4)[-1] == (4, "native")
    assert algorithms(2, has_multicast=True)[2:] == [(2, "native"), (2, "nvls"), (4, "direct"), (4, "ring")]


@pytest.mark.parametrize(("num_gpus", "are_last"), [(0, True), (1, True), (2, False)])
def test_what_means_nothing_on_one_gpu_runs_last_there(num_gpus: int, are_last: bool) -> None:
    sections = [job.section for job in gpu.jobs(gpu.SECTIONS, [2], num_gpus, is_quick=False, is_dry=False)]
    several = ["allreduce", "replicas"]
    assert list(dict.fromkeys(sections))[slice(-2, None) if are_last else slice(2)] == several


def test_a_whole_run_has_time_for_all_jobs() -> None:
    """And for 8 s of each to start in."""
    jobs = gpu.jobs(gpu.SECTIONS, [2, 4], 1, is_quick=False, is_dry=False)
    assert {job.section for job in jobs} == set(gpu.SECTIONS)
    assert sum(job.seconds + 8 for job in jobs) < gpu._TOTAL_SECONDS < 470


def test_processes_find_the_torchring_that_started_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a checkout, the current folder, where `python -m` looks; a script looks in its own folder."""
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    root, others = measure.search_path()["PYTHONPATH"].split(":")
    assert others == "/elsewhere"
    assert Path(root, "torchring", "bench", "measure.py").samefile(measure.__file__)
    assert measure.rank_commands("x.py", 2, [], mpi=False, rendezvous=1)[1].environment["PYTHONPATH"].startswith(root)
    monkeypatch.setattr(measure.sysconfig, "get_path", lambda name: root)  # type: ignore[attr-defined]
    assert measure.search_path() == {}


def _python(code: str, name: str = "rank 0") -> Command:
    return Command(name, [sys.executable, "-S", "-c", code], {})


def test_processes_end_in_time_or_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_REPORT_SECONDS", 0.5)
    assert gpu.run_until([_python("pass"), _python("pass")], 30) == ""
    began = time.monotonic()
    assert gpu.run_until([_python("import time; time.sleep(60)")], 0.5) == "ended after 0.5 s, its limit"
    said = gpu.run_until([_python("import time; time.sleep(60)"), _python("raise SystemExit(3)", "rank 1")], 60)
    assert said == "rank 1 ended with exit code 3"
    assert time.monotonic() - began < 30


def test_what_a_job_measured_before_it_hung_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(job: gpu.Job, arguments: list[str], environment: dict[str, str], limit_seconds: float) -> str:
        rows = [{"section": "copy", "size": 1}, {"section": "copy", "problem": "there was no time left"}]
        lines = [json.dumps(row) + "\n" for row in rows]
        Path(arguments[-1].split(",", 3)[3]).write_text("".join(lines) + '{"section": "cop')
        return "ended after 9 s, its limit"

    monkeypatch.setattr(gpu, "start", start)
    options = argparse.Namespace(quick=False, dry_run=False)
    rows = gpu.run_job(gpu.Job("copy", 1.0), options, 9.0)
    assert rows[0] == {"section": "copy", "size": 1}
    assert [row["problem"] for row in rows[1:]] == ["there was no time left", "ended after 9 s, its limit"]
    assert gpu.run_job(gpu.Job("copy", 1.0), options, -1.0)[-1]["problem"] == "there was no time left"


def test_a_section_that_raises_says_so_in_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows_of(*_: object, **__: object) -> Any:
        yield {"section": "copy", "size": 1}
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu, "rows_of", rows_of)
    file = tmp_path / "rows"
    options = argparse.Namespace(quick=False, dry_run=True, worker=f"copy,none,1,{file}")
    assert gpu.work(options) == 1
    first, second = map(json.loads, file.read_text().splitlines())
    assert first["size"] == 1
    assert second["problem"] == "RuntimeError: out of memory"


def test_the_first_run_goes_on_after_a_part_that_failed(tmp_path: Path) -> None:
    """With programs that say what they are asked to do. Here the tests fail, and there is no driver."""
    programs, out = tmp_path / "programs", tmp_path / "results"
    programs.mkdir()
    python = programs / "python"
    python.write_text('#!/bin/sh\necho "$PWD" "$@"\n[ "$2" != pytest ]\n')
    python.chmod(0o755)
    script = Path(__file__).resolve().parents[2] / "bench" / "gpu_first_run.sh"
    path = f"{programs}:/usr/bin:/bin"
    run = subprocess.run(
        ["bash", str(script), "results"], cwd=tmp_path, env={"PATH": path, "PYTHON": "python"}, capture_output=True,
        text=True, timeout=patient(30),
    )  # fmt: skip
    parts = [line.split(":")[0] for line in (out / "summary.txt").read_text().splitlines()]
    assert parts == ["machine", "links", "versions", "doctor", "kernels", "tests", "bench", "overlap"]
    has_driver = shutil.which("nvidia-smi", path=path) is not None
    assert run.returncode == (2 if has_driver else 4), run.stdout + run.stderr
    said = (out / "bench.log").read_text().split()
    assert said == [str(script.parent.parent), "-m", "torchring.bench.gpu", "--json", str(out / "bench.json")]
    asked = (out / "kernels.log").read_text().split()
    assert {"tests/kernels", "gpu"} <= set(asked)
    assert "--ignore" in (out / "tests.log").read_text().split()


# What is said


@pytest.mark.parametrize("script", [gpu, overlap])
def test_without_a_gpu_it_says_so(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [script.__file__])
    assert script.main() == 2
    printed = capsys.readouterr()
    assert "needs a CUDA GPU" in printed.err
    assert printed.out == ""


def test_results_are_named_after_the_gpu() -> None:
    assert Path(gpu.default_output("NVIDIA H200")).name == "h200.json"
    assert Path(gpu.default_output("NVIDIA A100-SXM4-80GB")).name == "a100-sxm4-80gb.json"


def _share(op: str, load: str, ours: float, checked: float | None = None) -> dict[str, Any]:
    ways = {"torchring": ours} | ({} if checked is None else {"checked": checked})
    of_copy = {name: {"p50": value} for name, value in ways.items()}
    return {"section": "kernels", "op": op, "load": load, "source": "fp32", "target": "bf16", "of_copy": of_copy}


def test_the_worst_decides_whether_an_aim_is_reached() -> None:
    rows = [
        _share("pack", "resnet50", 0.95, 0.91),
        _share("pack", "gpt2", 0.95, 0.89),
        _share("pack", "tiny", 0.71),
        _share("accumulate", "2 parts", 0.99),
        _share("accumulate", "8 parts", 0.84),
        _share("unpack", "gpt2", 0.1) | {"problem": "there was no time left"},
        {"section": "step", "model": "gpt2", "overhead": {"ring": {"p50": 0.021}}},
        {"section": "replicas", "problem": "ranks ended with different bits"},
        {"section": "replicas"},
        {"section": "allreduce", "problem": "there was no time left"},
        {"section": "allreduce"},
    ]
    found = {line[0]: (line[1], line[3]) for line in report.verdicts(rows)}
    assert found == {
        "pack resnet50": ("91% of a copy (fp32 to bf16, checked)", "kept"),
        "pack gpt2": ("89% of a copy (fp32 to bf16, checked)", "MISSED"),
        "pack tiny": ("71% of a copy (fp32 to bf16)", "kept"),
        "accumulate": ("84% of a copy (fp32 to bf16)", "MISSED"),
        "step of one rank, gpt2": ("+2.1%", "MISSED"),
        "ranks end with the same bits": ("1 of 2", "MISSED"),
        "all-reduce is right": ("1 of 1", "kept"),
    }
    assert report.verdicts([]) == []


def test_predictions_stand_beside_what_was_measured() -> None:
    """Only beside what was measured under the conditions that they are for."""
    meeting = {"section": "streams", "kind": "meeting", "op": "direct", "blocks": 1, "us_of_a_meeting": {"p50": 2.44}}
    reduced = {"section": "allreduce", "algorithm": "direct", "ranks": 8, "ms": {"p50": 0.25}}
    rows = [
        meeting | {"ranks": 8},
        meeting | {"ranks": 1},
        meeting | {"ranks": 8, "problem": "it hung"},
        {"section": "streams", "kind": "gemm", "blocks": 24, "slower_by": 0.2},
        reduced | {"size": 32 << 20, "shares_one_gpu": False},
        reduced | {"size": 32 << 20, "shares_one_gpu": True},
        reduced | {"size": 1 << 10, "shares_one_gpu": False},
    ]
    assert predictions.compare(rows) == [
        ["meeting of 8 ranks, 1 blocks", "2.4 us", "2 to 3 us; one by one 14 us"],
        ["matrix multiplication beside 24 blocks that wait", "+20.0%", "+18 to +25 %"],
        ["direct, 8 ranks, 32 MiB", "0.250 ms", "0.242 ms"],
    ]
    published = {mib << 20 for mib in predictions._PUBLISHED}
    assert published <= set(gpu.ALL_REDUCE_BYTES)


# Intervals and traces


def test_intervals() -> None:
    assert merged([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert merged([(1, 1), (3, 2)]) == []
    assert length([(0, 2), (1, 3), (5, 6)]) == 4
    assert common([(0, 4), (5, 6)], [(1, 2), (3, 8)]) == 3
    assert common([], [(0, 1)]) == 0
    assert common([(0, 1)], [(1, 2)]) == 0


def test_intervals_against_counting() -> None:
    """Whole numbers, counted one by one."""
    chance = random.Random(0)

    def some() -> list[tuple[float, float]]:
        begins = [chance.randrange(30) for _ in range(chance.randrange(6))]
        return [(begin, begin + chance.randrange(8)) for begin in begins]

    def cells(intervals: list[tuple[float, float]]) -> set[int]:
        return {i for begin, end in intervals for i in range(int(begin), int(end))}

    for _ in range(200):
        a, b = some(), some()
        assert length(a) == len(cells(a))
        assert common(a, b) == common(b, a) == len(cells(a) & cells(b))


def _event(category: str, name: str, begin: float, length: float, **arguments: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 5, "ts": begin, "dur": length, "args": arguments}


def _kernel(name: str, stream: int, begin: float, length: float, launched: float) -> list[dict[str, Any]]:
    """A kernel and its launch."""
    number = int(1e6 * begin) + stream
    return [
        _event("cuda_driver", "cuLaunchKernelEx", launched, 1, correlation=number),
        _event("kernel", name, begin, length, stream=stream, device=0, correlation=number),
    ]


def synthetic_trace() -> dict[str, Any]:
    """Backward on stream 7 from 1000 to 3000 us, with a gap from 2000 to 2200; communication on stream 20.

    pack 1500-1600 and direct 1600-2100 are hidden but for 100 us; a direct of 2900-3300 for its first 100 us. NCCL has
    a stream of its own, 3000-3050. Unpacking is on stream 7, 3400-3500.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
        *_kernel("backward_1", 7, 1000, 1000, 10),
        *_kernel("backward_2", 7, 2200, 800, 12),
        *_kernel("_pack_kernel", 20, 1500, 100, 101),
        *_kernel("_direct_kernel", 20, 1600, 500, 121),
        *_kernel("_direct_kernel", 20, 2900, 400, 141),
        *_kernel("ncclDevKernel_AllReduce", 30, 3000, 50, 500),
        *_kernel("_unpack_kernel", 7, 3400, 100, 161),
        _event("user_annotation", "torchring.pack bucket 0, 1.00 MiB", 100, 10),
        _event("user_annotation", "torchring.direct bucket 0, 1.00 MiB", 120, 10),
        _event("user_annotation", "torchring.direct bucket 1, 25.00 MiB", 140, 10),
        _event("user_annotation", "torchring.unpack bucket 0, 1.00 MiB", 160, 10),
        _event("user_annotation", "Optimizer.step", 0, 1000),
        _event("gpu_memcpy", "Memcpy HtoD", 1400, 1000, stream=20, device=0),
    ]
    elsewhere = _event("user_annotation", "torchring.direct bucket 9, 1.00 MiB", 0, 600)
    return {"traceEvents": [*events, elsewhere | {"tid": 6}]}


def test_a_trace_is_taken_apart(tmp_path: Path) -> None:
    plain, zipped = tmp_path / "trace.json", tmp_path / "trace.json.gz"
    plain.write_text(json.dumps(synthetic_trace()))
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    found = overlap.analyse(overlap.read_trace(plain))
    assert overlap.analyse(overlap.read_trace(zipped)) == found
    assert found.num_kernels == 4
    assert found.communication_ms == pytest.approx(1.0)
    assert found.hidden_ms == pytest.approx(0.6)
    assert found.compute_ms == pytest.approx(1.9)
    assert found.share == pytest.approx(0.6)
    assert [(line.name.split(",")[0], line.begin_ms, line.busy_ms) for line in found.lines] == [
        ("torchring.pack bucket 0", 0.5, 0.1),
        ("torchring.direct bucket 0", 0.6, 0.5),
        ("torchring.direct bucket 1", 1.9, 0.4),
        ("torchring.unpack bucket 0", 2.4, 0.1),
    ]
    assert [line.hidden_ms for line in found.lines] == pytest.approx([0.1, 0.4, 0.1, 0.0])


def test_nothing_is_hidden_where_all_is_in_one_stream(tmp_path: Path) -> None:
    """overlap="inline": kernels of the same stream never run at the same time."""
    trace = synthetic_trace()
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel":
            event["args"]["stream"] = 7
    (file := tmp_path / "trace.json").write_text(json.dumps(trace))
    found = overlap.analyse(overlap.read_trace(file))
    assert found.num_kernels == 4
    assert found.hidden_ms == 0
    assert math.isnan(overlap.analyse(overlap.Trace([], [], {})).share)


def test_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """From a trace, as a user calls it."""
    trace, out = tmp_path / "trace.json", tmp_path / "overlap.json"
    trace.write_text(json.dumps(synthetic_trace()))

    def run(file: Path) -> int:
        monkeypatch.setattr(sys, "argv", ["overlap.py", "--from-trace", str(file), "--json", str(out)])
        return overlap.main()

    assert run(trace) == 0
    printed = capsys.readouterr().out
    assert "0.600 of 1.000 ms of communication, 60%, overlap with kernels of other streams" in printed
    assert "| torchring.direct bucket 1, 25.00 MiB |" in printed
    (row,) = json.loads(out.read_text())["rows"]
    assert row["share"] == pytest.approx(0.6)
    assert len(row["lines"]) == 4
    trace.write_text(json.dumps({"traceEvents": []}))
    assert run(trace) == 1
    for nonsense in ("[1", '{"a": 1}', '{"traceEvents": [{"ph": "X"}]}'):
        trace.write_text(nonsense)
        capsys.readouterr()
        assert run(trace) == 2
        assert str(trace) in capsys.readouterr().err
    assert run(tmp_path / "nowhere") == 2


# Dry runs


def check_rows(rows: list[dict[str, Any]], section: str, *keys: str) -> list[dict[str, Any]]:
    found = [row for row in rows if row["section"] == section]
    assert found
    for row in found:
        assert "problem" not in row, row
        assert "problems" not in row, row
        assert row.keys() >= set(keys)
    return found


@pytest.mark.grid
def test_gpu(tmp_path: Path) -> None:
    """As a user starts it, for the sections that take no kernels of ours between ranks."""
    out = tmp_path / "results.json"
    command = [sys.executable, "-m", "torchring.bench.gpu", "--dry-run", "--sections", "copy", "kernels"]
    run = subprocess.run([*command, "--output", str(out)], capture_output=True, text=True, timeout=patient(60))
    assert run.returncode == 0, run.stderr
    written = json.loads(out.read_text())
    assert list(written) == ["about", "rows"]
    assert written["about"].keys() >= measure.provenance().keys() | {"script", "gpu", "dry_run"}
    check_rows(written["rows"], "copy", "size", "bytes", "ms", "gb_per_s", "of_copy")
    kernels = check_rows(written["rows"], "kernels", "op", "load", "source", "target", "bytes", "ms", "of_copy")
    assert {(row["op"], row["source"], row["target"]) for row in kernels} == {
        *(("pack", *way) for way in (("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "bf16"), ("fp32", "fp16"))),
        ("unpack", "fp32", "fp32"), ("unpack", "bf16", "fp32"),
        ("accumulate", "fp32", "fp32"), ("accumulate", "bf16", "bf16"),
    }  # fmt: skip
    for row in kernels:
        if row["op"] == "pack":
            assert set(row["ms"]) == {"torchring", "checked", "foreach", "flatten", "cat", "copy"}
    tables = run.stdout.strip().split("\n\n")
    assert tables[0].startswith("Copies,")
    assert [title.split(",")[0] for title in tables[-4::2]] == ["Aims", "Predictions"]
    assert tables[-1].count("\n") >= 2


def _work(section: str, algorithm: str, folder: str) -> list[dict[str, Any]]:
    """One job, in this process; what rank 0, which alone writes, has written so far."""
    file = Path(folder, f"{section}-{algorithm}")
    worker = f"{section},{algorithm},1.0,{file}"
    code = gpu.work(argparse.Namespace(worker=worker, quick=False, dry_run=True))
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    assert code == 0, rows
    return rows


def _idle(mover: OnStream) -> OnStream:
    """It reduces nothing."""
    mover._engine.launch = lambda wire, scale: None  # type: ignore[method-assign]
    return mover


def _check_of_streams(monkeypatch: pytest.MonkeyPatch) -> str:
    """What it says of a kernel that does nothing."""
    monkeypatch.setattr(streams.StreamRanks, "launch", lambda *_: None)
    with pytest.raises(RuntimeError) as error:
        streams._check_order(CPU, "direct", 1, 70, torch.float32)
    return str(error.value)


def _bucket_that_is_not_reduced() -> str:
    """What its check says."""
    accelerator = dry.DryAccelerator(CPU)
    bucket = buckets.OneBucket.open(default_world(), accelerator, [torch.Size([8])], "ring", None)
    bucket.check()
    _idle(bucket.mover)
    with pytest.raises(RuntimeError) as error:
        bucket.check()
    return str(error.value)


def _work_alone(rank: int, world_size: int, folder: str) -> tuple[list[dict[str, Any]], list[str], int]:
    """Also a profile of a step: the ranges that a trace of it names, and how many kernels of a device."""
    rows = [row for section in ("bucket", "step", "streams") for row in _work(section, "none", folder)]
    with pytest.MonkeyPatch.context() as patch:
        assert "the result is wrong" in _check_of_streams(patch)
    assert "wrong gradients" in _bucket_that_is_not_reduced()
    trace = str(Path(folder, "trace.json"))
    overlap.profile_step(training.training_configs(is_dry=True)[0], "ring", CPU, 1, trace)
    found = overlap.read_trace(trace)
    return rows, [one.name for one in found.ranges], overlap.analyse(found).num_kernels


def _work_together(rank: int, world_size: int, folder: str) -> list[dict[str, Any]]:
    jobs = [("allreduce", "direct"), ("allreduce", "ring"), ("replicas", "ring")]
    rows = [_work(section, algorithm, folder) for section, algorithm in jobs]
    world, accelerator = default_world(), dry.DryAccelerator(CPU)
    mover, _ = open_on_device(world, "direct", "auto", [(8, torch.float32)], accelerator)
    wrong = buckets._time_all_reduce(world, accelerator, _idle(mover), 8, 0.0, 1)
    assert wrong == {"problem": "the result is wrong on ranks [0, 1]"}
    return [row for some in rows for row in some]


@pytest.mark.grid
def test_dry_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of one rank and of two, with interpreted kernels: all that needs a GPU otherwise goes through the same code."""
    env = {"TRITON_INTERPRET": "1"}
    (alone, ranges, num_kernels), *_ = run_ranks(
        _work_alone, 1, str(tmp_path), launcher_env=False, env=env, deadline=120
    )
    together, _ = run_ranks(_work_together, 2, str(tmp_path), env=env, deadline=120)
    buckets = check_rows(alone, "bucket", "ms", "launches", "tensors", "bytes")
    assert {(row["algorithm"], row["compression"], row["addresses_change"]) for row in buckets} == {
        (algorithm, *way) for algorithm in ("direct", "ring") for way in ((None, False), ("bf16", False), (None, True))
    }
    (step,) = check_rows(alone, "step", "ms", "overhead", "distance", "stats")
    assert set(step["ms"]) == {"plain", "ring", "direct", "ddp"}
    assert step["stats"]["algorithm"] == "ring"
    assert step["stats"]["num_reductions"] > 0
    assert step["has_the_same_bits"] == {"ring": True, "direct": True, "ddp": True}
    kinds = {row["kind"] for row in check_rows(alone, "streams", "kind")}
    assert kinds == {"order", "meeting", "sum", "alone", "gemm", "under gemm", "abort", "host"}
    reduced = [row for row in together if row["section"] == "allreduce"]
    assert {row["algorithm"] for row in reduced if row.get("is_checked")} == {"direct", "ring"}
    assert all(row.get("problem", "there was no time left") == "there was no time left" for row in reduced)
    replicas = check_rows(together, "replicas", "has_the_same_bits", "distance", "step_ms")
    assert [(row["algorithm"], row["compression"]) for row in replicas] == [("ring", None), ("ring", "bf16")]
    assert any(name.startswith("torchring.pack") for name in ranges)
    assert any(name.startswith("torchring.ring") for name in ranges)
    assert num_kernels == 0
    about = measure.provenance() | {"gpu": {"name": "none"}}
    report.report([*alone, *together], about)
    printed = capsys.readouterr().out
    titles = ("Host time of a bucket", "Ranks as streams", "All-reduce", "Training step", "Replicas", "Aims")
    for title in (*titles, "Predictions"):
        assert f"\n{title}" in printed
    assert "say nothing about NVLink" in printed


def _on_device(
    rank: int, world_size: int, folder: str, device: torch.device
) -> tuple[list[dict[str, Any]], overlap.Overlap]:
    """Kernels, buckets and a profiled step, all of them small."""
    timer, until = timing.open_timer(device), time.monotonic() + 60
    shapes = [torch.Size([300, 70]), torch.Size([]), torch.Size([1025])]
    rows = list(kernels.kernels(timer, {"some": shapes}, 5000, until=until, most=3))
    rows += list(buckets.host_times(device, is_dry=True, until=until, most=2))
    rows += list(streams.ranks_as_streams(timer, is_dry=False, until=until + 60, most=1))
    trace = str(Path(folder, "trace.json"))
    overlap.profile_step(training.training_configs(is_dry=True)[0], "ring", device, 3, trace)
    return rows, overlap.analyse(overlap.read_trace(trace))


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    """What is timed is right there, and kernels of ours are counted and found in a trace."""
    device = torch.device("cuda", 0)
    ((rows, found),) = run_ranks(_on_device, 1, str(tmp_path), device, launcher_env=False, fresh=True, deadline=240)
    for row in check_rows(rows, "kernels", "ms", "of_copy", "gb_per_s"):
        assert all(0 < rate["p50"] < 1e6 for rate in row["gb_per_s"].values())
    for row in check_rows(rows, "bucket", "ms", "launches"):
        assert row["launches"] >= (3 if row["compression"] else 2), row["api_calls"]  # pack, reduce, and maybe unpack
    check_rows(rows, "streams", "kind")
    assert found.num_kernels >= 2
    names = " ".join(line.name for line in found.lines)
    assert "torchring.pack" in names
    assert "torchring.ring" in names


def test_the_dry_accelerator_does_what_is_asked_of_one() -> None:
    """At once, in order."""
    accelerator = dry.DryAccelerator(CPU)
    stream = accelerator.open_stream()
    word = accelerator.host_word()
    before = stream.mark()
    stream.follow()
    stream.run(lambda: word.fill_(3))
    assert word.item() == 3
    copy = accelerator.fetch(word)
    word.fill_(4)
    assert copy.item() == 3
    assert stream.mark().milliseconds_since(before) >= 0
