"""Whole lines from many processes. Ranks here are descriptors that the test writes to."""

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import wait_until
from torchring.launch.output import STDERR, STDOUT, Output, OutputOptions


class Shown:
    """What is shown, in place of this process's own stdout and stderr."""

    def __init__(self, folder: Path) -> None:
        self.files = {STDOUT: folder / "stdout", STDERR: folder / "stderr"}
        self.descriptors = {s: os.open(file, os.O_WRONLY | os.O_CREAT) for s, file in self.files.items()}

    def output(self, **options: Any) -> Output:
        return Output(OutputOptions(**options), out=self.descriptors[STDOUT], err=self.descriptors[STDERR])

    def started(self, num_ranks: int = 2, **options: Any) -> tuple[Output, list[int]]:
        output = self.output(**options)
        ends = [output.pipe(STDOUT, rank) for rank in range(num_ranks)]
        output.start()
        return output, ends

    def text(self, stream: int = STDOUT) -> bytes:
        return self.files[stream].read_bytes()


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Shown]:
    shown = Shown(tmp_path)
    yield shown
    for descriptor in shown.descriptors.values():
        os.close(descriptor)


def write(descriptor: int, *pieces: bytes) -> None:
    for piece in pieces:
        os.write(descriptor, piece)


def test_lines_come_whole_in_whatever_pieces_they_were_printed(shown: Shown) -> None:
    """Also those that are no text, and the last one, which lacks its end."""
    output, (zero, one) = shown.started()
    for i in range(200):
        for piece in (b"line", b" ", b"%d" % i, b" \xff", b"\n"):
            write(zero, piece)
            write(one, b"x" * 30, piece)
    write(one, b"end")
    output.close()
    *lines, last = shown.text().split(b"\n")
    assert (len(lines), last) == (400, b"end")
    expected = [b"line %d \xff" % i for i in range(200)]
    assert [line for line in lines if line.startswith(b"line")] == expected
    assert [line.replace(b"x", b"") for line in lines if line.startswith(b"x")] == expected


def test_an_unfinished_line_is_shown_after_a_moment_and_goes_on_after_others(shown: Shown) -> None:
    output, (zero, one) = shown.started(tag=True)
    write(zero, b"your name? ")
    wait_until(lambda: shown.text() == b"[0] your name? ", "the question")
    write(zero, b"and yours?\n")
    wait_until(lambda: shown.text().endswith(b"yours?\n"), "the rest")
    write(zero, b"dots ..")
    wait_until(lambda: shown.text().endswith(b"dots .."), "the dots")
    write(one, b"a\n\nb\n")
    wait_until(lambda: shown.text().endswith(b"b\n"), "the other's lines")
    write(zero, b"..\n")
    output.close()
    assert shown.text() == b"[0] your name? and yours?\n[0] dots ..\n[1] a\n[1] \n[1] b\n[0] ..\n"


@pytest.mark.parametrize("is_quiet", [False, True])
def test_log_files(is_quiet: bool, shown: Shown, tmp_path: Path) -> None:
    logs = tmp_path / "deep" / "logs"
    output = shown.output(log_dir=str(logs), is_quiet=is_quiet)
    (logs / "rank0.log").write_text("of the last run, which was longer than this one\n")
    out, err, own = output.pipe(STDOUT, 0), output.pipe(STDERR, 0), output.pipe(STDERR)
    output.start()
    write(out, b"a\n")
    wait_until(lambda: (logs / "rank0.log").read_bytes() == b"a\n", "the file")
    write(err, b"b\xff")
    write(own, b"the launcher's\n")
    output.close()
    assert [file.name for file in logs.iterdir()] == ["rank0.log"]
    assert (logs / "rank0.log").read_bytes() == b"a\nb\xff"
    assert shown.text() == (b"" if is_quiet else b"a\n")
    assert sorted(shown.text(STDERR).split(b"\n")) == [b"" if is_quiet else b"b\xff", b"the launcher's"]


def test_pipes_that_have_ended_are_forgotten(shown: Shown, tmp_path: Path) -> None:
    """Thousands of workers may come and go."""
    output = shown.output(log_dir=str(tmp_path), is_quiet=True)
    output.start()
    before = len(os.listdir("/proc/self/fd"))
    for rank in range(20):
        for end in [output.pipe(stream, rank) for stream in (STDOUT, STDERR)]:
            write(end, b"line\n")
            os.close(end)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) == before, "the pipes to be closed")
    output.close()
    assert all((tmp_path / f"rank{rank}.log").read_text() == "line\n" * 2 for rank in range(20))


def test_a_log_that_cannot_be_written_is_no_reason_to_stop(shown: Shown, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    os.mkfifo(tmp_path / "logs" / "rank0.log")  # of somebody who was here first
    output, (zero,) = shown.started(1, log_dir=str(tmp_path / "logs"))
    write(zero, b"a\n")
    wait_until(lambda: shown.text() == b"a\n", "the line")
    write(zero, b"b\n")
    output.close()
    assert shown.text() == b"a\nb\n"
    file = bytes(tmp_path / "logs/rank0.log")
    assert shown.text(STDERR).startswith(b"torchring run: cannot write %s: it is a link, a pipe," % file)
    assert shown.text(STDERR).count(b"\n") == 1


def test_ranks_learn_that_nobody_reads_any_more(shown: Shown) -> None:
    """As `torchring run ... | head -1` has it. Other streams, and log files, go on."""
    reading, writing = os.pipe()
    os.dup2(writing, shown.descriptors[STDOUT])
    os.close(writing)
    output = shown.output()
    out, err = output.pipe(STDOUT, 0), output.pipe(STDERR, 0)
    output.start()
    write(out, b"a\n")
    assert os.read(reading, 10) == b"a\n"
    os.close(reading)
    write(out, b"b\n")

    def is_broken() -> bool:
        try:
            write(out, b"c\n")
        except BrokenPipeError:
            return True
        return False

    wait_until(is_broken, "an error")
    write(err, b"d\n")
    output.close()
    assert shown.text(STDERR) == b"d\n"


def test_the_end_waits_for_nobody_who_holds_a_pipe(shown: Shown) -> None:
    """A child of a rank's may print for ever."""
    output, (zero,) = shown.started(1)
    child = subprocess.Popen([sys.executable, "-c", "while True: print('x' * 100)"], stdout=zero)
    try:
        wait_until(lambda: len(shown.text()) > 1000, "the child")
        output.close()
    finally:
        child.kill()
        child.wait()


def test_a_terminal_is_one_for_ranks_too(shown: Shown) -> None:
    """Unless there are tags or log files: they take plain lines."""
    ours, theirs = os.openpty()
    os.dup2(theirs, shown.descriptors[STDOUT])
    os.close(theirs)
    for tag in (False, True):
        output, (zero,) = shown.started(1, tag=tag)
        assert os.isatty(zero) is not tag
        write(zero, b"colour", b"ful\n")
        wait_until(lambda: bool(select.select([ours], [], [], 0)[0]), "the line")
        assert os.read(ours, 100) == (b"[0] " if tag else b"") + b"colourful\r\n", "its end is made by our terminal"
        output.close()
    os.close(ours)
