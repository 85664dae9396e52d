"""Shard map: where each checkpoint tensor lies in the trainer.

Every rank states which boxes of which checkpoint tensors it holds, and at which byte of which of its arenas
(:func:`describe_rank`, no communication). One all-gather when engines are connected makes the map global
(:func:`merge`). It stays valid until an arena moves; then only that arena's handle is sent again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from vime.errors import WeightSyncError
from vime.types import Slot
from vime.weight_sync.arena import Handle, Stamp, arena_of
from vime.weight_sync.boxes import Box, Ints, Region, box_shape
from vime.weight_sync.columns import pack, unpack


class Piece(Protocol):
    """A box of a checkpoint tensor inside a trainer parameter (vime.models.layout has the real one)."""

    @property
    def tensor(self) -> str: ...
    @property
    def box(self) -> Box: ...
    @property
    def chunk(self) -> int: ...
    @property
    def param(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def strides(self) -> Ints: ...


@dataclass(frozen=True)
class TensorInfo:
    """A checkpoint tensor: its shape, and the dtype in which the trainer holds it."""

    shape: Ints
    dtype: str  # "bfloat16", "float32", ...


@dataclass(frozen=True)
class RankInfo:
    """What a worker must know of a trainer rank to read from it."""

    rank: int
    node: str
    device: str  # the physical device; a worker on the same one is its neighbour
    stamp: Handle
    arenas: list[Handle]


@dataclass(frozen=True)
class Entry:
    """One box, on one rank. ``region`` counts in elements from ``offset`` bytes into the arena."""

    rank: int
    arena: int
    offset: int
    region: Region


_FIXED = 4  # columns before the boxes: tensor, rank, arena, offset in bytes


@dataclass(frozen=True)
class ShardMap:
    """All boxes of all checkpoint tensors on the ranks in ``ranks``.

    ``entries`` is int64 [boxes, 4 + 3 * dims]: tensor number, rank, arena number, byte offset, then per dimension the
    starts, the stops and the strides in elements (dimensions that a tensor lacks: 0, 1, 0). Python objects for a
    hundred thousand boxes would take longer to build than the sync takes to run.
    """

    tensors: dict[str, TensorInfo]
    ranks: dict[int, RankInfo]
    entries: np.ndarray

    @property
    def dims(self) -> int:
        return (self.entries.shape[1] - _FIXED) // 3

    def to_json(self) -> dict[str, Any]:
        return {
            "names": list(self.tensors),
            "shapes": [info.shape for info in self.tensors.values()],
            "dtypes": _runs([info.dtype for info in self.tensors.values()]),
            "ranks": [vars(info) for info in self.ranks.values()],
            "dims": self.dims,
            "entries": pack(self.entries.T),
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> ShardMap:
        dtypes = [dtype for dtype, count in data["dtypes"] for _ in range(count)]
        infos = (TensorInfo(tuple(shape), dtype) for shape, dtype in zip(data["shapes"], dtypes, strict=True))
        ranks = [RankInfo(**info) for info in data["ranks"]]
        return ShardMap(
            tensors=dict(zip(data["names"], infos, strict=True)),
            ranks={info.rank: info for info in ranks},
            entries=np.ascontiguousarray(unpack(data["entries"], _FIXED + 3 * data["dims"], -1).T),
        )

    def nearest(self, slot: Slot | None, node: str) -> ShardMap:
        """The part that an engine may read: of each box the replicas in its slot, else those on its node, else all."""
        rank, group = self.entries[:, 1], self._boxes()
        on_node = np.array([info.rank for info in self.ranks.values() if info.node == node], dtype=np.int64)
        distance = np.where(np.isin(rank, on_node), 1, 2)
        if slot is not None:
            distance[(rank >= slot.start) & (rank < slot.end)] = 0
        closest = np.full(len(self.entries), 2)
        np.minimum.at(closest, group, distance)
        kept = self.entries[distance == closest[group]]
        used = set(kept[:, 1].tolist())
        return replace(self, entries=kept, ranks={r: info for r, info in self.ranks.items() if r in used})

    def on_gpu(self, gpu: str) -> list[int]:
        """Ranks whose weights are on this physical GPU."""
        return [info.rank for info in self.ranks.values() if any(handle.get("device") == gpu for handle in info.arenas)]

    def first_holders(self, rank: int) -> list[bool]:
        """For each of a rank's boxes, in its order: whether no lower rank holds the same box."""
        group = self._boxes()
        lowest = np.full(len(self.entries), np.iinfo(np.int64).max)
        np.minimum.at(lowest, group, self.entries[:, 1])
        return (lowest[group] == rank)[self.entries[:, 1] == rank].tolist()

    def _boxes(self) -> np.ndarray:
        """Per entry a number that entries of the same box of the same tensor share."""
        keys = np.ascontiguousarray(np.delete(self.entries[:, : _FIXED + 2 * self.dims], (1, 2, 3), axis=1))
        _, group = np.unique(keys.view(np.dtype((np.void, keys.itemsize * keys.shape[1]))), return_inverse=True)
        return group.reshape(-1)

    def by_tensor(self) -> dict[str, list[Entry]]:
        """Tensor name -> its boxes."""
        names, found = list(self.tensors), {name: [] for name in self.tensors}
        ndim = [len(info.shape) for info in self.tensors.values()]
        starts, stops, strides = (slice(_FIXED + k * self.dims, _FIXED + (k + 1) * self.dims) for k in range(3))
        for row in self.entries.tolist():
            tensor, rank, arena, offset = row[:_FIXED]
            n = ndim[tensor]
            box = tuple(zip(row[starts][:n], row[stops][:n], strict=True))
            found[names[tensor]].append(Entry(rank, arena, offset, Region(box, 0, tuple(row[strides][:n]))))
        return found


def _runs(values: Sequence[str]) -> list[tuple[str, int]]:
    out: list[tuple[str, int]] = []
    for value in values:
        if out and out[-1][0] == value:
            out[-1] = (value, out[-1][1] + 1)
        else:
            out.append((value, 1))
    return out


def place(
    rank: int,
    node: str,
    device: str,
    named_params: Mapping[tuple[int, str], torch.Tensor],
    stamp: Stamp,
) -> tuple[RankInfo, dict[tuple[int, str], tuple[int, int]]]:
    """Where this rank's parameters are now: its arenas, and of each parameter (arena number, byte offset).

    Raises:
        ArenaError: a parameter that no other process could map.
    """
    numbers: dict[int, int] = {}  # an arena's address, which is its storage's -> its number
    handles: list[Handle] = []
    places: dict[tuple[int, str], tuple[int, int]] = {}
    for key, param in named_params.items():
        address = param.untyped_storage().data_ptr()
        if address not in numbers:  # looked up once per arena: this runs at every update
            numbers[address] = len(handles)
            handles.append(arena_of(param)[0].describe())
        places[key] = (numbers[address], int(param.storage_offset()) * param.element_size())
    return RankInfo(rank, node, device, stamp.arena.describe(), handles), places


def describe_rank(
    info: RankInfo,
    places: Mapping[tuple[int, str], tuple[int, int]],
    shapes: Mapping[str, Ints],
    pieces: Iterable[Piece],
    named_params: Mapping[tuple[int, str], torch.Tensor],
) -> dict[str, Any]:
    """This rank's part of the shard map, as JSON.

    Args:
        info, places: from :func:`place`.
        shapes: name -> shape of every checkpoint tensor, in the order that all ranks agree on.
        pieces: what this rank holds.
        named_params: (chunk, name) -> parameter, contiguous.

    Raises:
        KeyError, ValueError: pieces that do not fit the parameters; a fault in the model's layout rules.
    """
    numbers = {name: number for number, name in enumerate(shapes)}
    dims = max((len(shape) for shape in shapes.values()), default=0)
    dtypes: dict[str, str] = {}
    rows = []
    for piece in pieces:
        key = (piece.chunk, piece.param)
        param, (arena, offset) = named_params[key], places[key]
        dtype = str(param.dtype).removeprefix("torch.")
        if dtypes.setdefault(piece.tensor, dtype) != dtype:
            raise ValueError(f"{piece.tensor} is held as {dtypes[piece.tensor]} and as {dtype}")
        span = sum((n - 1) * stride for n, stride in zip(box_shape(piece.box), piece.strides, strict=True))
        if not param.is_contiguous() or piece.offset < 0 or piece.offset + span >= param.numel():
            raise ValueError(
                f"{piece.tensor} {piece.box} does not lie in parameter {piece.param} {tuple(param.shape)}, "
                f"strides {tuple(param.stride())}"
            )
        pad = dims - len(piece.box)
        rows.append(
            (
                *(numbers[piece.tensor], info.rank, arena, offset + piece.offset * param.element_size()),
                *(*(start for start, _ in piece.box), *(0,) * pad),
                *(*(stop for _, stop in piece.box), *(1,) * pad),
                *(*piece.strides, *(0,) * pad),
            )
        )
    entries = np.array(rows, dtype=np.int64).reshape(-1, _FIXED + 3 * dims)
    return {
        "rank": vars(info),
        "metadata": metadata_digest(shapes),
        "dtypes": _runs([dtypes.get(name, "") for name in shapes]),
        "dims": dims,
        "entries": pack(entries.T),
    }


def metadata_digest(shapes: Mapping[str, Ints]) -> str:
    return hashlib.sha256(json.dumps([(name, list(shape)) for name, shape in shapes.items()]).encode()).hexdigest()


def merge(parts: Sequence[dict[str, Any]], shapes: Mapping[str, Ints]) -> ShardMap:
    """The global map from every rank's part.

    Raises:
        WeightSyncError: the ranks do not agree on names, shapes or dtypes, or nobody holds a tensor. Every rank finds
            the same, since every rank has the same parts.
    """
    ranks = [RankInfo(**part["rank"]) for part in parts]
    mine = metadata_digest(shapes)
    digests = {info.rank: part["metadata"] for info, part in zip(ranks, parts, strict=True)}
    first = digests[ranks[0].rank]
    odd = [rank for rank, digest in digests.items() if digest != first]
    if odd or first != mine:
        raise WeightSyncError(
            "connect",
            f"trainer rank {odd[0] if odd else '?'}",
            f"its checkpoint tensors (names, order or shapes) differ from those of rank {ranks[0].rank}: "
            "all ranks must be built from the same checkpoint and flags",
        )
    dtypes: dict[str, tuple[str, int]] = {}
    for info, part in zip(ranks, parts, strict=True):
        held = [dtype for dtype, count in part["dtypes"] for _ in range(count)]
        for name, dtype in zip(shapes, held, strict=True):
            if not dtype:
                continue
            agreed, by = dtypes.setdefault(name, (dtype, info.rank))
            if agreed != dtype:
                raise WeightSyncError(
                    "connect", f"trainer rank {info.rank}", f"{name} is {dtype} here and {agreed} on rank {by}"
                )
    missing = [name for name in shapes if name not in dtypes]
    if missing:
        raise WeightSyncError("connect", "the trainer", f"no rank holds {missing[0]} (and {len(missing) - 1} more)")
    entries = [unpack(part["entries"], _FIXED + 3 * part["dims"], -1).T for part in parts]
    return ShardMap(
        tensors={name: TensorInfo(tuple(shape), dtypes[name][0]) for name, shape in shapes.items()},
        ranks={info.rank: info for info in ranks},
        entries=np.ascontiguousarray(np.concatenate(entries)),
    )
