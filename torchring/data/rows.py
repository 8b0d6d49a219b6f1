"""Rows of Parquet and Arrow files, read by row groups: the way from Spark to PyTorch.

The rows of an epoch stand in one order, a row group after the other. Ranks, and the workers of each rank, get parts of
it that are equal to within one row. So a rank reads whole row groups, but for the first and the last.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.utils.data import get_worker_info

from torchring.data.epoch import Place
from torchring.data.shards import SplitDataset, shared_number
from torchring.world import Group

if TYPE_CHECKING:
    import pyarrow

_ROWS_AT_ONCE: Final = 1024  # that are Python objects
Interval = tuple[int, int]


class _Group(NamedTuple):
    """A row group of a Parquet file, or an Arrow file, that has rows."""

    fragment: Any
    num_rows: int

    def read(self, schema: pyarrow.Schema, columns: Sequence[str], rows: torch.Tensor) -> pyarrow.Table:
        import pyarrow

        return self.fragment.to_table(schema=schema, columns=columns).take(pyarrow.array(rows.numpy()))


def share(intervals: Sequence[Interval], part: int, num_parts: int) -> list[Interval]:
    """The rows of one of `num_parts` parts, equal to within one row, of the rows in `intervals`.

    For example, of the rows 0 to 9, three parts are 0 to 2, 3 to 5 and 6 to 9.
    """
    total = sum(end - begin for begin, end in intervals)
    return _cut(intervals, total * part // num_parts, total * (part + 1) // num_parts)


def left_over(intervals: Sequence[Interval], num_parts: int, num_taken: int) -> list[Interval]:
    """The rows that are left once `num_taken` rows at the front of each part have been used."""
    parts = [share(intervals, part, num_parts) for part in range(num_parts)]
    return [each for part in parts for each in _cut(part, num_taken, None)]


def _cut(intervals: Sequence[Interval], first: int, last: int | None) -> list[Interval]:
    """Rows number `first` to `last` - 1 of those in `intervals`."""
    found, position = [], 0
    for begin, end in intervals:
        low = begin + max(0, first - position)
        high = end if last is None else min(end, begin + last - position)
        if low < high:
            found.append((low, high))
        position += end - begin
    return found


class RowGroups(SplitDataset):
    """Rows of Parquet and Arrow (Feather) files, of which each rank and each worker reads its part. Needs pyarrow.

        dataset = torchring.data.RowGroups("/data/train", batch_size=256)
        loader = DataLoader(dataset, batch_size=None)
        for epoch in range(num_epochs):
            dataset.set_epoch(epoch)
            with torchring.join(optimizer):
                for batch in loader:  # {"image": tensor [256, ...], "label": tensor [256]}
                    ...

    No row is lost, and none comes twice. Ranks get equally many rows to within one, so the numbers of their batches may
    differ by one: use `torchring.join`, as above.

    With `shuffle`, an epoch has the row groups in another order, and the rows of each row group. A row group is read
    and held as a whole, while a thread reads the next one. So workers are not needed, but where `DataLoader` workers
    transform the rows.

    Without workers, `state_dict()` holds the number of rows that each rank has been given. It is the same on all ranks
    that have been given equally many, and training goes on with any number of ranks. With workers, use torchdata's
    `StatefulDataLoader`, and go on with as many ranks and workers as before.

    Args:
        source: a folder with its subfolders, a file, a URI such as "s3://bucket/train", a list of files, or a
            `pyarrow.dataset.Dataset`. Names that begin with "_" or "." are left out, and columns are taken from the
            names of folders ("year=2024"), as Spark has it. All ranks see the same files.
        columns: those to read. By default all.
        batch_size: yield batches of that many rows: dicts by column of tensors, or of lists for columns that are not
            numbers. Batches reach over row groups; the last one may be smaller. By default yield rows: dicts of Python
            values, which a DataLoader collates.
        shuffle: shuffle, in an order that depends on `seed` and the epoch.
        seed: equal on all ranks. `load_state_dict` replaces it.
        format: "parquet", or "feather" for Arrow files (not streams).
        rank: this process. By default that of torchring when an iteration begins.
        size: number of processes that share the samples. By default that of torchring when an iteration begins.
        group: the ranks that share the samples, in place of `rank` and `size`. See `Sampler`.

    Raises:
        ImportError: pyarrow is missing.
        FileNotFoundError: there are no files.
        ValueError: files have other columns, or columns of other types, than the first file; none has rows.
    """

    def __init__(
        self,
        source: Any,
        columns: Sequence[str] | None = None,
        batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        *,
        format: str = "parquet",
        rank: int | None = None,
        size: int | None = None,
        group: Group | None = None,
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        super().__init__(Place(rank, size, group))
        try:
            from pyarrow import dataset
        except ImportError as error:
            raise ImportError("RowGroups reads files by pyarrow: pip install 'torchring[data]'") from error
        found = dataset.dataset(source, format=format, partitioning="hive")
        files = sorted(found.get_fragments(), key=lambda file: file.path)
        if not files:
            raise FileNotFoundError(f"{source} has no files; their names must not begin with '_' or '.'")
        self._schema = found.schema
        self._columns = [*found.schema.names] if columns is None else [*columns]
        if missing := {*self._columns} - {*found.schema.names}:
            raise ValueError(f"{source} has no column {missing.pop()!r}; it has {', '.join(found.schema.names)}")
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._groups = [*_groups_of(files, found.schema, self._columns)]
        self._num_rows = sum(group.num_rows for group in self._groups)
        if not self._num_rows:
            raise ValueError(f"{source} has no rows, in {len(files)} files")
        self._readers = shared_number(0)  # 1 if workers read
        self._used: tuple[int, list[tuple[int, int]]] = 0, []  # what was used before of an epoch; see _Rows
        self._newest: _Rows | None = None

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch, of an iteration without workers. The same on ranks that have come as far.

        Raises:
            ValueError: workers read the rows.
        """
        if self._readers and get_worker_info() is None:
            raise ValueError(
                "DataLoader workers read the rows, so only they know how many: use torchdata's StatefulDataLoader and "
                "its state_dict(), or num_workers=0, where a thread reads ahead"
            )
        return (self._newest or _Rows(self)).state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where `state_dict` says, from the next iteration on, in its order: seed and `shuffle` are its.

        Raises:
            ValueError: the state is of other files, or of one of several workers.
        """
        rows = _Rows(self)
        rows.load_state_dict(state_dict)
        # A StatefulDataLoader that has finished an epoch calls this, too, when the script has set the next one.
        if get_worker_info() is None and (rows.left() or rows.epoch > self.epoch):
            self.set_epoch(rows.epoch)
        self._newest, self._used = rows, (rows.epoch, rows.used)

    def __iter__(self) -> Iterator[Any]:
        return _Rows(self)

    def __getstate__(self) -> dict[str, Any]:
        """See `SplitDataset`. An iteration is not part of it."""
        return {**super().__getstate__(), "_newest": None}

    def _pieces(self, epoch: int, rows: Sequence[Interval]) -> Iterator[tuple[int, torch.Tensor]]:
        """The row groups in which these rows of an epoch are, and which rows of each to take, in order."""
        begin = 0
        for number in self._permutation(len(self._groups), epoch).tolist():
            end = begin + self._groups[number].num_rows
            wanted = [slice(max(first, begin) - begin, min(last, end) - begin) for first, last in rows]
            if wanted := [each for each in wanted if each.start < each.stop]:
                order = self._permutation(end - begin, epoch, number + 1)
                yield number, torch.cat([order[each] for each in wanted])
            begin = end

    def _permutation(self, length: int, *seeds: int) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(length)
        seed = functools.reduce(lambda seed, each: (seed * 1_000_003 + each) % 2**63, seeds, self._seed)
        return torch.randperm(length, generator=torch.Generator().manual_seed(seed))


class _Rows(Iterator[Any]):
    """One iteration, in one worker. It begins with its first row."""

    def __init__(self, dataset: RowGroups) -> None:
        self._dataset = dataset
        self.epoch = dataset.epoch
        # What was used of it before: numbers of ranks, and of rows that each of these has used
        self.used = dataset._used[1] if dataset._used[0] == self.epoch else []
        self._num_taken = 0  # rows that this worker has yielded; with batches, as if the last were not smaller
        self._is_over = False
        self._drawing: Iterator[Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """What all ranks have used; with several workers, what this worker has, too."""
        dataset, (_, size, _, num_workers) = self._dataset, self._dataset.part()
        most = -(-sum(end - begin for begin, end in self.left()) // size)
        taken = most if self._is_over else min(self._num_taken, most)  # so a rank with a row less says the same
        return {
            "epoch": self.epoch,
            "seed": dataset._seed,
            "shuffle": dataset._shuffle,
            "num_rows": dataset._num_rows,
            "used": [*self.used, *([[size, taken]] if num_workers == 1 and taken else [])],
            "taken": taken if num_workers > 1 else 0,
            "size": size,
            "num_workers": num_workers,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on there. Raises ValueError: see `RowGroups.load_state_dict`."""
        dataset = self._dataset
        if state_dict["num_rows"] != dataset._num_rows:
            raise ValueError(
                f"the state is of files with {state_dict['num_rows']} rows, but these have {dataset._num_rows}: go on "
                "with the same files, or begin anew"
            )
        _, size, _, num_workers = dataset.part()
        if state_dict["num_workers"] > 1 and (state_dict["size"], state_dict["num_workers"]) != (size, num_workers):
            raise ValueError(
                f"the state is of {state_dict['size']} ranks with {state_dict['num_workers']} workers each, but there "
                f"are {size} ranks with {num_workers} now: go on with as many as before, or save without workers"
            )
        dataset._seed, dataset._shuffle = state_dict["seed"], state_dict["shuffle"]
        self.epoch, self.used, self._num_taken = state_dict["epoch"], [*state_dict["used"]], state_dict["taken"]

    def __next__(self) -> Any:
        dataset = self._dataset
        if self._drawing is None:
            dataset._newest = self
            rank, size, worker, num_workers = dataset.part()
            dataset._readers.fill_(get_worker_info() is not None)
            own = share(share(self.left(), rank, size), worker, num_workers)
            self._drawing = self._draw(_cut(own, self._num_taken, None))
        try:
            found = next(self._drawing)
        except StopIteration:
            self._is_over = True
            dataset._used = 0, []
            raise
        self._num_taken += dataset._batch_size or 1
        return found

    def left(self) -> list[Interval]:
        """The rows of the epoch that were not used before."""
        left = [(0, self._dataset._num_rows)]
        for size, num_taken in self.used:
            left = left_over(left, size, num_taken)
        return left

    def _draw(self, rows: Sequence[Interval]) -> Iterator[Any]:
        batch_size = self._dataset._batch_size
        if batch_size is None:
            for table in self._tables(rows):
                for part in table.to_batches(max_chunksize=_ROWS_AT_ONCE):
                    yield from part.to_pylist()
            return
        import pyarrow

        held: list[pyarrow.Table] = []
        for table in self._tables(rows):
            held.append(table)
            num_held = sum(each.num_rows for each in held)
            if num_held >= batch_size:
                joined = pyarrow.concat_tables(held)
                for first in range(0, num_held - batch_size + 1, batch_size):
                    yield _batch(joined.slice(first, batch_size))
                held = [joined.slice(num_held - num_held % batch_size)]
        if sum(each.num_rows for each in held):
            yield _batch(pyarrow.concat_tables(held))

    def _tables(self, rows: Sequence[Interval]) -> Iterator[pyarrow.Table]:
        """The tables that have these rows. A thread reads the next one."""
        dataset = self._dataset
        thread = ThreadPoolExecutor(1, "torchring-rows")
        try:
            following: Future[pyarrow.Table] | None = None
            for number, order in dataset._pieces(self.epoch, rows):
                read = dataset._groups[number].read
                table, following = following, thread.submit(read, dataset._schema, dataset._columns, order)
                if table is not None:
                    yield table.result()
            if following is not None:
                yield following.result()
        finally:
            thread.shutdown(wait=False, cancel_futures=True)


def _groups_of(files: Sequence[Any], schema: pyarrow.Schema, columns: Sequence[str]) -> Iterator[_Group]:
    """The row groups of files that have the same columns. Reads only where these are, and how long."""
    of_folders = {*schema.names} - {*files[0].physical_schema.names}
    for file in files:
        names = file.physical_schema.names
        for name in [*columns, *(names if len(columns) == len(schema.names) else [])]:
            expected, found = (
                each.field(name).type if name in each.names else None for each in (schema, file.physical_schema)
            )
            if expected != found and name not in of_folders:
                raise ValueError(
                    f"column {name!r} is {found or 'missing'} in {file.path}, but {expected or 'missing'} in others: "
                    "write the files with one schema, or choose other columns"
                )
        if hasattr(file, "row_groups"):
            groups = [_Group(each, each.row_groups[0].num_rows) for each in file.split_by_row_group()]
        else:
            groups = [_Group(file, file.count_rows())]
        yield from (each for each in groups if each.num_rows)


def _batch(table: pyarrow.Table) -> dict[str, Any]:
    return {name: _values(name, table.column(name).combine_chunks()) for name in table.column_names}


def _values(name: str, column: Any) -> Any:
    """A tensor of numbers, a list of tensors where rows are lists of numbers, or else a list of Python values."""
    from pyarrow import types

    kind = column.type
    is_fixed = types.is_fixed_size_list(kind)
    is_list = is_fixed or types.is_list(kind) or types.is_large_list(kind)
    number = kind.value_type if is_list else kind
    if not (types.is_integer(number) or types.is_floating(number) or types.is_boolean(number)):
        return column.to_pylist()
    values = column.flatten() if is_list else column
    if column.null_count or values.null_count:
        raise ValueError(
            f"column {name!r} has nulls, which tensors cannot hold: fill them in the files, or leave out batch_size to "
            "get rows, with None"
        )
    numbers = torch.tensor(values.to_numpy(zero_copy_only=False))
    if is_fixed:
        return numbers.reshape(len(column), kind.list_size)
    return [*torch.split(numbers, column.value_lengths().to_pylist())] if is_list else numbers
