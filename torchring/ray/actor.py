"""The actor that is a rank. It imports PyTorch only if the function does, or if it hosts the store."""

import importlib
import os
import sys

import ray
from ray import cloudpickle

from torchring.launch.task import make_call
from torchring.rendezvous.environment import CHOICE


class Rank:
    """A process of its own, in which the function is called. Ray puts `repr` before what the process prints."""

    def __init__(self, environ: dict[str, str]) -> None:
        # A launcher, or TORCHRING_LAUNCHER=none, may have been set where the Ray node was started.
        os.environ.update(environ, **{CHOICE: "torchrun"})

    def __repr__(self) -> str:
        return f"rank {os.environ['RANK']}"

    def host_store(self, is_one_node: bool) -> tuple[str, str]:
        """Listen where the ranks will meet, on a port that this process keeps from then on.

        Returns MASTER_ADDR and MASTER_PORT: on loopback if all ranks are on this node, else on all interfaces.
        """
        from torchring.rendezvous.store import host  # imports torch

        importlib.import_module("torchring.alone")  # before the function can make a DDP: counts modules of that kind

        # torchring.init() and init_process_group() host their store at this port: in this process, that is this store.
        self._store = host(is_one_node)
        return "127.0.0.1" if is_one_node else ray.util.get_node_ip_address(), str(self._store.port)

    def call(self, master: tuple[str, str], pickled: bytes) -> bytes:
        """Call the function. Returns what it returns, pickled."""
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = master
        returned = make_call(cloudpickle.dumps, pickled, repr(self))
        # This process lives on until the other ranks have returned, too, and Ray ends it without exit handlers.
        if "torchring.default_world" in sys.modules:
            sys.modules["torchring.default_world"].leave("its function had returned")
        if os.environ["RANK"] == "0":
            importlib.import_module("torchring.alone").say_if_alone(has_watched=True)
        return returned
