"""Notices that all gradients arrive together, at the end of backward, which hides hardly any communication.

torch.compile makes one autograd node of the backward of a graph, and all gradients of the graph arrive when that node
has ended. A gradient's hook cannot see which node has computed the gradient. So the times of the few backwards whose
arrivals are written down decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torchring.dynamo import has_compiled

_NUM_BACKWARDS: Final = 3  # in a row
# Share of a backward in which gradients arrive. It was 2 % for a model in one graph, and 49 % or more for others. Where
# the end of forward is unknown, it is a share of all the time since the script began to wait for data.
_LONGEST: Final = 0.10


class BurstWatch:
    """Finds out whether gradients arrive together, in a process that compiles models.

    Attributes:
        finding: a sentence, once gradients have arrived together in several backwards; until then "".
    """

    def __init__(self) -> None:
        self.finding = ""
        self._count = 0

    def note(self, ready_ns: Sequence[int], before_ns: int, *, is_forward_known: bool, hides: bool) -> None:
        """Look at a backward that could have hidden communication.

        Args:
            ready_ns: when each gradient came, after the end of forward or, if that is unknown, after the first
                gradient; -1 for none. Without the time of communication and copies.
            before_ns: time from when the script began to wait for data until then.
            is_forward_known: the end of forward is known.
            hides: backward is known to have hidden some communication.
        """
        if self.finding:
            return
        came = [at for at in ready_ns if at >= 0]
        whole_ns = max(came, default=0) + (0 if is_forward_known else before_ns)
        is_burst = len(came) > 1 and not hides and max(came) - min(came) <= _LONGEST * whole_ns
        is_burst = is_burst and has_compiled()
        self._count = self._count + 1 if is_burst else 0
        if self._count == _NUM_BACKWARDS:
            self.finding = (
                "all gradients arrive together at the end of backward(), so hardly any communication is hidden. Is the "
                "model compiled as a whole? Compile each layer instead: for layer in model.layers: layer.compile()"
            )
