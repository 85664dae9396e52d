"""Boxes of a checkpoint tensor, and where in some memory a box lies.

A *box* is an axis-aligned block of a tensor: one half-open interval per dimension. Trainer and engine each cut a
checkpoint tensor into boxes in their own way; where two boxes overlap, bytes go from one to the other. That is all a
weight sync is, so everything else here is bookkeeping around :func:`intersect`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]  # [start, stop) per dimension; () is the one element of a scalar
Ints = tuple[int, ...]


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def box_shape(box: Box) -> Ints:
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    count = 1
    for start, stop in box:
        count *= stop - start
    return count


def intersect(a: Box, b: Box) -> Box | None:
    """The common part; None where there is none. Both boxes belong to the same tensor."""
    common = []
    for (a_start, a_stop), (b_start, b_stop) in zip(a, b, strict=True):
        start, stop = max(a_start, b_start), min(a_stop, b_stop)
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)


def subtract(a: Box, b: Box) -> list[Box]:
    """``a`` without ``b``, as disjoint boxes (at most two per dimension)."""
    common = intersect(a, b)
    if common is None:
        return [a]
    rest, inner = [], list(a)
    for dim, ((start, stop), (from_, to)) in enumerate(zip(a, common, strict=True)):
        for low, high in ((start, from_), (to, stop)):
            if low < high:
                rest.append((*inner[:dim], (low, high), *inner[dim + 1 :]))
        inner[dim] = (from_, to)  # what is left is cut along the next dimension
    return rest


def contiguous_strides(shape: Sequence[int]) -> Ints:
    """Strides in elements of a row-major tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a checkpoint tensor lying in some memory: element ``i`` of the tensor (an index per dimension, inside
    the box) is at ``offset + sum((i[d] - box[d].start) * strides[d])``, counted in elements of that memory."""

    box: Box
    offset: int
    strides: Ints

    def position(self, part: Box) -> int:
        """Where the first element of ``part``, a box inside this one, lies."""
        return self.offset + sum(
            (start - mine) * stride for (start, _), (mine, _), stride in zip(part, self.box, self.strides, strict=True)
        )


def regions_of_view(
    shape: Sequence[int], size: Sequence[int], stride: Sequence[int], offset: int, dst_stride: Sequence[int], dst: int
) -> list[Region] | None:
    """Turn a recorded copy "view of the checkpoint tensor -> view of a parameter" into regions of the parameter.

    Args:
        shape: the checkpoint tensor's (row-major).
        size, stride, offset: the source view, as torch reports it.
        dst_stride, dst: strides and storage offset of the destination view, which has the same size.

    Narrowing, transposing, squeezing and reshaping all come down to this. Returns None where the view is not made of
    boxes (a broadcast) or of more than a few thousand.
    """
    dims = _merged([(n, s, d) for n, s, d in zip(size, stride, dst_stride, strict=True) if n != 1])
    steps = contiguous_strides(shape)
    first = [offset // step % n for n, step in zip(shape, steps, strict=True)] if offset else [0] * len(shape)
    spans = [(start, start + 1) for start in first]
    strides = [0] * len(shape)
    taken: set[int] = set()
    for number, (count, source_step, step) in enumerate(dims):
        dim = next((k for k, n in enumerate(shape) if n != 1 and steps[k] == source_step), None)
        if dim is None or dim in taken:
            return _unrolled(shape, dims, number, offset, dst)
        while count > 1:  # a view dimension may run over several dimensions of the tensor, innermost first
            if dim < 0 or dim in taken:
                return _unrolled(shape, dims, number, offset, dst)
            taken.add(dim)
            start, n = first[dim], shape[dim]
            if start + count <= n:
                spans[dim], strides[dim], count = (start, start + count), step, 1
            elif start == 0 and count % n == 0:
                spans[dim], strides[dim], count, step = (0, n), step, count // n, step * n
                dim -= 1
                while dim >= 0 and shape[dim] == 1:
                    dim -= 1
            else:
                return _unrolled(shape, dims, number, offset, dst)
    return [Region(tuple(spans), dst, tuple(strides))]


def _merged(dims: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Join neighbouring dimensions that are one run in both views, outermost first."""
    out: list[tuple[int, int, int]] = []
    for n, s, d in dims:
        if out and out[-1][1] == n * s and out[-1][2] == n * d:
            out[-1] = (out[-1][0] * n, s, d)
        else:
            out.append((n, s, d))
    return out


_MOST_REGIONS = 4096


def _unrolled(
    shape: Sequence[int], dims: list[tuple[int, int, int]], number: int, offset: int, dst: int
) -> list[Region] | None:
    """One dimension of the view taken index by index: what is left may be boxes (a stacked [E * I, H] seen as
    [E, I, H] and written with other strides)."""
    for outer in sorted(range(len(dims)), key=lambda k: (k != number, -dims[k][1])):
        count, source_step, step = dims[outer]
        if source_step == 0:  # a broadcast
            return None
        rest = dims[:outer] + dims[outer + 1 :]
        sizes, sources, targets = [[dim[column] for dim in rest] for column in range(3)]
        found: list[Region] = []
        for index in range(count):
            part = regions_of_view(shape, sizes, sources, offset + index * source_step, targets, dst + index * step)
            if part is None or len(found) + len(part) > _MOST_REGIONS:
                break
            found += part
        else:
            return found
    return None
