"""GPU memory that all ranks of one host reach, by torch.distributed's symmetric memory. The only file that uses it,
because symmetric memory is alpha. What is said here of PyTorch's sources was read in
release 2.13, and in `torch/csrc/distributed/c10d` as of 2025 (before 2.11) and of September 2026 (before 2.14).

Every rank allocates the same number of bytes and maps the memory of the other ranks. Kernels then read and write the
peers' memory like their own. A `CudaGroup` allocates as a `HostGroup` does, so that a `HostGroup` can take its place
where there is no GPU.
"""

import contextlib
import json
import os
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple, TypeAlias, cast

import torch
import torch.distributed as dist

from torchring.devices.handover import describe_handover, why_no_handover
from torchring.errors import TopologyError, in_step
from torchring.memory.host import HostGroup
from torchring.releases import release_of
from torchring.rendezvous.rendezvous import Rendezvous, within

OVERLAPPING_DEVICES: Final = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
NO_MULTICAST: Final = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class CudaBlock(NamedTuple):
    """One allocation. The mapping lives as long as this object, or a tensor that views the own part."""

    parts: Sequence[torch.Tensor]  # the memory of each rank of the group, mapped here, as uint8 tensors
    handle: object = None  # kept alive: the peers' mappings live as long as the handle


class CudaGroup:
    """The ranks of one host whose kernels reach each other's memory. Opening a group is collective among them."""

    is_mapped = True  # other ranks map the memory. Mapping takes long, so wires that are opened together share it.
    shares_devices = False  # several of the ranks use the same GPU
    note = ""  # what a user has to know of the memory, behind a semicolon

    def __init__(
        self,
        host: HostGroup,
        rendezvous: Rendezvous,
        device: torch.device,
        name: str,  # equal on all ranks; never used before in any of their processes
        num_processors: int,  # multiprocessors of the smallest GPU; of a GPU that ranks share, the share of each
        *,
        # several ranks see different GPUs under the same number, as CUDA_VISIBLE_DEVICES arranges. PyTorch takes such
        # GPUs for one GPU, and refuses unless it is told that ranks may share a GPU.
        is_isolated: bool,
    ) -> None:
        self.ranks, self.index = host.ranks, host.index  # world ranks, ascending; position of this rank there
        self.num_processors = num_processors
        # As PyTorch looks at them in an allocation. What the user has set stays. Nobody uses multicast addresses, and
        # setting them up fails, or hangs, on some machines (pytorch#195596).
        self._environment = {NO_MULTICAST: "1"} | ({OVERLAPPING_DEVICES: "1"} if is_isolated else {})
        self._device = device
        self._rendezvous = rendezvous
        store = within(rendezvous.store, f"symmetric/{name}")
        self._num_allocations = 0
        self.name = f"torchring/{name}"  # by which PyTorch finds the group
        # Kept alive: symmetric memory looks the group up at every allocation, in a registry that refers to it weakly.
        # The group does not keep the Python half of its store alive.
        self._exchanges = ExchangeStore(store, rendezvous.timeout_seconds)
        self._gloo_store = within(store, "gloo")  # kept alive, too
        gloo = dist.ProcessGroupGloo(
            self._gloo_store, self.index, self.size, timedelta(seconds=rendezvous.timeout_seconds)
        )
        self._process_group = register_group(self.name, self._exchanges, gloo)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def allocate(self, num_bytes: int) -> CudaBlock:
        """Collective: every rank contributes `num_bytes` of zeroed memory and maps the memory of all ranks."""
        from torch._C._distributed_c10d import _SymmetricMemory

        length = -(-max(num_bytes, 1) // 16) * 16
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.cuda.device(self._device))
            for name, value in self._environment.items():
                stack.enter_context(environment(name, value))
            torch.cuda.empty_cache()  # the driver has no memory left for this that PyTorch keeps for tensors to come
            problem = ""
            try:
                # Not symmetric_memory.empty(): after 2.13 that takes memory from a cache (pytorch#187054), which may
                # serve one rank with memory that it has mapped before, and another rank with new memory.
                own = _SymmetricMemory.empty_strided_p2p((length,), (1,), torch.uint8, self._device)
                own.zero_()
                torch.cuda.synchronize(self._device)  # before a peer can see it
            except RuntimeError as error:
                problem = str(error)
            self._raise_together(problem, num_bytes)
            handle = _SymmetricMemory.rendezvous(own, self.name)
            parts = [
                own if index == self.index else handle.get_buffer(index, (length,), torch.uint8)
                for index in range(self.size)
            ]
        return CudaBlock([part[:num_bytes] for part in parts], handle)

    def release(self, block: CudaBlock) -> None:
        """See `LonelyGroup`. The mapping goes with the block."""

    def _raise_together(self, problem: str, num_bytes: int) -> None:
        """Collective: raise if a rank has a problem. The others would wait for it in symmetric memory's rendezvous."""
        key = f"{self.name}/allocation {self._num_allocations}"
        self._num_allocations += 1
        self._rendezvous.publish(f"{key}/{self.index}", problem.encode())
        for i, rank in enumerate(self.ranks):
            if text := self._rendezvous.fetch(f"{key}/{i}", rank).decode():
                what = f"rank {rank} cannot allocate {num_bytes / 2**20:.1f} MiB of GPU memory for buckets: {text}"
                raise TopologyError(what, rank=self.ranks[self.index], peers=(rank,))


class LonelyGroup:
    """A `CudaGroup` of one rank, whose memory no other rank reaches."""

    index = 0
    size = 1
    is_mapped = False
    shares_devices = False
    note = ""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.ranks: tuple[int, ...] = (rank,)
        self.num_processors = 0  # no kernel of one rank waits
        self._device = device

    def allocate(self, num_bytes: int) -> CudaBlock:
        return CudaBlock([torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)])

    def release(self, block: CudaBlock) -> None:
        """Nothing is reduced in the memory any more. Tensors may still view it."""


SymmetricGroup: TypeAlias = CudaGroup | LonelyGroup


def share_memory(host: HostGroup | None, rendezvous: Rendezvous | None, device: torch.device) -> SymmetricGroup:
    """Symmetric memory between the ranks of this host, each on its `device`. Collective among all ranks of the world.

    Raises TopologyError on all ranks of the world if the GPUs of some host do not reach each other's memory.
    """
    if host is None or rendezvous is None or host.size == 1:
        if rendezvous is not None:  # ranks of other hosts wait for this one in both all-gathers
            _all_gather(rendezvous, {})
            _raise_first(_all_gather(rendezvous, {"problem": ""}), rendezvous.rank)
        return LonelyGroup(0 if host is None else host.rank, device)
    mine = {"device": _identity(device), "number": device.index, "unreachable": _unreachable(device)}
    mine |= {"name": secrets.token_hex(8), "handover": describe_handover()}
    properties = torch.cuda.get_device_properties(device)
    mine |= {"processors": properties.multi_processor_count, "is_part": " MIG " in properties.name}
    mine |= {"overlaps": OVERLAPPING_DEVICES in os.environ}
    gathered = _all_gather(rendezvous, mine)
    cards = {rank: gathered[rank] for rank in host.ranks}
    problem = find_problem(cards)
    group: CudaGroup | None = None
    if not problem:
        numbers = [card["number"] for card in cards.values()]
        is_isolated = len(set(numbers)) < len(numbers)
        users = Counter(card["device"] for card in cards.values())
        least = min(card["processors"] // users[card["device"]] for card in cards.values())
        try:
            group = CudaGroup(host, rendezvous, device, cards[host.ranks[0]]["name"], least, is_isolated=is_isolated)
            group.shares_devices = len(users) < len(cards)
            group.allocate(16)  # raises if the memory cannot be mapped
        except Exception as error:  # whatever goes wrong in alpha software, NCCL is still to be had
            problem = f"symmetric memory is not to be had: {error}"
    _raise_first(_all_gather(rendezvous, {"problem": problem}), host.rank)
    assert group is not None
    return group


def find_problem(cards: dict[int, dict[str, Any]]) -> str:
    """The reason why these ranks of one host cannot share memory. "" if they can.

    Args:
        cards: for each rank its "device", whether this "is_part" of a GPU, the "unreachable" devices, under "handover"
            its `describe_handover()`, and under "overlaps" whether the user lets ranks share a GPU.

    GPUs without native atomics between them (over PCIe) will do: kernels signal to each other by plain stores.
    """
    by_device: dict[str, int] = {}
    for rank, card in cards.items():
        other = by_device.setdefault(card["device"], rank)
        if other != rank and not all(card["overlaps"] for card in cards.values()):
            return (
                f"ranks {other} and {rank} use the same GPU; give each rank its own (model.to(torchring.device())), or "
                f"set {OVERLAPPING_DEVICES}=1 on all ranks if they are meant to share it"
            )
    for rank, card in cards.items():
        for other, theirs in cards.items():
            if theirs["device"] in card["unreachable"]:
                return f"the GPU of rank {rank} has no peer access to that of rank {other}"
            if card["is_part"] and theirs["device"] != card["device"]:
                return f"rank {rank} uses a part of a GPU (MIG), which does not reach the memory of rank {other}"
    return why_no_handover({rank: card["handover"] for rank, card in cards.items()})


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable inside the context, unless the user has set the variable."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def _all_gather(rendezvous: Rendezvous, card: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(text) for text in rendezvous.all_gather("cuda", json.dumps(card).encode())]


def _raise_first(cards: Sequence[dict[str, Any]], rank: int) -> None:
    if text := next((card["problem"] for card in cards if card["problem"]), ""):
        raise in_step(TopologyError(text, rank=rank))


def _identity(device: torch.device) -> str:
    """Identifies a GPU, whatever number CUDA_VISIBLE_DEVICES gives the GPU."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _unreachable(device: torch.device) -> list[str]:
    """Identities of the visible GPUs whose memory `device` cannot reach."""
    others = [torch.device("cuda", i) for i in range(torch.cuda.device_count()) if i != device.index]
    return [_identity(other) for other in others if not torch.cuda.can_device_access_peer(device, other)]


class ExchangeStore(dist.Store):
    """A store in which the exchanges of one group of ranks have numbers of their own.

    Symmetric memory exchanges values under keys such as "CUDASymmetricMemory/7/0", for exchange 7 and rank 0. Up to
    2.13 it counts the exchanges of a process, in whatever group (StoreExchange in CUDASymmetricMemoryUtils.hpp;
    pytorch#196082). Where a script has used symmetric memory among some of the ranks only, or a rank was started anew,
    ranks would wait for each other under different keys. All ranks of a group make the group's exchanges in one order.
    So this store counts the exchanges that it sees.

    The methods below are all that symmetric memory needs. Its barriers set and wait in releases before 2.13. From 2.13
    on they call `Store::barrier` (pytorch#182132), which adds, sets and waits for at most the store's own timeout.
    """

    def __init__(self, store: dist.Store, timeout_seconds: float) -> None:
        super().__init__()
        self._store = store
        self._patience = timedelta(seconds=timeout_seconds)
        self.set_timeout(self._patience)  # else 300 s
        self._numbers: dict[str, int] = {}  # by what stands before the rank in a key

    # Called from C++.

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._renamed(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._renamed(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait([self._renamed(key) for key in keys], timeout or self._patience)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._renamed(key), amount)

    def _renamed(self, key: str) -> str:
        exchange, _, rank = key.rpartition("/")
        return f"{self._numbers.setdefault(exchange, len(self._numbers))}/{rank}"


def register_group(name: str, store: dist.Store, backend: dist.ProcessGroupGloo) -> dist.ProcessGroup:
    """Make a process group that symmetric memory finds by `name` while the group lives. Only its store is used.

    A group without a backend has no name. torch.distributed.new_group is not used, because it needs a default process
    group, which belongs to the script.
    """
    from torch._C import _distributed_c10d as c10d

    rank, size = backend.rank(), backend.size()
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_group_name(cast(Any, name))
    c10d._register_process_group(cast(Any, name), group)
    if release_of(torch.__version__) < (2, 14):
        # PyTorch asks the group for its store. From 2.14 on, it would use the one given here to compare how often each
        # process has allocated, and refuse where processes differ.
        c10d._SymmetricMemory.set_group_info(name, rank, size, store)
    return group
