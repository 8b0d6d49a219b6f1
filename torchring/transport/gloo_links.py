"""Closes Gloo's links, finds out whether a link is open, and drops a group: Gloo has no calls for these.

Each function uses a side effect of a call that Gloo does have. The comment in the function names the source file of the
side effect, of https://github.com/pytorch/gloo or of torch. Tests in tests/transport fail if a release of torch changes
one.
"""

import contextlib
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import Final

import torch
from torch.distributed import ProcessGroup as Backend

from torchring.threads import SerialThread

_CLOSING_TAG, _PROBE_TAG = 1, 2  # nobody ever sends with them
_CLOSING_SECONDS: Final = 0.5


def has_timed_out(failure: RuntimeError) -> bool:
    """True if a wait was too long, in this thread or in another thread."""
    # gloo/transport/tcp/unbound_buffer.cc: "Timed out waiting 1ms for recv operation to complete".
    # gloo/transport/tcp/pair.cc, and where Gloo connects: "timeout" in several texts.
    text = str(failure).lower()
    return "timed out" in text or "timeout" in text


def close_links(group: Backend, rank: int, size: int) -> None:
    """Close all sockets of `group`, although pending transfers refer to them. All waits, here and on peers, fail."""
    # gloo/transport/tcp/unbound_buffer.cc, waitRecv: a wait that times out closes the links to all peers. Neither
    # ProcessGroupGloo.abort() nor shutdown() closes a socket.
    for peer in range(size):
        if peer != rank:
            try:
                group.recv([_one_byte()], peer, _CLOSING_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as failure:  # something else where this link was closed already: try the next peer
                if has_timed_out(failure):
                    return


def find_failure(group: Backend, peer: int) -> RuntimeError | None:
    """The error if the link to `peer` is closed, so that nothing more can come. None if it is open.

    Tells the peer that this rank is ready to receive, which may cost the last bytes of a peer that has exited: its
    kernel answers with a reset. So ask only where the socket is not known (see `sockets.py`).
    """
    # gloo/transport/tcp/pair.cc, recv: throws if the link is closed. The receive is forgotten with the group.
    try:
        group.recv([_one_byte()], peer, _PROBE_TAG)
    except RuntimeError as failure:
        return failure.with_traceback(None)  # whose frames would keep the group
    return None


def drop(last: list[Backend]) -> None:
    """Drop the last reference to a group, which `last` holds. Returns when its sockets are closed, or soon."""
    # gloo/transport/tcp/pair.cc, ~Pair: the destructor closes the socket. torch/csrc/distributed/c10d/
    # ProcessGroupGloo.cpp, ~ProcessGroupGloo: waits for collectives, which may be in the middle of a message that does
    # not come. So the destructor gets a thread of its own, and only a moment.
    thread = SerialThread("torchring-closer")
    done = thread.submit(last.clear)
    del last
    with contextlib.suppress(FutureTimeout):
        done.result(_CLOSING_SECONDS)


def _one_byte() -> torch.Tensor:
    return torch.empty(1, dtype=torch.uint8, device="cpu")
