"""Mutation testing of the core: break one line, run the tests that should notice, and so on for a sample of lines.

    make mutants                                      200 lines
    make mutants NUM=50 SEED=3 JOBS=2 ONLY="ring plan"

The sample is drawn by a hash of seed, file name and line, so a change of the core leaves most of a sample as it was.
The mutations are mutmut's, and two more: leave out a statement, negate a condition. mutmut's own runner would not do:
it replaces functions by dispatchers, which ranks in other processes know nothing of, and leaves out decorated ones.

Each mutant runs in a copy of the tree. First, all these tests run once as they are.
"""

import argparse
import contextlib
import datetime
import difflib
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
import libcst.matchers as m
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper
from mutmut.mutation.mutators import mutation_operators

ROOT = Path(__file__).resolve().parents[1]

# What pytest is given for a mutant of each file: the tests that should notice it, quick ones first.
_LINES = Path(__file__).with_suffix(".txt").read_text().splitlines()
TESTS = {file: shlex.split(words) for file, _, words in (line.partition(": ") for line in _LINES)}

# Mutants that compute what the original does: file, the broken line or the line that is left out, and why.
EQUIVALENT = {
    ("signature.py", "return zlib.crc32(str(self).encode()) + 2"): "positive, and differs where signatures differ, too",
}

# Left out: what cannot matter; and stores in __init__, positional arguments, and None instead of a value, without which
# every test would crash.
SKIPPED = m.OneOf(
    *(m.Annotation(), m.Assert(), m.Decorator(), m.Import(), m.ImportFrom(), m.Arg(keyword=m.Name("strict"))),
    m.Assign(value=m.Call(func=m.Name("TypeVar")) | m.Subscript(value=m.Name("Callable"))),
)
STORE = m.Assign(targets=[m.AssignTarget(target=m.Attribute() | m.Subscript())])
EFFECT = m.Expr(value=m.Call()) | m.Raise() | m.AugAssign() | m.Del() | STORE


def _is_text(node: cst.CSTNode) -> bool:
    """Docstrings and messages."""
    is_sentence = isinstance(node, cst.SimpleString) and " " in node.value
    return is_sentence or isinstance(node, cst.ConcatenatedString | cst.FormattedString)


def _num_texts(node: cst.CSTNode) -> int:
    return 1 if _is_text(node) else sum(map(_num_texts, node.children))


class _Mutations(cst.CSTVisitor):
    """For each line: (start, stop, replacement) of what can be replaced there, as bytes of the source."""

    METADATA_DEPENDENCIES = (ByteSpanPositionProvider,)

    def __init__(self, source: bytes) -> None:
        super().__init__()
        self.by_line: dict[int, list[tuple[int, int, bytes]]] = defaultdict(list)
        self._source = source
        self._in_init = False

    def on_visit(self, node: cst.CSTNode) -> bool:
        if _is_text(node) or m.matches(node, SKIPPED):
            return False
        if isinstance(node, cst.FunctionDef):
            self._in_init = node.name.value == "__init__"
        for kind, operator in mutation_operators:
            for mutated in operator(node) if isinstance(node, kind) else ():
                if not self._is_left_out(node, mutated) and _num_texts(node) == _num_texts(mutated):
                    self._add(node, mutated)
        if isinstance(node, cst.If | cst.CompIf):
            test = node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
            self._add(node.test, cst.UnaryOperation(cst.Not(), test))
        if m.matches(node, EFFECT) and not (self._in_init and m.matches(node, STORE)):
            self._add(node, cst.Pass())
        return True

    def _is_left_out(self, node: cst.CSTNode, mutated: cst.CSTNode) -> bool:
        if isinstance(node, cst.Call) and isinstance(mutated, cst.Call) and len(mutated.args) < len(node.args):
            removed = next(arg for arg in node.args if arg not in mutated.args)
            return removed.keyword is None or removed.keyword.value == "strict"  # an assertion, too
        before, after = cst.Module([]).code_for_node(node), cst.Module([]).code_for_node(mutated)
        return before.count("None") < after.count("None")

    def _add(self, node: cst.CSTNode, mutated: cst.CSTNode) -> None:
        span = self.get_metadata(ByteSpanPositionProvider, node)
        line = self._source.count(b"\n", 0, span.start) + 1
        replacement = cst.Module([]).code_for_node(mutated).encode()
        self.by_line[line].append((span.start, span.start + span.length, replacement))


@dataclass
class Mutant:
    """One broken line. `source`: the file with it."""

    file: str
    line: int
    source: str
    diff: str = ""
    reason: str = ""  # why it behaves like the original
    result: str = ""  # "caught", "timed out" or "survived"
    noticed_by: str = ""
    seconds: float = 0.0
    log: str = ""


def sample(seed: int, num: int, only: list[str]) -> list[Mutant]:
    """`num` mutants of the files in TESTS; if `only` is not empty, of those whose stem is there."""
    drawn = []
    for file in TESTS:
        if only and Path(file).stem not in only:
            continue
        source = (ROOT / file).read_bytes()
        mutations = _Mutations(source)
        MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True).visit(mutations)
        lines = source.decode().splitlines()
        seen: Counter[str] = Counter()
        for line, choices in sorted(mutations.by_line.items()):
            text = lines[line - 1].strip()
            seen[text] += 1
            key = hashlib.sha256(f"{seed} {Path(file).name} {text} {seen[text]}".encode()).hexdigest()
            drawn.append((key, file, line, source, choices))
    mutants = []
    for key, file, line, source, choices in sorted(drawn, key=lambda one: one[0])[:num]:
        start, stop, replacement = choices[int(key, 16) % len(choices)]
        broken = (source[:start] + replacement + source[stop:]).decode()
        diff = list(difflib.unified_diff(source.decode().splitlines(), broken.splitlines(), n=1, lineterm=""))[2:]
        changes = sorted(text for text in diff[1:] if text[0] in "+-")  # first what was added
        changed = next(text[1:].strip() for text in changes if not text[1:].strip().startswith("pass"))
        reason = EQUIVALENT.get((Path(file).name, changed), "")
        mutants.append(Mutant(file, line, broken, "\n".join(diff), reason))
    return sorted(mutants, key=lambda mutant: (mutant.file, mutant.line))


def _pytest(tree: Path, words: Iterable[str]) -> subprocess.Popen[bytes]:
    """Start these tests of a tree in a session of their own; their output is in the file `log`."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", *words]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {"PATH": path, "PYTHONPATH": f"{tree}/editable", "TMPDIR": str(tree.parent)}
    environ |= {"PYTHONPYCACHEPREFIX": f"{tree.parent}/bytecode", "PYTHONDONTWRITEBYTECODE": ""}  # outlives the tree
    with (tree / "log").open("wb") as log:
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        return subprocess.Popen(command, cwd=tree, env=os.environ | environ, start_new_session=True, **streams)


def _start(mutant: Mutant, tree: Path, copy: Path) -> subprocess.Popen[bytes]:
    """Start the tests of a mutant in a copy of `tree`."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(tree, copy, symlinks=True)
    (copy / mutant.file).write_text(mutant.source)
    return _pytest(copy, TESTS[mutant.file])


def _end(process: subprocess.Popen[bytes], copy: Path) -> None:
    """Kill these tests and what they have started, which has the copy as PYTHONPATH."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"PYTHONPATH={copy}/editable".encode() in environ.read_bytes():
                os.kill(int(environ.parent.name), signal.SIGKILL)
    process.wait()


def run(mutants: list[Mutant], tree: Path, copies: list[Path], limit: float = 600.0) -> Iterator[Mutant]:
    """Test mutants, as many at a time as there are copies. `limit`: seconds for each."""
    waiting, free = list(mutants), list(copies)
    running: dict[Path, tuple[subprocess.Popen[bytes], Mutant, float]] = {}
    try:
        while waiting or running:
            while waiting and free:
                mutant, copy = waiting.pop(0), free.pop()
                running[copy] = _start(mutant, tree, copy), mutant, time.monotonic()
            time.sleep(0.1)
            for copy, (process, mutant, started) in list(running.items()):
                code = process.poll()
                mutant.seconds = round(time.monotonic() - started, 1)
                if code is None and mutant.seconds < limit:
                    continue
                _end(process, copy)
                del running[copy]
                mutant.log = (copy / "log").read_text(errors="replace")
                if code in (4, 5):  # of pytest
                    raise RuntimeError(f"no test of {mutant.file} ran in {copy}:\n{mutant.log}")
                mutant.result = "timed out" if code is None else "caught" if code else "survived"
                failures = [line for line in mutant.log.splitlines() if line.startswith(("FAILED ", "ERROR "))]
                mutant.noticed_by = failures[0] if failures else f"exit code {code}"
                free.append(copy)
                yield mutant
    finally:
        for copy, (process, *_) in running.items():
            _end(process, copy)


def report(mutants: list[Mutant], about: dict[str, object], path: Path) -> None:
    """Print the survivors and a table; write everything to `path` as JSON."""
    for mutant in mutants:
        if mutant.result in ("survived", "equivalent"):
            print(f"\n{mutant.file}:{mutant.line} {mutant.reason or 'survived'}\n{mutant.diff}")
    columns = ("caught", "timed out", "survived", "equivalent")
    counts = {file: Counter(mutant.result for mutant in mutants if mutant.file == file) for file in TESTS}
    counts["all"] = sum(counts.values(), Counter())
    print(f"\n{'':40}{'mutants':>12}" + "".join(f"{column:>12}" for column in columns))
    for name, count in counts.items():
        print(f"{name:40}{count.total():12}" + "".join(f"{count[column]:12}" for column in columns))
    num_judged = counts["all"].total() - counts["all"]["equivalent"]
    print(f"{num_judged - counts['all']['survived']} of {num_judged} are noticed")
    details = [{name: value for name, value in vars(each).items() if name not in ("source", "log")} for each in mutants]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, "counts": counts, "mutants": details}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=200, help="lines to break")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="mutants that are tested at a time")
    parser.add_argument("--only", nargs="*", default=[], metavar="STEM", help="files, such as plan and ring")
    parser.add_argument("--json", type=Path, default=ROOT / "build/mutants.json")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    commit = subprocess.check_output(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True).strip()
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    mutants = sample(arguments.seed, arguments.num, arguments.only)
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        tree, copies = Path(folder, "tree"), [Path(folder, str(job)) for job in range(arguments.jobs)]
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "site"))
        names = {word: None for mutant in mutants for word in TESTS[mutant.file] if word.endswith(".py")}
        as_it_is = _pytest(tree, names)
        if as_it_is.wait():
            sys.exit(f"{(tree / 'log').read_text()}\nwithout a mutant, a test fails")
        for mutant in run([mutant for mutant in mutants if not mutant.reason], tree, copies):
            print(f"{mutant.file}:{mutant.line} {mutant.result} ({mutant.seconds} s)", flush=True)
    for mutant in mutants:
        mutant.result = mutant.result or "equivalent"
    report(mutants, {"date": date, "commit": commit, "seed": arguments.seed}, arguments.json)


if __name__ == "__main__":
    main()
