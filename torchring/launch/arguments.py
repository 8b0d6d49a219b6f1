"""The parser of all commands, and types of options that several commands have."""

import argparse
import difflib
import math
import os
import re
from collections.abc import Callable, Iterable
from typing import Any, Final, NoReturn

from torchring.launch.hosts import Host, parse_hosts, read_hostfile, slurm_hosts

# The launcher sets these variables for each process, and overwrites what they were.
LAUNCHERS_OWN: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


class _Help(argparse.HelpFormatter):
    """Keeps indented lines, which are examples, as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n".join(line if line[:1] == " " else fill(line, width, indent) for line in text.splitlines())


class Parser(argparse.ArgumentParser):
    """A usage error is the error, and a line that says where help is. Options may have underscores, as torchrun's may.

    No option can be abbreviated: a script with `--progres` in it would break when an option of that beginning is added.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": _Help, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        for name, action in [*self._option_string_actions.items()]:
            self._option_string_actions.setdefault(name[:2] + name[2:].replace("-", "_"), action)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        what, _, words = message.partition("unrecognized arguments: ")
        if not what:
            message += self.hint(words.split()[0].partition("=")[0])
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` shows what can be given\n")

    def hint(self, word: str) -> str:
        """The end of a message about an option that there is not."""
        shown = (action for action in self._actions if action.help != argparse.SUPPRESS)
        return did_you_mean(word, [name for action in shown for name in action.option_strings])


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """The end of a message about a word that is not among `names`. Empty if none of them is like it."""
    bare = {name.lstrip("-"): name for name in names}
    near = difflib.get_close_matches(word.lstrip("-"), bare, 1)
    return f"; did you mean {bare[near[0]]}?" if near else ""


def whole(what: str, least: int, most: float = math.inf) -> Callable[[str], int]:
    """A type for whole numbers from `least` to `most`. `what`: for the message."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"needs {what}, got {text!r}")
        return int(text)

    return parse


positive: Final = whole("a number of processes, 1 or more", 1)


def number(what: str, least: float = 1e-9) -> Callable[[str], float]:
    """A type for numbers from `least` on. `what`: for the message."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"needs {what}, got {text!r}")
        return value

    return parse


duration: Final = number("a positive number of seconds")


def setting(text: str) -> tuple[str, str]:
    """NAME=VALUE, or the NAME of a variable that is set."""
    name, equals, value = text.partition("=")
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) or not (equals or name in os.environ):
        raise argparse.ArgumentTypeError(f"needs NAME=VALUE, or the NAME of a variable that is set, got {text!r}")
    if name in LAUNCHERS_OWN:
        raise argparse.ArgumentTypeError(f"{name} is set for each process by what starts it, got {text!r}")
    return name, value if equals else os.environ[name]


def hosts_of(options: argparse.Namespace) -> list[Host] | None:
    """The hosts of -H, --hostfile or Slurm's allocation, None without any of these. Raises LaunchError."""
    if options.hosts is not None:
        return parse_hosts(options.hosts)
    if options.hostfile is not None:
        return read_hostfile(options.hostfile)
    return slurm_hosts(os.environ) if getattr(options, "launcher", None) == "srun" else None
