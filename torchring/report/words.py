"""Names of phases, and numbers in sentences."""

from typing import Final

from torchring.observer import Phase

NAMES: Final = {
    Phase.INPUT: "input",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",  # without the time in which communication kept it waiting
    Phase.WAITING: "waiting for a rank",
    Phase.EXPOSED: "communication",  # the rank stands still while gradients are reduced; all ranks are there
    Phase.BETWEEN: "between backward and step",
    Phase.OPTIMIZER: "optimizer",
}


def number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def about(*values: float, factor: float = 1.0) -> str:
    """Two digits of a number, or of the least and the greatest of several: "61 to 75"."""
    rounded = sorted({float(f"{factor * value:.2g}") for value in values})
    texts = [f"{each:,.0f}" if each >= 10 else f"{each:g}" for each in rounded]
    return texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}"


def share_in_words(share: float) -> str:
    """A share, from 0 to 1: "42 %"."""
    return f"{100 * share:.0f} %"
