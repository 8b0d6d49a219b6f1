"""A rank of an `MpiJob`, as mpirun sees it: stands for a process forked from one that has imported torch already.

Tells the server of `mpi_job` its environment, passes signals on, and ends as the forked process ends. Should this
process be killed, the server kills the forked one. Imports little: it starts in a hundredth of the time.
"""

import os
import signal
import socket
import struct
import sys

NUMBER = struct.Struct("i")


def main() -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.connect("\0" + os.environ["TESTS_FORKS"])
        environ = "\0".join(f"{name}={value}" for name, value in os.environ.items()).encode()
        socket.send_fds(server, [NUMBER.pack(len(environ))], [1, 2])
        server.sendall(environ)
        signal.signal(signal.SIGUSR1, lambda number, _: server.sendall(NUMBER.pack(number)))
        (status,) = NUMBER.unpack(server.recv(NUMBER.size, socket.MSG_WAITALL))
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main()
