"""Who is missing, in words. Pure functions of what flight recorders say."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from torchring.errors import ranks_in_words
from torchring.observe.flight_recorder.entries import CurrentWait, RankState
from torchring.observer import Phase

_MOST_NAMED: Final = 8
_IN_WORDS: Final = {
    Phase.FORWARD: "in forward",
    Phase.BACKWARD: "in backward",
    Phase.EXPOSED: "in backward",
    Phase.OPTIMIZER: "in step()",
}
_OUTSIDE: Final = "outside of forward, backward and step()"
_LONG_WAIT: Final = 0.1  # of the limit: a shorter wait of another rank may be a moment of its normal work


class Peer(NamedTuple):
    """Another rank, as far as this rank knows."""

    state: RankState | None  # None if the rank has not told anything yet
    is_stopped: bool = False  # SIGSTOP or a debugger has stopped the process
    is_silent: bool = False  # the rank has shown no sign of life for longer than is normal
    message_age: float | None = None  # seconds since a rank of another host sent its last message; None on this host


def missing_ranks(wait: CurrentWait, peers: Mapping[int, Peer]) -> list[int]:
    """The ranks that keep this rank waiting.

    These are the ranks that have not begun the operation. If all ranks have begun it: those whose signal is missing. A
    rank that has begun a bucket may also compute elsewhere, or may have been stopped since.
    """
    if not wait.key:
        return sorted(wait.awaited)
    behind, unfinished = [], []
    for rank, peer in sorted(peers.items()):
        entry = peer.state.entries.get(wait.key) if peer.state is not None else None
        if entry is None or entry.num_begun <= wait.position:
            behind.append(rank)
        elif entry.num_finished <= wait.position and (not entry.waits or peer.is_stopped or peer.is_silent):
            unfinished.append(rank)
    return behind or sorted(wait.awaited) or unfinished


def describe_wait(
    rank: int, wait: CurrentWait, peers: Mapping[int, Peer], seconds: float, limit: float, own: int = -1
) -> str:
    """The warning of a rank that has waited for `seconds`. `own`: its number in the job."""
    missing = missing_ranks(wait, peers)
    head = f"rank {rank} has waited for {duration(seconds)} in {wait.wait}"
    if not missing:
        return f"{head}. All ranks have come there: the transfer is slow, or the network is cut"
    text = f"{head} for {ranks_in_words(missing)}. {describe_ranks(missing, peers, own)}"
    waits = [peer.state.waits if peer.state is not None else None for peer in peers.values()]
    can_run = not any(peer.is_stopped or peer.is_silent for peer in peers.values())
    is_here = all(peer.state is not None and peer.state.awaits is None for peer in peers.values())
    if can_run and is_here and all(other is not None and other[1] >= _LONG_WAIT * limit for other in waits):
        text += (
            ". All ranks wait, in different operations, so none of them can go on: let every rank call the same "
            "operations in the same order"
        )
    return text


def describe_ranks(ranks: Sequence[int], peers: Mapping[int, Peer], own: int = -1) -> str:
    """Say what each rank did last, a sentence each; and whether it waits for this one, rank `own` of the job."""
    found = {rank: peers.get(rank, Peer(None)) for rank in ranks[:_MOST_NAMED]}
    sentences = [_describe(rank, peer) for rank, peer in found.items()]
    if crossing := [
        rank for rank, peer in found.items() if peer.state is not None and own in (peer.state.awaits or ())
    ]:
        sentences.append(
            f"{ranks_in_words(crossing).capitalize()} and this rank wait for each other, in two groups, so none can go "
            "on: let every rank use its groups in the same order"
        )
    return ". ".join(sentences)


def _describe(rank: int, peer: Peer) -> str:
    state = peer.state
    if state is None:
        return f"Rank {rank} has not said yet what it is doing"
    text = f"Rank {rank} (pid {state.pid})"
    if peer.message_age is not None and peer.message_age >= 1.0:
        text += f", last heard of {duration(peer.message_age)} ago,"
    is_old = peer.message_age is not None and peer.is_silent  # what the rank does by now is not known
    if state.waits is not None:
        what, seconds = state.waits
        had_waited = f"had then waited for {duration(seconds - (peer.message_age or 0.0))}"
        text += f" itself {had_waited if is_old else f'has waited for {duration(seconds)}'} in {what}"
    elif is_old:
        text += f" was then {_IN_WORDS.get(state.phase, _OUTSIDE)}, in step {state.step}"
    else:
        text += f" has been {_IN_WORDS.get(state.phase, _OUTSIDE)} for {duration(state.age)}, in step {state.step}"
    if state.call_site:
        text += f", at {state.call_site}"
    if peer.is_stopped:
        text += "; its process is stopped (SIGSTOP, Ctrl-Z or a debugger)"
    if state.last_seen is not None and (peer.is_silent or peer.is_stopped):
        text += f"; it has shown no sign of life for {duration(state.last_seen)}"
    return text


def duration(seconds: float) -> str:
    """Seconds in words."""
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
