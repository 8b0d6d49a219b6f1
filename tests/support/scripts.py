"""Training scripts that are legal in one process, for `support/training.py`: on the host, and on devices.

Unused parameters · several backwards · op="sum" · tied, mixed, strided, complex, sparse, frozen parameters
· checkpointing, retain_graph, double backward · exceptions · layers used in another order
"""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchring
from tests.support.checks import digest
from tests.support.training import Side, batch, loss_on, momentum, small_model, train, values


def _train(
    side: Side,
    model: nn.Module,
    optimizer: Any,
    num_steps: int,
    loss: Callable[[int, int], Tensor],
    set_to_none: Callable[[int], bool] = lambda step: True,
) -> list[Tensor]:
    """The values after so many steps on the mean of the ranks' loss(rank, step)."""
    for step in range(num_steps):
        optimizer.zero_grad(set_to_none(step))
        side.mean(lambda rank, step=step: loss(rank, step)).backward()
        optimizer.step()
    return values(model)


class Branches(nn.Module):
    """A stem and three heads, of which a call uses those it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.stem = nn.Linear(4, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 2) for _ in range(3))
        self.double()

    def forward(self, x: Tensor, heads: Sequence[int]) -> Tensor:
        hidden = torch.tanh(self.stem(x))
        return torch.stack([self.heads[i](hidden) for i in heads]).sum(0)


USAGE: dict[str, Callable[[int, int], list[int]]] = {  # which heads a rank uses in a step
    "unused on some ranks": lambda rank, step: [0, 1, 2] if rank == 0 else [0],
    "alternating": lambda rank, step: [(rank + step) % 3],
    "unused on all ranks": lambda rank, step: [0, 1],
    "from the third step on": lambda rank, step: [0] if step < 2 else [0, 1 + rank % 2],
    "until the third step": lambda rank, step: [0, 1, 2] if step < 2 else [0],
    "other sets each step": lambda rank, step: [[0], [1, 2], [0, 2], [1]][step % 4],
}


def branches(side: Side, usage: str, set_to_none: bool, options: dict[str, Any]) -> Sequence[Any]:
    model = Branches()
    optimizer = side.wrap(momentum(model), model, **options)
    seen: list[Any] = []
    for step in range(5):
        optimizer.zero_grad(set_to_none)

        def loss(rank: int, step: int = step) -> Tensor:
            x, y = batch(rank, step)
            return nn.functional.mse_loss(model(x, USAGE[usage](rank, step)), y)

        side.mean(loss).backward()
        seen += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return [*seen, *values(model)]


def accumulating(side: Side, how: str) -> Sequence[Any]:
    model = small_model()
    accumulate = 3 if how.startswith("accumulate") else 1
    optimizer = side.wrap(momentum(model), model, accumulate=accumulate)
    seen: list[Any] = []
    for step in range(3):
        if how == "accumulate, two are dropped":
            for at in (10 * step + 5, 10 * step + 6):
                side.mean(lambda rank, at=at: loss_on(model, rank, at)).backward()
        optimizer.zero_grad(set_to_none=how != "two backwards, zeroed in place")
        num_backwards = 2 if "two backwards" in how or "left" in how else 3
        for number in range(num_backwards):
            loss = side.mean(lambda rank, at=10 * step + number: loss_on(model, rank, at))
            is_silent = (
                number + 1 < num_backwards if how == "no_sync" else how in ("synchronize", "accumulate in no_sync")
            )
            with optimizer.no_sync() if side.is_wrapped and is_silent else nullcontext():
                loss.backward()
        if side.is_wrapped and how in ("synchronize", "accumulate, two are left", "accumulate in no_sync"):
            optimizer.synchronize()
            optimizer.synchronize()
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if side.is_wrapped and how == "accumulate":
            optimizer.synchronize()  # nothing is left to do
        optimizer.step()
    return [*seen, *values(model)]


def summed(side: Side, compression: str | None) -> Sequence[Any]:
    """op="sum" of the ranks' losses, each divided by the number of all rows, as scripts with uneven batches do."""
    model = small_model()
    optimizer = side.wrap(momentum(model), model, op="sum", compression=compression)

    def loss(rank: int, step: int) -> Tensor:
        rows = 5 - 3 * (rank % 2)
        x, y = batch(rank, step)
        return nn.functional.mse_loss(model(x[:rows]), y[:rows], reduction="sum") / 14 * len(side.mine)

    return _train(side, model, optimizer, 3, loss, lambda step: step == 1)


class Computes(nn.Module):
    """Parameters and layers by name, and what is computed with them."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor], **own: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.compute = compute
        for name, each in own.items():
            setattr(self, name, each)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def _tied() -> nn.Module:
    def compute(it: Any, x: Tensor) -> Tensor:
        return it.out(torch.tanh(it.mix(it.words((x[:, 0].abs() * 3).long() % 7))))

    words, out = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    out.weight = words.weight
    return Computes(compute, words=words, mix=nn.Linear(4, 4), out=out).double()


def _odd() -> nn.Module:
    def compute(it: Any, x: Tensor) -> Tensor:
        return (x @ it.transposed).sum(1, keepdim=True) * it.scale + x @ it.gappy * it.one + it.nothing.sum()

    tensors = {"scale": torch.tensor(1.5), "nothing": torch.empty(0, 3), "one": torch.randn(1, 1, 1)}
    strided = {"transposed": torch.randn(3, 4).double().t(), "gappy": torch.randn(8, 6).double()[::2, ::3]}
    return Computes(compute, **{name: nn.Parameter(each.double()) for name, each in (tensors | strided).items()})


def _images(memory_format: torch.memory_format) -> nn.Module:
    def compute(it: Any, x: Tensor) -> Tensor:
        images = x[:, :3, None, None].expand(-1, -1, 4, 4).contiguous(memory_format=memory_format)
        return it.second(torch.tanh(it.first(images))).sum((2, 3))

    layers = {"first": nn.Conv2d(3, 5, 3, padding=1), "second": nn.Conv2d(5, 4, 2)}
    return Computes(compute, **layers).double().to(memory_format=memory_format)


def _complex() -> nn.Module:
    """Complex parameters, one of which gets the conjugate of a tensor as its gradient, and quantised weights."""

    def compute(it: Any, x: Tensor) -> Tensor:
        turned = (x.to(torch.complex128) @ it.rotation).conj() * it.phase
        return turned.abs() * it.quantised.double() + it.offset

    draw = partial(torch.randn, dtype=torch.complex128)
    tensors = {"rotation": draw(4, 3).t().contiguous().t(), "phase": draw(3), "offset": torch.randn(3).double()}
    quantised = nn.Parameter(torch.tensor([3, -2, 1], dtype=torch.int8), requires_grad=False)
    return Computes(compute, quantised=quantised, **{name: nn.Parameter(each) for name, each in tensors.items()})


KINDS: dict[str, Callable[[], nn.Module]] = {
    "tied": _tied,
    "number, empty, strided": _odd,
    "convolution": lambda: _images(torch.contiguous_format),
    "channels_last": lambda: _images(torch.channels_last),
    "complex, quantised": _complex,
}


def of_kind(side: Side, kind: str, options: dict[str, Any]) -> Sequence[Any]:
    torch.manual_seed(5)
    model = KINDS[kind]()
    strides = [p.stride() for p in model.parameters()]
    optimizer = side.wrap(torch.optim.Adam(model.parameters(), lr=0.01), model, **options)
    _train(side, model, optimizer, 4, lambda rank, step: model(batch(rank, step)[0]).square().mean(), lambda n: n != 2)
    same_strides = strides == [p.stride() for p in model.parameters()]
    return [same_strides, *[p.grad.clone() for p in model.parameters() if p.grad is not None], *values(model)]


def mixed(rank: int, world_size: int, options: dict[str, Any]) -> list[Any]:
    """Local and reduced gradients of a model with parameters in four dtypes."""
    torch.manual_seed(5)
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32]
    layers = nn.ModuleList(nn.Linear(4, 4).to(dtype) for dtype in dtypes)

    def loss(of: nn.ModuleList) -> Tensor:
        x = batch(rank, 0)[0].float()
        for layer in of:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.float().square().mean()

    bare = copy.deepcopy(layers)
    loss(bare).backward()
    optimizer = torchring.wrap(torch.optim.SGD(layers.parameters(), lr=0.1), layers, **options)
    loss(layers).backward()
    reduced = [p.grad.clone() for p in layers.parameters()]
    optimizer.step()
    return [[p.grad for p in bare.parameters()], reduced, digest(layers.parameters())]


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words = nn.Embedding(11, 3, sparse=sparse)
        self.bags = nn.EmbeddingBag(9, 3, mode="sum", sparse=sparse)
        self.out = nn.Linear(3, 2)
        self.double()

    def forward(self, x: Tensor, with_bags: bool) -> Tensor:
        ids = (x.abs() * 10).long()
        hidden = self.words(ids % 11).sum(1)
        return self.out(hidden + self.bags(ids % 9) if with_bags else hidden)


def sparse_words(side: Side, sparse: bool, set_to_none: bool) -> Sequence[Any]:
    model = Words(sparse and side.is_wrapped)
    optimizer = side.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)

    def loss(rank: int, step: int) -> Tensor:
        return model(batch(rank, step)[0], with_bags=(rank + step) % 2 == 0 and step < 3).square().mean()

    trained = _train(side, model, optimizer, 4, loss, lambda step: set_to_none)
    gradients = [p.grad.to_dense() for p in (model.words.weight, model.out.weight) if p.grad is not None]
    return [*gradients, *trained]


def frozen(side: Side, plan: str) -> Sequence[Any]:
    """f: the first layer is frozen in that step, t: it is trained."""
    model = small_model()
    first = model[0].requires_grad_(plan[0] == "t")
    optimizer = side.wrap(momentum(model), model)

    def loss(rank: int, step: int) -> Tensor:
        first.requires_grad_(plan[step] == "t")
        return loss_on(model, rank, step)

    return _train(side, model, optimizer, len(plan), loss)


class Checkpointed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.how = how
        self.double()

    def _segment(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))

    def _nested(self, x: Tensor) -> Tensor:
        return torch.tanh(self.third(checkpoint(self._segment, x, use_reentrant=True)))

    def forward(self, x: Tensor) -> Tensor:
        reentrant = partial(checkpoint, use_reentrant=True)
        if "not reentrant" in self.how:
            hidden = checkpoint(self._segment, x, use_reentrant=False)
            return self.third(self.first(hidden) if "used twice" in self.how else hidden)
        if self.how != "plain":
            x = x.detach().requires_grad_()  # reentrant ones need an input that does
        if self.how == "reentrant":
            return self.third(reentrant(self._segment, x))
        if self.how == "reentrant, two segments":
            return reentrant(self.third, reentrant(self._segment, x))
        if self.how == "reentrant, nested":
            return reentrant(self._nested, x)
        if self.how == "all inside a reentrant one":
            return reentrant(lambda it: self.third(self._segment(it)), x)
        assert self.how == "plain"
        return self.third(self._segment(x))


def checkpointed(side: Side, how: str, options: dict[str, Any]) -> Sequence[Any]:
    model = Checkpointed(how if side.is_wrapped or "twice" in how else "plain")
    if not side.is_wrapped and how == "reentrant, nested":
        model.forward = lambda x: torch.tanh(model.third(model._segment(x)))  # type: ignore[method-assign]
    optimizer = side.wrap(momentum(model), model, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _train(side, model, optimizer, 3, lambda rank, step: model(batch(rank, step)[0]).square().mean())


def graph_games(side: Side, game: str) -> Sequence[Any]:
    model = small_model()
    optimizer = side.wrap(momentum(model), model)
    seen: list[Any] = []

    def loss(rank: int, step: int) -> Tensor:
        loss = loss_on(model, rank, step)
        if game == "gradient penalty":
            x = batch(rank, step)[0].requires_grad_()
            out = model(x)
            [slope] = torch.autograd.grad(out.sum(), x, create_graph=True)
            return out.square().mean() + (slope.norm(dim=1) - 1).square().mean()
        if game == "gradient of parameters":
            slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            return loss + sum((slope.square().sum() for slope in slopes), torch.zeros(()))
        return loss

    if game not in ("retain_graph", "inputs=", "hooks on tensors"):
        return _train(side, model, optimizer, 3, loss)
    for step in range(3):
        optimizer.zero_grad()
        handle = model[0].weight.register_hook(lambda gradient: gradient * (2 if game == "hooks on tensors" else 1))
        total = side.mean(lambda rank, step=step: loss(rank, step))
        if game == "retain_graph":
            total.backward(retain_graph=True)
        total.backward(inputs=list(model[2].parameters()) if game == "inputs=" else None)
        handle.remove()
        if game == "inputs=":
            seen.append(model[0].weight.grad)
        optimizer.step()
    return [*seen, *values(model)]


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise ArithmeticError("an error in a custom function")


def failing(side: Side, where: int, options: dict[str, Any]) -> Sequence[Any]:
    """In step 1 backward raises before the first layer's gradients, or before all."""
    model = small_model()
    optimizer = side.wrap(momentum(model), model, **options)
    raised = 0
    for step in range(4):
        optimizer.zero_grad()

        def loss(rank: int, step: int = step) -> Tensor:
            x, y = batch(rank, step)
            x = model[:where](x)
            return nn.functional.mse_loss(model[where:](Raises.apply(x) if step == 1 else x), y)

        try:
            side.mean(loss).backward()
        except ArithmeticError:
            raised += 1
            continue
        optimizer.step()
    return [raised, *values(model)]


class Chain(nn.Module):
    """Layers registered in one order and used in another, which may change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6)).double()

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        for i in order:
            x = torch.tanh(self.layers[i](x))
        return x


ORDERS: dict[str, Callable[[int, int], list[int]]] = {
    "as registered": lambda rank, step: [0, 1, 2, 3, 4, 5],
    "reversed": lambda rank, step: [5, 4, 3, 2, 1, 0],
    "another each step": lambda rank, step: torch.randperm(6, generator=torch.Generator().manual_seed(step)).tolist(),
    "another on each rank": lambda rank, step: [(rank * 2 + step + i) % 6 for i in range(6)],
}


def ordered(side: Side, name: str, options: dict[str, Any]) -> Sequence[Any]:
    model = Chain()
    optimizer = side.wrap(momentum(model), model, **options)

    def loss(rank: int, step: int) -> Tensor:
        return model(batch(rank, step)[0], ORDERS[name](rank, step)).square().mean()

    return _train(side, model, optimizer, 5, loss, lambda step: step % 2 == 0)


def keeping(side: Side, keep: str) -> Sequence[Any]:
    """Two tasks, as in PCGrad: the first one's gradients are kept, take part in the second loss, and are added."""
    model = small_model()
    optimizer = side.wrap(momentum(model), model)
    seen: list[Any] = []
    for step in range(3):
        optimizer.zero_grad()
        side.mean(lambda rank, step=step: loss_on(model, rank, step)).backward()
        grads: list[Tensor] = [p.grad for p in model.parameters() if p.grad is not None]
        first = [grad.detach() if keep == "detached" else grad for grad in grads]
        seen += [grad.clone() for grad in first]
        optimizer.zero_grad()
        pull = sum((grad * p).square().sum() for grad, p in zip(first, model.parameters(), strict=True))
        (side.mean(lambda rank, step=step: loss_on(model, rank, step + 10)) + pull).backward()
        seen += first
        for p, grad in zip(model.parameters(), first, strict=True):
            p.grad.add_(grad)
        optimizer.step()
    return [*seen, *values(model)]


def amp(side: Side, kind: str, poisoned: int | None) -> Sequence[Any]:
    """Rank 1 meets an infinity in step `poisoned`."""
    dtype = torch.float32 if kind == "autocast" else torch.float64
    model = small_model(dtype)
    device = next(model.parameters()).device.type
    optimizer = side.wrap(torch.optim.AdamW(model.parameters(), lr=0.01, fused=kind == "fused"), model)
    scaler = torch.amp.GradScaler(device, init_scale=64.0, growth_interval=2)
    seen: list[Any] = []

    def loss(rank: int, step: int) -> Tensor:
        with torch.autocast(device, torch.float16, enabled=kind == "autocast"):
            value = loss_on(model, rank, step)
        return value.to(dtype) * (torch.inf if (rank, step) == (1, poisoned) else 1.0)

    for step in range(5):
        optimizer.zero_grad()
        before = values(model)
        scaler.scale(side.mean(lambda rank, step=step: loss(rank, step))).backward()
        if kind == "clipped":
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        seen += [scaler.get_scale(), all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))]
    return [*seen, *values(model)]


def optimized(side: Side, options: dict[str, Any]) -> Sequence[Any]:
    """AdamW with options, and clipped gradients."""
    model, norms = small_model(), list[Tensor]()
    optimizer = side.wrap(torch.optim.AdamW(model.parameters(), lr=0.01, **options), model)
    clip = partial(nn.utils.clip_grad_norm_, list(model.parameters()), 0.05)
    train(side, model, optimizer, range(5), before_step=lambda step: norms.append(clip()))
    return [*norms, *values(model)]


# What users of a GPU rely on: script, arguments, tolerance. On the fake device and on GPUs.
class Sam(torch.optim.Optimizer):
    """SAM as its authors use it: moves by the gradients there are, and puts parameters back before `base` steps.

    The state is that of the optimizer that makes the step.
    """

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, base.defaults)
        self.base_optimizer = base
        self._old: list[tuple[Tensor, Tensor]] = []
        self._share()

    def _share(self) -> None:
        self.param_groups, self.state = self.base_optimizer.param_groups, self.base_optimizer.state

    def load_state_dict(self, state_dict: Any) -> None:
        self.base_optimizer.load_state_dict(state_dict)
        self._share()

    def first_step(self) -> None:
        self._old = [(p, p.data.clone()) for group in self.param_groups for p in group["params"]]
        for p, move in ascent({p: p.grad for p, _ in self._old if p.grad is not None}):
            p.data.add_(move)

    def put_back(self) -> None:
        for p, old in self._old:
            p.data = old
        self._old = []

    def second_step(self) -> None:
        self.put_back()
        self.base_optimizer.step()


def ascent(grads: Mapping[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """How far SAM moves each parameter."""
    dense = {p: grad.to_dense() for p, grad in grads.items()}
    norm = torch.stack([torch.zeros(()).double(), *(grad.norm().double() for grad in dense.values())]).norm()
    return [(p, (0.05 * grad / (norm + 1e-12)).to(p.dtype)) for p, grad in dense.items()]


ON_DEVICES: dict[str, tuple[Callable[..., Sequence[Any]], tuple[Any, ...], float]] = {
    "unused on some ranks": (branches, ("unused on some ranks", True, {}), 1e-9),
    "unused on some ranks, fp16": (branches, ("alternating", True, {"compression": "fp16"}), 2e-2),
    "other sets each step, by the ring": (branches, ("other sets each step", False, {"algorithm": "ring"}), 1e-9),
    "no_sync": (accumulating, ("no_sync",), 1e-9),
    "accumulate, two are left": (accumulating, ("accumulate, two are left",), 1e-9),
    "summed": (summed, (None,), 1e-9),
    "channels_last, fp16": (of_kind, ("channels_last", {"compression": "fp16"}), 5e-2),
    "complex": (of_kind, ("complex, quantised", {}), 1e-9),
    "kept gradients": (keeping, ("the gradient",), 1e-9),
    "sparse": (sparse_words, (True, True), 1e-9),
    "inputs=": (graph_games, ("inputs=",), 1e-9),
    "exception in backward": (failing, (1, {}), 1e-9),
    "checkpoints": (checkpointed, ("not reentrant", {}), 1e-9),
    "reentrant checkpoints": (checkpointed, ("reentrant, two segments", {}), 1e-9),
    "foreach, clipped": (optimized, ({"foreach": True},), 1e-9),
    "fused, clipped": (optimized, ({"fused": True},), 1e-9),
    "GradScaler and autocast": (amp, ("autocast", 2), 2e-2),
    "GradScaler, fused": (amp, ("fused", 2), 1e-9),
    "GradScaler, clipped": (amp, ("clipped", 2), 1e-9),
    "on a side stream": (of_kind, ("convolution", {}), 1e-9),
}
