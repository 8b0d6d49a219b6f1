"""The part of a launch that one host does. In a module of its own, because the agent's imports torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from torchring.launch.output import OutputOptions


@dataclass(frozen=True)
class Part:
    """The part of one host.

    Attributes:
        num_proc: number of ranks on this host.
        num_hosts, number: number of hosts, and the number of this host, 0 <= number < num_hosts.
        host: name of this host, for messages.
        address, port: where the agents meet, if there are several hosts.
        output: how to show the output of the ranks.
    """

    num_proc: int
    num_hosts: int
    number: int
    host: str
    address: str
    port: int
    output: OutputOptions

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Part:
        read = json.loads(text)
        return cls(**{**read, "output": OutputOptions(**read["output"])})
