"""Copy table: a copy program in the form that one GPU kernel reads.

Every strided copy becomes *runs*: ``rows`` rows of ``length`` neighbouring elements, with one stride on either side.
Bound to addresses, runs are sorted into *batches* by the widest unit in which they can be moved (16 bytes wherever
addresses, lengths and strides allow it) and by the conversion they need. A batch is one kernel launch: a table of runs
and a list of equal *tiles*, each a range of units of one run. Almost every program is a single batch of 16-byte units.

Pure NumPy, so that all of it is tested without a GPU (test_copy_table.py executes tables byte by byte).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product

import numpy as np
import torch

from vime.weight_sync.program import Copy, CopyProgram, Source

TILE = 2048  # units per tile: 32 KiB of 16-byte units
CONVERTED = (torch.float32, torch.bfloat16, torch.float16)  # what the kernel converts between
_MOST_UNITS = 1 << 30  # per run: unit numbers are 32-bit in the kernel
_MOST_RUNS = 1 << 14  # per copy: one that needs more is left to torch
_UNITS = {16: ("int32", 4), 8: ("int64", 1), 4: ("int32", 1), 2: ("int16", 1), 1: ("int8", 1)}


@dataclass(frozen=True)
class Kind:
    """How a batch moves a unit: ``vector`` elements read as ``read``, written as ``write`` (names of Triton dtypes)."""

    read: str
    write: str
    vector: int


@dataclass(frozen=True)
class Batch:
    """One launch.

    ``runs`` is int64 [runs, 7]: source address, destination address, units in all, units per row, source stride,
    destination stride (between rows, in units), number of the copy in its program. Unit ``u`` of a run is unit
    ``u % units_per_row`` of row ``u // units_per_row``.
    """

    kind: Kind
    runs: np.ndarray

    def tiles(self, tile: int = TILE, origins: np.ndarray | None = None) -> np.ndarray:
        """int32 [tiles, 2]: run, first unit. The last tile of a run may reach over its end.

        ``origins``: int [runs], where a run comes from. Tiles of different origins take turns, or the kernel would copy
        all of one before any of the next: from its own GPU, with the links idle, and then from another, waiting.
        """
        counts = -(-self.runs[:, 2] // tile)
        run = np.repeat(np.arange(len(counts)), counts)
        first = (np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)) * tile
        found = np.stack([run, first], axis=1).astype(np.int32)
        return found if origins is None else found[taking_turns(origins[run])]

    def sizes(self) -> np.ndarray:
        """int [runs], bytes at the source."""
        return self.runs[:, 2] * unit_bytes(self.kind)[0]

    def pieces(self, least: int) -> np.ndarray:
        """bool [runs]: which are at least so many bytes in one piece on both sides, copied as they are."""
        as_they_are = self.kind.read == self.kind.write
        return as_they_are & (self.runs[:, 2] == self.runs[:, 3]) & (self.sizes() >= least)

    def tiled_like(self, other: Batch) -> bool:
        """Whether the tiles are the same. They do not depend on addresses."""
        return self.kind == other.kind and np.array_equal(self.runs[:, [2, 6]], other.runs[:, [2, 6]])


def taking_turns(groups: np.ndarray) -> np.ndarray:
    """An order in which the members of every group, in their own order, are spread evenly over the whole."""
    by_group = np.argsort(groups, kind="stable")
    _, counts = np.unique(groups, return_counts=True)
    if len(counts) == 1:
        return by_group
    member = np.arange(len(groups)) - np.repeat(np.cumsum(counts) - counts, counts)
    return by_group[np.argsort((member + 0.5) / np.repeat(counts, counts), kind="stable")]


@dataclass(frozen=True)
class Runs:
    """A program's runs, independent of addresses. One entry per run in every array; int64.

    ``source`` and ``param`` are numbers in ``sources`` and ``params``. ``src_offset`` is in bytes, all else in
    elements. ``others`` are the numbers of copies that are not made of few enough runs.
    """

    sources: list[Source]
    params: list[str]
    dtypes: list[torch.dtype]
    others: list[int]
    copy: np.ndarray
    source: np.ndarray
    param: np.ndarray
    dtype: np.ndarray
    src_offset: np.ndarray
    dst_offset: np.ndarray
    rows: np.ndarray
    length: np.ndarray
    src_stride: np.ndarray
    dst_stride: np.ndarray


_COLUMNS = [field.name for field in fields(Runs) if field.name not in ("sources", "params", "dtypes", "others")]


def find_runs(program: CopyProgram) -> Runs:
    """Take every copy of a program apart into runs."""
    sources = {source: number for number, source in enumerate(program.sources)}
    params = {name: number for number, name in enumerate(dict.fromkeys(copy.param for copy in program.copies))}
    dtypes = {dtype: number for number, dtype in enumerate(dict.fromkeys(copy.src_dtype for copy in program.copies))}
    entries: list[tuple[int, ...]] = []
    others: list[int] = []
    for number, copy in enumerate(program.copies):
        which = (number, sources[copy.source], params[copy.param], dtypes[copy.src_dtype])
        found = _runs_of(copy)
        if found is None:
            others.append(number)
        else:
            entries += [(*which, *run) for run in found]
    columns = np.ascontiguousarray(np.array(entries, dtype=np.int64).reshape(-1, len(_COLUMNS)).T)
    named = dict(zip(_COLUMNS, columns, strict=True))
    return Runs(list(sources), list(params), list(dtypes), others=others, **named)


def _runs_of(copy: Copy) -> list[tuple[int, ...]] | None:
    """(source offset in bytes, destination offset, rows, length, source stride, destination stride) of each run."""
    dims = [dim for dim in zip(copy.shape, copy.src_strides, copy.dst_strides, strict=True) if dim[0] != 1]
    if any(n == 0 for n, _, _ in dims):
        return []
    length = dims.pop()[0] if dims and dims[-1][1:] == (1, 1) else 1
    rows = dims.pop(max(range(len(dims)), key=lambda k: dims[k][0])) if dims else (1, 0, 0)
    if rows[1:] == (length, length):
        length, rows = length * rows[0], (1, 0, 0)
    count = 1
    for n, _, _ in dims:
        count *= n
    if count > _MOST_RUNS:
        return None
    size = copy.src_dtype.itemsize
    out = []
    for index in product(*(range(n) for n, _, _ in dims)):
        source = sum(i * s for i, (_, s, _) in zip(index, dims, strict=True))
        target = sum(i * d for i, (_, _, d) in zip(index, dims, strict=True))
        out.append((copy.src_offset + source * size, copy.dst_offset + target, rows[0], length, *rows[1:]))
    return out


def bind(
    runs: Runs,
    source_addresses: Sequence[int],
    param_addresses: Sequence[int],
    param_dtypes: Sequence[torch.dtype],
    most_units: int = _MOST_UNITS,
) -> tuple[list[Batch], list[int]]:
    """The batches at these addresses, and the numbers of the copies that torch must do.

    Args:
        source_addresses: first byte of each of ``runs.sources``.
        param_addresses: first element of each of ``runs.params``.
        param_dtypes: their dtypes.
        most_units: longer runs are cut.
    """
    others = list(runs.others)
    batches = []
    if not len(runs.copy):
        return batches, others
    src = np.array(source_addresses, dtype=np.int64)[runs.source] + runs.src_offset
    sizes = np.array([dtype.itemsize for dtype in param_dtypes], dtype=np.int64)[runs.param]
    dst = np.array(param_addresses, dtype=np.int64)[runs.param] + runs.dst_offset * sizes
    codes = {dtype: code for code, dtype in enumerate(dict.fromkeys([*runs.dtypes, *param_dtypes]))}
    names = list(codes)
    reads = np.array([codes[dtype] for dtype in runs.dtypes])[runs.dtype]
    writes = np.array([codes[dtype] for dtype in param_dtypes])[runs.param]
    for read, write in sorted({*zip(reads.tolist(), writes.tolist(), strict=True)}):
        mine = np.flatnonzero((reads == read) & (writes == write))
        parts = (runs.rows[mine], runs.length[mine], runs.src_stride[mine], runs.dst_stride[mine])
        if read == write:
            sorted_out = _by_width(names[read].itemsize, src[mine], dst[mine], *parts)
        elif names[read] in CONVERTED and names[write] in CONVERTED:
            sorted_out = _by_vector(names[read], names[write], src[mine], dst[mine], *parts)
        else:
            others += np.unique(runs.copy[mine]).tolist()
            continue
        for kind, chosen, scale in sorted_out:
            rows, length, src_stride, dst_stride = (part[chosen] for part in parts)
            number = mine[chosen]
            per_row = _scaled(length, scale)
            table = np.stack(
                [
                    *(src[number], dst[number], rows * per_row, per_row),
                    *(_scaled(src_stride, scale), _scaled(dst_stride, scale), runs.copy[number]),
                ],
                axis=1,
            )
            batches.append(Batch(kind, _cut(table, kind, most_units)))
    return batches, sorted(others)


Scale = tuple[int, int]  # elements times the first, divided by the second, are units


def _scaled(elements: np.ndarray, scale: Scale) -> np.ndarray:
    return elements * scale[0] // scale[1]


def _by_width(
    size: int,
    src: np.ndarray,
    dst: np.ndarray,
    rows: np.ndarray,
    length: np.ndarray,
    src_stride: np.ndarray,
    dst_stride: np.ndarray,
) -> Iterator[tuple[Kind, np.ndarray, Scale]]:
    """Copies without conversion, by the widest unit that divides everything."""
    together = src | dst | length * size | np.where(rows > 1, (src_stride | dst_stride) * size, 0) | 16
    width = together & -together
    for unit in (16, 8, 4, 2, 1):
        chosen = np.flatnonzero(width == unit)
        if len(chosen):
            name, vector = _UNITS[unit]
            yield Kind(name, name, vector), chosen, (size, unit)


def _by_vector(
    read: torch.dtype,
    write: torch.dtype,
    src: np.ndarray,
    dst: np.ndarray,
    rows: np.ndarray,
    length: np.ndarray,
    src_stride: np.ndarray,
    dst_stride: np.ndarray,
) -> Iterator[tuple[Kind, np.ndarray, Scale]]:
    """Converting copies: eight elements at a time where both sides are aligned, else one."""
    wide = ((src | dst) % 16 == 0) & (length % 8 == 0)
    wide &= (rows == 1) | ((src_stride | dst_stride) % 8 == 0)
    names = [str(dtype).removeprefix("torch.") for dtype in (read, write)]
    for vector, chosen in ((8, np.flatnonzero(wide)), (1, np.flatnonzero(~wide))):
        if len(chosen):
            yield Kind(names[0], names[1], vector), chosen, (1, vector)


def unit_bytes(kind: Kind) -> tuple[int, int]:
    """Bytes of a unit at the source and at the destination."""
    read, write = (getattr(torch, name).itemsize for name in (kind.read, kind.write))
    return read * kind.vector, write * kind.vector


def _cut(table: np.ndarray, kind: Kind, most: int) -> np.ndarray:
    """Runs of at most ``most`` units."""
    if (table[:, 2] <= most).all():
        return table
    from_bytes, to_bytes = unit_bytes(kind)
    out = []
    waiting = table.tolist()
    while waiting:
        src, dst, total, per_row, src_stride, dst_stride, copy = run = waiting.pop()
        if total <= most:
            out.append(run)
            continue
        if total == per_row:  # one row: a shorter one, and the rest of it
            head, skip_src, skip_dst = most, most, most
            rest = [total - head, per_row - head]
            first = [head, head]
        else:
            lines = max(most // per_row, 1)
            head, skip_src, skip_dst = lines * per_row, lines * src_stride, lines * dst_stride
            rest, first = [total - head, per_row], [head, per_row]
        strides = [src_stride, dst_stride, copy]
        waiting.append([src + skip_src * from_bytes, dst + skip_dst * to_bytes, *rest, *strides])
        waiting.append([src, dst, *first, *strides])
    return np.array(out, dtype=np.int64)
