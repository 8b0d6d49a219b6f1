"""DataLoaders that give their first batch again and again, so that nobody waits for data."""

from __future__ import annotations

import contextlib
import io
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader


class RepeatedBatch:
    """A batch that is handed out many times.

    A script may take entries out of a batch, or write to its tensors. So each time the containers are built anew, and
    tensors that the script has written to are replaced by copies of what they were. A batch that cannot be pickled is
    handed out as it is.

    Args:
        batch: anything that a DataLoader may give.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._tensors: list[torch.Tensor] = []
        self._structure: bytes | None = None
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer)
        pickler.persistent_id = self._take_tensor  # type: ignore[method-assign]
        with contextlib.suppress(Exception):
            pickler.dump(batch)
            self._structure = buffer.getvalue()
        self._originals = [_copy(tensor) for tensor in self._tensors]
        self._versions = [_version(tensor) for tensor in self._tensors]

    def get(self) -> Any:
        """The batch, as it was."""
        if self._structure is None:
            return self._batch
        for i, tensor in enumerate(self._tensors):
            if _version(tensor) != self._versions[i]:
                self._tensors[i] = tensor = _copy(self._originals[i])
                self._versions[i] = _version(tensor)
        unpickler = pickle.Unpickler(io.BytesIO(self._structure))
        unpickler.persistent_load = self._tensors.__getitem__  # type: ignore[method-assign]
        return unpickler.load()

    def _take_tensor(self, item: Any) -> int | None:
        """Tensors stay out of the pickle, which holds their numbers."""
        if not isinstance(item, torch.Tensor):
            return None
        self._tensors.append(item)
        return len(self._tensors) - 1


class FirstBatches:
    """What `DataLoader.__iter__` does once `install` has been called.

    A pass over a loader has as many batches as before. Workers of the loader end after the first batch.

    Args:
        num_batches: of a pass over a loader that does not know its length.

    Attributes:
        num_loaders: how many loaders have given batches.
    """

    def __init__(self, num_batches: int) -> None:
        self.num_loaders = 0
        self._num_batches = num_batches
        self._batches: weakref.WeakKeyDictionary[DataLoader[Any], RepeatedBatch] = weakref.WeakKeyDictionary()
        self._load = DataLoader.__iter__

    def install(self) -> None:
        """From now on, for all loaders of this process."""

        def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
            return self._iterate(loader)

        DataLoader.__iter__ = iterate  # type: ignore[method-assign,assignment]

    def _iterate(self, loader: DataLoader[Any]) -> Iterator[Any]:
        batch = self._batches.get(loader)
        if batch is None:
            batches = self._load(loader)
            try:
                first = next(batches)
            except StopIteration:
                return
            finally:
                _end_workers(loader, batches)
            batch = self._batches[loader] = RepeatedBatch(first)
            self.num_loaders += 1
        for _ in range(self._length_of(loader)):
            yield batch.get()

    def _length_of(self, loader: DataLoader[Any]) -> int:
        try:
            return len(loader)
        except TypeError:  # an IterableDataset
            return self._num_batches


def _end_workers(loader: DataLoader[Any], batches: object) -> None:
    """End the processes that load the batches after the first."""
    if end := getattr(batches, "_shutdown_workers", None):
        end()
    loader._iterator = None  # with persistent_workers, the loader would go on with it


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().clone()
    return copy.pin_memory() if tensor.is_pinned() else copy


def _version(tensor: torch.Tensor) -> int:
    """Another after the tensor, or a view of it, was written to."""
    return 0 if tensor.is_inference() else tensor._version
