"""Stalls explained: a rank that waits for long says who is missing, and what the missing rank did last.

Each rank records what it does in shared memory (`entries.py`). A timer thread of each rank adds where the script is
(`call_sites.py`), sends all that to ranks of other hosts, and warns if this rank waits for too long (`monitor.py`). Who
is missing follows from these records alone (`stall_report.py`). Training sends no message for this.
"""
