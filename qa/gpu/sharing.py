"""Jobs of two ranks that share the GPU, whose rank 0 has figures. See `qa.gpu.check`."""

import faulthandler
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping

import torchring
from qa.gpu.check import Figure
from torchring.bench import measure
from torchring.devices.symmetric_memory import OVERLAPPING_DEVICES


def figures_of(module: str, case: str) -> Iterator[Figure]:
    """Two ranks run this module, which calls `say`. Gives what rank 0 says, and a figure that fails if a rank does."""
    command = [sys.executable, "-m", "torchring", "run", "-np", "2"]
    with tempfile.NamedTemporaryFile() as file:
        launcher = measure.Launcher(command, {OVERLAPPING_DEVICES: "1"})
        code = measure.run_together(measure.rank_commands("-m", 2, [module, case, file.name], launcher))
        yield from (Figure(*json.loads(line)) for line in file)
    if code:
        yield Figure(f"exit code of {case}", code, "", 0)


def say(cases: Mapping[str, Callable[[], Iterator[Figure]]], *, seconds: float) -> None:
    """On a rank: run the case that the command line names. A rank that takes longer than `seconds` is ended."""
    case, file = sys.argv[1:]
    faulthandler.dump_traceback_later(seconds, exit=True)
    torchring.init(timeout_seconds=seconds, process_group=True)
    for figure in cases[case]():
        if torchring.rank() == 0:
            with open(file, "a") as out:
                print(json.dumps(figure), file=out)
