"""Do all gradients arrive together, at the end of backward? Then hardly any communication is hidden.

They do if torch.compile has made one graph of a model: see `dynamo.py`. Which node of autograd has computed a gradient
cannot be seen from the gradient's hook. So the times of the few backwards whose arrivals are written down decide.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from torchring.dynamo import has_compiled_whole

_NUM_BACKWARDS: Final = 3  # in a row
# Share of a backward in which gradients arrive. It was 2 % for a model in one graph, and 49 % or more for others. Where
# the end of forward is unknown, it is a share of all the time since the script began to wait for data.
_LONGEST: Final = 0.10
_logger: Final = logging.getLogger("torchring")


class BurstWatch:
    """Logs one warning when gradients have arrived together in several backwards, of a process that compiles models.

    Attributes:
        is_over: whether more backwards make no difference.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._count = 0

    def note(self, ready_ns: Sequence[int], before_ns: int, *, is_forward_known: bool, hides: bool) -> None:
        """A backward is over that could have hidden communication.

        Args:
            ready_ns: when each gradient came, after the end of forward or, if that is unknown, after the first
                gradient; -1 for none. Without the time of communication and copies.
            before_ns: how long before that the script began to wait for data.
            is_forward_known: whether the end of forward is known.
            hides: whether backward is known to have hidden some communication.
        """
        if self.is_over:
            return
        came = [at for at in ready_ns if at >= 0]
        whole_ns = max(came, default=0) + (0 if is_forward_known else before_ns)
        is_burst = len(came) > 1 and not hides and max(came) - min(came) <= _LONGEST * whole_ns
        is_burst = is_burst and has_compiled_whole()
        self._count = self._count + 1 if is_burst else 0
        if self._count == _NUM_BACKWARDS:
            self.is_over = True
            _logger.warning(
                "all gradients arrive together at the end of backward(), so hardly any communication is hidden. Is the "
                "model compiled as a whole? Use torchring.compile(model) in place of torch.compile(model)"
            )
