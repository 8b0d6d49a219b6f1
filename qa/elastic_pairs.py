"""All pairs of features of elastic jobs: ranks change in the middle of an epoch, and it is as if one process trained.

`pairs.py` says how pairs are found. Each training is a job of its own, whose ranks train on global batches of a fixed
size for a few epochs. In the end, all of them have what one process has that trains on these global batches without
torchring: parameters, and the scale of a GradScaler.
"""

import functools
import os
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import torchring
from qa.pairs import Pairs, Training
from tests.support.elastic_job import ElasticJob, Slots, note
from torchring.elastic.worker import worker as workers
from torchring.elastic.worker.membership import MembershipChange

FEATURES: Final[Mapping[str, tuple[str, ...]]] = {
    "shares": ("equal", "unequal"),
    "event": (
        *("none", "lost", "joined", "resumed"),
        *("returned from batch", "returned from backward", "returned from step", "returned from commit"),
    ),
    "place": ("inside", "first"),  # of the epoch: the batch at which it happens
    "accumulate": ("1", "2"),
    "skip": ("none", "some"),  # batches of an epoch
    "loop": ("plain", "ahead", "two backwards"),
    "optimizers": ("one", "two"),
    "scaler": ("none", "grows"),
    "kind": ("sgd", "momentum", "adamw"),
    "groups": ("same", "added"),  # to an optimizer after the first epoch, of a layer that was frozen
    "clip": ("none", "norm"),
    "shard": ("no", "yes"),
}

_RETURNS: Final = [event for event in FEATURES["event"] if event.startswith("returned")]
_NO_COMMIT: Final = "commit() does not work with shard=True"
PAIRS: Final = Pairs(FEATURES, {}, {frozenset({("shard", "yes"), ("event", event)}): _NO_COMMIT for event in _RETURNS})

_EPOCHS: Final = 3
_PLACES: Final = {"inside": (1, 3), "first": (1, 0)}  # epoch and batch of the event
_SKIPPED: Final = ((0, 0), (0, 2), (1, 1), (1, 2))  # in each epoch as many as a step may have batches
_SEED: Final = 5
_RATE: Final = 0.02
_PATIENCE: Final = 60.0  # seconds
_TOLERANCE: Final = 1e-8

torch.manual_seed(0)
_X = torch.randn(24, 3).double()
_Y = _X.sum(1, keepdim=True) + torch.arange(24)[:, None] * 0.1


def _sizes(training: Training) -> tuple[int, int]:
    """Of an epoch, and of a global batch. With unequal shares, the last batch is smaller than three ranks."""
    return (24, 6) if training["shares"] == "equal" else (23, 7)


def _order(training: Training, epoch: int) -> Tensor:
    return torch.randperm(_sizes(training)[0], generator=torch.Generator().manual_seed(_SEED + epoch))


# What a script does, on ranks and in one process


class _Script:
    def __init__(self, training: Training) -> None:
        torch.manual_seed(1)
        self.training = training
        self.net: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        groups: list[list[Tensor]] = [list(self.net[1].parameters()), list(self.net[3].parameters())]
        self.late = list(self.net[0].parameters())
        if training["groups"] == "same":
            groups[0] += self.late
        if training["optimizers"] == "one":
            groups = [groups[0] + groups[1]]
        self.optimizers: list[Any] = [self._optimizer(parameters) for parameters in groups]
        self.scaler = torch.amp.GradScaler("cpu", 64.0, growth_interval=3, enabled=training["scaler"] != "none")
        self.sampler: Any = None  # of a rank
        self._num_micros = self._num_samples = 0
        self.raises_in = ""  # see `reach`

    def _optimizer(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        if self.training["kind"] == "adamw":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=_RATE, eps=1e-2)
        else:
            momentum = 0.9 if self.training["kind"] == "momentum" else 0.0
            optimizer = torch.optim.SGD(parameters, lr=_RATE, momentum=momentum)
        optimizer.register_step_post_hook(lambda *_: self.reach("step"))  # of the plain one: the step is not over
        return optimizer

    def reach(self, point: str) -> None:
        """Raise here, once, if that was asked for."""
        if point == self.raises_in:
            self.raises_in = ""
            raise torch.OutOfMemoryError("injected")

    def begin(self) -> None:
        """As the training function does, each time that it is called."""
        self._num_micros = self._num_samples = 0
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def train_epoch(self, epoch: int, batches: Iterable[tuple[Tensor, Tensor, Tensor]]) -> Iterator[tuple[int, bool]]:
        """Yields before each batch, and after each step: the number of the batch, and whether a step is complete."""
        if self.training["groups"] == "added":
            for p in self.late:
                p.requires_grad_(epoch > 0)
            if epoch > 0 and len(self.optimizers[0].param_groups) == 1:
                self.optimizers[0].add_param_group({"params": self.late, "lr": _RATE / 2})
        if self.training["loop"] == "ahead":
            batches = _look_ahead(batches)
        place = {int(index): i for i, index in enumerate(_order(self.training, epoch))}
        for x, y, indices in batches:
            number = place[int(indices[0])] // _sizes(self.training)[1]
            weight = len(x) if self.sampler is None else self.sampler.weight()
            if self.training["skip"] == "some" and (epoch, number) in _SKIPPED:
                continue
            yield number, False
            self._backward(x, y, weight)
            self._num_micros += 1
            self._num_samples += weight
            if self._num_micros == int(self.training["accumulate"]):
                self._step()
                yield number, True

    def _backward(self, x: Tensor, y: Tensor, weight: int) -> None:
        losses = [functional.mse_loss, lambda mine, right: 0.3 * functional.l1_loss(mine, right)]
        for loss in losses[: 1 + (self.training["loop"] == "two backwards")]:
            for optimizer in self.optimizers if self.sampler is not None else ():
                optimizer.weigh(weight)
            scale = weight if self.sampler is None else 1
            value = scale * loss(self.net(x), y)
            value.register_hook(lambda _: self.reach("backward"))
            self.scaler.scale(value).backward()

    def num_backwards(self) -> int:
        """That ranks average over: those of a step, or one if each of them is reduced."""
        accumulate = int(self.training["accumulate"])
        return 2 * accumulate if accumulate > 1 and self.training["loop"] == "two backwards" else accumulate

    def _step(self) -> None:
        if self.sampler is None:
            num_samples = self._num_samples * self.num_backwards() // self._num_micros
            for p in (p for p in self.net.parameters() if p.grad is not None):
                p.grad /= num_samples  # type: ignore[operator]
        if self.training["clip"] == "norm":
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        self.begin()

    def result(self) -> list[Any]:
        return [self.scaler.get_scale(), *(value.tolist() for value in self.net.state_dict().values())]


def _look_ahead(batches: Iterable[Any]) -> Iterator[Any]:
    iterator = iter(batches)
    held = next(iterator, None)
    while held is not None:
        following = next(iterator, None)
        yield held
        held = following


def train_alone(training: Training) -> list[Any]:
    script = _Script(training)
    for epoch in range(_EPOCHS):
        batches = _order(training, epoch).split(_sizes(training)[1])
        list(script.train_epoch(epoch, [(_X[own], _Y[own], own) for own in batches]))
    return script.result()


# A worker


def _work(training: Training, folder: str | None, may_happen: bool) -> None:
    """The script of a worker, which may write checkpoints. What `training["event"]` says may happen, or not."""
    torch.set_num_threads(1)
    script = _Script(training)
    length, global_batch = _sizes(training)
    data = TensorDataset(_X[:length], _Y[:length], torch.arange(length))
    how = {"accumulate": script.num_backwards(), "shard": training["shard"] == "yes"}
    script.optimizers = [torchring.wrap(each, script.net, **how) for each in script.optimizers]
    script.sampler = sampler = torchring.elastic.Sampler(data, seed=_SEED, global_batch=global_batch)
    parts = {f"optimizer{i}": each for i, each in enumerate(script.optimizers)}
    parts |= {"model": script.net, "scaler": script.scaler, "sampler": sampler}
    state: Any = torchring.elastic.State(**parts, epoch=0, checkpoint=folder, every=1000)

    @torchring.elastic.run
    def train(state: Any) -> None:
        script.begin()
        note(enters=state.epoch, size=torchring.size())
        loader = DataLoader(data, batch_sampler=sampler)
        for state.epoch in range(state.epoch, _EPOCHS):  # noqa: B020
            sampler.set_epoch(state.epoch)
            for number, is_complete in script.train_epoch(state.epoch, loader):
                if is_complete and "returned" in training["event"]:
                    script.reach("commit")
                    state.commit()
                if may_happen and not is_complete and (state.epoch, number) == _PLACES[training["place"]]:
                    _let_happen(training["event"], state, script)
                    script.reach("batch")

    train(state)
    note(result=script.result())


def _let_happen(event: str, state: Any, script: _Script) -> None:
    """Once in a job. A rank that comes later does not see its first generation."""
    if event == "none" or workers._the_worker.generation > 1:
        return
    note(happens=event)
    if event in ("joined", "resumed"):
        end = time.monotonic() + _PATIENCE
        while not state._world.shared(MembershipChange).is_wanted:
            assert time.monotonic() < end, "the driver does not say that ranks are to change"
            time.sleep(0.005)
    elif torchring.rank() == 1:
        if event == "lost":
            os.kill(os.getpid(), signal.SIGKILL)
        script.raises_in = event.removeprefix("returned from ")


# The comparison


def _run_job(training: Training, folder: str | None) -> list[Any]:
    """Results of the ranks that have finished."""
    event = training["event"]
    hosts = Slots(["a"], 2)
    with ElasticJob(functools.partial(_work, training, folder, True), 2, hosts=hosts, max_size=3) as job:
        if event in ("joined", "resumed"):
            job.run_until(lambda: len(job.notes("happens")) == 2, "a batch at which ranks change")
            if event == "joined":
                hosts.offer({"a": 3})
            else:
                job.received.append(signal.SIGTERM)
        code, results = job.run(), job.notes("result")
        assert code == (128 + signal.SIGTERM if event == "resumed" else 0), f"exit code {code}"
        assert event == "none" or job.notes("happens"), "nothing has happened"
        assert event != "joined" or any(each["size"] == 3 for each in job.notes("enters")), "nobody has joined"
        assert event != "resumed" or not results, "the first job has finished the training"
    if event == "resumed":
        with ElasticJob(functools.partial(_work, training, folder, False), 3) as job:
            assert (code := job.run()) == 0, f"exit code {code}"
            results = job.notes("result")
    return [each["result"] for each in results]


def compare(training: Training, results: Sequence[list[Any]]) -> str | None:
    """What is wrong with the results of the ranks, or None."""
    if not results or any(result != results[0] for result in results):
        return "ranks differ"
    names = ["scale", *_Script(training).net.state_dict()]
    for name, value, right in zip(names, results[0], train_alone(training), strict=True):
        error = (torch.tensor(value).double() - torch.tensor(right).double()).abs().max().item()
        if not error <= _TOLERANCE:
            return f"{name} is off by {error:.2g}"
    return None


def find_faults(trainings: Sequence[Training]) -> list[str]:
    """Run each training in a job, and compare it with one process. Returns what is wrong, and with which."""
    faults = []
    for training in trainings:
        with tempfile.TemporaryDirectory() as folder:
            try:
                wrong = compare(training, _run_job(training, folder if training["event"] == "resumed" else None))
            except AssertionError as error:
                wrong = "\n".join([str(error), *getattr(error, "__notes__", [])])
        if wrong is not None:
            faults.append(f"{wrong}\n    with {PAIRS.special(training)}")
    return faults
