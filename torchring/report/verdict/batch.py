"""Says whether a larger batch still pays, by the gradient noise scale: see `participants/noise.py`."""

from __future__ import annotations

import math
from typing import Final

from torchring.observe.recorder.records import RunInfo
from torchring.report.words import share_in_words

_WORDS: Final = {2: "twice", 4: "four times", 8: "eight times"}
_MOST: Final = 64  # times the ranks that a trace says anything about


def about_batch(run_info: RunInfo) -> str:
    """One sentence; "" if the noise scale is unknown.

    With batch B, a training takes steps in proportion to 1 + noise scale / B. (McCandlish et al. 2018, equation 2.7)

    Example: batch 512, noise scale 2,100: four times the ranks make a batch of 2,048, with (1 + 2,100 / 2,048) /
    (1 + 2,100 / 512) = 40 % of the steps.
    """
    batch, scale = run_info.batch_size, run_info.noise_scale
    if batch <= 0 or scale < 0:
        return ""
    if math.isinf(scale):
        return f"Batch {batch:,.0f}; noise hides the gradient of so few samples: many times the ranks still pay."
    times = min(_MOST, 2 ** math.floor(math.log2(max(scale / batch, 1))))
    larger = max(2, times)
    share = (1 + scale / (larger * batch)) / (1 + scale / batch)
    begin = f"Batch {batch:,.0f}; noise scale about {float(f'{scale:.2g}'):,.0f}"
    steps = f"{_WORDS.get(larger, f'{larger} times')} the ranks"
    if times > 1:
        return f"{begin}: {steps} still pay, with {share_in_words(share)} of the steps."
    if scale >= batch:
        return f"{begin}: {steps} would take {share_in_words(share)} of the steps."
    saved = share_in_words(share)
    return f"{begin}: {steps} would still take {saved} of the steps, as noise hardly asks for so large a batch."
