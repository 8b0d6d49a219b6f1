"""The command lines of the benchmarks. Nothing here imports torch: `torchring bench NAME --help` answers at once."""

import argparse
import ast
import os
import re
from pathlib import Path
from typing import Any, Final

from torchring.bench import netns
from torchring.launch.arguments import Parser, duration, whole

_HERE: Final = Path(__file__).parent
_MODELS: Final = ("mlp", "gpt", "small", "vgg", "resnet")
_SIZES: Final = [1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 25 << 20, 64 << 20, 256 << 20]
_OVER_MPI: Final = ["open mpi", "horovod"]
_FEWER_BYTES: Final = [f"torchring {name}" for name in ("bf16", "int8", "powersgd")] + ["ddp fp16", "ddp powersgd"]
_OF_SHARDING: Final = ("shard", "torchring", "ddp", "zero", "fsdp2", "alone")
_OF_STEP: Final = ("torchring", "no group", "torchring.horovod", "ddp", "alone", "horovod")
_SEVERAL: Final = whole("a number of ranks, 2 or more", 2)
_POSITIVE: Final = whole("a whole number, 1 or more", 1)


def _layout(text: str) -> tuple[int, int]:
    """ "2x1" -> (2, 1)."""
    hosts, times, ranks = text.partition("x")
    if not (times and hosts.isdecimal() and ranks.isdecimal() and int(hosts) >= 2 and int(ranks) >= 1):
        raise argparse.ArgumentTypeError(f"a layout is HOSTSxRANKS with 2 hosts or more, such as 2x1, got {text!r}")
    return int(hosts), int(ranks)


def writable(text: str) -> str:
    """Parse the name of a file for results. Refuses a file that cannot be written before minutes of measurements."""
    file = Path(text)
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {text!r}")
    return text


def _option(name: str, **how: Any) -> tuple[str, dict[str, Any]]:
    return name, how


# Of benchmarks that append rows to a file, and that start themselves as ranks.
_ROWS: Final = [
    _option("--json", type=writable, metavar="FILE", help="append the rows to this file, as JSON lines"),
    _option("--worker", help=argparse.SUPPRESS),
]
OPTIONS: Final = {
    "allreduce": [
        *_ROWS,
        _option("--ranks", type=_SEVERAL, nargs="+", default=[2, 4], help="one table for each number"),
        _option("--sizes", type=_POSITIVE, nargs="+", default=_SIZES, help="sizes in bytes"),
        _option("--seconds", type=duration, default=4.0, help="time for each size"),
        _option("--most", type=_POSITIVE, default=300, help="largest number of repetitions"),
        _option("--rivals", nargs="*", choices=_OVER_MPI, default=_OVER_MPI, help="beside torchring and Gloo"),
    ],
    "elastic": [
        *_ROWS,
        _option("--model", choices=_MODELS, default="gpt"),
        _option("--kills", type=_POSITIVE, default=30, help="number of SIGKILLs"),
        _option("--polite", type=_POSITIVE, default=6, help="number of SIGTERMs"),
        _option("--turns", type=_POSITIVE, default=3, help="jobs, one after the other"),
        _option("--seconds", type=duration, default=20.0, help="undisturbed training at the start of a turn"),
        _option("--quick", action="store_true", help="3 kills, 1 SIGTERM, 1 turn, 10 s"),
        _option("--seed", type=int, default=0, help="of the moments at which signals are sent"),
    ],
    "figures": [
        _option("--results", type=Path, default=_HERE / "results", metavar="DIR", help="of the files of rows"),
        _option("--only-print", action="store_true"),
    ],
    "gpu": _ROWS,
    "network": [
        *_ROWS,
        _option("--rates", type=netns.rate, nargs="+", default=["1gbit", "10gbit"], help="of links, as tc writes them"),
        _option("--layouts", type=_layout, nargs="+", default=[(2, 1), (2, 2)], metavar="HOSTSxRANKS"),
        _option("--models", choices=_MODELS, nargs="+", default=["gpt"]),
        _option(
            "--rivals", choices=_FEWER_BYTES, nargs="*", default=_FEWER_BYTES, help="beside torchring, ddp and alone"
        ),
        _option("--seconds", type=duration, default=40.0, help="time for each model, rate and layout"),
        _option("--most", type=_POSITIVE, default=30, help="largest number of steps of each rival"),
    ],
    "quality": [
        *_ROWS,
        _option("--tasks", nargs="+", choices=("digits", "gpt"), default=["digits", "gpt"]),
        _option("--arms", nargs="+", default=["none", "int8", "powersgd 4", "powersgd 4 8", "diloco 10", "diloco 30"]),
        _option("--seeds", type=_POSITIVE, default=5),
    ],
    "sharding": [
        *_ROWS,
        _option("--models", nargs="+", choices=_MODELS, default=["mlp", "gpt"]),
        _option("--optimizers", nargs="+", choices=("adamw", "adamw-fused", "muon")),
        _option("--rivals", nargs="+", choices=_OF_SHARDING, default=list(_OF_SHARDING)),
        _option("--rates", nargs="+", default=["none"], help='of links; "none": one host'),
        _option("--ranks", type=_SEVERAL, default=2),
        _option("--seconds", type=duration, default=30.0, help="time for each model, optimizer and rate"),
    ],
    "step": [
        *_ROWS,
        _option("--ranks", type=_SEVERAL, nargs="+", default=[2], help="one table for each number"),
        _option("--models", nargs="+", choices=_MODELS, default=list(_MODELS)),
        _option("--rivals", nargs="+", choices=_OF_STEP, help="beside torchring and alone"),
        _option("--seconds", type=duration, default=30.0, help="time for each model"),
        _option("--group", type=_SEVERAL, help="ranks that reduce together; others cut the linear layers"),
    ],
}


def parser(name: str) -> argparse.ArgumentParser:
    """The parser of a benchmark, which `torchring bench` runs as a script. Joins the lines of each paragraph."""
    file = _HERE / f"{name}.py"
    text = ast.get_docstring(ast.parse((file if file.exists() else _HERE / name / "__main__.py").read_text()))
    parser = Parser(prog=f"torchring bench {name}", description=re.sub(r"(?m)^(\S.*)\n(?=\S)", r"\1 ", text or ""))
    for option, keywords in OPTIONS[name]:
        parser.add_argument(option, **keywords)
    return parser
