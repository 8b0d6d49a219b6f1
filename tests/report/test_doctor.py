"""The report compares a job with what `torchring doctor --json` has found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.traces import simulate, write
from torchring import cli
from torchring.report.model.doctor import bus_bandwidths
from torchring.report.model.merge import merge
from torchring.report.show.captions import of_bandwidth
from torchring.report.verdict.analysis import analyse


def path(kind: str, ranks: list[int], gigabytes_per_second: float) -> dict[str, object]:
    return {"kind": kind, "ranks": ranks, "gigabytes_per_second": gigabytes_per_second}


def test_the_slowest_path_of_each_kind_counts(tmp_path: Path) -> None:
    paths = [path("shared memory", [0, 1, 2, 3], 2.0), path("Gloo", [0, 4], 0.5), path("Gloo", [1, 5], 0.25)]
    file = tmp_path / "doctor.json"
    file.write_text(json.dumps({"paths": paths}))
    assert bus_bandwidths(file) == {"within a host": 3.0, "between hosts": 0.25}


def test_the_job_is_compared_with_its_own_path() -> None:
    within = merge(simulate(2, 20, gigabytes_per_s=1.0, latency_ms=0, noise=0))
    between = merge(simulate(2, 20, gigabytes_per_s=1.0, latency_ms=0, noise=0, ranks_per_host=1, skew_ms=[0, 3]))
    doctor = {"within a host": 8.0, "between hosts": 4.0}
    for job, found in ((within, 8.0), (between, 4.0)):
        bandwidth = analyse(job, doctor=doctor).bandwidth
        assert bandwidth is not None
        assert bandwidth.doctor == found
    caption = of_bandwidth(analyse(between, doctor=doctor))
    assert "The doctor found 4.00\xa0GB/s" in caption
    assert "so the job uses 25% of it." in caption
    assert "octor" not in of_bandwidth(analyse(between))


@pytest.mark.parametrize("text", ["", "[]", '{"path": []}', '{"paths": [{}]}'])
def test_another_file_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, simulate(1, 20)[0])
    file = tmp_path / "doctor.json"
    file.write_text(text)
    assert cli.main(["report", str(tmp_path), "--no-html", "--doctor", str(file)]) == 1
    assert f"torchring report: {file} is no report of `torchring doctor --json`" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path), "--no-html", "--doctor", str(tmp_path / "none")]) == 1
    assert "cannot read" in capsys.readouterr().err
