"""`metrics()` on its way to TensorBoard, MLflow and Prometheus."""

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import torchring
from torchring import monitoring
from torchring.default_world import default_world
from torchring.observe.recorder.writer import recorder_of


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    torchring.metrics()  # begins to record
    model = torch.nn.Linear(4, 4)
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(3):
        model(torch.ones(6, 4)).sum().backward()
        optimizer.step()
    monkeypatch.setattr(recorder_of(default_world()), "noise_scale", 12.0)  # a world of one has none
    errors = {"1-D": 1e-7, "embedding": 0.01, "matrix": 0.01}  # nor does it compress
    monkeypatch.setattr(recorder_of(default_world()), "compression_error", errors)
    found = torchring.metrics()
    monkeypatch.setattr(monitoring, "metrics", found.copy)
    return found


def test_the_docstring_names_every_figure(figures: dict[str, float]) -> None:
    assert {*re.findall(r"torchring_\w+", torchring.metrics.__doc__ or "")} == figures.keys()


def test_tensorboard_and_mlflow(figures: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    written, logged = [], []
    writer: Any = types.SimpleNamespace(add_scalar=lambda *arguments: written.append(arguments))
    mlflow = types.SimpleNamespace(log_metrics=lambda values, step: logged.append((values, step)))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)  # type: ignore[arg-type]
    monitoring.log_to_tensorboard(writer, 7)
    monitoring.log_to_mlflow(7)
    assert written == [(name, value, 7) for name, value in figures.items()]
    assert logged == [(figures, 7)]


def test_prometheus(figures: dict[str, float], tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    path = tmp_path / "torchring.prom"
    monitoring.write_prometheus(path)
    families = parser.text_string_to_metric_families(path.read_text())
    samples = [sample for family in families for sample in family.samples]
    found = {sample.name: sample for sample in samples if not sample.name.endswith("_created")}
    assert {sample.labels["rank"] for sample in found.values()} == {"0"}
    del figures["torchring_rank"]
    assert {name: sample.value for name, sample in found.items()} == pytest.approx(figures)
    assert "# TYPE torchring_steps_total counter" in path.read_text()
