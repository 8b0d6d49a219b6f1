"""What each rank of `torchring bench scaling` does: run the user's script, and end it after some steps.

The script runs as under `python script.py`: nothing is imported before it but this module, so that it may still set
variables that torch reads. What is to be patched is patched when the script imports it.
"""

from __future__ import annotations

import atexit
import builtins
import importlib.util
import io
import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final

from torchring.rendezvous.environment import TRACE

STRETCH_STEPS: Final = 10  # a GPU is waited for after each stretch, so that the time of a stretch is right
COMPLAINT: Final = "torchring bench scaling: this rank"  # how lines begin that a rank prints
_PATIENCE_SECONDS: Final = 60.0  # for the other ranks to make as many steps
# Not `-m`, which puts the working directory first in sys.path.
_BOOT: Final = (
    "import sys; sys.path = [path for path in sys.path if path]; "
    "from torchring.bench.scaling_worker import main; main(sys.argv[1:])"
)


@dataclass(frozen=True)
class Settings:
    """How to run the script.

    Attributes:
        num_warm_up: steps that do not count.
        num_steps: steps after these; then the script is ended.
        repeats_batches: each DataLoader gives its first batch again and again.
        is_silent: ranks exchange no gradients.
    """

    num_warm_up: int
    num_steps: int
    repeats_batches: bool = False
    is_silent: bool = False

    @property
    def num_steps_in_all(self) -> int:
        return self.num_warm_up + self.num_steps


@dataclass(frozen=True)
class Ending:
    """What a rank says about its run, in `rank-N.json` beside the trace.

    Attributes:
        was_ended: whether the script was ended; otherwise it has ended by itself.
        num_loaders: how many DataLoaders have repeated their first batch.
    """

    was_ended: bool
    num_loaders: int = 0


def command(settings: Settings, script: str, arguments: Sequence[str]) -> list[str]:
    """The arguments of `python` for a rank."""
    return ["-c", _BOOT, json.dumps(asdict(settings)), script, *arguments]


def ending_path(folder: Path, rank: int) -> Path:
    """Where a rank writes its `Ending`."""
    return folder / f"rank-{rank:05d}.json"


def main(arguments: Sequence[str]) -> None:
    """Run the script: JSON of `Settings`, the script, its arguments."""
    settings, script = Settings(**json.loads(arguments[0])), arguments[1]
    run = Run(settings)
    run.install()
    sys.argv = [script, *arguments[2:]]
    sys.excepthook = _without_own_frames(sys.excepthook)
    try:
        run_as_main(script)
    except SystemExit as end:
        if end.code in (None, 0):
            run.has_ended()
        raise
    run.has_ended()


class Run:
    """Counts the steps of this rank, and ends the process after the last one.

    Args:
        settings: see `Settings`.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loaders: Any = None
        self._began_at = time.monotonic()

    def install(self) -> None:
        """Patch what the script will import."""
        patches = {"torchring.observe.recorder.recorder": self._count_steps}
        if self._settings.repeats_batches:
            patches["torch"] = self._repeat_batches
        if self._settings.is_silent:
            patches["torchring.optimizer"] = _silence
        sys.meta_path.insert(0, PatchingFinder(patches))

    def has_ended(self) -> None:
        """The script has ended by itself, and without an error."""
        if "torchring.default_world" in sys.modules:
            self._meet()
            self._note(was_ended=False)

    def _repeat_batches(self) -> None:
        from torchring.bench.repeated_batch import FirstBatches

        self._loaders = FirstBatches(self._settings.num_steps_in_all)
        self._loaders.install()

    def _count_steps(self) -> None:
        from torchring.observe.recorder.recorder import Recorder

        end_step = Recorder.end_step
        num_warm_up, last = self._settings.num_warm_up, self._settings.num_steps_in_all

        def counting(recorder: Recorder) -> None:
            number = recorder.num_steps + 1
            if number == last or (number - num_warm_up) % STRETCH_STEPS == 0:
                _wait_for_gpu()
            end_step(recorder)
            if number >= last and recorder.about is not None:
                self._end()

        Recorder.end_step = counting  # type: ignore[method-assign,assignment]

    def _end(self) -> None:
        """End this process as if the script had ended, but for `finally` and `with` in the script."""
        try:
            self._meet()
            self._note(was_ended=True)
            atexit._run_exitfuncs()  # among them: writes the trace, ends workers of DataLoaders
            _finalize_mpi()
        except BaseException as error:
            number = self._settings.num_steps_in_all
            print(f"{COMPLAINT} could not end after step {number}: {type(error).__name__}: {error}", file=sys.stderr)
            _leave(1)
        _leave(0)

    def _meet(self) -> None:
        """Wait until all ranks have come this far: none may miss another one in its last step."""
        from torchring import default_world as worlds
        from torchring.errors import RingError

        if worlds.is_initialized() and (rendezvous := worlds.default_world().rendezvous) is not None:
            seconds = _PATIENCE_SECONDS + time.monotonic() - self._began_at
            try:
                rendezvous.with_timeout(seconds).all_gather("bench/scaling", b"")
            except RingError as error:
                raise RuntimeError(
                    f"other ranks do not come as far; the script has to give all ranks equally many batches ({error})"
                ) from error

    def _note(self, *, was_ended: bool) -> None:
        from torchring.default_world import rank

        ending = Ending(was_ended, 0 if self._loaders is None else self._loaders.num_loaders)
        folder = Path(os.environ[TRACE])
        folder.mkdir(parents=True, exist_ok=True)
        ending_path(folder, rank()).write_text(json.dumps(asdict(ending)))


class PatchingFinder:
    """A finder for sys.meta_path. Calls a function when a module has been imported.

    Args:
        patches: the functions, by the name of the module. Called at once for a module that is there already.
    """

    def __init__(self, patches: dict[str, Callable[[], None]]) -> None:
        self._patches = dict(patches)
        for name in [name for name in patches if name in sys.modules]:
            self._patches.pop(name)()

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """What the other finders find for a module that is to be patched."""
        patch = self._patches.pop(name, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_patch(module: ModuleType) -> None:
                execute(module)
                patch()

            vars(spec.loader)["exec_module"] = execute_and_patch
        return spec


def run_as_main(script: str) -> None:
    """Run a script, or a folder with a __main__.py, as `python script` does. Raises what the script raises."""
    path = os.path.abspath(script)
    if os.path.isdir(path):
        runpy.run_path(path, run_name="__main__")
        return
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    main_module = ModuleType("__main__")
    scope = vars(main_module)
    scope |= {"__file__": path, "__builtins__": builtins, "__loader__": SourceFileLoader("__main__", path)}
    sys.modules["__main__"] = main_module
    with io.open_code(path) as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), scope)


_Hook = Callable[[type[BaseException], BaseException, "TracebackType | None"], object]


def _without_own_frames(show: _Hook) -> _Hook:
    """Shows an exception as `show` does, without the calls of this module that lead to the script."""

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> object:
        while traceback is not None and traceback.tb_frame.f_code.co_filename in ("<string>", __file__):
            traceback = traceback.tb_next
        return show(kind, error.with_traceback(traceback), traceback)

    return hook


def _silence() -> None:
    from torchring.bench.silent_mover import silence

    silence()


def _wait_for_gpu() -> None:
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def _finalize_mpi() -> None:
    """mpirun takes a rank that ends otherwise for one that has failed."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
