"""Numbers in sentences."""

from __future__ import annotations


def count(number: int, noun: str) -> str:
    """ "1 rank", "2 ranks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def share_in_words(share: float) -> str:
    """A share, from 0 to 1: "42 %"."""
    return f"{100 * share:.0f} %"
