"""The `torchring` command. `torchring run` starts a script on several processes of this machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="torchring", description="Data-parallel training for PyTorch.")
    parser.add_argument("--version", action="version", version=f"torchring {importlib.metadata.version('torchring')}")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="start a script on N processes of this machine",
        description="Start a script on N processes of this machine, through torch.distributed.run.",
    )
    run.add_argument("-np", "--num-proc", type=_positive, required=True, metavar="N", help="number of processes")
    run.add_argument("script", help="the Python script")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="handed to the script")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(arguments)
    # argparse drops a leading "--" from what belongs to the script.
    if arguments[-len(options.arguments) - 1] == "--":
        options.arguments.insert(0, "--")
    return _run(options.num_proc, options.script, options.arguments)


def _run(num_proc: int, script: str, arguments: Sequence[str]) -> int:
    """Returns the exit code of the first process that failed: as the shell has it, 128 + n for signal n."""
    if not os.path.isfile(script):
        print(f"torchring run: there is no script {script!r}", file=sys.stderr)
        return 2
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # torchrun would set 1, and warn. The cores are shared out evenly instead.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_proc)))
    options = torchrun.parse_args(  # type: ignore[no-untyped-call]
        ["--standalone", f"--nproc-per-node={num_proc}", "--", script, *arguments]
    )
    try:
        torchrun.run(options)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        print(
            f"torchring run: rank {rank} (pid {failure.pid}) ended first, {_ending(code)}",
            file=sys.stderr,
        )
        return code if code >= 0 else 128 - code
    except SignalException as error:
        return 128 + int(error.sigval)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _ending(code: int) -> str:
    return f"with exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"needs a number of processes, 1 or more, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
