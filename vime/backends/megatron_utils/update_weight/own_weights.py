"""A trainer rank's own parameters, as a weight update sees them: memory that others read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vime.models.layout import Piece
from vime.weight_sync.arena import Stamp, arena_of
from vime.weight_sync.boxes import Ints
from vime.weight_sync.program import Source
from vime.weight_sync.shard_map import RankInfo, describe_rank, place

Key = tuple[int, str]  # model chunk, parameter name in it


class OwnWeights:
    """Where a rank's parameters are, and whether they have moved.

    Args:
        rank: global trainer rank.
        device: its name, under which workers find this rank.
        memory: where parameters are, whether there are any or none.
        params: (chunk, name) -> parameter, contiguous, inside arenas (vime.weight_sync.arena.allocate).
    """

    def __init__(self, rank: int, device: str, memory: torch.device, params: Mapping[Key, torch.Tensor]) -> None:
        self.rank, self.device, self.params = rank, device, params
        self.memory = next((param.device for param in params.values()), memory)
        self.stamp = Stamp()
        self._addresses: list[int] = []  # of all parameters, when they were last placed
        self._first_in_arena: list[torch.Tensor] = []

    def describe(self, node: str, shapes: Mapping[str, Ints], pieces: Sequence[Piece]) -> dict[str, Any]:
        """This rank's part of the shard map."""
        info, places = place(self.rank, node, self.device, self.params, self.stamp)
        return describe_rank(info, places, shapes, pieces, self.params)

    def settle(self) -> None:
        """Wait until what was enqueued on the GPU has been written: other processes read it."""
        if self.params and self.memory.type == "cuda":
            torch.cuda.synchronize()

    def locate(self, node: str) -> RankInfo:
        """Where the parameters are. Unless one has moved, only the arenas are looked at (memory that was given up may
        have come back at the same address, as other memory): a MoE model has twenty thousand parameters."""
        addresses = list(map(torch.Tensor.data_ptr, self.params.values()))
        if addresses != self._addresses:
            info, places = place(self.rank, node, self.device, self.params, self.stamp)
            self._addresses, firsts = addresses, {}
            for key, (arena, _) in places.items():
                firsts.setdefault(arena, self.params[key])
            self._first_in_arena = [firsts[number] for number in range(len(firsts))]
            return info
        arenas = [arena_of(param)[0].describe() for param in self._first_in_arena]
        return RankInfo(self.rank, node, self.device, self.stamp.arena.describe(), arenas)

    def arenas(self) -> dict[Source, torch.Tensor]:
        """Those of the last :meth:`locate`, to send from."""
        return {(self.rank, n): arena_of(param)[0].tensor for n, param in enumerate(self._first_in_arena)}
