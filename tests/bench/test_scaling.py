"""`torchring bench scaling`: batches that repeat, silent ranks, what the script sees of it, and what is to blame.

Ranks are forked from the harness's server, but in the tests of what a script sees: there, python starts them.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import torchring
from tests.support.fake_device import FakeAccelerator
from tests.support.harness import run_ranks
from torchring.bench import scaling, scaling_worker
from torchring.bench.measure import Spread
from torchring.bench.repeated_batch import FirstBatches, RepeatedBatch
from torchring.bench.scaling_losses import Losses, Measured, Stretches, in_words, losses_of, stretches
from torchring.bench.scaling_worker import Settings
from torchring.bench.silent_mover import silence
from torchring.observe.recorder.records import About, Part, PartRecord, RankTrace, StepRecord

# Batches


class Counted(Dataset[dict[str, torch.Tensor]]):
    """Ten samples, which knows those that were taken."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        self.taken.append(i)
        return {"x": torch.full((2,), float(i)), "y": torch.tensor(i)}


class Stream(IterableDataset[int]):
    """Does not know its length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


@pytest.fixture
def first_batches(monkeypatch: pytest.MonkeyPatch) -> FirstBatches:
    monkeypatch.setattr(DataLoader, "__iter__", DataLoader.__iter__)  # to be put back
    batches = FirstBatches(num_batches=7)
    batches.install()
    return batches


def test_a_loader_gives_its_first_batch_as_often_as_it_has_batches(first_batches: FirstBatches) -> None:
    data = Counted()
    loader = DataLoader(data, batch_size=4)
    for _ in range(2):
        assert [batch["y"].tolist() for batch in loader] == [[0, 1, 2, 3]] * 3
    assert data.taken == [0, 1, 2, 3]
    assert next(iter(DataLoader(Counted(), batch_size=3, sampler=[9, 8, 7])))["y"].tolist() == [9, 8, 7]
    assert [batch.tolist() for batch in DataLoader(Stream(), batch_size=2)] == [[0, 1]] * 7
    assert list(DataLoader([], batch_size=2)) == []  # type: ignore[arg-type]
    assert first_batches.num_loaders == 3


def test_workers_of_a_loader_end_after_the_first_batch(first_batches: FirstBatches) -> None:
    before = set(multiprocessing.active_children())  # ranks of other tests
    loader = DataLoader(Counted(), batch_size=4, num_workers=1, persistent_workers=True)
    assert [batch["y"].tolist() for batch in loader] == [[0, 1, 2, 3]] * 3
    assert set(multiprocessing.active_children()) <= before
    assert len(list(loader)) == 3


def test_a_batch_is_as_good_as_new_each_time() -> None:
    """Whatever the script does to it. A tensor that is left alone is not copied."""
    x, y = torch.ones(3), torch.arange(3)
    batch = RepeatedBatch({"pair": [x, (y, "text")]})
    first = batch.get()
    assert first["pair"][0] is x
    x_again, (y_again, _) = first.pop("pair")
    x_again[1:].mul_(5)
    y_again.zero_()
    second = batch.get()
    assert second["pair"][0].tolist() == [1, 1, 1]
    assert second["pair"][1][0].tolist() == [0, 1, 2]
    assert batch.get()["pair"][0] is second["pair"][0]
    unpicklable = lambda: None  # noqa: E731
    assert RepeatedBatch(unpicklable).get() is unpicklable


# Ranks that exchange nothing


def _gradients_on_device(rank: int, world_size: int, is_silent: bool, options: dict[str, Any]) -> list[list[float]]:
    with FakeAccelerator().installed():
        return _gradients(rank, world_size, is_silent, options)


def _gradients(rank: int, world_size: int, is_silent: bool, options: dict[str, Any]) -> list[list[float]]:
    """Of steps on which the ranks do not agree: rank 1 makes one step fewer, if the ranks are silent."""
    if is_silent:
        silence()
    model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False), torch.nn.BatchNorm1d(1, affine=False).eval())
    torch.nn.init.ones_(model[0].weight)  # type: ignore[arg-type]
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.5), model, **options)
    found = []
    for _ in range(4 - rank if is_silent else 3):
        optimizer.zero_grad()
        model[1].running_mean.fill_(rank)  # type: ignore[union-attr,operator]
        model[1].num_batches_tracked.fill_(3 + rank)  # type: ignore[union-attr,operator]
        model[0](torch.tensor([[1.0 + rank, 2.0]])).sum().backward()
        (grad,) = (parameter.grad for parameter in model.parameters())
        assert grad is not None
        found.append(grad[0].tolist())
        optimizer.step()
    assert model[1].running_mean.item() == (rank if is_silent else 0.5)  # type: ignore[union-attr,operator]
    assert model[1].num_batches_tracked.item() == (3 + rank if is_silent else 3)  # type: ignore[union-attr,operator]
    return [*found, model[0].weight[0].tolist()]  # type: ignore[index]


@pytest.mark.parametrize("train", [_gradients, pytest.param(_gradients_on_device, marks=pytest.mark.grid)])
@pytest.mark.parametrize(
    ("options", "factor"), [({}, 1), ({"op": "sum"}, 2), ({"compression": "bf16", "overlap": "thread"}, 1)]
)
def test_silent_ranks_keep_their_gradients_and_wait_for_nobody(
    options: dict[str, Any], factor: int, train: Callable[..., Any]
) -> None:
    """A sum is that of ranks which all have these gradients."""
    env = {"TRITON_INTERPRET": "1"} if train is _gradients_on_device else {}
    for rank, found in enumerate(run_ranks(train, 2, True, options, env=env, deadline=150)):
        *gradients, weight = found
        assert gradients == [[factor * (1.0 + rank), factor * 2.0]] * (4 - rank)
        assert weight == [1 - 0.5 * sum(column) for column in zip(*gradients, strict=True)]


def _two_optimizers(rank: int, world_size: int) -> list[float]:
    """Which meet in one backward, and would agree on who takes part. One has a sparse gradient. Rank 1 ends early."""
    silence()
    table, layer = torch.nn.Embedding(4, 1, sparse=True), torch.nn.Linear(1, 1, bias=False)
    optimizers = [torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model) for model in (table, layer)]
    for _ in range(4 - 2 * rank):
        for optimizer in optimizers:
            optimizer.zero_grad()
        layer(table(torch.tensor([rank]))).sum().backward()
        expected = layer.weight.item()
        for optimizer in optimizers:
            optimizer.step()
    assert table.weight.grad is not None
    rows: list[float] = table.weight.grad.to_dense().flatten().tolist()
    assert rows[rank] == pytest.approx(expected)
    return rows


def test_silent_ranks_with_several_optimizers_and_sparse_gradients() -> None:
    for rank, rows in enumerate(run_ranks(_two_optimizers, 2)):
        assert [row for row, grad in enumerate(rows) if grad] == [rank]


def test_without_silence_gradients_are_means() -> None:
    for found in run_ranks(_gradients, 2, False, {}):
        assert found[:-1] == [[1.5, 2.0]] * 3


# What a script sees

SEES = """
import os, sys
here = sys.modules["__main__"]
print(sys.argv, __name__, __file__, here.__file__, sys.path[0], os.getcwd(), "torch" in sys.modules, __builtins__)
print(here.__spec__, here.__package__, here.x if hasattr(here, "x") else "nothing yet")
def fail():
    {ending}
fail()
"""


@pytest.mark.parametrize("ending", ["sys.exit(7)", "raise ValueError('mine')", "pass", "sys.exit('text')"])
def test_a_script_sees_what_it_sees_under_python(ending: str, tmp_path: Path) -> None:
    """The traceback of its errors included."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "script.py").write_text(SEES.format(ending=ending))
    arguments = ["folder/script.py", "--x", "a b"]
    ours = scaling_worker.command(Settings(1, 1), arguments[0], arguments[1:])
    ended = [
        subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        for command in (arguments, ours)
    ]
    plain, run = ((each.returncode, each.stdout, each.stderr) for each in ended)
    assert run == plain
    assert plain[1]


def test_a_failing_script_ends_the_experiment_with_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import os, sys\nprint('hello')\nif os.environ['RANK'] == '1':\n    sys.exit(7)\n")
    monkeypatch.setattr(sys, "argv", ["scaling.py", "-np", "2", str(script)])
    with pytest.raises(SystemExit) as stopped:
        scaling.main()
    assert stopped.value.code == 7
    out, err = capfd.readouterr()
    assert out == ""
    assert "--- the last lines of rank1:\nhello\n" in err
    assert "the script has failed, in the condition 'given', with exit code 7" in err


# Real runs

TRAINS = """
import sys, time, torch, torchring
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 8 * int(sys.argv[1])
    def __getitem__(self, i):
        time.sleep(0.005)
        return torch.full((4,), float(i))

model = torch.nn.Linear(4, 4)
optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=1e-6), model)
for batch in DataLoader(Slow(), batch_size=8):
    model(batch).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def _rank(rank: int, world_size: int, arguments: list[str], env: dict[str, str]) -> None:
    scaling_worker.main(arguments)


def forked(command: list[str], num_ranks: int, hosts: None, env: dict[str, str], *_: object) -> int:
    """In place of the launcher. All ranks end with code 0, or this raises."""
    assert command[0] == "-c"
    run_ranks(_rank, num_ranks, command[2:], env, env=env, expect_exit=dict.fromkeys(range(num_ranks), 0))
    return 0


def _bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_batches: int, *arguments: str, code: str = TRAINS
) -> int:
    script = tmp_path / "train.py"
    script.write_text(code)
    monkeypatch.setattr(scaling, "start", forked)
    options = ["-np", "2", "--steps", "5", "--warm-up", "2", "--turns", "1", *arguments]
    monkeypatch.setattr(sys, "argv", ["scaling.py", *options, str(script), str(num_batches)])
    return scaling.main()


def test_scaling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A loader that takes 40 ms for each batch is to blame. The script is ended on all ranks after the same step."""
    out = tmp_path / "results.json"
    assert _bench(tmp_path, monkeypatch, 100, "--json", str(out)) == 0
    written = json.loads(out.read_text())
    assert written["about"]["script"] == "scaling.py"
    assert written["about"]["command"] == [str(tmp_path / "train.py"), "100"]
    assert written["about"]["versions"]["torch"] == torch.__version__
    *rows, losses, of_turn = written["rows"]
    assert of_turn == losses | {"turn": 0}
    assert [(row["condition"], row["ranks"], row["steps"]) for row in rows] == [
        *((name, 2, 5) for name in ("given", "synthetic", "silent", "compute")),
        *((name, 1, 5) for name in ("one", "ideal")),
    ]
    steps = {row["condition"]: row["step_ms"]["p50"] for row in rows}
    assert min(steps[name] for name in ("given", "silent", "one")) > 40
    assert rows[0]["samples_per_s"] == pytest.approx(16e3 / steps["given"])
    assert max(losses["lost_ms"], key=losses["lost_ms"].get) == "input"
    assert losses["lost_ms"]["input"] > losses["step_ms"] / 2
    printed, told = capfd.readouterr()
    assert "is lost to input" in printed
    assert "Attack input first" in printed
    assert printed.count("\n| ") == 2 * 2 + 6 + 6
    assert "by itself" not in told


def test_a_script_that_ends_early_is_measured_by_the_steps_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scaling, "CONDITIONS", scaling.CONDITIONS[1::4])  # of one rank and of two
    with pytest.raises(KeyError):
        _bench(tmp_path, monkeypatch, 4)
    assert capfd.readouterr().err.count("the script has ended by itself after 2 steps that count") == 2
    assert _bench(tmp_path, monkeypatch, 2) == 2
    assert "has ended after 2 steps, and the first 2 do not count" in capfd.readouterr().err


def test_a_script_without_wrap_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert _bench(tmp_path, monkeypatch, 1, code="import torchring\ntorchring.init()") == 2
    assert "has made no step with an optimizer that torchring.wrap() has returned" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.py"], "say how many ranks"),
        (["-np", "1", "train.py"], "2 or more"),
        (["-np", "2", "/nowhere/train.py"], "there is no script"),
        (["-np", "2", "--steps", "1000", __file__], "a trace holds 1000 steps"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_the_start(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["scaling.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        scaling.main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


# Arithmetic


def trace(periods_ms: list[int], device: str = "cpu", num_samples: int = 8) -> RankTrace:
    """Of a rank whose steps took that long."""
    steps, at = [], 0
    for number, period in enumerate(periods_ms):
        end = at + period * 1_000_000
        parts = (PartRecord(Part.INPUT, at, end),)
        steps.append(StepRecord(number, at, end, num_samples, 0, 0, parts, ()))
        at = end
    return RankTrace(About(device=device), tuple(steps))


def test_stretches_know_the_slowest_rank_and_the_slowest_in_each_step() -> None:
    """The first two steps do not count, and neither does the rest that fills no stretch."""
    ranks = [[90, 90, 1, 3, 2, 8, 5], [90, 90, 4, 2, 4, 6, 5]]
    found = stretches([trace(rank) for rank in ranks], 2, 2)
    assert found == Stretches((3.0, 5.0), (2.5, 5.0), (3.5, 6.0), 8.0, 5)
    on_gpus = stretches([trace(rank, "NVIDIA H100") for rank in ranks], 2, 2)
    assert on_gpus == Stretches((3.0, 5.0), (2.5, 5.0), (3.0, 5.0), 8.0, 5)
    assert stretches([trace([90, 90, 4, 6]), trace([90, 90, 4])], 2, 10).step_ms == (4.0,)
    assert stretches([trace([90, 90])], 2, 10) == Stretches((), (), (), 0.0, 0)
    assert stretches([trace([1, 1, 1], num_samples=0)], 2, 10).num_samples == 0


def measured(typical: float | None = None, in_step: float | None = None, **ms: float) -> dict[str, Measured]:
    """Two ranks with 8 samples each; one rank alone has 16."""

    def one(name: str, step: float) -> Measured:
        num_ranks, num_samples = (1, 16) if name in ("one", "ideal") else (2, 8)
        return Measured(num_ranks, Spread(step, step, step, 9), typical or step, in_step or step, num_samples, 50)

    return {name: one(name, step) for name, step in ms.items()}


EXAMPLE = {"given": 12, "synthetic": 9, "silent": 9, "compute": 7, "typical": 6.5, "in_step": 8, "one": 14, "ideal": 12}


def test_losses_are_those_of_the_example() -> None:
    """In the docstring of scaling_losses.py. A step of one rank has twice the samples here, so it may take twice 6."""
    found = losses_of(measured(**EXAMPLE))
    assert found.lost_ms == {"input": 2.5, "communication": 1.5, "interference": 0.5, "stragglers": 1.5}
    assert found.gain_ms == found.lost_ms | {"input": 3, "communication": 2}
    assert (found.step_ms, found.ideal_ms, found.efficiency) == (12, 6, 0.5)
    assert found.speed_up == pytest.approx(14 / 12)
    assert found.lost_alone == pytest.approx(2 / 14)
    assert in_words(found, [found]) == [
        "2 ranks give 1.17 times the speed of one (ideal 2).",
        "They reach 50% of the speed of 2 ranks that only compute, each as one alone: 21% is lost to input, 12% to "
        "communication, 12% to stragglers, 4% to interference.",
        "One rank alone loses 14% to input, too.",
        "A rank of several has a smaller batch than one alone; what that costs counts as interference.",
        "Attack input first: without it, 2 ranks are 1.33 times as fast. Give the DataLoader more workers "
        "(num_workers), or let it do less for each sample.",
    ]


def test_stragglers_cost_no_more_than_the_exchange_of_gradients() -> None:
    """Silent ranks that other programs slow down one after the other would be waited for, but only so long."""
    found = losses_of(measured(**EXAMPLE | {"in_step": 20}))
    assert found.lost_ms == {"input": 2.5, "communication": 0, "interference": 0.5, "stragglers": 3.0}
    found = losses_of(measured(**EXAMPLE | {"in_step": 20, "silent": 15}))
    assert found.lost_ms == {"input": 5.5, "communication": -0.5, "interference": 0.5, "stragglers": 0.5}
    assert sum(found.lost_ms.values()) == found.step_ms - found.ideal_ms


def test_a_job_gets_no_faster_than_the_ideal() -> None:
    """Noise has made communication negative, and stragglers as large as the step."""
    found = losses_of(measured(given=12, synthetic=12, silent=18, compute=18, typical=6, one=12, ideal=12))
    assert found.lost_ms == {"input": 0, "communication": -6, "interference": 0, "stragglers": 12}
    assert in_words(found, [found])[-1].startswith("Attack stragglers first: without it, 2 ranks are 2.00 times")


def test_what_to_attack_first_is_what_gains_at_once() -> None:
    """Data is loaded while ranks wait for gradients: less waiting for data would change nothing, for now."""
    found = losses_of(measured(given=12, synthetic=12, silent=10, compute=6, one=12, ideal=12))
    assert found.lost_ms["input"] == 2
    assert found.gain_ms["input"] == 0
    assert in_words(found, [found])[-1].startswith(
        "Attack communication first: without it, 2 ranks are 1.20 times as fast."
    )


def test_nothing_stands_out_where_nothing_is_lost() -> None:
    equal = dict.fromkeys(("given", "synthetic", "silent", "compute"), 10.0)
    found = losses_of(measured(**equal, one=20, ideal=20))
    lines = in_words(found, [found])
    assert lines[0] == "2 ranks give 2.00 times the speed of one (ideal 2)."
    assert lines[1] == "They reach 100% of the speed of 2 ranks that only compute, each as one alone."
    assert lines[-1] == "Nothing stands out: no single loss is 3% of a step."


def test_what_differs_between_turns_is_not_certain() -> None:
    """Here input takes 3 ms in one turn, and 7 in another."""
    same = {"synthetic": 9, "silent": 9, "compute": 6, "one": 14, "ideal": 12}
    turns = [losses_of(measured(given=given, **same)) for given in (12, 16)]
    assert in_words(turns[0], turns)[-1] == (
        "What to attack first is not certain: input seems to cost 25% of a step, but turns differ by 33%. Stop what "
        "else runs on the machine, or give more --turns."
    )
    assert "not certain" not in in_words(turns[1], turns)[-1]


def test_the_range_of_a_loss_contains_the_loss(capsys: pytest.CaptureFixture[str]) -> None:
    """The medians of all runs say 2.5 ms of input; both turns say less."""
    turns = [losses_of(measured(**EXAMPLE | {"given": 12, "synthetic": each})) for each in (11, 12)]
    about = {"command": [], "commit": "0", "processor": "", "date": ""}
    scaling.report(measured(**EXAMPLE), losses_of(measured(**EXAMPLE)), turns, about)
    assert "| input         | 2.5 (1.0 to 2.5)" in capsys.readouterr().out


def test_batches_count_as_equal_if_samples_are_unknown() -> None:
    unknown = {
        name: Measured(each.num_ranks, each.step, each.typical_ms, each.in_step_ms, 0, 50)
        for name, each in measured(given=12, synthetic=9, silent=10, compute=8, one=9, ideal=6).items()
    }
    found: Losses = losses_of(unknown)
    assert (found.ideal_ms, found.speed_up) == (6, 1.5)
    assert not found.divides_batch
