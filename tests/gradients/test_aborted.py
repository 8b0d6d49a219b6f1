"""A reduction that stops half way on one rank, by Ctrl-C, an error or shutdown(): nobody trains on what it left behind,
and ranks of other hosts hear of it as fast as those of the same."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchring
from tests.support.harness import patient, run_ranks, wait_until
from tests.support.training import attempt
from torchring.errors import GradientError, RingError
from torchring.gradients.views import CAN_SWAP
from torchring.memory import host as host_module

# Memory of one host, a transport, and both: the algorithm, and the host of each rank.
_HOSTS = {"one": ("direct", (0, 0, 0)), "2": ("native", (0, 1)), "2x2": ("hierarchical", (0, 0, 1, 1))}
_on_all_hosts = pytest.mark.parametrize("hosts", _HOSTS)
_on_two_of_them = pytest.mark.parametrize("hosts", ["one", "2x2"])
_NUM_PARAMETERS = 8


def _run(function: Callable[..., Any], hosts: str, *args: Any) -> list[Any]:
    """What function(rank, size, hosts, *args) gives on each rank."""
    return run_ranks(function, len(_HOSTS[hosts][1]), hosts, *args)


class _Rank:
    """A model of eight buckets; a step's gradients are the sum over ranks of what each multiplies it with."""

    def __init__(self, rank: int, hosts: str, compression: str | None = None) -> None:
        algorithm, host_of = _HOSTS[hosts]
        host_module._host_identity = lambda: f"host {host_of[rank]}"
        torchring.init(timeout_seconds=30.0)
        parameters = [torch.nn.Parameter(torch.ones(1 << 16)) for _ in range(_NUM_PARAMETERS)]
        self.model = torch.nn.ParameterList(parameters)
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.0)
        options: dict[str, Any] = {"op": "sum", "algorithm": algorithm, "bucket_mb": 0.2, "compression": compression}
        self.optimizer = torchring.wrap(sgd, self.model, **options)
        self.num_hooks = 0

    def step(self, factor: float = 1.0) -> list[float]:
        for parameter in self.model.parameters():
            parameter.grad = None
        self.backward(factor)
        return self.gradients()

    def backward(self, factor: float = 1.0) -> None:
        sum((parameter * factor).sum() for parameter in self.model.parameters()).backward()

    def backward_locally(self) -> None:
        with self.optimizer.no_sync():
            self.backward()

    def gradients(self) -> list[float]:
        return sorted({value for p in self.model.parameters() if p.grad is not None for value in p.grad.tolist()})

    def attempt(self, factor: float = 1.0) -> tuple[Any, float]:
        """What a step gives, or its error's class and text; and its seconds."""
        started = time.monotonic()
        try:
            result: Any = self.step(factor)
        except BaseException as error:
            result = (type(error).__name__, str(error))
        return result, time.monotonic() - started

    def at_hook(self, number: int, action: Callable[[], object]) -> None:
        """Run `action` in the n-th hook of a parameter, counted over all steps, after torchring's own."""

        def hook(_: torch.Tensor) -> None:
            self.num_hooks += 1
            if self.num_hooks == number:
                action()

        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)


def _stay_until_all_are_done(rank: int, size: int, folder: Path) -> None:
    """Stay alive: nobody may need another rank's end to hear of what that rank did."""
    done = [folder / f"done{peer}" for peer in range(size)]
    done[rank].touch()
    wait_until(lambda: all(file.exists() for file in done), "all ranks to be done", seconds=20.0)


def _raise_on_one(rank: int, size: int, hosts: str, folder: Path) -> Any:
    here = _Rank(rank, hosts)
    assert here.step() == here.step() == [float(size)]
    if rank == 1:  # another size, behind the back of everybody: this rank alone cannot go on
        first = next(iter(here.model.parameters()))
        here.at_hook(4, lambda: setattr(first, "data", torch.ones(7)))
    failed, again, stepped = here.attempt(), here.attempt(), attempt(here.optimizer.step)
    _stay_until_all_are_done(rank, size, folder)
    return failed, again, stepped


@_on_all_hosts
def test_an_error_of_one_rank_alone_is_told_on_all_hosts(hosts: str, tmp_path: Path) -> None:
    results = _run(_raise_on_one, hosts, tmp_path)
    for rank, (((kind, text), seconds), (again, _), stepped) in enumerate(results):
        assert seconds < patient(3.0), (rank, kind, text)  # the time-out is 30
        if rank == 1:
            assert kind == "GradientError", text
            assert "is not what it was when it was wrapped" in text
        else:
            assert "rank 1" in text, (rank, kind, text)
        assert again[0] == "GradientError"
        assert again[1].startswith("an earlier backward failed: "), again
        assert "the last backward did not reduce" in stepped


def _interrupt(rank: int, size: int, hosts: str, folder: Path) -> Any:
    here = _Rank(rank, hosts)
    assert here.step() == here.step() == [float(size)]
    if rank:
        wait_until((folder / "interrupted").exists, "rank 0 to be interrupted")
        results = [here.attempt(2.0), here.attempt(20.0)]
    else:

        def control_c(*_: object) -> None:
            (folder / "interrupted").touch()
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, control_c)
        here.at_hook(_NUM_PARAMETERS, lambda: signal.setitimer(signal.ITIMER_REAL, 0.2))  # it waits for the others
        results = [here.attempt(1.0), here.attempt(10.0)]
    _stay_until_all_are_done(rank, size, folder)
    return results


@_on_two_of_them
def test_after_control_c_nobody_trains_on_what_it_left(hosts: str, tmp_path: Path) -> None:
    first, *others = _run(_interrupt, hosts, tmp_path)
    (interrupted, _), (next_step, _) = first
    assert interrupted[0] == "KeyboardInterrupt"
    assert next_step[0] == "GradientError"
    assert "an earlier backward failed: KeyboardInterrupt" in next_step[1]
    for results in others:
        (kind, text), seconds = results[-1]  # the first may have had all that it needs
        assert issubclass(getattr(torchring, kind, RingError), RingError), kind
        assert seconds < patient(5.0), text


def _oops() -> None:
    raise LookupError("in the script's own hook")


def _raise_after_the_last_bucket(rank: int, size: int, hosts: str) -> Any:
    here = _Rank(rank, hosts)
    if rank == 1:
        here.at_hook(_NUM_PARAMETERS, _oops)
    return [here.attempt(rank + 1.0) for _ in range(3)]


@_on_all_hosts
def test_a_first_reduction_aborted_after_its_last_bucket(hosts: str) -> None:
    """The peers have all gradients, and look for what only this rank can tell: an error soon, and no wrong gradient."""
    size = len(_HOSTS[hosts][1])
    total = float(sum(range(1, size + 1)))
    for rank, attempts in enumerate(_run(_raise_after_the_last_bucket, hosts)):
        if rank == 1:
            assert attempts[0][0] == ("LookupError", "in the script's own hook")
        for result, seconds in attempts:
            assert seconds < patient(10.0), attempts  # the time-out is 30
            assert result == [total] or isinstance(result, tuple), attempts


def _go_on_without_zero_grad(rank: int, size: int, hosts: str, compression: str | None) -> Any:
    """All ranks break a backward off late. What each way to go on says then, and the gradients once it is allowed."""
    here = _Rank(rank, hosts, compression)
    said, gradients = [], [here.step(rank + 1.0), here.step(rank + 1.0)]

    ways_out: list[Callable[[], object]] = [
        here.optimizer.zero_grad,
        lambda: here.optimizer.zero_grad(set_to_none=False),
        lambda: here.model.zero_grad(set_to_none=False),
        here.model.zero_grad,
    ]
    lives_in_wires = CAN_SWAP and compression is None
    if not lives_in_wires:  # gradients outlive a broken reduction in their own tensors
        ways_out = [lambda: None]
    here.at_hook(_NUM_PARAMETERS - 1, _oops)
    for zero in ways_out:
        here.num_hooks = 0
        here.optimizer.zero_grad()
        with pytest.raises(LookupError, match="in the script's own hook"):
            here.backward(rank + 1.0)
        time.sleep(0.02 * rank)  # what had left is reduced, or is not, when this rank goes on
        ways_on = [here.backward_locally, here.optimizer.step, here.optimizer.synchronize, here.backward]
        for go_on in ways_on if lives_in_wires else []:
            with pytest.raises(GradientError) as caught:
                go_on()
            said.append(str(caught.value))
        zero()
        here.backward(rank + 1.0)
        gradients.append(here.gradients())
    return said, gradients


@pytest.mark.parametrize(("hosts", "compression"), [("one", None), ("2", None), ("2x2", None), ("one", "fp16")])
def test_a_gradient_that_was_lost_half_summed_is_not_trained_on(hosts: str, compression: str | None) -> None:
    """What had arrived is gone, in part on some ranks, so nothing but zero_grad() leads on."""
    size = len(_HOSTS[hosts][1])
    total = float(sum(range(1, size + 1)))
    for said, gradients in _run(_go_on_without_zero_grad, hosts, compression):
        if CAN_SWAP and compression is None:
            assert len(said) == 16
            assert all("was lost" in text and "Call optimizer.zero_grad()" in text for text in said), said
            assert gradients == [[total]] * 6
        else:  # as in one process: what had arrived counts twice, the rest once
            assert gradients == [[total], [total], [total, 2 * total]]


def _shut_down(rank: int, size: int, hosts: str, folder: Path) -> Any:
    here = _Rank(rank, hosts)
    assert here.step() == here.step() == [float(size)]
    if rank == 0:
        here.at_hook(4, torchring.shutdown)
    result = here.attempt()
    _stay_until_all_are_done(rank, size, folder)
    return result


@_on_two_of_them
def test_shutdown_inside_backward_keeps_nobody_waiting(hosts: str, tmp_path: Path) -> None:
    for result, seconds in _run(_shut_down, hosts, tmp_path):
        assert seconds < patient(10.0), result
        assert isinstance(result, tuple) or result == [float(len(_HOSTS[hosts][1]))]  # had all that it needed


def _fork_and_interfere(rank: int, size: int, hosts: str) -> Any:
    here = _Rank(rank, hosts)
    assert here.step() == [float(size)]
    report, end = os.pipe()
    child = os.fork()
    if child == 0:  # as a data loader's worker might that inherits everything
        text = ""
        try:
            text = json.dumps(_interfere(here))
        except BaseException as error:
            text = json.dumps(repr(error))
        finally:
            os.write(end, text.encode())
            os._exit(0)
    os.close(end)
    with open(report) as pipe:
        said = json.loads(pipe.read())
    os.waitpid(child, 0)
    gradients = here.gradients()
    here.optimizer.step()
    return said, gradients, here.step(), here.step(2.0)


def _interfere(here: _Rank) -> list[Any]:
    """What a child sees and is told that does with torchring all that it can do."""
    inherited = here.gradients()
    here.optimizer.zero_grad(set_to_none=False)
    with here.optimizer.no_sync():
        here.backward(5.0)
    own = here.gradients()
    total = torch.ones(1)
    forbidden: list[Callable[[], object]] = [
        lambda: here.step(7.0),
        lambda: torchring.all_reduce(total),
        lambda: torchring.all_reduce(total, async_op=True),
        here.optimizer.synchronize,
        here.optimizer.step,
    ]
    said = [attempt(call) for call in forbidden]
    here.optimizer.close()
    torchring.shutdown()
    return [inherited, own, *said, attempt(torchring.init)]


@_on_two_of_them
def test_a_forked_child_can_do_nothing_to_its_parent(hosts: str) -> None:
    size = len(_HOSTS[hosts][1])
    results = _run(_fork_and_interfere, hosts)
    for rank, (said, *ours) in enumerate(results):
        assert ours == [[float(size)], [float(size)], [2.0 * size]]
        assert said[:2] == [[float(size)], [5.0]]  # what the parent had; what it did by itself
        assert len(said) == 8
        assert all(f"this process was forked from rank {rank} " in text for text in said[2:]), said
