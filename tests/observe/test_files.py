"""What a rank writes down comes back from its file, or an error says what is wrong with the file."""

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest

from tests.support.traces import encode, simulate, with_facts, write
from torchring.observe.recorder.files import FORMAT, TraceError, find, path_of, read
from torchring.observe.recorder.records import RankTrace, RunInfo, decode


def test_an_encoded_step_is_the_same_step_and_a_short_one_is_refused() -> None:
    for trace in simulate(3, 2, skew_ms=[0, 5, -7], ranks_per_host=1):
        for known in trace.steps:
            loading = {"loading_ns": 9, "loading_cpu_ns": 8, "num_workers": 2}
            step = dataclasses.replace(known, queued_ns=7, exposed_queued_ns=5, **loading)
            numbers = encode(step)
            assert decode(numbers) == step
            for length in (0, 12, 13, len(numbers) - 1):
                with pytest.raises(ValueError, match=r"cut short|to unpack"):
                    decode(numbers[:length])


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    traces = simulate(3, 4, skew_ms=[0, 5, -7], ranks_per_host=1)
    empty = RankTrace(RunInfo(rank=7), samples=((3, 0, "train.py:30 (loss.item())"),))
    for trace in (*traces, empty):
        write(tmp_path / "new", trace)
    assert {rank: read(path) for rank, path in find(tmp_path / "new").items()} == dict(enumerate(traces)) | {7: empty}
    assert len(list((tmp_path / "new").iterdir())) == 4  # nothing unfinished is left


def test_a_torn_file_and_another_format_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, simulate(1, 20)[0])
    whole = path.read_bytes()
    rng = random.Random(1)
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(10))):
        path.write_bytes(whole[:length])
        with pytest.raises(TraceError, match=path.name):
            read(path)
    with pytest.raises(TraceError, match="No such file"):
        read(tmp_path / "rank-00009.npz")
    run_info = f'{{"format": {FORMAT + 1}, "versions": {{"torchring": "9.9"}}, "novelty": 1}}'
    np.savez(path_of(tmp_path, 0), about=np.frombuffer(run_info.encode(), np.uint8))
    with pytest.raises(TraceError, match=r"torchring 9\.9, in another format"):
        read(path_of(tmp_path, 0))


def test_text_of_a_trace_gives_a_terminal_no_orders(tmp_path: Path) -> None:
    trace = simulate(1, 1)[0]
    parameters = tuple(each._replace(name="\x1b]0;title\x07") for each in trace.run_info.parameters)
    named = with_facts(trace, host="\x1b[31mred\u202e", options={"a\nb": "\udcff"}, parameters=parameters)
    read_again = read(write(tmp_path, named)).run_info
    assert (read_again.host, read_again.options) == ("\ufffd[31mred\ufffd", {"a b": "\ufffd"})
    assert read_again.parameters[0].name == "\ufffd]0;title\ufffd"
