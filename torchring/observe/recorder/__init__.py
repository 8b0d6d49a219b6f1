"""Where the time of a step goes: each rank writes down its last 1,000 steps, and can write them to a file.

`records.py` says what is written down, as plain data. `recorder.py` gathers it while training runs, and `forward.py`
tells it of forwards, `process.py` of DataLoaders and of the garbage collector. `files.py` writes and reads one file per
rank, and `writer.py` says when. `clocks.py` finds out how far the clocks of hosts are apart.
"""
