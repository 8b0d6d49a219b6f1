"""GPU memory that the ranks of one host reach: torch.distributed's symmetric memory, which is alpha, and only here.

Every rank allocates as much, and maps what the others have allocated; kernels then read and write it like their own. A
`SymmetricGroup` allocates as a `HostGroup` does, so that memory of the host can stand in for it where there is no GPU.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from torchring.errors import TopologyError, in_step
from torchring.memory.host import HostGroup
from torchring.rendezvous.rendezvous import Rendezvous

OVERLAPPING_DEVICES: Final = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class Block(Protocol):
    """One allocation: `parts[i]` is the memory of the i-th rank of the group, mapped here, as a uint8 tensor."""

    @property
    def parts(self) -> tuple[torch.Tensor, ...]: ...
    @property
    def own(self) -> torch.Tensor: ...


class SymmetricGroup(Protocol):
    """The ranks of one host whose kernels reach each other's memory. For interpreted kernels, a `HostGroup` is one.

    Attributes:
        ranks: their world ranks, ascending.
        index: position of this rank in `ranks`.
    """

    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int: ...

    def allocate(self, num_bytes: int) -> Block:
        """Collective: every rank contributes `num_bytes` of zeroed memory and maps everybody's."""


class CudaBlock:
    """See `Block`. The mapping lives as long as this object, or a tensor that views the own part."""

    def __init__(self, parts: Sequence[torch.Tensor], index: int, handle: object) -> None:
        self.parts = tuple(parts)
        self._index = index
        self._handle = handle  # the peers' mappings live as long as it does

    @property
    def own(self) -> torch.Tensor:
        return self.parts[self._index]


class CudaGroup:
    """See `SymmetricGroup`; of `host`, on `device`. Opening it is collective among the ranks of this host.

    Args:
        is_isolated: whether ranks have GPUs of their own under the same number, as CUDA_VISIBLE_DEVICES arranges it.
            PyTorch takes them for the same one unless it is told that this is allowed.
    """

    def __init__(
        self, host: HostGroup, rendezvous: Rendezvous, device: torch.device, *, is_isolated: bool = False
    ) -> None:
        self.ranks, self.index = host.ranks, host.index
        self._is_isolated = is_isolated
        self._device = device
        turn = next(_turns)
        store = PrefixStore(f"symmetric/{turn}/{host.ranks[0]}", rendezvous.store)
        self._name = f"torchring/{turn}/{host.ranks[0]}"
        # Kept: the registry, in which symmetric memory looks it up at every allocation, refers to it weakly.
        self._process_group = _register_group(self._name, store, self.index, self.size, rendezvous.timeout_seconds)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def allocate(self, num_bytes: int) -> CudaBlock:
        import torch.distributed._symmetric_memory as symmetric_memory

        length = -(-max(num_bytes, 1) // 16) * 16
        overlapping = environment(OVERLAPPING_DEVICES, "1") if self._is_isolated else contextlib.nullcontext()
        with torch.cuda.device(self._device), overlapping:
            own = symmetric_memory.empty(length, dtype=torch.uint8, device=self._device)
            own.zero_()
            torch.cuda.synchronize(self._device)  # before a peer can see it
            handle = symmetric_memory.rendezvous(own, cast(Any, self._name))
            parts = [
                own if index == self.index else handle.get_buffer(index, (length,), torch.uint8)
                for index in range(self.size)
            ]
        return CudaBlock([part[:num_bytes] for part in parts], self.index, handle)


class LonelyGroup:
    """A group of one rank: memory that nobody else reaches. See `SymmetricGroup`."""

    index = 0
    size = 1

    def __init__(self, rank: int, device: torch.device) -> None:
        self.ranks: tuple[int, ...] = (rank,)
        self._device = device

    def allocate(self, num_bytes: int) -> CudaBlock:
        return CudaBlock([torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)], 0, None)


def share_memory(host: HostGroup | None, rendezvous: Rendezvous | None, device: torch.device) -> SymmetricGroup:
    """Collective among all ranks of the world: symmetric memory of the ranks of this host, each on its `device`.

    Raises TopologyError, on all ranks of the world, where those of some host do not reach each other's memory.
    """
    if host is None or rendezvous is None or host.size == 1:
        if rendezvous is not None:  # the others exchange cards
            _exchange(rendezvous, {})
            _raise_first(_exchange(rendezvous, {"problem": ""}), rendezvous.rank)
        return LonelyGroup(0 if host is None else host.rank, device)
    mine = {"device": _identity(device), "number": device.index, "unreachable": _unreachable(device)}
    cards = _exchange(rendezvous, mine)
    problem = find_problem({rank: cards[rank] for rank in host.ranks}, allow_overlap=OVERLAPPING_DEVICES in os.environ)
    group: CudaGroup | None = None
    if not problem:
        numbers = [cards[rank]["number"] for rank in host.ranks]
        is_isolated = len(set(numbers)) < len(numbers)
        problem, group = _try(lambda: _open(host, rendezvous, device, is_isolated=is_isolated))
    _raise_first(_exchange(rendezvous, {"problem": problem}), host.rank)
    assert group is not None
    return group


def find_problem(cards: dict[int, dict[str, Any]], *, allow_overlap: bool) -> str:
    """Why these ranks, each with its "device" and those "unreachable" from it, cannot share memory; else empty."""
    by_device: dict[str, int] = {}
    for rank, card in cards.items():
        other = by_device.setdefault(card["device"], rank)
        if other != rank and not allow_overlap:
            return (
                f"ranks {other} and {rank} use the same GPU; give each rank its own (model.to(torchring.device())), or "
                f"set {OVERLAPPING_DEVICES}=1 if they are meant to share it"
            )
    for rank, card in cards.items():
        for other, theirs in cards.items():
            if theirs["device"] in card["unreachable"]:
                return f"the GPU of rank {rank} has no peer access to that of rank {other}"
    return ""


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """With a variable set for libraries that ask for it now; what the user has set stays."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def _open(host: HostGroup, rendezvous: Rendezvous, device: torch.device, *, is_isolated: bool) -> CudaGroup:
    group = CudaGroup(host, rendezvous, device, is_isolated=is_isolated)
    group.allocate(16)  # fails where it cannot be mapped
    return group


def _try(operation: Callable[[], CudaGroup]) -> tuple[str, CudaGroup | None]:
    try:
        return "", operation()
    # Alpha: whatever it says, there are other ways.
    except (RuntimeError, ImportError, AttributeError, LookupError, TypeError, ValueError) as error:
        return f"symmetric memory is not to be had: {error}", None


def _exchange(rendezvous: Rendezvous, card: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(text) for text in rendezvous.all_gather("cuda", json.dumps(card).encode())]


def _raise_first(cards: Sequence[dict[str, Any]], rank: int) -> None:
    if text := next((card["problem"] for card in cards if card["problem"]), ""):
        raise in_step(TopologyError(text, rank=rank))


def _identity(device: torch.device) -> str:
    """The same for the same GPU, whatever CUDA_VISIBLE_DEVICES makes of its number."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _unreachable(device: torch.device) -> list[str]:
    """Identities of the GPUs that this process sees and that `device` cannot reach."""
    others = [torch.device("cuda", i) for i in range(torch.cuda.device_count()) if i != device.index]
    return [_identity(other) for other in others if not torch.cuda.can_device_access_peer(device, other)]


def _register_group(name: str, store: dist.Store, rank: int, size: int, timeout_seconds: float) -> dist.ProcessGroup:
    """Make a process group that symmetric memory finds by `name` while it lives; it is for its store, carries nothing.

    Without torch.distributed.new_group, which would need a default group: that is the script's to make, or not.
    """
    import torch.distributed._symmetric_memory as symmetric_memory
    from torch._C import _distributed_c10d as c10d

    group = dist.ProcessGroup(store, rank, size)
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timedelta(seconds=timeout_seconds))
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_group_name(cast(Any, name))
    c10d._register_process_group(cast(Any, name), group)
    # Where releases before 2.13 look; they would do both themselves, with what the default group knows of this one.
    c10d._SymmetricMemory.set_group_info(name, rank, size, store)
    getattr(symmetric_memory, "_group_name_to_store", {})[name] = store
    return group


_turns: Final = itertools.count()
