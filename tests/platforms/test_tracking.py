"""docs/platforms/tracking.md: its code and its command on two ranks, and what trackers then hold."""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

import torchring
from tests.support.checks import assert_same_on_all_ranks, digest
from tests.support.documents import ROOT, Block, blocks, snippet
from tests.support.harness import run_ranks

pytestmark = pytest.mark.platforms

PAGE = ROOT / "docs" / "platforms" / "tracking.md"
ENVIRON = {
    "HF_HUB_OFFLINE": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_TRACKING_URI": "file:./mlruns",
    "MLFLOW_ALLOW_FILE_STORE": "true",
}
NUM_SAMPLES = 20


def write_shards() -> None:
    """part-0.tar to part-2.tar, with 20 samples; the first element of sample n is n."""
    for part in range(3):
        with tarfile.open(f"part-{part}.tar", "w") as tar:
            for n in range(part, NUM_SAMPLES, 3):
                for name, size in (("x", 8), ("y", 1)):
                    buffer = io.BytesIO()
                    torch.save(torch.full((size,), float(n)), buffer)
                    member = tarfile.TarInfo(f"{n:03}.{name}.pth")
                    member.size = buffer.tell()
                    buffer.seek(0)
                    tar.addfile(member, buffer)


def run_block(block: Block, namespace: dict[str, Any]) -> None:
    exec(compile(block.code, block.place, "exec"), namespace)


def _run_page(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    os.chdir(folder)
    if rank == 0:
        write_shards()
    torchring.barrier()
    namespace: dict[str, Any] = {}
    found: dict[str, Any] = {}
    seen: list[float] = []
    for block in blocks(PAGE, "python"):
        run_block(block, namespace)
        if "def train_step" in block.code:
            own = namespace["train_step"]
            namespace["train_step"] = lambda x, y, own=own: (seen.extend(x[:, 0].tolist()), own(x, y))[1]
        else:
            subject = re.findall(r"(?:import|from) (\w+)", block.code)[0]
            found[subject] = (digest(namespace["model"].parameters()), sorted(seen), namespace["loss"].item())
            seen.clear()
        if "optuna" in block.code:
            found["rates"] = float(namespace["lr"])
    if rank == 0:
        found["study"] = [trial.params["lr"] for trial in namespace["study"].trials]
    return {"found": found, "jobs": sweep()}


def sweep() -> list[str]:
    """The command under ## Hydra, but for the launcher: the folders in which its jobs have trained."""
    import hydra
    from omegaconf import DictConfig, OmegaConf

    folders = []

    def train(config: DictConfig) -> None:
        model = torch.nn.Linear(8, 1)
        optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=config.lr), model)
        model(torch.ones(1, 8) * torchring.rank()).sum().backward()
        optimizer.step()
        optimizer.close()
        folder = Path(hydra.core.hydra_config.HydraConfig.get().runtime.output_dir)
        folders.append(f"{folder.relative_to(Path.cwd())} {OmegaConf.load(folder / '.hydra' / 'config.yaml').lr}")

    words = shlex.split(snippet(PAGE, "## Hydra").removeprefix("$ "))
    sys.argv = words[words.index("train.py") :]
    config = OmegaConf.create({"lr": 1.0})
    hydra.core.config_store.ConfigStore.instance().store("config", node=config)
    hydra.main(version_base=None, config_path=None, config_name="config")(train)()
    return folders


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tracking")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(_run_page, 2, str(folder), deadline=120, env=ENVIRON)


def test_all_examples_train_together(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["found"] for rank in ranks)
    assert first.keys() - {"study"} == {"mlflow", "torch", "optuna", "webdataset", "datasets", "rates"}
    for name in ("mlflow", "torch", "optuna", "webdataset", "datasets"):
        assert_same_on_all_ranks([first[name][0], second[name][0]])


def test_each_sample_is_read_once(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["found"] for rank in ranks)
    assert sorted(first["webdataset"][1] + second["webdataset"][1]) == list(range(NUM_SAMPLES))
    assert len(first["webdataset"][1]) != len(second["webdataset"][1]), "two shards and one"
    assert (len(first["datasets"][1]), len(second["datasets"][1])) == (12, 11)
    assert not {*first["datasets"][1]} & {*second["datasets"][1]}


def test_optuna_chooses_for_all_ranks(ranks: list[dict[str, Any]]) -> None:
    rates = ranks[0]["found"]["study"]
    assert len(set(rates)) == 3
    assert [rank["found"]["rates"] for rank in ranks] == [rates[-1]] * 2
    assert ranks[0]["found"]["optuna"][2] == ranks[1]["found"]["optuna"][2], "the mean loss"


def test_hydra_gives_each_rank_and_job_a_folder(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        assert rank["jobs"] == [f"sweep/0/rank{number} 0.1", f"sweep/1/rank{number} 0.01"]


def assert_has_figures(names: set[str]) -> None:
    assert {"torchring_step_seconds", "torchring_samples_per_second", "loss"} <= names


def test_mlflow_has_the_figures_of_rank_0(ranks: list[dict[str, Any]], folder: Path) -> None:
    files = {file.name: file for file in folder.glob("mlruns/*/*/metrics/*")}
    assert_has_figures(files.keys())
    steps = [line.split() for line in files["loss"].read_text().splitlines()]
    assert [int(step) for _, _, step in steps] == [3, 7]
    assert float(steps[-1][1]) == ranks[1]["found"]["mlflow"][2], "the mean, which rank 1 has, too"
    assert len(list(folder.glob("mlruns/*/*/metrics"))) == 1, "rank 0 alone has a run"
    assert {float(line.split()[1]) for line in files["torchring_rank"].read_text().splitlines()} == {0.0}


def test_tensorboard_has_the_figures_of_rank_0(ranks: list[dict[str, Any]], folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "runs"))
    events.Reload()
    assert_has_figures({*events.Tags()["scalars"]})
    loss = events.Scalars("loss")
    assert [event.step for event in loss] == [3, 7]
    assert loss[-1].value == pytest.approx(ranks[1]["found"]["torch"][2], rel=1e-6)
    assert len(list((folder / "runs").iterdir())) == 1, "rank 0 alone writes"
