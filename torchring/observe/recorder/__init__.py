"""Where the time of a step goes: each rank records its last 1,000 steps, and can write them to a file.

`records.py` has the records, as plain data. `recorder.py` makes them while training runs, `recording.py` those of
reductions; `device_times.py` knows of a GPU's times. `files.py` writes and reads
one file per rank, and `writer.py` decides when. `clocks.py` compares the clocks of hosts.
"""
