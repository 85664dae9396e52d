"""Copy tables, executed unit by unit over plain bytes, against torch's own strided copies."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.weight_sync.copy_table import Batch, Kind, bind, find_runs, unit_bytes
from vime.weight_sync.program import Copy, CopyProgram

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.uint8, torch.int64)
SPAN = 1 << 16  # bytes of each memory: 16 x 16 x 1 x 1 elements of 8 bytes with the widest gaps need 36 kB


def execute(batches, memory: torch.Tensor) -> None:
    """What the kernel does, one unit at a time. Addresses are offsets into ``memory``."""
    for batch in batches:
        read, write = unit_bytes(batch.kind)
        seen = set()
        for run, first in batch.tiles(TILE).tolist():
            src, dst, total, per_row, src_stride, dst_stride, _ = batch.runs[run].tolist()
            for unit in range(first, min(first + TILE, total)):
                assert (run, unit) not in seen
                seen.add((run, unit))
                row, column = divmod(unit, per_row)
                start = src + (row * src_stride + column) * read
                stop = dst + (row * dst_stride + column) * write
                assert math.gcd(start, 16) >= min(read, 16)
                assert math.gcd(stop, 16) >= min(write, 16)
                source, target = memory[start : start + read], memory[stop : stop + write]
                if batch.kind.read == batch.kind.write:
                    target.copy_(source)
                else:
                    converted = source.view(getattr(torch, batch.kind.read)).to(getattr(torch, batch.kind.write))
                    target.copy_(converted.view(torch.uint8))
        assert len(seen) == batch.runs[:, 2].sum()


TILE = 8


@st.composite
def strided(draw, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides under which no two elements share a place: an order of the dimensions, and gaps between them."""
    order = draw(st.permutations(range(len(shape))))
    if draw(st.booleans()):
        order = list(range(len(shape)))  # row-major, as nearly all copies are
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step = step * shape[dim] + draw(st.sampled_from([0, 0, 0, 1, 4, 8]))
    return tuple(strides)


@st.composite
def copies(draw) -> Copy:
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 8, 16]), max_size=4)))
    if math.prod(shape) > 300:
        shape = shape[:2]
    src_dtype = draw(st.sampled_from(DTYPES))
    return Copy(
        source=(0, 0),
        src_offset=draw(st.sampled_from([0, 16, 32, 8, 4, 24, 2, 1])) * src_dtype.itemsize,
        src_dtype=src_dtype,
        src_strides=draw(strided(shape)),
        param="p",
        dst_offset=draw(st.sampled_from([0, 16, 8, 3, 1])),
        dst_strides=draw(strided(shape)),
        shape=shape,
        tensor="t",
    )


@settings(max_examples=600, deadline=None)
@given(copies(), st.sampled_from((None, *DTYPES)), st.sampled_from([8, 1 << 30]), st.integers(0, 2**31))
def test_a_table_does_what_the_copy_says(copy: Copy, dst_dtype, most_units: int, seed: int) -> None:
    dst_dtype = dst_dtype or copy.src_dtype
    generator = torch.Generator().manual_seed(seed)
    memory = torch.zeros(2 * SPAN, dtype=torch.uint8)
    memory[:] = torch.randint(0, 256, memory.shape, generator=generator, dtype=torch.uint8)
    if copy.src_dtype.is_floating_point:  # whole numbers: conversions keep them, and there is no NaN
        whole = torch.randint(-99, 99, (SPAN // copy.src_dtype.itemsize,), generator=generator)
        memory[:SPAN] = whole.to(copy.src_dtype).view(torch.uint8)
    expected = memory.clone()
    source = expected[:SPAN].view(copy.src_dtype)
    source = source.as_strided(copy.shape, copy.src_strides, copy.src_offset // copy.src_dtype.itemsize)
    target = expected.view(dst_dtype)
    target = target.as_strided(copy.shape, copy.dst_strides, SPAN // dst_dtype.itemsize + copy.dst_offset)
    program = CopyProgram([copy], [])
    batches, others = bind(find_runs(program), [0], [SPAN], [dst_dtype], most_units)
    if others:
        assert dst_dtype != copy.src_dtype
        assert not batches
        return
    target.copy_(source)
    execute(batches, memory)
    assert torch.equal(memory, expected)


def _copy(number: int, shape, src_strides, dst_strides, src_offset=0, dst_offset=0, dtype=torch.bfloat16) -> Copy:
    return Copy((0, number), src_offset, dtype, src_strides, f"p{number}", dst_offset, dst_strides, shape, f"t{number}")


def test_whole_weights_are_one_batch_of_16_byte_units() -> None:
    program = CopyProgram(
        [_copy(0, (4096,), (1,), (1,)), _copy(1, (64, 768), (768, 1), (1536, 1)), _copy(2, (8,), (1,), (1,), 16, 8)], []
    )
    runs = find_runs(program)
    (batch,), others = bind(runs, [0, 1 << 20, 2 << 20], [1 << 30, 2 << 30, 3 << 30], [torch.bfloat16] * 3)
    assert batch.kind == Kind("int32", "int32", 4)
    assert batch.runs[:, 2].tolist() == [512, 64 * 96, 1]
    assert batch.runs[1].tolist() == [1 << 20, 2 << 30, 64 * 96, 96, 96, 192, 1]
    assert batch.tiles(4096).tolist() == [[0, 0], [1, 0], [1, 4096], [2, 0]]
    assert others == []


@pytest.mark.parametrize(("src", "dst", "unit"), [(0, 0, 16), (8, 0, 8), (0, 24, 8), (4, 8, 4), (2, 2, 2), (6, 16, 2)])
def test_the_unit_is_the_widest_that_divides_everything(src: int, dst: int, unit: int) -> None:
    runs = find_runs(CopyProgram([_copy(0, (4, 8), (64, 1), (128, 1))], []))
    ((batch,), _) = bind(runs, [src], [dst], [torch.bfloat16])
    assert unit_bytes(batch.kind) == (unit, unit)


def test_a_copy_of_several_outer_dimensions_becomes_several_runs() -> None:
    copy = _copy(0, (3, 5, 16), (1000, 32, 1), (800, 16, 1))
    ((batch,), _) = bind(find_runs(CopyProgram([copy], [])), [0], [1 << 20], [torch.bfloat16])
    assert batch.runs[:, 0].tolist() == [0, 2000, 4000]
    assert batch.runs[:, 6].tolist() == [0, 0, 0]


def test_copies_of_too_many_runs_are_left_to_torch() -> None:
    copy = _copy(0, (1 << 15, 1 << 15, 2), (1 << 18, 4, 1), (1 << 17, 2, 1))
    runs = find_runs(CopyProgram([copy, _copy(1, (8,), (1,), (1,))], []))
    batches, others = bind(runs, [0, 0], [1 << 40, 1 << 41], [torch.bfloat16] * 2)
    assert others == [0]
    assert [batch.runs[:, 6].tolist() for batch in batches] == [[1]]


def test_nothing_to_copy() -> None:
    assert bind(find_runs(CopyProgram([], [])), [], [], []) == ([], [])


def test_tiles_of_several_origins_take_turns() -> None:
    """Of a kernel that works through them in order, every stretch asks every origin for its share."""
    runs = np.array([[0, 0, units, units, 0, 0, number] for number, units in enumerate((400, 100, 400, 700))])
    batch, origins = Batch(Kind("int32", "int32", 4), runs), np.array([0, 1, 0, 2])
    in_order = batch.tiles(10).tolist()
    mixed = batch.tiles(10, origins).tolist()
    assert sorted(mixed) == sorted(in_order)
    for origin, share in ((0, 80), (1, 10), (2, 70)):
        mine = [at for at, (run, _) in enumerate(mixed) if origins[run] == origin]
        assert [mixed[at] for at in mine] == [tile for tile in in_order if origins[tile[0]] == origin]
        gaps = np.diff([-1, *mine, len(mixed)])
        assert gaps.max() <= 2 * -(-len(mixed) // share)
    assert batch.tiles(10, np.zeros(4, dtype=int)).tolist() == in_order


def test_tiles_cover_units_beyond_32_bits() -> None:
    copy = _copy(0, (1 << 33,), (1,), (1,), dtype=torch.uint8)
    ((batch,), _) = bind(find_runs(CopyProgram([copy], [])), [1], [1 << 40], [torch.uint8])
    assert batch.runs[:, 2].max() <= 1 << 30
    assert batch.runs[:, 2].sum() == 1 << 33
    assert np.array_equal(np.sort(batch.runs[:, 0]), 1 + np.arange(8) * (1 << 30))
