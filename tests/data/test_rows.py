"""`torchring.data.RowGroups`: no row lost, none twice, over ranks, workers, epochs and changes of ranks."""

import bisect
import functools
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from pyarrow import feather, parquet
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from torchring.data import RowGroups

NUM_ROWS = 41


@pytest.fixture(scope="module", params=["parquet", "feather"])
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes `RowGroups` of rows 0 to 40, in three files with row groups of 7, as Spark writes them."""
    folder = tmp_path_factory.mktemp("rows")
    table = pyarrow.table(
        {
            "row": pyarrow.array(range(NUM_ROWS), pyarrow.int64()),
            "image": pyarrow.array([[n, n + 0.5] for n in range(NUM_ROWS)], pyarrow.list_(pyarrow.float32(), 2)),
            "tokens": pyarrow.array([list(range(n % 3)) for n in range(NUM_ROWS)], pyarrow.list_(pyarrow.int32())),
            "text": [f"row {n}" for n in range(NUM_ROWS)],
        }
    )
    for year, part in enumerate((table[:17], table[17:17], table[17:31], table[31:])):
        file = folder / f"year={year}" / "part"
        file.parent.mkdir()
        if request.param == "parquet":
            parquet.write_table(part, file, row_group_size=7)
        else:
            feather.write_feather(part, str(file), chunksize=7)
    (folder / "_SUCCESS").touch()
    return functools.partial(RowGroups, folder, format=request.param)


def rows_of(dataset: RowGroups, loader: Any = None) -> list[int]:
    loader = DataLoader(dataset, None) if loader is None else loader
    return [n for each in loader for n in torch.as_tensor(each["row"]).reshape(-1).tolist()]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_each_row_once(rows: Any, shuffle: bool, batch_size: int | None) -> None:
    for size in (1, 3, 5):
        datasets = [rows(["row"], batch_size, shuffle, rank=r, size=size) for r in range(size)]
        orders = []
        for epoch in range(2):
            for dataset in datasets:
                dataset.set_epoch(epoch)
            parts = [rows_of(dataset) for dataset in datasets]
            assert {len(part) for part in parts} <= {NUM_ROWS // size, -(-NUM_ROWS // size)}
            orders.append([row for part in parts for row in part])
            assert Counter(orders[-1]) == Counter(range(NUM_ROWS))
            if epoch:
                assert parts == [rows_of(dataset) for dataset in datasets]
        assert (orders[0] != orders[1]) == shuffle
        if not shuffle:
            assert sorted(orders[0][:17]) == orders[0][:17]


def test_row_groups_stay_together(rows: Any) -> None:
    """Those of a Parquet file, and an Arrow file."""
    order = rows_of(rows(["row"]))
    edges = [7, 14, 17, 24, 31, 38] if rows.keywords["format"] == "parquet" else [17, 31]
    group_of = [bisect.bisect(edges, n) for n in order]
    changes = [n for n in range(1, NUM_ROWS) if group_of[n] != group_of[n - 1]]
    assert len(changes) == len(edges)
    assert order[: changes[0]] != sorted(order[: changes[0]])


def test_batches(rows: Any) -> None:
    batches = list(rows(batch_size=9, shuffle=False))
    assert [len(batch["row"]) for batch in batches] == [9, 9, 9, 9, 5]
    batch = batches[1]  # of two row groups
    assert batch["row"].tolist() == [*range(9, 18)]
    assert torch.equal(batch["image"], torch.tensor([[n, n + 0.5] for n in range(9, 18)]))
    assert [tokens.tolist() for tokens in batch["tokens"]] == [list(range(n % 3)) for n in range(9, 18)]
    assert batch["text"] == [f"row {n}" for n in range(9, 18)]
    last = {"row": 40, "image": [40.0, 40.5], "tokens": [0], "text": "row 40", "year": 3}
    assert list(rows(shuffle=False))[40] == last
    assert list(next(iter(rows(["text", "row"])))) == ["text", "row"]


@pytest.mark.parametrize("batch_size", [None, 3])
def test_schedules_of_kill_resume_and_resize(rows: Any, batch_size: int | None) -> None:
    for seed in range(8):
        choose = random.Random(seed)
        num_epochs, epoch, state = 2, 0, None
        trained: list[Counter[int]] = [Counter() for _ in range(num_epochs)]
        while epoch < num_epochs:
            size, left = choose.randint(1, 5), choose.randint(0, 12)
            ranks = [rows(["row"], batch_size, seed=seed, rank=r, size=size) for r in range(size)]
            for rank in ranks if state is not None else ():
                rank.load_state_dict(state)
            while epoch < num_epochs and left:
                for rank in ranks:
                    rank.set_epoch(epoch)
                loaders = [iter(DataLoader(rank, None if batch_size else 3)) for rank in ranks]
                while left and (batches := [b for b in (next(loader, None) for loader in loaders) if b is not None]):
                    left -= 1
                    trained[epoch].update(int(n) for batch in batches for n in batch["row"])
                    state, *others = [rank.state_dict() for rank in ranks]
                    assert others == [state] * len(others)
                epoch += left > 0
        assert trained == [Counter(range(NUM_ROWS))] * num_epochs


def test_workers(rows: Any) -> None:
    """They read disjoint parts, and stay from one epoch to the next; torchdata's loader goes on where it stopped."""

    def loaders() -> tuple[list[RowGroups], list[StatefulDataLoader[Any]]]:
        datasets = [rows(["row"], 3, rank=rank, size=2) for rank in range(2)]
        return datasets, [StatefulDataLoader(each, None, num_workers=2, persistent_workers=True) for each in datasets]

    datasets, both = loaders()
    epochs = []
    for epoch in range(2):
        for each in datasets:
            each.set_epoch(epoch)
        epochs.append([n for loader in both for batch in loader for n in batch["row"].tolist()])
        assert Counter(epochs[-1]) == Counter(range(NUM_ROWS))
    assert epochs[0] != epochs[1]
    finished = both[0].state_dict()
    datasets, both = loaders()
    both[0].load_state_dict(finished)
    datasets[0].set_epoch(1)
    assert rows_of(datasets[0], loader=both[0]) == epochs[1][: len(epochs[1]) // 2]
    datasets, both = loaders()
    first, states = [], []
    for loader in both:
        batches = iter(loader)
        first += [n for _ in range(3) for n in next(batches)["row"].tolist()]
        states.append(loader.state_dict())
    datasets, both = loaders()
    for loader, state in zip(both, states, strict=True):
        loader.load_state_dict(state)
        first += [n for batch in loader for n in batch["row"].tolist()]
    assert Counter(first) == Counter(range(NUM_ROWS))
    worker = states[0]["_snapshot"]["_worker_snapshots"]["worker_0"]["fetcher_state"]["dataset_iter_state"]
    with pytest.raises(ValueError, match="of 2 ranks with 2 workers each, but there are 2 ranks with 1 now"):
        datasets[0].load_state_dict(worker)
    datasets[0].load_state_dict(rows().state_dict())
    next(iter(both[0]))
    with pytest.raises(ValueError, match="StatefulDataLoader and its state_dict"):
        datasets[0].state_dict()
    next(iter(datasets[0]))
    assert datasets[0].state_dict()["used"] == [[2, 3]]


def write(path: Path, **columns: Any) -> Path:
    parquet.write_table(pyarrow.table(columns), path)
    return path


def test_bad_input(tmp_path: Path) -> None:
    def refused(text: str, act: Callable[[], object], kind: type[Exception] = ValueError) -> None:
        with pytest.raises(kind, match=text):
            act()

    for name in ("train", "."):
        refused(".", lambda name=name: RowGroups(tmp_path / name), FileNotFoundError)
    one, other = write(tmp_path / "1.parquet", x=[1, 2], y=[1, 2]), write(tmp_path / "2.parquet", x=[1.5], y=[None])
    refused(r"column 'x' is double in .*2.parquet, but int64 in others: write", lambda: RowGroups(tmp_path))
    both = [str(one), str(write(tmp_path / "3.parquet", x=[1]))]
    refused(r"column 'y' is missing in .*3.parquet, but int64", lambda: RowGroups(both))
    refused(r"has no column 'z'; it has x, y", lambda: RowGroups(one, columns=["z"]))
    empty = write(tmp_path / "4.parquet", x=pyarrow.array([], pyarrow.int64()))
    refused("has no rows, in 1 files", lambda: RowGroups(empty))
    refused("batch_size must be at least 1, got 0", lambda: RowGroups(one, batch_size=0))
    (tmp_path / "5.arrow").write_bytes(b"not Arrow at all")
    refused(r"Could not read schema from .*5\.arrow", lambda: RowGroups(tmp_path / "5.arrow", format="feather"))
    state = RowGroups(one).state_dict()
    refused("of files with 2 rows, but these have 1", lambda: RowGroups(other).load_state_dict(state))
    nulls = write(tmp_path / "6.parquet", x=[1, None])
    assert [row["x"] for row in RowGroups(nulls, shuffle=False)] == [1, None]
    refused("column 'x' has nulls", lambda: list(RowGroups(nulls, batch_size=2)))


def test_without_pyarrow(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyarrow"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"RowGroups reads files by pyarrow: pip install 'torchring\[data\]'"):
        rows()
