"""Imported last by the server that ranks are forked from: keeps ranks from copying memory that they share with it."""

import atexit
import gc
import weakref

# A collection writes to each object that it looks at. What there is by now lives as long as the server.
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # else Triton reports what the server's end does not collect

# PyTorch takes each of its libraries apart at exit, which takes longer than most tests.
for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
    finalizer.atexit = False
