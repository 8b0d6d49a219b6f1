"""`LocalSGD` and `DiLoCo`: optimizers that step alone, and talk to the other ranks every H steps."""

from __future__ import annotations

import copy
import functools
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, Literal

import torch
from torch.optim import Optimizer

from torchring.broadcasts import check_dense, check_writable
from torchring.collectives.service import collectives_of
from torchring.connection import ConnectedOptimizer
from torchring.default_world import default_world
from torchring.errors import RingError
from torchring.gradients.reduction import Participant
from torchring.gradients.validation import named_parameters
from torchring.initial_state import copy_from
from torchring.local_steps.outer_exchange import Incoming, Link, Outgoing
from torchring.optimizer import wrap
from torchring.optimizer_wrapper import OptimizerWrapper
from torchring.participants.buffers import BufferSpec, buffer_specs
from torchring.participants.digests import digests
from torchring.world import World

_DTYPES: Final = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip
OuterFactory = Callable[[list[torch.Tensor]], Optimizer]


@dataclass(frozen=True)
class _Options:
    every: int
    fragments: int = 1
    overlap: int = 0
    alpha: float = 0.5
    bits: int | None = None
    within: str | None = None

    def check(self) -> None:
        for name, least, most in (("every", 1, None), ("fragments", 1, self.every), ("overlap", 0, self.every)):
            value = getattr(self, name)
            if type(value) is not int or value < least or (most is not None and value > most):
                limit = "" if most is None else f" and at most every={most}"
                raise ValueError(f"{name} must be a whole number, at least {least}{limit}, got {value!r}")
        if self.overlap == self.every:
            raise ValueError(f"overlap={self.overlap} must be less than every={self.every}")
        if self.bits not in (None, 4, 2):
            raise ValueError(f"bits must be 4, 2 or None, got {self.bits!r}")
        if not isinstance(self.alpha, (int, float)) or not 0 <= self.alpha < 1:
            raise ValueError(f"alpha must be at least 0 and less than 1, got {self.alpha!r}")
        if self.within not in (None, "host"):
            raise ValueError(f"within must be 'host' or None, got {self.within!r}")


class LocalSGD(OptimizerWrapper):
    """Each rank steps alone, and every H steps all take the mean of their parameters (Stich 2019). Collective.

        optimizer = torchring.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), model, every=8)

    It is a torch.optim.Optimizer, with the parameter groups and the state of the optimizer that it is given. Schedulers
    count inner steps. Each rank reads data of its own. All ranks call `step()` equally often. A rank whose GradScaler
    leaves steps out counts less in the mean: weights are the numbers of inner steps made. Running statistics, such as
    those of BatchNorm, become their mean over ranks in each exchange. Other buffers, and the optimizer's own state
    (momentum), stay on their rank. Before each exchange, ranks compare what they agreed on last.

    Args:
        optimizer: a plain torch.optim.Optimizer. Its parameters are fp16, bf16, fp32, fp64 or complex, on the CPU or on
            a GPU. What ranks send passes through host memory. 16-bit parameters are averaged in fp32.
        model: gives parameters their names in errors, and has its buffers averaged. It is copied from rank 0 at first,
            with the state of the optimizer.
        every: number of inner steps between two exchanges, H.
        within: "host" for `torchring.wrap` on the ranks of each host, which then step together. Not in elastic jobs.

    Attributes:
        optimizer: the optimizer of the inner steps.

    Raises:
        ValueError: an option is out of range, the optimizer is distributed already, or a parameter cannot be averaged.
        PlanMismatchError: ranks have other options or parameters, or call `step()` another number of times.
        GradientError: a parameter is not finite, or what ranks agreed on differs. Raised by `step()`.
        PeerLostError, PeerTimeoutError: a rank died, or did not come within the timeout. Raised by `step()`.
    """

    outer: Optimizer | None = None  # of DiLoCo, over the outer parameters
    grad_scale: Any = 1.0  # GradScaler sets a tensor or None around a step,
    found_inf: torch.Tensor | None = None  # and this one

    def __init__(
        self,
        optimizer: Optimizer,
        model: torch.nn.Module | None = None,
        *,
        every: int,
        within: Literal["host"] | None = None,
    ) -> None:
        self._open(optimizer, model, _Options(every=every, within=within), None)

    def _open(
        self,
        optimizer: Optimizer,
        model: torch.nn.Module | None,
        options: _Options,
        make: Optimizer | OuterFactory | None,
    ) -> None:
        """Collective: check that all ranks can do this, and start from rank 0's values."""
        world, kind = default_world(), type(self).__name__
        names: dict[torch.nn.Parameter, str] = {}
        problem: Exception | None = None
        try:
            options.check()
            if options.within is not None and world.is_provisional:
                raise ValueError("within='host' does not work in an elastic job, whose hosts change")
            if isinstance(optimizer, (ConnectedOptimizer, LocalSGD)):
                raise ValueError(
                    f"{kind} takes a plain optimizer, got a {type(optimizer).__name__}, which talks to other ranks "
                    f"already; pass the plain one, and within='host' for torchring.wrap() on the ranks of each host"
                )
            names = named_parameters(optimizer, model)
            if options.fragments > len(names):
                raise ValueError(f"fragments={options.fragments}, but the optimizer has {len(names)} parameters")
            for parameter, name in names.items():
                _check_parameter(parameter, name)
            self._outer = {p: torch.nn.Parameter(_wide(p)) for p in names}
            if isinstance(make, Optimizer):
                self.outer = _take_over(make, self._outer)
            elif make is not None:
                self.outer = make(list(self._outer.values()))
                if not isinstance(self.outer, Optimizer):
                    raise TypeError(f"outer must return a torch.optim.Optimizer, got {type(self.outer).__name__}")
        except Exception as error:
            problem = error
        if world.size > 1:
            collectives_of(world).raise_together(problem, f"could not make its {kind}")
            kinds = [f"parameter {i}: {name} {tuple(p.shape)} {p.dtype}" for i, (p, name) in enumerate(names.items())]
            collectives_of(world).check_equal([f"options: {kind} {options}", *kinds])
        elif problem is not None:
            raise problem
        self._options, self._names = options, names
        of_model = dict([*model.named_parameters(), *model.named_buffers()]) if model is not None else {}
        copy_from(world, 0, of_model or {name: p.data for p, name in names.items()}, optimizer)
        specs = buffer_specs(model, "mean") if model is not None else []
        self._buffers: list[BufferSpec] = [spec for spec in specs if spec.is_averaged]
        if options.within == "host" and world.size > 1:
            optimizer = wrap(optimizer, model, group=[list(ranks) for ranks in world.hosts])
        super().__init__(optimizer)
        order = {p: i for i, p in enumerate(model.parameters())} if model is not None else {}
        self._fragments = _cut(sorted(names, key=lambda p: order.get(p, 0)), options.fragments)
        self._num_steps = 0  # inner steps, also those that a GradScaler has left out
        self._version = 0  # of the outer parameters: how often a fragment has changed
        self._made = [0] * options.fragments  # inner steps since the fragment was sent
        self._feedback: dict[int, list[torch.Tensor]] = {}  # by fragment
        # By fragment: the step that merges it, the result, and how many inner steps were sent
        self._under_way: dict[int, tuple[int, Future[Incoming], int]] = {}
        self._guests: Sequence[Participant] = ()
        self._is_new = True  # no step has been made, and no outer state loaded
        self._rejoin(world)

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Make an inner step, and what is due after it. Collective in every `every`-th call, see `fragments`.

        Returns what the step of the inner optimizer returns. Raises what the class says; the inner step is made then.
        """
        self._world.refuse_provisional("step()")
        if not self._world.is_open:
            raise ValueError(f"this {type(self).__name__} belongs to a world that was shut down; make another")
        for guest in self._guests:
            guest.before_backward()
        self._follow_model()
        self._is_new = False
        result, is_made = self._step_inner(closure, *args, **kwargs)
        self._num_steps += 1
        self._made = [made + is_made for made in self._made]
        try:
            for fragment, (due, *_) in list(self._under_way.items()):
                if due == self._num_steps:
                    self._merge(fragment)
            every, number = self._options.every, self._options.fragments
            for fragment in range(number):
                if self._num_steps % every == (fragment + 1) * every // number % every:
                    self._send(fragment)
        except RingError as error:
            if not self._world.is_in_step(error):  # a State repeats this step with the ranks that are left
                self._num_steps -= 1
            raise
        return result

    def synchronize(self) -> None:
        """Wait for what is sent in the background, and merge it. Sends nothing."""
        self._follow_model()
        if self._world.failure is not None or not self._world.is_open:
            self._drop()
        for fragment in list(self._under_way):
            self._merge(fragment)

    def load_outer(self) -> None:
        """Give the model the outer parameters, which are the same on all ranks. Drops inner steps since. Sends nothing.

        For evaluation or a last checkpoint between two exchanges.
        """
        self.synchronize()
        self._start_from_outer(is_new=False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See torch.optim.Optimizer."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: ValueError. Parameters are cut into fragments when this optimizer is made."""
        if not self._is_initialising:
            raise ValueError(f"add parameters before {type(self).__name__}() is called, which cuts them into fragments")

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, and "local_steps": outer parameters, outer optimizer, steps, feedback.

        The inner optimizer can load it, too. It may be loaded into any number of ranks. The feedback is this rank's:
        only this rank takes it back. Merges what is under way. Sends nothing.
        """
        self.synchronize()
        own = {
            "steps": self._num_steps,
            "version": self._version,
            "made": list(self._made),
            "parameters": [outer.detach() for outer in self._outer.values()],
            "optimizer": self.outer.state_dict() if self.outer is not None else None,
            "rank": self._world.rank,
            "feedback": dict(self._feedback),
        }
        return {**self.optimizer.state_dict(), "local_steps": own}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` has returned. After the state of a plain optimizer, training starts a new round."""
        self._under_way.clear()
        self.optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != "local_steps"})
        own = state_dict.get("local_steps")
        if own is None:
            self._is_new, self._num_steps, self._feedback = True, 0, {}
            self._made = [0] * self._options.fragments
            return
        if len(own["parameters"]) != len(self._outer) or (own["optimizer"] is None) != (self.outer is None):
            raise ValueError(f"this state is of other parameters, or not of {type(self).__name__}")
        for outer, value in zip(self._outer.values(), own["parameters"], strict=True):
            outer.data.copy_(value)
        if self.outer is not None:
            self.outer.load_state_dict(own["optimizer"])
        self._num_steps, self._version, self._is_new = own["steps"], own["version"], False
        fits = len(own["made"]) == self._options.fragments
        self._made = list(own["made"]) if fits else [self._num_steps % self._options.every] * self._options.fragments
        is_own = fits and own["rank"] == self._world.rank and self._options.bits is not None
        self._feedback = {k: [each.clone() for each in v] for k, v in own["feedback"].items()} if is_own else {}

    def __getstate__(self) -> Any:
        raise TypeError(f"{type(self).__name__} cannot be copied or pickled; use state_dict()")

    # Inner steps

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler leaves it to `step()` to leave out a step, so that ranks call it equally often."""
        return True

    def _step_inner(self, closure: Callable[[], Any] | None, *args: Any, **kwargs: Any) -> tuple[Any, int]:
        """Returns the result of the step, and 1, or 0 if it was left out."""
        if self.found_inf is not None and bool(self.found_inf):
            return None, 0
        if isinstance(self.grad_scale, torch.Tensor):
            for parameter in self._names:
                if parameter.grad is not None:
                    parameter.grad.div_(self.grad_scale.to(parameter.grad.device))
        return self._step_wrapped(closure, *args, **kwargs), 1

    # Outer steps

    @torch.no_grad()
    def _send(self, fragment: int) -> None:
        """Collective: exchange a fragment, now or in the background."""
        parameters, options = self._fragments[fragment], self._options
        outer = [self._outer[p] for p in parameters]
        words: dict[str, Any] = {"step": self._num_steps, "fragment": fragment}
        words["made"] = self._made[fragment] * self._link.num_ranks
        deltas = []
        for parameter, own in zip(parameters, outer, strict=True):
            if self.outer is None:
                deltas.append(_wide(parameter).cpu())
            else:  # from what this rank was given, which may be rounded
                local = _real(parameter.detach())
                deltas.append((own.detach().to(local.dtype).to(own.dtype) - local).cpu())
        finite = [bool(delta.sum().isfinite()) or bool(delta.isfinite().all()) for delta in deltas]
        words["not_finite"] = self._names[parameters[finite.index(False)]] if False in finite else ""
        is_same = sum(len(group["params"]) for group in self.param_groups) == len(self._names)
        words["problem"] = "" if is_same else "has added parameters to its optimizer, which is too late"
        of_outer = digests(outer)
        words["digest"] = zlib.crc32(of_outer.numpy().tobytes())
        buffers = self._find_buffers() if fragment == options.fragments - 1 else []
        flat = [torch.cat([_real(b).detach().double().reshape(-1).cpu() for b in buffers])] if buffers else []
        heard = SimpleNamespace(mine={})
        for guest in self._guests:
            guest.on_begin(heard)  # type: ignore[arg-type]
        words["guests"] = {name: int(value) for name, value in heard.mine.items()}
        names, feedback = [self._names[p] for p in parameters], self._feedback.get(fragment)
        mine = Outgoing(words, names, of_outer.tolist(), deltas, flat, options.bits, feedback)
        what = f"the outer step of {type(self).__name__}"
        if options.overlap:
            future = self._link.collectives.start(what, self._link.exchange, mine)
        else:
            future = Future()
            future.set_result(self._link.collectives.run(what, self._link.exchange, mine))
        self._under_way[fragment] = self._num_steps + options.overlap, future, self._made[fragment]
        self._made[fragment] = 0
        if not options.overlap:
            self._merge(fragment)

    @torch.no_grad()
    def _merge(self, fragment: int) -> None:
        """Take the outer step for a fragment, whose result has come, or is waited for."""
        _, future, made = self._under_way.pop(fragment)
        try:
            result = future.result()
        except BaseException:
            self._made[fragment] += made  # what was sent is a part of the next delta
            raise
        parameters, keeps = self._fragments[fragment], self._options.alpha if self._options.overlap else 0.0
        for parameter, delta in zip(parameters, result.deltas, strict=True):
            own = self._outer[parameter]
            if self.outer is None:
                own.data.copy_(delta)
            else:
                own.grad = delta.to(own)
        if self.outer is not None:
            self.outer.step()
            self.outer.zero_grad()
        for parameter in parameters:
            value, local = self._outer[parameter].detach(), _real(parameter.data)
            local.copy_(value if not keeps else torch.lerp(value, local.to(value.dtype), keeps))
        self._version += 1
        if result.feedback is not None:
            self._feedback[fragment] = result.feedback
        at = 0
        for buffer in self._find_buffers() if result.buffers else ():
            words = _real(buffer.data)
            words.copy_(result.buffers[0][at : at + words.numel()].view(words.shape))
            at += words.numel()
        said = [each["guests"] for each in result.words]
        by_rank = {name: [each[name] for each in said] for name in said[0]}
        sums = {name: sum(values) for name, values in by_rank.items()}
        for guest in self._guests:
            guest.on_reduced(SimpleNamespace(heard=SimpleNamespace(by_rank=by_rank, sums=sums)))  # type: ignore[arg-type]

    def _find_buffers(self) -> list[torch.Tensor]:
        return [buffer for spec in self._buffers if (buffer := spec.find()) is not None]

    @torch.no_grad()
    def _start_from_outer(self, *, is_new: bool) -> None:
        """Parameters become what the outer ones are; with `is_new`, the other way round."""
        for parameter, outer in self._outer.items():
            if is_new:
                outer.data.copy_(_real(parameter.data))
            else:
                _real(parameter.data).copy_(outer)

    def _follow_model(self) -> None:
        """The outer parameters are the model's before the first step: the script may have loaded them until then."""
        if self._is_new:
            self._start_from_outer(is_new=True)

    # What torchring.elastic asks for

    def _rejoin(self, world: World | None = None, guests: Sequence[Participant] = ()) -> None:
        """Collective: exchange with the ranks of another world from now on. See `rejoin` of torchring.optimizer."""
        self._drop()
        self._world, self._guests = world or default_world(), guests
        if not self._world.is_provisional:
            self._link = Link(self._world, between_hosts=self._options.within is not None)

    def _drop(self) -> None:
        """Forget what is under way, in a world that is over: it is a part of the next deltas."""
        for fragment, (*_, made) in self._under_way.items():
            self._made[fragment] += made
        self._under_way = {}

    def _own_steps(self) -> dict[str, Any]:
        """A copy of what only this rank has, for `_resume`."""
        self._drop()
        own = {"inner": self.optimizer.state_dict(), "feedback": self._feedback, "made": self._made}
        return copy.deepcopy({**own, "version": self._version, "parameters": [p.detach() for p in self._names]})

    @torch.no_grad()
    def _resume(self, own: dict[str, Any] | None) -> None:
        """After another rank's state was loaded: go on from own inner steps, or from the outer parameters.

        The former if these steps began from the same outer parameters.
        """
        if own is None or own["version"] != self._version:
            self._made = [0] * self._options.fragments
            self._start_from_outer(is_new=False)
            return
        self.optimizer.load_state_dict(own["inner"])
        self._feedback, self._made = own["feedback"], own["made"]
        for parameter, value in zip(self._names, own["parameters"], strict=True):
            parameter.data.copy_(value)


class DiLoCo(LocalSGD):
    """Each rank steps alone; every H steps an outer optimizer steps with the mean of what they changed. Collective.

        outer = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
        optimizer = torchring.DiLoCo(torch.optim.AdamW(model.parameters()), model, every=30, outer=outer)

    The delta is the outer parameter less the local one, and its mean over ranks is the gradient of the outer optimizer
    (Douillard et al. 2023, arXiv 2311.08105). All ranks load the result. All else is as with `LocalSGD`.

    With `fragments` and `overlap` it is Streaming DiLoCo (arXiv 2501.18512): a fragment is sent at a time, in the
    background of the next `overlap` inner steps, and then merged: local = alpha * local + (1 - alpha) * outer.
    Muon takes matrices only: give it, and the optimizer of the other parameters, a DiLoCo each.

    Args:
        optimizer: of the inner steps, such as AdamW or Muon. See `LocalSGD`.
        model: see `LocalSGD`.
        every: number of inner steps between two outer steps of a parameter, H.
        outer: called with a list of the outer parameters, copies of the parameters on their device, at least fp32;
            complex ones as pairs. Returns their optimizer: a class, or a partial of one. Default: SGD as above. Or an
            optimizer over the same parameters as `optimizer`, which gets the outer ones in their place.
        fragments: number of parts, of whole parameters in the order of layers, which are sent at times of their own
            within `every` steps.
        overlap: number of inner steps after which a fragment is merged. 0 waits for it.
        alpha: how much of the local parameters a merge keeps. Only with `overlap`.
        bits: send matrices in 4 or 2 bits an element, in blocks of 256 with a scale each (as MuLoCo, arXiv 2505.23725).
            What is lost is added to the next delta, which takes 4 bytes an element. fp64 is sent as fp32.
        within: see `LocalSGD`.

    Attributes:
        optimizer: the optimizer of the inner steps.
        outer: the outer optimizer.

    Raises what `LocalSGD` raises.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: torch.nn.Module | None = None,
        *,
        every: int,
        outer: Optimizer | OuterFactory | None = None,
        fragments: int = 1,
        overlap: int = 0,
        alpha: float = 0.5,
        bits: Literal[4, 2] | None = None,
        within: Literal["host"] | None = None,
    ) -> None:
        if outer is None:
            outer = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
        self._open(optimizer, model, _Options(every, fragments, overlap, alpha, bits, within), outer)


def _check_parameter(parameter: torch.Tensor, name: str) -> None:
    """Raise ValueError, with its name, for a parameter that cannot be averaged."""
    try:
        check_dense(parameter)
        check_writable(parameter)
    except ValueError as error:
        raise ValueError(f"{name} cannot be averaged: {error}") from None
    if parameter.dtype not in _DTYPES:
        raise ValueError(f"{name} is {parameter.dtype}, which cannot be averaged; leave it out of the optimizer")


def _take_over(outer: Optimizer, copies: dict[torch.nn.Parameter, torch.nn.Parameter]) -> Optimizer:
    """Give `outer` the outer parameters in place of the model's."""
    if {p for group in outer.param_groups for p in group["params"]} != set(copies):
        raise ValueError("outer has other parameters than the optimizer of the inner steps; give both the same")
    for group in outer.param_groups:
        group["params"] = [copies[p] for p in group["params"]]
    return outer


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _wide(parameter: torch.Tensor) -> torch.Tensor:
    """A copy, real, in fp32 or fp64."""
    values = _real(parameter.detach())
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    return values.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _cut(parameters: list[torch.nn.Parameter], number: int) -> list[list[torch.nn.Parameter]]:
    """Fragments of about equally many elements, none of them empty."""
    total, before = sum(p.numel() for p in parameters), 0
    fragments: list[list[torch.nn.Parameter]] = [[]]
    for i, parameter in enumerate(parameters):
        is_full = before + parameter.numel() // 2 > total * len(fragments) / number
        is_needed = len(parameters) - i <= number - len(fragments)  # or the last ones would be empty
        if fragments[-1] and len(fragments) < number and (is_full or is_needed):
            fragments.append([])
        fragments[-1].append(parameter)
        before += parameter.numel()
    return fragments
