"""Parameters that are DTensors. The core reduces their local tensors, and knows nothing of meshes.

In the place of a DTensor the core gets a `LocalParameter`. It has the memory of the local tensor, and its `grad` is the
local tensor of the DTensor's gradient. So `.grad` of the script's parameter stays a DTensor, whose local tensor lies in
the wire buffer. How the other dimensions of the mesh cut the parameter does not matter, as long as all ranks that
reduce together hold the same part.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from torchring.dynamo import run_eagerly
from torchring.errors import GradientError, ranks_in_words
from torchring.gradients.views import referenced_beside_grad
from torchring.world import World

Hook = Callable[[torch.Tensor], None]


class LocalParameter(torch.Tensor):
    """This rank's part of a DTensor. As a key it equals the DTensor."""

    whole: DTensor
    label: str  # its name, in errors
    is_assigned: bool  # by fully_shard(), and not accumulated by autograd
    common: frozenset[int]  # dimensions of its mesh in which ranks that reduce together differ
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __hash__(self) -> int:
        return id(self.whole)

    def __eq__(self, other: object) -> bool:  # type: ignore[override]
        return other is self or other is self.whole

    @property
    def offset(self) -> Sequence[int]:
        """Where the part begins in the DTensor."""
        whole = self.whole
        return compute_local_shape_and_global_offset(whole.shape, whole.device_mesh, whole.placements)[1]

    @property
    def place(self) -> str:
        """Which part it is: equal on ranks that reduce together."""
        return f" at {tuple(self.offset)} of {tuple(self.whole.shape)}"

    @property
    def grad(self) -> torch.Tensor | None:
        """The local tensor of the gradient.

        The core looks at its version, and counts who refers to it. DTensor's operations do not change that version, and
        a script that keeps the gradient refers to the DTensor. So both are made up for.
        """
        grads = [grad for grad in (self.whole.grad,) if grad is not None]
        if not grads:
            return None
        is_kept = bool(referenced_beside_grad(list(grads)))
        grad = cast(Any, grads[0])
        local = cast(torch.Tensor, grad._local_tensor)
        grad.kept = local if is_kept else None
        if grad._version != getattr(grad, "seen_version", 0):
            grad.seen_version = grad._version
            torch.autograd.graph.increment_version(local)
        return local

    @grad.setter
    def grad(self, local: torch.Tensor | None) -> None:
        whole, grad = self.whole, cast(DTensor | None, self.whole.grad)
        if local is None or grad is None or grad._local_tensor is not local:
            whole.grad = None if local is None else self.as_whole(local)

    def as_whole(self, local: torch.Tensor) -> DTensor:
        """A DTensor that is cut as the parameter is, with `local` on this rank."""
        return DTensor(local, self.whole._spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def state_of_whole(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """An optimizer's state of the DTensor, from that of its part."""
        shaped = {
            key: value
            for key, value in entry.items()
            if isinstance(value, torch.Tensor) and value.shape == self.shape and key != "step"
        }
        return {**entry, **{key: self.as_whole(getattr(v, "_local_tensor", v)) for key, v in shaped.items()}}

    def register_post_accumulate_grad_hook(self, hook: Hook) -> torch.utils.hooks.RemovableHandle:
        """As of the DTensor. The gradient that `hook` finds is placed as the parameter is."""

        @run_eagerly
        def arrived(_: torch.Tensor) -> None:
            self.is_assigned = getattr(torch._C._current_autograd_node(), "variable", None) is not self.whole
            self._place_gradient()
            hook(self)

        return self.whole.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-any-return, no-untyped-call]

    def _place_gradient(self) -> None:
        """A norm that computes on a part of the sequence leaves a sum that other dimensions have still to add up."""
        whole, grad = self.whole, cast(Any, self.whole.grad)
        if whole._local_tensor.data_ptr() != self.data_ptr():  # converted or moved, which the core finds out
            self.data = whole._local_tensor
        if grad is None or grad.placements == whole.placements:
            return
        if grad.device_mesh != whole.device_mesh or any(not grad.placements[d].is_replicate() for d in self.common):
            raise GradientError(
                f"the gradient of {self.label} is placed {grad.placements} on {grad.device_mesh}, so it has still to "
                "be added up over ranks that torchring averages over, too. Give each of them a part of the batch as an "
                "ordinary tensor, or as a DTensor of the other dimensions of the mesh alone, such as mesh['tp']",
                parameters=(self.label,),
            )
        whole.grad = grad.redistribute(placements=whole.placements)


def _of_whole(name: str) -> property:
    return property(lambda local: getattr(local.whole, name), lambda local, value: setattr(local.whole, name, value))


for _name in ("requires_grad", "_cdata", "_post_accumulate_grad_hooks"):
    setattr(LocalParameter, _name, _of_whole(_name))
_own_version: Final = torch.Tensor._version.__get__  # type: ignore[attr-defined]
LocalParameter._version = property(lambda local: local.whole._version + _own_version(local))  # type: ignore

_made: Final[weakref.WeakValueDictionary[int, LocalParameter]] = weakref.WeakValueDictionary()


def local_of(whole: DTensor) -> LocalParameter:
    """The same for the same DTensor, as long as somebody has it."""
    if (local := _made.get(id(whole))) is None:
        local = _made[id(whole)] = torch.Tensor._make_subclass(LocalParameter, whole._local_tensor)
        local.whole, local.label, local.common = whole, "a DTensor", frozenset()
    return local


def check(names: Mapping[torch.nn.Parameter, str], world: World, way_out: str) -> None:
    """Raise ValueError for a DTensor of which the ranks of `world` do not all hold the same part."""
    for parameter, name in names.items():
        if isinstance(parameter, LocalParameter):
            parameter.label, parameter.common = name, common_dimensions(parameter, name, world, way_out)


def common_dimensions(local: LocalParameter, name: str, world: World, way_out: str = "") -> frozenset[int]:
    """The dimensions of its mesh in which ranks of `world` differ. Raises ValueError as `check` does."""
    mesh, placements, members = local.whole.device_mesh, local.whole.placements, world.ranks
    if (own := mesh.get_coordinate()) is None:
        raise ValueError(
            f"{name} is a DTensor on {mesh}, without rank {members[world.rank]}; give it a mesh that has it"
        )
    places = [place for rank in members for place in (mesh.mesh == rank).nonzero().tolist()]
    common = frozenset(d for d, mine in enumerate(own) if any(place[d] != mine for place in places))
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"{name} is placed {placements}: a sum that no rank has. Call redistribute() first")
    if any(not placements[d].is_replicate() for d in common):
        raise ValueError(
            f"{name} is a DTensor, as fully_shard() makes them, placed {placements} on {mesh}, so that "
            f"{ranks_in_words(members)} have different parts, and torchring reduces whole parameters. Pass "
            f"group=mesh[...], with the dimension in which ranks have the same part{way_out}"
        )
    return common
