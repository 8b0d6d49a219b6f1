"""Stalls explained: a rank that waits for long says who is missing, and what the missing rank did last.

Each rank stamps a page of shared memory (`page.py`). A timer thread of each rank adds where the script is
(`places.py`), sends the page to ranks of other hosts, and warns if this rank waits for too long (`monitor.py`). Who is
missing follows from the pages alone (`report.py`). Training sends no message for this.
"""
