"""The settings of Horovod's API: environment variables HOROVOD_*, read by `init()`, as Horovod reads them.

    HOROVOD_FUSION_THRESHOLD                bytes that are reduced at once; 0: each tensor by itself
    HOROVOD_CYCLE_TIME                      milliseconds for which a tensor may wait for others to be fused with
    HOROVOD_TIMELINE                        a file, or DYNAMIC: start_timeline() says which
    HOROVOD_TIMELINE_MARK_CYCLES            1: cycles in the timeline, too
    HOROVOD_STALL_CHECK_DISABLE             1: no warnings of ranks that others wait for
    HOROVOD_STALL_CHECK_TIME_SECONDS        before a warning
    HOROVOD_STALL_SHUTDOWN_TIME_SECONDS     before waiting ranks give up; 0: never
    HOROVOD_DYNAMIC_PROCESS_SETS            1: add_process_set() and remove_process_set() are allowed
    HOROVOD_GLOO_TIMEOUT_SECONDS            for ranks to meet in init(), and for bytes under way
    HOROVOD_LOG_LEVEL                       TRACE, DEBUG, INFO, WARNING, ERROR or FATAL, of the logger "torchring"

The variables in which a launcher says rank, size and where to meet are read elsewhere (rendezvous/environment.py). A
warning names all other HOROVOD_* variables: they mean nothing to torchring.
"""

from __future__ import annotations

import logging
import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

DYNAMIC_TIMELINE: Final = "DYNAMIC"
_LEVELS: Final = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}
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
    """The values of the HOROVOD_* variables. The defaults are Horovod's.

    Attributes:
        fusion_threshold_bytes: tensors are reduced together until they have this many bytes. 0: never together.
        cycle_seconds: how long a tensor may wait for others to be reduced with.
        timeline: path of the timeline's file, DYNAMIC_TIMELINE if start_timeline() will give one, or None.
        mark_cycles: show negotiation cycles in the timeline.
        stall_check: warn of ranks that keep others waiting.
        stall_warning_seconds: how long a rank waits before it warns. 0 for never.
        stall_shutdown_seconds: how long a rank waits before it gives up. 0 for never. Horovod ignores a time shorter
            than the warning's; torchring gives up at that time, warned or not.
        dynamic_process_sets: process sets may be added and removed after init().
        log_level: level of the logger "torchring", as in `logging`. None leaves the logger as it is.
        timeout_seconds: how long ranks may take to meet in init(), and a peer to move bytes of a collective that all
            ranks have called. None for torchring's default. Not how long a rank waits for another one to call a
            collective: Horovod never gives up on that, unless stall_shutdown_seconds says so.
    """

    fusion_threshold_bytes: int = 128 * 2**20
    cycle_seconds: float = 0.001
    timeline: str | None = None
    mark_cycles: bool = False
    stall_check: bool = True
    stall_warning_seconds: float = 60.0
    stall_shutdown_seconds: float = 0.0
    dynamic_process_sets: bool = False
    log_level: int | None = None
    timeout_seconds: float | None = None


def read_settings(environ: Mapping[str, str]) -> Settings:
    """The settings in `environ`. An empty value counts as unset.

    Warns once in a process of each HOROVOD_* variable that means nothing to torchring. Raises ValueError that names the
    variable, its value, and what would be right.
    """
    said = {key: value.strip() for key, value in environ.items() if key.startswith("HOROVOD_") and value.strip()}
    timeline = said.pop("HOROVOD_TIMELINE", None)
    if timeline is not None and timeline.upper() == DYNAMIC_TIMELINE:
        timeline = DYNAMIC_TIMELINE
    default = Settings()
    cycle_ms = _number(said, "HOROVOD_CYCLE_TIME", default.cycle_seconds * 1000)
    timeout = _number(said, "HOROVOD_GLOO_TIMEOUT_SECONDS", math.nan)
    if timeout == 0:
        raise ValueError("HOROVOD_GLOO_TIMEOUT_SECONDS needs a positive number of seconds, got '0'")
    settings = Settings(
        fusion_threshold_bytes=_integer(said, "HOROVOD_FUSION_THRESHOLD", default.fusion_threshold_bytes),
        cycle_seconds=cycle_ms / 1000,
        timeline=timeline,
        mark_cycles=_switch(said, "HOROVOD_TIMELINE_MARK_CYCLES"),
        stall_check=not _switch(said, "HOROVOD_STALL_CHECK_DISABLE"),
        stall_warning_seconds=_number(said, "HOROVOD_STALL_CHECK_TIME_SECONDS", default.stall_warning_seconds),
        stall_shutdown_seconds=_number(said, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", default.stall_shutdown_seconds),
        dynamic_process_sets=_switch(said, "HOROVOD_DYNAMIC_PROCESS_SETS"),
        log_level=_level(said, "HOROVOD_LOG_LEVEL"),
        timeout_seconds=None if math.isnan(timeout) else timeout,
    )
    _warn_of_ignored(said)
    return settings


def apply_log_level(settings: Settings) -> None:
    """Set the level of the logger "torchring", if HOROVOD_LOG_LEVEL was given."""
    if settings.log_level is not None:
        logging.getLogger("torchring").setLevel(settings.log_level)


def _warn_of_ignored(said: Mapping[str, str]) -> None:
    """Warn of variables that nothing has read. The value 0 switches off what is not there."""
    ignored = [
        key
        for key, value in sorted(said.items())
        if key not in _warned_of and not _NOT_OF_USERS.fullmatch(key) and value != "0"
    ]
    if not ignored:
        return
    _warned_of.update(ignored)
    plural = len(ignored) > 1
    warnings.warn(
        f"{', '.join(ignored)} {'mean' if plural else 'means'} nothing to torchring and "
        f"{'are' if plural else 'is'} ignored",
        stacklevel=4,  # whoever calls init()
    )


# Each of the following takes the variable out of `said`.


def _switch(said: dict[str, str], key: str) -> bool:
    """1 and 0, as Horovod has them, or the words that people write instead."""
    value = said.pop(key, "0")
    if value.lower() in ("true", "yes", "on"):
        return True
    if value.lower() in ("false", "no", "off"):
        return False
    try:
        return int(value) > 0
    except ValueError:
        raise ValueError(f"{key} needs 1 or 0, got {value!r}") from None


def _integer(said: dict[str, str], key: str, default: int) -> int:
    value = said.pop(key, str(default))
    if not re.fullmatch("[0-9]+", value):
        raise ValueError(f"{key} needs a whole number, 0 or more, got {value!r}")
    return int(value)


def _number(said: dict[str, str], key: str, default: float) -> float:
    value = said.pop(key, None)
    if value is None:
        return default
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"{key} needs a number, 0 or more, got {value!r}")
    return number


def _level(said: dict[str, str], key: str) -> int | None:
    value = said.pop(key, None)
    if value is None:
        return None
    if value.upper() not in _LEVELS:
        raise ValueError(f"{key} needs one of {', '.join(_LEVELS)}, got {value!r}")
    return _LEVELS[value.upper()]
