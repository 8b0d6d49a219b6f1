"""`LocalSGD` and `DiLoCo`: optimizers that step alone, and talk to the other ranks every H steps."""

from __future__ import annotations

import contextlib
import copy
import zlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, Literal

import torch
from torch.nn import Module
from torch.optim import Optimizer

from torchring.collectives.service import collectives_of
from torchring.default_world import default_world
from torchring.errors import RingError
from torchring.gradients.reduction import Participant, Reduction, Said
from torchring.initial_state import copy_from
from torchring.local_steps.fragments import Fragment, cut, outer_of, real
from torchring.local_steps.options import Options
from torchring.local_steps.outer_exchange import Link, Outgoing
from torchring.optimizer import wrap
from torchring.optimizer_wrapper import OptimizerWrapper
from torchring.participants.buffers import buffer_specs
from torchring.participants.digests import digests
from torchring.world import World

_TOO_LATE: Final = "add parameters before LocalSGD() or DiLoCo() is called, which cuts them into fragments"


class LocalSGD(OptimizerWrapper):
    """Each rank steps alone, and every H steps all take the mean of their parameters (Stich 2019). Collective.

        optimizer = torchring.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), model, every=8)

    It is a torch.optim.Optimizer, with the parameter groups and the state of the optimizer that it is given. Schedulers
    count inner steps. Each rank reads data of its own. All ranks call `step()` equally often. Ranks count by the inner
    steps that they have made, without those that a GradScaler leaves out. Running statistics, such as those of
    BatchNorm, become their mean over ranks in each exchange. Other buffers, and the optimizer's own state (momentum),
    stay on their rank. Before each exchange, ranks compare what they agreed on last.

    Args:
        optimizer: a plain torch.optim.Optimizer. Its parameters are fp16, bf16, fp32, fp64 or complex, on the CPU or on
            a GPU. What ranks send passes through host memory. 16-bit parameters are averaged in fp32.
        model: gives parameters their names in errors, and has its buffers averaged. It is copied from rank 0 at first,
            with the state of the optimizer.
        every: number of inner steps between two exchanges, H.
        within: "host" for `torchring.wrap` on the ranks of each host, which then step together. Not in elastic jobs.

    Raises:
        ValueError: an option is out of range, the optimizer is distributed already, or a parameter cannot be averaged.
        PlanMismatchError: ranks have other options or parameters, or call `step()` another number of times.
        GradientError: a parameter is not finite, or what ranks agreed on differs. Raised by `step()`.
        PeerLostError, PeerTimeoutError: a rank died, or did not come within the timeout. Raised by `step()`.
    """

    _OUTER: ClassVar[dict[str, Any]] = {"lr": 1.0}  # of SGD: a step of length 1 makes them the mean
    _step_supports_amp_scaling = True  # GradScaler leaves it to `step()` to leave out a step, and all ranks call that.
    grad_scale: Any = 1.0  # GradScaler sets a tensor or None around a step,
    found_inf: torch.Tensor | None = None  # and this one

    def __init__(
        self, optimizer: Optimizer, model: Module | None = None, *, every: int, within: Literal["host"] | None = None
    ) -> None:
        self._open(optimizer, model, Options(every, within=within), None)

    def _open(self, optimizer: Optimizer, model: Module | None, options: Options, outer: Optimizer | None) -> None:
        """Collective: check that all ranks can do this, and start from rank 0's values."""
        world, kind, is_alone = default_world(), type(self).__name__, contextlib.nullcontext()
        with collectives_of(world).together(f"could not make its {kind}") if world.size > 1 else is_alone:
            names = options.names(optimizer, model, world)
            self._outer = {p: outer_of(p) for p in names}
            self._outer_optimizer = outer or torch.optim.SGD(self._outer.values(), **self._OUTER)
            if outer is not None:
                if {p for group in outer.param_groups for p in group["params"]} != set(names):
                    raise ValueError("outer has other parameters than the optimizer of the inner steps")
                for group in outer.param_groups:
                    group["params"] = [self._outer[p] for p in group["params"]]
        if world.size > 1:
            kinds = [f"parameter {i}: {name} {tuple(p.shape)} {p.dtype}" for i, (p, name) in enumerate(names.items())]
            collectives_of(world).check_equal([f"options: {kind} {options}", *kinds])
        self._options, self._names = options, names
        of_model = dict([*model.named_parameters(), *model.named_buffers()]) if model is not None else {}
        copy_from(world, 0, of_model or {name: p.data for p, name in names.items()}, optimizer)
        if options.within == "host" and world.size > 1:
            optimizer = wrap(optimizer, model, group=[list(ranks) for ranks in world.hosts])
        super().__init__(optimizer)
        self._fragments = cut(self._outer, options.fragments, options.every)
        self._fragments[-1].buffers = buffer_specs(model, "mean") if model is not None else ()
        self._num_steps = 0  # inner steps, also those that a GradScaler has left out
        self._version = 0  # of the outer parameters: how often a fragment has changed
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
        if sum(len(group["params"]) for group in self.param_groups) != len(self._names):
            raise ValueError(_TOO_LATE)
        for guest in self._guests:
            guest.before_backward()
        self._follow_model()
        self._is_new = False
        is_made = self.found_inf is None or not self.found_inf
        if is_made and isinstance(self.grad_scale, torch.Tensor):
            for parameter in self._names:
                if parameter.grad is not None:
                    parameter.grad.div_(self.grad_scale.to(parameter.grad.device))
        result = self._step_wrapped(closure, *args, **kwargs) if is_made else None
        self._num_steps += 1
        for fragment in self._fragments:
            fragment.num_made += is_made
        try:
            for fragment in self._fragments:
                if fragment.under_way is not None and fragment.under_way[0] == self._num_steps:
                    self._merge(fragment)
                if self._num_steps % self._options.every == fragment.sent_at:
                    self._send(fragment)
        except RingError as error:
            if not self._world.is_in_step(error):  # a State repeats this step with the ranks that are left
                self._num_steps -= 1
            raise
        return result

    @property
    def outer(self) -> Optimizer:
        """The optimizer of the outer parameters: with LocalSGD, SGD with lr=1, which makes them the mean."""
        return self._outer_optimizer

    def synchronize(self) -> None:
        """Wait for what is sent in the background, and merge it. Sends nothing."""
        self._follow_model()
        if self._world.failure is not None or not self._world.is_open:
            self._drop()
        for fragment in self._fragments:
            if fragment.under_way is not None:
                self._merge(fragment)

    def load_outer(self) -> None:
        """Give the model the outer parameters, which are the same on all ranks. Drops inner steps since. Sends nothing.

        For evaluation or a last checkpoint between two exchanges.
        """
        self.synchronize()
        for fragment in self._fragments:
            fragment.load_outer()
            fragment.num_made = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See torch.optim.Optimizer."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: ValueError. Parameters are cut into fragments when this optimizer is made."""
        if not self._is_initialising:
            raise ValueError(_TOO_LATE)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, and "local_steps": outer parameters, outer optimizer, steps, feedback.

        The inner optimizer can load it, too. It may be loaded into any number of ranks. The feedback is this rank's:
        only this rank takes it back. Merges what is under way. Sends nothing.
        """
        self.synchronize()
        own = {
            "kind": type(self).__name__,
            "steps": self._num_steps,
            "version": self._version,
            "parameters": [outer.detach() for outer in self._outer.values()],
            "optimizer": self._outer_optimizer.state_dict(),
            "rank": self._world.rank,
            "fragments": [(fragment.num_made, fragment.feedback) for fragment in self._fragments],
        }
        return {**self.optimizer.state_dict(), "local_steps": own}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` has returned. After the state of a plain optimizer, training starts a new round."""
        own = state_dict.get("local_steps")
        if own is not None and (own["kind"], len(own["parameters"])) != (type(self).__name__, len(self._outer)):
            raise ValueError(f"this state is of other parameters, or not of {type(self).__name__}")
        self.optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != "local_steps"})
        self._is_new, self._num_steps, fragments = own is None, 0, []
        if own is not None:
            for outer, value in zip(self._outer.values(), own["parameters"], strict=True):
                outer.copy_(value)
            self._outer_optimizer.load_state_dict(own["optimizer"])
            self._num_steps, self._version, fragments = own["steps"], own["version"], own["fragments"]
        if len(fragments) != len(self._fragments):
            fragments = [(self._num_steps % self._options.every, None)] * len(self._fragments)
        for fragment, (num_made, feedback) in zip(self._fragments, fragments, strict=True):
            is_own = own is not None and own["rank"] == self._world.rank
            fragment.num_made, fragment.feedback, fragment.under_way = num_made, feedback if is_own else None, None

    def __getstate__(self) -> Any:
        raise TypeError(f"{type(self).__name__} cannot be copied or pickled; use state_dict()")

    def _send(self, fragment: Fragment) -> None:
        """Collective: exchange a fragment, now or in the background."""
        names, tensors = [self._names[p] for p in fragment.outer], fragment.tensors()
        of_outer, of_guests = digests(fragment.outer.values()), Reduction(self._num_steps)
        for guest in self._guests:
            guest.on_begin(of_guests)
        words = {
            "step": self._num_steps,
            "fragment": names[0],
            "made": fragment.num_made * self._link.num_ranks,
            "digest": zlib.crc32(of_outer.numpy().tobytes()),
            "not_finite": [n for n, delta in zip(names, tensors, strict=False) if not delta.isfinite().all()],
            "guests": of_guests.mine,
        }
        mine = Outgoing(words, names, of_outer.tolist(), tensors, self._options.bits, fragment.feedback)
        future = self._link.collectives.start(f"the outer step of {type(self).__name__}", self._link.exchange, mine)
        fragment.under_way = self._num_steps + self._options.overlap, future, fragment.num_made
        fragment.num_made = 0
        if not self._options.overlap:
            self._merge(fragment)

    def _merge(self, fragment: Fragment) -> None:
        """Take the outer step for a fragment that is under way. Waits for the result."""
        assert fragment.under_way is not None
        try:
            result = fragment.under_way[1].result()
        except BaseException:
            fragment.drop()
            raise
        fragment.under_way, fragment.feedback = None, result.feedback
        fragment.take(result.values, self._outer_optimizer, keeps=self._options.overlap > 0)
        self._version += 1
        of_guests, said = Reduction(self._num_steps), [each["guests"] for each in result.words]
        of_guests.said = Said({name: [each[name] for each in said] for name in said[0]})
        for guest in self._guests:
            guest.on_reduced(of_guests)

    @torch.no_grad()
    def _follow_model(self) -> None:
        """The outer parameters are the model's before the first step: the script may have loaded them until then."""
        for parameter, outer in self._outer.items() if self._is_new else ():
            outer.copy_(real(parameter.detach()))

    # What torchring.elastic asks for

    def _rejoin(self, world: World | None = None, guests: Sequence[Participant] = ()) -> None:
        """Collective: exchange with the ranks of another world from now on. See `rejoin` of torchring.optimizer."""
        self._drop()
        self._world, self._guests = world or default_world(), guests
        if not self._world.is_provisional:
            self._link = Link(self._world, between_hosts=self._options.within is not None)

    def _drop(self) -> None:
        for fragment in self._fragments:
            fragment.drop()

    def _own_steps(self) -> Any:
        """A copy of what this rank has, for `_resume`."""
        self._drop()
        return copy.deepcopy((self.state_dict(), [parameter.detach() for parameter in self._names]))

    @torch.no_grad()
    def _resume(self, own: Any) -> None:
        """After another rank's state was loaded: go on from own inner steps, or from the outer parameters.

        The former if these steps began from the same outer parameters.
        """
        if own is None or own[0]["local_steps"]["version"] != self._version:
            self.load_outer()
            return
        num_steps, (state, parameters) = self._num_steps, own
        self.load_state_dict(state)
        self._num_steps = num_steps
        for parameter, value in zip(self._names, parameters, strict=True):
            parameter.copy_(value)


class DiLoCo(LocalSGD):
    """Each rank steps alone; every H steps an outer optimizer steps with the mean of what they changed. Collective.

        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        optimizer = torchring.DiLoCo(torch.optim.AdamW(model.parameters()), model, every=30, outer=outer)

    The delta is the outer parameter less the local one, and its mean over ranks is the gradient of the outer optimizer
    (Douillard et al. 2023, arXiv 2311.08105). All ranks load the result. All else is as with `LocalSGD`.

    With `fragments` and `overlap` it is Streaming DiLoCo (arXiv 2501.18512): a fragment is sent at a time, in the
    background of the next `overlap` inner steps. Then local parameters become the mean of the outer and the local ones.
    Muon takes matrices only: give it, and the optimizer of the other parameters, a DiLoCo each.

    Args:
        optimizer: of the inner steps, such as AdamW or Muon. See `LocalSGD`.
        model: see `LocalSGD`.
        every: number of inner steps between two outer steps of a parameter, H.
        outer: a new optimizer of the same parameters, which gets the outer ones in their place: copies on their device,
            at least fp32, complex ones as pairs. Default: SGD as above.
        fragments: number of parts, of whole parameters in the order of `optimizer`. Each is sent at a time of its own.
        overlap: number of inner steps after which a fragment is merged. 0 waits for it.
        bits: send matrices in 4 or 2 bits an element, in blocks of 256 with a scale each (as MuLoCo, arXiv 2505.23725).
            What is lost is added to the next delta, which takes 4 bytes an element. fp64 is sent as fp32.
        within: see `LocalSGD`.

    Raises what `LocalSGD` raises.
    """

    _OUTER: ClassVar = {"lr": 0.7, "momentum": 0.9, "nesterov": True}

    def __init__(
        self,
        optimizer: Optimizer,
        model: Module | None = None,
        *,
        every: int,
        outer: Optimizer | None = None,
        fragments: int = 1,
        overlap: int = 0,
        bits: Literal[4, 2] | None = None,
        within: Literal["host"] | None = None,
    ) -> None:
        self._open(optimizer, model, Options(every, fragments, overlap, bits, within), outer)
