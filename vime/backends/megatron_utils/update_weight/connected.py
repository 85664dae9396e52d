"""The engines that a trainer is connected to, as every rank knows them; and which rank talks to each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vime.backends.megatron_utils.update_weight.channels import Members
from vime.types import EngineAddress


@dataclass
class Engine:
    """What every rank knows of a connected engine."""

    address: EngineAddress
    problems: dict[str, str]  # parameters that cannot be planned: then the bucketed path serves the engine
    wanted: list[list[int]]  # of each worker the ranks that must send to it
    apart: bool  # it cannot open the leader's memory, so buckets are sent to it as well
    proven: bool = False  # its planned and its bucketed update have left the same bytes
    channel: bool = False  # open
    untold: dict[int, dict[str, Any]] = field(default_factory=dict)  # rank -> its new arenas, until it knows of them

    @property
    def members(self) -> Members:
        ranks = {rank for worker in self.wanted for rank in worker} | ({leader(self.address)} if self.apart else set())
        return Members(sorted(ranks), self.address.world_size)


def leader(address: EngineAddress) -> int:
    """The rank that talks to an engine: the lowest global rank of its slot; rank 0 where it has none."""
    return address.slot.leader if address.slot is not None else 0
