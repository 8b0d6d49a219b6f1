"""The settings of Horovod's API: environment variables HOROVOD_*, read by `init()`, as Horovod reads them.

The variables in which a launcher says rank, size and where to meet are read elsewhere (rendezvous/environment.py). A
warning names all other HOROVOD_* variables: they mean nothing to torchring.
"""

import logging
import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

DYNAMIC_TIMELINE: Final = "DYNAMIC"
_LEVELS: Final = {
    "TRACE": logging.DEBUG, "DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARNING": logging.WARNING,
    "ERROR": logging.ERROR, "FATAL": logging.CRITICAL,
}  # fmt: skip
# Not the user's doing: launchers set these for workers, and container images set those of the second line, which the
# build of Horovod reads.
_NOT_OF_USERS: Final = re.compile(
    "HOROVOD_(?:HOSTNAME|(?:LOCAL_|CROSS_)?(?:RANK|SIZE)|GLOO_RENDEZVOUS_(?:ADDR|PORT)|CONTROLLER|CPU_OPERATIONS"
    "|GLOO_IFACE|ELASTIC(?:_TIMEOUT)?|START_TIMEOUT|SPARK_.*"
    "|WITH_.*|WITHOUT_.*|BUILD_.*|GPU_.*|.*_(?:HOME|INCLUDE|LIB|LINK|SHOW))"
)
_warned_of: set[str] = set()  # in this process


@dataclass(frozen=True)
class Settings:
    """The values of the HOROVOD_* variables. The defaults are Horovod's."""

    fusion_threshold_bytes: int = 128 * 2**20  # tensors are reduced together up to this size. 0: never together
    cycle_seconds: float = 0.001  # how long a tensor may wait for others to be reduced with
    timeline: str | None = None  # path of the file, or DYNAMIC_TIMELINE if start_timeline() will give one
    mark_cycles: bool = False  # in the timeline
    stall_check: bool = True  # warn of ranks that keep others waiting
    stall_warning_seconds: float = 60.0
    stall_shutdown_seconds: float = 0.0  # how long a rank waits before it gives up, warned or not. 0 for never
    dynamic_process_sets: bool = False  # may be added and removed after init()
    log_level: int | None = None  # of the logger "torchring"
    # How long ranks may take to meet, and a peer to move bytes of a collective that all have called. Not how long a
    # rank waits for another one to call a collective: Horovod gives up on that after stall_shutdown_seconds only.
    timeout_seconds: float | None = None


def read_settings(environ: Mapping[str, str]) -> Settings:
    """The settings in `environ`. An empty value counts as unset.

    Warns once in a process of each HOROVOD_* variable that means nothing to torchring. Raises ValueError that names the
    variable, its value, and what would be right.
    """
    said = {key: value.strip() for key, value in environ.items() if key.startswith("HOROVOD_") and value.strip()}
    read = {}
    for key, (field, expected, convert) in _VARIABLES.items():
        if (value := said.pop(key, None)) is not None:
            try:
                read[field] = convert(value)
            except (ValueError, KeyError):
                raise ValueError(f"{key} needs {expected}, got {value!r}") from None
    # What is left has no meaning here. The value 0 switches off what is not there.
    ignored = [key for key in sorted(said.keys() - _warned_of) if not _NOT_OF_USERS.fullmatch(key) and said[key] != "0"]
    if ignored:
        _warned_of.update(ignored)
        mean, are = ("mean", "are") if len(ignored) > 1 else ("means", "is")
        text = f"{', '.join(ignored)} {mean} nothing to torchring and {are} ignored"
        warnings.warn(text, stacklevel=3)  # whoever calls init()
    return Settings(**read)


def _timeline(value: str) -> str:
    return DYNAMIC_TIMELINE if value.upper() == DYNAMIC_TIMELINE else value


def _switch(value: str) -> bool:
    """1 and 0, as Horovod has them, or the words that people write instead."""
    word = value.lower()
    return word in ("true", "yes", "on") or (word not in ("false", "no", "off") and int(value) > 0)


def _number(value: str) -> float:
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError
    return number


def _positive(value: str) -> float:
    if not (number := _number(value)):
        raise ValueError
    return number


# variable -> its setting, what is right for errors, and how to read it
_VARIABLES: Final[dict[str, tuple[str, str, Callable[[str], Any]]]] = {
    "HOROVOD_FUSION_THRESHOLD": ("fusion_threshold_bytes", "a number of bytes, 0 or more", lambda v: int(_number(v))),
    "HOROVOD_CYCLE_TIME": ("cycle_seconds", "a number, 0 or more", lambda value: _number(value) / 1000),
    "HOROVOD_TIMELINE": ("timeline", "a path", _timeline),
    "HOROVOD_TIMELINE_MARK_CYCLES": ("mark_cycles", "1 or 0", _switch),
    "HOROVOD_STALL_CHECK_DISABLE": ("stall_check", "1 or 0", lambda value: not _switch(value)),
    "HOROVOD_STALL_CHECK_TIME_SECONDS": ("stall_warning_seconds", "a number, 0 or more", _number),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": ("stall_shutdown_seconds", "a number, 0 or more", _number),
    "HOROVOD_DYNAMIC_PROCESS_SETS": ("dynamic_process_sets", "1 or 0", _switch),
    "HOROVOD_LOG_LEVEL": ("log_level", f"one of {', '.join(_LEVELS)}", lambda value: _LEVELS[value.upper()]),
    "HOROVOD_GLOO_TIMEOUT_SECONDS": ("timeout_seconds", "a positive number of seconds", _positive),
}
