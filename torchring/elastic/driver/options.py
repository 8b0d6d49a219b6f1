"""The options of `torchring run --elastic`, among them those of horovodrun's elastic mode."""

import argparse
from typing import Any, Final

from torchring.elastic.driver import host_list as hosts_module
from torchring.elastic.driver.host_list import Hosts
from torchring.elastic.driver.workers import UNLIMITED, Limits
from torchring.launch import arguments
from torchring.launch.arguments import duration, positive
from torchring.launch.hosts import Host, LaunchError, is_here

# Options that imply --elastic, as they do for horovodrun, and those that mean nothing without it.
_IMPLYING: Final = ("min_np", "max_np", "discover")
_OTHERS: Final = ("elastic_timeout", "heartbeat_timeout", "stall_timeout", "slots", "blacklist_cooldown_range")


def add_options(parser: argparse.ArgumentParser, where: argparse._MutuallyExclusiveGroup) -> None:
    """Add the options of elastic jobs. `where` has the options that name hosts."""
    where.add_argument(
        "--discover",
        "--host-discovery-script",
        metavar="SCRIPT",
        help="an executable that prints `host:slots` lines, asked every second; implies --elastic",
    )
    group = parser.add_argument_group(
        "elastic jobs",
        "With --elastic, a job goes on when workers are lost, and takes new ones in; the script uses "
        "torchring.elastic. The job starts with -np workers. Lost workers are replaced as long as there are slots. "
        "Once the script has made its first steps, slots that are free get workers, up to --max-np. A host file is "
        "read again when it changes. A slot whose workers fail again and again is left out for a while.",
    )
    add = group.add_argument
    number: dict[str, Any] = {"type": positive, "metavar": "N"}
    seconds: dict[str, Any] = {"type": duration, "metavar": "SECONDS"}
    add("--elastic", action="store_true", help="go on when workers are lost, and take new ones in")
    least = "wait for workers if there are fewer; 1 by default; implies --elastic"
    add("--min-np", "--min-num-proc", dest="min_np", **number, help=least)
    most = "start no more workers; -np by default, without -np all slots; implies --elastic"
    add("--max-np", "--max-num-proc", dest="max_np", **number, help=most)
    short = f"end the job if there are fewer than --min-np workers for so long; {Limits.elastic_timeout:g} by default"
    add("--elastic-timeout", **seconds, help=short)
    silent = f"kill a worker that gives no sign of life for so long; {Limits.heartbeat_timeout:g} by default"
    add("--heartbeat-timeout", **seconds, help=silent)
    stuck = (
        "kill a worker for which others have waited for so long, if it has made no progress; by default the others "
        "wait for timeout_seconds of torchring.init, 300"
    )
    add("--stall-timeout", **seconds, help=stuck)
    slots = "of hosts for which the discovery script prints no number; 1 by default"
    add("--slots", "--slots-per-host", dest="slots", **number, help=slots)
    cooldown = (
        "seconds for which a slot is left out whose workers fail again and again; the time doubles from MIN to MAX; "
        "{:g} and {:g} by default".format(*Limits.cooldown)
    )
    add("--blacklist-cooldown-range", nargs=2, type=duration, metavar=("MIN", "MAX"), help=cooldown)


def is_elastic(options: argparse.Namespace) -> bool:
    """Return True if the job is elastic. Raises LaunchError for options that mean nothing in other jobs."""
    if options.elastic or any(getattr(options, name) is not None for name in _IMPLYING):
        return True
    if given := [f"--{name.replace('_', '-')}" for name in _OTHERS if getattr(options, name) is not None]:
        raise LaunchError(f"{', '.join(given)}: of a meaning with --elastic only")
    return False


def hint(options: argparse.Namespace) -> str:
    """For a job that has failed: which option has made it elastic, if --elastic has not. Else empty."""
    implying = [f"--{name.replace('_', '-')}" for name in _IMPLYING if getattr(options, name) is not None]
    if options.elastic or not implying:
        return ""
    return f"{' and '.join(implying)} made this an elastic job, whose script has to use torchring.elastic"


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
        hosts = hosts_module.from_file(options.hostfile)
    elif options.discover is not None:
        hosts = hosts_module.from_script(options.discover, options.slots or 1)
    else:
        hosts = hosts_module.fixed(arguments.hosts_of(options) or [Host("localhost", limits.max_size)])
    if hosts.known is not None and not hosts.may_change:
        slots = sum(host.slots for host in hosts.known)
        needed = limits.size if options.num_proc is not None else limits.min_size
        if needed > slots:
            flag = "-np" if options.num_proc is not None else "--min-np"
            offers = ", ".join(f"{host.name}:{host.slots}" for host in hosts.known)
            raise LaunchError(f"{flag} {needed} is more than the {slots} slots of {offers}")
    if options.launcher == "local":
        remote = [host.name for host in hosts.known or () if not is_here(host.name)]
        if remote or hosts.may_change:
            raise LaunchError(f"launcher 'local' starts nothing on {', '.join(remote) or 'other hosts'}; use 'ssh'")
    return hosts
