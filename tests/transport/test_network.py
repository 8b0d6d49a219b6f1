"""Training between hosts: right results on any layout; cut cables and dead hosts end in an error that names them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import torchring
from tests.support.checks import assert_bitwise, assert_same_on_all_ranks, digest, exact_inputs
from tests.support.grids import grid
from tests.support.harness import RanksFailed, wait_until
from tests.support.netns import HostedWorld, hosts_of, needs_hosts, run_on_hosts, run_worlds
from torchring.allreduce.select import ALGORITHMS
from torchring.bench.netns import Network
from torchring.errors import PeerLostError, RingError
from torchring.transport.c10d import C10dTransport

pytestmark = needs_hosts

# "direct" needs one host, and "ring" is "native".
_ACROSS_HOSTS = [name for name in ALGORITHMS if name not in ("direct", "ring")]
_NAMED = [name for name in _ACROSS_HOSTS if name != "auto"]
_LAYOUTS = {"2x1": (1, 1), "2x2": (2, 2), "2+1": (2, 1), "2+1+3": (2, 1, 3)}
_SIZES = (1, 7, 1000, 70_001, 30_000)  # elements; the middle of a bucket, its edge, and beyond
_LEARNING_RATE = 2.0**-6
_STEPS = 3
_FATAL_STEP = 2  # the first two lay out the buckets
_TIMEOUT_SECONDS = 2.0
# What a rank may take beyond it: 2 s in which it looks for the cause, and what a busy machine adds.
_SLACK_SECONDS = 10.0
_NUM_AT_ONCE = 2  # faults, each with all algorithms: most of the time everybody waits

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


# ---- training


def _gradient(rank: int, step: int, index: int) -> torch.Tensor:
    """Whole numbers, so that sums over ranks are exact in every order and in bf16; another one each time."""
    return exact_inputs(_SIZES[index], torch.float32, rank + 7 * step + 3 * index)


def _parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(exact_inputs(size, torch.float32, index)) for index, size in enumerate(_SIZES)]


def _expected_parameters(world_size: int, num_steps: int = _STEPS) -> list[torch.Tensor]:
    """What a single process gets that sums up all ranks' gradients."""
    found = []
    for index, parameter in enumerate(_parameters()):
        gradients = [_gradient(rank, step, index) for rank in range(world_size) for step in range(num_steps)]
        found.append(parameter.detach() - _LEARNING_RATE * torch.stack(gradients).sum(0))
    return found


def _train_exactly(
    rank: int,
    algorithm: str,
    compression: str | None = None,
    *,
    num_steps: int = _STEPS,
    in_backward: Callable[[int], None] | None = None,
) -> tuple[list[torch.Tensor], str]:
    """The parameters afterwards, and which algorithm it was. `in_backward(step)` is called in the midst of it."""
    parameters = _parameters()
    step = 0
    if in_backward is not None:
        # Autograd reaches the last parameter first: some gradients have left by then, others have not.
        parameters[2].register_hook(lambda gradient: in_backward(step))
    sgd = torch.optim.SGD(parameters, lr=_LEARNING_RATE)
    optimizer = torchring.wrap(sgd, op="sum", compression=compression, algorithm=algorithm, bucket_mb=0.1)
    for step in range(num_steps):
        optimizer.zero_grad()
        torch.stack([(p * _gradient(rank, step, index)).sum() for index, p in enumerate(parameters)]).sum().backward()
        optimizer.step()
    algorithm = optimizer.stats().algorithm
    optimizer.close()
    return [parameter.detach() for parameter in parameters], algorithm


def _call_everything(rank: int, world_size: int) -> str:
    inputs = [exact_inputs(50_001, torch.float32, r) for r in range(world_size)]
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        total = torchring.all_reduce(inputs[rank].to(dtype, copy=True), op="sum")
        assert_bitwise(total, torch.stack(inputs).sum(0).to(dtype), f"all_reduce of {dtype}")
    assert_bitwise(torchring.all_reduce(inputs[rank].clone(), op="max"), torch.stack(inputs).amax(0), "max")
    for src in range(world_size):
        assert_bitwise(torchring.broadcast(inputs[rank].clone(), src), inputs[src], f"broadcast from {src}")
        assert torchring.broadcast_object({"from": rank}, src) == {"from": src}
    assert_bitwise(
        torchring.all_gather(inputs[rank][: rank + 1]), torch.cat([x[: r + 1] for r, x in enumerate(inputs)])
    )
    assert torchring.all_gather_object("x" * rank) == ["x" * r for r in range(world_size)]
    share = torchring.reduce_scatter(inputs[rank][: 10 * world_size].clone(), op="sum")
    assert_bitwise(share, torch.stack(inputs).sum(0)[10 * rank : 10 * rank + 10], "reduce_scatter")
    received = torchring.all_to_all(torch.arange(world_size) + 100 * rank)
    assert received.tolist() == [100 * r + rank for r in range(world_size)]
    torchring.barrier()
    return digest(total)


def _train_everything(rank: int, world_size: int) -> tuple[Any, dict[str, str], list[tuple[str, str]]]:
    """Where this rank is, digests of what all must have alike, and (algorithm asked for, used) of each training."""
    torchring.init(timeout_seconds=20.0)
    place = torchring.local_rank(), torchring.local_size(), torchring.node_rank(), torchring.num_nodes()
    digests = {"collectives": _call_everything(rank, world_size)}
    trainings = []
    expected = _expected_parameters(world_size)
    for algorithm in _ACROSS_HOSTS:
        for compression in (None, "bf16"):
            parameters, used = _train_exactly(rank, algorithm, compression)
            what = f"{algorithm}, {compression}"
            for index, (parameter, wanted) in enumerate(zip(parameters, expected, strict=True)):
                assert_bitwise(parameter, wanted, f"{what}, parameter {index}")
            digests[what] = digest(parameters)
            trainings.append((algorithm, used))
    torchring.shutdown()
    return place, digests, trainings


@grid("layout", list(_LAYOUTS), keep=lambda layout: layout in ("2x2", "2+1"))
def test_training_and_collectives_are_those_of_one_process(network: Network, layout: str) -> None:
    results = run_on_hosts(network, _LAYOUTS[layout], _train_everything)
    hosts = hosts_of(_LAYOUTS[layout])
    places = [(i, len(ranks), host, len(hosts)) for host, ranks in enumerate(hosts) for i in range(len(ranks))]
    assert [place for place, _, _ in results] == places
    for what in results[0][1]:
        assert_same_on_all_ranks([digests[what] for _, digests, _ in results])
    for _, _, trainings in results:
        assert trainings == results[0][2]  # "auto" chose alike
        assert {asked: used for asked, used in trainings if asked != "auto"} == {name: name for name in _NAMED}
        assert {used for asked, used in trainings if asked == "auto"} <= set(_NAMED)


def _train_wrongly(rank: int, world_size: int) -> None:
    """As `_train_everything`, but the last rank's gradient is another one than its peers expect."""
    torchring.init(timeout_seconds=20.0)
    expected = _expected_parameters(world_size)
    parameters, _ = _train_exactly(rank + 1 if rank == world_size - 1 else rank, "ring")
    for parameter, wanted in zip(parameters, expected, strict=True):
        assert_bitwise(parameter, wanted)


def test_a_wrong_result_would_be_seen(network: Network) -> None:
    with pytest.raises(RanksFailed, match="_train_wrongly: 2 of 2 ranks failed") as failed:
        run_on_hosts(network, (1, 1), _train_wrongly)
    assert "elements differ" in str(failed.value)


# ---- connecting


def _meet_where_it_cannot_work(rank: int, world_size: int, interfaces: dict[int, str | None]) -> tuple[str, str]:
    """`interfaces`: GLOO_SOCKET_IFNAME by rank, where it is another one. Returns class and text of the error."""
    if rank in interfaces:
        os.environ["GLOO_SOCKET_IFNAME"] = interfaces[rank] or ""
    with pytest.raises(RingError) as caught:
        torchring.barrier()
    return type(caught.value).__name__, caught.value.message


def test_why_gloo_cannot_connect_is_said_on_every_rank(network: Network) -> None:
    """At once: the time-out is that of `init`, longer than the harness waits."""
    for host in range(2):  # as Docker's: the same address on every host
        for command in ("link add same0 type bridge", "addr add 172.17.0.1/24 dev same0", "link set same0 up"):
            subprocess.run(network.command(host, ["ip", *command.split()]), check=True)
    cases: list[tuple[tuple[int, ...], dict[int, str | None], str]] = [
        ((1, 1, 1), {1: "ib0"}, r"Gloo cannot listen on rank 1 .*IFNAME=ib0: Unable .* ib0; .* eth0 \(10\.[0-9.]+\)"),
        (
            (2, 1),
            {0: None, 1: None, 2: None},
            r"rank 0 .* at 127\.0\.[01]\.1, .* not set, and the name .*set GLOO_SOCKET_IF",
        ),
        (
            (1, 1, 1),
            {0: "same0", 1: "same0"},
            r"Gloo on rank \d .*refused.* rank 1 \(.*\) at 172\.17\.0\.1.* set GLOO_SOC",
        ),
    ]
    worlds = [HostedWorld(network, layout, (interfaces,)) for layout, interfaces, _ in cases]
    results = run_worlds(worlds, _meet_where_it_cannot_work)
    for (_, _, wanted), of_ranks in zip(cases, results, strict=True):
        for kind, message in of_ranks:
            assert kind == "TopologyError", message
            assert re.search(wanted, message), message


# ---- slow lines


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


def _close_in_the_midst(rank: int, world_size: int) -> None:
    """Of a message: Gloo waits for the rest of it until the time-out."""
    world = torchring.init(timeout_seconds=200.0)
    assert world.rendezvous is not None
    transport = C10dTransport(world.rendezvous, "test", world.host)
    data = torch.full((500_000,), rank, dtype=torch.uint8)
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(lambda: transport.start_broadcast(data, 1).wait())
        if rank == 0:
            wait_until(lambda: data[0] == 1, "the beginning of the message")
            transport.close()
            assert data[-1] == 0
            with pytest.raises(PeerLostError, match="is closed"):
                receiving.result()
    world.rendezvous.all_gather("over", b"")  # rank 0 has the store


def test_closing_a_transport_does_not_wait_for_the_rest_of_a_message(slow_network: Network) -> None:
    run_on_hosts(slow_network, (1, 1), _close_in_the_midst)


# ---- faults


class Fault(NamedTuple):
    """What one rank does in the midst of a backward.

    Attributes:
        cut: the host whose cable it pulls out of the switch, None for none.
        restore_after: seconds until it plugs the cable in again.
        kill: the ranks that it kills then, itself the last if it is among them.
    """

    actor: int
    cut: int | None = None
    restore_after: float | None = None
    kill: tuple[int, ...] = ()

    def happen(self, network: Network, folder: Path) -> None:
        (folder / "began").write_text(repr(time.monotonic()))
        if self.cut is not None:
            network.set_link(self.cut, False)
            if self.restore_after is not None:
                threading.Timer(self.restore_after, network.set_link, (self.cut, True)).start()
        for rank in self.kill:
            os.kill(int((folder / f"pid{rank}").read_text()), signal.SIGKILL)


class Failed(NamedTuple):
    """How training ended on a rank."""

    kind: str
    peers: tuple[int, ...]
    message: str
    seconds: float  # since the fault
    seconds_to_shut_down: float


def _train_until_it_fails(
    rank: int,
    world_size: int,
    network: Network,
    algorithm: str,
    fault: Fault,
    folder: Path,
    timeout_seconds: float,
) -> Failed | str:
    """What it failed with, or the parameters' digest. After that the process ends at once, rank 0's with the store."""

    def in_backward(step: int) -> None:
        if step == _FATAL_STEP and rank == fault.actor:
            fault.happen(network, folder)

    (folder / f"pid{rank}").write_text(str(os.getpid()))
    deadline = time.monotonic() + 20.0
    while len(list(folder.glob("pid*"))) < world_size and time.monotonic() < deadline:
        time.sleep(0.01)  # starting may take longer than the timeout
    torchring.init(timeout_seconds=timeout_seconds)
    result: Failed | str
    try:
        parameters, _ = _train_exactly(rank, algorithm, in_backward=in_backward)
        for parameter, wanted in zip(parameters, _expected_parameters(world_size), strict=True):
            assert_bitwise(parameter, wanted)
        torchring.shutdown()
        result = digest(parameters)
    except RingError as error:
        failed = time.monotonic()
        torchring.shutdown()
        seconds = failed - float((folder / "began").read_text()), time.monotonic() - failed
        result = Failed(type(error).__name__, error.peers, str(error), *seconds)
    return result


def _run_faults(
    networks: Networks,
    layout: tuple[int, ...],
    faults: Sequence[Fault],
    folder: Path,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> list[dict[str, list[Failed | str | None]]]:
    """Train with every algorithm and fault at the same time; for each fault {algorithm: results by rank}."""
    worlds, names = [], []
    for number, fault in enumerate(faults):
        for algorithm, network in networks[number].items():
            own_folder = folder / f"{algorithm}{number}"
            own_folder.mkdir()
            args = (network, algorithm, fault, own_folder, timeout_seconds)
            worlds.append(HostedWorld(network, layout, args, dict.fromkeys(fault.kill, -signal.SIGKILL)))
            names.append((number, algorithm))
    found: list[dict[str, list[Failed | str | None]]] = [{} for _ in faults]
    results = run_worlds(worlds, _train_until_it_fails, deadline=timeout_seconds + 40.0)
    for (number, algorithm), of_ranks in zip(names, results, strict=True):
        print(faults[number], algorithm, *of_ranks, sep="\n    ")
        found[number][algorithm] = of_ranks
    return found


def _check_failed(result: Failed | str | None, suspects: Sequence[int], within_seconds: float) -> None:
    assert isinstance(result, Failed), f"no error, but {result}"
    assert result.kind in ("PeerLostError", "PeerTimeoutError"), result
    assert result.peers, result
    assert set(result.peers) <= set(suspects), result
    for peer in result.peers:
        assert re.search(rf"\b{peer}\b", result.message), result
    assert result.seconds < within_seconds, result
    assert result.seconds_to_shut_down < _SLACK_SECONDS, result


def test_a_cut_cable_is_an_error_that_names_the_other_side(networks: Networks, tmp_path: Path) -> None:
    """That of a host, and that of the host of the store."""
    layout, cuts = (2, 1, 1), (2, 0)
    sides = {cut: (gone := hosts_of(layout)[cut], [rank for rank in range(4) if rank not in gone]) for cut in cuts}
    faults = [Fault(actor=others[0], cut=cut) for cut, (_, others) in sides.items()]
    for found, (gone, others) in zip(_run_faults(networks, layout, faults, tmp_path), sides.values(), strict=True):
        for results in found.values():
            for rank, result in enumerate(results):
                _check_failed(result, others if rank in gone else gone, _TIMEOUT_SECONDS + _SLACK_SECONDS)


@grid("cut", [0, 1], keep=lambda cut: cut == 0)
def test_a_cable_that_is_back_in_time_is_no_error(networks: Networks, cut: int, tmp_path: Path) -> None:
    """Nor is it where the store was out of reach meanwhile."""
    fault = Fault(actor=1, cut=cut, restore_after=1.0)
    (found,) = _run_faults(networks, (2, 1, 1), [fault], tmp_path, timeout_seconds=20.0)
    for algorithm, results in found.items():
        assert (tmp_path / f"{algorithm}0" / "began").exists()
        assert all(isinstance(result, str) for result in results), results
        assert_same_on_all_ranks(results)


@pytest.mark.parametrize(
    ("layout", "gone", "cut"),
    [
        pytest.param((2, 2), (0,), None, id="the first rank"),
        pytest.param((2, 2), (3,), None, id="the last rank", marks=pytest.mark.grid),
        pytest.param((2, 1, 3), (4,), None, id="a rank without a column"),
        pytest.param((1, 2, 1), (1, 2), None, id="all ranks of a host"),
        # As when its power fails: no connection is closed.
        pytest.param((2, 2), (0, 1), 0, id="the store's host, without a word"),
        pytest.param((2, 2), (2, 3), 1, id="a host, without a word", marks=pytest.mark.grid),
    ],
)
def test_who_is_gone_is_named_by_all_that_are_left(
    networks: Networks, layout: tuple[int, ...], gone: tuple[int, ...], cut: int | None, tmp_path: Path
) -> None:
    timeout_seconds, within = (20.0, 0.0) if cut is None else (_TIMEOUT_SECONDS, _TIMEOUT_SECONDS)
    fault = Fault(actor=gone[0], cut=cut, kill=gone[::-1])
    (found,) = _run_faults(networks, layout, [fault], tmp_path, timeout_seconds)
    for results in found.values():
        for rank, result in enumerate(results):
            if rank not in gone:
                _check_failed(result, gone, within + _SLACK_SECONDS)
