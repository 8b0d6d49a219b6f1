"""Finds out if PyTorch's symmetric memory can hand memory from one rank of a host to another.

Symmetric memory sends file descriptors through sockets. A socket is a file in the folder for temporary files, and is
named after the process number of the rank that receives (IpcChannel in PyTorch's CUDASymmetricMemoryUtils.cpp). So all
ranks need one folder, and one numbering of processes. Ranks in containers of their own often have neither. Then one
rank fails to send, and another waits for ever, because receiving has no timeout. So ranks compare beforehand.

With GPUs that exchange fabric handles (GB200) newer releases of PyTorch need no sockets. There, too, ranks must fulfil
these conditions here.
"""

import os
from collections.abc import Mapping
from typing import Final

_FOLDER_VARIABLES: Final = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")  # the first that is set counts, as for PyTorch
_LONGEST_NAME: Final = 107  # bytes of a socket's name; PyTorch copies a longer name over what comes behind it


def describe_handover() -> dict[str, str]:
    """The facts that the ranks exchange for `why_no_handover`.

    "processes" and "folder" identify the numbering of processes and the folder, on one host. "trouble" is the reason
    why this rank cannot have a socket, or "".
    """
    folder = next((os.environ[name] for name in _FOLDER_VARIABLES if name in os.environ), "/tmp")
    trouble = identity = processes = ""
    try:
        found = os.stat(folder)
        identity = f"{found.st_dev}:{found.st_ino}"
        processes = os.readlink("/proc/self/ns/pid")
    except OSError as error:
        trouble = str(error)
    if not trouble and not os.access(folder, os.W_OK | os.X_OK):
        trouble = f"{folder!r} is not writable"
    if len(os.fsencode(f"{folder}/symm_mem-{os.getpid()}")) > _LONGEST_NAME:
        trouble = f"{folder!r} is too long a name for a folder with sockets"
    return {"processes": processes, "folder": identity, "trouble": trouble}


def why_no_handover(ranks: Mapping[int, Mapping[str, str]]) -> str:
    """The reason why ranks of one host, with their `describe_handover()`, cannot hand each other memory; or ""."""
    first = next(iter(ranks), 0)
    for rank, theirs in ranks.items():
        if theirs["trouble"]:
            return f"rank {rank} has no folder for PyTorch's sockets: {theirs['trouble']}; set TMPDIR to another folder"
        if theirs["processes"] != ranks[first]["processes"]:
            return (
                f"ranks {first} and {rank} are in different PID namespaces, as containers are; start all ranks of a "
                "machine in one container, or give the containers one PID namespace (docker run --pid=host)"
            )
        if theirs["folder"] != ranks[first]["folder"]:
            return (
                f"ranks {first} and {rank} have different folders for temporary files; give them the same one (TMPDIR, "
                "or a volume that their containers share)"
            )
    return ""
