"""Copy program: shard map composed with load plan. The strided copies that one worker performs at every sync.

Each box that the engine wants is intersected with the boxes that trainer ranks hold, nearest replica first. Runs that
are neighbours in both memories become one copy. Made once when an engine is connected; independent of addresses, so it
survives an arena that moves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from vime.errors import WeightSyncError
from vime.weight_sync.boxes import Box, Ints, Region, box_shape, intersect, subtract
from vime.weight_sync.load_plan import LoadFill, LoadPlan
from vime.weight_sync.shard_map import Entry, ShardMap

Source = tuple[int, int]  # (trainer rank, number of the arena there)


@dataclass(frozen=True, slots=True)
class Copy:
    """``shape`` elements from an arena (bytes ``src_offset``, ``src_strides`` in elements of ``src_dtype``) to a
    parameter (``dst_offset`` and ``dst_strides`` in its elements). Size-1 dimensions are left out, and dimensions that
    are one run on both sides are joined."""

    source: Source
    src_offset: int
    src_dtype: torch.dtype
    src_strides: Ints
    param: str
    dst_offset: int
    dst_strides: Ints
    shape: Ints
    tensor: str  # the checkpoint tensor; of joined copies the first one

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def src_bytes(self) -> int:
        return self.numel * self.src_dtype.itemsize


@dataclass(frozen=True)
class CopyProgram:
    """Everything a worker does with a sync's bytes. Fills run first, then the copies, in any order."""

    copies: list[Copy]
    fills: list[LoadFill]

    @property
    def sources(self) -> list[Source]:
        return sorted({copy.source for copy in self.copies})

    def bytes_by_rank(self) -> dict[int, int]:
        """Trainer rank -> bytes read from it."""
        out: dict[int, int] = defaultdict(int)
        for copy in self.copies:
            out[copy.source[0]] += copy.src_bytes
        return dict(out)

    def split(self, ranks: Collection[int]) -> tuple[CopyProgram, list[Copy]]:
        """What can be read from these ranks' memory (with all fills), and the copies from other ranks."""
        near = [copy for copy in self.copies if copy.source[0] in ranks]
        return CopyProgram(near, self.fills), [copy for copy in self.copies if copy.source[0] not in ranks]

    def by_param(self) -> dict[str, CopyProgram]:
        """The program of each parameter."""
        parts: dict[str, CopyProgram] = {}
        for fill in self.fills:
            parts.setdefault(fill.param, CopyProgram([], [])).fills.append(fill)
        for copy in self.copies:
            parts.setdefault(copy.param, CopyProgram([], [])).copies.append(copy)
        return parts

    @staticmethod
    def union(parts: Mapping[str, CopyProgram], params: Iterable[str]) -> CopyProgram:
        """The program of some parameters together; those that nothing is written to count for nothing."""
        chosen = [parts[param] for param in params if param in parts]
        return CopyProgram([c for part in chosen for c in part.copies], [f for part in chosen for f in part.fills])


def compose(plan: LoadPlan, shards: ShardMap, neighbour: int, node: str) -> CopyProgram:
    """The program of one worker.

    Args:
        plan: where the worker wants things. Parameters with problems are left out.
        shards: where they are; :meth:`ShardMap.nearest` of the worker's engine.
        neighbour: the trainer rank on the worker's own device, preferred as a source; of a worker that has none, a
            number that spreads the reading.
        node: the worker's node, whose ranks are preferred to others.

    Raises:
        WeightSyncError: elements that no rank holds.
    """
    distance = {
        rank: (rank != neighbour, info.node != node, (rank - neighbour) % len(shards.ranks))
        for rank, info in shards.ranks.items()
    }
    entries = {name: _one_per_box(found, distance) for name, found in shards.by_tensor().items()}
    copies: list[Copy] = []
    for wanted in plan.copies:
        dtype = getattr(torch, shards.tensors[wanted.tensor].dtype)
        left = [wanted.region.box]
        for entry in entries[wanted.tensor]:
            remaining: list[Box] = []
            for box in left:
                common = intersect(box, entry.region.box)
                if common is None:
                    remaining.append(box)
                    continue
                copies.append(_copy(common, entry, dtype, wanted.tensor, wanted.param, wanted.region))
                remaining += subtract(box, entry.region.box)
            left = remaining
            if not left:
                break
        if left:
            raise WeightSyncError("connect", "the trainer", f"no rank holds {wanted.tensor} {left[0]}")
    return CopyProgram(_joined(copies), plan.fills)


def _one_per_box(entries: list[Entry], distance: Mapping[int, tuple[bool, bool, int]]) -> list[Entry]:
    """One replica of each box, nearest first. At equal distance workers go on to different ranks, so that they do not
    all read from the same one."""
    chosen: dict[Box, Entry] = {}
    for entry in sorted(entries, key=lambda entry: distance[entry.rank]):
        chosen.setdefault(entry.region.box, entry)
    return list(chosen.values())


def _copy(box: Box, entry: Entry, dtype: torch.dtype, tensor: str, param: str, target: Region) -> Copy:
    dims: list[tuple[int, int, int]] = []  # (size, source stride, destination stride), outermost first
    for n, s, d in zip(box_shape(box), entry.region.strides, target.strides, strict=True):
        if n == 1:
            continue
        dims.append((n, s, d))
    # Innermost last in the destination, whatever the order of the tensor's own dimensions (a transposing loader).
    dims.sort(key=lambda dim: -dim[2])
    joined: list[tuple[int, int, int]] = []
    for n, s, d in dims:
        if joined and joined[-1][1] == n * s and joined[-1][2] == n * d:
            joined[-1] = (joined[-1][0] * n, s, d)
        else:
            joined.append((n, s, d))
    return Copy(
        source=(entry.rank, entry.arena),
        src_offset=entry.offset + entry.region.position(box) * dtype.itemsize,
        src_dtype=dtype,
        src_strides=tuple(s for _, s, _ in joined),
        param=param,
        dst_offset=target.position(box),
        dst_strides=tuple(d for _, _, d in joined),
        shape=tuple(n for n, _, _ in joined),
        tensor=tensor,
    )


def _joined(copies: list[Copy]) -> list[Copy]:
    """Join copies that continue each other in both memories along their outermost dimension."""
    groups: dict[tuple, list[Copy]] = defaultdict(list)
    for copy in copies:
        groups[(copy.param, copy.source, copy.src_dtype, len(copy.shape))].append(copy)
    out: list[Copy] = []
    for group in groups.values():
        group.sort(key=lambda copy: copy.dst_offset)
        last = group[0]
        for copy in group[1:]:
            if _continues(last, copy):
                last = replace(last, shape=(last.shape[0] + copy.shape[0], *last.shape[1:]))
            else:
                out.append(last)
                last = copy
        out.append(last)
    return out


def _continues(a: Copy, b: Copy) -> bool:
    if not a.shape or a.shape[1:] != b.shape[1:]:
        return False
    if a.src_strides != b.src_strides or a.dst_strides != b.dst_strides:
        return False
    return (
        b.src_offset == a.src_offset + a.shape[0] * a.src_strides[0] * a.src_dtype.itemsize
        and b.dst_offset == a.dst_offset + a.shape[0] * a.dst_strides[0]
    )
