"""The exceptions of Horovod's API, under Horovod's names. `horovod.common.exceptions` has the originals."""

from torchring.errors import HorovodInternalError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """The hosts of the job have changed, or are about to. Raised at a commit, on all ranks at the same one.

    With `skip_sync`, hosts were only removed: the ranks that stay agree already.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync

    def __str__(self) -> str:
        return "the hosts of the job have changed"


class HorovodVersionMismatchError(ImportError):
    """A framework has another version than the one that Horovod was built for. torchring never raises it: the name is
    for scripts that catch it."""
