"""Training between hosts: right results on any layout; cut cables and dead hosts end in an error that names them."""

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import torchring
from tests.support.checks import assert_bitwise, exact_inputs
from tests.support.grids import grid
from tests.support.harness import RanksFailed, patient, wait_until
from tests.support.netns import HostedWorld, hosts_of, needs_hosts, run_on_hosts, run_worlds
from torchring.allreduce.select import ALGORITHMS
from torchring.bench.netns import Network
from torchring.errors import PeerLostError, PeerTimeoutError, TopologyError

pytestmark = needs_hosts

# "direct" needs one host, and "ring" is "native".
_ACROSS_HOSTS = [name for name in ALGORITHMS if name not in ("direct", "ring")]
_NAMED = [name for name in _ACROSS_HOSTS if name != "auto"]
_SIZES = (1, 7, 1000, 70_001, 30_000)  # elements; the middle of a bucket, its edge, and beyond
_LEARNING_RATE = 2.0**-6
_STEPS = 3
_FATAL_STEP = 2  # the first two lay out the buckets
_TIMEOUT_SECONDS = 2.0
# What a rank may take beyond it: 2 s in which it looks for the cause, and what a busy machine adds.
_SLACK_SECONDS = 10.0
_NUM_AT_ONCE = 3  # faults, each with all algorithms: most of the time everybody waits

Networks = list[dict[str, Network]]  # one for each fault and algorithm


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(3, rate="1gbit") as network:
        yield network


@pytest.fixture(scope="module")
def _all_networks() -> Iterator[Networks]:
    with contextlib.ExitStack() as stack:
        yield [{algorithm: stack.enter_context(Network(3)) for algorithm in _NAMED} for _ in range(_NUM_AT_ONCE)]


@pytest.fixture
def networks(_all_networks: Networks) -> Iterator[Networks]:
    """For tests that pull cables: all are back afterwards."""
    yield _all_networks
    for of_algorithms in _all_networks:
        for network in of_algorithms.values():
            for host in range(network.num_hosts):
                network.set_link(host, True)


def _gradient(rank: int, step: int, index: int) -> torch.Tensor:
    """Whole numbers, so that sums over ranks are exact in every order and in bf16; another one each time."""
    return exact_inputs(_SIZES[index], torch.float32, rank + 7 * step + 3 * index)


def _parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(exact_inputs(size, torch.float32, index)) for index, size in enumerate(_SIZES)]


def _expected_parameters(world_size: int) -> list[torch.Tensor]:
    """What a single process gets that sums up all ranks' gradients."""
    found = []
    for index, parameter in enumerate(_parameters()):
        gradients = [_gradient(rank, step, index) for rank in range(world_size) for step in range(_STEPS)]
        found.append(parameter.detach() - _LEARNING_RATE * torch.stack(gradients).sum(0))
    return found


def _train_exactly(
    rank: int, algorithm: str, compression: str | None = None, in_backward: Callable[[int], None] = lambda step: None
) -> str:
    """To the right parameters. Returns which algorithm it was. `in_backward(step)` is called in the midst of it."""
    parameters = _parameters()
    step = 0
    # Autograd reaches the last parameter first: some gradients have left by then, others have not.
    parameters[2].register_hook(lambda gradient: in_backward(step))
    sgd = torch.optim.SGD(parameters, lr=_LEARNING_RATE)
    optimizer = torchring.wrap(sgd, op="sum", compression=compression, algorithm=algorithm, bucket_mb=0.1)
    for step in range(_STEPS):
        optimizer.zero_grad()
        torch.stack([(p * _gradient(rank, step, index)).sum() for index, p in enumerate(parameters)]).sum().backward()
        optimizer.step()
    used = optimizer.stats().algorithm
    optimizer.close()
    for parameter, wanted in zip(parameters, _expected_parameters(torchring.size()), strict=True):
        assert_bitwise(parameter.detach(), wanted, f"{algorithm}, {compression}")
    return used


def _train_everything(rank: int, world_size: int, hosts: Sequence[Sequence[int]]) -> list[str]:
    torchring.init(timeout_seconds=20.0)
    host = next(host for host, members in enumerate(hosts) if rank in members)
    assert (torchring.node_rank(), torchring.num_nodes()) == (host, len(hosts))
    assert (torchring.local_rank(), torchring.local_size()) == (hosts[host].index(rank), len(hosts[host]))
    used = [_train_exactly(rank, name, compression) for name in _ACROSS_HOSTS for compression in (None, "bf16")]
    torchring.shutdown()
    return used


@grid("layout", [(1, 1), (2, 2), (2, 1), (2, 1, 3)], keep=lambda layout: layout in ((2, 2), (2, 1)))
def test_training_is_that_of_one_process(network: Network, layout: tuple[int, ...]) -> None:
    used, *others = run_on_hosts(network, layout, _train_everything, hosts_of(layout))
    assert others == [used] * len(others)  # "auto" chose alike
    for algorithm, name in zip(used[::2], _ACROSS_HOSTS, strict=True):
        assert algorithm == name if name != "auto" else algorithm in _NAMED


def _train_wrongly(rank: int, world_size: int) -> None:
    """The last rank's gradient is another one than its peers expect."""
    torchring.init(timeout_seconds=20.0)
    _train_exactly(rank + 1 if rank == world_size - 1 else rank, "ring")


def test_a_wrong_result_would_be_seen(network: Network) -> None:
    with pytest.raises(RanksFailed, match="_train_wrongly: 2 of 2 ranks failed") as failed:
        run_on_hosts(network, (1, 1), _train_wrongly)
    assert "elements differ" in str(failed.value)


def _meet_where_it_cannot_work(rank: int, world_size: int, interfaces: dict[int, str], said: str) -> None:
    """`interfaces`: GLOO_SOCKET_IFNAME by rank, where it is another one."""
    os.environ["GLOO_SOCKET_IFNAME"] = interfaces.get(rank, os.environ["GLOO_SOCKET_IFNAME"])
    with pytest.raises(TopologyError, match=said):
        torchring.barrier()


def test_why_gloo_cannot_connect_is_said_on_every_rank(network: Network) -> None:
    """At once: the time-out is that of `init`, longer than the harness waits."""
    for host in range(2):  # as Docker's: the same address on every host
        for command in ("link add same0 type bridge", "addr add 172.17.0.1/24 dev same0", "link set same0 up"):
            subprocess.run(network.command(host, ["ip", *command.split()]), check=True)
    cases = [
        ((1, 1, 1), {1: "ib0"}, r"Gloo cannot listen on rank 1 .*IFNAME=ib0: Unable .* ib0; .* eth0 \(10\.[0-9.]+\)"),
        ((2, 1), dict.fromkeys(range(3), ""), r"rank 0 .* at 127\.0\.[01]\.1, .* not set, and the name .*set GLOO"),
        ((1, 1, 1), {0: "same0", 1: "same0"}, r"on rank \d .*refused.* rank 1 \(.*\) at 172\.17\.0\.1.* set GLOO_SOC"),
    ]
    worlds = [HostedWorld(network, layout, (interfaces, said)) for layout, interfaces, said in cases]
    run_worlds(worlds, _meet_where_it_cannot_work)


@pytest.fixture
def slow_network(network: Network) -> Iterator[Network]:
    """Host 1 sends at 1 Mbit/s: 125 KB take a second."""
    network.set_rate("1mbit", host=1)
    yield network
    network.set_rate("1gbit", host=1)


def _end_when_all_is_sent(rank: int, world_size: int) -> None:
    """Rank 2 has all it needs at once, rank 1 has when the kernel has taken its bytes. Both exit without a word."""
    torchring.init(timeout_seconds=20.0)
    splits = [200_000, 10, 10] if rank == 1 else [10, 10, 10]
    received, counts = torchring.all_to_all(torch.arange(sum(splits)).to(torch.uint8), splits)
    ends = [10 * rank + 10, 200_000 if rank == 0 else 200_000 + 10 * rank, 10 * rank + 10]
    wanted = [torch.arange(end - count, end) for count, end in zip(counts, ends, strict=True)]
    assert counts == [10, 200_000 if rank == 0 else 10, 10]
    assert_bitwise(received, torch.cat(wanted).to(torch.uint8))


def test_the_last_bytes_of_ranks_that_have_exited_arrive(slow_network: Network) -> None:
    run_on_hosts(slow_network, (1, 1, 1), _end_when_all_is_sent)


class Fault(NamedTuple):
    """What one rank does in the midst of a backward, in one of several worlds."""

    layout: tuple[int, ...]  # ranks of each host
    actor: int  # the rank that does it
    blamed: dict[int, Sequence[int]]  # whom each rank that lives may name then; empty if training is to end well
    cut: int | None = None  # the host whose cable it pulls out of the switch
    restore_after: float | None = None  # seconds until it plugs the cable in again
    kill: tuple[int, ...] = ()  # the ranks that it kills then, itself the last if it is among them
    timeout_seconds: float = _TIMEOUT_SECONDS
    within: float = _TIMEOUT_SECONDS  # in which it is noticed

    def happen(self, network: Network, folder: Path) -> None:
        (folder / "began").write_text(repr(time.monotonic()))
        if self.cut is not None:
            network.set_link(self.cut, False)
            if self.restore_after is not None:
                threading.Timer(self.restore_after, network.set_link, (self.cut, True)).start()
        for rank in self.kill:
            os.kill(int((folder / f"pid{rank}").read_text()), signal.SIGKILL)


def _train_until_it_fails(rank: int, size: int, network: Network, algorithm: str, fault: Fault, folder: Path) -> None:
    """The process ends at once then, rank 0's with the store."""

    def in_backward(step: int) -> None:
        if step == _FATAL_STEP and rank == fault.actor:
            fault.happen(network, folder)

    (folder / f"pid{rank}").write_text(str(os.getpid()))
    # Starting may take longer than the timeout.
    wait_until(lambda: len(list(folder.glob("pid*"))) == size, "all ranks to start", 20.0)
    torchring.init(timeout_seconds=fault.timeout_seconds)
    if not fault.blamed:
        _train_exactly(rank, algorithm, in_backward=in_backward)
        torchring.shutdown()
        assert (folder / "began").exists()
        return
    with pytest.raises((PeerLostError, PeerTimeoutError)) as caught:
        _train_exactly(rank, algorithm, in_backward=in_backward)
    failed = time.monotonic()
    torchring.shutdown()
    assert time.monotonic() - failed < patient(_SLACK_SECONDS)
    peers, message = caught.value.peers, str(caught.value)
    print(f"noticed after {failed - float((folder / 'began').read_text()):.2f} s: {message}")
    assert peers
    assert set(peers) <= set(fault.blamed[rank]), message
    assert all(re.search(rf"\b{peer}\b", message) for peer in peers), message
    assert failed - float((folder / "began").read_text()) < fault.within + patient(_SLACK_SECONDS), message


def _run_faults(networks: Networks, folder: Path, *faults: Fault) -> None:
    """Train with every algorithm and fault at the same time."""
    faults = tuple(f._replace(timeout_seconds=patient(f.timeout_seconds), within=patient(f.within)) for f in faults)
    worlds = []
    for number, fault in enumerate(faults):
        for algorithm, network in networks[number].items():
            own_folder = folder / f"{algorithm}{number}"
            own_folder.mkdir()
            exits = dict.fromkeys(fault.kill, -signal.SIGKILL)
            worlds.append(HostedWorld(network, fault.layout, (network, algorithm, fault, own_folder), exits))
    run_worlds(worlds, _train_until_it_fails, deadline=max(fault.timeout_seconds for fault in faults) + 40.0)


def test_a_cable_that_is_cut_without_a_word_names_the_other_side(networks: Networks, tmp_path: Path) -> None:
    """That of a host, that of the host of the store, and that of such a host whose ranks are dead."""
    faults = []
    for cut, gone in ((2, (3,)), (0, (0, 1))):
        others = [rank for rank in range(4) if rank not in gone]
        blamed = {rank: others if rank in gone else gone for rank in range(4)}
        faults.append(Fault((2, 1, 1), others[0], blamed, cut))
    # As when its power fails: no connection is closed.
    faults.append(Fault((2, 2), 0, {2: (0, 1), 3: (0, 1)}, 0, kill=(1, 0)))
    _run_faults(networks, tmp_path, *faults)


@grid("cut", [0, 1], keep=lambda cut: cut == 0)
def test_a_cable_that_is_back_in_time_is_no_error(networks: Networks, cut: int, tmp_path: Path) -> None:
    """Nor is it where the store was out of reach meanwhile."""
    _run_faults(networks, tmp_path, Fault((2, 1, 1), 1, {}, cut, restore_after=1.0, timeout_seconds=20.0))


def test_who_is_gone_is_named_by_all_that_are_left(networks: Networks, tmp_path: Path) -> None:
    """The first rank, one without a column, and all ranks of a host."""
    faults = []
    for layout, gone in (((2, 2), (0,)), ((2, 1, 3), (4,)), ((1, 2, 1), (1, 2))):
        blamed = {rank: gone for rank in range(sum(layout)) if rank not in gone}
        faults.append(Fault(layout, gone[0], blamed, kill=gone[::-1], timeout_seconds=20.0, within=0.0))
    _run_faults(networks, tmp_path, *faults)
