"""When a model that trains computes its forward, and what it is given: hooks on the model see both.

Of what it is given: how many samples, and a digest by which equal batches are recognised.
"""

import contextlib
import functools
import itertools
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
import torch

from torchring.accelerators import accelerator_of
from torchring.observe.loading import Loading
from torchring.observer import Observers

_NUM_VALUES: Final = 256  # of a tensor: images have edges of one colour, and texts end in padding
_MOST_TENSORS: Final = 4  # of the model's arguments
_PLACE_BITS: Final = 24  # of a random place, as a fraction of the tensor
_NUM_FIRST: Final = 64  # batches that are looked at when training begins
_NUM_OF_EPOCH: Final = 24  # when a DataLoader begins
_NUM_AGAIN: Final = 16  # of each 128, for loops without a DataLoader
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
_LAG: Final = 4  # reductions until a digest is read that a device works out: nobody waits for it


_Values = tuple[torch.Tensor, int]  # the bytes of sampled values of a tensor, and the size of one in bytes


class Batch(NamedTuple):
    """What forward was given for one reduction."""

    # length of the first dimension of the first tensor, summed over micro-steps. 0 if lists come first.
    num_samples: int = 0
    # number of elements of the first tensor if it holds integers in two dimensions, as texts are given; else
    # `num_samples`
    num_tokens: int = 0
    # of the first batch. None if it is not known, or if nothing has changed since the batch before.
    digest: int | None = None
    is_repeated: bool = False  # another tensor than in the batch before, with the same values


class Inputs:
    """Looks at the arguments of one model. `see` is called in each forward, `take` once for each reduction.

    Nothing is sampled unless `is_on`.

    The digest is that of 256 values of each tensor that changes from batch to batch, at fixed random places. So tensors
    that are the same in each batch (positions, a mask), or have one value everywhere (a time), show nothing.
    A tensor on a device is sampled there, and read some reductions later, without waiting for the device. Mistakes show
    at the beginning of an epoch, so only a part of the other batches is looked at.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.loading = Loading()
        self._num_loaders = 0
        self._num_left = _NUM_FIRST  # batches to look at
        self._num_taken = 0
        self._num_samples = 0
        self._num_tokens = 0
        self._is_seen = False  # the first batch of this reduction
        self._first: weakref.ref[torch.Tensor] | None = None
        self._is_same_tensor = False
        self._values: list[_Values] = []  # of the first batch
        self._waiting: deque[list[_Values]] = deque()
        self._is_on_device = False
        self._before: tuple[int | None, ...] = ()

    def see(self, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> int:
        """The model is about to get these arguments. Returns the number of samples."""
        self.loading.thread = threading.get_ident()
        if (num_loaders := self.loading.num_loaders) != self._num_loaders:
            self._num_loaders, self._num_left = num_loaders, max(self._num_left, _NUM_OF_EPOCH)
        first: torch.Tensor | None = None
        with contextlib.suppress(Exception):  # whatever a script passes, this look must not end the training
            first = next(_tensors((*inputs, *keywords.values())), None)
        if first is None:
            return 0
        is_list = any(isinstance(each, (list, tuple)) for each in inputs[:1])  # of images that differ in size
        num_samples = int(first.size(0)) if first.dim() and not is_list else 0  # a nested tensor has no shape
        self._num_samples += num_samples
        is_text = first.dim() == 2 and not (first.is_floating_point() or first.is_complex() or first.is_nested)
        self._num_tokens += first.numel() if is_text and num_samples else num_samples
        if self.is_on and self._num_left and not self._is_seen:
            self._is_seen = True
            self._is_same_tensor = self._first is not None and self._first() is first
            self._first = weakref.ref(first) if type(first) is torch.Tensor else None  # a Parameter may be swapped
            with contextlib.suppress(Exception):
                self._values.extend(self._sample(_tensors((*inputs, *keywords.values()))))
        return num_samples

    def take(self) -> Batch:
        """A reduction begins. Returns what was seen since the last call."""
        values, self._values, is_same_tensor = self._values, [], self._is_same_tensor
        num_samples, num_tokens = self._num_samples, self._num_tokens
        self._num_samples = self._num_tokens = 0
        self._is_seen = self._is_same_tensor = False
        if self._is_on_device:
            self._waiting.append(values)
            values = self._waiting.popleft() if len(self._waiting) > _LAG else []
        self._num_taken += 1
        self._num_left = _NUM_AGAIN if self._num_taken % 128 == 0 else max(0, self._num_left - 1)
        if not values:
            return Batch(num_samples, num_tokens)
        digests = tuple(map(_digest, values))
        before, self._before = self._before, digests
        pairs = zip(digests, (*before, *[None] * len(digests)), strict=False)
        changed = [new for new, old in pairs if new is not None and new != old]
        digest = zlib.crc32(repr(changed).encode()) if changed else None
        is_repeated = digest is None and any(digests) and not is_same_tensor and not self._is_on_device
        return Batch(num_samples, num_tokens, digest, is_repeated)

    def _sample(self, tensors: Iterator[torch.Tensor]) -> Iterator[_Values]:
        """Some values of each tensor. Those of a device are on their way."""
        for tensor in itertools.islice(tensors, _MOST_TENSORS):
            is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
            if not is_plain or tensor.numel() < 2:
                continue
            accelerator = accelerator_of(tensor.device)
            if tensor.device.type != "cpu" if accelerator is None else accelerator.is_capturing():
                continue
            tensor.data_ptr()  # raises inside vmap, where take() would warn of its loops
            places = _fractions(tensor.device) * tensor.numel() >> _PLACE_BITS  # of any size, without waiting
            integers = tensor.detach().view(_INTEGERS.get(tensor.itemsize, tensor.dtype))  # take() knows no fp8
            values = integers.take(places).view(torch.uint8)
            if accelerator is not None:
                self._is_on_device = True
                values = accelerator.fetch(values)
            yield values, tensor.itemsize


def _tensors(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among the arguments, and in dicts, lists and tuples that are arguments."""
    for each in arguments:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, Mapping):
            yield from (value for value in each.values() if isinstance(value, torch.Tensor))
        elif isinstance(each, (list, tuple)):
            yield from (value for value in each if isinstance(value, torch.Tensor))


@functools.lru_cache(maxsize=16)
def _fractions(device: torch.device) -> torch.Tensor:
    """The places that are looked at, as fractions of a tensor, the same on all ranks."""
    found = np.random.RandomState(0).randint(2**_PLACE_BITS, size=_NUM_VALUES, dtype=np.int64)
    return torch.from_numpy(found).to(device)


def _digest(values: _Values) -> int | None:
    """None if all values are the same: so is what has not come from a device yet."""
    read, size = values
    raw = read.numpy().tobytes()
    if raw == raw[:size] * (len(raw) // size):
        return None
    return zlib.crc32(raw) + 1


_watches: "weakref.WeakKeyDictionary[torch.nn.Module, ForwardWatch]" = weakref.WeakKeyDictionary()


class ForwardWatch:
    """Tells those who observe a world of each forward with which a model trains, from `start` on.

    A new watch takes over from an earlier one of the model, which gets hooks, unless it is scripted.
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        self.inputs = Inputs()  # sees what the model is given
        # returns those of the world in which the model trains now; None if there is no world
        self.observers: Callable[[], Observers | None] = lambda: None
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._model = None if model is None or isinstance(model, torch.jit.ScriptModule) else weakref.ref(model)

    def start(self) -> None:
        """Put the hooks on the model. Does nothing from the second call on.

        Call this when a first step has been made: torch.cuda.make_graphed_callables, with which a script may prepare
        its model after `wrap`, takes no model with hooks.
        """
        if self._model is None:
            return
        model, self._model = self._model(), None
        if model is None:
            return
        if (earlier := _watches.get(model)) is not None:  # of an optimizer that may be gone
            earlier.close()
        _watches[model] = self
        self._handles = [
            model.register_forward_pre_hook(_CallHook(self.begin), with_kwargs=True),
            model.register_forward_hook(_CallHook(self.end)),
        ]

    def begin(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        if (observers := self.observers()) is not None:
            observers.forward(self.inputs.see(arguments, keywords))

    def end(self, *_: Any) -> None:
        if (observers := self.observers()) is not None:
            observers.forward(None)

    def close(self) -> None:
        self._model = None
        for handle in self._handles:
            handle.remove()
        self._handles = []


class _CallHook:
    """A hook on a module, which calls when the module is called and trains.

    In copies of the module and in files of it, a function that does nothing takes the place of the hook. So a model
    that was wrapped can be unpickled where torchring is not installed.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, module: torch.nn.Module, *arguments: Any) -> None:
        # A look at the clock would break the graph, or become a constant of it.
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return
        if torch.is_grad_enabled():
            self._call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")

    @property
    def __name__(self) -> NoReturn:
        raise RuntimeError(
            "torch.jit.script() does not compile the hooks that torchring.wrap() puts on a model; script the model "
            "before wrap(), script a model with the same state_dict(), or call optimizer.close() first"
        )
