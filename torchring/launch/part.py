"""What `torchring run` has one host do, as the agent there is told; apart from the agent, which imports torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from torchring.launch.output import OutputOptions


@dataclass(frozen=True)
class Part:
    """What this host has to do.

    Attributes:
        num_proc: number of ranks here.
        num_hosts, number: how many there are, and which one this is.
        host: its name, for messages.
        address, port: where the agents meet, if there are several hosts.
        output: what becomes of the ranks' output.
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
