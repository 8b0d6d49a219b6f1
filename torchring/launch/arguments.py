"""Types for argparse, of options that several commands have."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable
from typing import Final

from torchring.launch.hosts import Host, parse_hosts, read_hostfile

# The launcher sets these variables for each process, and overwrites what they were.
LAUNCHERS_OWN: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def whole(what: str, least: int, most: float = math.inf) -> Callable[[str], int]:
    """A type for whole numbers from `least` to `most`. `what`: for the message."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"needs {what}, got {text!r}")
        return int(text)

    return parse


positive: Final = whole("a number of processes, 1 or more", 1)


def duration(text: str) -> float:
    """Seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"needs a positive number of seconds, got {text!r}")
    return seconds


def setting(text: str) -> tuple[str, str]:
    """NAME=VALUE, or the NAME of a variable that is set."""
    name, equals, value = text.partition("=")
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) or not (equals or name in os.environ):
        raise argparse.ArgumentTypeError(f"needs NAME=VALUE, or the NAME of a variable that is set, got {text!r}")
    if name in LAUNCHERS_OWN:
        raise argparse.ArgumentTypeError(f"{name} is set for each process by what starts it, got {text!r}")
    return name, value if equals else os.environ[name]


def hosts_of(options: argparse.Namespace) -> list[Host] | None:
    """The hosts of -H or --hostfile, None without either option. Raises LaunchError."""
    if options.hosts is not None:
        return parse_hosts(options.hosts)
    return None if options.hostfile is None else read_hostfile(options.hostfile)
