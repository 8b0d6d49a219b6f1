"""docs/platforms/tracking.md: its code and its command on two ranks, and what trackers then hold."""

import io
import re
import shlex
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

import torchring
from tests.platforms.cases import Cases, same
from tests.support.checks import digest
from tests.support.documents import ROOT, blocks, snippet

pytestmark = pytest.mark.platforms

PAGE = ROOT / "docs" / "platforms" / "tracking.md"
ENVIRON = {
    "HF_HUB_OFFLINE": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_TRACKING_URI": "file:./mlruns",
    "MLFLOW_ALLOW_FILE_STORE": "true",
}
NUM_SAMPLES = 20
case = Cases(__name__, deadline=120, env=ENVIRON)


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


@case
def test_the_page_trains_on_all_ranks_together(rank: int) -> None:
    if rank == 0:
        write_shards()
    torchring.barrier()
    namespace: dict[str, Any] = {}
    seen: dict[str, list[float]] = {}
    losses: dict[str, float] = {}
    drawn: list[float] = []
    for block in blocks(PAGE, "python"):
        exec(compile(block.code, block.place, "exec"), namespace)
        if "def train_step" in block.code:
            own = namespace["train_step"]
            namespace["train_step"] = lambda x, y, own=own: (drawn.extend(x[:, 0].tolist()), own(x, y))[1]
        else:
            subject = re.findall(r"(?:import|from) (\w+)", block.code)[0]
            same(digest(namespace["model"].parameters()))
            seen[subject], losses[subject] = sorted(drawn), namespace["loss"].item()
            drawn.clear()
        if "optuna" in block.code:
            rate = same(float(namespace["lr"]))
    assert losses.keys() == {"mlflow", "torch", "optuna", "webdataset", "datasets"}
    first, second = torchring.all_gather_object(seen)
    assert sorted(first["webdataset"] + second["webdataset"]) == list(range(NUM_SAMPLES)), "each sample is read once"
    assert len(first["webdataset"]) != len(second["webdataset"]), "two shards and one"
    assert (len(first["datasets"]), len(second["datasets"])) == (12, 11)
    assert not {*first["datasets"]} & {*second["datasets"]}
    for subject in ("mlflow", "torch", "optuna"):
        same(losses[subject])  # the mean
    if rank == 0:
        rates = [trial.params["lr"] for trial in namespace["study"].trials]
        assert len(set(rates)) == 3
        assert rates[-1] == rate
        check_mlflow(losses["mlflow"])
        check_tensorboard(losses["torch"])


FIGURES = {"torchring_step_seconds", "torchring_samples_per_second", "loss"}


def check_mlflow(last_loss: float) -> None:
    """It has the figures of rank 0, which alone has a run."""
    (folder,) = Path().glob("mlruns/*/*/metrics")
    metrics = {file.name: [line.split() for line in file.read_text().splitlines()] for file in folder.iterdir()}
    assert metrics.keys() >= FIGURES
    assert [int(step) for _, _, step in metrics["loss"]] == [3, 7]
    assert float(metrics["loss"][-1][1]) == last_loss
    assert {float(rank) for _, rank, _ in metrics["torchring_rank"]} == {0.0}


def check_tensorboard(last_loss: float) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator("runs")
    events.Reload()
    loss = events.Scalars("loss")
    assert {*events.Tags()["scalars"]} >= FIGURES
    assert [event.step for event in loss] == [3, 7]
    assert loss[-1].value == pytest.approx(last_loss, rel=1e-6)
    assert len(list(Path("runs").iterdir())) == 1, "rank 0 alone writes"


@case
def test_hydra_gives_each_rank_and_job_a_folder(rank: int) -> None:
    """The command under ## Hydra, but for the launcher."""
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

    words = shlex.split(snippet(PAGE, "## Hydra").replace("\\\n", "").removeprefix("$ "))
    sys.argv = words[words.index("train.py") :]
    config = OmegaConf.create({"lr": 1.0})
    hydra.core.config_store.ConfigStore.instance().store("config", node=config)
    hydra.main(version_base=None, config_path=None, config_name="config")(train)()
    assert folders == [f"sweep/0/rank{rank} 0.1", f"sweep/1/rank{rank} 0.01"]
