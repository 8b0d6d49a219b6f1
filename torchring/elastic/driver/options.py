"""The options of `torchring run --elastic`, among them those of horovodrun's elastic mode."""

import argparse
from collections.abc import Sequence
from typing import Any, Final

from torchring.elastic.driver.host_list import Hosts, from_file, from_script
from torchring.elastic.driver.workers import UNLIMITED, Limits
from torchring.launch import arguments
from torchring.launch.arguments import duration, positive
from torchring.launch.hosts import Host, LaunchError, is_here, share_out

# Options that imply --elastic, as they do for horovodrun, and those that mean nothing without it.
_IMPLYING: Final = ("min_np", "max_np", "discover")
_OTHERS: Final = ("elastic_timeout", "heartbeat_timeout", "stall_timeout", "slots", "blacklist_cooldown_range")


def add_options(
    parser: argparse.ArgumentParser, where: argparse._MutuallyExclusiveGroup, arguments: Sequence[str]
) -> None:
    """Add the options of elastic jobs, which the help shows if --elastic is among the arguments.

    `where` has the options that name hosts.
    """
    more = "go on when workers are lost, and take new ones in; `--elastic --help` shows more"
    parser.add_argument("--elastic", action="store_true", help=more)
    script = "an executable that prints `host:slots` lines, asked every second; implies --elastic"
    hidden: list[argparse.Action] = [where.add_argument("--discover", metavar="SCRIPT", help=script)]
    group = parser.add_argument_group("elastic jobs")

    def add(name: str, text: str, metavar: Any = "SECONDS", **how: Any) -> None:
        how |= {"metavar": metavar, "type": positive if metavar == "N" else duration}
        hidden.append(group.add_argument(name, help=text, **how))

    add("--min-np", "wait for workers if there are fewer (default: 1); implies --elastic", "N")
    add("--max-np", "start no more workers (default: -np; without it, all slots); implies --elastic", "N")
    short, silent = Limits.elastic_timeout, Limits.heartbeat_timeout
    add("--elastic-timeout", f"end a job that has fewer than --min-np workers for so long (default: {short:g})")
    add("--heartbeat-timeout", f"kill a worker that gives no sign of life for so long (default: {silent:g})")
    add("--stall-timeout", "kill a worker without progress for which others have waited for so long (default: never)")
    add("--slots", "of hosts for which the discovery script prints no number (default: 1)", "N")
    cooldown = "leave out a slot whose workers fail again and again; the time doubles (default: {:g} {:g} seconds)"
    add("--blacklist-cooldown-range", cooldown.format(*Limits.cooldown), ("MIN", "MAX"), nargs=2)
    for action in hidden if "--elastic" not in arguments else ():
        action.help = argparse.SUPPRESS


def is_elastic(options: argparse.Namespace) -> bool:
    """Return True if the job is elastic. Raises LaunchError for options that mean nothing in other jobs."""
    if options.elastic or any(getattr(options, name) is not None for name in _IMPLYING):
        return True
    if given := [f"--{name.replace('_', '-')}" for name in _OTHERS if getattr(options, name) is not None]:
        raise LaunchError(f"{', '.join(given)}: of a meaning with --elastic only")
    return False


def limits_of(options: argparse.Namespace) -> Limits:
    """The limits that the options set. Raises LaunchError for options that contradict each other."""
    num, least, most = options.num_proc, options.min_np or 1, options.max_np
    num_given = num is not None
    if most is not None and least > most:
        raise LaunchError(f"--min-np {least} is more than --max-np {most}")
    if num_given and num < least:
        raise LaunchError(f"-np {num} is less than --min-np {least}")
    if num_given and most is not None and num > most:
        raise LaunchError(f"-np {num} is more than --max-np {most}")
    shortest, longest = options.blacklist_cooldown_range or Limits.cooldown
    if shortest > longest:
        raise LaunchError(f"--blacklist-cooldown-range takes the shorter time first, got {shortest:g} {longest:g}")
    if options.bind not in (None, "none"):
        raise LaunchError("--bind is not for elastic jobs, whose processes change; bind them in the script")
    if options.slots is not None and options.discover is None:
        raise LaunchError("--slots is for hosts that a discovery script prints: --discover SCRIPT")
    has_hosts = any((options.hosts, options.hostfile, options.discover, options.launcher == "srun"))
    if not has_hosts and not num_given and most is None:
        raise LaunchError("say how many workers: -np N, or --max-np N, or -H, --hostfile or --discover for hosts")
    if most is None:
        most = num if num_given else UNLIMITED
    return Limits(
        size=num if num_given else (most if not has_hosts else UNLIMITED),
        min_size=least,
        max_size=most,
        elastic_timeout=options.elastic_timeout or Limits.elastic_timeout,
        heartbeat_timeout=options.heartbeat_timeout or Limits.heartbeat_timeout,
        stall_timeout=options.stall_timeout,
        cooldown=(shortest, longest),
    )


def hosts_of(options: argparse.Namespace, limits: Limits) -> Hosts:
    """The hosts that the options name; without such options, this host. Raises LaunchError."""
    if options.hostfile is not None:
        hosts = from_file(options.hostfile)
    elif options.discover is not None:
        hosts = from_script(options.discover, options.slots or 1)
    else:
        hosts = Hosts(None, arguments.hosts_of(options) or [Host("localhost", limits.max_size)])
    if hosts.known is not None and not hosts.may_change:
        share_out(hosts.known, limits.min_size if options.num_proc is None else limits.size)
    if options.launcher == "local":
        remote = [host.name for host in hosts.known or () if not is_here(host.name)]
        if remote or hosts.may_change:
            raise LaunchError(f"launcher 'local' starts nothing on {', '.join(remote) or 'other hosts'}; use 'ssh'")
    return hosts
