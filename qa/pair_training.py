"""One training with the features of `pairs.py`: on ranks under torchring, and in one process without torchring.

The one process has the batches of all ranks. It computes in fp64 what the documentation promises: one graph for all
ranks, from it the gradient of the mean over what counts, and the mean of the
buffers of those ranks that take part.
"""

import contextlib
import copy
import io
import os
import unittest.mock
from collections.abc import Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import torchring
import torchring.horovod as hvd
from qa.pairs import PAIRS, REFUSED, Training, Ways, describe
from tests.support.checks import digest
from tests.support.harness import run_ranks
from tests.support.scripts import Sam, ascent
from torchring.memory import host as host_module

NUM_RANKS: Final = 3
_NUM_STEPS: Final = 4
_RESUMED: Final = 2  # the first step after a checkpoint, and the one at which most things happen
_RATE: Final = 0.05
_MOMENTUM: Final = 0.1  # of running statistics
_TOLERANCES: Final = {"own": 1e-8, "fp16": 2e-2, "bf16": 0.15}  # after four steps
_HOSTS: Final = {"one": (0, 0, 0), "two": (0, 0, 1)}


# The plan: who has which batch, and what becomes of it


@dataclass(frozen=True)
class Micro:
    """A micro-step. By rank: the number of samples, the weight (None: losses have none), whether the rank skips it."""

    sizes: tuple[int, ...]
    weights: tuple[float, ...] | None
    skips: frozenset[int]
    is_local: bool  # inside no_sync()

    def counts(self, rank: int) -> bool:
        return rank not in self.skips and (self.weights is None or self.weights[rank] > 0)


@dataclass(frozen=True)
class Step:
    """micros: those that are reduced together. present: ranks that have a batch."""

    micros: tuple[Micro, ...]
    present: tuple[int, ...]
    is_left_over: bool  # synchronize() reduces
    nan_rank: int | None  # its loss is NaN


def plan_of(training: Training) -> list[Step]:
    steps = []
    ranks = range(2 if training["api"] == "process set" else NUM_RANKS)
    for s in range(_NUM_STEPS):
        accumulate, is_left_over = int(training["accumulate"]), training["local"] == "synchronize" and s == 2
        flags = [False] * accumulate
        if training["local"] == "no_sync" and s in (0, 2):
            flags = [True, *flags]
        if is_left_over:
            flags = [accumulate == 1]
        micros = []
        for m, is_local in enumerate(flags):
            sizes = tuple(2 + (r + s + m) % 3 for r in ranks)
            weights: tuple[float, ...] | None = None
            if training["weights"] != "none":
                first = 0 if training["weights"] == "zero" and s == 1 else sizes[0]
                weights = tuple(map(float, (first, *sizes[1:])))
            skips: set[int] = set()
            if training["skip"] != "none" and not is_local:
                is_last = m == len(flags) - 1
                skips = {1} if s == 1 or is_left_over else {0} if s == 3 and is_last else set()
            micros.append(Micro(sizes, weights, frozenset(skips), is_local))
        present = tuple(r for r in ranks if training["data"] == "even" or r != 0 or s < _NUM_STEPS - 1)
        nan_rank = present[-1] if training["nonfinite"] == "skip" and s == 2 else None
        steps.append(Step(tuple(micros), present, is_left_over, nan_rank))
    return steps


def _batch(rank: int, step: int, m: int, micro: Micro) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, words and targets. What does not count may be anything."""
    x, words, y = _random(1000 * rank + 100 * step + m, micro.sizes[rank])
    return (x if micro.counts(rank) else x * float("nan")), words, y


def _random(seed: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 2, 3, 3, generator=generator, dtype=torch.float64)
    words = torch.randint(7, (size,), generator=generator)
    return x, words, torch.randn(size, 2, generator=generator, dtype=torch.float64)


# The model


class Net(nn.Module):
    """`forward_all` has the batches of all ranks, and each rank's buffers."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.training_ = dict(training)
        self.conv = nn.Conv2d(2, 3, 2)
        self.norm: nn.Module = nn.Identity() if training["norm"] == "none" else nn.BatchNorm1d(12, momentum=_MOMENTUM)
        self.words = nn.Embedding(7, 12, sparse=training["layers"] == "sparse")
        self.middle = nn.Linear(12, 4)
        self.late = nn.Linear(4, 4)
        self.extra = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)
        self.top = nn.Linear(4, 2)
        self.double()
        self.phase = nn.Parameter(torch.randn(12, dtype=torch.complex128)) if training["layers"] == "complex" else None
        if training["buffers"] == "counter":
            self.register_buffer("counter", torch.zeros((), dtype=torch.long))
        elif training["buffers"] != "none":
            self.register_buffer(training["buffers"], torch.zeros(12, dtype=torch.float64))
        self.uses_extra = False

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        h = self._lower(x, words)
        _note(h, dict(self.named_buffers()))
        return self._upper(self.norm(h))

    def forward_all(
        self, batches: Sequence[tuple[Tensor, Tensor]], buffers: Sequence[dict[str, Tensor]], counts: Sequence[bool]
    ) -> list[Tensor]:
        """What forward() is on each of several ranks. A batch that does not count is in no joint statistics."""
        each = [self._lower(x, words) for x, words in batches]
        for h, own in zip(each, buffers, strict=True):
            _note(h, own)
        if self.training_["norm"] == "batch":
            each = [self._normalize(h, own) for h, own in zip(each, buffers, strict=True)]
        elif self.training_["norm"] == "sync":
            counting = [i for i, is_counting in enumerate(counts) if is_counting]
            joint = torch.cat([each[i] for i in counting])
            for own in buffers:  # all of them see the same
                normed = self._normalize(joint, own)
            for i, h in zip(counting, normed.split([len(each[i]) for i in counting]), strict=True):
                each[i] = h
        return [self._upper(h) for h in each]

    def _normalize(self, h: Tensor, buffers: dict[str, Tensor]) -> Tensor:
        buffers["norm.num_batches_tracked"] += 1
        mean, variance = buffers["norm.running_mean"], buffers["norm.running_var"]
        weight, bias = self.norm.weight, self.norm.bias
        return functional.batch_norm(h, mean, variance, weight, bias, training=True, momentum=_MOMENTUM)

    def _lower(self, x: Tensor, words: Tensor) -> Tensor:
        h = self.conv(x).flatten(1) + self.words(words)
        return h if self.phase is None else h + (h * self.phase).abs()

    def _upper(self, h: Tensor) -> Tensor:
        is_checkpointed = self.training_["forward"] == "checkpointed"
        h = torch.tanh(checkpoint(self.middle, h, use_reentrant=False) if is_checkpointed else self.middle(h))
        if self.training_["graph"] == "same" or len(h) != 3:
            h = h + torch.tanh(self.late(h))
        if self.training_["layers"] == "used twice":
            h = h + torch.tanh(self.late(h))
        return self.top(h + self.extra(h) if self.uses_extra else h)


@torch.no_grad()
def _note(h: Tensor, buffers: dict[str, Tensor]) -> None:
    """Change buffers as forward() does."""
    if "counter" in buffers:
        buffers["counter"] += 1
    for name in buffers.keys() & {"average", "own"}:
        buffers[name] += 0.5 * (h.mean(0) - buffers[name])


def _owners(net: Net, training: Training) -> list[dict[str, nn.Parameter]]:
    """The parameters of each optimizer, by name. Those of `extra` are added later."""
    left_out = {"all": "extra", "ignored": ("extra", "unused"), "forgotten": ("extra", "top"), "replaced": "extra"}
    own = {name: p for name, p in net.named_parameters() if not name.startswith(left_out[training["owned"]])}
    if training["optimizers"] == "one":
        return [own]
    lower = {name: p for name, p in own.items() if name.startswith(("conv", "norm", "words", "phase"))}
    return [lower, {name: p for name, p in own.items() if name not in lower}]


def _optimizers(net: Net, training: Training) -> list[torch.optim.Optimizer]:
    found: list[torch.optim.Optimizer] = []
    for own in _owners(net, training):
        if training["kind"] == "fused":
            found.append(torch.optim.AdamW(own.values(), lr=_RATE, eps=1e-2, weight_decay=0.0, fused=True))
        else:
            found.append(torch.optim.SGD(own.values(), lr=_RATE, momentum=0.9 * (training["kind"] == "momentum")))
    return found


def _freeze(net: Net, training: Training, step: int) -> None:
    is_frozen = {"none": False, "thaws": step < 2, "freezes": step >= 2}[training["frozen"]]
    net.late.requires_grad_(not is_frozen)
    if is_frozen:
        net.late.zero_grad()


def _change(net: Net, training: Training, step: int, optimizers: Sequence[Any]) -> None:
    """What the script does to the model between two steps, alike on all ranks."""
    _freeze(net, training, step)
    if training["layout"] == "transposed" and step == 1:
        net.conv.weight.data = net.conv.weight.data.to(memory_format=torch.channels_last)
    if step != 2:
        return
    if training["dtype"] == "changed":
        net.words.float()
    if training["load"] == "copy":
        net.load_state_dict({name: value * 1.5 for name, value in net.state_dict().items()})
    if training["owned"] == "replaced":
        net.top = nn.Linear(4, 2).double()
    if training["groups"] == "added":
        net.uses_extra = True
        optimizers[0].add_param_group({"params": list(net.extra.parameters())})


# On ranks


class _Script:
    """One rank of a training, from step `first` on."""

    def __init__(self, rank: int, training: Training, first: int, models: Any, optimizers: Sequence[Any]) -> None:
        self.rank, self.training = rank, training
        self.net = net = Net(training)
        with torch.no_grad():
            for p in net.parameters():
                p.add_(rank)  # wrap() copies rank 0's
        if training["norm"] == "sync":
            torchring.convert_sync_batchnorm(net)
        if training["hook"] == "before wrap":
            net.middle.weight.register_hook(lambda grad: 2 * grad)
        _freeze(net, training, first)
        if training["forward"] == "compiled":
            net.middle.compile(backend="aot_eager")
        self.optimizers = self._wrapped(_optimizers(net, training))
        if models is not None and self.optimizers:  # a rank outside of the process set has none
            net.load_state_dict(models)
            for optimizer, state in zip(self.optimizers, optimizers, strict=True):
                optimizer.load_state_dict(state)
        self.forgotten = torch.optim.SGD(net.top.parameters(), lr=_RATE)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=training["step"] == "scaler")
        self.scaler.scale(torch.ones(()))  # or unscale_() fails on a rank that skips the first step
        self.thread = ThreadPoolExecutor(1)
        self.flat: Tensor | None = None
        self.kept: list[Tensor] = []

    def _wrapped(self, optimizers: list[torch.optim.Optimizer]) -> list[Any]:
        training, net = self.training, self.net
        if training["step"] == "sam":
            optimizers = [Sam(each) for each in optimizers]
        if training["api"] != "torchring":
            places = {"process_set": hvd.add_process_set([0, 1])} if training["api"] == "process set" else {}
            if self.rank == 2 and places:
                return []
            hvd.broadcast_parameters(net.state_dict(), root_rank=0, **places)
            compression = getattr(hvd.Compression, training["wire"], hvd.Compression.none)
            passes = int(training["accumulate"])
            return [
                hvd.DistributedOptimizer(each, list(own.items()), compression, passes, **places)
                for each, own in zip(optimizers, _owners(net, training), strict=True)
            ]
        kinds = {"counter": "mean", "average": "mean", "own": None}
        buffers = training["buffers"]
        options: dict[str, Any] = {
            "op": training["op"],
            "compression": None if training["wire"] == "own" else training["wire"],
            "bucket_mb": {"default": None, "tiny": 1e-4}[training["buckets"]],
            "accumulate": int(training["accumulate"]),
            "algorithm": training["algorithm"],
            "overlap": training["overlap"],
            "on_nonfinite": training["nonfinite"],
            "shard": training["shard"] != "no",
            "sync_buffers": "mean" if buffers == "none" else {buffers: kinds[buffers]},
            "ignore": ["unused"] if training["owned"] == "ignored" else [],
        }
        return [torchring.wrap(each, net, **options) for each in optimizers]

    def run(self, steps: Sequence[tuple[int, Step]]) -> list[tuple[int, list[Tensor]]]:
        """(step, parameters and buffers) after each step, or if ranks have other numbers of steps, after the last."""
        seen = []
        is_joining = self.training["data"] == "join"
        scalers = [self.scaler] if self.scaler.is_enabled() else []
        with torchring.join(*self.optimizers, *scalers) if is_joining else contextlib.nullcontext():
            for s, step in steps:
                if self.rank in step.present:
                    self._step(s, step)
                if not is_joining:
                    seen.append((s, _state(self.net)))
        return [(steps[-1][0], _state(self.net))] if is_joining else seen

    def _step(self, s: int, step: Step) -> None:
        training, net = self.training, self.net
        _change(net, training, s, self.optimizers)
        self._zero()
        if training["copy"] == "model" and s == 1 and self.rank == 0:
            x, words, y = _random(0, 2)
            functional.mse_loss(copy.deepcopy(net).eval()(x, words), y).backward()
        if training["copy"] == "pickle" and s == 1:
            torch.save(net, io.BytesIO())
        if training["workers"] == "fork" and s == 1:
            if (child := os.fork()) == 0:
                net.zero_grad()
                os._exit(0)
            os.waitpid(child, 0)
        if training["collectives"] == "thread":
            self.call = self.thread.submit(torchring.all_reduce, torch.ones(3))
        first, *others = self.optimizers
        if training["step"] == "closure":
            first.step(lambda: self._backwards(s, step))
            for optimizer in others:
                optimizer.step()
        elif training["step"] == "sam":
            self._ascend(s, step.micros[0])
            self._backwards(s, step)
            for optimizer in self.optimizers:
                optimizer.second_step()
        else:
            self._backwards(s, step)
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
            self.scaler.update()
        if training["forwards"] == "update_bn" and s in (1, 3):
            with torch.no_grad():
                net(*_random(1000 * self.rank, 3)[:2])
            self.optimizers[-1].sync_buffers()
        if training["collectives"] == "script":
            torchring.all_reduce(torch.ones(3))
        elif training["collectives"] == "thread":
            self.call.result()

    def _ascend(self, s: int, micro: Micro) -> None:
        if self.rank in micro.skips:
            return
        with contextlib.ExitStack() as inside:
            for optimizer in self.optimizers:
                inside.enter_context(optimizer.no_sync())
                if micro.weights is not None:
                    optimizer.weigh(micro.weights[self.rank])
            x, words, y = _batch(self.rank, s, 0, micro)
            functional.mse_loss(self.net(x, words), y).backward()
        for optimizer in self.optimizers:
            optimizer.first_step()
        self._zero()

    def _zero(self) -> None:
        how, parameters = self.training["gradients"], list(self.net.parameters())
        if how == "flat":
            if self.flat is None:
                self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
            self.flat.zero_()
            for p, part in zip(parameters, self.flat.split([p.numel() for p in parameters]), strict=True):
                if p.grad is None and p.requires_grad:  # at first, and when a layer thaws
                    p.grad = part.view_as(p)
        elif how == "listed":
            grads = [p.grad for p in parameters if p.grad is not None]
            if len(self.kept) != len(grads):
                self.kept = grads
            if grads:
                torch._foreach_zero_(self.kept)
        elif how == "model":
            self.net.zero_grad()
        else:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=how == "none")
        is_uneven = (self.training["weights"], self.training["skip"]) != ("none", "none")
        if how in ("flat", "listed") and is_uneven:  # or zeros would count as a gradient, and be an error
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=False)

    def _backwards(self, s: int, step: Step) -> Tensor | None:
        loss = None
        for m, micro in enumerate(step.micros):
            with contextlib.ExitStack() as inside:
                for optimizer in self.optimizers if micro.is_local else ():
                    inside.enter_context(optimizer.no_sync())
                loss = self._backward(s, m, step, micro)
        for optimizer in self.optimizers:
            if step.is_left_over or self.training["api"] == "process set":  # whose step() would reduce
                optimizer.synchronize()
            if self.training["clip"] == "norm":
                self.scaler.unscale_(optimizer)
        if self.training["clip"] == "norm":
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
        return loss

    def _backward(self, s: int, m: int, step: Step, micro: Micro) -> Tensor | None:
        x, words, y = _batch(self.rank, s, m, micro)
        if self.rank in micro.skips:
            if self.training["skip"] == "with forward":
                self.net(x, words)
            self.optimizers[0].skip()
            return None
        if micro.weights is not None:
            for optimizer in self.optimizers:
                optimizer.weigh(micro.weights[self.rank])
        loss = functional.mse_loss(self.net(x, words), y)
        if step.nan_rank == self.rank:
            loss = loss * float("nan")
        self.scaler.scale(loss).backward()
        return loss


def _state(net: Net) -> list[Tensor]:
    return [value.detach().clone() for value in net.state_dict().values()]


def _is_own(name: str, training: Training, step: Step) -> bool:
    """Whether each rank has its own: Horovod leaves buffers alone, and so does a step that a GradScaler leaves out."""
    is_buffer = name in ("counter", "average", "own") or "running" in name or "tracked" in name
    is_synced = training["norm"] == "sync" and name.startswith("norm")
    is_left_out = training["step"] == "scaler" and step.nan_rank is not None
    is_ignored = training["owned"] == "ignored" and name.startswith("unused")
    return (
        name == "own" or is_ignored or (is_buffer and not is_synced and (training["api"] != "torchring" or is_left_out))
    )


def train(rank: int, size: int, trainings: Sequence[Training]) -> list[Any]:
    """For each training, after each step: (step, digest of what ranks share, on rank 0 all values). Or the error."""
    found: list[Any] = []
    torch.set_num_threads(1)
    for training in trainings:
        host = f"host {_HOSTS[training['hosts']][rank]}"
        try:
            with unittest.mock.patch.object(host_module, "_host_identity", return_value=host):
                found.append(_train(rank, training))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        hvd.shutdown()
        torchring.shutdown()
    return found


def _train(rank: int, training: Training) -> list[tuple[int, str, list[Tensor] | None]]:
    seen: list[tuple[int, list[Tensor]]] = []
    models: Any = None
    optimizers: Sequence[Any] = ()
    begin, middle = 0, _RESUMED if training["resume"] != "none" else 0
    if training["resume"] == "from one":
        *_, (_, net, inner) = (each for _, each in zip(range(middle), train_alone(training), strict=False))
        models, optimizers, begin = net.state_dict(), [each.state_dict() for each in inner], middle
    for first, last in ((begin, middle), (max(begin, middle), _NUM_STEPS)):
        if first == last:
            continue
        torchring.init(timeout_seconds=60)
        if training["api"] != "torchring":
            hvd.init(process_sets="dynamic")
        script = _Script(rank, training, first, models, optimizers)
        if script.optimizers:
            seen += script.run(list(enumerate(plan_of(training)))[first:last])
            buffer = io.BytesIO()
            torch.save([script.net.state_dict(), [each.state_dict() for each in script.optimizers]], buffer)
            buffer.seek(0)
            models, optimizers = torch.load(buffer, weights_only=True)
        for optimizer in script.optimizers:
            optimizer.close()
        torchring.barrier()
        hvd.shutdown()
        torchring.shutdown()
    plan, names = plan_of(training), list(Net(training).state_dict())
    found = []
    for s, values in seen:
        shared = [v for name, v in zip(names, values, strict=True) if not _is_own(name, training, plan[s])]
        found.append((s, digest(shared), values if rank == 0 else None))
    return found


# In one process


def train_alone(training: Training) -> Iterator[tuple[list[Tensor], Net, list[torch.optim.Optimizer]]]:
    """After each step: parameters and buffers of rank 0, the model, and its optimizers."""
    net = Net(training)
    _freeze(net, training, 0)
    optimizers = _optimizers(net, training)
    steps = plan_of(training)
    per_rank = [dict(net.named_buffers())]  # those of rank 0 are the model's
    per_rank += [{name: value.clone() for name, value in per_rank[0].items()} for _ in steps[0].micros[0].sizes[1:]]
    for s, step in enumerate(steps):
        _change(net, training, s, optimizers)
        for value in (value for own in per_rank[1:] for value in own.values()):
            if training["load"] == "copy" and s == 2:
                value.copy_(value * 1.5)
        net.zero_grad()
        counting = _add_gradients(net, training, s, step, per_rank, optimizers)
        _make_equal(per_rank, counting, {name for name in per_rank[0] if _is_own(name, training, step)})
        if training["clip"] == "norm":
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        if step.nan_rank is None:
            for optimizer in optimizers:
                optimizer.step()
        if training["forwards"] == "update_bn" and s in (1, 3):
            batches = [_random(1000 * r, 3)[:2] for r in range(len(per_rank))]
            with torch.no_grad():
                net.forward_all(batches, per_rank, [True] * len(batches))
            _make_equal(per_rank, range(len(per_rank)))
        yield _state(net), net, optimizers


def _make_equal(
    per_rank: Sequence[dict[str, Tensor]], givers: Sequence[int], but: Set[str] = frozenset({"own"})
) -> None:
    """Give all ranks the mean of buffers; integers are those of the first."""
    for name in per_rank[0].keys() - but if givers else ():
        values = [per_rank[r][name] for r in givers]
        value = torch.stack(values).mean(0) if values[0].is_floating_point() else values[0].clone()
        for own in per_rank:
            own[name].copy_(value)


def _add_gradients(
    net: Net,
    training: Training,
    s: int,
    step: Step,
    buffers: Sequence[dict[str, Tensor]],
    optimizers: Sequence[torch.optim.Optimizer],
) -> list[int]:
    """Set each `.grad` to the mean, and change the ranks' buffers. Returns the ranks that take part."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    divisor, counting = 0.0, set()
    total: dict[nn.Parameter, Tensor] = {}  # of all ranks
    moves: dict[int, list[tuple[Tensor, Tensor]]] = {}  # of SAM, by rank
    first = step.micros[0]
    for r in step.present if training["step"] == "sam" else ():
        if r not in first.skips:
            x, words, y = _batch(r, s, 0, first)
            (output,) = net.forward_all([(x, words)], [buffers[r]], [True])
            grads = _gradients(net, training, functional.mse_loss(output, y))
            parts = [[p for group in each.param_groups for p in group["params"]] for each in optimizers]
            moves[r] = [move for part in parts for move in ascent({p: grads[p] for p in part if p in grads})]
    for m, micro in enumerate(step.micros):
        runs = [r for r in step.present if training["skip"] == "with forward" or r not in micro.skips]
        batches = {r: _batch(r, s, m, micro) for r in runs}
        if not any(micro.counts(r) for r in runs):
            continue
        for together in [[r] for r in runs] if training["step"] == "sam" else [runs]:  # with the same parameters
            with _moved(moves.get(together[0], [])):
                counts = [micro.counts(r) for r in together]
                outputs = net.forward_all([batches[r][:2] for r in together], [buffers[r] for r in together], counts)
                losses = []
                for r, output in zip(together, outputs, strict=True):
                    if micro.counts(r):
                        weight = 1.0 if micro.weights is None else micro.weights[r]
                        losses.append(weight * functional.mse_loss(output, batches[r][2]))
                        divisor += weight
                        counting.add(r)
                if losses:
                    for p, grad in _gradients(net, training, torch.stack(losses).sum()).items():
                        total[p] = grad + total.get(p, 0.0)
    if training["weights"] == "none":
        divisor = len(counting) if training["op"] == "mean" else 1.0
    for p in parameters:
        if p in total:
            p.grad = total[p] / divisor
    return sorted(counting)


def _gradients(net: Net, training: Training, loss: Tensor) -> dict[nn.Parameter, Tensor]:
    """Of the parameters that the loss depends on."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    pairs = [(p, grad.to_dense()) for p, grad in zip(parameters, found, strict=True) if grad is not None]
    return {p: 2 * g if p is net.middle.weight and training["hook"] != "none" else g for p, g in pairs}


@contextlib.contextmanager
def _moved(moves: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Inside, parameters are where SAM has moved them."""
    before = [p.data.clone() for p, _ in moves]
    for p, move in moves:
        p.data.add_(move)
    yield
    for (p, _), value in zip(moves, before, strict=True):
        p.data.copy_(value)


# The comparison


def compare(training: Training, per_rank: Sequence[Any]) -> str | None:
    """What is wrong with a training, or None. `per_rank`: what `train` has found on each rank."""
    errors = [found for found in per_rank if isinstance(found, str)]
    if errors:
        return f"{len(errors)} ranks failed: {errors[0]}"
    ranks = [found for found in per_rank if found]
    if any([text for _, text, _ in found] != [text for _, text, _ in ranks[0]] for found in ranks):
        return "ranks differ"
    tolerance = _TOLERANCES[training["wire"]]
    expected = [values for values, *_ in train_alone(training)]
    for s, _, values in ranks[0]:
        for name, value, right in zip(Net(training).state_dict(), values, expected[s], strict=True):
            error = (value - right).abs().max().item() / max(1.0, right.abs().max().item())
            if not error <= tolerance and not torch.allclose(value, right, atol=tolerance, equal_nan=True):
                return f"step {s}: {name} is off by {error:.2g}"
    return None


def find_faults(trainings: Sequence[Training]) -> list[str]:
    """Run trainings on ranks, and compare each with one process. Returns what is wrong, and with which."""
    results = run_ranks(train, NUM_RANKS, trainings, deadline=60.0 + 10.0 * len(trainings))
    faults = []
    for i, training in enumerate(trainings):
        wrong = compare(training, [found[i] for found in results])
        if wrong is not None:
            faults.append(f"{wrong}\n    with {PAIRS.special(training)}")
    return faults


def not_refused(entries: Sequence[Ways]) -> list[str]:
    """Run what `REFUSED` lists. Returns what is not refused by the error that stands there, or not on all ranks.

    Where one rank alone sees what is wrong, others may say that it has gone.
    """
    faults = []
    for ways in entries:
        found = [each for [each] in run_ranks(train, NUM_RANKS, [PAIRS.training_of(ways)])]
        kind, words = REFUSED[ways]
        is_found = any(str(each).startswith(f"{kind}: ") and words in each for each in found)
        if not is_found or not all(isinstance(each, str) for each in found):
            what = [each if isinstance(each, str) else "it trains" for each in found]
            faults.append(f"{describe(ways)} is to raise {kind}: ... {words} ..., but ranks say {what}")
    return faults
